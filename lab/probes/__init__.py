"""Probes of a model and its task: one probe a command, `python -m lab NAME`."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
