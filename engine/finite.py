"""Stop at the first number that is not finite.

A nan spreads: from the credit of one token to the gradient, from there to every parameter, and then
to every answer. What is measured after that says nothing, so no run goes on. train.py adds which
step it was and which flags to look at.
"""
import torch

from engine.errors import UserError
from engine.sharded import holds_for_all, own_part


class NotFinite(UserError):
    """A number that a run works with is not finite."""


class BrokenModel(NotFinite):
    """What the model computes is not finite."""


class BrokenChoice(NotFinite):
    """What a mitigation or an advantage computes is not finite."""


def refuse_undefined(what: str, *tensors: torch.Tensor, kind=NotFinite) -> None:
    """Every number of these tensors has to be finite; `what` is "the gradient is", say."""
    is_defined = all(own_part(tensor).isfinite().all() for tensor in tensors)
    if not holds_for_all(is_defined, *tensors):
        raise kind(f"{what} not finite")


def where_to_look(error: NotFinite, lab, run) -> str:
    """The error, how far the run came, which flags to look at, and what is left."""
    steps = run.last_step()
    if steps == 0 and isinstance(error, BrokenModel):
        return f"{error}, in the first step. Is {lab.folder} a sound model?"
    values = lab.credit_strengths()
    if steps > 0 or not isinstance(error, BrokenChoice):  # before the first update it is no cause
        values = {"learning_rate": lab.settings.learning_rate, **values}
    flags = ", ".join(f"--{name} {value:g}" for name, value in values.items())
    if steps == 0:
        return f"{error}, in the first step. Look at {flags or 'its code'}"
    way_on = "there is no checkpoint from before"
    checkpoints = run.checkpoints()
    if checkpoints:
        way_on = f"the last good checkpoint is {checkpoints[-1]}, --model can begin a new run there"
    return f"{error}. The last step on record is {steps}. Look at {flags}; {way_on}"
