"""How fast fresh answers from many places of a batch are: what credit by continuations samples.

    python -m benchmarks.continuations                  # a minute on one core
    python -m benchmarks.continuations --questions 16 --answers 16 --repeats 5

Run it from the project's folder. One batch of the shipped model is sampled; then the ways of
spreading credit take turns on it, and the table shows medians. Seconds are the processor's, so that
a busy machine changes them little. `measured` is also how research/probes/credit.py measures.
"""
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import torch

from analysis.tables import Table, by_row
from benchmarks.program import shipped_lab
from harness.flags import Flag, Parser, add_flags, parameters_as_flags, with_defaults
from engine.policy import Policy
from harness.program import run_as_program
from harness.progress import show_status
from harness.registry import ADVANTAGES, MITIGATIONS, make
from engine.rollouts import Rollouts

WAYS = {
    "causal_ablation": (MITIGATIONS, {}),
    "vine": (ADVANTAGES, {"values_every": "8"}),
    "measured": (ADVANTAGES, {}),
    "oracle": (MITIGATIONS, {}),
}
FLAGS = {
    "questions": Flag(4, "problems", least=1, most=1000),
    "answers": Flag(16, "answers to each of them", least=2, most=1000),
    "repeats": Flag(3, "turns of every way", least=1, most=1000),
}


def measure(policy: Policy, batch: Rollouts, name: str) -> dict[str, float]:
    """Spread credit once; the processor's seconds, and the tokens that were sampled for it."""
    registry, flags = WAYS[name]
    known = parameters_as_flags(registry[name])
    defaults = {flag: meta.default for flag, meta in known.items()}
    way = make(registry[name], defaults | flags, policy)
    fresh = replace(batch, generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    way(fresh, policy)
    seconds = time.process_time() - start
    return {"seconds": seconds, "tokens": way.metrics["extra_tokens"]}


def take_turns(policy: Policy, batch: Rollouts, repeats: int) -> dict[str, list[dict]]:
    results = {name: [] for name in WAYS}
    for turn in range(repeats):
        for name in WAYS:
            show_status(f"turn {turn + 1} of {repeats}: {name}")
            results[name].append(measure(policy, batch, name))
    show_status("")
    return results


def table_of(results: dict[str, list[dict]]) -> Table:
    columns = {"way": "", "tokens": ",.0f", "seconds": ".2f", "from to": ".2f", "tokens/s": ",.0f"}
    rows = []
    for name, turns in results.items():
        seconds = [turn["seconds"] for turn in turns]
        speed = median(turn["tokens"] / turn["seconds"] for turn in turns)
        rows.append([name, turns[0]["tokens"], median(seconds), (min(seconds), max(seconds)),
                     speed])
    headings = {"from to": "lowest to highest", "tokens/s": "tokens a second"}
    return Table("continuations", "Fresh answers", by_row(columns, rows), headings=headings)


def read_arguments(argv: list[str]) -> SimpleNamespace:
    parser = Parser("python -m benchmarks.continuations [flags]", __doc__)
    return with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)


def main(argv: list[str]) -> None:
    given = read_arguments(argv)
    policy = shipped_lab(threads=1)
    problems = policy.task.training_problems(0, 1, given.questions)
    batch = policy.ask(problems, given.answers, seed=1)
    results = take_turns(policy, batch, given.repeats)
    print(f"{given.questions} problems x {given.answers} answers of "
          f"{batch.length.float().mean():.0f} tokens, one thread, {given.repeats} turns")
    print(table_of(results).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.continuations", main)
