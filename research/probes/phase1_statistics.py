"""What each token gets by several accounts, and the numbers that phase 1 was summarised by.

An account gives every token a size and a number with a sign:

    phase 1      norm(g), mean of g       the gradient of phase1_gradient.py
    phase 2      abs(A log p), A log p    the value of the objective
    abs(A) s     abs(A) s, A s            the gradient that GRPO applies at the logits

A token stands at (t + 1/2) / length; early and late are the first and the last fifth of an answer.
Intervals leave out each problem in turn (jackknife), as answers to a problem are not independent.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from analysis.statistics import FEWEST, Estimate, jackknife, mean_over, rank_correlation
from analysis.positions import t_statistics
from analysis.ratios import mean_ratio, standardised
from analysis.sizes import end_of
from analysis.vocabulary import Vocabulary
from engine.lab import Lab
from engine.rollouts import Rollouts
from grpo import gradient_size
from research.probes.phase1_gradient import analysed

BINS = 20  # of relative position, as in analysis/tally.py
# Means over positions of a function of abs(t).
T_FIGURES = {"abs(t) > 3": lambda t: t > 3,
             "abs(t) < 1.5": lambda t: t < 1.5,
             "mean abs(t)": lambda t: t}
FIGURES = (*(f"size: {name}" for name in T_FIGURES),
           *(f"signed: {name}" for name in T_FIGURES),
           "early over late", "filler over reasoning")
# Accounts of loss terms taken one at a time.
TERM_COUNT = "loss terms that reach it"
TERM_S = "mean s of these terms"
TERM_SIZE = "mean size of one term"
NEXT_TERM = "next token's term alone"
TERM_SUM = "sum of their sizes"
EQUAL_TERMS = "equal terms that would give as much"


@dataclass
class Places:
    """Where the chosen tokens stand. Most arrays have one value for each of them."""
    inside: torch.Tensor   # (B, T): which tokens are chosen
    length: np.ndarray     # (B,)
    answer: np.ndarray
    question: np.ndarray
    position: np.ndarray
    relative: np.ndarray   # 0 at the start of an answer, 1 at its end
    end: np.ndarray        # 0 early, 1 between, 2 late
    tenth: np.ndarray
    bin: np.ndarray
    naive: np.ndarray      # a code of tally.CLASSES, by the earlier experiment's regex

    def flat(self, frame: torch.Tensor) -> np.ndarray:
        """The chosen tokens' values of a (B, T) tensor."""
        return frame[self.inside].double().cpu().numpy()


def locate(lab: Lab, rollouts: Rollouts, inside: torch.Tensor) -> Places:
    length = rollouts.length.cpu().numpy()
    answer, position = inside.cpu().numpy().nonzero()
    relative = (position + 0.5) / length[answer]
    ids = rollouts.ids[inside].cpu().numpy()
    return Places(
        inside, length, answer, rollouts.group.cpu().numpy()[answer], position, relative,
        end=end_of({"position": position, "length": length, "answer": answer}),
        tenth=(10 * relative).astype(int),
        bin=(BINS * relative).astype(int),
        naive=Vocabulary(lab.tokenizer).classes(ids) if len(ids) else ids)


@dataclass
class Account:
    """What each token gets."""
    places: Places
    size: np.ndarray
    signed: np.ndarray


def account(places: Places, signed: torch.Tensor, size: torch.Tensor | None = None) -> Account:
    """Made of (B, T) tensors; without a size it is the absolute value."""
    size = signed.abs() if size is None else size
    return Account(places, places.flat(size), places.flat(signed))


def three_accounts(places: Places, rollouts: Rollouts, size: torch.Tensor,
                   signed: torch.Tensor) -> dict[str, Account]:
    """`size` and `signed` are those of phase 1."""
    A = rollouts.advantage
    return {"phase 1": account(places, signed, size),
            "phase 2": account(places, A * rollouts.log_prob),
            "abs(A) s": account(places, A * logit_size(rollouts))}


def logit_size(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): s, the norm of onehot - p."""
    return gradient_size(rollouts.log_prob.double(), rollouts.collision.double())


def accounts_of_terms(lab: Lab, rollouts: Rollouts, chosen: torch.Tensor,
                      norms: torch.Tensor) -> dict[str, Account]:
    """What tokens of the chosen answers get from single loss terms; `norms` are single_terms'."""
    length = rollouts.length[chosen, None].cpu()
    term_count = (length - 1 - torch.arange(norms.shape[1])).clamp(min=1)  # [b, j]: terms after j
    total = norms.sum(1)                                                   # [b, j]
    next_term = torch.zeros(norms.shape[:2])
    next_term[:, :-1] = norms.diagonal(-1, 1, 2)                           # of term j + 1 at j
    s = (logit_size(rollouts) * rollouts.mask)[chosen].cpu()
    later_s = s.flip(1).cumsum(1).flip(1) - s                              # sum of s after token j
    equal_terms = total.square() / norms.square().sum(1)
    frames = {TERM_COUNT: term_count, TERM_S: later_s / term_count, TERM_SIZE: total / term_count,
              NEXT_TERM: next_term, TERM_SUM: total, EQUAL_TERMS: equal_terms.nan_to_num(0.0)}

    inside = torch.zeros_like(rollouts.mask)
    inside[chosen] = analysed(rollouts)[chosen]
    places = locate(lab, rollouts, inside)
    accounts = {}
    for name, values in frames.items():
        frame = torch.zeros(inside.shape, dtype=torch.float64)
        frame[chosen.cpu()] = values.double()
        accounts[name] = account(places, frame.to(inside.device))
    return accounts


