"""Where does credit by token pay? Every weighting and advantage, in synthetic tasks.

In these tasks some tokens of an answer decide its reward, and the others decide nothing
(research/dial/task.py). The tasks differ in how many tokens decide and in what the others are like.
A method's gain in a task is its expected reward, averaged over a training, minus that of plain GRPO
with the same seed. These arms are trained besides all methods (research/dial/arms.py):

    true credit          V after the token minus V before it, exact
    mask 0.1, mask 0     weight 1 at the tokens that decide, and 0.1 or 0 at all others
    half known 0.1       weight 1 at half of the tokens that decide, and 0.1 at all others
    placebo 0.1          weight 1 at as many positions as decide, but at random ones, which stay the
                         same through a run; 0.1 at all others
    batch 2x, 4x, 16x    plain GRPO with 2, 4 or 16 times the problems. The gains of the methods are
                         compared with those of larger batches

In each task each arm is trained with every seed at every learning rate. Each half of the seeds
takes the rate that was best for the arm on the other half, and the 95% intervals cover this choice
(research/dial/gains.py). No gradient is clipped. A task is called 512/48 if 48 of the 512 tokens of
an answer decide. Its name may go on with any of: sure 4, all, own, seen, found.
research/dial/task.py says what they mean.
"""
import json
import textwrap
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.gains import LEVEL
from analysis.statistics import Estimate, holm, mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError, read_json
from harness.flags import Flag, flags_of
from harness.parser import make_parser, values_of
from harness.record import replace_text
from research.dial.arms import PLAIN, TRUE, SyntheticArm, named_arm
from research.dial.gains import FEWEST_SEEDS, ArmsOfTask
from research.dial.task import TaskSpec
from research.dial.told import told_by_definition
from research.dial.training import train_policies
from research.publish.pictures import draw_dial_shares, draw_published
from research.publish.results import fingerprint, table_rows
from research.probes.common import COMMON, Findings, Progress

TASKS = ("128/3", "128/12", "128/42", "128/128", "512/12", "512/48", "512/170", "512/48 own",
         "128/42 own", "512/48 sure 4", "512/48 sure 6", "128/6 all", "128/12 seen",
         "128/12 found")  # in stored results a task is found under the name `world`
BEYOND = ("mask 0.1", "mask 0", "half known 0.1", "placebo 0.1")
FEW_SOME_MANY = TASKS[:3]
LARGEST_BATCH = "batch 16x"
SCALE = ("batch 2x", "batch 4x", LARGEST_BATCH)
# none and grpo are plain GRPO; span and rloo are dr_grpo here, but for a factor
ALIKE = ("none", "grpo", "span", "rloo")
FLAGS = {
    **COMMON,
    "worlds": Flag(",".join(TASKS), "the synthetic tasks, separated by commas"),
    "only": Flag(None, "the arms to measure besides plain GRPO, true credit and larger batches, "
                       "separated by commas. By default they are all"),
    "steps": Flag(60, "steps of each run. A step has 8 problems x 8 answers",
                      least=2, most=100_000),
    "seeds": Flag(24, "number of seeds of each arm, at each learning rate",
                  least=FEWEST_SEEDS, most=1000),
    "rates": Flag("3e-3,1e-2,3e-2", "learning rates of AdamW, separated by commas. If they are "
                                    "several, each half of the seeds takes the one that is best "
                                    "on the other half"),
    "kept": Flag(None, "a folder in which each trained arm is kept, so that the same command "
                       "continues from it. A method whose code has changed needs another folder")}
SEEDS_FROM, SEEDS_OF_A_TRY = 5000, 3000  # the first seed here, and in where_it_pays
RATE = Flag(1e-2, above=0, most=10)
RATE_OF_ALL = "1e-2"  # the best one of plain GRPO in most tasks
SHARE_IN_WORDS = ("The share is the gain divided by that of true credit, with an interval by "
                  "Fieller's method. There is none where true credit is not ahead beyond chance.")
IN_POINTS = f"points of mean success over plain GRPO{WITH_INTERVAL}"
NOT_TRIED = "cannot be tried in a synthetic task"


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    torch.set_num_threads(args.threads or 1)  # a step is too small for more
    tasks = list(dict.fromkeys(args.worlds.split(",")))
    names = list(dict.fromkeys([PLAIN, TRUE, *SCALE, *arms_asked(args.only)]))
    arms = {name: arm_as_typed(name) for name in names}  # a wrong name is told before the training
    values_of(args.rates, "rates", RATE)
    cells: list[dict] = []
    reasons: dict[str, str] = {}  # why an arm cannot be measured
    progress = Progress(**{task: TaskSpec.read(task).tokens for task in tasks})
    for task in tasks:
        for i, name in enumerate(names):
            progress(task, i / len(names), f"{task}: {name}")
            try:
                cells.append(kept_or_trained_cell(task, arms[name], name, args))
            except UserError as error:
                if args.only:
                    raise UserError(f"{name} cannot be measured here: {error}") from None
                reasons[name] = str(error)
    board = dial_leaderboard(tasks, cells)
    for name, reason in reasons.items():
        board.notes.append(f"{name} cannot be measured here: {reason}")
    draw_published(draw_dial_shares, folder / "shares.png", board.to_json())
    tables = [gains_by_task(board), board]
    if args.only:
        tables.reverse()  # the first is printed at once
    tables += [shares_by_task(cells), *methods_table(board), *predicted_gains_table(board)]
    return Findings("Where does credit by token pay?", [training_in_words(args)], tables,
                    {"cells": cells})


