"""Files to read and to copy from: one step of GRPO from top to bottom, and a second task."""
import engine  # noqa: F401  before torch: it says how threads wait
