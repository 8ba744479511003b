"""Two checks of measured credit: against theory, and where the true credit was planted.
"""
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import holm, mean_over, ratio_of_sums
from analysis.tables import Table, by_row
from engine.rollouts import Rollouts
from research.probes.credit import Credit, true_credit
from research.probes.measured_tokens import MeasuredTokens
from research.probes.planted import PlantedLab, planted_lab, sample_planted


def identity_table(tokens: MeasuredTokens, rollouts: Rollouts) -> Table:
    """Theory: squared credits add up to the reward's variance, and V starts at its mean."""
    reward = rollouts.reward.double().cpu().numpy().reshape(tokens.questions, -1)
    variance = reward.var(1, ddof=1)
    decided = tokens.by_question(tokens.truth.decided) / reward.shape[1]
    first = np.flatnonzero(np.diff(tokens.answer, prepend=-1))
    start = tokens.before[first].reshape(tokens.questions, -1).mean(1)
    share = ratio_of_sums(decided, variance)
    off = ratio_of_sums(decided - variance, variance)
    gap = mean_over(start - reward.mean(1))
    rows = [["sum of squared credits of an answer over variance of the reward",
             decided.mean(), variance.mean(), share.value, share.interval],
            ["V before the first token minus mean reward",
             start.mean(), reward.mean(), gap.value, gap.interval]]
    if not variance.any():
        finding = "All answers to a problem got the same reward: there is nothing to compare."
    elif not share.high - share.low < 1:
        finding = "Too few problems to compare measured credit with theory."
    else:
        words = "do not agree" if min(holm([off.p, gap.p])) < 0.05 else "agree"
        finding = (f"Measured credit and theory {words}.\nSquared credits add up to "
                   f"{share.value:.2f} ({share.low:.2f} to {share.high:.2f}) of the reward's "
                   "variance.")
    formats = {"": "", "left": ".4f", "right": ".4f", "ratio or gap": ".3f", "95%": ".3f"}
    note = "the batch's own rewards enter both sides, its continuations the left one alone"
    return Table("identity", "Checks: what theory says of the measured credit",
                 by_row(formats, rows), finding, [note],
                 {"": "what should agree", "95%": "95% interval"})


def planted_table(args: SimpleNamespace, progress) -> Table:
    """The same measurement where credit is planted, with four times as many continuations."""
    lab = planted_lab(args.seed, 12 if args.quick else 24)
    rollouts = sample_planted(lab, 1, 4, 2 if args.quick else 8)
    credit = true_credit(lab, rollouts, 4 * args.continuations, progress)
    hits, sure = keys_on_top(lab, rollouts, credit)
    known = rollouts.mask & (credit.error > 0)
    z = ((credit.value - rollouts.true_credit) / credit.error)[known].double()
    exact = rollouts.true_credit[:, lab.keys].double().flatten()
    measured = credit.value[:, lab.keys].double().flatten()
    correlation = torch.corrcoef(torch.stack([exact, measured]))[0, 1].item()
    square = z.square().mean().item()
    rows = [["keys whose credit exceeds two errors, found among the three largest",
             hits / max(sure, 1)],
            ["correlation of measured and exact credit at the keys", correlation],
            ["(measured - exact) / error: mean", z.mean().item()],
            ["(measured - exact) / error: mean square", square]]
    return Table("planted", "Checks: the measurement where the truth is planted",
                 by_row({"": "", "found": ".3f"}, rows),
                 f"Planted credit is found: {hits} of {sure} keys with clear credit are among the "
                 "three tokens with most measured credit.\n"
                 f"Measured credit correlates {correlation:.2f} with planted credit.\n"
                 f"The squared difference of the two over its error is {square:.2f} on average.",
                 headings={"": "check"})


def keys_on_top(lab: PlantedLab, rollouts: Rollouts, credit: Credit) -> tuple[int, int]:
    """Keys whose exact credit exceeds two errors: how many are found, how many there are."""
    top = credit.value.abs().topk(len(lab.keys)).indices.tolist()
    is_sure = rollouts.true_credit.abs() > 2 * credit.error
    hits = sure = 0
    for b, largest in enumerate(top):
        for key in lab.keys:
            if is_sure[b, key]:
                sure += 1
                hits += key in largest
    return hits, sure
