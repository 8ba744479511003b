"""The scores that others report for credit: rank correlation and agreement of sign.

They stand beside the scoreboard's own to be set beside QVal (2606.32034) and its like. Decide by
the linear scores: measured credit is noisiest where the policy was unsure, which is what entropy
looks at, so rank correlations with it favour arms that look there. In more than nine of ten
simulated boards a true null looks real that way (tests/research/probes/test_agreement.py).
"""
import numpy as np
import torch

from analysis.statistics import Estimate, rank_correlation, ratio_of_sums
from analysis.tables import Table, by_row
from engine.rollouts import Rollouts
from research.probes.arm_scores import AGAIN
from research.probes.measured_tokens import MeasuredTokens, flat_tokens

BIAS = ("rank correlations of measured credit favour arms that look where the policy was unsure: "
        "its noise is largest there (a true null looks real in more than nine of ten simulated "
        "boards). They are here to be set beside other work's, such as QVal (2606.32034); decide "
        "by the linear scores")


def agreement_table(tokens: MeasuredTokens, rollouts: Rollouts, weights: dict[str, torch.Tensor],
                    credits: dict[str, torch.Tensor]) -> Table:
    """Each arm's size against abs(credit), and what multiplies its gradient against the credit."""
    mask, credit, rows = rollouts.mask, tokens.truth.credit, []
    for name, weight in weights.items():
        signed = flat_tokens(weight * rollouts.advantage, mask)
        rows.append(row_of(tokens, name, flat_tokens(weight, mask), signed, credit))
    for name, values in credits.items():
        signed = flat_tokens(values, mask)
        rows.append(row_of(tokens, name, np.abs(signed), signed, credit))
    again = tokens.first_half
    rows.append(row_of(tokens, AGAIN, np.abs(again), again, tokens.second_half.credit))
    formats = {"arm": "", "size": "+.2f", "95%": "+.2f", "signed": "+.2f", "95% ": "+.2f",
               "signs": ".0%"}
    how = ("Spearman's correlation within an answer, mean over answers in which both sides vary; "
           "same sign: of tokens where neither side is 0")
    return Table("agreement", "The same arms by rank correlation and by sign",
                 by_row(formats, rows), notes=[how, BIAS], headings={
                     "size": "with the size of the credit", "95%": "95% interval",
                     "signed": "with the credit", "95% ": "95% interval ", "signs": "same sign"})


def row_of(tokens: MeasuredTokens, name: str, size: np.ndarray, signed: np.ndarray,
           credit: np.ndarray) -> list:
    of_size, of_signed = spearman(tokens, size, np.abs(credit)), spearman(tokens, signed, credit)
    has_sign = (signed != 0) & (credit != 0)
    agrees = has_sign & (np.sign(signed) == np.sign(credit))
    signs = ratio_of_sums(tokens.by_question(agrees), tokens.by_question(has_sign))
    return [name, of_size.value, of_size.interval, of_signed.value, of_signed.interval,
            signs.value]


def spearman(tokens: MeasuredTokens, x: np.ndarray, y: np.ndarray) -> Estimate:
    """The mean over answers of their rank correlation, with an interval over problems."""
    total, answers = np.zeros(tokens.questions), np.zeros(tokens.questions)
    for b in np.unique(tokens.answer):
        own = tokens.answer == b
        correlation = rank_correlation(x[own], y[own])
        if np.isfinite(correlation):
            question = tokens.question[own][0]
            total[question] += correlation
            answers[question] += 1
    return ratio_of_sums(total, answers)
