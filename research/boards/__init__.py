"""Experiments that consist of training runs: arms by seeds, each compared with plain GRPO."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices, so that flags of a run are known
