"""Read the coefficient of each token off the gradient of a loss.

A loss that sees the model only through the log-prob of sampled tokens has, at the logits of one
place, the gradient

    dloss/dlogits = -c (onehot(y) - p) / temperature        p = softmax(logits / temperature)

where y is the token that is predicted there. So one number c for each token says all. It is the
`push`: positive where the loss makes the token more probable. A term with the entropy H of the
distribution p adds a second vector, h p (log p + H) / temperature. What neither vector explains is
left over.
"""
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.errors import UserError
from tools.helpers.formula_batches import Batch, Case, Lens

Loss = Callable[[Tensor, Batch], Tensor]
SHIFTS = (1, 0, 2)
USUAL = (1.0, .9, .8, .7, .6, .5, 1.1, 1.2, 1.5)  # temperatures that are tried first
SHORT = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
EXACT = 1e-7      # what is left over of a gradient that is explained, relative to its size
DIGITS = {torch.bfloat16: "bfloat16, in which a number has 2 to 3 digits",
          torch.float16: "float16, in which a number has 3 digits"}


class LossFailed(UserError):
    """The user's function raised, or returned what is no loss."""
    traceback = ""


class LossNotFinite(LossFailed):
    """The loss or its gradient is infinite or not a number."""


@dataclass(frozen=True)
class Reading:
    """What the gradient of one case says, in columns of tokens (B, L)."""
    push: Tensor
    entropy: Tensor       # the coefficient h
    left_over: float      # norm of what is not explained / norm of the gradient
    size: float           # norm of the gradient


