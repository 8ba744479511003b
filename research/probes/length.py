"""Does credit by token pay more as answers get longer? On a task where all credit is known.

Question. Plain GRPO gives all tokens of an answer the same number. The longer the answer, the more
of its tokens have nothing to do with the reward, so one would expect credit by token to help more.

Measurement. On a planted task (planted.py) three positions of an answer decide its reward and all
others are noise. Its length grows, and everything else stays: the policy, the keys, the number of
answers in a step. At every length each method is trained with the same number of tokens, those it
samples to learn values included:

    grpo            one number for an answer: the z-score in its group
    critic          reward minus a learned value of the prefix (gae, lambda 1)
    critic 0.95     the same with lambda 0.95, as PPO does it
    monte carlo     segments of the answer, values from fresh continuations (vine)
    exact           the true credit V(after) - V(before), which nobody has outside such a task

One learning rate for all would favour whom it suits. So at every length each method has the rate
of its own that was best on other seeds.

Success is the expected reward of the policy, computed, not sampled. The lead of a method is its
mean success over the tokens spent, minus that of plain GRPO with the same seed: the same policy and
the same keys at the start. A policy that is sure of a wrong symbol at a key gives the same reward
for every answer, 1/3 or 2/3, and learns nothing any more: it is stuck.

Reading it. If credit by token pays more in longer answers, a method's lead grows with every
doubling. If the true credit's lead grows and that of the others does not, the credit is worth
having, but these ways to estimate it are not good enough. If no lead grows, length does not matter.
"""
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import mean_over, verdicts
from analysis.tables import Table, by_row
from engine.choices import ADVANTAGES
from engine.errors import UserError
from harness.flags import Flag, shortened
from harness.load import make
from grpo import update
from research.experiments.pictures import draw, draw_curves
from research.probes.common import COMMON, Findings, Probe
from research.probes.planted import PlantedPolicy, planted_policy, sample_planted, worths
from research.probes.progress import Progress

FLAGS = {
    **COMMON,
    "lengths": Flag("16,32,64,128,512", "tokens of an answer", quick="8,16"),
    "steps": Flag(60, "steps of plain GRPO; the others get as many tokens", least=1, most=1_000_000,
                  quick=2),
    "seeds": Flag(8, "policies and tasks, the same for every method and length", least=2, most=1000,
                  quick=2),
    "rates": Flag("1e-3,3e-3,1e-2,3e-2", "learning rates of AdamW to choose from",
                  quick="1e-3,1e-2"),
    "rate_seeds": Flag(4, "other seeds on which they are chosen", least=1, most=1000, quick=1),
    "questions": Flag(8, "groups in a step", least=1, most=10_000, quick=2),
    "answers": Flag(8, "answers in a group", least=2, most=1000, quick=4),
    "segments": Flag(6, "of an answer, for monte carlo", least=1, most=1000, quick=2),
    "continuations": Flag(4, "behind each value, for monte carlo", least=1, most=1000, quick=1),
    "processes": Flag(1, "trainings side by side, each on one thread", least=1, most=1024)}
MOST_LENGTH = 100_000
PLAIN = "grpo"
METHODS = {PLAIN: None, "critic": ("gae", {}), "critic 0.95": ("gae", {"gae_lambda": 0.95}),
           "monte carlo": ("vine", {}), "exact": None}  # --advantage and its flags
RATE_SEEDS_FROM = 1000  # further seeds than anybody reports
POINTS = 41             # of a curve, as it is kept


