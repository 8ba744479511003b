"""Code that people write: a weighting, an advantage, a task. It is called from here.

What goes wrong in it is one sentence that begins with their file and line, not with those of the
lab. Weightings, advantages and tasks that ship with the lab are called the same way. What they
return is checked before it is used: a new idea may be wrong.
"""
import difflib
import inspect
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as brief

import torch

from engine.errors import NotFiniteCredit, OwnCodeError, UserError
from engine.rollouts import Rollouts
from harness.files import path_from_here
from harness.flags import NEAR, shortened
from harness.program import of_the_system


@contextmanager
def own_code(what: str, code):
    """Run what is inside as a piece of `code`: a function, a class, an object, or the path of a
    module. `what` is "the weighting my_idea", say."""
    try:
        yield
    except Exception as error:
        is_of_machine = not isinstance(error, OSError) and of_the_system(error)
        if isinstance(error, UserError) or is_of_machine:
            raise
        text = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
        said = shortened(" ".join(text.split()), 300) + meant_by(error)
        raise OwnCodeError(f"{place_of(code, error)}{what} raises {said}") from error


def meant_by(error: Exception) -> str:
    """Of rollouts.logprob that log_prob may be meant, which only a traceback would say."""
    wanted = getattr(error, "name", None) if isinstance(error, AttributeError) else None
    near = difflib.get_close_matches(wanted or "", dir(getattr(error, "obj", None)), 1, NEAR)
    return f", did you mean {near[0]}?" if near else ""


def expect(holds: Callable[[], bool], what: str, code, expected: str, value) -> None:
    """Stop unless `code` returned what is expected of it; a test that fails on the value counts
    as no."""
    try:
        fine = holds()
    except Exception:  # the value is no list, no tensor, ...: whatever the test needs
        fine = False
    if not fine:
        raise OwnCodeError(f"{place_of(code)}{what} should return {expected}, got "
                           f"{described(value)}")


def described(value) -> str:
    if torch.is_tensor(value) and not value.is_nested:
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    size = f" ({len(value)} entries)" if isinstance(value, (list, tuple)) else ""
    return " ".join(brief(value).split()) + size


def place_of(code, error: Exception | None = None) -> str:
    """File and line of the code, `my_task.py, line 3: `, with an error those and the text of the
    innermost line in that file that led to it. Empty for what is not written in Python."""
    if not isinstance(code, Path):
        code = inspect.unwrap(code)
        if not (inspect.isroutine(code) or inspect.isclass(code)):
            code = type(code)  # an object that is called
    try:
        path, number = ((str(code), 1) if isinstance(code, Path) else
                        (inspect.getsourcefile(code), inspect.getsourcelines(code)[1]))
    except (OSError, TypeError):
        return ""
    text = ""
    for frame in traceback.extract_tb(error and error.__traceback__):
        if frame.filename == path:
            number, text = frame.lineno, frame.line
    if isinstance(error, SyntaxError) and error.filename == path:
        number, text = error.lineno, (error.text or "").strip()
    quoted = f', "{shortened(text)}"' if text else ""
    return f"{path_from_here(Path(path))}, line {number or 1}{quoted}: "


def checked_credit(chosen, whose: str, rollouts: Rollouts, policy=None) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the weighting
    my_idea", say. The batch must stay as it was: others read it afterwards."""
    before = versions(rollouts)
    with own_code(whose, chosen):
        values = chosen(rollouts, policy)
    mask = rollouts.mask
    if versions(rollouts) != before:
        raise UserError(f"{place_of(chosen)}{whose} changed a tensor of the batch in place; it "
                        "should make a new one")
    expect(lambda: fits_frame(values, mask), whose, chosen,
           f"a tensor (B, T) = {tuple(mask.shape)} of real numbers on {mask.device}", values)
    frame = torch.broadcast_to(values.detach().float(), mask.shape).masked_fill(~mask, 0.0)
    refuse_tokens(~frame.isfinite(), mask, f"{place_of(chosen)}{whose} is not finite",
                  NotFiniteCredit)
    return frame


def versions(rollouts: Rollouts) -> list[tuple[str, int, int]]:
    """Which tensors the batch has, and how often each was changed in place."""
    fields = vars(rollouts) | (rollouts.scores or {})
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
    """Numbers for one line of metrics.jsonl. Those of a weighting or an advantage may not take the
    place of others."""
    line = {}
    for part in parts:
        for name in line.keys() & part.keys():
            raise UserError(f"the metric {name} of a weighting or an advantage needs another name")
        line |= part
    return line
