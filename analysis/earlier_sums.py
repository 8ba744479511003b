"""What only the tables and pictures of an earlier experiment are made of: how values are spread,
two quantities against each other, and one t at each absolute position, with what it is by chance.
"""
import numpy as np

from analysis.tally import UNITS, units

SHUFFLES = 100   # of the answers' advantages within their groups
LOG_PROB_EDGES = np.linspace(-14, 0, 141)
S_EDGES = np.linspace(0, np.sqrt(2), 72)
ADVANTAGE_EDGES = np.linspace(-5, 5, 81)


class EarlierSums:
    """Histograms: what lies outside of their edges is counted in the first bin or the last. Sums of
    values and of their squares at each position, as they are, and with the advantages shuffled
    within their groups. `longest`: tokens of the longest answer."""

    def __init__(self, longest: int):
        self.longest, self.rng = longest, np.random.default_rng(1)
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}
        self.log_prob_and_s = self.log_prob_and_advantage = 0.0  # (bins, bins)
        self.counts = np.zeros(longest, np.int64)
        self.sums = {unit: np.zeros((2, longest)) for unit in UNITS}
        self.shuffled = {unit: np.zeros((2, SHUFFLES, longest)) for unit in UNITS}

    def add(self, tokens: dict[str, np.ndarray]) -> None:
        for unit, (low, high) in self.extremes.items():
            self.extremes[unit] = [min(low, tokens[unit].min()), max(high, tokens[unit].max())]
        log_prob = tokens["log_prob"].clip(*LOG_PROB_EDGES[[0, -1]])
        advantage = tokens["advantage"].clip(*ADVANTAGE_EDGES[[0, -1]])
        self.log_prob_and_s += np.histogram2d(log_prob, tokens["s"], [LOG_PROB_EDGES, S_EDGES])[0]
        self.log_prob_and_advantage += np.histogram2d(log_prob, advantage,
                                                      [LOG_PROB_EDGES, ADVANTAGE_EDGES])[0]
        self.add_positions(tokens)

    def add_positions(self, tokens: dict[str, np.ndarray]) -> None:
        position, answers = tokens["position"], np.arange(len(tokens["episode_start"]))
        self.counts += np.bincount(position, minlength=self.longest)
        for unit in UNITS:
            self.sums[unit] += self.sums_at(position, tokens[unit])
        donors = shuffle_within(answers, tokens["group"], SHUFFLES, self.rng)
        for draw, donor in enumerate(donors):
            advantage = read_along(tokens, donor[tokens["answer"]])
            for unit, factor in units(tokens).items():
                self.shuffled[unit][:, draw] += self.sums_at(position, factor * advantage)

    def sums_at(self, position, value) -> list[np.ndarray]:
        return [np.bincount(position, value, self.longest),
                np.bincount(position, value * value, self.longest)]


def shuffle_within(values: np.ndarray, group: np.ndarray, draws: int,
                   rng: np.random.Generator) -> np.ndarray:
    """(n,) -> (draws, n): the values change places within their group."""
    slots = np.argsort(group, kind="stable")
    shuffled = np.empty((draws, len(values)), values.dtype)
    shuffled[:, slots] = values[np.argsort(group + rng.random((draws, len(values))), axis=1)]
    return shuffled


def read_along(tokens: dict[str, np.ndarray], donor: np.ndarray) -> np.ndarray:
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
