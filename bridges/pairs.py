"""Preference pairs from what a run sampled, for --loss dpo --pairs: the best and the worst answer
of each group whose rewards differ.

    python -m bridges.pairs runs/none-grpo-s0
    python train.py --loss dpo --pairs runs/none-grpo-s0/pairs.jsonl

The answers are as texts, so a model with another tokenizer can be trained on them. All are to
problems that the run trained on: none is held out.
"""
if not __package__:
    raise SystemExit("start it with: python -m bridges.pairs")
import json
from pathlib import Path

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from bridges.given_pairs import KEYS
from credit.preferences import best_and_worst
from engine.errors import UserError
from engine.tokens import load_tokenizer
from harness.credit_reading import credit_steps, read_credit
from harness.files import replace_text, writing
from harness.flags import Flag, Parser, add_flags, some_text, with_defaults
from harness.program import run_as_program
from harness.settings import make_settings
from harness.tasks import make_task

FLAGS = {"output": Flag(None, "the file to write; by default pairs.jsonl in the run folder")}


def pairs_of(folder: Path, task, settings) -> list[dict]:
    """All pairs of a run, step after step."""
    tokenizer, pairs = load_tokenizer(folder), []
    for step in credit_steps(folder):
        batch = read_credit(folder, step, tokenizer)
        problems = task.training_problems(settings.seed, step, settings.questions)
        for rows in best_and_worst(batch).tolist():
            problem = task.show(problems[batch.group[rows[0]]])
            texts = [batch.answers[row] for row in rows]
            pairs.append(dict(zip(KEYS, (problem, *texts))))
    return pairs


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m bridges.pairs RUN [--output FILE]", __doc__), FLAGS)
    parser.add_argument("run", metavar="RUN", type=some_text, help="a run folder")
    flags = with_defaults(parser.read(argv), FLAGS)
    folder = Path(flags.run)
    output = Path(flags.output or folder / "pairs.jsonl")
    settings = make_settings({"config": folder / "config.json"})
    if settings.pairs:
        raise UserError(f"{folder} was trained on the pairs of {settings.pairs}, and sampled none")
    pairs = pairs_of(folder, make_task(settings), settings)
    if not pairs:
        raise UserError(f"{folder} has no pairs: in no group of its credit files do rewards differ")
    with writing(output):
        replace_text(output, "".join(f"{json.dumps(pair)}\n" for pair in pairs))
    print(f"{len(pairs):,} pairs: {output}")


if __name__ == "__main__":
    run_as_program("pairs", main)
