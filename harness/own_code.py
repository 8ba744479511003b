"""Code that people write: a weighting, an advantage, a task. What it returns is checked before it
is used."""
from collections.abc import Callable
from copy import deepcopy
from reprlib import repr as brief

import torch

from engine.errors import NotFinite, UserError
from engine.rollouts import Rollouts


def expect(holds: Callable[[], bool], what: str, expected: str, value) -> None:
    """Stop unless somebody's code returned what is expected of it; a test that fails on the value
    counts as no."""
    try:
        fine = holds()
    except Exception:  # the value is no list, no tensor, ...: whatever the test needs
        fine = False
    if not fine:
        raise UserError(f"{what} should return {expected}, got {described(value)}")


def described(value) -> str:
    if torch.is_tensor(value):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    size = f" ({len(value)} entries)" if isinstance(value, (list, tuple)) else ""
    return " ".join(brief(value).split()) + size


def checked_credit(chosen, whose: str, rollouts: Rollouts, policy=None) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the weighting
    my_idea", say. It gets a copy of the batch: what it changes in place, nobody else reads."""
    shared = (rollouts.generator, rollouts.forward)
    values = chosen(deepcopy(rollouts, {id(part): part for part in shared}), policy)
    mask = rollouts.mask
    expect(lambda: fits_frame(values, mask), whose,
           f"a tensor (B, T) = {tuple(mask.shape)} of real numbers on {mask.device}", values)
    frame = torch.broadcast_to(values.detach().float(), mask.shape).masked_fill(~mask, 0.0)
    refuse_tokens(~frame.isfinite(), mask, f"{whose} is not finite", NotFinite)
    return frame


def fits_frame(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether it can be spread over (B, T). It may have a single row or column: a number for each
    answer is (B, 1), because (B,) would be spread over T."""
    (B, T), (rows, columns) = mask.shape, values.shape
    is_real = values.device == mask.device and not values.is_complex()
    return is_real and rows in (1, B) and columns in (1, T)


def refuse_tokens(wrong: torch.Tensor, mask: torch.Tensor, what: str, kind=UserError,
                  hint: str = "") -> None:
    """Stop where something is wrong with a token of the batch (B, T), and say where."""
    wrong = wrong & mask
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise kind(f"{what} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer "
                   f"{row}, token {t}{hint}")


def metrics_of(chosen) -> dict:
    """The metrics of a choice, as plain numbers for metrics.jsonl."""
    return {name: value.item() if hasattr(value, "item") else value  # of torch or numpy
            for name, value in getattr(chosen, "metrics", {}).items()}


def joined(*parts: dict) -> dict:
    """Numbers for one line of metrics.jsonl. Those of a weighting or an advantage may not take the
    place of others."""
    line = {}
    for part in parts:
        for name in line.keys() & part.keys():
            raise UserError(f"the metric {name} of a weighting or an advantage needs another name")
        line |= part
    return line
