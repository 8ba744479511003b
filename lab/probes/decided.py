"""Which tokens decide the reward, and which get the gradient?

    python -m lab decided                                   # the tiny model, some minutes
    python -m lab decided --model FOLDER --minutes 60       # a large one, as far as time goes
    python -m lab decided --model runs/x/checkpoints/step_000100 --all_answers

The credit of a token is V after it minus V before it, where V is the expected reward of continuing
from there. It is measured from continuations (credit.py). Summed over an answer, the squared
credits are on average the variance of the reward. So the share that a token decides is its squared
credit divided by that sum. An example with four tokens:

    credit            0.0    0.5   -0.1    0.0
    share it decides  0%     96%     4%    0%       0.25 and 0.01 of 0.26

A squared credit is measured as the product of two independent estimates, because the square of one
estimate would be too large by its variance. Three things make the measurement cheaper:

- Only problems with two or more right and two or more wrong answers are measured, because elsewhere
  there is little to decide. The other problems count only for the success rate.
- Of each such problem three answers are drawn, at least one right and one wrong. A drawn right
  answer is weighted so that it represents the right answers of its group, and likewise a wrong one.
  With --all_answers all answers to every problem are measured instead.
- Only tokens with 1 - p above --certain are measured. The credit of another token is at most
  --certain times the range of the reward, and counts as 0.

The measured answers are written as a run folder for analyze.py, in which each problem is a step.
Its column `decided` has the squared credit, `true_credit` the credit, and `true_credit_se` its
standard error.
"""
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.shares import occurring, share_of
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from lab.analysis.token_table import TokenTable, joined_tables, table_of_frames
from lab.engine.errors import UserError
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import KINDS, SECTIONS
from grpo import gradient_size
from lab.harness.flags import Flag, Requirement
from lab.harness.record import credit_path, provenance, write_credit
from lab.probes.notes_sums import CLASSES, class_codes
from lab.probes.common import MODEL_FLAGS, Findings, Progress, policy_from_flags, sample_batch
from run import make_run
from lab.probes.credit import MeasuredCredit, squared_credit, true_credit

DRAWN: Requirement = (lambda s: not s.all_answers, "drawn answers: --all_answers draws none")
FLAGS = {
    **MODEL_FLAGS,
    "problems": Flag(24, "the most problems whose credit is measured", least=2, most=10_000),
    "minutes": Flag(60.0, "minutes after which no further problem is begun", above=0, most=100_000),
    "questions": Flag(6, "how many problems are answered at the same time", least=1, most=1000),
    "answers": Flag(8, "answers to each problem", least=4, most=1000),
    "of_each": Flag(3, "how many answers are measured to each problem that is sometimes solved",
                    least=2, most=1000, requires=DRAWN),
    "all_answers": Flag(False, "measure all answers to every problem, also to one that is never or "
                               "always solved"),
    "continuations": Flag(8, "how many continuations measure the credit of an uncertain token. A "
                             "nearly certain one gets fewer", least=2, most=10_000),
    "certain": Flag(0.05, "tokens with 1 - p below this are not measured, and their credit counts "
                          "as 0", least=0, most=1)}
MOST_ROUNDS = 1000
PARTITIONS = {"kind": (KINDS, "What each kind of token decides, and what gradient it gets"),
              "section": (SECTIONS, "The same by section of the answer"),
              "class": (CLASSES, "The same by the earlier experiment's classes: is filler wasted?")}


@dataclass
class MeasuredAnswers:
    """Some answers with the credit of their tokens. An answer may stand for several of its group,
    of which it was drawn."""
    rollouts: Rollouts
    credit: MeasuredCredit
    stands_for: torch.Tensor | float = 1.0   # (B,)


def tokens_of(policy: Policy, measured: Sequence[MeasuredAnswers]) -> TokenTable:
    """The measured tokens. What an answer stands for is in its advantage and its squared credit."""
    tables = []
    for part in measured:
        rollouts = part.rollouts
        frames = {
            "advantage": rollouts.advantage,  # plain GRPO's
            "s": gradient_size(rollouts.log_prob, rollouts.collision),
            "squared credit": squared_credit(part.credit.parts),
            "kind": rollouts.kind,
            "section": rollouts.section,
            "token_id": rollouts.ids}
        tokens = table_of_frames(rollouts.mask, rollouts.group, frames)
        times = part.stands_for
        if isinstance(times, torch.Tensor):
            times = times.numpy()[tokens["answer"]]
        tables.append(tokens.having({
            "class": class_codes(policy.tokenizer, tokens["token_id"]),
            "count": np.ones(len(tokens)),
            "advantage": tokens["advantage"] * times,
            "squared credit": tokens["squared credit"] * times}))
    return joined_tables(tables)


