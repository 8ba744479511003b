"""Probes of a model, a run or a method, for who asks one question: a probe is one file and one
command, `python -m lab NAME`. Nothing here trains more than a critic or a very small model."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
