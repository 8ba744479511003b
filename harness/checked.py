"""What a mitigation or an advantage returns is checked before it is used: it may be somebody's new
idea, and a new idea may be wrong."""
import torch

from engine.errors import UserError
from engine.finite import NotFinite
from engine.rollouts import Rollouts
from harness.own_code import expect, own_code, place_of


def call_method(chosen, whose: str, tokens: Rollouts, policy=None) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the mitigation
    my_idea", say. The batch must stay as it was: others read it afterwards."""
    before = versions(tokens)
    with own_code(whose, chosen):
        values = chosen(tokens, policy)
    mask = tokens.mask
    if versions(tokens) != before:
        raise UserError(f"{place_of(chosen)}{whose} changed a tensor of the batch in place; it "
                        "should make a new one")
    expect(lambda: fits_frame(values, mask), whose, chosen,
           f"a tensor (B, T) = {tuple(mask.shape)} of real numbers on {mask.device}", values)
    frame = torch.broadcast_to(values.detach().float(), mask.shape).masked_fill(~mask, 0.0)
    refuse_tokens(~frame.isfinite(), mask, f"{place_of(chosen)}{whose} is not finite", NotFinite)
    return frame


def versions(tokens: Rollouts) -> list[tuple[str, int, int]]:
    """Which tensors the batch has, and how often each was changed in place."""
    fields = vars(tokens) | (tokens.scores or {})
    return [(name, id(value), value._version) for name, value in fields.items()
            if torch.is_tensor(value)]


def fits_frame(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether it can be spread over (B, T). It may have a single row or column: a number for each
    answer is (B, 1), because (B,) would be spread over T."""
    is_plain = values.layout is torch.strided and not (values.is_complex() or values.is_nested)
    (B, T), (rows, columns) = mask.shape, values.shape
    return is_plain and values.device == mask.device and rows in (1, B) and columns in (1, T)


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
    with own_code(whose, chosen):
        metrics = getattr(chosen, "metrics", {})
    expect(lambda: all(isinstance(name, str) and isinstance(plain(value), int | float | str | None)
                       for name, value in metrics.items()),
           whose, chosen, "numbers and texts by name as its metrics", metrics)
    return {name: plain(value) for name, value in metrics.items()}


def plain(value):
    return value.item() if hasattr(value, "item") else value  # of torch or numpy


def joined(*parts: dict) -> dict:
    """Numbers for one line of metrics.jsonl. Those of a mitigation or an advantage may not take the
    place of others."""
    line = {}
    for part in parts:
        for name in line.keys() & part.keys():
            raise UserError(f"the metric {name} of a mitigation or an advantage needs another "
                            "name: metrics.jsonl has one of this name")
        line |= part
    return line
