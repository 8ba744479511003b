"""The user's loss is called here, and whatever is no loss is refused in a sentence.

`gradient` gives the gradient of a loss at the logits of one case, in float64 also where the loss
casts to shorter floats. Nothing else of this package calls the user's code.
"""
import importlib.util
import inspect
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .batches import Batch, Case

Loss = Callable[[Tensor, Batch], Tensor]
SHORT = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


class LossFailed(Exception):
    """The user's function raised, or returned what is no loss."""
    traceback = ""


class LossNotFinite(LossFailed):
    """The loss or its gradient is infinite or not a number."""


class InFloat64(TorchFunctionMode):
    """Inside it, casts to shorter floats become casts to float64, so that a loss that computes in
    float32 or bfloat16 can be read to all digits."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        name = getattr(function, "__name__", "")
        if name in SHORT:
            return arguments[0].to(torch.float64)
        if name in ("to", "type"):
            arguments = tuple(longer(value) for value in arguments)
        if isinstance(keywords.get("dtype"), torch.dtype):
            keywords["dtype"] = longer(keywords["dtype"])
        return function(*arguments, **keywords)


def longer(value: object) -> object:
    is_short = isinstance(value, torch.dtype) and value in SHORT.values()
    return torch.float64 if is_short else value


class Examined:
    """A user's loss, and how it is called: in which floats, with which seed if it is random, and
    how many times as large its gradient is taken, if that is tiny."""

    def __init__(self, loss: Loss):
        refuse_arguments(loss)
        self.loss, self.dtype, self.in_float64 = loss, torch.float64, True
        self.is_random, self.seed, self.scale = False, 0, 1.0

    def choose_dtype(self, case: Case) -> None:
        """Take float64, also where the loss casts to less; or what the loss does not refuse."""
        first_error = None
        for self.dtype, self.in_float64 in ((torch.float64, True), (torch.float64, False),
                                            (torch.float32, False)):
            try:
                self.gradient(case)
                return
            except LossFailed as error:
                first_error = first_error or error
        raise first_error

    def refuse_what_changes(self, case: Case, other: Case) -> None:
        """Refuse a loss that gives something else when it is called once more, or when another
        batch came between. One that is random is called with the same seed each time."""
        self.is_random = True  # until it is known: each call gets the seed
        first, again = self.gradient(case), self.gradient(case)
        self.seed = 1
        self.is_random = torch.equal(first, again) and not torch.equal(first, self.gradient(case))
        self.seed = 0
        self.gradient(other)
        if not torch.equal(first, again) or not torch.equal(first, self.gradient(case)):
            raise LossFailed("it remembers earlier calls, as a running mean of the rewards does: "
                             "after another batch, the same batch gives another gradient")

    def gradient(self, case: Case) -> Tensor:
        """The gradient (B, L, V) in float64. It is refused if it is not finite."""
        logits = case.logits.to(self.dtype).clone().requires_grad_(True)
        value = self.value(logits, case.batch(self.dtype))
        if logits.grad is not None:
            raise LossFailed("it calls backward itself; return the number instead")
        check_value(value, logits)
        try:
            value.backward()
        except Exception as error:
            raise failed("its backward pass raised", error) from error
        if not torch.equal(logits.detach(), case.logits.to(self.dtype)):
            raise LossFailed("it changes logits in place; work on logits.clone() instead")
        grad = torch.zeros_like(logits) if logits.grad is None else logits.grad
        if not torch.isfinite(grad).all():
            raise LossNotFinite("its gradient is not finite on a batch with unequal rewards")
        return grad.double() * self.scale

    def is_rounding(self, case: Case) -> bool:
        """Whether the gradient of a case is rounding: then it is far larger in float32."""
        short = Examined(self.loss)
        short.dtype, short.in_float64, short.is_random = torch.float32, False, self.is_random
        try:
            return bool(short.gradient(case).norm() > 10 * self.gradient(case).norm())
        except LossFailed:
            return True

    def loss_of(self, case: Case) -> float:
        """The value of the loss."""
        value = self.value(case.logits.to(self.dtype).clone(), case.batch(self.dtype))
        return float(value)

    def slope(self, case: Case, direction: Tensor) -> float:
        """How the value of the loss changes with the logits in this direction, by two values."""
        step = 1e-5 * direction
        values = [float(self.value((case.logits + sign * step).to(self.dtype),
                                   case.batch(self.dtype))) for sign in (1, -1)]
        return (values[0] - values[1]) / 2e-5 * self.scale

    def value(self, logits: Tensor, batch: Batch) -> object:
        """What the loss returns. What it prints goes to stderr."""
        usual = torch.get_default_dtype()
        try:
            with warnings.catch_warnings(), of_the_user(), \
                    torch.random.fork_rng(devices=[], enabled=self.is_random):
                warnings.simplefilter("ignore")
                if self.is_random:
                    seed_all(self.seed)
                if not (self.in_float64 and self.dtype == torch.float64):
                    return self.loss(logits, batch)
                torch.set_default_dtype(torch.float64)
                with InFloat64():
                    return self.loss(logits, batch)
        except SystemExit:
            raise LossFailed("it calls sys.exit, which would end this program") from None
        except LossFailed:
            raise
        except Exception as error:
            raise failed("it raised", error) from error
        finally:
            torch.set_default_dtype(usual)


@contextmanager
def of_the_user() -> Iterator[None]:
    """Within it the user's code runs: what it prints goes to stderr, and os._exit is refused, which
    would end this program with any status."""
    leave = os._exit
    os._exit = refuse_to_leave
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os._exit = leave


def refuse_to_leave(status: int = 0) -> None:
    raise LossFailed("it calls os._exit, which would end this program")


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def refuse_arguments(loss: Loss) -> None:
    """Refuse a function that cannot be called as loss(logits, batch)."""
    try:
        wanted = inspect.signature(loss)
    except ValueError:  # it does not show its arguments
        return
    try:
        wanted.bind("logits", "batch")
    except TypeError:
        example = "examples/a_loss.py" if __package__ == "lab.formula" else "the one in --help"
        raise LossFailed(f"{__package__} calls loss(logits, batch), such as {example}, and this "
                         f"function has the arguments {wanted}. `of_log_probs` makes a loss of one "
                         "that is given log-probs and advantages") from None


def failed(sentence: str, error: Exception) -> LossFailed:
    first_line = (str(error).strip().splitlines() or ["without a message"])[0]
    sentence = f"{sentence} {type(error).__name__}: {first_line}"
    if "cuda" in str(error).lower():
        sentence += ". The batch is on the CPU, and so the loss has to be"
    made = LossFailed(sentence)
    made.traceback = "".join(traceback.format_exception(error))
    return made


def check_value(value: object, logits: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise LossFailed(f"it returned {type(value).__name__}, and a loss is a tensor with one "
                         "number that has a gradient")
    if value.numel() != 1:
        raise LossFailed(f"it returned a tensor {tuple(value.shape)}, and a loss is one number")
    if value.device != logits.device:
        raise LossFailed(f"it returned a tensor on {value.device}, and the batch is on the CPU")
    if not value.requires_grad:
        raise LossFailed("it returned a number without a gradient: somewhere on the way from the "
                         "logits it was detached, or made by .item(), numpy or torch.no_grad")
    if not torch.isfinite(value).all():
        raise LossNotFinite(f"it returned {value.item()} on a batch with unequal rewards")


def load_loss(path: Path, name: str = "loss") -> Loss:
    """The function of this name in a Python file. Files beside it can be imported by it."""
    if not path.is_file():
        raise LossFailed(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LossFailed(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        with of_the_user():
            spec.loader.exec_module(module)
    except SystemExit:
        raise LossFailed(f"{path} ends this program when it is imported, by sys.exit: put that "
                         'below if __name__ == "__main__"') from None
    except LossFailed as error:
        raise LossFailed(f"{path} cannot be loaded: {error}") from None
    except Exception as error:
        raise LossFailed(f"{path} cannot be loaded, because it raises {type(error).__name__}: "
                         f"{error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise LossFailed(f"{path} has no function {name}(logits, batch)")
    return function
