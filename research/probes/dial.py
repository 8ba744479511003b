"""Where does credit by token pay? Every weighting and advantage, in a world with dials.

Some tokens of an answer decide its reward, the others nothing (research/dial/world.py). What is a
method worth there, by how many decide? That is the mean of the expected reward over a training,
minus that of plain GRPO with the same seed. Beside the two lists stand arms that no model could
have, and plain GRPO with more problems, the scale (research/dial/arms.py).

Each has in each world the learning rate that was best on other seeds. Without --max_grad_norm
nothing is clipped, and the column `above 1` is the share of steps that a limit of 1 would clip.
Trainings are kept in a file, and a second call goes on from there. A world is written as 512/48,
tokens and how many decide, and then any of: all, own.
"""
import hashlib
import inspect
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import mean_over
from analysis.tables import Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.files import append_line, is_file, make_folder, read_lines
from research.dial.arms import PLAIN, TRUE, Arm, arm_of
from research.dial.training import train
from research.dial.world import Dials
from research.experiments.pictures import draw, draw_dials
from research.experiments.published import RESULTS, read_result
from research.probes.common import COMMON, Findings, Flag, Probe
from research.probes.progress import Progress

WORLDS = ("128/3", "128/12", "128/42", "128/128", "512/12", "512/48", "512/170", "128/42 own",
          "128/6 all")
BEYOND = ("mask 0.1", "mask 0", "half known 0.1", "placebo 0.1")
SCALE = ("batch 2x", "batch 4x", "batch 16x")
# plain GRPO here, exactly: nothing but tags, lengths and the parts of a reward tells them apart
ALIKE = ("none", "grpo", "span", "rloo")
FLAGS = {
    **COMMON,
    "worlds": Flag(",".join(WORLDS), "separated by commas", quick="16/2,16/4 all"),
    "only": Flag(None, "these arms beside plain GRPO, true credit and the scale, separated by "
                       "commas: methods, or mask 0.1, half known 0.1, placebo 0.1"),
    "steps": Flag(60, "of 8 x 8 answers", least=2, most=100_000, quick=3),
    "seeds": Flag(12, "of each arm", least=2, most=1000, quick=2),
    "rates": Flag("3e-3,1e-2,3e-2", "learning rates of AdamW", quick="1e-2,3e-2"),
    "rate_seeds": Flag(8, "other seeds on which they are chosen", least=1, most=1000, quick=2),
    "max_grad_norm": Flag(0.0, "clip the gradient's norm at this; 0 is never", least=0, most=1e6),
    "runs": Flag("results/dial-runs.jsonl", "file of trainings that are done",
                 quick="results/dial-quick-runs.jsonl")}
RATES_FROM, SEEDS_FROM = 1000, 3000


def measure(probe: Probe) -> Findings:
    args = probe.args
    torch.set_num_threads(args.threads or 1)  # a step is too small for more
    worlds, cells, reasons = args.worlds.split(","), [], {}
    names = [PLAIN, TRUE, *SCALE, *arms_asked(args.only)]
    progress = Progress(**{world: Dials.read(world).tokens for world in worlds})
    for world in worlds:
        for i, name in enumerate(names):
            progress(world, i / len(names), f"{world}: {name}")
            try:
                cells.append(cell_of(world, name, args))
            except UserError as error:
                if args.only:
                    raise UserError(f"{name} cannot be asked here: {error}") from None
                reasons[name] = str(error)
    board = board_table(worlds, cells)
    law = [] if args.max_grad_norm else law_table(board)  # it was predicted without clipping
    tables = [leads_table(board), board, *missing_table(reasons), *law]
    return Findings("Where does credit by token pay?", [in_words(args)], tables,
                    draw(draw_dials, probe.folder / "shares.png", {"cells": cells}),
                    "ten minutes to an hour", values={"cells": cells})


def in_words(args: SimpleNamespace) -> str:
    return (f"{args.seeds} seeds of each arm, {args.steps} steps of 8 x 8 answers; the rate is the "
            f"best of {args.rates} on {args.rate_seeds} other seeds; "
            + (f"clipped at {args.max_grad_norm:g}." if args.max_grad_norm else "not clipped."))


def arms_asked(only: str | None) -> list[str]:
    """What stands beside plain GRPO, the true credit and the scale."""
    if only:
        return [name.strip() for name in only.split(",")]
    return [*BEYOND, *(name for name in (*MITIGATIONS, *ADVANTAGES) if name not in ALIKE)]


def cell_of(world: str, name: str, args: SimpleNamespace, first: int = SEEDS_FROM) -> dict:
    """The arm in the world at its own rate, by seed; from the file where it is known."""
    file, dials, arm = Path(args.runs), Dials.read(world), arm_of(name)
    key = {"world": world, "arm": name, "code": code_of(name), "steps": args.steps,
           "limit": args.max_grad_norm, "seeds": [args.seed + first, args.seeds],
           "rates": [args.rates, args.seed + RATES_FROM, args.rate_seeds]}
    known = read_lines(file) if is_file(file) else []
    of_rates = {**key, "seeds": None}.items()
    tuned = [cell for cell in known if of_rates <= {**cell, "seeds": None}.items()]
    for cell in tuned:
        if cell["seeds"] == key["seeds"]:
            return cell
    rate = tuned[0]["rate"] if tuned else best_rate(dials, arm, args)
    cell = {**key, "rate": rate, **runs_at(dials, arm, rate, args, first)}
    make_folder(file.parent)
    append_line(file, cell)
    return cell


def code_of(name: str) -> str | None:
    """A fingerprint of a method's source: one that was changed is trained again."""
    chosen = MITIGATIONS.get(name) or ADVANTAGES.get(name)
    return chosen and hashlib.sha256(inspect.getsource(chosen).encode()).hexdigest()[:8]


