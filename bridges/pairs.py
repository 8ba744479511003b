"""Preference pairs for --loss dpo --pairs: a file of answers to problems, the better and the worse.

    {"problem": "3 5 7 make 22", "chosen": " 3 * 5 = 15, ...", "rejected": " 3 + 5 = 8, ..."}

The problem is written as the task shows it, an answer as a model would go on from the prompt, its
<|im_end|> included. A step takes some of the pairs instead of sampling (`GivenPairs`); nothing but
--loss dpo can be trained with them. As a program it writes such a file from what a run sampled, the
best and the worst answer of each group:

    python -m bridges.pairs runs/none-grpo-s0
    python train.py --loss dpo --pairs runs/none-grpo-s0/pairs.jsonl
"""
if not __package__:
    raise SystemExit("start it with: python -m bridges.pairs")
import json
import random
from pathlib import Path
from typing import NamedTuple

import torch

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from engine.errors import UserError, parse_object
from engine.extra_forward import with_facts
from engine.policy import stop_ids
from engine.rollouts import Rollouts
from engine.tokens import encode, encode_prompt, load_tokenizer
from harness.record import credit_steps, read_credit, read_given, replace_text
from harness.screen import run_as_program
from harness.parser import make_parser
from harness.settings import make_settings
from harness.load import make_task

KEYS = ("problem", "chosen", "rejected")
EXPECTED = "expected {" + ", ".join(f'"{key}": "..."' for key in KEYS) + "}"


class Pair(NamedTuple):
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
        self.pairs = read_given(name, "pairs", lambda line, where: parse_pair(line, where, policy))

    def sample(self, *_) -> Rollouts:
        """--questions of the pairs, whatever the problems: they follow from seed and step alone.
        Two answers to each, the better one first."""
        policy, s = self.policy, self.policy.settings
        rng = random.Random(f"pairs {s.seed} {self.run.step}")
        pairs = [rng.choice(self.pairs) for _ in range(s.questions)]
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        length = torch.tensor(list(map(len, answers)))
        mask = torch.arange(int(length.max())) < length[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor(sum(answers, []))
        ends = stop_ids(policy.model, policy.tokenizer)
        finished = torch.tensor([answer[-1] in ends for answer in answers])
        group, unknown = torch.arange(len(answers)) // 2, torch.zeros(mask.shape)
        rollouts = Rollouts([pair.problem for pair in pairs], [pair.prompt for pair in pairs],
                            group, ids, mask, finished, unknown, unknown, unknown)
        return with_facts(policy.model, rollouts.to(policy.model.device), s.micro_batch)


def parse_pair(line: str, where: str, policy) -> Pair:
    try:
        raw = parse_object(line, where)
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


def pairs_of(folder: Path, settings) -> list[dict]:
    """Of all groups of a run whose rewards differ. The problems are those it trained on."""
    tokenizer, pairs = load_tokenizer(folder), []
    task = make_task(settings.task, settings.method_flags)
    for step in credit_steps(folder):
        batch = read_credit(folder, step, tokenizer)
        problems = task.training_problems(settings.seed, step, settings.questions)
        rewards, groups = batch.reward.tolist(), batch.group.tolist()
        for group, problem in enumerate(problems):
            rows = [row for row, of_group in enumerate(groups) if of_group == group]
            best, worst = max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)
            if rewards[best] > rewards[worst]:
                texts = batch.answers[best], batch.answers[worst]
                pairs.append(dict(zip(KEYS, (task.show(problem), *texts))))
    return pairs


def main(argv: list[str]) -> None:
    parser = make_parser("python -m bridges.pairs RUN", __doc__, {})
    parser.add_argument("run", metavar="RUN", help="a run folder")
    folder = Path(parser.read(argv)["run"])
    settings, output = make_settings({"config": folder / "config.json"}), folder / "pairs.jsonl"
    if settings.pairs:
        raise UserError(f"{folder} was trained on the pairs of {settings.pairs}, and sampled none")
    pairs = pairs_of(folder, settings)
    if not pairs:
        raise UserError(f"{folder} has no pairs: in no group of its credit files do rewards differ")
    replace_text(output, "".join(f"{json.dumps(pair)}\n" for pair in pairs))
    print(f"{len(pairs):,} pairs: {output}")


if __name__ == "__main__":
    run_as_program("pairs", main)
