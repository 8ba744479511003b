"""Push, change and credit: does the change of a token's log-prob in a step follow its credit?

    python -m research change --runs runs/none-grpo-s0,runs/none-grpo-s1 --steps 1,51,101

GRPO gives all tokens of an answer one advantage. What a step then does to a token is not what the
token's own term of the loss asks for, because tokens share weights: each is moved by all others.
Batches of finished runs are sampled again, each by the checkpoint before its step, and of each
token three things are measured:

    push     A s^2: what the token's own term of the loss would do to its log-prob
    change   its log-prob after one step minus before, at the same prefix: of plain gradient
             descent, or AdamW's first
    credit   V after the token minus V before it, by Monte Carlo

Shares are of sums of sizes. The size of a credit is its value by one half of its continuations
times its sign by the other half, and its variance is a product of halves, so that the variance of
the estimate adds nothing. Correlations are token by token, and of sums with their sign over all
tokens of one spelling, a vocabulary item. Intervals are by the jackknife over problems.

Then synthetic tasks in which everything is exact (research/dial/task.py): the cosine of the change
of each context and symbol with its credit, and the share of the push that equal tokens in equal
contexts cancel among each other.
"""
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from engine.tokens import load_tokenizer
from harness.flags import Flag
from research.probes.change_batches import MeasuredBatch, load_or_measure_batch
from research.probes.change_tables import fell_and_rose_table, items_table, kinds_table
from research.probes.change_synthetic import synthetic_table
from research.probes.common import COMMON, Findings

FLAGS = {
    **COMMON,
    "runs": Flag(None, "folders of runs of plain GRPO, separated by commas"),
    "steps": Flag("1,51,101", "whose batches are sampled again, each by the checkpoint before it"),
    "questions": Flag(16, "problems of a batch", least=1, most=1000),
    "answers": Flag(16, "answers to each of them", least=4, most=1000),
    "new_tokens": Flag(0, "most tokens of an answer; 0 is what the run had", least=0, most=10_000),
    "measured": Flag(8, "problems whose credit is measured; the tables are of their tokens",
                     least=2, most=1000),
    "continuations": Flag(8, "for the credit of a token that is a free choice; 0 leaves the "
                             "credit out", least=0, most=1000),
    "kept": Flag("results/change-batches", "folder of what was measured of each batch: the same "
                 "command goes on from there"),
    "processes": Flag(1, "batches that are measured at a time", least=1, most=64),
    "batches": Flag(16, "of each synthetic task; 0 leaves these out", least=0, most=1000)}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    runs = [Path(run) for run in args.runs.split(",")] if args.runs else []
    steps = [int(step) for step in args.steps.split(",")]
    units = list(product(steps, runs))
    by_step: dict[int, list[MeasuredBatch]] = {}
    spent = 0  # tokens
    if units:
        asked_steps, asked_runs = zip(*units)
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            batches = pool.map(load_or_measure_batch, asked_runs, asked_steps, repeat(vars(args)))
            for step, batch in zip(asked_steps, batches):
                by_step.setdefault(step, []).append(batch)
                spent += batch.spent

    tables = []
    if units:
        tables += [kinds_table(by_step), fell_and_rose_table(by_step),
                   items_table(by_step, load_tokenizer(runs[0]))]
    if args.batches:
        tables.append(synthetic_table(args))
    intro = [f"{len(units)} batches of {args.questions} x {args.answers} answers, "
             f"{spent:,} tokens sampled for their credit."]
    return Findings("Push, change and credit", intro, tables)
