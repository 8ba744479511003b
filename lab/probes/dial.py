"""Where does credit by token pay? Any weighting or advantage in synthetic tasks, and true credit.

    python -m lab dial --only my_idea
    python -m lab dial --only "by_kind --word_weight 0.3, mask 0.1"
    python -m lab dial --only my_idea --worlds "512/48, 128/12 seen, 128/6 all"

In these tasks some tokens of an answer decide its reward, and the others decide nothing
(lab/dial/task.py). A task is called 512/48 if 48 of the 512 tokens of an answer decide. Its
name may go on with any of: sure 4, all, own, seen, found. lab/dial/task.py says what they
mean.

A method's gain in a task is its expected reward, averaged over a training, minus that of plain GRPO
with the same seed. All arms have the same learning rate. Beside a method stand (lab/dial/arms.py):

    true credit          V after the token minus V before it, exact. It is always trained, because
                         no method can know more
    mask 0.1             weight 1 at the tokens that decide, and 0.1 at all others
"""
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Estimate, Floats, holm, mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.flags import Flag, flags_of, make_parser
from lab.dial.arms import PLAIN, TRUE, SyntheticArm, named_arm
from lab.dial.task import TaskSpec
from lab.dial.training import train_policies
from lab.probes.common import COMMON, Findings, Progress

FEW_SOME_MANY = ("128/3", "128/12", "128/42")
STEPS, RATE, SEEDS = 60, 1e-2, 16  # this rate is the best one of plain GRPO in most tasks
FIRST_SEED, FIRST_OF_A_TRY = 5000, 3000  # of the command, and of gains_in_three_tasks
FLAGS = {
    **COMMON,
    "only": Flag("mask 0.1", "the arms to train besides plain GRPO and true credit, separated by "
                             "commas"),
    "worlds": Flag(",".join(FEW_SOME_MANY), "the synthetic tasks, separated by commas"),
    "steps": Flag(STEPS, "steps of each run. A step has 8 problems x 8 answers",
                  least=2, most=100_000),
    "seeds": Flag(SEEDS, "number of seeds of each arm", least=2, most=1000),
    "rate": Flag(RATE, "learning rate of AdamW", above=0, most=10)}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    torch.set_num_threads(args.threads or 1)  # a step is too small for more
    tasks = separated(args.worlds)
    names = list(dict.fromkeys([PLAIN, TRUE, *separated(args.only)]))
    arms = {name: arm_as_typed(name) for name in names}  # a wrong name is told before the training
    seeds = range(args.seed + FIRST_SEED, args.seed + FIRST_SEED + args.seeds)
    progress = Progress(**{task: TaskSpec.read(task).tokens for task in tasks})
    success: dict[tuple[str, str], Floats] = {}
    for task in tasks:
        for number, (name, arm) in enumerate(arms.items()):
            progress(task, number / len(arms), f"{task}: {name}")
            try:
                success[task, name] = success_by_seed(task, arm, seeds, args.steps, args.rate)
            except UserError as error:
                raise UserError(f"{name} cannot be measured here: {error}") from None
    intro = (f"Each arm has {args.seeds} seeds, and {args.steps} steps of 8 problems x 8 answers. "
             f"The learning rate is {args.rate:g}.")
    return Findings("Where does credit by token pay?", [intro], [gains_table(success)])


def separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def gains_table(success: dict[tuple[str, str], Floats]) -> Table:
    """The gain of each arm over plain GRPO in each task."""
    gains = {(task, name): mean_over(values - success[task, PLAIN])
             for (task, name), values in success.items() if name != PLAIN}
    tested = [key for key in gains if key[1] != TRUE]
    corrected = dict(zip(tested, holm([gains[key].p for key in tested])))
    rows: list[Row] = []
    for (task, name), values in success.items():
        rows.append([task, name, float(values.mean()), gains.get((task, name)),
                     corrected.get((task, name))])
    formats = {"task": "", "arm": "", "mean": ".1%", "gain": "points", "p": "p"}
    return Table("gains", "Mean success in training, and its gain over plain GRPO",
                 by_row(formats, rows), "",
                 ["The gain is in points, with Student's interval over pairs with the same seed. p "
                  "has Holm's correction over all gains but those of true credit"],
                 {"mean": "mean success", "gain": f"gain over plain GRPO{WITH_INTERVAL}"})


def arm_as_typed(text: str) -> SyntheticArm:
    """The arm that is typed as `my_idea --strength 2`, or by a name alone."""
    name, *typed = text.split(" --")
    chosen = MITIGATIONS.get(name) or ADVANTAGES.get(name)
    if not typed:
        return named_arm(name)
    if chosen is None:
        raise UserError(f"--only {text}: {named_arm(name).name} has no flags")
    words = []
    for flag in typed:
        words += f"--{flag}".split(maxsplit=1)
    parser = make_parser(f"python -m lab dial --only {name}", None, flags_of(chosen))
    return named_arm(name, parser.read(words))


def success_by_seed(task: str, arm: SyntheticArm, seeds: Sequence[int], steps: int = STEPS,
                    rate: float = RATE) -> Floats:
    """(seeds,): the mean success of the arm's training in a task."""
    means = train_policies(TaskSpec.read(task), arm, list(seeds), [rate] * len(seeds), steps)
    return np.array(means)


@dataclass
class GainInTask:
    """A method in a synthetic task: its gain over plain GRPO, that of true credit, and the mean
    success of plain GRPO by seed."""
    decide: int
    tokens: int
    gain: Estimate
    true: Estimate
    plain: list[float]
    is_same: bool  # each run ends as the one of plain GRPO with its seed does


def gains_in_three_tasks(name: str, flags: dict | None = None, seeds: int = SEEDS
                         ) -> list[GainInTask]:
    """A method's gain in three synthetic tasks, in which few tokens, some, or many of 128 decide.

    All arms have the same learning rate. With the better of two rates for each, found on four
    seeds, a method that knew nothing was 3.5 points ahead: plain GRPO had got the worse rate by
    chance.
    """
    found = []
    arms = named_arm(name, flags), named_arm(PLAIN), named_arm(TRUE)
    tried = range(FIRST_OF_A_TRY, FIRST_OF_A_TRY + seeds)
    for task in FEW_SOME_MANY:
        mine, plain, true = (success_by_seed(task, arm, tried).round(6) for arm in arms)
        spec = TaskSpec.read(task)
        found.append(GainInTask(spec.decide, spec.tokens, mean_over(mine - plain),
                                mean_over(true - plain), plain.tolist(),
                                bool((mine == plain).all())))
    return found
