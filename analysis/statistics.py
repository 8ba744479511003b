"""The statistics that numpy lacks: how sure a number is when tokens are not independent.

Tokens of an answer share one advantage, and the advantages of a group sum to zero, so the group is what can be
drawn again, not the token. Across runs it is the seed. Nothing here assumes more than that.
"""
from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float      # 95% interval
    high: float
    p: float        # two-sided, of what `value` would be without an effect
    visible: float = float("nan")  # an effect of about this size would be seen in 80 of 100 repetitions

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@cache
def student(df: float) -> tuple[np.ndarray, np.ndarray]:
    """Student's t as a table: t = sqrt(df) tan(angle), where the angle has density cos(angle)^(df - 1)."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos(angle).clip(0) ** (min(df, 10_000) - 1)  # beyond that it is the normal distribution
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return angle, below / below[-1]


def student_quantile(probability: float, df: float) -> float:
    angle, below = student(df)
    return float(np.sqrt(min(df, 10_000)) * np.tan(np.interp(probability, below, angle)))


def two_sided_p(t: float, df: float) -> float:
    angle, below = student(df)
    return float(2 * np.interp(np.arctan(-abs(t) / np.sqrt(min(df, 10_000))), angle, below))


def mean_reach(values) -> np.ndarray | float:
    """How far the 95% interval of a mean over seeds reaches, by Student's t; the first axis is the seeds, two of them at least."""
    return student_quantile(0.975, len(values) - 1) * np.std(values, axis=0, ddof=1) / np.sqrt(len(values))


FEWEST = 6  # groups behind a number before anything is said about it


def estimate(value: float, error: float, df: float, tests: int = 1) -> Estimate:
    """A value and its standard error, of which df degrees of freedom are known."""
    if not np.isfinite(value) or not np.isfinite(error) or df < 1:
        return Estimate(value, np.nan, np.nan, np.nan)
    reach = student_quantile(0.975, df) * error
    p = two_sided_p(value / error, df) if error > 0 else float(value == 0)
    return Estimate(value, value - reach, value + reach, p, detectable(df, tests) * error)


@cache
def detectable(df: float, tests: int = 1) -> float:
    """How many standard errors an effect must have to be found, at 5% over so many tests, in 80 of 100 experiments.
    The error is itself estimated: chance is drawn for both."""
    rng = np.random.default_rng(0)
    spread = np.sqrt(rng.chisquare(df, 40_000) / df)
    return float(np.quantile(student_quantile(1 - 0.025 / tests, df) * spread - rng.normal(size=40_000), 0.8))


def ratio(value: float, draws: np.ndarray, groups: int) -> Estimate:
    """A ratio and the same ratio with the groups drawn again; the interval is made for the logarithm. `groups` are those
    that carry it: groups whose advantages are all 0 say nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        centre, spread = np.log(value), np.log(draws)
    spread = spread[np.isfinite(spread)]
    if groups < FEWEST or len(spread) < 0.9 * len(draws) or not np.isfinite(centre):
        return Estimate(float(value), np.nan, np.nan, np.nan)
    found = estimate(float(centre), float(spread.std(ddof=1)) * np.sqrt(groups / (groups - 1)), groups - 1)
    return Estimate(float(value), *np.exp([found.low, found.high]).tolist(), found.p)


def mean_over(values) -> Estimate:
    """The mean over seeds or questions, by Student's t. An undefined value is left out, with its question."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return Estimate(float(known.mean()) if len(known) else np.nan, np.nan, np.nan, np.nan)
    return estimate(float(known.mean()), float(known.std(ddof=1) / np.sqrt(len(known))), len(known) - 1)


def jackknife(value: float, left: np.ndarray) -> Estimate:
    """A number, and what it becomes without each of the questions (or seeds, or blocks) it was made from."""
    n = len(left)
    error = np.sqrt((n - 1) / n * np.square(left - np.mean(left)).sum()) if n > 1 else np.nan
    return estimate(float(value), float(error), n - 1)


