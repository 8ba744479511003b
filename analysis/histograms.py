"""How sizes are spread, and two quantities against each other: what the pictures are drawn from."""
import numpy as np

from analysis.sizes import UNITS
from analysis.vocabulary import CLASSES

SIZE_EDGES = np.linspace(-6, 3, 91)  # log10 of a contribution, a gradient size or a weight
LOG_PROB_EDGES = np.linspace(-14, 0, 141)
S_EDGES = np.linspace(0, np.sqrt(2), 72)
ENTROPY_EDGES = np.linspace(0, 12, 121)
ADVANTAGE_EDGES = np.linspace(-5, 5, 81)
SIGNED_EDGES = np.linspace(-40, 40, 1601)  # fine: a picture puts several bins together


def empty(x_edges, y_edges) -> np.ndarray:
    return np.zeros((len(x_edges) - 1, len(y_edges) - 1))


class Histograms:
    """Sizes by class on a logarithmic axis, values with their sign, and two quantities against each
    other."""

    def __init__(self):
        classes = np.arange(len(CLASSES) + 1)
        self.sizes = {name: empty(classes, SIZE_EDGES) for name in (*UNITS, "weight")}
        self.zeros = dict.fromkeys(self.sizes, 0)  # they have no logarithm
        self.signed = {name: np.zeros(len(SIGNED_EDGES) - 1) for name in UNITS}
        self.log_prob_and_s = empty(LOG_PROB_EDGES, S_EDGES)
        self.log_prob_and_advantage = empty(LOG_PROB_EDGES, ADVANTAGE_EDGES)
        self.entropy_and_s = empty(ENTROPY_EDGES, S_EDGES)
        self.by_entropy = np.zeros((3, len(ENTROPY_EDGES) - 1))  # tokens, s^2, 1 - sum p^2

    def add(self, tokens: dict, values: dict) -> None:
        for name, value in {**values, "weight": tokens["weight"]}.items():
            self.add_size(name, tokens["class"], value)
        for name, value in values.items():
            inside = value.clip(SIGNED_EDGES[0], SIGNED_EDGES[-1])
            self.signed[name] += np.histogram(inside, SIGNED_EDGES)[0]
        log_prob = tokens["log_prob"].clip(LOG_PROB_EDGES[0], 0)
        entropy = tokens["entropy"].clip(0, ENTROPY_EDGES[-1])
        advantage, s = tokens["advantage"].clip(-5, 5), tokens["s"]
        self.log_prob_and_s += counted(log_prob, s, LOG_PROB_EDGES, S_EDGES)
        self.log_prob_and_advantage += counted(log_prob, advantage, LOG_PROB_EDGES, ADVANTAGE_EDGES)
        self.entropy_and_s += counted(entropy, s, ENTROPY_EDGES, S_EDGES)
        for row, value in zip(self.by_entropy, (None, s ** 2, 1 - tokens["collision"])):
            row += np.histogram(entropy, ENTROPY_EDGES, weights=value)[0]

    def signed_between(self, unit: str, low: float, high: float,
                       bins: int = 50) -> tuple[np.ndarray, np.ndarray]:
        """(counts, edges): about so many bins of equal width that hold all from low to high."""
        first = int(np.searchsorted(SIGNED_EDGES, low, "right")) - 1
        last = int(np.searchsorted(SIGNED_EDGES, high, "right"))
        first, last = max(first, 0), min(last, len(SIGNED_EDGES) - 1)
        width = -(-(last - first) // bins) or 1  # rounded up
        starts = np.arange(first, last, width)
        counts = np.add.reduceat(self.signed[unit][:last], starts)
        ends = np.minimum(starts + width, last)
        return counts, SIGNED_EDGES[[starts[0], *ends]]

    def add_size(self, name: str, naive_class: np.ndarray, value: np.ndarray) -> None:
        there = value != 0
        self.zeros[name] += int((~there).sum())
        power = np.log10(np.abs(value[there])).clip(SIZE_EDGES[0], SIZE_EDGES[-1])
        classes = np.arange(len(CLASSES) + 1)
        self.sizes[name] += counted(naive_class[there], power, classes, SIZE_EDGES)


def counted(x, y, x_edges, y_edges) -> np.ndarray:
    return np.histogram2d(x, y, [x_edges, y_edges])[0]
