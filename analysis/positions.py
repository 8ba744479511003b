"""One t at each absolute position, as an earlier experiment had it, and what it is by chance."""
import numpy as np

from analysis.sizes import UNITS, units
from analysis.statistics import shuffle_within

SHUFFLES = 100   # of the answers' advantages within their groups


class Positions:
    """Sums of values and of their squares at each position: as they are, and with the advantages
    shuffled within their groups."""

    def __init__(self, longest: int):
        self.longest, self.rng = longest, np.random.default_rng(1)
        self.counts = np.zeros(longest, np.int64)
        self.sums = {unit: np.zeros((2, longest)) for unit in UNITS}
        self.shuffled = {unit: np.zeros((2, SHUFFLES, longest)) for unit in UNITS}

    def add(self, tokens: dict) -> None:
        self.counts += np.bincount(tokens["position"], minlength=self.longest)
        for unit in UNITS:
            self.sums[unit] += self.sums_at(tokens["position"], tokens[unit])
        answers = np.arange(len(tokens["episode_start"]))
        donors = shuffle_within(answers, tokens["group"], SHUFFLES, self.rng).astype(np.int64)
        for draw, donor in enumerate(donors):
            advantage = read_along(tokens, donor[tokens["answer"]])
            for unit, factor in units(tokens).items():
                value = factor * advantage
                self.shuffled[unit][:, draw] += self.sums_at(tokens["position"], value)

    def sums_at(self, position, value) -> list[np.ndarray]:
        return [np.bincount(position, value, self.longest),
                np.bincount(position, value * value, self.longest)]


def read_along(tokens: dict, donor: np.ndarray) -> np.ndarray:
    """(tokens,): the advantage at a token's relative position in its donor, an answer of the same
    group; so neighbours stay neighbours where advantages differ within an answer."""
    length = tokens["length"]
    place = tokens["position"] * length[donor] // length[tokens["answer"]]
    return tokens["advantage"][tokens["episode_start"][donor] + place]


def t_statistics(counts: np.ndarray, total: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """mean / (population std / sqrt n) where n > 1, 0 without spread. Positions are the last
    axis."""
    there = counts > 1
    n = counts[there]
    mean, square = total[..., there] / n, squares[..., there] / n
    spread = np.sqrt((square - mean ** 2).clip(0))
    # Sums of squares keep half of their digits: a smaller spread is rounding.
    spread = np.where(spread <= 1e-7 * np.sqrt(square), 0.0, spread)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 0, mean / (spread / np.sqrt(n)), 0.0)
