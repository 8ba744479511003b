"""What a loss does with the ratio of new to old probability: how it clips.

The `response` f of a token is its push at a ratio r, divided by its push at the ratio 1. Advantage
and counting cancel in it. Without a ratio f is 1, with one it is r, and a clip makes it 0 or
constant beyond a bound. The bounds are found by trying ratios, ever closer together.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case
from tools.helpers.formula_decode import Examined, decode

GRID = torch.linspace(-4.0, 3.2, 73).exp().tolist()  # ratios from 0.02 to 25


@dataclass(frozen=True)
class Side:
    """The response to answers of one sign: r between the bounds, and beyond a bound 0, or as large
    as at the bound."""
    low: float | None = None
    high: float | None = None
    low_is_zero: bool = True
    high_is_zero: bool = True

    def __call__(self, ratio: Tensor) -> Tensor:
        value = ratio
        if self.low is not None:
            value = torch.where(ratio < self.low, 0.0 if self.low_is_zero else self.low, value)
        if self.high is not None:
            value = torch.where(ratio > self.high, 0.0 if self.high_is_zero else self.high, value)
        return value


@dataclass(frozen=True)
class Gate:
    """SAPO's soft gate: the derivative of 4 / tau sigmoid(tau (r - 1)), times r."""
    tau: float

    def __call__(self, ratio: Tensor) -> Tensor:
        s = torch.sigmoid(self.tau * (ratio - 1))
        return 4 * s * (1 - s) * ratio


@dataclass(frozen=True)
class Constant:
    """No ratio: the response is 1."""
    def __call__(self, ratio: Tensor) -> Tensor:
        return torch.ones_like(ratio)


@dataclass(frozen=True)
class Inverse:
    """Old over new: the ratio upside down."""
    def __call__(self, ratio: Tensor) -> Tensor:
        return 1 / ratio


@dataclass(frozen=True)
class Ratio:
    """The response to good and bad answers, and whether a ratio is that of a token or that of an
    answer, which is exp of the mean or the sum of the log-ratios of its tokens."""
    level: str = "token"
    good: object = Constant()
    bad: object = Constant()

    def __call__(self, case: Case, sign: Tensor, tokens: Tensor) -> Tensor:
        """(B, L) the responses, where `sign` (B,) is that of the advantage."""
        log_ratio = of_level(case, self.level, tokens)
        ratio = log_ratio.exp()
        return torch.where(sign[:, None] >= 0, self.good(ratio), self.bad(ratio))

    @property
    def code(self) -> str:
        return name_of(self)[0]

    def words(self) -> str:
        return name_of(self)[1]


def actual_log_ratio(case: Case) -> Tensor:
    """(B, L) new minus old log-prob, where the old one is 0 outside the mask, as the loss sees."""
    return torch.where(case.mask | torch.tensor(case.fills_zeros), case.log_ratio, case.log_prob)


def of_level(case: Case, level: str, tokens: Tensor) -> Tensor:
    log_ratio = actual_log_ratio(case)
    if level == "token":
        return log_ratio
    total = (log_ratio * tokens).sum(1, keepdim=True)
    if level == "answer":
        total = total / tokens.sum(1, keepdim=True).clamp(min=1)
    return total.expand(log_ratio.shape)


