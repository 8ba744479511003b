"""The board: which way of spreading credit is ahead of plain GRPO? One experiment, one table.

    python -m research board --dry_run        # what is missing of the stage that it has come to
    python -m research board                  # make it, stage by stage, then say what it shows
    python -m research board --report_only

The tiny model, 60 steps of 8 problems x 8 answers. Each arm (arms.py), at the learning rate that
suits it, is compared with plain GRPO by the mean success of all answers of the training, seed by
seed (protocol.py):

    verdict   p < 0.05 by Holm's correction over all methods, and ahead is said of those that are
              ahead on twelve new seeds, too. Of the others, how far they may be from plain GRPO
    control   `measured`, which must be ahead, and the scale, plain GRPO with two and four times
              the batch, are no methods: their p is not corrected
    predicted from research/results/board/predictions.json, written before any seed was looked at

A run's folder is called ARM-RATE-sSEED. A finished run that is there is taken, wherever it was
made, if its settings are those of the plan; its log and config.json are enough. So are runs of the
published board, so that one machine goes on where another stopped.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.compare import SEEN, farther_end, success_by_step
from analysis.statistics import Estimate
from analysis.tables import Table, by_row, shown
from engine.errors import UserError, read_json
from harness.screen import python_command, say
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.experiments.arms import ARMS, CONTROLS, METHODS, PLAIN, SCALE
from research.experiments.pictures import draw, draw_leads
from research.probes.common import Findings, command_of, print_all, write_findings
from research.experiments.protocol import (AGAIN, COMMON, FIRST, OF_RUNS, RATES, REPORTED, STEPS,
                                           Board, Key, ahead_at_first, end_with, looked_at, stages)
from research.experiments.published import RESULTS, made_by, read_result
from harness.planned import make_runs, usable_cores

KEPT = RESULTS / "board.json"
SIZES = {"none-16x8": 2, "none-32x8": 4}  # batches of 64 answers
FLAGS = {
    "runs": Flag("runs/board", "folder of the runs"),
    **OF_RUNS,
    "afresh": Flag(False, "make runs that were published, too"),
    "dry_run": Flag(False, "list what the present stage lacks, and start nothing")}


def main(argv: list[str]) -> None:
    typed = make_parser("python -m research board [flags]", __doc__, FLAGS).read(argv)
    args = with_defaults(typed, FLAGS)
    board, failed = Board(Path(args.runs)), {}
    if KEPT.exists() and not args.afresh:
        board.known |= kept_runs(read_result(KEPT))
    if not args.report_only:
        failed = go_through(board, args, python_command("-m", "research", "board", *argv))
    if not args.dry_run:
        report(board, command_of("board", typed))
    end_with(failed)


def go_through(board: Board, args: SimpleNamespace, command: str) -> dict[str, str]:
    """Make what each stage lacks; stop where runs failed, and return them."""
    for title, keys in stages(board):
        missing = [board.planned(*key) for key in keys if not board.run(*key)]
        say(f"{title}: {len(keys) - len(missing)} of {len(keys)} runs are finished")
        if missing and args.dry_run:
            for run in missing:
                print(f"  {run.folder}\n    {python_command(*run.command)}")
            return {}
        if missing and (failed := make_runs(missing, args.processes or usable_cores(), command)):
            return failed
    return {}


def report(board: Board, command: str) -> None:
    """Into results/board, where it takes the place of the one before."""
    folder = Path("results/board")
    folder.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "board/predictions.json"
    table = board_table(board, read_json(path) if path.exists() else {})
    draw(draw_leads, folder / "leads.png", table.to_json())
    made = {f"{arm}-{rate}-s{seed}": run["config"]
            for (arm, rate, seed), run in board.known.items()}
    settings = SimpleNamespace(common=COMMON, steps=STEPS, rates=RATES, arms=ARMS,
                               made_by=made_by(made))
    findings = Findings("Who is ahead of plain GRPO?", [f"{len(made)} runs are finished."],
                        [table, *again_table(board)], values_of(board))
    seconds = sum(line["processor_seconds"] for run in board.known.values()
                  for line in run["metrics"])
    write_findings(folder, "board", settings, findings, seconds, command)
    print_all(findings)
    print(f"picture and numbers: {folder}; python -m research publish {folder} keeps them")


def board_table(board: Board, predicted: dict[str, float]) -> Table:
    """The arms that have pairs, the best first."""
    again = looked_at(board, ahead_at_first(board), lambda arm: AGAIN)
    found = looked_at(board, list(METHODS), board.seeds_of)
    for arm in [*CONTROLS, *SCALE]:
        found |= looked_at(board, [arm], board.seeds_of)
    if not found:
        raise UserError(f"{board.folder} has no two finished seeds of an arm and of {PLAIN} yet")
    plain, rows = seconds_a_step(board, PLAIN), []
    for arm, (pairs, lead, p) in found.items():
        rows.append([arm, board.rate(arm), pairs, lead.value, lead.interval, p, predicted.get(arm),
                     seconds_a_step(board, arm) / plain,
                     verdict(board, arm, lead, p, again.get(arm))])
    rows.sort(key=lambda row: -row[3])
    formats = {"arm": "", "rate": "", "pairs": "d", "lead": "points", "95%": "points", "p": "p",
               "predicted": "points", "seconds": ".2f", "verdict": ""}
    return Table("board", "Mean success in training, each arm minus plain GRPO, in points",
                 by_row(formats, rows), "",
                 ["by seed, Student's t; p and verdict by Holm's correction over the methods, of "
                  "the control and the scale alone; seconds: of a processor for a step, over plain "
                  "GRPO's"],
                 {"95%": "95% interval", "p": "p, Holm's correction", "seconds": "cost of a step"})


def again_table(board: Board) -> list[Table]:
    """Whoever was ahead, on new seeds, and its placebo there."""
    rows = []
    for arm, (pairs, lead, p) in looked_at(board, ahead_at_first(board), lambda arm: AGAIN).items():
        placebo = board.lead(f"{arm}-placebo", AGAIN)[1]
        rows.append([arm, pairs, lead.value, lead.interval, p,
                     *([placebo.value, placebo.interval] if placebo else [None, None])])
    formats = {"arm": "", "pairs": "d", "lead": "points", "95%": "points", "p": "p",
               "placebo": "points", "placebo 95%": "points"}
    return [Table("again", "The second look: those that were ahead, on new seeds", by_row(
        formats, rows), "", ["by seed, minus plain GRPO; p by Holm's correction over these"],
        {"95%": "95% interval", "p": "p, Holm's correction", "placebo 95%": "95% interval"})
    ] if rows else []


def verdict(board: Board, arm: str, lead: Estimate, p: float, again: tuple | None) -> str:
    seen = p < SEEN
    if seen and lead.value < 0:
        return "behind"
    if board.seeds_of(arm) == FIRST:
        return "behind, stopped"
    if seen and arm not in METHODS:
        return "ahead"
    if seen and (again is None or again[0] < len(AGAIN)):
        return "ahead once, second look to come"
    if seen and again[2] < SEEN and again[1].value > 0:
        return "ahead"
    within = shown(farther_end(again[1] if seen else lead), "size")
    return f"{'ahead once, then ' * seen}no difference seen, within {within} points"


def seconds_a_step(board: Board, arm: str) -> float:
    """Of a processor; the same whatever runs beside it."""
    runs = board.of_seeds(arm, REPORTED).values()
    return float(np.mean([line["processor_seconds"] for run in runs for line in run["metrics"]]))


def values_of(board: Board) -> dict:
    """Of each run, by its name: right answers of every step, of how many, and its seconds a step.
    From them the board goes on elsewhere (kept_runs)."""
    runs = {}
    for (arm, rate, seed), run in sorted(board.known.items()):
        answers = 64 * SIZES.get(arm, 1)
        right = [round(answers * success) for success in success_by_step(run).tolist()]
        seconds = np.mean([line["processor_seconds"] for line in run["metrics"]])
        runs[f"{arm} {rate} {seed}"] = [answers, round(float(seconds), 4), right]
    return {"runs": runs}


def kept_runs(result: dict) -> dict[Key, dict]:
    """Those of a published board whose flags are still those of the plan."""
    for name, wanted in {"common": COMMON, "steps": STEPS}.items():
        if result["settings"][name] != wanted:
            raise UserError(f"research/results/board.json was made with other {name}: --afresh "
                            "makes all runs anew")
    config = {key: result["made_by"][0][key] for key in ("git_commit", "versions")}
    runs, arms = {}, result["settings"]["arms"]
    for name, (answers, seconds, right) in result["values"]["runs"].items():
        arm, rate, seed = name.split()
        base = arm.removesuffix("-placebo")
        if base in ARMS and ARMS[base] == arms.get(base):
            metrics = [{"success": count / answers, "processor_seconds": seconds}
                       for count in right]
            runs[arm, rate, int(seed)] = {"metrics": metrics, "config": config}
    return runs
