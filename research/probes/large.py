"""Which tokens decide the reward of a model for which `scoreboard` would take days?

    python -m research large --model models/warm --minutes 60
    python -m research large --threads 1                         # the tiny model, the same way

This probe does what `scoreboard` does, but within a given time. The estimator of the credit is the
same (credit.py), and so is the share that a token decides, its squared credit over the sum of them.
Three things make it cheaper:

- Only problems with two or more right and two or more wrong answers are measured, because elsewhere
  there is little to decide. The other problems count only for the success rate.
- Of each such problem three answers are drawn, at least one right and one wrong. A drawn right
  answer is weighted so that it represents the right answers of its group, and likewise a wrong one.
- Only tokens with 1 - p above --certain are measured. The credit of another token is at most
  --certain times the range of the reward, and counts as 0.

The measured answers are written as a run folder for analyze.py, in which each problem is a step.
"""
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from engine.errors import UserError
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from harness.flags import Flag
from research.probes.common import (CONFIG, MODEL_FLAGS, Findings, Progress, policy_from_flags,
                                    sample_batch)
from research.probes.credit import true_credit
from research.probes.decided import (PARTITIONS, MeasuredAnswers, decided_table, sums_of,
                                     tokens_of, write_run)

FLAGS = {
    **MODEL_FLAGS,
    **CONFIG,
    "problems": Flag(24, "the most problems whose credit is measured", least=2, most=10_000),
    "minutes": Flag(60.0, "minutes after which no further problem is begun", above=0, most=100_000),
    "questions": Flag(6, "how many problems are answered at the same time", least=1, most=1000),
    "answers": Flag(8, "answers to each problem", least=4, most=1000),
    "of_each": Flag(3, "how many answers to each problem are measured",
                    least=2, most=1000),
    "continuations": Flag(8, "how many continuations measure the credit of an uncertain token",
                             least=2,
                          most=10_000),
    "certain": Flag(0.05, "tokens with 1 - p below this are not measured, and their credit counts "
                          "as 0", least=0, most=1)}
MOST_ROUNDS = 1000


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_from_flags(args)
    progress, end = Progress(problems=1), time.monotonic() + 60 * args.minutes
    measured: list[MeasuredAnswers] = []
    right: list[float] = []
    for rollouts, stands_for in kept_problems(policy, args, right, end):
        progress("problems", len(measured) / args.problems,
                 f"{len(measured)} problems, {np.mean(right):.1%} of {len(right)} answers right")
        if len(measured) == args.problems or time.monotonic() > end:
            break
        credit = true_credit(policy, rollouts, args.continuations, certain=args.certain)
        measured.append(MeasuredAnswers(rollouts, credit, stands_for))
    if len(measured) < 2:
        raise UserError(f"{np.mean(right):.1%} of {len(right)} answers are right. In "
                        f"{args.minutes:g} minutes fewer than two problems that are sometimes "
                        "solved were measured. Give it more --minutes, or train the model before "
                        "(python -m tools.warmup)")
    tokens = tokens_of(policy, measured)
    write_run(folder / "run", policy, measured)
    spent = sum(part.credit.spent for part in measured)
    intro = [f"Of {len(right)} answers of {policy.folder}, {np.mean(right):.1%} are right. Credit "
             f"was measured for {len(np.unique(tokens['answer']))} answers to {len(measured)} "
             f"problems, with {len(tokens):,} tokens. For this, {spent:,} tokens were sampled.",
             "The credits from one half of the continuations have a correlation of "
             f"{correlation_of_halves(measured):.2f} with those from the other half."]
    return Findings("Which tokens decide the reward of a large model", intro,
                    [decided_table(tokens, partition) for partition in PARTITIONS],
                    {"right": right, **sums_of(tokens, "kind")})


def kept_problems(policy: Policy, args: SimpleNamespace, right: list[float],
                  end: float) -> Iterator[tuple[Rollouts, torch.Tensor]]:
    """Ask problems as training does, round after round until the time is over, and give those that
    are kept. Whether each answer is right is added to `right`."""
    for step in range(1, MOST_ROUNDS):
        if right and time.monotonic() > end:
            return
        with torch.no_grad():
            rollouts = sample_batch(policy, args.questions, args.answers, step)
        right += rollouts.scores["answer"].tolist()
        yield from kept(rollouts, args)


def kept(rollouts: Rollouts, args: SimpleNamespace) -> Iterator[tuple[Rollouts, torch.Tensor]]:
    """Some answers to each problem that is sometimes solved, and how many each stands for."""
    for problem in range(len(rollouts.prompt_ids)):
        group = rollouts.of_problems(range(problem, problem + 1))
        is_right = group.scores["answer"] == 1
        wrong, right = (~is_right).nonzero().flatten(), is_right.nonzero().flatten()
        wrong_and_right = [wrong.tolist(), right.tolist()]
        if min(map(len, wrong_and_right)) < 2:
            continue
        rng = random.Random(f"{args.seed} {rollouts.step} {problem}")
        drawn = some_of_each(wrong_and_right, args.of_each, rng)
        stands_for = []
        for row in drawn:
            like_it = wrong_and_right[int(is_right[row])]
            drawn_like_it = set(like_it) & set(drawn)
            stands_for.append(len(like_it) / len(drawn_like_it))
        seed = derived_seed("probe credit", args.seed, rollouts.step, problem)
        answers = replace(group.of_rows(torch.tensor(drawn)),
                          generator=torch.Generator().manual_seed(seed))
        yield answers, torch.tensor(stands_for)


def some_of_each(lists: list[list[int]], count: int, rng: random.Random) -> list[int]:
    """So many numbers of two lists, at least one of each."""
    first = [rng.choice(numbers) for numbers in lists]
    others = [number for number in chain(*lists) if number not in first]
    return sorted(first + rng.sample(others, min(count - 2, len(others))))


def correlation_of_halves(measured: list[MeasuredAnswers]) -> float:
    """The correlation of the measured tokens' credit by two halves of the continuations."""
    halves = []
    for part in measured:
        quarters = part.credit.parts[:, part.rollouts.mask]  # (4, tokens)
        halves.append(quarters.view(2, 2, -1).mean(1).cpu().numpy())
    credit = np.concatenate(halves, 1)  # (2, n)
    return float(np.corrcoef(credit[:, credit.any(0)])[0, 1])
