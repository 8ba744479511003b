"""How a loss makes an advantage of the rewards.

An `Advantage` is one hypothesis: a baseline that is subtracted, a scale that divides, and an
epsilon. Epsilon is not guessed but computed, from groups whose rewards are nearly equal.
"""
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case

BASELINES = {
    "mean": "the mean of its group", "others": "the mean of the other answers of its group",
    "none": "nothing", "batch": "the mean of the batch",
    "batch others": "the mean of the other answers of the batch",
    "batch median": "the lower median of the batch",
    "median": "the lower median of its group", "best": "the best reward of its group",
    "worst": "the worst reward of its group",
    "by length": "the mean of its group, in which a reward counts as much as its answer is long"}
SCALES = {
    "none": "nothing", "std n": "the std of its group over n",
    "std n-1": "the std of its group over n - 1",
    "batch n": "the std of all rewards over n", "batch n-1": "the std of all rewards over n - 1",
    "centred n": "the std over n of what all answers have then",
    "centred n-1": "the std over n - 1 of what all answers have then",
    "variance n": "the variance of its group over n",
    "variance n-1": "the variance of its group over n - 1",
    "others n": "the std over n of the other answers of its group",
    "others n-1": "the std over n - 1 of the other answers of its group",
    **{f"{name} group {n}": f"the std over {words} of the {name} group, whichever is its own"
       for name in ("first", "last") for n, words in (("n", "n"), ("n-1", "n - 1"))},
    "mean": "the mean of its group", "range": "the range of its group",
    "mad": "the mean absolute deviation of its group",
    "tokens n": "the std over n, after their mean is taken off, where an answer counts once for "
                "each of its tokens",
    "tokens n-1": "the std over n - 1, after their mean is taken off, where an answer counts once "
                  "for each of its tokens"}
ORDERS = {
    "row before": "Each answer gets the advantage of the row before it",
    "row after": "Each answer gets the advantage of the row after it",
    "reversed rows": "The advantages go to the rows in reversed order, the last one to the first "
                     "answer"}
FORMS = {"plus": "+ {}", "root": "with {} under the root", "max": "but at least {}"}
EPSILONS = (1e-4, 1e-6, 1e-8, 1e-5, 1e-3, 0.0)


@dataclass(frozen=True)
class Cost:
    """What may be taken off the reward of an answer, times a rate."""
    code: str
    words: str
    of: Callable[[Case], Tensor]  # (B,)


@dataclass(frozen=True)
class Advantage:
    baseline: str
    scale: str = "none"
    form: str = "plus"
    epsilon: float = 0.0
    whitened: str = ""          # "n" or "n-1": standardised over the batch afterwards
    positive: float = 1.0       # positive advantages are multiplied by it
    negative: float = 1.0       # negative advantages are multiplied by it
    least: float = -math.inf    # advantages are clamped to least and most
    most: float = math.inf
    constant: float = 0.0       # a number that is taken off each reward before
    grouping: str = "group"     # which rows are a group
    order: str = ""             # answers get the advantages of other rows, by the names of ORDERS
    cost: Cost | None = None    # what is taken off the reward before
    rate: float = 0.0

    def __call__(self, case: Case) -> Tensor:
        """(B,) the advantages."""
        moved = replace(case, reward=case.reward.double() - self.constant)
        if self.cost is not None:
            moved = replace(moved, reward=moved.reward - self.rate * self.cost.of(case))
        above, scale = parts(moved, labels(case, self.grouping), self.baseline, self.scale)
        value = above / divisor(scale, self.form, self.epsilon)
        if self.whitened:
            correction = 1 if self.whitened == "n-1" else 0
            value = (value - value.mean()) / (value.std(correction=correction) + 1e-8)
        value = value * torch.where(value < 0, self.negative, self.positive)
        return value.clamp(self.least, self.most)[rows_in_order(len(value), self.order)]

    @property
    def is_clamped(self) -> bool:
        return min(-self.least, self.most) < math.inf

    @property
    def complexity(self) -> int:
        own = list(BASELINES).index(self.baseline) + list(SCALES).index(self.scale)
        extras = [self.whitened, self.negative != self.positive, self.is_clamped]
        return own + 5 * sum(map(bool, extras)) + (self.form != "plus")

    @property
    def code(self) -> str:
        """The word for --expect."""
        epsilon = f" {self.epsilon:g}" if self.scale != "none" else ""
        names = {("mean", "none"): "mean", ("others", "none"): "leave one out",
                 ("none", "none"): "raw", ("mean", "std n"): "z n", ("mean", "std n-1"): "z n-1",
                 ("batch", "none"): "batch mean", ("batch", "batch n"): "batch z n",
                 ("batch", "batch n-1"): "batch z n-1"}
        pair = (self.baseline, self.scale)
        code = names.get(pair, f"minus {self.baseline} over {self.scale}") + epsilon
        if self.scale != "none" and self.form != "plus" and self.epsilon:
            code += f" {self.form}"
        code += f" whitened {self.whitened}" if self.whitened else ""
        code += f" positive {self.positive:g}" if self.positive != 1 else ""
        code += f" negative {self.negative:g}" if self.negative != 1 else ""
        code += f" minus {self.constant:g}" if self.constant else ""
        if self.is_clamped:
            code += (f" limit {self.most:g}" if self.most == -self.least else
                     f" between {self.least:g} and {self.most:g}")
        code += f" of {self.order}" if self.order else ""
        code += f" of reward - {self.rate:g} {self.cost.code}" if self.cost else ""
        return code + (f" by {self.grouping}" if self.grouping != "group" else "")

    def words(self) -> str:
        said = "the reward itself"
        if self.constant:
            said = f"the reward minus {self.constant:g}"
        elif self.baseline != "none":
            said = f"the reward minus {BASELINES[self.baseline]}"
        if self.scale != "none":
            said += f", divided by {SCALES[self.scale]}"
            if self.epsilon:
                said += " " + FORMS[self.form].format(f"{self.epsilon:g}")
            else:
                said += " without an epsilon"
        if self.whitened:
            said += f"; then standardised over the batch, with the std over {self.whitened}"
        if self.positive != 1:
            said += f"; positive ones are multiplied by {self.positive:g}"
        if self.negative != 1:
            said += f"; negative ones are multiplied by {self.negative:g}"
        if self.is_clamped:
            said += f"; then clamped to [{self.least:g}, {self.most:g}]"
        return said