def ratio_of_sums(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Sum over sum, from a pair of numbers a question."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(above.sum() / below.sum(), (above.sum() - above) / (below.sum() - below))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """0, 1, ... from the smallest; equal values share their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; undefined where one of the two is constant."""
    x, y = average_ranks(x), average_ranks(y)
    x, y = x - x.mean(), y - y.mean()
    size = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / size) if size > 0 else float("nan")


def poisson_draws(rng: np.random.Generator, draws: int, groups: int) -> np.ndarray:
    """(draws, groups): how often each group is drawn. With independent Poisson(1) counts the bootstrap needs no list
    of all groups, and so no memory that grows with them (Chamandy et al. 2012, "Estimating uncertainty for massive
    data streams")."""
    return rng.poisson(1.0, (draws, groups)).astype(np.float64)


def shuffle_within(values: np.ndarray, group: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) -> (draws, n): the values change places within their group, as if nothing distinguished them."""
    slots = np.argsort(group, kind="stable")
    shuffled = np.empty((draws, len(values)))
    shuffled[:, slots] = values[np.argsort(group + rng.random((draws, len(values))), axis=1)]
    return shuffled


def permutation_p(value: float, null: np.ndarray) -> float:
    """Two-sided; the observed order is one of the possible ones and counts as such."""
    tail = min((null >= value).sum(), (null <= value).sum())
    return float(min(1.0, 2 * (1 + tail) / (1 + len(null))))


def holm(p: list[float]) -> list[float]:
    """Holm's adjusted p-values: below 0.05 for any of several true nulls in at most 5% of experiments."""
    order, count = np.argsort(p), len(p)
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate((count - np.arange(count)) * np.asarray(p, float)[order]).clip(max=1)
    return adjusted.tolist()


class Regression:
    """Least squares with errors clustered by group (Liang and Zeger 1986), from sums alone.

    The error needs sum_g u_g u_g', where u_g = h_g - M_g b, h_g = X_g'y_g, M_g = X_g'X_g; b is known only at the end, so
    the products of h and M are summed up to fourth order instead of keeping each group.
    """

    def __init__(self, terms: list[str]):
        k = len(terms)
        self.terms, self.groups, self.squares = terms, np.zeros(k, np.int64), 0.0  # groups in which a term occurs and y is not all 0
        self.m, self.h = np.zeros((k, k)), np.zeros(k)
        self.hh, self.hm, self.mm = np.zeros((k, k)), np.zeros((k, k, k)), np.zeros((k, k, k, k))

    def add(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> None:
        """x (n, k), y (n,), group (n,) in 0..Q-1: whole groups."""
        members = [np.flatnonzero(group == g) for g in np.unique(group)]
        m = np.stack([x[i].T @ x[i] for i in members])
        h = np.stack([x[i].T @ y[i] for i in members])
        live = np.array([y[i].any() for i in members])
        self.groups += (np.diagonal(m, axis1=1, axis2=2)[live] > 0).sum(0)
        self.squares += float(y @ y)
        self.m, self.h = self.m + m.sum(0), self.h + h.sum(0)
        self.hh += np.einsum("gi,gj->ij", h, h)
        self.hm += np.einsum("gi,gjl->ijl", h, m)
        self.mm += np.einsum("gil,gjm->iljm", m, m)

    def estimates(self) -> dict[str, Estimate]:
        """Of the terms that occur and are not sums of those before them. The first term is the constant, in every group."""
        here, n = [], self.m[0, 0]
        scale = np.sqrt(np.diag(self.m))
        for i in np.flatnonzero(scale):
            tried = [*here, i]
            if np.linalg.matrix_rank(self.m[np.ix_(tried, tried)] / np.outer(scale[tried], scale[tried]), tol=1e-9) == len(tried):
                here = tried
        m, k, groups = self.m[np.ix_(here, here)], len(here), self.groups[0]
        if groups < 2 or n <= k:
            return {}
        inverse = np.linalg.inv(m)
        b = inverse @ self.h[here]
        cross = self.hm[np.ix_(here, here, here)] @ b
        meat = self.hh[np.ix_(here, here)] - cross - cross.T + np.einsum("iljm,l,m->ij", self.mm[np.ix_(here, here, here, here)], b, b)
        few = groups / (groups - 1) * (n - 1) / (n - k)
        error = np.sqrt((few * np.diag(inverse @ meat @ inverse)).clip(0))
        found = {}
        for i, value, spread in zip(here, b.tolist(), error.tolist()):
            known = self.groups[i] >= FEWEST
            found[self.terms[i]] = estimate(value, spread if known else np.nan, int(self.groups[i]) - 1)
            if abs(value) * scale[i] < 1e-6 * np.sqrt(self.squares):  # rounding, not an effect
                found[self.terms[i]] = Estimate(value, value, value, 1.0)
        return found


def paired_difference(differences: np.ndarray, tests: int = 1, draws: int = 4000) -> Estimate:
    """(seeds, items): the same seed and the same held-out item in two arms. How far would the mean be off with other
    seeds, and with other items?

    Bootstrap over seeds and bootstrap over items; the chance in every single answer is in both, and is taken out of the
    second. A bootstrap over few seeds is too narrow by sqrt((S - 1) / S) and by the difference between Student's t and the
    normal distribution: both are put right, the latter for seeds and items apart, as there are many more items than
    seeds. With one seed the interval is about items alone. `tests`: of how many arms this is one (for what can be seen).
    """
    rng, (seeds, items) = np.random.default_rng(0), differences.shape

    def spread(means: np.ndarray) -> float:
        return means[rng.integers(0, len(means), (draws, len(means)))].mean(1).var() * len(means) / max(len(means) - 1, 1)

    value, by_seed, by_item = float(differences.mean()), differences.mean(1), differences.mean(0)
    if seeds == 1:
        return estimate(value, float(np.sqrt(spread(by_item))) if items > 1 else np.nan, items - 1, tests)
    rest = differences - by_seed[:, None] - by_item + value
    chance = (rest ** 2).sum() / max((seeds - 1) * (items - 1), 1) / (seeds * items)
    of_seeds, of_items = spread(by_seed), max(spread(by_item) - chance, 0.0)

    def reach(level: float) -> float:
        quantiles = student_quantile(1 - level / 2, seeds - 1), student_quantile(1 - level / 2, max(items - 1, 1))
        return float(np.sqrt(quantiles[0] ** 2 * of_seeds + quantiles[1] ** 2 * of_items))

    low, high = 0.0, 1.0  # the level at which the interval just reaches 0
    for _ in range(50):
        low, high = ((low + high) / 2, high) if reach((low + high) / 2) > abs(value) else (low, (low + high) / 2)
    error = np.sqrt(of_seeds + of_items)
    visible = reach(0.05 / tests) / student_quantile(1 - 0.025 / tests, seeds - 1) * detectable(seeds - 1, tests)
    return Estimate(value, value - reach(0.05), value + reach(0.05), high if error > 0 else float(value == 0), float(visible))


def verdicts(found: list[Estimate], words=("more", "less"), null: float = 1.0) -> list[str]:
    """Holm over the rows of a table: with nothing behind any of them, 95 of 100 tables say nothing."""
    known = [i for i, e in enumerate(found) if np.isfinite(e.p)]
    said = ["too few"] * len(found)
    for i, p in zip(known, holm([found[i].p for i in known]) if known else []):
        said[i] = "none seen" if p >= 0.05 else words[0] if found[i].value > null else words[1]
    return said


def wilson_interval(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927); unlike the plain one it stays inside 0..1."""
    p, spread = hits / count, z * z / count
    centre = p + spread / 2
    half = z * np.sqrt(p * (1 - p) / count + spread / (4 * count))
    return float(max(0.0, (centre - half) / (1 + spread))), float(min(1.0, (centre + half) / (1 + spread)))
