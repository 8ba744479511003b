"""One t at each absolute position, as an earlier experiment had it, and what it is by chance."""
import numpy as np

from analysis.sizes import UNITS, units
from analysis.statistics import shuffle_within

SHUFFLES = 100   # of the advantages within their groups


class Positions:
    """The sums that a t at each position needs: of the advantages as they are, by blocks of
    training, and shuffled within their groups."""

    def __init__(self, blocks: int, longest: int):
        self.longest, self.rng = longest, np.random.default_rng(1)
        self.counts = np.zeros((blocks, longest), np.int64)
        self.sums = {unit: np.zeros((2, blocks, longest)) for unit in UNITS}  # values, squares
        self.shuffled = {unit: np.zeros((2, SHUFFLES, longest)) for unit in UNITS}
        self.answers = np.zeros(blocks, np.int64)
        self.flat_answers = np.zeros(blocks, np.int64)  # in groups whose rewards are all equal

    def add(self, tokens: dict, values: dict, block: int) -> None:
        position, group, reward = tokens["position"], tokens["group"], tokens["reward"]
        self.counts[block] += np.bincount(position, minlength=self.longest)
        for unit, value in values.items():
            self.sums[unit][:, block] += self.sums_at(position, value)
        flat = [g for g in np.unique(group) if np.ptp(reward[group == g]) == 0]
        self.answers[block] += len(group)
        self.flat_answers[block] += np.isin(group, flat).sum()
        self.add_shuffled(tokens)

    def sums_at(self, position, value) -> list[np.ndarray]:
        """Of values and of their squares at each position."""
        return [np.bincount(position, value, self.longest),
                np.bincount(position, value * value, self.longest)]

    def add_shuffled(self, tokens: dict) -> None:
        """Exchange the answers of a group, with all their advantages.

        Where advantages differ within an answer, its new owner reads them at the same relative
        position, so that neighbours stay neighbours.
        """
        answers = np.arange(len(tokens["episode_start"]))
        donor = shuffle_within(answers, tokens["group"], SHUFFLES, self.rng)
        donor = donor.astype(np.int64)  # (draws, answers)
        advantage = tokens["advantage"]
        first = advantage[tokens["episode_start"]]
        whole_answers = np.array_equal(first[tokens["answer"]], advantage)
        weights_are_one = (tokens["weight"] == 1).all()
        sums = {}
        for unit, factor in units(tokens).items():
            plain = unit.removeprefix("weighted ")
            if unit != plain and weights_are_one:
                sums[unit] = sums[plain]
            elif whole_answers:
                sums[unit] = self.exchanged(tokens, factor, first[donor])
            else:
                sums[unit] = self.read_along(tokens, factor, donor)
            self.shuffled[unit] += sums[unit]

    def exchanged(self, tokens: dict, factor: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """(2, draws, positions): every token of an answer gets that answer's drawn advantage."""
        frame = np.zeros((drawn.shape[1], self.longest))
        frame[tokens["answer"], tokens["position"]] = factor
        return np.stack([drawn @ frame, drawn ** 2 @ frame ** 2])

    def read_along(self, tokens: dict, factor: np.ndarray, donor: np.ndarray) -> np.ndarray:
        """(2, draws, positions): a token gets what stands at its relative position in the donor."""
        answer, position, length = tokens["answer"], tokens["position"], tokens["length"]
        sums = []
        for of_token in donor[:, answer]:
            place = position * length[of_token] // length[answer]
            advantage = tokens["advantage"][tokens["episode_start"][of_token] + place]
            sums.append(self.sums_at(position, factor * advantage))
        return np.stack(sums, axis=1)


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
