"""Programs that each answer one question about a model, a run or a method: one file, one command
`python -m lab NAME`. None of them trains more than a critic or a very small model."""
import lab.engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
