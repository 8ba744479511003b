"""The leaderboard: which way of spreading credit trains the tiny model better than plain GRPO?

    python -m research board --dry_run        # list the runs that the present stage still needs
    python -m research board                  # make the runs, stage by stage, then print the result
    python -m research board --report_only    # print what the finished runs show

The tiny model is trained for 60 steps of 8 problems x 8 answers. Each arm (arms.py) has the
learning rate that suits it. It is compared with plain GRPO by the mean success over all answers in
training, for pairs of runs with the same seed (protocol.py):

    verdict   by the one rule of all experiments (analysis/gains.py), with Holm's correction over
              all methods and a second look on twelve new seeds. An arm is called
              "behind, stopped" if its interval over the first six seeds lies wholly below -1 point,
              because then it is not trained on six more. For all others the interval says how large
              a difference may still be
    control   `measured`, which must be ahead, and plain GRPO with two and four times the batch.
              These are not methods, so their p is not corrected
    predicted the gain that was predicted, in research/results/board/predictions.json, before there
              was a result of any seed

A run's folder is called ARM-RATE-sSEED. A finished run in such a folder is used, wherever it was
made, if its settings are those of the plan. Its log and its config.json are enough. Runs of the
published leaderboard are used as well, so one machine can continue where another stopped.
"""
from pathlib import Path
from types import SimpleNamespace

from analysis.gains import BEHIND, Gain, called, gain_table
from analysis.runs import Run
from analysis.tables import WITH_INTERVAL, Row, Table
from engine.errors import UserError
from harness.screen import python_command, say
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.boards.arms import ARMS, CONTROLS, METHODS, PLAIN, SCALE
from research.boards.common import (FLAGS_OF_LEADERBOARD, FLAGS_OF_RUNS, end_with,
                                         from_short_form, leaderboard, list_missing,
                                         mean_step_seconds, power_table, predictions,
                                         require_same_plan, short_form, total_seconds,
                                         write_report)
from research.publish.pictures import draw_gains, draw_published
from research.boards.protocol import (AGAIN, COMMON, FIRST, RATES, REPORTED, STEPS, Board, Key,
                                           board_stages)
from research.publish.results import RESULTS, read_result
from research.probes.common import Findings, command_of
from harness.planned import kinds_of, make_runs, side_by_side

PUBLISHED_BOARD = RESULTS / "board.json"
ANSWERS = 64  # to a step of every arm, but for those with larger batches
TIMES_THE_BATCH = {"none-16x8": 2, "none-32x8": 4}  # how many times as many
NOT_METHODS = (*CONTROLS, *SCALE)
FLAGS = {"runs": Flag("runs/board",
                      "folder in which the runs are kept"), **FLAGS_OF_RUNS, **FLAGS_OF_LEADERBOARD}


def main(argv: list[str]) -> None:
    typed = make_parser("python -m research board [flags]", __doc__, FLAGS).read(argv)
    args = with_defaults(typed, FLAGS)
    board, failed = Board(Path(args.runs)), {}
    if PUBLISHED_BOARD.exists() and not args.afresh:
        board.known |= published_board_runs(read_result(PUBLISHED_BOARD))
    if not args.report_only:
        failed = make_stages(board, args, python_command("-m", "research", "board", *argv))
    if not args.dry_run:
        report_board(board, command_of("board", typed, ["runs"]))
    end_with(failed)


def make_stages(board: Board, args: SimpleNamespace, command: str) -> dict[str, str]:
    """Make what each stage lacks; stop where runs failed, and return them."""
    for title, keys in board_stages(board):
        missing = [board.planned(*key) for key in keys if not board.run(*key)]
        say(f"{title}: {len(keys) - len(missing)} of {len(keys)} runs are finished")
        if missing and args.dry_run:
            list_missing(missing)
            return {}
        if missing:
            processes, _ = side_by_side(kinds_of(missing), args.processes)
            failed = make_runs(missing, processes, command)
            if failed:
                return failed
    return {}