def sums_by_cell(unit: np.ndarray, cell: np.ndarray, cells: int,
                 value: np.ndarray) -> np.ndarray:
    """(units, 3, cells): count, sum and sum of squares of the values of each unit in each cell.

    A unit is a problem or an answer.
    """
    units = int(unit.max(initial=0)) + 1
    index = unit * cells + cell

    def add_up(x):
        return np.bincount(index, x, units * cells).reshape(units, cells)

    return np.stack([add_up(np.ones_like(value)), add_up(value), add_up(value ** 2)], axis=1)


def mean_in(sums: np.ndarray, cells=slice(None)) -> np.float64:
    """The mean of the values in some cells; sums (3, cells)."""
    with np.errstate(invalid="ignore"):
        return sums[1, cells].sum() / sums[0, cells].sum()


def jackknifed(by_question: np.ndarray, statistic: Callable) -> Estimate:
    """A statistic of the sums over all problems, its interval from the sums without each one."""
    with np.errstate(invalid="ignore", divide="ignore"):
        without = [statistic(np.delete(by_question, q, 0).sum(0)) for q in range(len(by_question))]
        return jackknife(statistic(by_question.sum(0)), np.array(without))


def jackknifed_ratio(by_question: np.ndarray, statistic: Callable, one, other) -> Estimate:
    """A ratio of some cells to others; its interval is made for its logarithm.

    There is none unless both sides have something in at least FEWEST problems.
    """
    logarithm = jackknifed(by_question, lambda sums: np.log(statistic(sums)))
    value, low, high = np.exp([logarithm.value, *logarithm.interval]).tolist()
    questions = [int((by_question[:, 2, cells] > 0).any(-1).sum()) for cells in (one, other)]
    if min(questions) < FEWEST:
        return Estimate(value, np.nan, np.nan, np.nan)
    return Estimate(value, low, high, logarithm.p)


def cell_ratio(by_question: np.ndarray, one: int, other: int) -> Estimate:
    """The mean in one cell over that in another."""
    def ratio(sums):
        return mean_in(sums, [one]) / mean_in(sums, [other])

    return jackknifed_ratio(by_question, ratio, [one], [other])


def early_over_late(values: Account) -> Estimate:
    places = values.places
    return cell_ratio(sums_by_cell(places.question, places.end, 3, values.size), 0, 2)


def class_ratio(values: Account, code: np.ndarray) -> tuple[Estimate, Estimate]:
    """Mean size of tokens of code 0 over that of code 1, crude and at like positions; 2 is neither.

    At like positions: as if both codes stood where the two together stand, over the bins of
    position in which each has at least 1% of what an even spread would give it.
    """
    places, sides = values.places, (slice(0, BINS), slice(BINS, 2 * BINS))
    by_question = sums_by_cell(places.question, BINS * code + places.bin, 3 * BINS, values.size)

    def totals_and_counts(sums):
        return [(sums[1, side], sums[0, side]) for side in sides]

    def crude(sums):
        return mean_ratio(*((total.sum(), n.sum()) for total, n in totals_and_counts(sums)))

    def at_like_positions(sums):
        return standardised(*totals_and_counts(sums), shared)

    counts = [n for _, n in totals_and_counts(by_question.sum(0))]
    shared = [b for b in range(BINS) if all(n[b] > 0 and n[b] >= 0.01 * n.mean() for n in counts)]
    return (jackknifed_ratio(by_question, crude, *sides),
            jackknifed_ratio(by_question, at_like_positions, *sides))


def mean_figure(t: np.ndarray, figure: str) -> float:
    """One of T_FIGURES, given the t of some positions."""
    return float(T_FIGURES[figure](np.abs(t)).mean()) if len(t) else np.nan


def t_figures(places: Places, number: np.ndarray) -> list[Estimate]:
    """T_FIGURES of the t at each position."""
    by_question = sums_by_cell(places.question, places.position, places.inside.shape[1], number)
    return [jackknifed(by_question, lambda sums: mean_figure(t_statistics(*sums), figure))
            for figure in T_FIGURES]


def figures(values: Account) -> list[Estimate]:
    """What the earlier experiment reported of its phase 1, in the order of FIGURES."""
    places = values.places
    filler_over_reasoning, _ = class_ratio(values, places.naive)
    return [*t_figures(places, values.size), *t_figures(places, values.signed),
            early_over_late(values), filler_over_reasoning]


def within_answers(places: Places, x: np.ndarray, y: np.ndarray) -> tuple[Estimate, int]:
    """Spearman's rank correlation within answers, and how many answers it is from.

    The mean over answers, then over problems. Answers of fewer than three tokens and those in
    which x or y is constant do not count.
    """
    by_question = {}
    starts = np.flatnonzero(np.diff(places.answer)) + 1
    for rows in np.split(np.arange(len(x)), starts):
        correlation = rank_correlation(x[rows], y[rows]) if len(rows) >= 3 else np.nan
        if np.isfinite(correlation):
            by_question.setdefault(places.question[rows[0]], []).append(correlation)
    means = [np.mean(correlations) for correlations in by_question.values()]
    return mean_over(means), sum(map(len, by_question.values()))
