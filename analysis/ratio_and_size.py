"""Of several updates from a batch: does credit vary with the ratio, or with how sure the model was?

At the last update a token's gradient is A w r s, where r is its ratio of new to old probability,
unless it is clipped, and s = norm(onehot - p), which is large where the model is unsure.
"""
import numpy as np

from analysis.tables import Table
from engine.labels import KINDS

SUMS = ("tokens", "r", "r^2", "s", "s^2")


class RatioAndSize:
    """Sums by kind over the tokens that were trained on, where their ratio is on record."""

    def __init__(self):
        self.of = np.zeros((len(KINDS), len(SUMS)))

    def add(self, tokens: dict[str, np.ndarray]) -> None:
        if "ratio" not in tokens:
            return
        trained = tokens["weight"] * tokens["advantage"] != 0
        kind, s = tokens["kind"][trained], tokens["s"][trained]
        ratio = tokens["ratio"][trained].astype(np.float64)
        for i, values in enumerate((None, ratio, ratio ** 2, s, s ** 2)):
            self.of[:, i] += np.bincount(kind, values, len(KINDS))


def relative_spread(tokens, total, squares) -> np.ndarray:
    """The standard deviation over the mean."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / tokens
        return np.sqrt((squares / tokens - mean ** 2).clip(0)) / mean


def ratio_tables(tally) -> list[Table]:
    """None where every batch had one update, and all ratios were 1."""
    sums = tally.ratio_and_size.of
    return [ratio_table(sums)] if sums.any() else []


def ratio_table(sums: np.ndarray) -> Table:
    """The spread of both, by kind and over all tokens."""
    used = np.flatnonzero(sums[:, 0])
    tokens, r, rr, s, ss = np.concatenate([sums[used], sums.sum(0, keepdims=True)]).T
    spreads = {"r": relative_spread(tokens, r, rr), "s": relative_spread(tokens, s, ss)}
    names = [KINDS[i] for i in used]
    columns = {"kind": ("", [*names, "all"]),
               "tokens": (",.0f", tokens),
               "mean r": (".4f", r / tokens),
               "spread of r": (".1%", spreads["r"]),
               "mean s": (".4f", s / tokens),
               "spread of s": (".1%", spreads["s"])}
    finding = (f"From token to token the ratio at the last update varies by {spreads['r'][-1]:.1%} "
               f"of its mean, the size of the gradient of log p by {spreads['s'][-1]:.1%}.")
    return Table("ratio and size", "What varies from token to token: the ratio, or s?", columns,
                 finding,
                 ["tokens that were trained on; r: probability before the last update from a batch "
                  "over that before the first; spread: standard deviation over the mean"])
