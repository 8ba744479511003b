"""Stop at the first number that is not finite.

A nan spreads from the credit of one token to the gradient, to every parameter, to every answer.
So the run stops; train.py adds which step it was and which flags to look at.
"""
import torch

from engine.errors import UserError
from engine.processes import holds_for_all, own_part


class NotFinite(UserError):
    """A number that a run works with is not finite."""


class NotFiniteCredit(NotFinite):
    """What a weighting or an advantage made of finite numbers is not."""


class BrokenModel(NotFinite):
    """What the model computes is not finite."""


def refuse_undefined(what: str, *tensors: torch.Tensor, kind=NotFinite) -> None:
    """Raise unless all tensors are finite, in all processes; `what` is "the gradient is", say."""
    is_defined = all(own_part(tensor).isfinite().all() for tensor in tensors)
    if not holds_for_all(is_defined, *tensors):
        raise kind(f"{what} not finite")