def rows_in_order(B: int, order: str) -> Tensor:
    """(B,) the row whose advantage each answer gets."""
    rows = torch.arange(B)
    if order == "reversed rows":
        return rows.flip(0)
    return rows.roll({"": 0, "row before": 1, "row after": -1}[order])


def labels(case: Case, grouping: str) -> Tensor:
    """(B,) which rows are a group: those of batch.group, or another set of rows."""
    B, groups = len(case.group), int(case.group.max()) + 1
    rows = torch.arange(B)
    if grouping == "group":
        return case.group
    if grouping == "mixed":
        return rows % groups
    if grouping == "batch":
        return torch.zeros_like(rows)
    return rows // int(grouping.split()[1])  # "rows 2": two rows after each other


def per_group(value: Tensor, label: Tensor, reduce: str) -> Tensor:
    start = {"amax": -torch.inf, "amin": torch.inf}.get(reduce, 0.0)
    result = torch.full((int(label.max()) + 1,), start, dtype=torch.float64)
    return result.scatter_reduce(0, label, value, reduce)[label]


def group_mean(value: Tensor, label: Tensor) -> Tensor:
    return per_group(value, label, "sum") / per_group(torch.ones_like(value), label, "sum")


def parts(case: Case, label: Tensor, baseline: str, scale: str) -> tuple[Tensor, Tensor]:
    """(reward minus baseline, scale), both (B,)."""
    reward, length = case.reward, case.length.double()
    if baseline == "by length":
        above = reward - group_mean(reward * length, label) / group_mean(length, label)
    else:
        above = reward - baseline_of(reward, label, baseline)
    if scale.startswith("tokens"):
        tokens = length.sum()
        above = above - (above * length).sum() / tokens
        square = (above.square() * length).sum() / (tokens - (1 if scale == "tokens n-1" else 0))
        return above, square.sqrt().expand(len(reward))
    return above, scale_of(reward, label, scale, above)


def baseline_of(reward: Tensor, label: Tensor, name: str) -> Tensor:
    size = per_group(torch.ones_like(reward), label, "sum")
    B = len(reward)
    if name == "none":
        return torch.zeros_like(reward)
    if name == "mean":
        return group_mean(reward, label)
    if name == "others":
        return (group_mean(reward, label) * size - reward) / (size - 1).clamp(min=1)
    if name == "batch":
        return reward.mean().expand(B)
    if name == "batch median":
        return reward.median().expand(B)
    if name == "batch others":
        return (reward.sum() - reward) / (B - 1)
    if name == "median":
        medians = [reward[label == number].median() for number in range(int(label.max()) + 1)]
        return torch.stack(medians)[label]
    return per_group(reward, label, "amax" if name == "best" else "amin")