class InFloat64(TorchFunctionMode):
    """Inside it, casts to shorter floats become casts to float64, so that a loss that computes in
    float32 or bfloat16 can be read to all digits. `casts` are those that were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: set[torch.dtype] = set()

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        name = getattr(function, "__name__", "")
        if name in SHORT:
            self.casts.add(SHORT[name])
            return arguments[0].to(torch.float64)
        if name in ("to", "type"):
            arguments = tuple(self.longer(value) for value in arguments)
        if isinstance(keywords.get("dtype"), torch.dtype):
            keywords["dtype"] = self.longer(keywords["dtype"])
        return function(*arguments, **keywords)

    def longer(self, value: object) -> object:
        if isinstance(value, torch.dtype) and value in SHORT.values():
            self.casts.add(value)
            return torch.float64
        return value


def call(loss: Loss, logits: Tensor, batch: Batch, in_float64: bool) -> object:
    if not in_float64:
        return loss(logits, batch)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return loss(logits, batch)
    finally:
        torch.set_default_dtype(usual)


def gradient(loss: Loss, case: Case, dtype: torch.dtype = torch.float64,
             in_float64: bool = True) -> tuple[Tensor, Tensor]:
    """(value of the loss, gradient (B, L, V)), both in float64."""
    logits = case.logits.to(dtype).clone().requires_grad_(True)
    batch = case.batch(dtype)
    kept = case.batch(dtype)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            value = call(loss, logits, batch, in_float64 and dtype == torch.float64)
    except SystemExit:
        raise LossFailed("it calls sys.exit, which would end this program") from None
    except Exception as error:
        raise failed(f"it raised {type(error).__name__}: {first_line(error)}", error) from error
    if logits.grad is not None:
        raise LossFailed("it calls backward itself; return the number instead")
    check_value(value, logits)
    refuse_changes(batch, kept)
    before = logits._version
    try:
        value.backward()
    except Exception as error:
        raise failed(f"its backward pass raised {type(error).__name__}: {first_line(error)}",
                     error) from error
    if before or not torch.equal(logits.detach(), case.logits.to(dtype)):
        raise LossFailed("it changes logits in place; work on logits.clone() instead")
    if logits.grad is None:
        return value.detach().double(), torch.zeros_like(case.logits)
    return value.detach().double(), logits.grad.double()


def failed(sentence: str, error: Exception) -> LossFailed:
    if "leaf Variable" in str(error):
        sentence = "it changes logits in place; work on logits.clone() instead"
    if "CUDA" in str(error) or "cuda" in str(error):
        sentence += ". The batch is on the CPU, and so the loss has to be"
    made = LossFailed(sentence)
    made.traceback = "".join(traceback.format_exception(error))
    return made


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["without a message"])[0]


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


class Examined:
    """A user's loss, with the lens through which it reads log-probs."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64):
        self.loss, self.lens, self.dtype = loss, Lens(), dtype
        self.in_float64 = True
        self.zero_reward = 0.0   # with this reward for all, the policy loss has no gradient

    def raw(self, case: Case) -> Tensor:
        """The gradient (B, L, V). It is refused if it is not finite."""
        grad = self.value_and_gradient(case)[1]
        if not torch.isfinite(grad).all():
            raise LossNotFinite("its gradient is not finite on a batch with unequal rewards")
        return grad

    def value_and_gradient(self, case: Case) -> tuple[Tensor, Tensor]:
        return gradient(self.loss, replace(case, lens=self.lens), self.dtype, self.in_float64)

    def read(self, case: Case) -> Reading:
        return decode(self.raw(case), case, self.lens)

    def push(self, case: Case) -> Tensor:
        return self.read(case).push

    def without_reward(self, case: Case) -> Case:
        """The case with the same reward for all answers, usually 0. What still has a gradient
        there is no part of the policy loss: a KL term, or the entropy."""
        return replace(case, reward=torch.full_like(case.reward, self.zero_reward))

    def choose_dtype(self, case: Case) -> str:
        """Take float64, also where the loss casts to less; or float32 if it refuses float64.
        Returns in which digits the gradient is known."""
        tries = ((torch.float64, True), (torch.float64, False), (torch.float32, False))
        for self.dtype, self.in_float64 in tries:
            try:
                grad = self.value_and_gradient(case)[1]
                break
            except LossFailed as error:
                self.first_error = getattr(self, "first_error", error)
        else:
            raise self.first_error
        for coarse in DIGITS:
            if grad.any() and torch.equal(grad, grad.to(coarse).double()):
                return DIGITS[coarse]
        is_short = self.dtype == torch.float32 or torch.equal(grad, grad.float().double())
        return "float32, in which a number has 7 digits" if is_short and grad.any() else "float64"

    def casts(self, case: Case) -> list[str]:
        """The shorter floats that the loss casts to."""
        mode = InFloat64()
        logits = case.logits.clone().requires_grad_(True)
        try:
            with mode, warnings.catch_warnings(), redirect_stdout(sys.stderr):
                warnings.simplefilter("ignore")
                self.loss(logits, case.batch())
        except Exception:
            return []
        return sorted(str(cast).removeprefix("torch.") for cast in mode.casts)

    def find_lens(self, grad: Tensor, case: Case) -> float:
        """Find the temperature and the shift that leave least over, and say how much that is."""
        absent = tuple(token for token in range(grad.shape[2]) if not grad[:, :, token].any())
        tries = [Lens(temperature, shift, warm, absent) for shift in SHIFTS for temperature in USUAL
                 for warm in {1.0, temperature}]
        if min(left_over(grad, case, lens) for lens in tries) > EXACT:
            plain = [Lens(1.0, shift, 1.0, absent) for shift in SHIFTS]
            tries = [best_temperature(grad, case, lens, "none") for lens in plain]
        if min(left_over(grad, case, lens) for lens in tries) > EXACT:
            tries = [best_temperature(grad, case, lens, entropy)
                     for lens in plain for entropy in ("same", "at 1")]
        rest = [left_over(grad, case, lens) for lens in tries]
        exact = [lens for lens, share in zip(tries, rest) if share <= EXACT]
        if exact:  # the most usual one: an entropy alone, for example, fits several
            self.lens = exact[0]
        return min(rest)


