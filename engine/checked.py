"""What a mitigation or an advantage returns is checked before it is used: it may be somebody's new
idea, and a new idea may be wrong. Each mistake is said in one line."""
import torch

from engine.errors import UserError
from engine.finite import NotFinite
from engine.rollouts import Rollouts


def call_choice(chosen, whose: str, tokens: Rollouts, lab=None) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the mitigation
    my_idea", say. The batch must stay as it was: others read it afterwards."""
    fields = vars(tokens) | (tokens.scores or {})
    tensors = [value for value in fields.values() if torch.is_tensor(value)]
    versions = [tensor._version for tensor in tensors]
    values = chosen(tokens, lab)
    if versions != [tensor._version for tensor in tensors]:
        raise UserError(f"{whose} changed a tensor of the batch in place; it should make a new one")
    frame = to_frame(values, whose, tokens.mask)
    refuse_tokens(~frame.isfinite(), tokens.mask, f"{whose} is not finite", NotFinite)
    return frame


def to_frame(values, whose: str, mask: torch.Tensor) -> torch.Tensor:
    """What was returned as (B, T). It may have a single row or column: a number for each answer is
    (B, 1), because (B,) would be spread over T."""
    if fits_frame(values, mask):
        frame = torch.broadcast_to(values.detach().float(), mask.shape)
        return frame.masked_fill(~mask, 0.0)
    got = repr(values)[:40]
    if isinstance(values, torch.Tensor):
        got = f"one on {values.device} of shape {tuple(values.shape)}"
    raise UserError(f"{whose} should return a tensor (B, T) = {tuple(mask.shape)} on "
                    f"{mask.device}, got {got}")


def fits_frame(values, mask: torch.Tensor) -> bool:
    """Whether it is a tensor on the right device that can be spread over (B, T)."""
    if not isinstance(values, torch.Tensor) or values.device != mask.device:
        return False
    B, T = mask.shape
    return values.dim() == 2 and values.shape[0] in (1, B) and values.shape[1] in (1, T)


def refuse_tokens(wrong: torch.Tensor, mask: torch.Tensor, what: str, kind=UserError,
                  hint: str = "") -> None:
    """Stop where something is wrong with a token of the batch (B, T), and say where."""
    wrong = wrong & mask
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise kind(f"{what} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer "
                   f"{row}, token {t}{hint}")


def metrics_of(chosen, whose: str) -> dict:
    """The metrics of a choice, as plain numbers and texts for metrics.jsonl."""
    plain = {}
    for name, value in getattr(chosen, "metrics", {}).items():
        if hasattr(value, "item"):  # of torch or numpy
            value = value.item()
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise UserError(f"{whose} has {name} among its metrics, which is no number: "
                            f"{repr(value)[:40]}")
        plain[name] = value
    return plain
