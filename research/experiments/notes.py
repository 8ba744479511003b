"""Experiments 1 to 3 of the notes that this project started from, each as one command.

    python -m research notes --experiment 1   # think tokens discounted: 0.25 0.5 0.75 1
    python -m research notes --experiment 2   # 1 / (abs(log p) + epsilon): 0.01 0.1 0.5, as it was
                                              # published (no detach) and rescaled to mean 1
    python -m research notes --experiment 3   # attention from the answer: 0.5 1 2 4
    python -m research notes --experiment 1 --report_only

Every arm trains beside plain GRPO on the same problems, seed by seed, at one learning rate, 60
steps of 8 problems x 8 answers. A discount of 1 is plain GRPO to the bit: it must lead by 0.

    lead       mean success of all answers of the training, minus plain GRPO's
    predicted  from research/results/notes/predictions.json, committed before the runs were made
    norm       of the gradient before clipping, mean over steps
    filler, reasoning, answer   shares of the gradient abs(A) w s: the first two by the notes'
               regular expressions, the last of the answer section
    ratio      mean w abs(A log p) of filler over reasoning: the notes' own measure

--model and --flags train another model in another way; its settings are those of train.py. A run's
folder is ARM-sSEED; what is finished is taken as it is, and the same command goes on.
"""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer

from analysis.compare import IN_TRAINING, difference, mean_success, success_by_step, verdict
from analysis.notes import CLASSES, class_codes
from analysis.runs import Run
from analysis.statistics import holm
from analysis.tables import Table, by_row
from engine.errors import UserError, read_json
from engine.tokens import ANSWER
from grpo import gradient_size
from harness.record import read_columns
from harness.screen import python_command
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.experiments.pictures import draw, draw_curves
from research.experiments.protocol import COMMON, OF_RUNS, end_with, finished_run
from research.experiments.published import RESULTS, made_by
from research.probes.common import Findings, command_of, print_all, write_findings
from harness.planned import PlannedRun, make_runs, usable_cores

PLAIN, FIRST_SEED, PARTS = "none", 300, 5  # seeds that no board has
FEWEST_SEEDS = 3  # two agree now and then by luck
FORMS = {"rescaled": "inverse_logprob", "as published": "inverse_logprob_as_published"}
EXPERIMENTS = {
    "1": {f"think {discount}": f"--mitigation outcome_conditional --think_discount {discount}"
          for discount in ("0.25", "0.5", "0.75", "1.0")},
    "2": {f"{form} {epsilon}": f"--mitigation {name} --epsilon {epsilon}"
          for form, name in FORMS.items() for epsilon in ("0.01", "0.1", "0.5")},
    "3": {f"attention {scale}": f"--mitigation attention_credit --credit_scale {scale}"
          for scale in ("0.5", "1", "2", "4")}}
FLAGS = {
    "experiment": Flag("1", "of the notes", choices=tuple(EXPERIMENTS)),
    "model": Flag("models/tiny", "folder of a model"),
    "flags": Flag("", 'more flags of train.py for every arm: "--max_new_tokens 96"'),
    "seeds": Flag(3, "of each arm", least=1, most=1000),
    "steps": Flag(60, "of each run", least=1, most=100_000),
    "runs": Flag("runs/notes", "folder of the runs"),
    **OF_RUNS}
Arms = dict[str, dict[int, Run]]  # by name and seed


def main(argv: list[str]) -> None:
    typed = make_parser("python -m research notes [flags]", __doc__, FLAGS).read(argv)
    args = with_defaults(typed, FLAGS)
    planned, failed = planned_runs(args), {}
    if not args.report_only:
        command = python_command("-m", "research", "notes", *argv)
        failed = make_runs(planned, args.processes or usable_cores(), command)
    report(args, finished(planned), command_of("notes", typed))
    end_with(failed)


def planned_runs(args: SimpleNamespace) -> list[PlannedRun]:
    """Seed by seed, so that what is finished is paired."""
    arms = {PLAIN: "", **EXPERIMENTS[args.experiment]}
    return [PlannedRun(arm, seed, Path(args.runs) / f"{arm.replace(' ', '-')}-s{seed}",
                       f"--model {args.model} {COMMON} {flags} {args.flags}".split(), args.steps)
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds) for arm, flags in arms.items()]


def finished(planned: list[PlannedRun]) -> Arms:
    arms: Arms = {}
    for run in planned:
        if found := finished_run(run):
            arms.setdefault(run.arm, {})[run.seed] = found
    return arms


