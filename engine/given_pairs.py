"""Preference pairs that people bring: a file of answers to problems, the better and the worse one.

    {"problem": "3 5 7 make 22", "chosen": " 3 * 5 = 15, ...", "rejected": " 3 + 5 = 8, ..."}

The problem is written as the task shows it, an answer as a model would go on from the prompt, its
<|im_end|> included. A step takes some of the pairs instead of sampling, in the frame that a sampled
batch has; nothing but --loss dpo can be trained with it.
"""
import json
import random
from dataclasses import dataclass, replace
from typing import TextIO

import torch

from engine import processes
from engine.errors import UserError
from engine.finite import BrokenModel, refuse_undefined
from engine.forward import LOGITS_AT_ONCE, lay_out, micro_batches
from engine.given_problems import read_given
from engine.rollouts import Rollouts, stop_ids
from engine.sampler import Distribution
from engine.tokens import encode, encode_prompt
from qwen2_model import Qwen2

MAX_LINE = 1_000_000  # characters
KEYS = ("problem", "chosen", "rejected")
EXPECTED = "expected {" + ", ".join(f'"{key}": "..."' for key in KEYS) + "}"


@dataclass(frozen=True)
class Pair:
    problem: object
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class GivenPairs:
    """The pairs of a file, all of them read and checked before the first step."""

    def __init__(self, name: str, lab):
        if not hasattr(lab.task, "read"):
            raise UserError(f"--pairs: --task {lab.settings.task} has no method read, which makes "
                            "a problem of a text")
        self.pairs = read_given(name, "--pairs", lambda file: parse_pairs(file, name, lab))
        if not self.pairs:
            raise UserError(f"{name} holds no pairs")

    def of_step(self, lab, step: int) -> Rollouts:
        """--questions of the pairs, which follow from seed and step alone: two answers to each
        problem, the better one first."""
        s = lab.settings
        device = lab.model.device
        rng = random.Random(f"pairs {s.seed} {step}")
        pairs = [rng.choice(self.pairs) for _ in range(s.questions)]
        answers = []
        for pair in pairs:
            answers += [pair.chosen, pair.rejected]
        length = torch.tensor([len(ids) for ids in answers], device=device)
        mask = torch.arange(int(length.max()), device=device) < length[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long, device=device)
        ids[mask] = torch.tensor(sum(answers, []), device=device)
        ends = stop_ids(lab.model, lab.tokenizer)
        finished = torch.tensor([answer[-1] in ends for answer in answers], device=device)
        group = torch.arange(len(pairs), device=device).repeat_interleave(2)
        unknown = torch.zeros(mask.shape, device=device)  # `with_facts` computes what is missing
        rollouts = Rollouts([pair.problem for pair in pairs], [pair.prompt for pair in pairs],
                            group, ids, mask, finished, log_prob=unknown, entropy=unknown,
                            collision=unknown)
        return with_facts(lab.model, rollouts, s.micro_batch)


def parse_pairs(file: TextIO, name: str, lab) -> list[Pair]:
    pairs, number = [], 0
    while line := file.readline(MAX_LINE):  # a line without an end is not read to its end
        number += 1
        if line.strip():
            pairs.append(parse_pair(line, f"{name}, line {number}", lab))
    return pairs


def parse_pair(line: str, where: str, lab) -> Pair:
    texts = texts_of(line)
    if texts is None:
        raise UserError(f"{where}: {EXPECTED}, got {line.strip()[:80]!r}")
    problem_text, chosen, rejected = texts
    if chosen == rejected:
        raise UserError(f"{where}: both answers are the same")
    try:
        problem = lab.task.read(problem_text.split())
        prompt = encode_prompt(lab.tokenizer, lab.task.prompt_for(problem), problem_text)
        answers = [encode(lab.tokenizer, text, "an answer") for text in (chosen, rejected)]
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    longest = len(prompt) + max(map(len, answers))
    limit = lab.model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"{where}: prompt and answer are {longest} tokens, the model takes {limit}")
    return Pair(problem, prompt, *answers)


def texts_of(line: str) -> list[str] | None:
    """The three texts of a line, none of them empty; None if it holds anything else."""
    try:
        raw = json.loads(line)
        texts = [raw[key] for key in KEYS]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    are_texts = all(isinstance(text, str) and text.strip() for text in texts)
    return texts if are_texts else None


@torch.no_grad()
def with_facts(model: Qwen2, rollouts: Rollouts, micro_batch: int) -> Rollouts:
    """The batch with log-prob, entropy and collision of each token, as if it had been sampled."""
    facts = torch.zeros(3, *rollouts.mask.shape, device=rollouts.mask.device)
    size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for rows in micro_batches(rollouts, rollouts.own_rows(), micro_batch):
        ids, shared, predicts = lay_out(rollouts, rows)
        mask = rollouts.mask[rows]
        states = model.model(ids, shared.positions, shared)[predicts[mask]]
        parts = []
        for h, y in zip(states.split(size), rollouts.ids[rows][mask].split(size)):
            parts.append(torch.stack(Distribution(model.logits(h)).facts(y)))
        for fact, values in zip(facts, torch.cat(parts, 1)):
            fact[rows] = fact[rows].masked_scatter(mask, values)
    processes.all_reduce(facts)
    refuse_undefined("the model's probabilities are", facts, kind=BrokenModel)
    return replace(rollouts, log_prob=facts[0], entropy=facts[1], collision=facts[2])
