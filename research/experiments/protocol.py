"""The protocol of the board: which runs it has, which rate an arm gets, and who is looked at again.

    rate      of three, the one with the highest mean success on seed 100; where the best two are
              within a point, the mean of seeds 100 and 101 decides. Plain GRPO chooses, too
    leads     over plain GRPO on seeds 40 to 51. An arm whose 95% interval over the first six lies
              wholly below -1 point is stopped there, and behind
    again     whoever is ahead, by Holm's correction over all methods, runs on seeds 60 to 71,
              beside its placebo: the same weights or advantages at other tokens
"""
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from analysis.compare import IN_TRAINING, SEEN, difference, mean_success
from analysis.runs import Run, is_done, read_run
from analysis.statistics import Estimate, holm
from engine.errors import UserError
from harness.screen import say
from harness.flags import MOST_THREADS, Flag
from harness.settings import make_settings, read_flags
from research.experiments.arms import ARMS, METHODS, PLAIN, placebos
from harness.planned import PlannedRun

RATES = ("1.25e-4", "2.5e-4", "5e-4")
TUNED, TUNED_TOO, CLOSE = 100, 101, 0.01
FIRST, REPORTED, AGAIN = range(40, 46), range(40, 52), range(60, 72)
STOP = -0.01
STEPS = 60
COMMON = ("--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 --sample_every 0 "
          "--threads 1")
OF_RUNS = {  # flags of what makes runs
    "processes": Flag(0, "runs at a time; 0 is one for each core that this program may use",
                      least=0, most=MOST_THREADS),
    "report_only": Flag(False, "say what the finished runs show, and start nothing")}
Key = tuple[str, str, int]  # arm, rate, seed


@dataclass
class Board:
    """The finished runs of a folder, and what the protocol makes of them."""
    folder: Path
    known: dict[Key, dict] = field(default_factory=dict)

    def planned(self, arm: str, rate: str, seed: int) -> PlannedRun:
        of_arm = (ARMS | placebos(list(METHODS)))[arm]
        flags = f"{COMMON} {of_arm} --learning_rate {rate}".split()
        name = f"{arm}-{rate}"
        return PlannedRun(name, seed, self.folder / f"{name}-s{seed}", flags, STEPS)

    def run(self, arm: str, rate: str, seed: int) -> dict | None:
        """If it is finished; one with other settings is an error."""
        key = arm, rate, seed
        planned = self.planned(*key)
        if key not in self.known and (run := finished_run(planned)):
            self.known[key] = run
        return self.known.get(key)

    def of_seeds(self, arm: str, seeds) -> dict[int, dict]:
        """By seed, at the arm's own rate."""
        rate = self.rate(arm)
        runs = {seed: self.run(arm, rate, seed) for seed in seeds} if rate else {}
        return {seed: run for seed, run in runs.items() if run}

    def rate(self, arm: str) -> str | None:
        """The one that suits it, when that is known. A placebo has its arm's."""
        arm = arm.removesuffix("-placebo")
        tuned = {rate: list(map(mean_success, self.tuned(arm, rate))) for rate in RATES}
        close = close_rates({rate: found[0] for rate, found in tuned.items() if found})
        if len(close) == 2 and all(len(tuned[rate]) == 2 for rate in close):
            return max(close, key=lambda rate: np.mean(tuned[rate]))
        return close[0] if len(close) == 1 else None

    def tuned(self, arm: str, rate: str) -> list[dict]:
        """The runs that choose a rate: of the first seed, and of the other if both are there."""
        first, other = (self.run(arm, rate, seed) for seed in (TUNED, TUNED_TOO))
        return [run for run in (first, other) if first and run]

    def lead(self, arm: str, seeds, tests: int = 1) -> tuple[list[int], Estimate | None]:
        """Over plain GRPO, on the seeds of these that both have."""
        return difference(self.of_seeds(arm, seeds), self.of_seeds(PLAIN, seeds), IN_TRAINING,
                          tests)

    def seeds_of(self, arm: str) -> range:
        """That count for its lead."""
        seeds, lead = self.lead(arm, FIRST)
        is_stopped = arm in METHODS and len(seeds) == len(FIRST) and lead.high < STOP
        return FIRST if is_stopped else REPORTED


def finished_run(planned: PlannedRun) -> Run | None:
    """Its name says which run it should be, its settings which it is."""
    if not (planned.folder / "config.json").exists():
        return None
    run = read_run(planned.folder)
    flags = [*planned.flags, "--steps", str(planned.steps), "--seed", str(planned.seed)]
    wanted, config = make_settings(read_flags(flags)).to_json(), run["config"]
    passed_over = {"out"} if wanted["threads"] else {"out", "threads"}  # 0: what suits the machine
    for name in wanted.keys() - passed_over:
        if config.get(name) != wanted[name]:
            raise UserError(f"{planned.folder} has --{name} {config.get(name)}, not "
                            f"{wanted[name]}: remove it, and it is made again")
    return run if is_done(run) else None


def end_with(failed: dict[str, str]) -> None:
    """Say which arms failed, if any did, and end in an error."""
    for arm, reason in failed.items():
        say(f"failed: {arm}: {reason}")
    if failed:
        raise SystemExit(1)


def close_rates(first: dict[str, float]) -> list[str]:
    """Success on the first seed by rate: the best, or the best two where they are within a point;
    none before all are known."""
    if len(first) < len(RATES):
        return []
    best, second, *_ = sorted(first, key=first.get, reverse=True)
    return [best, second] if first[best] - first[second] <= CLOSE else [best]


def looked_at(board: Board, arms: list[str], seeds_of) -> dict[str, tuple[int, Estimate, float]]:
    """Of the arms that have two pairs: how many there are, the lead, and p by Holm over these."""
    found = {arm: board.lead(arm, seeds_of(arm), len(arms)) for arm in arms}
    found = {arm: (len(seeds), lead) for arm, (seeds, lead) in found.items() if len(seeds) > 1}
    p = holm([lead.p for _, lead in found.values()])
    return {arm: (*of_arm, corrected) for (arm, of_arm), corrected in zip(found.items(), p)}


def ahead_at_first(board: Board) -> list[str]:
    first = looked_at(board, list(METHODS), board.seeds_of)
    return [arm for arm, (_, lead, p) in first.items() if p < SEEN and lead.value > 0]


def stages(board: Board):
    """(title, runs) of each. What a stage has depends on the runs of those before it, so one is
    asked for when they are finished."""
    yield "learning rates", [(arm, rate, TUNED) for arm in ARMS for rate in RATES]
    first = {arm: {rate: mean_success(board.run(arm, rate, TUNED)) for rate in RATES}
             for arm in ARMS}
    close = {arm: close_rates(found) for arm, found in first.items()}
    yield "close learning rates", [(arm, rate, TUNED_TOO) for arm in ARMS
                                   for rate in close[arm] if len(close[arm]) == 2]
    rates = {arm: board.rate(arm) for arm in ARMS}
    yield "six seeds", [(arm, rates[arm], seed) for seed in FIRST for arm in ARMS]
    yield "twelve seeds", [(arm, rates[arm], seed) for seed in REPORTED for arm in ARMS
                           if seed in board.seeds_of(arm)]
    if again := ahead_at_first(board):
        yield "second look", [(arm, board.rate(arm), seed) for seed in AGAIN
                              for arm in (PLAIN, *again, *placebos(again))]