def decided_table(tokens: TokenTable, partition: str) -> Table:
    """A row for each cell of the partition: its share of the squared credit and of the gradient. A
    token counts `count` times."""
    names, title = PARTITIONS[partition]
    squared, gradient = tokens["squared credit"], np.abs(tokens["advantage"]) * tokens["s"]
    count = tokens["count"]
    rows: list[Row] = []
    for name, inside in occurring(tokens[partition], names):
        of_name = count[inside].sum()
        rows.append([name, round(of_name), of_name / count.sum(),
                     share_of(tokens, inside, squared), share_of(tokens, inside, gradient)])
    formats = {partition: "", "tokens": ",d", "of all": ".1%", "decided": ".1%",
               "gradient": ".1%"}
    return Table(
        partition, title, by_row(formats, rows), decided_in_words(rows),
        ["The share they decide is a share of the sum of squared credits. It can be negative by "
         "chance, because a squared credit is the product of two estimates. Its interval is cut "
         "at 0 and 1, or reaches to the share itself. The share of plain GRPO's gradient is a "
         "share of the sum of abs(A) s, the sizes of the tokens' gradients at the logits"],
        {"tokens": "number of tokens", "of all": "share of all tokens",
         "decided": f"the share they decide{WITH_INTERVAL}",
         "gradient": f"share of plain GRPO's gradient{WITH_INTERVAL}"})


def decided_in_words(rows: list[Row]) -> str:
    """A sentence about filler, or else about the tokens that decide most."""
    filler = [row for row in rows if row[0] == "filler"]
    chosen = filler[0] if filler else max(rows, key=lambda row: row[3].value)
    name, _, _, decided, gradient = chosen
    if not decided.high - decided.low < 1:
        return ("There are too few problems, continuations or differences in reward to say which "
                "tokens decide the reward.")
    return (f"The {name} tokens decide {decided.value:.0%} (95% interval {decided.low:.0%} to "
            f"{decided.high:.0%}) of the reward's variance and get {shown(gradient, '.0%')} of "
            "plain GRPO's gradient.")


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
                        "(python -m lab warmup)")
    tokens = tokens_of(policy, measured)
    write_run(folder / "run", policy, measured)
    spent = sum(part.credit.spent for part in measured)
    intro = [f"Of {len(right)} answers of {policy.folder}, {np.mean(right):.1%} are right. Credit "
             f"was measured for {len(np.unique(tokens['answer']))} answers to {len(measured)} "
             f"problems, with {len(tokens):,} tokens. For this, {spent:,} tokens were sampled.",
             "The credits from one half of the continuations have a correlation of "
             f"{correlation_of_halves(measured):.2f} with those from the other half."]
    return Findings("Which tokens decide the reward, and which get the gradient", intro,
                    [decided_table(tokens, partition) for partition in PARTITIONS])


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
    """Some answers to each problem that is sometimes solved, and how many each stands for; with
    --all_answers all answers to every problem."""
    for problem in range(len(rollouts.prompt_ids)):
        group = rollouts.of_problems(range(problem, problem + 1))
        if args.all_answers:
            yield with_generator(group, args.seed, problem), torch.ones(len(group.group))
            continue
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
        answers = with_generator(group.of_rows(torch.tensor(drawn)), args.seed, problem)
        yield answers, torch.tensor(stands_for)


def with_generator(rollouts: Rollouts, seed: int, problem: int) -> Rollouts:
    """With random numbers of this problem's own."""
    own = derived_seed("probe credit", seed, rollouts.step, problem)
    return replace(rollouts, generator=torch.Generator().manual_seed(own))


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


def write_run(path: Path, policy: Policy, measured: Sequence[MeasuredAnswers]) -> None:
    """A run folder for analyze.py, a step for each part that was measured."""
    config = {**policy.settings.to_json(), "steps": 1, **provenance(),
              "reward": policy.task.rewarded, "model_config": asdict(policy.model.config)}
    make_run(path, config, policy.folder / "tokenizer.json")
    for step, part in enumerate(measured, 1):
        columns = {"true_credit": part.credit.value, "true_credit_se": part.credit.error,
                   "decided": squared_credit(part.credit.parts)}
        write_credit(credit_path(path, step), replace(part.rollouts, step=step),
                     part.rollouts.mask.float(), columns)
