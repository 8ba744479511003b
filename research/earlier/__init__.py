"""Questions that have been answered. Each has its command, its test and its result. Nobody needs
them to learn, or to use the lab."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
