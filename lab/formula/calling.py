"""The user's loss is called here, and whatever is no loss is refused in a sentence.

`gradient` gives the gradient of a loss at the logits of one case, in float64 also where the loss
casts to shorter floats. Nothing else of this package calls the user's code.
"""
import importlib.util
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
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
    """A user's loss, and the floats in which it is called."""

    def __init__(self, loss: Loss):
        self.loss, self.dtype, self.in_float64 = loss, torch.float64, True

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
        batch came between."""
        with torch.random.fork_rng(devices=[]):
            first, again, with_seed = (self.seeded(case, seed) for seed in (0, 0, 1))
        if torch.equal(first, again) and not torch.equal(first, with_seed):
            raise LossFailed("it is random: the same batch gives another gradient each time")
        self.gradient(other)
        if not torch.equal(first, again) or not torch.equal(first, self.gradient(case)):
            raise LossFailed("it remembers earlier calls, as a running mean of the rewards does: "
                             "after another batch, the same batch gives another gradient")

    def seeded(self, case: Case, seed: int) -> Tensor:
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return self.gradient(case)

    def gradient(self, case: Case) -> Tensor:
        """The gradient (B, L, V) in float64. It is refused if it is not finite."""
        logits = case.logits.to(self.dtype).clone().requires_grad_(True)
        batch, kept = case.batch(self.dtype), case.batch(self.dtype)
        value = self.value(logits, batch)
        if logits.grad is not None:
            raise LossFailed("it calls backward itself; return the number instead")
        check_value(value, logits)
        refuse_changes(batch, kept)
        before = logits._version
        try:
            value.backward()
        except Exception as error:
            raise failed("its backward pass raised", error) from error
        if before or not torch.equal(logits.detach(), case.logits.to(self.dtype)):
            raise LossFailed("it changes logits in place; work on logits.clone() instead")
        grad = torch.zeros_like(logits) if logits.grad is None else logits.grad
        if not torch.isfinite(grad).all():
            raise LossNotFinite("its gradient is not finite on a batch with unequal rewards")
        return grad.double()

    def loss_of(self, case: Case) -> float:
        """The value of the loss."""
        value = self.value(case.logits.to(self.dtype).clone(), case.batch(self.dtype))
        return float(value)

    def value(self, logits: Tensor, batch: Batch) -> object:
        """What the loss returns. What it prints goes to stderr."""
        usual = torch.get_default_dtype()
        try:
            with warnings.catch_warnings(), redirect_stdout(sys.stderr):
                warnings.simplefilter("ignore")
                if not (self.in_float64 and self.dtype == torch.float64):
                    return self.loss(logits, batch)
                torch.set_default_dtype(torch.float64)
                with InFloat64():
                    return self.loss(logits, batch)
        except SystemExit:
            raise LossFailed("it calls sys.exit, which would end this program") from None
        except Exception as error:
            raise failed("it raised", error) from error
        finally:
            torch.set_default_dtype(usual)


def failed(sentence: str, error: Exception) -> LossFailed:
    first_line = (str(error).strip().splitlines() or ["without a message"])[0]
    sentence = f"{sentence} {type(error).__name__}: {first_line}"
    if "leaf Variable" in str(error):
        sentence = "it changes logits in place; work on logits.clone() instead"
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


def refuse_changes(batch: Batch, kept: Batch) -> None:
    for name, before in vars(kept).items():
        after = getattr(batch, name, None)
        same = after is not None and (
            torch.equal(after, before) if isinstance(before, Tensor) else after == before)
        if not same:
            raise LossFailed(f"it changes batch.{name} in place; work on a copy instead")


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
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except SystemExit:
        raise LossFailed(f"{path} ends this program when it is imported, by sys.exit: put that "
                         'below if __name__ == "__main__"') from None
    except Exception as error:
        raise LossFailed(f"{path} cannot be loaded, because it raises {type(error).__name__}: "
                         f"{error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise LossFailed(f"{path} has no function {name}(logits, batch)")
    return function
