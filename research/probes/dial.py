"""Where does credit by token pay? Every weighting and advantage, in a world with dials.

Some tokens of an answer decide its reward, the others nothing (research/dial/world.py). Asked is
how many decide, what the others are like, and what a method is worth there: the mean of the
expected reward over a training, minus that of plain GRPO with the same seed. Beside the two lists
(research/dial/arms.py):

    true credit          V behind the token minus V before it, exact
    mask 0.1, 0          weight 1 at the tokens that decide, so much at the others
    half known 0.1       at half of the tokens that decide
    placebo 0.1          at as many random positions, the same through a run
    batch 2x, 4x, 16x    plain GRPO with more problems: the scale

Each has in each world the learning rate that was best on other seeds; no gradient is clipped. A
world is written as 512/48, tokens and how many decide, and then any of: sure 4, all, own, seen,
found.
"""
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import mean_over
from analysis.tables import Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.flags import Flag, flags_of
from harness.parser import make_parser
from research.dial.arms import PLAIN, TRUE, Arm, arm_of
from research.dial.training import train
from research.dial.world import Dials
from research.experiments.pictures import draw, draw_dials
from research.experiments.published import table_rows
from research.probes.common import COMMON, Findings, Progress

WORLDS = ("128/3", "128/12", "128/42", "128/128", "512/12", "512/48", "512/170", "512/48 own",
          "128/42 own", "512/48 sure 4", "512/48 sure 6", "128/6 all", "128/12 seen",
          "128/12 found")
BEYOND = ("mask 0.1", "mask 0", "half known 0.1", "placebo 0.1")
SCALE = ("batch 2x", "batch 4x", "batch 16x")
# none and grpo are plain GRPO; span and rloo are dr_grpo here, but for a factor
ALIKE = ("none", "grpo", "span", "rloo")
FLAGS = {
    **COMMON,
    "worlds": Flag(",".join(WORLDS), "separated by commas"),
    "only": Flag(None, "these arms beside plain GRPO, true credit and the scale, separated by "
                       "commas"),
    "steps": Flag(60, "of 8 x 8 answers", least=2, most=100_000),
    "seeds": Flag(12, "of each arm", least=2, most=1000),
    "rates": Flag("3e-3,1e-2,3e-2", "learning rates of AdamW"),
    "rate_seeds": Flag(8, "other seeds on which they are chosen", least=1, most=1000)}
RATES_FROM, SEEDS_FROM = 1000, 3000


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    torch.set_num_threads(args.threads or 1)  # a step is too small for more
    worlds, cells, reasons = args.worlds.split(","), [], {}
    names = [PLAIN, TRUE, *SCALE, *arms_asked(args.only)]
    progress = Progress(**{world: Dials.read(world).tokens for world in worlds})
    for world in worlds:
        for i, name in enumerate(names):
            progress(world, i / len(names), f"{world}: {name}")
            try:
                cells.append(cell_of(world, arm_as_typed(name), name, args))
            except UserError as error:
                if args.only:
                    raise UserError(f"{name} cannot be asked here: {error}") from None
                reasons[name] = str(error)
    board = board_table(worlds, cells)
    board.notes += [f"{name} cannot be asked: {reason}" for name, reason in reasons.items()]
    draw(draw_dials, folder / "shares.png", {"cells": cells})
    tables = [leads_table(board), board]
    tables = (tables[::-1] if args.only else tables) + law_table(board)  # the first is seen at once
    return Findings("Where does credit by token pay?", [in_words(args)], tables, {"cells": cells})


def in_words(args) -> str:
    return (f"{args.seeds} seeds of each arm, {args.steps} steps of 8 x 8 answers; the rate is the "
            f"best of {args.rates} on {args.rate_seeds} other seeds.")


def arms_asked(only: str | None) -> list[str]:
    """What stands beside plain GRPO, the true credit and the scale."""
    if only:
        return [name.strip() for name in only.split(",")]
    return [*BEYOND, *(name for name in (*MITIGATIONS, *ADVANTAGES) if name not in ALIKE)]


def arm_as_typed(text: str) -> Arm:
    """`my_idea --strength 2`, or a name alone."""
    name, *typed = text.split(" --")
    chosen = MITIGATIONS.get(name) or ADVANTAGES.get(name)
    if not typed or chosen is None:
        return arm_of(name)
    words = [word for flag in typed for word in f"--{flag}".split(maxsplit=1)]
    parser = make_parser(f"python -m research dial --only {name}", None, flags_of(chosen))
    return arm_of(name, parser.read(words))


def cell_of(world: str, arm: Arm, name: str, args, first: int = SEEDS_FROM) -> dict:
    """The arm in the world: by seed the mean of its training at its own rate."""
    dials, start = Dials.read(world), time.process_time()
    rate = best_rate(dials, arm, args)
    seeds = [args.seed + first + n for n in range(args.seeds)]
    means = train(dials, arm, seeds, [rate] * len(seeds), args.steps)
    return {"world": world, "arm": name, "rate": rate, "mean": means,
            "seconds": round(time.process_time() - start, 2)}


def best_rate(dials: Dials, arm: Arm, args) -> float:
    """By the mean of other seeds."""
    rates = [float(rate) for rate in args.rates.split(",")]
    seeds = range(args.seed + RATES_FROM, args.seed + RATES_FROM + args.rate_seeds)
    pairs = [(seed, rate) for rate in rates for seed in seeds]
    runs = train(dials, arm, *map(list, zip(*pairs)), args.steps)
    means = [fmean(mean for mean, (_, its) in zip(runs, pairs) if its == rate) for rate in rates]
    return rates[means.index(max(means))]


