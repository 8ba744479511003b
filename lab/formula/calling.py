"""The user's loss is called here, and what cannot be examined is refused in a sentence.

`gradient` gives the gradient of a loss at the logits of one case, in float64 also where the loss
casts to shorter floats. Nothing else of this package calls the user's code.
"""
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .batches import Batch, Case

Loss = Callable[[Tensor, Batch], Tensor]
SHORT = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


class LossFailed(Exception):
    """The user's function raised, or returned what is no loss."""


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
    """A user's loss, and in which floats it is called."""

    def __init__(self, loss: Loss):
        refuse_arguments(loss)
        self.loss, self.dtype, self.in_float64 = loss, torch.float64, True
        self.first: Tensor | None = None  # gradient of the first batch

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
        """Refuse a loss that gives another gradient when other batches came between."""
        self.first = self.gradient(case) if self.first is None else self.first
        self.gradient(other)
        if not torch.equal(self.first, self.gradient(case)):
            raise LossFailed("the same batch gives another gradient in a later call: it draws "
                             "random numbers, or it remembers earlier calls, as a running mean of "
                             "the rewards does, or the number of its calls")

    def gradient(self, case: Case) -> Tensor:
        """The gradient (B, L, V) in float64. It is refused if it is not finite."""
        logits = case.logits.to(self.dtype).clone().requires_grad_(True)
        value = self.value(logits, case.batch(self.dtype))
        if not value.requires_grad:  # everything is detached, so nothing is trained
            return torch.zeros_like(case.logits)
        with of_the_user("of what it returned, backward() raised"):
            value.backward()
        grad = torch.zeros_like(logits) if logits.grad is None else logits.grad
        if not torch.isfinite(grad).all():
            raise LossNotFinite("its gradient is not finite on a batch with unequal rewards")
        return grad.double()

    def value(self, logits: Tensor, batch: Batch) -> Tensor:
        """What the loss returns: a tensor with one number."""
        value = self.returned(logits, batch)
        if isinstance(value, Tensor) and value.numel() == 1:
            return value
        said = "nothing" if value is None else f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            said = f"a tensor of shape {tuple(value.shape)}"
        raise LossFailed(f"it returned {said}, and a loss is a tensor with one number")

    def returned(self, logits: Tensor, batch: Batch) -> object:
        """What the loss returns. What it prints goes to stderr."""
        usual = torch.get_default_dtype()
        try:
            with warnings.catch_warnings(), of_the_user():
                warnings.simplefilter("ignore")
                if not (self.in_float64 and self.dtype == torch.float64):
                    return self.loss(logits, batch)
                torch.set_default_dtype(torch.float64)
                with InFloat64():
                    return self.loss(logits, batch)
        finally:
            torch.set_default_dtype(usual)


@contextmanager
def of_the_user(said: str = "it raised") -> Iterator[None]:
    """Within it the user's code runs: what it prints goes to stderr, and what it raises becomes a
    LossFailed. It may not leave by sys.exit or os._exit, which would end this program with any
    status."""
    leave, os._exit = os._exit, sys.exit
    try:
        with redirect_stdout(sys.stderr):
            yield
    except LossFailed:
        raise
    except SystemExit:
        raise LossFailed("it calls sys.exit or os._exit, which would end this program") from None
    except Exception as error:
        raise failed(said, error) from error
    finally:
        os._exit = leave


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
                         f"function has the arguments {wanted}. Where it is given log-probs and "
                         f"advantages, make `loss = of_log_probs(my_function)`, which {__package__}"
                         " has, in a file of your own") from None


def failed(sentence: str, error: Exception) -> LossFailed:
    """A refusal with the first line of Python's message, and the line of the user's code."""
    first_line = (str(error).strip().splitlines() or ["without a message"])[0]
    not_his = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    his = [frame for frame in traceback.extract_tb(error.__traceback__)
           if not frame.filename.startswith((*not_his, "<frozen"))]
    where = f" ({Path(his[-1].filename).name}, line {his[-1].lineno})" if his else ""
    return LossFailed(f"{sentence} {type(error).__name__}: {first_line}{where}")


def load_loss(path: Path, name: str = "loss") -> Loss:
    """The function of this name in a Python file."""
    function = getattr(load_module(path), name, None)
    if not callable(function):
        raise LossFailed(f"{path} has no function {name}(logits, batch)")
    return function


def load_module(path: Path) -> ModuleType:
    """A Python file. Files beside it can be imported by it."""
    if path.suffix != ".py" or not path.is_file():
        raise LossFailed(f"there is no Python file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where a dataclass looks for its types
    with of_the_user():
        spec.loader.exec_module(module)
    return module
