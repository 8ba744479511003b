"""Code that people write: a weighting, an advantage, a task. What it returns is checked before it
is used, and what goes wrong in it is told with its file and line."""
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.choices import Method, Metrics
from engine.errors import BadCredit, UserError
from engine.rollouts import Rollouts
from harness.files import PROJECT

if TYPE_CHECKING:
    from engine.policy import Policy

Value = TypeVar("Value")
MOST_SHOWN = 200  # characters of what was returned
LARGEST_CREDIT = 1e12  # the squares of its gradient, in float32, are still finite


def place_of(chosen: object) -> str:
    """mitigations.py:57, where a function, a class, or the call of an instance begins; of a file
    its name."""
    if isinstance(chosen, Path):
        return own_path(str(chosen))
    made = inspect.unwrap(chosen) if callable(chosen) else type(chosen)
    if not (inspect.isroutine(made) or inspect.isclass(made)):
        made = made.__call__
    with suppress(OSError, TypeError):  # it is made of another, or typed into a shell
        return f"{own_path(inspect.getfile(made))}:{inspect.getsourcelines(made)[1]}"
    return own_path(getattr(sys.modules[made.__module__], "__file__", made.__module__))


def own_path(file: str) -> str:
    return file.removeprefix(f"{PROJECT}/")


@contextmanager
def told_as(whose: str, chosen: object) -> Iterator[None]:
    """Run somebody's code: an error gets a note, whose it is and where in the file that begins it.
    Working directory, streams, gradient mode, default dtype and device and the number of threads
    stay what they are."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    device = torch.get_default_device()
    try:
        with (chdir("."), redirect_stdout(sys.stdout), redirect_stderr(sys.stderr),
              torch.set_grad_enabled(torch.is_grad_enabled())):
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = place_of(chosen)
        file = place.partition(":")[0]
        for step in traceback.extract_tb(error.__traceback__):
            if own_path(step.filename) == file:
                place = f"{file}:{step.lineno}: {step.line}"
        if not isinstance(error, Exception) or isinstance(error, BrokenPipeError):
            # the program would be left without a word, or as a library in Rust leaves that panics
            raise UserError(f"{whose}, {place}; left before its end: {error!r}") from error
        error.add_note(f"{whose}, {place}")
        raise
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def expect(holds: Callable[[], bool], what: str, expected: str, value: object) -> None:
    """Stop unless somebody's code returned what it should; a test that fails counts as no."""
    try:
        fine = holds()
    except Exception:  # the value is no list, no tensor, ...: whatever the test needs
        fine = False
    if not fine:
        raise UserError(f"{what} should return {expected}, got {described(value)}")


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)
        layout = f"{value.layout} " * (value.layout is not torch.strided)
        return f"a {layout}tensor {shape} of {value.dtype} on {value.device}"
    size = f" ({len(value)} entries)" if isinstance(value, (list, tuple)) else ""
    return " ".join(brief(value).split())[:MOST_SHOWN] + size


def checked_credit(chosen: Method, whose: str, rollouts: Rollouts, policy: "Policy | None" = None,
                   is_weight: bool = False) -> torch.Tensor:
    """(B, T) float32 without gradient, finite, 0 beyond the mask. `whose` is "the weighting
    my_idea", say. It gets a copy of the batch: what it changes in place, nobody else reads."""
    shared, mask = (rollouts.generator, rollouts.forward), rollouts.mask
    with told_as(whose, chosen):
        values = chosen(deepcopy(rollouts, {id(part): part for part in shared}), policy)
        place = f" ({place_of(chosen)})"
        expect(lambda: fits_frame(values, mask), whose + place,
               f"a tensor (B, T) = {tuple(mask.shape)} of real numbers on {mask.device}", values)
        frame = torch.broadcast_to(values.detach().float(), mask.shape).masked_fill(~mask, 0.0)
    too_large = f"{whose} is not finite, or beyond {LARGEST_CREDIT:g},"
    refuse_tokens(~(frame.abs() <= LARGEST_CREDIT), mask, too_large, BadCredit, place)
    if is_weight:
        place += ". Credit with a sign is an advantage: see docs/weightings.md"
        refuse_tokens(frame < 0, mask, f"{whose} is negative", hint=place)
    return frame


def fits_frame(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """It may have a single row or column: (B, 1) for each answer, as (B,) would spread over T."""
    (B, T), (rows, columns) = mask.shape, values.shape
    is_real = values.device == mask.device and not values.is_complex()
    return is_real and is_dense(values) and rows in (1, B) and columns in (1, T)


def is_dense(values: torch.Tensor) -> bool:
    return values.layout is torch.strided and not values.is_nested | values.is_quantized


def refuse_tokens(wrong: torch.Tensor, mask: torch.Tensor, what: str,
                  kind: type[UserError] = UserError, hint: str = "") -> None:
    wrong = wrong & mask
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        raise kind(f"{what} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer "
                   f"{row}, token {t}{hint}")


def metrics_of(chosen: object) -> Metrics:
    with told_as("metrics", chosen):
        found = {name: value.item() if hasattr(value, "item") else value  # of torch or numpy
                 for name, value in getattr(chosen, "metrics", {}).items()}
        for name, value in found.items():
            expect(lambda: isinstance(value, (int, float, type(None))) and name.isidentifier(),
                   f"metrics ({place_of(chosen)})", "numbers by name", found)
    return found


def number(line: Metrics, name: str) -> float:
    """Of a line; 0 where there is none."""
    value = line.get(name)
    return value if isinstance(value, (int, float)) else 0


def joined(*parts: Mapping[str, Value]) -> dict[str, Value]:
    """One line of metrics.jsonl, in which no number takes the place of another."""
    line: dict[str, Value] = {}
    for part in parts:
        for name in line.keys() & part.keys():
            raise UserError(f"the metric {name} of a weighting or an advantage needs another name")
        line |= part
    return line