def board_table(worlds: list[str], cells: list[dict]) -> Table:
    rows = []
    for world in worlds:
        of = {cell["arm"]: cell for cell in cells if cell["world"] == world}
        leads = {name: np.subtract(cell["mean"], of[PLAIN]["mean"]) for name, cell in of.items()}
        for name, cell in of.items():
            lead, is_plain = mean_over(leads[name]), name == PLAIN
            share = [None, None] if is_plain else share_of(leads[name], leads[TRUE])
            rows.append([world, name, cell["rate"], fmean(cell["mean"]), lead.value,
                         None if is_plain else lead.interval, *share, cell["seconds"]])
    formats = {"world": "", "arm": "", "rate": "g", "mean": ".1%", "lead": "points",
               "95%": "points", "share": ".0%", "share 95%": ".0%", "seconds": ".1f"}
    return Table("board", "Mean success of training, each arm minus plain GRPO",
                 by_row(formats, rows), "", [
                     "world: tokens / how many decide; share: of the true credit's lead; seconds "
                     "of the processor for all seeds and rates of an arm"],
                 {"95%": "95% interval", "share 95%": "95% interval"})


def share_of(lead: np.ndarray, true: np.ndarray) -> tuple:
    """The mean lead as a share of the true credit's, and its interval: both differ by seed, and
    the share of two means is taken as straight near them (the delta method)."""
    if true.mean() <= 0:
        return None, None
    share = lead.mean() / true.mean()
    off = mean_over(lead - share * true)
    return share, (share + off.low / true.mean(), share + off.high / true.mean())


def shares_table(cells: list[dict]) -> Table:
    """What masks keep of the true credit's lead, and what that has beyond 16 times the batch."""
    of, rows = {(cell["world"], cell["arm"]): np.array(cell["mean"]) for cell in cells}, []
    for world in dict.fromkeys(world for world, _ in of):
        plain, true = of[world, PLAIN], of[world, TRUE]
        beyond = mean_over(true - of[world, "batch 16x"])
        shares = [share_of(of[world, name] - plain, true - plain) for name in BEYOND[:2]]
        rows.append([world, *shares[0], *shares[1], beyond.value, beyond.interval])
    formats = {"world": ""}
    for name, spec in (("mask 0.1", ".0%"), ("mask 0", ".0%"), ("beyond", "points")):
        formats |= {name: spec, f"{name} 95%": spec}
    headings = {f"{name} 95%": "95% interval" for name in (*BEYOND[:2], "beyond")}
    return Table("shares", "Of the true credit's lead, and its lead over 16 times the batch",
                 by_row(formats, rows), "", ["intervals over seeds; a share's by the delta method"],
                 {**headings, "beyond": "true credit minus 16 times the batch"})


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
    """Beside what was predicted (python -m research law) and published, where that was asked."""
    said = {(row["world"], row["arm"]): row for row in table_rows("law", "predictions")}
    rows = []
    for world, arm, _, _, lead, interval, *_ in board.rows:
        if interval and (world, arm) in said:
            row = said[world, arm]
            is_off = not interval[0] <= row["lead"] <= interval[1]
            rows.append([world, arm, row["ratio"], row["cosine"], row["lead"], lead, interval,
                         lead - row["lead"], "off" if is_off else ""])
    if not rows:
        return []
    errors = {world: [abs(row[7]) for row in rows if row[0] == world]
              for world in dict.fromkeys(row[0] for row in rows)}
    each = ", ".join(f"{world} {100 * fmean(of):.1f}" for world, of in errors.items())
    finding = (f"Of {len(rows)} predictions {sum(row[8] == 'off' for row in rows)} lie outside the "
               f"95% interval of what was measured; mean absolute deviation "
               f"{100 * fmean(abs(row[7]) for row in rows):.1f} points ({each}).")
    formats = {"world": "", "arm": "", "ratio": ".3g", "cosine": ".2f", "predicted": "points",
               "lead": "points", "95%": "points", "difference": "points", "verdict": ""}
    return [Table("law", "Leads over plain GRPO, predicted and measured", by_row(formats, rows),
                  finding, ["predicted before any of these trainings was made"])]


def one_line(name: str, flags: dict | None = None, seeds: int = 8) -> str:
    """What a method is worth in one world, in a sentence, after some seconds."""
    world = "128/12"
    dials, typed = Dials.read(world), SimpleNamespace(seed=0, steps=60, rates="1e-2,3e-2",
                                                      seeds=seeds, rate_seeds=4)
    try:
        mine, plain, true = (
            np.array(cell_of(world, arm, arm.name, typed)["mean"])
            for arm in (arm_of(name, flags), arm_of(PLAIN), arm_of(TRUE)))
    except UserError as error:
        return f"{name} cannot be asked in a world with dials: {error}"
    lead, best = mean_over(mine - plain), (true - plain).mean()
    low, high = lead.interval
    return (f"In a world where {dials.decide} of {dials.tokens} tokens decide, {name} lies "
            f"{100 * lead.value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points from plain "
            f"GRPO in mean success, true credit {100 * best:+.1f} ({seeds} seeds, each at the "
            "better of two learning rates)")
