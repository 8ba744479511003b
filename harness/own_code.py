"""Code that people write: a weighting, an advantage, a task. It is called from here.

What goes wrong in it is one sentence that begins with their file and line, not with those of the
lab. Weightings, advantages and tasks that ship with the lab are called the same way.
"""
import inspect
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as brief

import torch

from engine.errors import OwnCodeError, UserError
from harness.flags import shortened
from harness.hints import path_from_here
from harness.program import of_the_system


@contextmanager
def own_code(what: str, code):
    """Run what is inside as a piece of `code`: a function, a class, an object, or the path of a
    module. `what` is "the mitigation my_idea", say."""
    try:
        yield
    except Exception as error:
        is_of_machine = not isinstance(error, OSError) and of_the_system(error)
        if isinstance(error, UserError) or is_of_machine:
            raise
        lines = traceback.format_exception_only(error)  # with "Did you mean", which str() lacks
        text = "".join(lines[-1:] if isinstance(error, SyntaxError) else lines)
        said = shortened(" ".join(text.split()), 300)
        raise OwnCodeError(f"{place_of(code, error)}{what} raises {said}") from error


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
    path, number = where_it_begins(code)
    text = ""
    for frame in traceback.extract_tb(error and error.__traceback__):
        if frame.filename == path:
            number, text = frame.lineno, frame.line
    if isinstance(error, SyntaxError) and error.filename == path:
        number, text = error.lineno, (error.text or "").strip()
    if not path:
        return ""
    quoted = f', "{shortened(text)}"' if text else ""
    return f"{path_from_here(Path(path))}, line {number or 1}{quoted}: "


def where_it_begins(code) -> tuple[str, int]:
    if isinstance(code, Path):
        return str(code), 1
    code = inspect.unwrap(code)
    if not (inspect.isroutine(code) or inspect.isclass(code)):
        code = type(code)  # an object that is called
    try:
        return inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return "", 0
