"""The gain of one method over another at equal cost, and how dear a step may be before it is gone.

    gain_for(pairs, costs)           # the success of each step of two runs, and what it cost
    at_equal_time(pairs, seconds)    # costs in seconds, which are never quite known
    break_even(pairs)                # how many times as much a step may cost, without a clock

There is one rule. Of two runs with the same seed the dearer one is cut where the cheaper one ends:
what the cheaper one has paid in all is the budget of both. The success of a run for this budget is
its mean over all that was paid. So each step counts by what it cost, and the last one by the part
of it that the budget still covers. If every step costs 1, runs of equal length have their success
in training, and a longer run is cut at the last step of the shorter one.

    success 0.2 0.6, a step costs 2; success 0.2 0.3 0.4, a step costs 1: the budget is 3
    (2 * 0.2 + 1 * 0.6) / 3 - (0.2 + 0.3 + 0.4) / 3 = 1/30

A cost is a number for each step, or one for all of them. Its unit does not matter.
"""
from collections.abc import Sequence

import numpy as np

from lab.analysis.statistics import Estimate, Floats, mean_over, mean_over_pairs

MOST = 32.0   # times as much: the dearest step for which it is computed whether a gain is left
WIDEST = 2.0  # times as much: the most by which the ends of what a step costs may differ

Pair = tuple[Floats, Floats]                   # the success (steps,) of both runs
Costs = tuple[Floats | float, Floats | float]  # of the steps of both


def success_for(success: Floats, cost: Floats | float, budget: float) -> float:
    """The mean success over all that was paid, up to this budget."""
    each = np.broadcast_to(cost, success.shape)
    paid = np.concatenate([[0.0], each.cumsum()])
    earned = np.concatenate([[0.0], (success * each).cumsum()])
    return float(np.interp(budget, paid, earned)) / budget


def difference_for(pair: Pair, costs: Costs) -> float:
    """How much more success one run had than the other, for what the cheaper one paid."""
    whole = [np.broadcast_to(cost, run.shape).sum() for run, cost in zip(pair, costs)]
    mine, theirs = (success_for(run, cost, min(whole)) for run, cost in zip(pair, costs))
    return mine - theirs


def gain_for(pairs: Sequence[Pair], costs: Sequence[Costs]) -> Estimate:
    """The mean over pairs of runs, with its interval over seeds."""
    return mean_over_pairs([np.array([difference_for(pair, paid)])
                            for pair, paid in zip(pairs, costs)])


def at_factor(pairs: Sequence[Pair], factor: float) -> Estimate:
    """The gain if a step costs this many times as much in every pair."""
    return gain_for(pairs, [(factor, 1.0)] * len(pairs))


def ratio_of(costs: Sequence[Costs]) -> Estimate:
    """How many times as much a step costs: the mean over pairs, of logarithms."""
    logs = mean_over([float(np.log(np.mean(mine) / np.mean(theirs))) for mine, theirs in costs])
    return Estimate(*np.exp([logs.value, *logs.interval]).tolist())


def is_known(ratio: Estimate) -> bool:
    """Whether seconds say well enough what a step costs, for a gain in equal time to be told."""
    return bool(ratio.high / ratio.low <= WIDEST)


def at_equal_time(pairs: Sequence[Pair], seconds: Sequence[Costs]) -> Estimate:
    """The gain in as much time. Seconds depend on what else the machine does. So the interval holds
    all gains for which the interval of the ratio leaves room, and p is the largest of them; it is 1
    if the dearest and the cheapest step that are possible lead to gains of opposite signs."""
    ratio = ratio_of(seconds)
    each = [at_factor(pairs, factor) for factor in (ratio.value, *ratio.interval)
            if np.isfinite(factor)]
    ends = np.array([gain.interval for gain in each])
    is_one_sign = len({np.sign(gain.value) for gain in each}) == 1
    p = float(np.max([gain.p for gain in each])) if is_one_sign else 1.0
    return Estimate(each[0].value, float(ends.min()), float(ends.max()), p)


def break_even(pairs: Sequence[Pair]) -> Estimate:
    """How many times as much a step may cost, whatever the cost is, until nothing is gained any
    more; and where this is so of the ends of the gain's interval. It is 0 where nothing is gained
    at equal steps, and MOST where a gain is left even then."""
    factors = np.geomspace(1, MOST, 200)
    each = [at_factor(pairs, factor) for factor in factors]
    found = []
    for gains in np.array([(gain.value, *gain.interval) for gain in each]).T:  # (factors,)
        lost = [*np.flatnonzero(gains <= 0), len(factors)][0]
        between = [lost, lost - 1]  # np.interp takes gains that grow
        found.append(0.0 if lost == 0 else MOST if lost == len(factors) else
                     float(np.interp(0.0, gains[between], factors[between])))
    return Estimate(*found)
