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

from analysis.experiment import Experiment, Key
from analysis.gains import BEHIND, Gain, called, gain_table
from analysis.tables import WITH_INTERVAL, Row, Table
from engine.errors import UserError
from research.boards.arms import ARMS, CONTROLS, METHODS, PLAIN, SCALE
from research.boards.leaderboard import (AFRESH, Stages, flags_of_runs, leaderboard,
                                         mean_step_seconds, power_table, predictions,
                                         published_runs, run_name, short_form,
                                         write_report)
from research.boards.protocol import (AGAIN, AT_RATES, COMMON, FIRST, RATES, REPORTED, STEPS,
                                      Board, board_experiment, board_stages)
from research.probes.common import Findings
from research.publish.pictures import draw_gains

NOT_METHODS = (*CONTROLS, *SCALE)
FLAGS = {**flags_of_runs("runs/board"), **AFRESH}


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    known = {}
    if not args.afresh:
        known = published_runs("board", {"common": COMMON, "steps": STEPS}, ARMS, arm_and_key)
    experiment = board_experiment(Path(args.runs), known)
    return experiment, board_stages(Board(experiment))


def arm_and_key(stored_as: str) -> tuple[str, Key]:
    """gtpo-placebo 5e-4 60 -> gtpo, (gtpo-placebo-5e-4, 60): the arm whose flags the plan has, and
    the run."""
    name, rate, seed = stored_as.split()
    return name.removesuffix("-placebo"), (f"{name}-{rate}", int(seed))


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    board = Board(experiment)
    table = board_leaderboard(board, predictions("board"))
    made = {run_name(*key): run for key, run in experiment.finished.items()}
    settings = {"common": COMMON, "steps": STEPS, "rates": RATES, "arms": ARMS}
    findings = Findings("Which method trains the tiny model better than plain GRPO?",
                        [f"{len(made)} runs are finished."],
                        [table, *second_look_table(board), board_power(board)],
                        board_values(experiment))
    write_report("board", "board", findings, settings, made, command,
                 picture=("gains.png", draw_gains, table.to_json()))


def gains_of_all(board: Board) -> dict[str, Gain]:
    return board.gains([*METHODS, *NOT_METHODS], board.seeds_of, NOT_METHODS)


def board_power(board: Board) -> Table:
    return power_table(gains_of_all(board), NOT_METHODS)


def board_leaderboard(board: Board, predicted: dict[str, float]) -> Table:
    """The arms that have pairs, the best first."""
    found = gains_of_all(board)
    if not found:
        raise UserError("there are not yet two finished seeds of an arm and of plain GRPO "
                        f"({PLAIN})")
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


def board_values(experiment: Experiment) -> dict:
    """Every run in short, by its name."""
    runs = {}
    for (name, seed), run in experiment.finished.items():
        arm, rate = AT_RATES[name]
        runs[arm, rate, seed] = short_form(run)
    return {"runs": {f"{arm} {rate} {seed}": runs[arm, rate, seed]
                     for arm, rate, seed in sorted(runs)}}
