"""How much larger one class's gradient is than another's, with intervals over groups.

Each ratio is one of mean sizes, from (sizes, tokens) summed over some tokens; the same is done to
the sums with the groups drawn again.
"""
import numpy as np

from analysis.statistics import Estimate, ratio, verdicts
from analysis.tally import Tally

RARE = 0.001  # share of the tokens: what is rarer has neither a ratio nor a bar
OVER_REST = ("mean abs(A) w s over that of all other tokens, where a row has at least "
             f"{RARE:.1%} of the tokens; interval by drawing the groups again, Holm's correction "
             "over the rows (of this table alone)")
REST_WORDS = {  # full headings of the columns that these functions make
    "abs(A) w s": "mean size abs(A) w s",
    "abs(A)": "mean abs(A)", "s": "mean s",
    "over rest": "over all other tokens", "95%": "95% interval"}


def shares(tally: Tally, partition: str) -> np.ndarray:
    """Of each cell, its share of the gradient."""
    sizes = tally.total(partition, "abs gradient")
    return sizes / max(sizes.sum(), 1e-300)


def is_common(tally: Tally, partition: str) -> np.ndarray:
    """Of each cell, whether it has enough tokens to say something of them."""
    return tally.count(partition) >= max(1, RARE * tally.tokens)


def mean_ratio(above, below) -> np.ndarray:
    """Of two (sizes, tokens): the mean size of one over that of the other."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return above[0] / above[1] / (below[0] / below[1])


def over_the_rest(tally: Tally, partition: str) -> list[Estimate]:
    """Mean gradient in a cell over that in all other tokens, for each cell."""
    def value(sizes, tokens):
        others = [sums.sum(-1, keepdims=True) - sums for sums in (sizes, tokens)]
        return mean_ratio((sizes, tokens), others)

    values = value(*tally.summed(partition, "gradient"))
    values = np.where(is_common(tally, partition), values, np.nan)
    draws = value(*tally.drawn(partition, "gradient"))
    live = tally.sums.live[partition]
    return [ratio(float(values[i]), draws[:, i], int(live[i])) for i in range(len(live))]


def rest_columns(estimates: list[Estimate]) -> dict[str, tuple]:
    """Columns of a table: each cell over all other tokens."""
    return {"over rest": (".2f", [e.value for e in estimates]),
            "95%": (".2f", [e.interval for e in estimates]),
            "difference": ("", verdicts(estimates))}


def cell_over_cell(tally: Tally, partition: str, unit: str, one: int, other: int) -> Estimate:
    """Mean size in one cell over that in another."""
    def value(sizes, tokens):
        return mean_ratio((sizes[..., one], tokens[..., one]),
                          (sizes[..., other], tokens[..., other]))

    observed, draws = value(*tally.summed(partition, unit)), value(*tally.drawn(partition, unit))
    return ratio(float(observed), draws, int(tally.sums.live[partition][[one, other]].min()))


def early_over_late(tally: Tally, unit: str) -> Estimate:
    """The first fifth of the answers over the last."""
    return cell_over_cell(tally, "ends", unit, 0, 2)