def training_in_words(args: SimpleNamespace) -> str:
    training = (f"Each arm has {args.seeds} seeds, and {args.steps} steps of 8 problems x 8 "
                "answers.")
    if "," not in args.rates:
        return f"{training} The learning rate is {args.rates}."
    return (f"{training} Each seed is trained at the learning rates {args.rates}. Each half of the "
            "seeds takes the one that is best for the arm on the other half.")


def arms_asked(only: str | None) -> list[str]:
    """The arms beside plain GRPO, the true credit and the scale."""
    if only:
        return [name.strip() for name in only.split(",")]
    listed = [name for name in (*MITIGATIONS, *ADVANTAGES) if name not in ALIKE]
    return [*BEYOND, *listed]


def arm_as_typed(text: str) -> SyntheticArm:
    """The arm that is typed as `my_idea --strength 2`, or by a name alone."""
    name, *typed = text.split(" --")
    chosen = MITIGATIONS.get(name) or ADVANTAGES.get(name)
    if not typed:
        return named_arm(name)
    if chosen is None:
        raise UserError(f"--only {text}: {named_arm(name).name} has no flags")
    words = []
    for flag in typed:
        words += f"--{flag}".split(maxsplit=1)
    parser = make_parser(f"python -m research dial --only {name}", None, flags_of(chosen))
    return named_arm(name, parser.read(words))


def kept_or_trained_cell(task: str, arm: SyntheticArm, name: str, args: SimpleNamespace) -> dict:
    """The cell that was kept by a command with these settings, or one that is trained now."""
    if not args.kept:
        return trained_cell(task, arm, name, args, SEEDS_FROM)
    settings = {"task": task, "arm": name, "first seed": args.seed + SEEDS_FROM,
                "seeds": args.seeds, "steps": args.steps, "rates": args.rates}
    path = Path(args.kept) / f"{fingerprint(settings)[:16]}.json"
    if path.exists():
        return read_json(path)
    cell = trained_cell(task, arm, name, args, SEEDS_FROM)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(cell))
    return cell


def trained_cell(task: str, arm: SyntheticArm, name: str, args: SimpleNamespace,
                 first: int) -> dict:
    """The arm in the task: the mean success of its training by rate and seed. `first` is the first
    seed."""
    rates, start = values_of(args.rates, "rates", RATE), time.process_time()
    seeds = [args.seed + first + n for n in range(args.seeds)]
    rate_of_runs = np.repeat(rates, len(seeds)).tolist()  # all seeds at the first rate, ...
    means = train_policies(TaskSpec.read(task), arm, seeds * len(rates), rate_of_runs, args.steps)
    by_rate = np.round(means, 6).reshape(len(rates), len(seeds))
    return {"world": task, "arm": name, "rates": rates, "success": by_rate.tolist(),
            "seconds": round(time.process_time() - start, 2)}


def arms_of_task(task: str, cells: list[dict]) -> tuple[ArmsOfTask, list[dict]]:
    """The arms of the task, and their cells in the same order."""
    of_task = [cell for cell in cells if cell["world"] == task]
    success = np.array([cell["success"] for cell in of_task])
    return ArmsOfTask([cell["arm"] for cell in of_task], success), of_task


def dial_leaderboard(tasks: list[str], cells: list[dict]) -> Table:
    """Each arm's gain over plain GRPO in each task, and its share of the true credit's gain."""
    rows: list[Row] = []
    for task in tasks:
        arms, of_task = arms_of_task(task, cells)
        for cell, chosen in zip(of_task, arms.chosen):
            name = cell["arm"]
            gain, share = Estimate(0.0), None
            if name != PLAIN:
                gain, share = arms.difference(name, PLAIN), arms.share(name, TRUE, PLAIN)
            rates = dict.fromkeys(f"{cell['rates'][number]:g}" for number in chosen)
            rows.append([task, name, " and ".join(rates), arms.mean(name), gain, share,
                         cell["seconds"]])
    formats = {"world": "", "arm": "", "rate": "", "mean": ".1%", "gain": "points",
               "share": ".0%", "seconds": ".1f"}
    return Table("board", "Mean success in training, and its gain over plain GRPO",
                 by_row(formats, rows), "", [
                     "A task is called 512/48 if 48 of the 512 tokens of an answer decide. Where "
                     "the two halves of the seeds have different learning rates, both are named. "
                     f"The gain is in points, paired by seed. {SHARE_IN_WORDS} The seconds are "
                     "those of the processor, for all seeds and learning rates of an arm"],
                 {"world": "task", "rate": "learning rate", "mean": "mean success",
                  "gain": f"gain over plain GRPO{WITH_INTERVAL}",
                  "share": f"share of true credit's gain{WITH_INTERVAL}"})


