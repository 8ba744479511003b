"""Weights and advantages that people write: what their functions return is checked."""
import inspect
from copy import deepcopy
from reprlib import repr as brief

import torch

from engine.choices import Method, Metrics
from engine.errors import BadCredit, UserError
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.record import PROJECT

LARGEST_CREDIT = 1e12  # the squares of its gradient, in float32, are still finite


def place_of(chosen: object) -> str:
    """mitigations.py:57, where somebody's function, class, or call of an instance begins."""
    made = inspect.unwrap(chosen) if callable(chosen) else chosen
    if not (inspect.isroutine(made) or inspect.isclass(made)):
        made = type(made).__call__
    try:
        file, line = inspect.getfile(made), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):  # typed into a shell
        return made.__module__
    return f"{file.removeprefix(f'{PROJECT}/')}:{line}"


def checked_credit(chosen: Method, whose: str, rollouts: Rollouts, policy: Policy | None = None,
                   is_weight: bool = False) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the weighting
    my_idea", say. It gets a copy of the batch: what it changes in place, nobody else reads. It may
    return a single row or column: (B, 1) for each answer, as (B,) would spread over T."""
    shared, mask = (rollouts.generator, rollouts.forward), rollouts.mask
    values = chosen(deepcopy(rollouts, {id(part): part for part in shared}), policy)
    if not fits_frame(values, mask):
        about = " ".join(brief(values).split())[:200]
        if isinstance(values, torch.Tensor):
            about = f"a tensor {tuple(values.shape)} of {values.dtype} on {values.device}"
        raise UserError(f"{whose} ({place_of(chosen)}) should return a tensor (B, T) = "
                        f"{tuple(mask.shape)} of real numbers on {mask.device}, got {about}")
    frame = values.detach().float().expand(mask.shape).masked_fill(~mask, 0.0)
    too_large = f"{whose} is not finite, or beyond {LARGEST_CREDIT:g},"
    refuse_tokens(~(frame.abs() <= LARGEST_CREDIT), too_large, mask, place_of(chosen), BadCredit)
    if is_weight:
        refuse_tokens(frame < 0, f"{whose} is negative", mask, f"{place_of(chosen)}; credit with a "
                      "sign is an advantage: see docs/weightings.md")
    return frame


def fits_frame(values: torch.Tensor, mask: torch.Tensor) -> bool:
    if not isinstance(values, torch.Tensor) or values.dim() != 2 or values.is_complex():
        return False
    (B, T), (rows, columns) = mask.shape, values.shape
    return rows in (1, B) and columns in (1, T) and values.device == mask.device


def refuse_tokens(wrong: torch.Tensor, what: str, mask: torch.Tensor, place: str,
                  kind: type[UserError] = UserError) -> None:
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise kind(f"{what} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer "
                   f"{row}, token {t} ({place})")


def metrics_of(chosen: object) -> Metrics:
    return {name: value.item() if hasattr(value, "item") else value  # of torch or numpy
            for name, value in getattr(chosen, "metrics", {}).items()}
