"""Statistics in plain Python. They are a second implementation beside analysis/statistics.py, which
tests/analysis/test_second_implementation.py compares with it. They import nothing of it.

    Student's t    the distribution function from the incomplete beta function, by its continued
                   fraction; quantiles by bisection
    jackknife      the estimate without one batch or problem after the other
    Fieller        a quotient of means, from the roots of a quadratic
"""
import math
from collections.abc import Callable, Sequence
from functools import cache

Numbers = Sequence[float]


def beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 1000):
        for numerator in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                          -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def two_sided_p(t: float, df: float) -> float:
    """The probability that Student's t is at least as far from 0 as this."""
    x = df / (df + t * t)
    a, b = df / 2, 0.5
    log_front = (math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x)
                 + (b * math.log1p(-x) if x < 1 else -math.inf))
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * beta_fraction(a, b, x) / a
    return 1 - math.exp(log_front) * beta_fraction(b, a, 1 - x) / b


@cache
def quantile(df: float) -> float:
    """The t that 95% of the distribution lie within."""
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 0.05 else (low, middle)
    return low


def mean(values: Numbers) -> float:
    return math.fsum(values) / len(values)


def variance(values: Numbers) -> float:
    middle = mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)


def covariance(one: Numbers, two: Numbers) -> float:
    of_one, of_two = mean(one), mean(two)
    products = [(a - of_one) * (b - of_two) for a, b in zip(one, two)]
    return math.fsum(products) / (len(one) - 1)


def cut(found: list[float], least: float, most: float) -> list[float]:
    """The value as it is, and the ends within what is possible, as a share within 0 and 1."""
    value, *ends_of_it = found
    return [value, *(min(max(end, least), most) for end in ends_of_it)]


def interval(value: float, error: float, df: float) -> list[float]:
    """Value, lower and upper end."""
    reach = quantile(df) * error
    return [value, value - reach, value + reach]


def t_interval(values: Numbers) -> list[float]:
    return interval(mean(values), math.sqrt(variance(values) / len(values)), len(values) - 1)


def two_way(differences: list[list[float]]) -> list[float]:
    """The mean of differences (seeds, problems), for other seeds and other problems. The variance
    of the mean over seeds is at least what the randomness of single answers makes; this randomness
    is taken out of the variance over problems."""
    seeds, problems = len(differences), len(differences[0])
    by_seed = [mean(of_seed) for of_seed in differences]
    by_problem = [mean(of_problem) for of_problem in zip(*differences)]
    value, freedom = mean(by_seed), (seeds - 1) * (problems - 1)
    squares = math.fsum((cell - by_seed[i] - by_problem[j] + value) ** 2
                        for i, of_seed in enumerate(differences) for j, cell in enumerate(of_seed))
    of_answers = max(squares / freedom / (seeds * problems), 1 / (seeds * problems) ** 2)
    of_problems = max(variance(by_problem) / problems - of_answers, 0)
    among_seeds = max(quantile(seeds - 1) ** 2 * variance(by_seed) / seeds,
                      quantile(freedom) ** 2 * of_answers)
    reach = math.sqrt(among_seeds + quantile(problems - 1) ** 2 * of_problems)
    return [value, value - reach, value + reach]


def t_test(values: Numbers) -> float:
    error = math.sqrt(variance(values) / len(values))
    return two_sided_p(mean(values) / error, len(values) - 1) if error else float(not any(values))


def jackknife(n: int, statistic: Callable[[int | None], float]) -> list[float]:
    """`statistic(i)` is the estimate without number i, `statistic(None)` with all."""
    without = [statistic(i) for i in range(n)]
    middle = mean(without)
    error = math.sqrt((n - 1) / n * math.fsum((value - middle) ** 2 for value in without))
    return interval(statistic(None), error, n - 1)


def fieller(above: float, below: float, var_above: float, var_below: float, cov: float,
            df: float) -> list[float] | None:
    """A quotient of two means with the roots of (above - q below)^2 = t^2 variance."""
    t = quantile(df) ** 2
    a, b, c = below ** 2 - t * var_below, above * below - t * cov, above ** 2 - t * var_above
    if below <= 0 or a <= 0:
        return None
    reach = math.sqrt(max(b * b - a * c, 0))
    return [above / below, (b - reach) / a, (b + reach) / a]