def shares_by_task(cells: list[dict]) -> Table:
    """What masks keep of the true credit's gain, and what that has beyond 16 times the batch."""
    masks = BEYOND[:2]
    rows: list[Row] = []
    for task in dict.fromkeys(cell["world"] for cell in cells):
        arms, _ = arms_of_task(task, cells)
        shares: Row = []
        for mask in masks:
            shares.append(arms.share(mask, TRUE, PLAIN) if mask in arms.names else None)
        rows.append([task, *shares, arms.difference(TRUE, LARGEST_BATCH)])
    formats, headings = {"world": ""}, {"world": "task"}
    for mask in masks:
        formats[mask] = ".0%"
        headings[mask] = f"{mask}{WITH_INTERVAL}"
    formats["beyond"] = "points"
    headings["beyond"] = f"gain of true credit over a 16 times larger batch, points{WITH_INTERVAL}"
    return Table("shares",
                 "What masks keep of true credit's gain, and what true credit gains over a "
                 "16 times larger batch", by_row(formats, rows), "",
                 [f"For a mask the number is a share. {SHARE_IN_WORDS}"], headings)


def methods_table(board: Table) -> list[Table]:
    """In which tasks each listed method is ahead of plain GRPO or behind it, if there are any."""
    gains: dict[tuple[str, str], Estimate] = {}  # of a method in a task
    for task, arm, _, _, gain, *_ in board.rows:
        method, *_ = arm.split(" --")
        if method in MITIGATIONS or method in ADVANTAGES:
            gains[arm, task] = gain
    if not gains:
        return []
    corrected = dict(zip(gains, holm([gain.p for gain in gains.values()])))
    rows: list[Row] = []
    for method in dict.fromkeys(arm for arm, _ in gains):
        ahead, behind = [], []
        for (arm, task), gain in gains.items():
            if arm == method and corrected[arm, task] < 0.05:
                (ahead if gain.value > 0 else behind).append(task)
        rows.append([method, ", ".join(ahead) or "-", ", ".join(behind) or "-"])
    return [Table("methods", "Where each method is ahead of plain GRPO, and where behind",
                  by_row({"arm": "", "ahead": "", "behind": ""}, rows), "",
                  ["Named are the tasks in which the p-value is below 0.05 after Holm's correction "
                   f"for all {len(gains)} gains of this table"],
                  {"arm": "method", "ahead": "ahead in", "behind": "behind in"})]


def gains_by_task(board: Table) -> Table:
    """The arms beyond the lists, a line for each task."""
    names = (TRUE, *BEYOND, *SCALE)
    lines: dict[str, dict[str, float | Estimate]] = {}
    for task, arm, _, mean, gain, *_ in board.rows:
        lines.setdefault(task, {})[arm] = mean if arm == PLAIN else gain
    rows = [[task, line[PLAIN], *map(line.get, names)] for task, line in lines.items()]
    formats = {"world": "", PLAIN: "size", **dict.fromkeys(names, "points")}
    return Table("gains", "Gains over plain GRPO in each task, in points of mean success",
                 by_row(formats, rows), "",
                 ["A task is called 512/48 if 48 of the 512 tokens of an answer decide. Intervals "
                  "are 95% intervals over seeds, and cover the choice of a learning rate"],
                 {"world": "task", PLAIN: f"{PLAIN}, mean success in %",
                  TRUE: f"{TRUE}, {IN_POINTS}"})


