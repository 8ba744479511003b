"""Push, change and credit: does the change of a token's log-prob in a step follow its credit?

    python -m research change --runs runs/none-grpo-s0,runs/none-grpo-s1 --steps 1,51,101
    python -m research change --seeds 12 --batches 0  # why do words lose so much of their push?

GRPO gives all tokens of an answer one advantage. What a step then does to a token is not what the
token's own term of the loss would do, because all tokens share the model's parameters and so move
each other. This probe samples batches of finished runs again, each with the checkpoint before its
step, and measures three things of each token:

    push     A s^2: what the token's own term of the loss would do to its log-prob
    change   its log-prob after one step minus before, at the same prefix. The step is one of plain
             gradient descent, or the first step of AdamW
    credit   V after the token minus V before it, by Monte Carlo

Shares are shares of sums of sizes. The size of a credit is its value from one half of its
continuations times its sign from the other half, and its square is the product of the two halves,
because the variance of the estimate would otherwise make both too large. Correlations are computed
token by token, and over vocabulary items, for which all tokens of one spelling are summed with
their signs. Intervals are by the jackknife over problems.

The probe then uses synthetic tasks in which everything is exact (research/dial/task.py). There it
computes the cosine between the change and the credit of each symbol in each context, and the share
of the push that cancels between equal tokens in equal contexts.
"""
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from engine.tokens import load_tokenizer
from harness.flags import Flag, Requirement
from harness.parser import values_of
from research.probes.change_batches import MeasuredBatch, load_or_measure_batch, sampled_by
from research.probes.change_parts import (FIRST_SEED, load_or_measure_seed, tables_of_seeds,
                                          values_of_seeds)
from research.probes.change_tables import (fell_and_rose_table, items_table, kinds_table,
                                           sums_of_kinds)
from research.probes.change_synthetic import synthetic_table
from research.probes.common import COMMON, Findings

OF_RUNS: Requirement = (lambda s: bool(s.runs), "--runs")
OF_SEEDS: Requirement = (lambda s: s.seeds > 0, "--seeds above 0")
OF_EITHER: Requirement = (lambda s: bool(s.runs) or s.seeds > 0, "--runs, or --seeds above 0")
FLAGS = {
    **COMMON,
    "runs": Flag(None, "folders of runs of plain GRPO, separated by commas"),
    "steps": Flag("1,51,101", "the steps whose batches are sampled again, separated by commas. "
                  "Each is sampled by the checkpoint before it", requires=OF_RUNS),
    "questions": Flag(16, "problems in a batch", least=1, most=1000, requires=OF_EITHER),
    "answers": Flag(16, "answers to each problem", least=4, most=1000, requires=OF_EITHER),
    "new_tokens": Flag(0, "the most tokens of an answer; 0 means as many as in the run",
                       least=0, most=10_000, requires=OF_RUNS),
    "measured": Flag(8, "problems of a batch whose credit is measured. The tables are about their "
                     "tokens alone",
                     least=2, most=1000, requires=OF_RUNS),
    "continuations": Flag(8, "how many continuations measure the credit of an uncertain token; "
                             "0 means that no credit is measured", least=0, most=1000,
                          requires=OF_RUNS),
    "kept": Flag("results/change-batches", "folder in which each measured batch is kept, so that "
                 "the same command continues from it", requires=OF_EITHER),
    "processes": Flag(1, "how many batches are measured at the same time", least=1, most=64,
                      requires=OF_EITHER),
    "seeds": Flag(0, "number of batches of the untrained model on whose parts steps are made; 0 "
                     "leaves these tables out", least=0, most=1000),
    "model": Flag("models/tiny", "folder of the untrained model", requires=OF_SEEDS),
    "batches": Flag(16, "number of batches of each synthetic task; 0 leaves these tasks out",
                    least=0, most=1000)}
STEP = Flag(1, least=1, most=1_000_000, kind=int)


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    runs = [Path(run) for run in args.runs.split(",")] if args.runs else []
    units = list(product(values_of(args.steps, "steps", STEP), runs))
    for step, run in units:
        sampled_by(run, step)  # a wrong run or step is told before any batch is measured
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
    values: dict = {}
    if units:
        tables += [kinds_table(by_step), fell_and_rose_table(by_step),
                   items_table(by_step, load_tokenizer(runs[0]))]
        values["kinds_by_problem"] = sums_of_kinds(by_step)
    if args.seeds:
        seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            found = list(pool.map(load_or_measure_seed, seeds, repeat(vars(args))))
        tables += tables_of_seeds(found)
        values |= values_of_seeds(found)
    if args.batches:
        tables.append(synthetic_table(args))
    intro = []
    if units:
        intro = [f"There are {len(units)} batches of {args.questions} problems x {args.answers} "
                 f"answers. To measure credit, {spent:,} tokens were sampled."]
    return Findings("Push, change and credit", intro, tables, values)