def measure(probe: Probe) -> Findings:
    args = probe.args
    lengths = read_numbers("lengths", args.lengths, int, 6, MOST_LENGTH, fewest=2)  # for a trend
    rates = read_numbers("rates", args.rates, float, 1e-9, 10)
    cells = list(product(METHODS, lengths))
    drawn = range(RATE_SEEDS_FROM + args.seed, RATE_SEEDS_FROM + args.seed + args.rate_seeds)
    progress = Progress(rates=args.rate_seeds * len(rates), training=args.seeds)
    tuned = train_all(args, list(product(cells, rates, drawn)), "rates", progress)
    chosen = {cell: best_rate(tuned, cell, rates, drawn) for cell in cells}
    seeds = range(args.seed, args.seed + args.seeds)
    runs = train_all(args, [(cell, chosen[cell], seed) for cell in cells for seed in seeds],
                     "training", progress)
    values = [{"method": method, "length": length, "rate": chosen[method, length],
               "tuned": {f"{rate:g}": [tuned[(method, length), rate, seed]["mean"]
                                       for seed in drawn] for rate in rates},
               "runs": [runs[(method, length), chosen[method, length], seed] for seed in seeds]}
              for method, length in cells]
    intro = [f"Answers of {', '.join(map(str, lengths))} tokens; {args.seeds} seeds, the rate of "
             f"each chosen on {args.rate_seeds} others; {args.steps} steps of {args.questions} x "
             f"{args.answers} answers for plain GRPO, and as many tokens for the others.",
             "critic: gae at lambda 1, critic 0.95: at 0.95; monte carlo: values from "
             "continuations, which count as tokens spent; exact: the true credit."]
    return Findings("Credit by token and the length of the answer", intro, tables_of(values),
                    draw(draw_curves, probe.folder / "curves.png", {"cells": values}),
                    "an hour and a half of one core", values={"cells": values})


def read_numbers(flag: str, text: str, kind: type, least: float, most: float,
                 fewest: int = 1) -> list:
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if len(numbers) < fewest or not all(least <= number <= most for number in numbers):
        raise UserError(f"--{flag} {shortened(text)} should be different numbers, {least:g} to "
                        f"{most:g}, with commas between them, {fewest} at least")
    return numbers


def train_all(args: SimpleNamespace, jobs: list[tuple], part: str, progress: Progress) -> dict:
    """What became of each job ((method, length), rate, seed); the longest answers first."""
    jobs = sorted(jobs, key=lambda job: -job[0][1])
    done, whole, found = 0, sum(length for (_, length), _, _ in jobs), {}
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        running = {pool.submit(train, args, *job): job for job in jobs}
        for future in as_completed(running):
            (method, length), rate, seed = job = running[future]
            found[job] = future.result()
            done += length
            progress(part, done / whole, f"length {length}, {method}, {rate:g}, seed {seed}")
    return found


def best_rate(tuned: dict, cell: tuple, rates: list[float], seeds: range) -> float:
    """The lowest of those with the highest mean success."""
    return max(rates, key=lambda rate: np.mean([tuned[cell, rate, seed]["mean"]
                                                for seed in seeds]))


def train(args: SimpleNamespace, cell: tuple[str, int], rate: float, seed: int) -> dict:
    """From the start until the tokens are spent: success over the tokens, its mean, its end, and
    whether the last answers all had the same reward, and not the highest."""
    torch.set_num_threads(1)
    method, length = cell
    policy = planted_policy(seed, length, learning_rate=rate,
                            questions=64, answers=64)  # for generate, which wants many rows at once
    budget = args.steps * args.questions * args.answers * length
    advantage = make_advantage(args, policy, method, length)
    spent, step, curve = 0, 0, [(0, worths(policy)[()])]
    while spent < budget:
        step += 1
        rollouts = sample_planted(policy, step, args.questions, args.answers)
        spent += int(rollouts.mask.sum())
        if advantage:
            rollouts = replace(rollouts, advantage=advantage(rollouts, policy))
            spent += advantage.metrics.get("extra_tokens", 0)
        elif method == "exact":
            rollouts = replace(rollouts, advantage=rollouts.true_credit)
        weight = torch.ones_like(rollouts.log_prob)
        update(policy.model, policy.optimizer, rollouts, weight, policy.settings)
        curve.append((spent, worths(policy)[()]))
    reward = rollouts.reward
    return {**at_equal_tokens(curve, budget), "steps": step,
            "stuck": bool(reward.min() == reward.max() < 1)}