class Prober:
    """Tries ratios at the tokens of one case."""

    def __init__(self, examined: Examined, case: Case, tokens: Tensor, has_rest: bool,
                 advantage: Callable[[Case], Tensor] | None):
        rows = torch.arange(len(case.group))
        sign = 1.0 - 2.0 * ((rows + rows // 4) % 2).double()  # each group has both, mixed ones too
        reward = sign * (1 + .3 * case.reward)
        self.examined, self.tokens = examined, tokens & case.mask
        self.case, self.sign = replace(case, reward=reward), sign
        if advantage is not None and (advantage(self.case) * sign < 0).any():
            # one that divides by the group's mean, which has to be positive
            self.case = replace(case, reward=reward + 3)
            self.sign = advantage(self.case).sign()
        self.has_rest = has_rest  # whether something has a gradient where all rewards are 0
        self.still = still = self.policy_push(self.case)
        self.usable = self.tokens & (still.abs() > 1e-7 * still.abs().max())

    def policy_push(self, case: Case) -> Tensor:
        grad = self.examined.raw(case)
        if self.has_rest:
            grad = grad - self.examined.raw(self.examined.without_reward(case))
        return decode(grad, case, self.examined.lens).push

    def response(self, log_ratio: Tensor) -> Tensor:
        moved = self.policy_push(replace(self.case, log_ratio=log_ratio))
        return moved / torch.where(self.usable, self.still, 1.0)

    def level(self) -> str:
        """Which tokens answer when the ratio of one token changes."""
        b = int(self.usable.sum(1).argmax())
        columns = self.usable[b].nonzero().flatten().tolist()
        j = columns[len(columns) // 2]
        step = torch.zeros_like(self.still)
        step[b, j] = small = 1e-4
        one = self.response(step)
        changed = self.usable & ((one - 1).abs() > .02 * small)
        in_row = changed[b].sum() == self.usable[b].sum()
        alone = torch.zeros_like(changed)
        alone[b, j] = True
        if not changed.any():
            return "none"
        if torch.equal(changed, alone):
            return "token"
        if in_row and changed.sum() == changed[b].sum():
            size = math.log(float(one[b, j])) / small if one[b, j] > 0 else 0.0
            if abs(size - 1) < 5e-3:
                return "answer sum"
            if abs(size - 1 / float(self.tokens[b].sum())) < 5e-3:
                return "answer"
            return "unknown"
        columns = changed[b].nonzero().flatten().tolist()
        if changed.sum() == changed[b].sum() == 1:
            return f"misplaced {columns[0] - j}"
        return "unknown"

    def curve(self, level: str, sign: int, ratios: list[float]) -> list[float]:
        """The responses to these ratios, at tokens of answers of one sign."""
        slots = [(b, j) for b, j in self.usable.nonzero().tolist() if self.sign[b] == sign]
        if level != "token":
            first = {}
            for b, j in slots:
                first.setdefault(b, j)
            slots = list(first.items())
        found = []
        for start in range(0, len(ratios), max(1, len(slots))):
            part = ratios[start:start + len(slots)]
            log_ratio = torch.zeros_like(self.still)
            for (b, j), ratio in zip(slots, part):
                if level == "token":
                    log_ratio[b, j] = math.log(ratio)
                else:
                    share = 1 if level == "answer" else float(self.tokens[b].sum())
                    log_ratio[b] = math.log(ratio) / share
            response = self.response(log_ratio)
            found += [float(response[b, j]) for (b, j), _ in zip(slots, part)]
        return found

    def bound(self, level: str, sign: int, low: float, high: float) -> float:
        """The ratio between low and high at which the response stops to be r."""
        state_low = self.state(level, sign, [low])[0]
        while high - low > 1e-9 * high:
            inside = [low + (high - low) * (k + 1) / 25 for k in range(24)]
            states = self.state(level, sign, inside)
            change = next((k for k, state in enumerate(states) if state != state_low), 24)
            low, high = ([low] + inside)[change], (inside + [high])[change]
        return (low + high) / 2

    def state(self, level: str, sign: int, ratios: list[float]) -> list[str]:
        return [state_of(value, ratio)
                for value, ratio in zip(self.curve(level, sign, ratios), ratios)]


def state_of(response: float, ratio: float) -> str:
    if abs(response - ratio) <= 1e-6 * ratio:
        return "r"
    return "0" if abs(response) < 1e-9 else "else"


def find_ratio(examined: Examined, case: Case, tokens: Tensor, has_rest: bool,
               advantage: Callable[[Case], Tensor] | None = None) -> Ratio | str:
    """The ratio, or in words what is not understood of it; "misplaced 1" if the ratio of a token is
    computed with the old log-prob of the token one place before."""
    prober = Prober(examined, case, tokens, has_rest, advantage)
    if not prober.usable.any():
        return "no answer token has a gradient"
    level = prober.level()
    if level == "none":
        return Ratio() if is_flat(prober) else below_one(prober)
    if level.startswith("misplaced"):
        return level
    if level == "unknown":
        return "old_log_prob of one token changes what other tokens get"
    sides = [find_side(prober, level, sign) for sign in (1, -1)]
    if None in sides:
        return "the response to the ratio has none of the known forms"
    return Ratio(level, *sides)


def below_one(prober: Prober) -> Ratio | str:
    """A ratio that is clamped to a bound below 1, so that the response at 1 is that bound. As all
    responses are relative to the one at 1, that of a small ratio r is r / bound."""
    values = [prober.curve("token", sign, GRID) for sign in (1, -1)]
    bound = snapped(GRID[0] / values[0][0]) if values[0][0] > 0 else 2.0
    wanted = [min(ratio, bound) / bound for ratio in GRID]
    fits = all(abs(v - w) < 1e-5 for curve in values for v, w in zip(curve, wanted))
    if bound >= 1 or not fits:
        return "old_log_prob matters far from the ratio 1, but not near it"
    side = Side(high=bound, high_is_zero=False)
    return Ratio("token", side, side)


def is_flat(prober: Prober) -> bool:
    """Whether even ratios far from 1 change nothing."""
    curves = [prober.curve("token", sign, GRID[::6]) for sign in (1, -1)]
    return all(abs(value - 1) < 1e-6 for curve in curves for value in curve)


def find_side(prober: Prober, level: str, sign: int):
    values = prober.curve(level, sign, GRID)
    if not values:
        return Side()
    for formula in (Inverse(), *gates(values)):
        wanted = formula(torch.tensor(GRID, dtype=torch.float64)).tolist()
        if all(abs(v - w) <= 1e-6 * max(1.0, abs(w)) for v, w in zip(values, wanted)):
            return formula
    states = [state_of(value, ratio) for value, ratio in zip(values, GRID)]
    free = [k for k, state in enumerate(states) if state == "r"]
    if not free or states[free[0]:free[-1] + 1] != ["r"] * (free[-1] - free[0] + 1):
        return None
    low = high = None
    low_is_zero = high_is_zero = True
    if free[0] > 0:
        low = prober.bound(level, sign, GRID[free[0] - 1], GRID[free[0]])
        low_is_zero = all(state == "0" for state in states[:free[0]])
        low = low if low_is_zero else values[0]
    if free[-1] < len(GRID) - 1:
        high = prober.bound(level, sign, GRID[free[-1]], GRID[free[-1] + 1])
        high_is_zero = all(state == "0" for state in states[free[-1] + 1:])
        high = high if high_is_zero else values[-1]
    side = Side(snapped(low), snapped(high), low_is_zero, high_is_zero)
    wanted = side(torch.tensor(GRID, dtype=torch.float64)).tolist()
    fits = all(abs(v - w) <= 1e-5 * max(1.0, abs(w)) for v, w in zip(values, wanted))
    return side if fits else None


def gates(values: list[float]) -> list[Gate]:
    """The gate that has the response which was seen at one ratio."""
    for ratio, value in zip(GRID, values):
        share = value / ratio
        if abs(ratio - 1) > .3 and 1e-6 < share < 1 - 1e-6:
            tau = 2 * math.acosh(share ** -.5) / abs(ratio - 1)
            return [Gate(round(tau, 6))]
    return []


def snapped(bound: float | None) -> float | None:
    if bound is None:
        return None
    near = round(bound, 5)
    return near if abs(near - bound) < 1e-6 else bound


def name_of(ratio: Ratio) -> tuple[str, str]:
    """(code, words)."""
    of = {"token": "", "answer": "gspo ", "answer sum": "answer ratio "}[ratio.level]
    whose = {"token": "the ratio of a token",
             "answer": "the ratio of an answer, exp of the mean log-ratio of its tokens (GSPO),",
             "answer sum": "the ratio of an answer, exp of the summed log-ratios of its tokens,"
             }[ratio.level]
    good, bad = ratio.good, ratio.bad
    if isinstance(good, Constant):
        return "no ratio", "old_log_prob is not used: there is no ratio, and nothing to clip"
    if isinstance(good, Inverse):
        return of + "inverse ratio", f"{whose} is upside down, old over new"
    if isinstance(good, Gate):
        return (of + f"sapo {good.tau:g} {bad.tau:g}" if isinstance(bad, Gate) else "sapo",
                f"{whose} goes through SAPO's gate, with tau {good.tau:g} for positive advantages "
                f"and {getattr(bad, 'tau', math.nan):g} for negative ones")
    return clip_name(good, bad, of, whose)


def clip_name(good: Side, bad: Side, of: str, whose: str) -> tuple[str, str]:
    bounds = [good.low, good.high, bad.low, bad.high]
    if bounds == [None] * 4:
        return of + "ratio", f"{whose} is used and not clipped"
    if good == bad:
        low, high = good.low, good.high
        kept = [(low is None or good.low_is_zero), (high is None or good.high_is_zero)]
        said = f"{from_one(low, 'low')} {from_one(high, 'high')}"
        if all(kept):
            return (of + f"mask {said}", f"{whose} has no gradient outside {between(low, high)}, "
                    "whichever sign the advantage has: it is clamped, and PPO's minimum is missing")
        if not any(kept) or None in (low, high):
            return (of + f"cispo {said}", f"{whose} is clamped to {between(low, high)} and "
                    "multiplies log p without a gradient of its own (CISPO)")
    usual = good.low is None and good.high_is_zero and bad.low_is_zero and bad.high_is_zero
    if usual and (good.high is not None or bad.low is not None):
        said = f"{from_one(bad.low, 'low')} {from_one(good.high, 'high')}"
        words = f"{whose} is clipped as in PPO, to {between(bad.low, good.high)}"
        if bad.high is None:
            return of + f"clip {said}", words
        return (of + f"clip {said} dual {bad.high:g}",
                words + f", and for negative advantages also above {bad.high:g} (dual clip)")
    if good.high is None and bad.low is None and good.low_is_zero and bad.high_is_zero:
        said = f"{from_one(good.low, 'low')} {from_one(bad.high, 'high')}"
        return (of + f"clip wrong side {said}", f"{whose} is clipped on the wrong side: where the "
                f"minimum of PPO has a gradient, this has none, beyond "
                f"{between(good.low, bad.high)}")
    return of + "other clip", (f"{whose}: for positive advantages {described(good)}; for negative "
                               f"ones {described(bad)}")


def from_one(bound: float | None, side: str) -> str:
    if bound is None:
        return "none"
    distance = 1 - bound if side == "low" else bound - 1
    return f"{round(distance, 6):g}"


def between(low: float | None, high: float | None) -> str:
    return f"[{'0' if low is None else f'{low:g}'}, {'infinity' if high is None else f'{high:g}'}]"


def described(side: Side) -> str:
    said = []
    if side.low is not None:
        said.append(f"{'nothing' if side.low_is_zero else 'constant'} below {side.low:g}")
    if side.high is not None:
        said.append(f"{'nothing' if side.high_is_zero else 'constant'} above {side.high:g}")
    return " and ".join(said) or "not clipped"
