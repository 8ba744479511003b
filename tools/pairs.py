"""Make preference pairs from a run: the best and the worst of its answers to each problem.

    python -m tools.pairs runs/none-grpo-s0
    python train.py --loss dpo --pairs runs/none-grpo-s0/pairs.jsonl

The pairs come from the run's credit files, and pairs.jsonl is written into its folder.
credit/pairs.py says what each line of it has.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.pairs")
import json
from pathlib import Path

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from analysis.runs import existing, is_foreign
from credit.pairs import KEYS
from credit.preferences import best_and_worst
from engine.errors import UserError
from harness.read_record import credit_steps, read_credit, read_tokenizer, run_config
from harness.record import replace_text
from harness.screen import run_as_program
from harness.flags import make_parser
from harness.settings import Settings, settings_of_run
from harness.tasks import make_task


def main(argv: list[str]) -> None:
    parser = make_parser("python -m tools.pairs RUN", __doc__, {})
    parser.add_argument("run", metavar="RUN", help="a run folder")
    folder = existing(parser.read(argv)["run"])
    if is_foreign(run_config(folder)):
        raise UserError(f"{folder} is a run of another program: its problems are not on record")
    settings = settings_of_run(folder)
    if settings.pairs:
        raise UserError(f"{folder} was trained on the pairs of {settings.pairs}, so it sampled "
                        "no answers to make pairs from")
    pairs = pairs_of(folder, settings)
    if not pairs:
        raise UserError(f"no pairs can be made from {folder}: in each group of its credit files, "
                        "all rewards are equal")
    output = folder / "pairs.jsonl"
    replace_text(output, "".join(f"{json.dumps(pair)}\n" for pair in pairs))
    print(f"{len(pairs):,} pairs are written to {output}")


def pairs_of(folder: Path, settings: Settings) -> list[dict[str, str]]:
    """A pair for each group of the run whose rewards differ. The problems are those that the run
    trained on."""
    tokenizer = read_tokenizer(folder)
    task = make_task(settings.task, settings.method_flags)
    pairs = []
    for step in credit_steps(folder):
        batch = read_credit(folder, step, tokenizer)
        problems = task.training_problems(settings.seed, step, settings.questions)
        for best, worst in best_and_worst(batch).tolist():
            problem = problems[int(batch.group[best])]
            texts = (task.show(problem), batch.answers[best], batch.answers[worst])
            pairs.append(dict(zip(KEYS, texts)))
    return pairs


if __name__ == "__main__":
    run_as_program("pairs", main)
