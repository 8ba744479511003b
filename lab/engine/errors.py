"""The errors that people see as a sentence instead of a traceback.

Beside them are functions that find what such a sentence says, such as where a user's function is
defined.
"""
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from qwen2_model import UserError as UserError, read_json as read_json  # taken from here
from run import say as say

PROJECT = Path(__file__).resolve().parents[2]  # the folder of the six files
LARGEST_SCORE = 1e12  # the squares of such rewards, in float32, are still finite


class NotFinite(UserError):
    """A number that is not finite. The run stops at the first one, because it would spread to every
    parameter."""


def refuse_undefined(what: str, *tensors: Tensor) -> None:
    """Raise unless all tensors are finite; `what` may be "the gradient is".

    If the 2-norm is finite, all numbers are. On a CPU it takes a tenth of the time that finding the
    largest number takes, so it is tried first. The largest number is needed only if the 2-norm is
    not finite, because squares of finite numbers can be too large.
    """
    parts = [tensor.detach() for tensor in tensors
             if tensor.is_floating_point() and tensor.numel()]
    if not any(get_total_norm(parts, order).isfinite() for order in (2.0, float("inf"))):
        raise NotFinite(f"{what} not finite")


def is_list(found: object) -> bool:
    """Whether it is a list or the like. A text and a dict can be listed, but are none."""
    return isinstance(found, Iterable) and not isinstance(found, str | dict)


def is_score_of_part(value: Any) -> bool:
    """Whether it is a number, of any library, within the limits."""
    if isinstance(value, (str, bytes)):  # float("1") takes it
        return False
    try:
        return -LARGEST_SCORE <= float(value) <= LARGEST_SCORE
    except (TypeError, ValueError, OverflowError):
        return False


def are_rewards(found: Any) -> bool:
    """Whether it is a list with a reward for each turn."""
    return isinstance(found, list | tuple) and all(map(is_score_of_part, found))


def wrong_result(function: Any, wanted: str, found: object) -> UserError:
    """The error of a user's function that returned something else than it should."""
    shown = " ".join(repr(found).split())[:200]
    forgotten = ", perhaps because a `return` is missing" if found is None else ""
    name = getattr(function, "__name__", type(function).__name__)
    return UserError(f"{name} ({location_of(function)}) should return {wanted}. It returned {shown}"
                     f"{forgotten}")


def result_of(function: Any, wanted: str, is_right: Callable[[Any], bool], *given: object) -> Any:
    """What a user's function returns, if it is right; else the error says what is `wanted`."""
    found = function(*given)
    if not is_right(found):
        raise wrong_result(function, wanted, found)
    return found


def refuse_pipe(path: Path) -> None:
    """Raise an error for what cannot be read to its end: a pipe waits for ever, and /dev/zero never
    ends."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"cannot read {path}: it is no regular file")


def read_text(path: Path) -> str:
    refuse_pipe(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}. Save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def did_you_mean(path: Path) -> str:
    """The words after the name of a folder that does not exist, ": did you mean models/tiny?";
    none if no folder beside it has a similar name."""
    beside = [known.name for known in path.parent.glob("*") if known.is_dir() and known != path]
    near = get_close_matches(path.name, beside, 1)
    return f": did you mean {path.parent / near[0]}?" if near else ""


def location_of(chosen: object) -> str:
    """The file and line at which a user's method begins, as mitigations.py:57. A method is a
    function, a class, or an object whose class defines __call__."""
    made = inspect.unwrap(chosen) if callable(chosen) else chosen
    is_named = inspect.isroutine(made) or inspect.isclass(made)
    return line_of(made if is_named else type(made).__call__)


def code_of(chosen: object) -> Any:
    """The file and line of a user's method as the book asks for them."""
    file, _, line = location_of(chosen).rpartition(":")
    return SimpleNamespace(co_filename=file or line, co_firstlineno=line)


@cache  # `lab exact` asks some thousand times
def line_of(made: Any) -> str:
    try:
        file, line = inspect.getfile(made), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):  # typed into a shell
        return str(made.__module__)
    return f"{file.removeprefix(f'{PROJECT}/')}:{line}"


ARGUMENTS = {  # of a task's methods
    "training_problems": "seed, step, count", "held_out_problems": "count", "extreme_problems": "",
    "prompt_for": "problem", "show": "problem", "score": "problem, text", "label": "pieces",
    "reply": "problem, turns", "redraw": "problem, turns, rng"}


def refuse_call(whose: Any, function: Callable[..., Any], wanted: str, *given: object,
                **flags: object) -> None:
    """Raise if a user's function cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*given, **flags)
    except TypeError as error:
        raise UserError(f"{whose.__name__} ({location_of(whose)}) should take the arguments "
                        f"{wanted}: {error}") from None


def refuse_other_arguments(task: object) -> None:
    """Raise if a method of a task, or a function that stands for one, takes other arguments."""
    for name, arguments in ARGUMENTS.items():
        method = getattr(task, name, None)
        if inspect.isfunction(method) or inspect.ismethod(method):
            refuse_call(method, method, f"({arguments})", *filter(None, arguments.split(", ")))


def did_you_mean_name(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, [*known], n=1)
    return f". Did you mean {close[0]}?" if close else ""
