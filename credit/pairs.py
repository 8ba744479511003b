"""Preference pairs for --loss dpo --pairs: a file of answers to problems, the better and the worse.

    {"problem": "3 5 7 make 22", "chosen": " 3 * 5 = 15, ...", "rejected": " 3 + 5 = 8, ..."}

The problem is written as the task shows it. An answer is the text that a model would write after
the prompt, its <|im_end|> included. A step takes some of the pairs instead of sampling
(`GivenPairs`). Only --loss dpo (credit/preferences.py) can be trained with them. `python -m
tools.pairs RUN` makes such a file from a run.
"""
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.errors import UserError, parse_object
from engine.extra_forward import with_facts
from engine.policy import Policy, stop_ids
from engine.rollouts import Problem, Rollouts
from engine.tokens import encode, encode_prompt
from harness.record import read_given
from harness.run import Run

KEYS = ("problem", "chosen", "rejected")
EXPECTED = 'expected {"problem": "...", "chosen": "...", "rejected": "..."}'
Reader = Callable[[list[str]], Problem]  # the words of a problem -> the problem


class Pair(NamedTuple):
    problem: Problem
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class GivenPairs:
    """A source of answers: the pairs of a file, all read and checked before the first step."""

    def __init__(self, name: str, policy: Policy, run: Run):
        self.policy, self.run = policy, run
        read: Reader | None = getattr(policy.task, "read", None)
        if read is None:
            raise UserError("--pairs needs a task with a method read, which makes a problem from "
                            f"its text, and --task {policy.settings.task} has none")
        self.pairs = read_given(name, "pairs",
                                lambda line, where: parse_pair(line, where, policy, read))

    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts:
        """Pairs of the file, as many as `problems` has: for each its better answer, then its worse
        one. Only the number of `problems` is used. Which pairs are drawn follows from --seed and
        the step."""
        rng = random.Random(f"pairs {self.policy.settings.seed} {self.run.step}")
        drawn = [rng.choice(self.pairs) for _ in problems]
        return batch_of(drawn, self.policy)


def batch_of(pairs: list[Pair], policy: Policy) -> Rollouts:
    """The pairs as a batch, in which each pair is a group. Log-prob, entropy and collision of the
    tokens are computed with the model."""
    answers: list[list[int]] = []
    for pair in pairs:
        answers += [pair.chosen, pair.rejected]
    length = torch.tensor([len(answer) for answer in answers])
    mask = torch.arange(int(length.max())) < length[:, None]                 # (B, T)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor(sum(answers, []))
    ends = stop_ids(policy.model, policy.tokenizer)
    finished = torch.tensor([answer[-1] in ends for answer in answers])
    group = torch.arange(len(answers)) // 2
    unknown = torch.zeros(mask.shape)
    batch = Rollouts([pair.problem for pair in pairs], [pair.prompt for pair in pairs], group, ids,
                     mask, finished, log_prob=unknown, entropy=unknown, collision=unknown)
    return with_facts(policy.model, batch.to(policy.model.device), policy.settings.micro_batch)


def parse_pair(line: str, where: str, policy: Policy, read: Reader) -> Pair:
    try:
        written = parse_object(line, where)
    except UserError:
        written = {}
    texts = [written.get(key) for key in KEYS]
    given = [text for text in texts if isinstance(text, str) and text.strip()]
    if len(given) < len(KEYS):
        raise UserError(f"{where}: {EXPECTED}, got {line[:80]!r}")
    shown, better, worse = given
    try:
        problem = read(shown.split())
        prompt = encode_prompt(policy.tokenizer, policy.task.prompt_for(problem), shown)
        chosen = encode(policy.tokenizer, better, "an answer")
        rejected = encode(policy.tokenizer, worse, "an answer")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    longest = len(prompt) + max(len(chosen), len(rejected))
    limit = policy.model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"{where}: prompt and answer have {longest} tokens, and the model "
                        f"takes {limit}")
    return Pair(problem, prompt, chosen, rejected)