def predicted_gains_table(board: Table) -> list[Table]:
    """The gains beside what was predicted (python -m research law) and published, where that was
    asked."""
    published = {(row["world"], row["arm"]): row for row in table_rows("law", "predictions")}
    rows: list[Row] = []
    errors: dict[str, list[float]] = {}  # of each task, their sizes
    outside = 0
    for task, arm, _, _, gain, *_ in board.rows:
        said = published.get((task, arm))
        if said is None or arm == PLAIN:
            continue
        predicted = said["gain"]
        is_inside = gain.low <= predicted <= gain.high
        outside += not is_inside
        error = gain.value - predicted
        errors.setdefault(task, []).append(abs(error))
        rows.append([task, arm, said["ratio"], said["cosine"], predicted, gain, error,
                     "" if is_inside else "off"])
    if not rows:
        return []
    mean_error = fmean(chain.from_iterable(errors.values()))
    by_task = ", ".join(f"{task} {100 * fmean(off):.1f}" for task, off in errors.items())
    finding = (f"{outside} of {len(rows)} predictions lie outside the 95% interval of what was "
               f"measured. On average a prediction is off by {shown(mean_error, 'size')} points "
               f"(by task: {by_task}).")
    formats = {"world": "", "arm": "", "ratio": ".3g", "cosine": ".2f", "predicted": "points",
               "gain": "points", "difference": "points", "verdict": ""}
    return [Table("law", "Gains over plain GRPO, predicted and measured", by_row(formats, rows),
                  finding, ["All gains are in points. The predictions were made before any of "
                            "these runs. The ratio is the method's noise, divided by plain GRPO's, "
                            "and the cosine is that of its mean gradient with the true one (python "
                            "-m research law). Off: the prediction lies outside the interval"],
                  {"world": "task", "ratio": "noise ratio", "predicted": "predicted gain",
                   "gain": f"gain over plain GRPO{WITH_INTERVAL}",
                   "difference": "measured minus predicted"})]


@dataclass
class GainInTask:
    """A method in a synthetic task: its gain over plain GRPO, that of true credit, and the mean
    success of plain GRPO by seed."""
    decide: int
    tokens: int
    gain: Estimate
    true: Estimate
    plain: list[float]
    is_same: bool  # each run ends as the one of plain GRPO with its seed does


def gains_in_three_tasks(name: str, flags: dict | None = None, seeds: int = 16
                         ) -> list[GainInTask]:
    """A method's gain in three synthetic tasks, in which few tokens, some, or many of 128 decide.

    All arms have the same learning rate. With the better of two rates for each, found on four
    seeds, a method that knew nothing was 3.5 points ahead: plain GRPO had got the worse rate by
    chance.
    """
    args = SimpleNamespace(seed=0, steps=60, rates=RATE_OF_ALL, seeds=seeds)
    found = []
    arms = named_arm(name, flags), named_arm(PLAIN), named_arm(TRUE)
    for task in FEW_SOME_MANY:
        cells = [trained_cell(task, arm, arm.name, args, SEEDS_OF_A_TRY) for arm in arms]
        [mine], [plain], [true] = (np.array(cell["success"]) for cell in cells)
        spec = TaskSpec.read(task)
        found.append(GainInTask(spec.decide, spec.tokens, mean_over(mine - plain),
                                mean_over(true - plain), plain.tolist(),
                                bool((mine == plain).all())))
    return found


def where_it_pays(name: str, flags: dict | None = None, seeds: int = 16) -> str:
    """Where a method pays: its gain in three synthetic tasks, as a table and a sentence. It takes
    some ten seconds."""
    try:
        found = gains_in_three_tasks(name, flags, seeds)
    except UserError as error:
        return f"Where could it pay? {name} {NOT_TRIED}: {error}"
    rows: list[Row] = [[f"{one.decide} of {one.tokens}", one.gain, one.true] for one in found]
    gains = {str(one.decide): one.gain for one in found}
    if all(one.is_same for one in found):
        return (f"Where could it pay? {name} {NOT_TRIED}, because there it does the same as plain "
                "GRPO: it tells tokens apart by something that is the same for all tokens there.")
    table = Table("where", "", by_row({"decide": "", "gain": "points", "true": "points"}, rows),
                  headings={"decide": "tokens that decide", "gain": f"gain of {name}",
                            "true": "gain of true credit"})
    corrected = dict(zip(gains, holm([gain.p for gain in gains.values()])))
    seen = [decide for decide in gains if corrected[decide] < LEVEL]
    better = [decide for decide in seen if gains[decide].value > 0]
    worse = [decide for decide in seen if gains[decide].value < 0]
    said = f"{name} is not seen to be better than plain GRPO in any of them."
    if better:
        said = f"{name} is better than plain GRPO where {listed(better)} of the tokens decide."
    if worse:
        said += f" It is worse where {listed(worse)} of the tokens decide."
    about = (f"Where could it pay? The table has three synthetic tasks, in which it is known which "
             f"tokens decide. {said} This goes by p-values below 0.05 after Holm's correction for "
             "the three tasks. An answer there has 128 symbols, each of them one of four. A gain "
             "is in points of mean success over plain GRPO, with its 95% interval over "
             f"{seeds} seeds. No method can know more than the true credit.")
    about = " ".join([about, *told_by_definition(name, flags)])
    return f"{textwrap.fill(about, 100)}\n\n{table.to_text()}"


def listed(words: list[str]) -> str:
    """3, 12 or 42"""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))