def decode(grad: Tensor, case: Case, lens: Lens, with_entropy: bool = True) -> Reading:
    """Least squares at each place, for push and entropy."""
    towards, spread = directions(case, lens)
    g = lens.to_tokens(grad)
    push = -(g * towards).sum(-1) / squared(towards)
    entropy = torch.zeros_like(push)
    rest = g + push[..., None] * towards
    if with_entropy and rest.norm() > 1e-10 * grad.norm():
        push, entropy = both(g, -towards, spread)
        rest = g + push[..., None] * towards - entropy[..., None] * spread
    unread = float((grad - lens.to_places(g)).square().sum())  # at places without a token
    size = float(grad.norm())
    return Reading(push, entropy, (float(rest.square().sum()) + unread) ** .5 / max(size, 1e-300),
                   size)


def directions(case: Case, lens: Lens) -> tuple[Tensor, Tensor]:
    """At each token the gradient of its log-prob, and minus the gradient of the entropy."""
    log_p = lens.distribution(case.logits, lens.temperature)
    p = log_p.exp()
    onehot = torch.zeros_like(p).scatter(2, case.ids[:, :, None], 1.0)
    warm = lens.entropy_temperature
    log_q = lens.distribution(case.logits, warm)
    q = log_q.exp()
    entropy = -(q * log_q).sum(-1, keepdim=True)
    return (onehot - p) / lens.temperature, q * (log_q + entropy) / warm


def both(g: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The least squares solution for two vectors at each token."""
    aa, bb, ab = squared(first), squared(second), (first * second).sum(-1)
    ga, gb = (g * first).sum(-1), (g * second).sum(-1)
    determinant = aa * bb - ab.square()
    usable = determinant > 1e-12 * aa * bb
    safe = torch.where(usable, determinant, 1.0)
    x = torch.where(usable, (ga * bb - gb * ab) / safe, ga / aa)
    y = torch.where(usable, (gb * aa - ga * ab) / safe, 0.0)
    return x, y


def squared(vector: Tensor) -> Tensor:
    return vector.square().sum(-1).clamp(min=1e-300)


def left_over(grad: Tensor, case: Case, lens: Lens) -> float:
    return decode(grad, case, lens).left_over


def best_temperature(grad: Tensor, case: Case, lens: Lens, entropy: str) -> Lens:
    """The lens with the temperature that leaves least over. There is no entropy term, or it has
    the same temperature, or always 1.

    An entropy takes up a small error of the temperature, so it is also tried without one. With one
    at another temperature there are two valleys, so the two lowest are searched."""
    def lens_at(temperature: float) -> Lens:
        return replace(lens, temperature=temperature,
                       entropy_temperature=temperature if entropy == "same" else 1.0)

    def rest_of(temperature: float) -> float:
        return decode(grad, case, lens_at(temperature), entropy != "none").left_over

    grid = torch.linspace(-2.5, 2.5, 201).exp().tolist()
    rest = [rest_of(temperature) for temperature in grid]
    valleys = [k for k in range(1, 200) if rest[k] <= min(rest[k - 1], rest[k + 1])]
    valleys.sort(key=lambda k: rest[k])
    lowest = [golden_section(rest_of, grid[k - 1], grid[k + 1]) for k in valleys[:2]] or [1.0]
    tries = [short for value in lowest for short in with_few_digits(value)]
    return lens_at(min(tries, key=rest_of))


def golden_section(rest_of: Callable[[float], float], low: float, high: float) -> float:
    """Where rest_of is least between low and high, if it has one valley there."""
    ratio = (5 ** .5 - 1) / 2
    for _ in range(44):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if rest_of(a) < rest_of(b):
            high = b
        else:
            low = a
    return (low + high) / 2


def with_few_digits(value: float) -> list[float]:
    """The value, and near it those that have two or three digits, or whose inverse has."""
    short = [float(f"{value:.{digits}g}") for digits in (2, 3)]
    return [value, *short, *(1 / float(f"{1 / value:.{digits}g}") for digits in (2, 3))]