def scale_of(reward: Tensor, label: Tensor, name: str, above: Tensor) -> Tensor:
    size = per_group(torch.ones_like(reward), label, "sum")
    mean = group_mean(reward, label)
    variance = group_mean((reward - mean).square(), label)
    sample = variance * size / (size - 1).clamp(min=1)
    correction = 1 if name.endswith("n-1") else 0
    if name.startswith("others"):
        return std_of_others(reward, label, correction)
    if name.startswith(("batch", "centred", "first group", "last group")):
        of = {"batch": reward, "centred": above, "first group": reward[label == label[0]],
              "last group": reward[label == label[-1]]}
        return of[name.rsplit(" ", 1)[0]].std(correction=correction).expand(len(reward))
    return {"none": torch.ones_like(reward), "std n": variance.sqrt(), "std n-1": sample.sqrt(),
            "variance n": variance, "variance n-1": sample, "mean": mean,
            "range": per_group(reward, label, "amax") - per_group(reward, label, "amin"),
            "mad": group_mean((reward - mean).abs(), label)}[name]


def std_of_others(reward: Tensor, label: Tensor, correction: int) -> Tensor:
    """(B,) the std of the rewards of a group but that of the answer itself."""
    others = (label[:, None] == label) & ~torch.eye(len(label), dtype=torch.bool)
    number = others.sum(1)
    mean = (others * reward).sum(1) / number.clamp(min=1)
    squares = (others * (reward - mean[:, None]).square()).sum(1)
    return (squares / (number - correction).clamp(min=1)).sqrt()


def divisor(scale: Tensor, form: str, epsilon: float) -> Tensor:
    if form == "root":
        return (scale.square() + epsilon).sqrt()
    if form == "max":
        return scale.clamp(min=epsilon)
    divided = scale + epsilon
    return torch.where(divided == 0, 1.0, divided)  # a dead group without an epsilon has above 0


def hypotheses(cases: list[Case], found: list[Tensor], grouping: str) -> Iterator[Advantage]:
    """All advantages with the epsilon that the cases ask for. `found` are the numbers (B,) that
    were read off the gradient of each case, each an advantage times the same factor."""
    for baseline, scale in itertools.product(BASELINES, SCALES):
        plain = Advantage(baseline, scale, grouping=grouping)
        if scale == "none":
            yield plain
            continue
        columns = [parts(case, labels(case, grouping), baseline, scale) for case in cases]
        above = torch.cat([column[0] for column in columns])
        size = torch.cat([column[1] for column in columns])
        seen = torch.cat(found).nan_to_num() != 0  # NaN: an answer without a trained token
        good = seen & (above > 0)  # negative ones may have another weight
        good = good if good.any() else seen & (above < 0)
        for form in FORMS:
            for epsilon in solved(above[good], size[good], torch.cat(found)[good], form):
                yield replace(plain, form=form, epsilon=epsilon)
    for correction, epsilon, white in itertools.product(("n", "n-1"), EPSILONS, ("n", "n-1")):
        yield Advantage("mean", f"std {correction}", "plus", epsilon, white, grouping=grouping)
    for white in ("n", "n-1"):
        yield Advantage("mean", whitened=white, grouping=grouping)


def solved(above: Tensor, size: Tensor, found: Tensor, form: str) -> Iterator[float]:
    """The epsilon with which found = factor * above / divisor(size, epsilon) in two rows, the one
    with the largest scale and the one with the smallest; then 0."""
    usable = (found != 0) & (above != 0)
    if not usable.any():
        return
    above, size, found = above[usable], size[usable], found[usable]
    quotient = (above / found).abs()  # divisor / factor
    big, small = int(size.argmax()), int(size.argmin())
    power = 2 if form == "root" else 1
    ratio = float(quotient[small] / quotient[big]) ** power
    if form == "max":
        epsilon = ratio * float(size[big])
    else:
        least, most = float(size[small]) ** power, float(size[big]) ** power
        epsilon = (ratio * most - least) / (1 - ratio) if ratio != 1 else 0.0
    if 1e-11 < epsilon < 1e3:  # with a larger one nothing is left of the scale
        yield short(epsilon)
    if form == "plus":
        yield 0.0


def short(value: float) -> float:
    """The value with one or two digits if that is the value to a thousandth."""
    for digits in (1, 2):
        near = float(f"{value:.{digits}g}")
        if abs(near - value) <= 1e-3 * abs(value):
            return near
    return value
