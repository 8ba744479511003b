"""Speed and memory, beside what the machine could do at most."""
import engine  # noqa: F401  before torch: it says how threads wait