def best_rate(dials: Dials, arm: Arm, args: SimpleNamespace) -> float:
    """By the mean of other seeds."""
    rates = [float(rate) for rate in args.rates.split(",")]
    seeds = range(args.seed + RATES_FROM, args.seed + RATES_FROM + args.rate_seeds)
    pairs = [(seed, rate) for rate in rates for seed in seeds]
    runs = train(dials, arm, *map(list, zip(*pairs)), args.steps, args.max_grad_norm)
    return max(rates, key=lambda rate: fmean(
        run["mean"] for run, (_, its) in zip(runs, pairs) if its == rate))


def runs_at(dials: Dials, arm: Arm, rate: float, args: SimpleNamespace,
            first: int) -> dict[str, list[float]]:
    """Of each seed: the mean, and the share of steps that a limit of 1 would clip."""
    seeds = list(range(args.seed + first, args.seed + first + args.seeds))
    runs = train(dials, arm, seeds, [rate] * len(seeds), args.steps, args.max_grad_norm)
    return {name: [run[name] for run in runs] for name in ("mean", "above")}


def board_table(worlds: list[str], cells: list[dict]) -> Table:
    """Each arm minus plain GRPO, seed by seed."""
    rows = []
    for world in worlds:
        of = {cell["arm"]: cell for cell in cells if cell["world"] == world}
        for name, cell in of.items():
            lead = mean_over(np.subtract(cell["mean"], of[PLAIN]["mean"]))
            interval = lead.interval if name != PLAIN else None
            rows.append([world, name, cell["rate"], fmean(cell["mean"]), lead.value, interval,
                         fmean(cell["above"])])
    formats = {"world": "", "arm": "", "rate": "g", "mean": ".1%", "lead": "points",
               "95%": "points", "above": ".0%"}
    return Table("board", "Mean success of training, each arm minus plain GRPO",
                 by_row(formats, rows), "", ["world: tokens / how many decide; above 1: steps "
                                             "whose gradient's norm is above 1"],
                 {"above": "above 1", "95%": "95% interval"})


def leads_table(board: Table) -> Table:
    """The arms beyond the lists, a line for each world."""
    names, lines = (TRUE, *BEYOND, *SCALE), {}
    for world, arm, _, mean, lead, interval, *_ in board.rows:
        line = lines.setdefault(world, {"plain": f"{100 * mean:.1f}"})
        if arm in names:
            low, high = (100 * end for end in interval)
            line[arm] = f"{100 * lead:+.1f} ({low:+.1f} to {high:+.1f})"
    rows = [[world, *(line.get(name, "-") for name in ("plain", *names))]
            for world, line in lines.items()]
    return Table("leads", "Points of mean success over plain GRPO, by tokens and how many decide",
                 by_row(dict.fromkeys(("world", PLAIN, *names), ""), rows), "",
                 ["with 95% intervals over seeds"])


def law_table(board: Table) -> list[Table]:
    """Beside what was predicted (python -m research law), where it was."""
    said = {(row["world"], row["arm"]): row for table in read_result(RESULTS / "law.json")["tables"]
            if table["name"] == "predictions" for row in table["rows"]}
    rows = []
    for world, arm, _, _, lead, interval, *_ in board.rows:
        if interval and (world, arm) in said:
            row = said[world, arm]
            is_off = not interval[0] <= row["lead"] <= interval[1]
            rows.append([world, arm, row["ratio"], row["cosine"], row["lead"], lead, interval,
                         "off" if is_off else ""])
    if not rows:
        return []
    errors = {}
    for world, _, _, _, predicted, lead, *_ in rows:
        errors.setdefault(world, []).append(100 * abs(lead - predicted))
    each = ", ".join(f"{world} {fmean(of):.1f}" for world, of in errors.items())
    finding = (f"Of {len(rows)} predictions {sum(row[-1] == 'off' for row in rows)} lie outside "
               f"the 95% interval of what was measured; mean absolute deviation "
               f"{fmean(sum(errors.values(), [])):.1f} points ({each}).")
    formats = {"world": "", "arm": "", "ratio": ".3g", "cosine": ".2f", "predicted": "points",
               "lead": "points", "95%": "points", "verdict": ""}
    return [Table("law", "Leads over plain GRPO, predicted and measured", by_row(formats, rows),
                  finding, ["predicted before any of these trainings was made"])]


def missing_table(reasons: dict[str, str]) -> list[Table]:
    columns = by_row({"method": "", "reason": ""}, list(reasons.items()))
    return [Table("missing", "What cannot be asked here", columns)] if reasons else []


def one_line(name: str, flags: dict | None = None) -> str:
    """What a method is worth in one world, in a sentence, after some seconds."""
    dials = Dials.read("128/12")
    args = SimpleNamespace(seed=0, steps=60, max_grad_norm=0.0, rates="1e-2,3e-2", seeds=8,
                           rate_seeds=4)
    try:
        mine, plain, true = (
            np.array(runs_at(dials, arm, best_rate(dials, arm, args), args, SEEDS_FROM)["mean"])
            for arm in (arm_of(name, flags), arm_of(PLAIN), arm_of(TRUE)))
    except UserError as error:
        return f"{name} cannot be asked in a world with dials: {error}"
    lead, best = mean_over(mine - plain), (true - plain).mean()
    low, high = lead.interval
    return (f"In a world where {dials.decide} of {dials.tokens} tokens decide, {name} is at "
            f"{100 * lead.value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points of plain "
            f"GRPO's mean success, true credit at {100 * best:+.1f} ({args.seeds} seeds, "
            f"the better of two rates on {args.rate_seeds} others)")
