"""What a loss does with the ratio of new to old probability: how it clips.

The `response` f of a token is its push at a ratio r, divided by its push at the ratio 1. Advantage
and counting cancel in it. Without a ratio f is 1, with one it is r, and a clip makes it 0 or
constant beyond a bound. The bounds are found by trying ratios, ever closer together.
"""
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case, noise_like
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
class Gamma:
    """VESPO's weight, w^k exp(lam (1 - w)), which is largest at w = k / lam."""
    k: float
    lam: float

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio ** self.k * (self.lam * (1 - ratio)).exp()


@dataclass(frozen=True)
class Ratio:
    """The response to good and bad answers, and whether a ratio is that of a token or that of an
    answer, which is exp of the mean or the sum of the log-ratios of its tokens. In the geometric
    mean, the ratio of each token is clipped before, and a clipped token has no response. In a
    product it is ratio times advantage that is clipped. Undetached, a clamped ratio multiplies
    log p, and has a gradient of its own between the bounds."""
    level: str = "token"
    good: object = Constant()
    bad: object = Constant()
    upside_down: bool = False  # old over new

    def __call__(self, case: Case, sign: Tensor, tokens: Tensor) -> Tensor:
        """(B, L) the responses, where `sign` (B,) is the advantage, or its sign alone."""
        log_ratio = actual_log_ratio(case) * (-1 if self.upside_down else 1)
        is_good = sign[:, None] >= 0
        if self.level == "product":
            return log_ratio.exp() * (log_ratio.exp() * sign[:, None] <= self.good.high)
        if self.level == "undetached":
            clipped = log_ratio.exp().clamp(self.good.low, self.good.high)
            through = 1 + case.log_prob * (clipped == log_ratio.exp())
            return clipped * through / (1 + case.log_prob)
        if self.level == "geometric":
            clipped = torch.where(is_good, limited(log_ratio, self.good),
                                  limited(log_ratio, self.bad))
            return of_level(clipped, "answer", tokens).exp() * (clipped == log_ratio)
        ratio = of_level(log_ratio, self.level, tokens).exp()
        return torch.where(is_good, self.good(ratio), self.bad(ratio))


def actual_log_ratio(case: Case) -> Tensor:
    """(B, L) new minus old log-prob, where the old one is 0 outside the mask, as the loss sees."""
    return torch.where(case.mask | torch.tensor(case.fills_zeros), case.log_ratio, case.log_prob)


def of_level(log_ratio: Tensor, level: str, tokens: Tensor) -> Tensor:
    if level == "token":
        return log_ratio
    total = (log_ratio * tokens).sum(1, keepdim=True)
    if level == "answer":
        total = total / tokens.sum(1, keepdim=True).clamp(min=1)
    return total.expand(log_ratio.shape)


def limited(log_ratio: Tensor, side: Side) -> Tensor:
    low = -math.inf if side.low is None else math.log(side.low)
    high = math.inf if side.high is None else math.log(side.high)
    return log_ratio.clamp(low, high)


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
        self.upside_down = False  # whether `curve` tries ratios of old to new
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
        """Which tokens answer when the ratio of one token changes. A clamp at the ratio 1 may hide
        one direction, and so may the sign of the advantage."""
        for sign, small in itertools.product((1, -1), (1e-4, -1e-4)):
            rows = self.usable.sum(1) * (self.sign == sign)
            found = self.level_of_row(int(rows.argmax()), small) if rows.any() else "none"
            if found != "none":
                return found
        return "none"

    def level_of_row(self, b: int, small: float) -> str:
        columns = self.usable[b].nonzero().flatten().tolist()
        j = columns[len(columns) // 2]
        step = torch.zeros_like(self.still)
        step[b, j] = small
        changed = self.usable & ((self.response(step) - 1).abs() > .02 * abs(small))
        if not changed.any():
            return "none"
        columns = changed[b].nonzero().flatten().tolist()
        if changed.sum() > changed[b].sum():
            return "unknown"
        if columns == [j]:
            return "token"
        if torch.equal(changed[b], self.usable[b]):
            return "answer"
        return f"misplaced {columns[0] - j}" if len(columns) == 1 else "unknown"

    def holds(self, ratio: Ratio) -> bool:
        """Whether it gives the response where each token has a ratio of its own."""
        log_ratio = noise_like(self.case, 35, 1.0)
        wanted = ratio(replace(self.case, log_ratio=log_ratio), self.sign, self.tokens)
        error = (self.response(log_ratio) - wanted / ratio(self.case, self.sign, self.tokens)).abs()
        return bool((error[self.usable] < 1e-4).all())

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
                new_over_old = -math.log(ratio) if self.upside_down else math.log(ratio)
                if level == "token":
                    log_ratio[b, j] = new_over_old
                else:
                    share = float(self.tokens[b].sum()) if level == "answer sum" else 1
                    log_ratio[b] = new_over_old / share
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
    levels = ["token"] if level == "token" else ["answer", "geometric", "answer sum"]
    for prober.upside_down, level in itertools.product((False, True), levels):
        good, bad = [find_side(prober, level, sign) for sign in (1, -1)]
        found = Ratio(level, good, bad, prober.upside_down)
        if None not in (good, bad) and prober.holds(found):
            return found
    side = undetached_side(prober)
    found = Ratio("undetached", side, side)
    if level == "token" and (side.low, side.high) != (None, None) and prober.holds(found):
        return found
    return "the response to the ratio has none of the known forms"


def undetached_side(prober: Prober) -> Side:
    """The bounds between which the response is r, and beyond which it depends on log p."""
    prober.upside_down = False
    states = prober.state("token", 1, GRID)
    free = [k for k, state in enumerate(states) if state == "r"] or [0]
    low = high = None
    if free[0] > 0:
        low = snapped(prober.bound("token", 1, GRID[free[0] - 1], GRID[free[0]]))
    if free[-1] < len(GRID) - 1:
        high = snapped(prober.bound("token", 1, GRID[free[-1]], GRID[free[-1] + 1]))
    return Side(low, high, False, False)


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
    for formula in (Constant(), *gates(values), *gammas(values)):
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


def gammas(values: list[float]) -> list[Gamma]:
    """The weight of VESPO that has the responses which were seen at two ratios."""
    (r, first), (q, second) = (GRID[30], values[30]), (GRID[45], values[45])  # 0.37 and 1.65
    if min(first, second) <= 0:
        return []
    determinant = math.log(r) * (1 - q) - math.log(q) * (1 - r)
    k = (math.log(first) * (1 - q) - math.log(second) * (1 - r)) / determinant
    lam = (math.log(r) * math.log(second) - math.log(q) * math.log(first)) / determinant
    return [Gamma(round(k, 6), round(lam, 6))] if abs(lam) > 1e-6 else []


def snapped(bound: float | None) -> float | None:
    if bound is None or bound <= 0:
        return bound
    near = min(round(bound, 5), math.exp(round(math.log(bound), 4)), key=lambda n: abs(n - bound))
    return near if abs(near - bound) < 1e-6 else bound
