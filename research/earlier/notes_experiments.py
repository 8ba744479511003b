"""Three experiments from the notes of the work that this project started from. Each is one command.

    python -m research notes --experiment 1
    python -m research notes --experiment 1 --report_only    # print what the finished runs show

    experiment 1   tokens before the answer are discounted by 0.25, 0.5, 0.75 or 1
    experiment 2   the weight is 1 / (abs(log p) + epsilon), with an epsilon of 0.01, 0.1 or 0.5. It
                   is trained in two ways: as it was published, where a gradient also flows through
                   the weight; and with a weight that is detached and rescaled
    experiment 3   the weight is the attention from the answer, scaled by 0.5, 1, 2 or 4

Each arm is trained beside plain GRPO, on the same problems for the same seed, for 60 steps of 8
problems x 8 answers. All have the same learning rate. A discount of 1 is plain GRPO to the bit, so
its gain must be 0. These are the columns of the table:

    gain       the mean success over all answers in training, minus that of plain GRPO
    predicted  the gain that was predicted, in research/results/notes/predictions.json, before the
               runs were made
    norm       the norm of the gradient before clipping, as a mean over steps
    filler, reasoning, answer   shares of the gradient, which is the sum of abs(A) w s. Filler and
               reasoning are told apart by the regular expressions of the notes, and answer is the
               answer section
    ratio      the mean w abs(A log p) of filler, divided by that of reasoning, as in the notes

With --model and --flags another model is trained in another way: its settings are those of
train.py. A run's folder is ARM-sSEED. Finished runs are used as they are, and the same command
continues the others.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.experiment import Arms, Experiment, Key
from analysis.gains import (Gain, gain_table, gains, mean_success, over_baseline, success_by_step)
from analysis.runs import Run
from analysis.tables import Row, Table, by_row, shown
from analysis.tally import Tally
from engine.errors import UserError
from engine.tokens import ANSWER
from harness.flags import Flag
from research.boards.leaderboard import (Stages, by_run_name, flags_of_runs, planner, predictions,
                                         success_by_parts, write_report)
from research.boards.protocol import COMMON
from research.earlier.notes import UNDEFINED, Notes
from research.probes.common import Findings
from research.publish.pictures import draw_curves

PLAIN, FIRST_SEED, FIFTHS = "none", 300, 5  # seeds that no board has
FEWEST_SEEDS = 3  # two agree now and then by luck
EXPERIMENTS = {  # the flags of each arm
    "1": {
        "think 0.25": "--mitigation outcome_conditional --think_discount 0.25",
        "think 0.5": "--mitigation outcome_conditional --think_discount 0.5",
        "think 0.75": "--mitigation outcome_conditional --think_discount 0.75",
        "think 1.0": "--mitigation outcome_conditional --think_discount 1.0"},
    "2": {
        "rescaled 0.01": "--mitigation inverse_logprob --epsilon 0.01",
        "rescaled 0.1": "--mitigation inverse_logprob --epsilon 0.1",
        "rescaled 0.5": "--mitigation inverse_logprob --epsilon 0.5",
        "as published 0.01": "--mitigation inverse_logprob_as_published --epsilon 0.01",
        "as published 0.1": "--mitigation inverse_logprob_as_published --epsilon 0.1",
        "as published 0.5": "--mitigation inverse_logprob_as_published --epsilon 0.5"},
    "3": {
        "attention 0.5": "--mitigation attention_credit --credit_scale 0.5",
        "attention 1": "--mitigation attention_credit --credit_scale 1",
        "attention 2": "--mitigation attention_credit --credit_scale 2",
        "attention 4": "--mitigation attention_credit --credit_scale 4"}}
FLAGS = {
    "experiment": Flag("1", "which of the three experiments", choices=tuple(EXPERIMENTS)),
    "model": Flag("models/tiny", "folder of the model to train"),
    "flags": Flag("", 'further flags of train.py for every arm, such as "--max_new_tokens 96"'),
    "seeds": Flag(3, "number of seeds of each arm", least=1, most=1000),
    "steps": Flag(60, "steps of each run", least=1, most=100_000),
    **flags_of_runs("runs/notes")}


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    common = ["--model", args.model, *COMMON.split()]
    arms = {arm: f"{flags} {args.flags}" for arm, flags in arms_of(args).items()}
    experiment = Experiment(planner(Path(args.runs), arms, common, args.steps))
    return experiment, [(f"experiment {args.experiment}", keys_of(args))]


def arms_of(args: SimpleNamespace) -> dict[str, str]:
    return {PLAIN: "", **EXPERIMENTS[args.experiment]}


def keys_of(args: SimpleNamespace) -> list[Key]:
    """The runs seed by seed, so that what is finished is paired."""
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    return [(arm, seed) for seed in seeds for arm in arms_of(args)]


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    arms = experiment.arms(keys_of(args))
    if PLAIN not in arms:
        raise UserError(f"{args.runs} does not yet have a finished run of plain GRPO ({PLAIN})")
    made = by_run_name(arms)
    curves = {}
    for arm, runs in arms.items():
        for seed, run in runs.items():
            curves[f"{arm} {seed}"] = [success_by_step(run).tolist(), norms(run).tolist()]
    tables = [experiment_table(arms, predictions("notes")), fifths_table(arms)]
    findings = Findings(f"Experiment {args.experiment} of the earlier experiment, made again",
                        [f"There are {len(made)} finished runs of {args.steps} steps. They train "
                         f"{args.model}."],
                        tables, {"curves": curves})
    write_report(f"notes-{args.experiment}", "notes", findings, vars(args), made, command,
                 "seconds", ("curves.png", draw_curves, {"curves": curves}))


def experiment_table(arms: Arms, predicted: dict[str, float]) -> Table:
    """Each arm's gain over plain GRPO, its gradient's norm, and where its gradient went."""
    found = gains(over_baseline(arms, PLAIN))
    rows: list[Row] = []
    verdicts, lines, same = [], [], []
    for arm, runs in arms.items():
        success, norm, shares = [], [], []
        for run in runs.values():
            success.append(mean_success(run))
            norm.append(norms(run).mean())
            shares.append(gradient_shares(run))
        rows.append([float(np.mean(success)), predicted.get(arm), float(np.mean(norm)),
                     *np.mean(shares, 0).tolist()])
        gain = found.get(arm)
        verdicts.append(verdict_of_enough(gain))
        if gain is None or not gain.pairs:
            continue
        if gain.estimate.value == 0:
            same.append(f"{arm}: the same numbers as {PLAIN}.")
            continue
        said = gain.sentence if gain.pairs >= FEWEST_SEEDS else verdicts[-1]
        lines.append(f"{arm}: {shown(gain.estimate.value, 'points')} points, {said}.")
    beside = by_row({"success": ".1%", "predicted": "points", "norm": ".3f", "filler": ".0%",
                     "reasoning": ".0%", "answer": ".0%", "ratio": ".2f"}, rows)
    return gain_table(
        "arms", "Each arm beside plain GRPO", {arm: found.get(arm) for arm in arms}, beside,
        verdicts=verdicts, finding="\n".join(lines + same),
        notes=["Gains are in points, for pairs of runs with the same seed. The interval is "
               "Student's t, and the verdict has Holm's correction over the arms. Filler, "
               "reasoning and answer are shares of the gradient. Arms that learned other things "
               "also write other texts, so these shares do not come from the weighting alone"],
        headings={"success": "mean success in training", "predicted": "predicted gain",
                  "norm": "gradient norm", "ratio": "filler / reasoning, w abs(A log p)"})


def verdict_of_enough(gain: Gain | None) -> str:
    if gain is None:
        return "-"  # plain GRPO itself
    return gain.verdict if gain.pairs >= FEWEST_SEEDS else "too few seeds"


def fifths_table(arms: Arms) -> Table:
    """Success by fifths of the training, means over seeds."""
    steps = len(success_by_step(next(iter(arms[PLAIN].values()))))
    parts = min(FIFTHS, steps)
    rows = [[arm, *success_by_parts(runs, parts)] for arm, runs in arms.items()]
    names = [f"part {number}" for number in range(1, parts + 1)]
    return Table("curve", "Mean success in each fifth of the training",
                 by_row({"arm": "", **dict.fromkeys(names, ".1%")}, rows))


def norms(run: Run) -> np.ndarray:
    """The gradient's norm at each step; 0 where a step had no gradient."""
    return np.array([line["gradient_norm"] or 0.0 for line in run["metrics"]])


@UNDEFINED
def gradient_shares(run: Run) -> list[float]:
    """Shares of the gradient abs(A) w s, of filler, reasoning and the answer section; and the
    notes' ratio."""
    tally = Tally(run["folder"])
    sums = Notes(run, tally, draws=0)
    filler, reasoning, _ = sums.share("class", "abs gradient")
    of_filler, of_reasoning, _ = sums.mean("class", "abs contribution")
    return [float(filler), float(reasoning), float(tally.shares("section")[ANSWER]),
            float(of_filler / of_reasoning)]
