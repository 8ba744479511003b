"""What is true of the model and its task, measured: one probe a file, `python -m research NAME`."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
