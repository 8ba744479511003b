"""Speed and memory, measured and counted."""
import engine  # noqa: F401  before torch: it says how threads wait