def make_advantage(args: SimpleNamespace, policy: PlantedPolicy, method: str, length: int):
    """Its --advantage; None where the rewards or the exact credit are enough."""
    if METHODS[method] is None:
        return None
    name, flags = METHODS[method]
    if name == "vine":
        segment = max(1, -(-length // args.segments))
        flags = {"values_k": args.continuations, "values_every": str(segment)}
    return make(ADVANTAGES[name], flags, policy)


def at_equal_tokens(curve: list[tuple[int, float]], budget: int) -> dict:
    """Success up to `budget` tokens, straight between steps: methods differ in their size."""
    def success(points: int) -> np.ndarray:
        return np.interp(np.linspace(0, budget, points), *np.array(curve).T)

    return {"mean": float(success(1001).mean()), "end": float(success(2)[1]),
            "curve": success(POINTS).round(4).tolist()}


def tables_of(values: list[dict]) -> list[Table]:
    return [leads_table(values), trend_table(values), rates_table(values)]


def means_of(cell: dict) -> np.ndarray:
    return np.array([run["mean"] for run in cell["runs"]])


def leads_of(values: list[dict]) -> dict[str, dict[int, np.ndarray]]:
    """By method and length, one a seed: mean success minus plain GRPO's."""
    plain = {cell["length"]: means_of(cell) for cell in values if cell["method"] == PLAIN}
    leads = {}
    for cell in values:
        if cell["method"] != PLAIN:
            of_method = leads.setdefault(cell["method"], {})
            of_method[cell["length"]] = means_of(cell) - plain[cell["length"]]
    return leads


def leads_table(values: list[dict]) -> Table:
    leads = {(method, length): mean_over(lead) for method, of in leads_of(values).items()
             for length, lead in of.items()}
    words = dict(zip(leads, verdicts(list(leads.values()), ("ahead", "behind"), null=0.0)))
    rows = []
    for cell in sorted(values, key=lambda cell: cell["length"]):
        place = cell["method"], cell["length"]
        lead = leads.get(place)
        rows.append([f"{cell['length']}", cell["method"], f"{cell['rate']:g}",
                     means_of(cell).mean(), np.mean([run["end"] for run in cell["runs"]]),
                     sum(run["stuck"] for run in cell["runs"]),
                     *([lead.value, lead.interval, words[place]] if lead else [None, None, ""])])
    formats = {"length": "", "arm": "", "rate": "", "success": ".1%", "end": ".1%", "stuck": "d",
               "lead": "points", "95%": "points", "verdict": ""}
    longest = max(length for _, length in leads)
    told = [f"{method} at {length} tokens: {100 * lead.value:+.1f} points ({100 * lead.low:+.1f} "
            f"to {100 * lead.high:+.1f}), {words[method, length]}."
            for (method, length), lead in leads.items() if length == longest]
    return Table("leads", "Mean success at equal tokens, each method at its own learning rate",
                 by_row(formats, rows), "\n".join(told),
                 [f"{len(values[0]['runs'])} seeds, paired with plain GRPO's; intervals by "
                  "Student's t, the verdict by Holm over all rows. Stuck: runs whose last answers "
                  "all had the same reward, below the highest"],
                 {"arm": "method", "success": "mean success", "end": "at the end",
                  "lead": "minus plain GRPO", "95%": "95% interval"})


def trend_table(values: list[dict]) -> Table:
    """How a method's lead changes when the length doubles."""
    slopes = {method: mean_over(np.polyfit(np.log2(list(of)), np.array(list(of.values())), 1)[0])
              for method, of in leads_of(values).items()}
    words = verdicts(list(slopes.values()), ("grows", "shrinks"), null=0.0)
    rows = [[method, of.value, of.interval, word]
            for (method, of), word in zip(slopes.items(), words)]
    return Table("trend", "What a doubling of the length adds to the lead",
                 by_row({"arm": "", "a doubling": "points", "95% interval": "points",
                         "the lead": ""}, rows), "",
                 ["slope of a straight line over the logarithm of the length, one for each seed; "
                  "Student's t over seeds, Holm over the methods"], {"arm": "method"})


def rates_table(values: list[dict]) -> Table:
    rows = [[f"{cell['length']}", cell["method"], *map(np.mean, cell["tuned"].values()),
             f"{cell['rate']:g}"] for cell in sorted(values, key=lambda cell: cell["length"])]
    formats = {"length": "", "arm": "", **dict.fromkeys(values[0]["tuned"], ".1%"), "chosen": ""}
    return Table("rates", "Mean success by learning rate, on the seeds where it was chosen",
                 by_row(formats, rows), "",
                 [f"means of {len(next(iter(values[0]['tuned'].values())))} seeds that are in no "
                  "other table"], {"arm": "method"})
