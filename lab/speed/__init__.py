"""Speed and memory, measured: on a GPU, on a CPU, next to plain torch and to `transformers`.
README.md has the numbers."""
import lab.engine  # noqa: F401  before torch: it says how threads wait
