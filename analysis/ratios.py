"""How much larger one class's gradient is than another's, with intervals over groups.

Each ratio is one of mean sizes, from (sizes, tokens) summed over some tokens; the same is done to
the sums with the groups drawn again.
"""
import numpy as np

from analysis.statistics import Estimate, ratio, verdicts
from analysis.tally import Tally

OVER_REST = ("mean abs(A) w s over that of all other tokens; interval by drawing the groups again, "
             "Holm's correction over the rows (of this table alone)")
REST_WORDS = {  # full headings of the columns that these functions make
    "abs(A) w s": "mean size abs(A) w s",
    "s": "mean s", "over rest": "over all other tokens", "95%": "95% interval"}


def shares(tally: Tally, partition: str) -> np.ndarray:
    """Of each cell, its share of the gradient."""
    sizes = tally.total(partition, "abs gradient")
    return sizes / max(sizes.sum(), 1e-300)


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
    draws = value(*tally.drawn(partition, "gradient"))
    live = tally.sums.live[partition]
    return [ratio(float(values[i]), draws[:, i], int(live[i])) for i in range(len(live))]


def rest_columns(estimates: list[Estimate]) -> dict[str, tuple]:
    """Columns of a table: each cell over all other tokens."""
    return {"over rest": (".2f", [e.value for e in estimates]),
            "95%": (".2f", [e.interval for e in estimates]),
            "difference": ("", verdicts(estimates))}


def early_over_late(tally: Tally, unit: str) -> Estimate:
    """Mean size in the first fifth of the answers over that in the last."""
    def value(sizes, tokens):
        return mean_ratio((sizes[..., 0], tokens[..., 0]), (sizes[..., 2], tokens[..., 2]))

    observed, draws = value(*tally.summed("ends", unit)), value(*tally.drawn("ends", unit))
    return ratio(float(observed), draws, int(tally.sums.live["ends"][[0, 2]].min()))


def filler_over_reasoning(tally: Tally, unit: str) -> tuple[Estimate, Estimate]:
    """By the regex: as it is, and at like position.

    Twentieths of relative position count in which each of the two has at least 1% of what an even
    spread would give it.
    """
    filler, reasoning = by_class(*tally.summed("class by twentieth", unit))
    drawn = by_class(*tally.drawn("class by twentieth", unit))
    both = np.flatnonzero(well_filled(filler[1]) & well_filled(reasoning[1]))
    groups = int(tally.sums.live["class"][:2].min())
    return (ratio(float(crude_ratio(filler, reasoning)), crude_ratio(*drawn), groups),
            ratio(float(standardised(filler, reasoning, both)), standardised(*drawn, both),
                  groups))


def by_class(sizes, tokens, bins: int = 20) -> list[tuple]:
    """(..., classes x bins) sums -> (sizes, tokens) of the first two classes, each (..., bins)."""
    both = [sums.reshape(*sums.shape[:-1], -1, bins) for sums in (sizes, tokens)]
    return [tuple(sums[..., number, :] for sums in both) for number in (0, 1)]


def well_filled(tokens: np.ndarray) -> np.ndarray:
    return (tokens > 0) & (tokens >= 0.01 * tokens.mean())


def crude_ratio(above, below) -> np.ndarray:
    return mean_ratio([sums.sum(-1) for sums in above], [sums.sum(-1) for sums in below])


def standardised(above, below, bins) -> np.ndarray:
    """Ratio of two mean sizes if both classes stood where the two together stand.

    Each is (sizes, tokens), last axis bins of position, of which those in `bins` count, weighted by
    the tokens of both.
    """
    weight = (above[1] + below[1])[..., bins]
    with np.errstate(invalid="ignore", divide="ignore"):
        one = (weight * above[0][..., bins] / above[1][..., bins]).sum(-1)
        other = (weight * below[0][..., bins] / below[1][..., bins]).sum(-1)
        return one / other
