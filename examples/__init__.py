"""Files to read and to copy from: one step of GRPO, a whole training, a second task; and an
exercise, to write the loss."""
import engine  # noqa: F401  before torch: it says how threads wait
