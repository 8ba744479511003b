"""Which tokens earned the reward, asked of a model for which `scoreboard` takes days?

    python -m research large --model models/warm --minutes 60
    python -m research large --threads 1                         # the tiny model, the same way

The estimator is that of `scoreboard` (credit.py), and what is decided at a token is again its
squared credit. Three things make it cheaper:

- Only problems that the model sometimes solves are measured, two of the answers or more right and
  two or more wrong: elsewhere nothing is decided. The rest tell its success.
- Of their answers three are drawn, at least one right and one wrong. Each stands for as many of the
  group as are right, or wrong, as it is.
- Only tokens with 1 - p above --certain are measured; the credit of the others is at most that
  share of the reward's range and counts as 0.

The measured answers are written as a run folder for analyze.py, a problem a step.
"""
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from engine.errors import UserError
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from harness.record import credit_path, make_run, provenance, write_credit
from harness.flags import Flag
from research.probes.common import OF_A_MODEL, Findings, Progress, policy_of, sample_batch
from research.probes.credit import (
    Credit, MeasuredTokens, mean_product, measured_tokens, true_credit)
from research.probes.scoreboard import PARTITIONS, decided_table

FLAGS = {
    **OF_A_MODEL,
    "problems": Flag(24, "whose credit is measured, at most", least=2, most=10_000),
    "minutes": Flag(60.0, "after which no other problem is begun", above=0, most=100_000),
    "questions": Flag(6, "problems asked at once", least=1, most=1000),
    "answers": Flag(8, "answers to each of them", least=4, most=1000),
    "of_each": Flag(3, "answers to each kept problem whose credit is measured", least=2, most=1000),
    "continuations": Flag(8, "behind the credit of a token that is a free choice", least=2,
                          most=10_000),
    "certain": Flag(0.05, "tokens with 1 - p below this count as 0", least=0, most=1)}
MOST_ROUNDS = 1000


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_of(args)
    progress, end = Progress(problems=1), time.monotonic() + 60 * args.minutes
    parts, right, spent, halves = [], [], 0, []
    for part, stands_for in kept_problems(policy, args, right):
        progress("problems", len(parts) / args.problems,
                 f"{len(parts)} problems, {np.mean(right):.1%} of {len(right)} answers right")
        if len(parts) == args.problems or time.monotonic() > end:
            break
        credit = true_credit(policy, part, args.continuations, certain=args.certain)
        parts.append(weighted(measured_tokens(policy, part, credit), stands_for))
        write_step(folder / "run", len(parts), policy, part, credit)
        spent += credit.spent
        halves.append(credit.quarters[:, part.mask].view(2, 2, -1).mean(1).cpu().numpy())
    if len(parts) < 2:
        raise UserError(f"of {len(right)} answers {np.mean(right):.1%} are right, and fewer than "
                        "two problems were sometimes solved: train it before (tools.warmup)")
    tokens = joined(parts)
    told = np.concatenate(halves, 1)
    agree = np.corrcoef(told[:, told.any(0)])[0, 1]
    intro = [f"{policy.folder}: {np.mean(right):.1%} of {len(right)} answers right; credit of "
             f"{len(np.unique(tokens.answer))} answers to {len(parts)} problems, "
             f"{len(tokens.answer):,} tokens, from {spent:,} sampled ones.",
             f"Two halves of the continuations give credits whose correlation is {agree:.2f}."]
    return Findings("Which tokens earned the reward of a large model", intro,
                    [decided_table(tokens, partition) for partition in PARTITIONS],
                    {"right": right, "decided_by_problem": by_problem(tokens)})


def kept_problems(policy: Policy, args: SimpleNamespace, right: list[float]):
    """Ask problems as training does, round after round, and give those that are kept. Which of all
    answers are right is added to `right`."""
    for step in range(1, MOST_ROUNDS):
        with torch.no_grad():
            rollouts = sample_batch(policy, args.questions, args.answers, step)
        right += rollouts.scores["answer"].tolist()
        yield from kept(rollouts, args)


def kept(rollouts: Rollouts, args: SimpleNamespace):
    """Of each problem that is sometimes solved some answers, and how many each stands for."""
    for problem in range(len(rollouts.prompt_ids)):
        group = rollouts.of_problems(range(problem, problem + 1))
        is_right = group.scores["answer"] == 1
        rows = [is_right.eq(value).nonzero().flatten().tolist() for value in (False, True)]
        if min(map(len, rows)) < 2:
            continue
        drawn = draw(rows, args.of_each, random.Random(f"{args.seed} {rollouts.step} {problem}"))
        seed = derived_seed("probe credit", args.seed, rollouts.step, problem)
        part = replace(group.of_rows(torch.tensor(drawn)),
                       generator=torch.Generator().manual_seed(seed))
        like_it = [sum(is_right[i] == is_right[j] for j in drawn) for i in drawn]
        stands_for = [len(rows[int(is_right[i])]) / int(n) for i, n in zip(drawn, like_it)]
        yield part, torch.tensor(stands_for)


def draw(rows: list[list[int]], count: int, rng: random.Random) -> list[int]:
    """So many of all, at least one of each list."""
    first = [rng.choice(of_kind) for of_kind in rows]
    others = [row for of_kind in rows for row in of_kind if row not in first]
    return sorted(first + rng.sample(others, min(count - 2, len(others))))


def weighted(tokens: MeasuredTokens, stands_for: torch.Tensor) -> MeasuredTokens:
    """Each token counts for as many answers as its own stands for."""
    times = stands_for.numpy()[tokens.answer]
    return replace(tokens, decided=tokens.decided * times, advantage=tokens.advantage * times)


def joined(parts: list[MeasuredTokens]) -> MeasuredTokens:
    """One after the other: problems and answers are numbered on."""
    answers = np.cumsum([0, *(part.answer.max() + 1 for part in parts)])
    return MeasuredTokens(
        questions=len(parts),
        question=np.repeat(np.arange(len(parts)), [len(part.answer) for part in parts]),
        answer=np.concatenate([part.answer + n for part, n in zip(parts, answers)]),
        codes={name: np.concatenate([part.codes[name] for part in parts])
               for name in parts[0].codes},
        **{name: np.concatenate([getattr(part, name) for part in parts])
           for name in ("advantage", "size", "decided")})


def by_problem(tokens: MeasuredTokens) -> dict[str, list[float]]:
    """Of each kind what is decided at it, problem by problem: to pool several runs."""
    kinds, (names, _) = tokens.codes["kind"], PARTITIONS["kind"]
    return {name: tokens.by_question(tokens.decided * (kinds == code)).tolist()
            for code, name in enumerate(names) if (kinds == code).any()}


def write_step(run: Path, number: int, policy: Policy, part: Rollouts, credit: Credit) -> None:
    """A problem as a step of a run folder, which the first one makes."""
    if number == 1:
        config = {**policy.settings.to_json(), "steps": 1, **provenance(),
                  "reward": policy.task.reward, "model_config": policy.model.config.to_json()}
        make_run(run, config, policy.folder / "tokenizer.json")
    write_credit(credit_path(run, number), part, part.mask.float(), true_credit=credit.value,
                 true_credit_se=credit.error, decided=mean_product(credit.quarters))
