"""The protocol of the leaderboard: which runs it has, which learning rate an arm gets, and which
arms have a second look.

    rate      the one of three with the highest mean success on seed 100; where the best two are
              within a point, the mean of seeds 100 and 101 chooses. Plain GRPO chooses, too
    gains     over plain GRPO on seeds 40 to 51. An arm whose 95% interval over the first six lies
              wholly below -1 point is stopped there, and behind
    again     an arm that is better, by Holm's correction over all methods, runs on seeds 60 to 71,
              beside its placebo: the same weights or advantages at other tokens
"""
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np

from analysis.experiment import Experiment, Key
from analysis.gains import Gain, gain_over, gains, mean_success
from analysis.runs import Run
from research.boards.arms import ARMS, METHODS, PLAIN, placebos
from research.boards.leaderboard import planner

RATES = ("1.25e-4", "2.5e-4", "5e-4")
TUNED, TUNED_TOO, CLOSE = 100, 101, 0.01
FIRST, REPORTED, AGAIN = range(40, 46), range(40, 52), range(60, 72)
STOP = -0.01
STEPS = 60
COMMON = ("--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 --sample_every 0 "
          "--threads 1")
WITH_PLACEBOS = ARMS | placebos(list(METHODS))
AT_RATES = {f"{arm}-{rate}": (arm, rate) for arm in WITH_PLACEBOS for rate in RATES}
Seeds = Callable[[str], Collection[int]]  # of an arm


def board_experiment(folder: Path, known: dict[Key, Run]) -> Experiment:
    """Each arm at each rate. `known` are published runs."""
    flags = {name: f"{WITH_PLACEBOS[arm]} --learning_rate {rate}"
             for name, (arm, rate) in AT_RATES.items()}
    return Experiment(planner(folder, flags, COMMON.split(), STEPS), known=known)


class Board:
    """What the protocol makes of the finished runs of the leaderboard."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment

    def run(self, arm: str, rate: str, seed: int) -> Run | None:
        """The run if it is finished; one with other settings is an error."""
        return self.experiment.run(f"{arm}-{rate}", seed)

    def runs(self, arm: str, seeds: Iterable[int]) -> dict[int, Run]:
        """The arm's finished runs on these seeds, at its own rate."""
        rate = self.rate(arm)
        if rate is None:
            return {}
        finished = {}
        for seed in seeds:
            run = self.run(arm, rate, seed)
            if run:
                finished[seed] = run
        return finished

    def rate(self, arm: str) -> str | None:
        """The rate that suits the arm, when that is known. A placebo has its arm's."""
        arm = arm.removesuffix("-placebo")
        first, mean, with_both = {}, {}, set()  # success, of the first seed and of those that ran
        for rate in RATES:
            success = list(map(mean_success, self.tuned(arm, rate)))
            if success:
                first[rate], mean[rate] = success[0], np.mean(success)
            if len(success) == 2:
                with_both.add(rate)
        close = close_rates(first)
        if len(close) == 1:
            return close[0]
        if close and with_both.issuperset(close):
            return max(close, key=mean.__getitem__)
        return None

    def tuned(self, arm: str, rate: str) -> list[Run]:
        """The runs that choose a rate: of the first seed, and of the other if both are there."""
        first, other = self.run(arm, rate, TUNED), self.run(arm, rate, TUNED_TOO)
        if first is None:
            return []
        return [first] if other is None else [first, other]

    def at_own_rates(self, arms: Iterable[str], seeds: Iterable[int]) -> list[Key]:
        """The runs of these arms at the rates that suit them, seed by seed."""
        names = [f"{arm}-{self.rate(arm)}" for arm in arms]
        return [(name, seed) for seed in seeds for name in names]

    def gain(self, arm: str, seeds: Collection[int]) -> Gain:
        """The arm's gain over plain GRPO on these seeds, its p not corrected."""
        return gain_over(self.runs(arm, seeds), self.runs(PLAIN, seeds))

    def gains(self, arms: Collection[str], seeds_of: Seeds,
              controls: Collection[str] = ()) -> dict[str, Gain]:
        """The gains over plain GRPO of the arms that have two pairs, as one family."""
        family = {}
        for arm in arms:
            seeds = seeds_of(arm)
            family[arm] = self.runs(arm, seeds), self.runs(PLAIN, seeds)
        found = gains(family, controls=controls)
        return {arm: gain for arm, gain in found.items() if gain.pairs > 1}

    def seeds_of(self, arm: str) -> range:
        """The seeds that count for the arm's gain: six where it was stopped, else twelve."""
        first = self.gain(arm, FIRST)
        is_complete = first.pairs == len(FIRST)
        is_stopped = arm in METHODS and is_complete and first.estimate.high < STOP
        return FIRST if is_stopped else REPORTED

    def better_at_first(self) -> list[str]:
        """The methods that have a second look."""
        first = self.gains(list(METHODS), self.seeds_of)
        return [arm for arm, gain in first.items() if gain.verdict == "better"]

    def second_look(self) -> dict[str, Gain]:
        """The gains on new seeds of the methods that were better at first."""
        return self.gains(self.better_at_first(), lambda arm: AGAIN)


def close_rates(first: dict[str, float]) -> list[str]:
    """Success on the first seed by rate: the best, or the best two where they are within a point;
    none before all are known."""
    if len(first) < len(RATES):
        return []
    best, second, *_ = sorted(first, key=first.__getitem__, reverse=True)
    return [best, second] if first[best] - first[second] <= CLOSE else [best]


def board_stages(board: Board) -> Iterator[tuple[str, list[Key]]]:
    """The title and the runs of each stage. What a stage has depends on the runs of those before
    it, so one is asked for when they are finished."""
    yield "learning rates", [(f"{arm}-{rate}", TUNED) for arm, rate in product(ARMS, RATES)]

    repeated: list[Key] = []
    for arm in ARMS:
        first = {rate: mean_success(board.run(arm, rate, TUNED)) for rate in RATES}
        close = close_rates(first)
        if len(close) == 2:
            repeated += [(f"{arm}-{rate}", TUNED_TOO) for rate in close]
    yield "close learning rates", repeated

    yield "six seeds", board.at_own_rates(ARMS, FIRST)

    seeds_of = {arm: board.seeds_of(arm) for arm in ARMS}
    twelve: list[Key] = []
    for seed in REPORTED:
        arms = [arm for arm in ARMS if seed in seeds_of[arm]]
        twelve += board.at_own_rates(arms, [seed])
    yield "twelve seeds", twelve

    again = board.better_at_first()
    if again:
        yield "second look", board.at_own_rates([PLAIN, *again, *placebos(again)], AGAIN)
