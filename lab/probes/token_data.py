"""The credit of each token of some answers, as a data set: a line of JSON for each answer.

    python -m lab.probes.token_data tiny lab/data/tokens.jsonl
    python -m lab.probes.token_data real lab/data/tokens.jsonl --model FOLDER --problems 125 \\
        --config lab/recipes/expression.json --continuations 8 --certain 0.02

The first word is the name of the set in the column `of`. Lines are added to the file, and the same
command goes on behind the last problem. Credit is measured as by
`lab decided`. lab/data/README.md describes the columns.
"""
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from lab.engine.rollouts import Rollouts
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.flags import Flag, read
from lab.harness.screen import show_status
from lab.harness.settings import make_settings
from lab.harness.build import load_policy
from lab.probes.credit import MeasuredCredit, true_credit
from lab.probes.decided import FLAGS as OF_DECIDED, problems_of

FLAGS = {name: OF_DECIDED[name] for name in ("model", "seed", "answers")} | {
    "config": Flag(None, "a JSON file with settings of the model, as --config of lab train"),
    "problems": Flag(64, "how many problems are answered", least=1, most=10_000),
    "continuations": Flag(16, "how many continuations measure an uncertain token", least=2),
    "certain": Flag(0.01, "tokens with 1 - p below this have the credit 0", least=0, most=1)}
DIGITS = {"log_prob": 4, "entropy": 3, "collision": 4, "credit": 4, "credit_se": 3, "half_1": 4,
          "half_2": 4}


def lines(rollouts: Rollouts, credit: MeasuredCredit, of: str, problem: int
          ) -> Iterator[dict[str, Any]]:
    half_1, half_2 = credit.parts.view(2, -1, *credit.value.shape).mean(1)
    frames = {"log_prob": rollouts.log_prob, "entropy": rollouts.entropy,
              "collision": rollouts.collision, "credit": credit.value, "credit_se": credit.error,
              "half_1": half_1, "half_2": half_2}
    asked: Any = rollouts.problems[0]
    for row, n in enumerate(rollouts.length.tolist()):
        line = {"of": of, "problem": problem, "answer": row, "numbers": [*asked.numbers],
                "target": asked.target, "finished": bool(rollouts.finished[row]),
                "right": float(rollouts.scores["answer"][row]),
                "format": float(rollouts.scores["format"][row]),
                "reward": round(float(rollouts.reward[row]), 4),
                "ids": rollouts.ids[row, :n].tolist(), "text": rollouts.texts[row],
                "kind": [KINDS[code] for code in rollouts.kind[row, :n].tolist()],
                "section": [SECTIONS[code] for code in rollouts.section[row, :n].tolist()]}
        for name, frame in frames.items():
            # -0.0 becomes 0.0
            line[name] = [round(x, DIGITS[name]) + 0.0 for x in frame[row, :n].tolist()]
        yield line


def main(argv: list[str]) -> None:
    args: SimpleNamespace = read(argv, "python -m lab.probes.token_data NAME FILE [flags]",
                                 __doc__, FLAGS, {"NAME": "of the set", "FILE": "of JSON lines"})
    chosen = {"model": args.model, "seed": args.seed, "threads": 1, "temperature": 1.0, "lora": 0}
    policy = load_policy(make_settings(chosen | ({"config": args.config} if args.config else {})))
    with open(args.file, "a+", encoding="utf-8") as file:
        file.seek(0)
        of_set = [line for line in map(json.loads, file) if line["of"] == args.name]
        done = 1 + max((line["problem"] for line in of_set), default=-1)
        for number, rollouts in zip(range(args.problems), problems_of(policy, args.answers)):
            if number < done:
                continue
            show_status(f"problem {number + 1} of {args.problems}")
            credit = true_credit(policy, rollouts, args.continuations, args.certain)
            for line in lines(rollouts, credit, args.name, number):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
