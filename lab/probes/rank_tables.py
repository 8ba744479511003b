"""Ranks of a matrix, and the tables of them (rank.py)."""
from collections.abc import Callable

import torch

from analysis.statistics import Estimate, mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row

MAIN = 8  # the group size at which advantages are compared
Z, ONES, PLANTED, CRITIC = "z-score", "all equal", "planted rewards by token", "a critic (gae)"
# (matrix, advantage, R): the ranks for each problem
FoundRanks = dict[tuple[str, str, int], list[dict[str, float]]]


def entropy_rank(s: torch.Tensor) -> float:
    share = s / s.sum()
    return float(torch.special.entr(share).sum().exp())


def stable_rank(s: torch.Tensor) -> float:
    return float(s.square().sum() / s[0].square())


def threshold_rank(s: torch.Tensor) -> float:
    return float((s > 0.01 * s[0]).sum())


def energy_rank(s: torch.Tensor, share: float) -> float:
    """The number of largest singular values that reach the share; rounding is none of them."""
    reached = s.square().cumsum(0) / s.square().sum()
    return 1.0 + float((reached < share - 1e-9).sum())


RANKS: dict[str, Callable[[torch.Tensor], float]] = {  # of singular values, the largest first
    "entropy": entropy_rank,
    "stable": stable_rank,
    "90%": lambda s: energy_rank(s, 0.9),
    "99%": lambda s: energy_rank(s, 0.99),
    "threshold": threshold_rank}


def mean_rank(found: FoundRanks, matrix: str, arm: str, R: int, rank: str) -> Estimate:
    of_problems = found.get((matrix, arm, R), [])
    return mean_over([ranks[rank] for ranks in of_problems])


def main_size(found: FoundRanks) -> int:
    return max(R for _, _, R in found if R <= MAIN)


def ranks_by_size(found: FoundRanks) -> Table:
    """The ranks with the z-score, by the size of the group."""
    sizes, main = sorted({R for _, _, R in found}), main_size(found)
    rows, sentences = list[Row](), []
    for matrix in "AB":
        for rank in RANKS:
            of_size = [mean_rank(found, matrix, Z, R, rank) for R in sizes]
            ones = mean_rank(found, matrix, ONES, main, rank)
            row: Row = [f"{matrix}: {rank}"]
            for R, estimate in zip(sizes, of_size):
                row.append(estimate if R == main else estimate.value)
            rows.append([*row, ones.value])
            if rank in ("entropy", "stable"):
                by_size = ", ".join(f"{e.value:.2f} in groups of {R}"
                                    for R, e in zip(sizes, of_size))
                sentences.append(f"The {rank} rank of {matrix} is {by_size} answers. With all "
                                 f"advantages 1 it is {ones.value:.2f} in groups of {main}.")
    formats = {"rank": "", **{f"R={R}": ".2f" for R in sizes}, ONES: ".2f"}
    problems = len(found["A", Z, main])
    return Table("sizes", "The rank of the gradient with z-scores as advantages, by the size R of "
                 "the group", by_row(formats, rows), "\n".join(sentences),
                 ["Numbers are means over the problems whose answers differ in reward, of which "
                  f"there are {problems} at R = {main}. The kinds of rank are explained by python "
                  "-m lab rank --help. A has R rows, so its rank is at most R, and R = 2 "
                  "shows nothing about it"],
                 {"rank": "matrix and rank", f"R={main}": f"R={main}{WITH_INTERVAL}",
                  ONES: f"all advantages equal, R={main}"})


def ranks_by_advantage(found: FoundRanks) -> Table:
    """Entropy and stable rank with every advantage; and by problem the entropy rank minus that with
    the z-score."""
    R, rows, sentences = main_size(found), list[Row](), []
    for arm in dict.fromkeys(arm for _, arm, _ in found):
        row: Row = [arm]
        for matrix in "AB":
            pairs = zip(found[matrix, arm, R], found[matrix, Z, R])
            change = mean_over([one["entropy"] - z["entropy"] for one, z in pairs])
            entropy = mean_rank(found, matrix, arm, R, "entropy")
            stable = mean_rank(found, matrix, arm, R, "stable")
            row += [entropy.value, stable.value, change]
            if arm in (PLANTED, CRITIC):
                sentences.append(f"With {arm}, the entropy rank of {matrix} differs by "
                                 f"{change.value:+.2f} (95% interval {change.low:+.2f} to "
                                 f"{change.high:+.2f}) from that with the z-score.")
        rows.append(row)
    formats, headings = {"advantage": ""}, {}
    for matrix in "AB":
        headings[f"{matrix} entropy"] = f"entropy rank of {matrix}"
        headings[f"{matrix} stable"] = f"stable rank of {matrix}"
        formats |= {f"{matrix} entropy": ".2f", f"{matrix} stable": ".2f",
                    f"{matrix} change": "+.2f"}
        headings[f"{matrix} change"] = (f"entropy rank of {matrix} minus that with the "
                                        f"z-score{WITH_INTERVAL}")
    return Table("arms", f"Does credit by token raise the rank? Groups of {R} answers",
                 by_row(formats, rows), "\n".join(sentences),
                 ["Differences are paired by problem. Each interval is for one comparison, and not "
                  "corrected for their number"], headings)