def report_board(board: Board, command: str) -> None:
    """Write the report into results/board, where it takes the place of the one before."""
    folder = Path("results/board")
    folder.mkdir(parents=True, exist_ok=True)
    table = board_leaderboard(board, predictions("board"))
    draw_published(draw_gains, folder / "gains.png", table.to_json())
    made = {f"{arm}-{rate}-s{seed}": run for (arm, rate, seed), run in board.known.items()}
    settings = {"common": COMMON, "steps": STEPS, "rates": RATES, "arms": ARMS}
    findings = Findings("Which method trains the tiny model better than plain GRPO?",
                        [f"{len(made)} runs are finished."],
                        [table, *second_look_table(board), board_power(board)],
                        board_values(board))
    write_report(folder, "board", findings, settings, made, total_seconds(made.values()), command)


def gains_of_all(board: Board) -> dict[str, Gain]:
    return board.gains([*METHODS, *NOT_METHODS], board.seeds_of, NOT_METHODS)


def board_power(board: Board) -> Table:
    return power_table(gains_of_all(board), NOT_METHODS)


def board_leaderboard(board: Board, predicted: dict[str, float]) -> Table:
    """The arms that have pairs, the best first."""
    found = gains_of_all(board)
    if not found:
        raise UserError(f"{board.folder} does not yet have two finished seeds of an arm and of "
                        f"plain GRPO ({PLAIN})")
    again = board.second_look()
    seconds_of_plain = mean_step_seconds(board.runs(PLAIN, REPORTED).values())
    rates, cost, verdicts = {}, {}, {}
    for arm, gain in found.items():
        rates[arm] = board.rate(arm)
        cost[arm] = mean_step_seconds(board.runs(arm, REPORTED).values()) / seconds_of_plain
        verdicts[arm] = verdict_of_arm(board, arm, gain, again.get(arm))
    return leaderboard(found, predicted, cost, verdicts, {"rate": ("", rates)})


def second_look_table(board: Board) -> list[Table]:
    """The methods that were better at first, on new seeds, and their placebos there."""
    again = board.second_look()
    if not again:
        return []
    of_placebos: Row = []
    for arm in again:
        gain = board.gain(f"{arm}-placebo", AGAIN)
        of_placebos.append(gain.estimate if gain.pairs else None)
    return [gain_table("again",
                       "The second look: the methods that were better, on new seeds", again,
                       {"placebo": ("points", of_placebos)},
                       notes=["Gains are in points of mean success, for pairs of runs with the "
                              "same seed. p has Holm's correction over these methods"],
                       headings={"placebo": f"gain of its placebo{WITH_INTERVAL}"})]


def verdict_of_arm(board: Board, arm: str, gain: Gain, again: Gain | None) -> str:
    """The word for an arm by the rule of all experiments (`analysis.gains.called`); an arm that was
    stopped after six seeds has a word of its own where the rule does not call it behind."""
    if again is not None and again.pairs < len(AGAIN):
        again = None
    word = called(gain, again, is_control=arm in NOT_METHODS)
    was_stopped = board.seeds_of(arm) == FIRST
    return "behind, stopped" if was_stopped and word != BEHIND else word


def board_values(board: Board) -> dict:
    """Every run in short, by its name."""
    runs = {}
    for (arm, rate, seed), run in sorted(board.known.items()):
        runs[f"{arm} {rate} {seed}"] = short_form(run, ANSWERS * TIMES_THE_BATCH.get(arm, 1))
    return {"runs": runs}


def published_board_runs(result: dict) -> dict[Key, Run]:
    """The runs of a published leaderboard whose flags are still those of the plan."""
    require_same_plan("board", result, {"common": COMMON, "steps": STEPS})
    runs, arms = {}, result["settings"]["arms"]
    for name, stored in result["values"]["runs"].items():
        arm, rate, seed = name.split()
        base = arm.removesuffix("-placebo")
        if base in ARMS and ARMS[base] == arms.get(base):
            runs[arm, rate, int(seed)] = from_short_form(stored, result, f"{arm}-{rate}-s{seed}")
    return runs
