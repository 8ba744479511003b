"""How much larger one class's gradient is than another's, with intervals over groups.

Each function takes (sizes, tokens), summed over some tokens, and divides mean sizes; the same is
done to the sums with the groups drawn again.
"""
import numpy as np

from analysis.sizes import size_label
from analysis.statistics import Estimate, ratio, verdicts
from analysis.tally import Tally

OVER_REST = ("mean {} over that of all other tokens; interval by drawing the groups again, Holm's "
             "correction over the rows (of this table alone)")
REST_WORDS = {  # full headings of the columns that these functions make
    "abs(A) s": "mean size abs(A) s", "abs(A) w s": "mean size abs(A) w s",
    "s": "mean s", "over rest": "over all other tokens", "95%": "95% interval"}


def mean_sizes(tally: Tally, partition: str, which: str = "", cells=slice(None), spec: str = ".4f"):
    """Columns of a table: the mean size in each cell, in the units whose name has `which` in it."""
    return {size_label(unit): (spec, tally.mean(partition, f"abs {unit}")[cells])
            for unit in tally.units if which in unit}


def shares(tally: Tally, partition: str) -> np.ndarray:
    """Of each cell, its share of the gradient."""
    sizes = tally.total(partition, f"abs {tally.final}")
    return sizes / max(sizes.sum(), 1e-300)


def mean_ratio(above, below) -> np.ndarray:
    """Of two (sizes, tokens): the mean size of one over that of the other."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return above[0] / above[1] / (below[0] / below[1])


def over_the_rest(tally: Tally, partition: str, unit: str) -> list[Estimate]:
    """Mean size in a cell over mean size in all other tokens, for each cell."""
    def value(sizes, tokens):
        others = [sums.sum(-1, keepdims=True) - sums for sums in (sizes, tokens)]
        return mean_ratio((sizes, tokens), others)

    values = value(*tally.summed(partition, unit))
    draws = value(*tally.drawn(partition, unit))
    live = tally.sums.live[partition]
    return [ratio(float(values[i]), draws[:, i], int(live[i])) for i in range(len(live))]


def rest_columns(estimates: list[Estimate]) -> dict[str, tuple]:
    """Columns of a table: each cell over all other tokens."""
    return {"over rest": (".2f", [e.value for e in estimates]),
            "95%": (".2f", [e.interval for e in estimates]),
            "difference": ("", verdicts(estimates))}


def different_cells(names: list[str], rest: list[Estimate]) -> str:
    cells = []
    for name, estimate, word in zip(names, rest, verdicts(rest)):
        if word in ("more", "less"):
            or_less = " or less" if estimate.value < 0.01 else ""
            cells.append(f"{name} {max(estimate.value, 0.01):.2f}{or_less}")
    return f" A token's gradient over that of all others: {', '.join(cells)}." if cells else ""


def early_over_late(tally: Tally, partition: str, unit: str) -> Estimate:
    """Mean size in the first cell of `ends` over that in the last."""
    def value(sizes, tokens):
        return mean_ratio((sizes[..., 0], tokens[..., 0]), (sizes[..., 2], tokens[..., 2]))

    observed = value(*tally.summed(partition, unit))
    live = int(tally.sums.live[partition][[0, 2]].min())
    return ratio(float(observed), value(*tally.drawn(partition, unit)), live)


def pair(tally: Tally, partition: str, unit: str, one: int,
         other: int | None) -> tuple[Estimate, Estimate]:
    """Class `one` over class `other` (None: over all others): crude, and at like position.

    Twentieths of relative position count in which each of the two has at least 1% of what an even
    spread would give it.
    """
    name = f"{partition} by twentieth"
    sides = two_sides(*tally.summed(name, unit), one, other)
    drawn = two_sides(*tally.drawn(name, unit), one, other)
    both = np.flatnonzero(well_filled(sides[0][1]) & well_filled(sides[1][1]))
    live = tally.sums.live[partition]
    groups = int(min(live[one], live.max() if other is None else live[other]))
    return (ratio(float(crude_ratio(*sides)), crude_ratio(*drawn), groups),
            ratio(float(standardised(*sides, both)), standardised(*drawn, both), groups))


def two_sides(sizes, tokens, one: int, other: int | None, bins: int = 20) -> tuple[tuple, tuple]:
    """(..., classes x bins) sums -> (sizes, tokens) of either class, each (..., bins)."""
    both = [sums.reshape(*sums.shape[:-1], -1, bins) for sums in (sizes, tokens)]
    above = tuple(sums[..., one, :] for sums in both)
    if other is None:
        return above, tuple(sums.sum(-2) - sums[..., one, :] for sums in both)
    return above, tuple(sums[..., other, :] for sums in both)


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