def report(args: SimpleNamespace, arms: Arms, command: str) -> None:
    """Into results/notes-N, where it takes the place of the one before."""
    if PLAIN not in arms:
        raise UserError(f"{args.runs} has no finished run of {PLAIN} yet")
    folder, path = Path(f"results/notes-{args.experiment}"), RESULTS / "notes/predictions.json"
    folder.mkdir(parents=True, exist_ok=True)
    predicted = read_json(path) if path.exists() else {}
    curves = {f"{arm} {seed}": [success_by_step(run).tolist(), norms(run).tolist()]
              for arm, runs in arms.items() for seed, run in runs.items()}
    draw(draw_curves, folder / "curves.png", {"curves": curves})
    made = {f"{arm}-s{seed}": run["config"] for arm, runs in arms.items()
            for seed, run in runs.items()}
    seconds = sum(line["seconds"] for runs in arms.values() for run in runs.values()
                  for line in run["metrics"])
    intro = [f"{len(made)} finished runs of {args.steps} steps, {args.model}."]
    findings = Findings(f"The notes' experiment {args.experiment}", intro,
                        [arms_table(arms, predicted), curve_table(arms)], {"curves": curves})
    settings = SimpleNamespace(**vars(args), made_by=made_by(made))
    write_findings(folder, "notes", settings, findings, seconds, command)
    print_all(findings)
    print(f"picture and numbers: {folder}")


def arms_table(arms: Arms, predicted: dict[str, float]) -> Table:
    others = [arm for arm in arms if arm != PLAIN]
    leads = {arm: difference(arms[arm], arms[PLAIN], IN_TRAINING, len(others)) for arm in others}
    corrected = dict(zip(others, holm([lead.p if lead else np.nan for _, lead in leads.values()])))
    rows = []
    for arm, runs in arms.items():
        seeds, lead = leads.get(arm, (list(runs), None))
        about = [np.mean([mean_success(run) for run in runs.values()]),
                 np.mean([norms(run).mean() for run in runs.values()]),
                 *np.mean([shares(run) for run in runs.values()], 0)]
        word = "-" if arm == PLAIN else "too few seeds"
        if lead and len(seeds) >= FEWEST_SEEDS:
            word = verdict(lead, corrected[arm])
        rows.append([arm, len(seeds), about[0], lead and lead.value, lead and lead.interval,
                     predicted.get(arm), *about[1:], word])
    formats = {"arm": "", "pairs": "d", "success": ".1%", "lead": "points", "95%": "points",
               "predicted": "points", "norm": ".3f", "filler": ".0%", "reasoning": ".0%",
               "answer": ".0%", "ratio": ".2f", "verdict": ""}
    same = [arm for arm, (_, lead) in leads.items() if lead and lead.value == 0]
    words = [f"{row[0]}: {100 * row[3]:+.1f} points, {row[-1]}." for row in rows
             if row[3] is not None and row[0] not in same]
    words += [f"{arm}: the same numbers as {PLAIN}." for arm in same]
    return Table("arms", "Each arm beside plain GRPO", by_row(formats, rows), "\n".join(words),
                 ["lead in points, by seed, Student's t; verdict by Holm's correction over the "
                  "arms. Arms that learned other things write other texts, so shares are not the "
                  "weighting alone"],
                 {"95%": "95% interval", "success": "mean success in training"})


def curve_table(arms: Arms) -> Table:
    """Success by fifths of the training, means over seeds."""
    curves = {arm: np.mean([success_by_step(run) for run in runs.values()], 0)
              for arm, runs in arms.items()}
    parts = min(PARTS, len(curves[PLAIN]))
    rows = [[arm, *(part.mean() for part in np.array_split(curve, parts))]
            for arm, curve in curves.items()]
    names = [f"part {number}" for number in range(1, parts + 1)]
    return Table("curve", "Success by fifths of the training",
                 by_row({"arm": "", **dict.fromkeys(names, ".1%")}, rows))


def norms(run: Run) -> np.ndarray:
    """0 where a step had no gradient."""
    return np.array([line["gradient_norm"] or 0.0 for line in run["metrics"]])


def shares(run: Run) -> list[float]:
    """Of the gradient abs(A) w s: filler, reasoning, answer section; and the notes' ratio."""
    tokenizer = Tokenizer.from_file(str(run["folder"] / "tokenizer.json"))
    gradient, size, count = np.zeros((3, len(CLASSES)))
    of_answer = 0.0
    for step in run["steps"]:
        columns = read_columns(run["folder"], step)
        given = np.abs(columns["advantage"]).astype(float) * columns["weight"]
        s = gradient_size(*(torch.from_numpy(columns[name]).double()
                            for name in ("log_prob", "collision"))).numpy()
        codes = class_codes(tokenizer, columns["token_id"])
        gradient += np.bincount(codes, given * s, len(CLASSES))
        size += np.bincount(codes, given * np.abs(columns["log_prob"]), len(CLASSES))
        count += np.bincount(codes, minlength=len(CLASSES))
        of_answer += (given * s)[columns["section"] == ANSWER].sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = size / count
        return [*(gradient[:2] / gradient.sum()).tolist(), of_answer / gradient.sum(),
                mean[0] / mean[1]]
