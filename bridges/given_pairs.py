"""Preference pairs that people bring: a file of answers to problems, the better and the worse one.

    {"problem": "3 5 7 make 22", "chosen": " 3 * 5 = 15, ...", "rejected": " 3 + 5 = 8, ..."}

The problem is written as the task shows it, an answer as a model would go on from the prompt, its
<|im_end|> included. A step takes some of the pairs instead of sampling, in the frame that a sampled
batch has; nothing but --loss dpo can be trained with it.
"""
import random
from dataclasses import dataclass

import torch

from engine.errors import UserError
from engine.forward import with_facts
from engine.policy import stop_ids
from engine.rollouts import Rollouts
from engine.tokens import encode, encode_prompt
from harness.files import parse_json, read_given

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

    def __init__(self, name: str, policy, run=None):
        self.policy, self.run = policy, run
        if not hasattr(policy.task, "read"):
            raise UserError(f"--pairs: --task {policy.settings.task} has no method read, which "
                            "makes a problem of a text")
        self.pairs = read_given(name, "pairs",
                                lambda line, where: parse_pair(line, where, policy))

    def sample(self, *_) -> Rollouts:
        """--questions of the pairs, whatever the problems: they follow from seed and step alone.
        Two answers to each, the better one first."""
        policy, s = self.policy, self.policy.settings
        device = policy.model.device
        rng = random.Random(f"pairs {s.seed} {self.run.step}")
        pairs = [rng.choice(self.pairs) for _ in range(s.questions)]
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        length = torch.tensor([len(ids) for ids in answers], device=device)
        mask = torch.arange(int(length.max()), device=device) < length[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long, device=device)
        ids[mask] = torch.tensor(sum(answers, []), device=device)
        ends = stop_ids(policy.model, policy.tokenizer)
        finished = torch.tensor([answer[-1] in ends for answer in answers], device=device)
        group = torch.arange(len(pairs), device=device).repeat_interleave(2)
        unknown = torch.zeros(mask.shape, device=device)  # `with_facts` computes what is missing
        rollouts = Rollouts([pair.problem for pair in pairs], [pair.prompt for pair in pairs],
                            group, ids, mask, finished, log_prob=unknown, entropy=unknown,
                            collision=unknown)
        return with_facts(policy.model, rollouts, s.micro_batch)


def parse_pair(line: str, where: str, policy) -> Pair:
    try:
        raw = parse_json(line)
        problem_text, better, worse = [raw[key] for key in KEYS if raw[key].strip()]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{where}: {EXPECTED}, got {line[:80]!r}") from None
    try:
        problem = policy.task.read(problem_text.split())
        prompt = encode_prompt(policy.tokenizer, policy.task.prompt_for(problem), problem_text)
        chosen, rejected = (encode(policy.tokenizer, text, "an answer") for text in (better, worse))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    longest = len(prompt) + max(len(chosen), len(rejected))
    limit = policy.model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"{where}: prompt and answer are {longest} tokens, the model takes {limit}")
    return Pair(problem, prompt, chosen, rejected)
