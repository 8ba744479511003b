"""How values are spread, and two quantities against each other: what pictures are drawn from."""
import numpy as np

from analysis.sizes import UNITS

LOG_PROB_EDGES = np.linspace(-14, 0, 141)
S_EDGES = np.linspace(0, np.sqrt(2), 72)
ADVANTAGE_EDGES = np.linspace(-5, 5, 81)
VALUE_EDGES = np.linspace(-40, 40, 321)


class Histograms:
    """What lies outside of the edges is counted in the first bin or the last."""

    def __init__(self):
        self.values = {unit: np.zeros(len(VALUE_EDGES) - 1) for unit in UNITS}
        self.log_prob_and_s = 0.0          # (bins, bins)
        self.log_prob_and_advantage = 0.0

    def add(self, tokens: dict) -> None:
        for unit in UNITS:
            values = tokens[unit].clip(*VALUE_EDGES[[0, -1]])
            self.values[unit] += np.histogram(values, VALUE_EDGES)[0]
        x = tokens["log_prob"].clip(*LOG_PROB_EDGES[[0, -1]])
        s, advantage = tokens["s"], tokens["advantage"].clip(*ADVANTAGE_EDGES[[0, -1]])
        self.log_prob_and_s += np.histogram2d(x, s, [LOG_PROB_EDGES, S_EDGES])[0]
        edges = [LOG_PROB_EDGES, ADVANTAGE_EDGES]
        self.log_prob_and_advantage += np.histogram2d(x, advantage, edges)[0]
