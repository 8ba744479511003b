"""What does a difference between codes called GRPO cost? Each is an arm, trained beside plain GRPO.

    python -m research price                          # all runs, about two hours on two cores
    python -m research price --arms plain,per_answer  # some arms
    python -m research price --report_only            # the table of finished runs alone
    python -m research price --exact                  # without runs: price_exact.py
    python -m research price --model FOLDER --device cuda --seeds 8 --processes 8    # a real model

An arm is flags of train.py, or a weighting of price_train.py, with --rescale none, so that nothing
but the named difference changes. Every arm is trained with the same seeds and so on the same
problems. The gain is the mean success of all answers sampled in training minus that of the arm it
is compared with, on the same seed. Arms that sample at temperature 0.8, or from the 4 most probable
tokens, are compared with each other, because then an untrained model, too, has another success.

Without --model the tiny model is trained. A real one is trained on the short form of real_board.py:
Countdown of two numbers, and the answer alone. A GPU rounds differently, so its runs are a result
of their own. The predictions are in research/results/price: protocol.txt for the tiny model,
protocol_real.txt for the real one.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.experiment import Arms, Experiment, Key
from analysis.gains import gain_over
from analysis.runs import Run
from analysis.statistics import holm
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.errors import UserError
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.planned import PlannedRun
from research.boards.leaderboard import (AFRESH, Stages, by_run_name, flags_of_runs, named_arms,
                                         planner, published_runs, run_leaderboard, short_form,
                                         write_report)
from research.boards.price_exact import exact_findings
from research.boards.price_train import register_weightings
from research.boards.real_board import COMMON as COMMON_OF_REAL_BOARD
from research.boards.real_board import FORMS, model_name
from research.probes.common import Findings, print_findings

PLAIN = "plain"
TRAINED_BY = ("-m", "research.boards.price_train")


@dataclass(frozen=True)
class Arm:
    flags: str            # of train.py, beside those that all runs have
    words: str            # of the table
    compared: str = "plain"
    predicted: str = "-1 to 1"  # the gain in points, before any run


ARMS = {
    PLAIN: Arm("", "plain GRPO", ""),
    "sampled_at_0.8": Arm("--temperature 0.8 --loss_temperature 0.8",
                          "trained at 0.8, sampled at 0.8", ""),
    "sampled_at_0.8_trained_at_1": Arm("--temperature 0.8", "trained at 1, sampled at 0.8",
                                       "sampled_at_0.8"),
    "top_k_4": Arm("--top_k 4 --loss_top_k 4", "trained and sampled with top-k 4", ""),
    "top_k_4_trained_on_all": Arm("--top_k 4", "trained on all tokens, sampled with top-k 4",
                                  "top_k_4"),
    "end_untrained": Arm("--mitigation end_untrained", "the end of an answer untrained"),
    "per_answer": Arm("--loss_norm sequence", "every answer counts the same"),
    "micro_batches_of_4": Arm("--mitigation micro_batches_of_4", "N of a micro-batch of 4 answers"),
    "per_group": Arm("--mitigation per_group", "every group counts the same"),
    "no_std": Arm("--advantage dr_grpo", "not divided by the std"),
    "constant": Arm("--loss_norm constant", "divided by a constant"),
    "kl_0.04": Arm("--kl 0.04", "KL with weight 0.04", predicted="-2 to 0"),
    "kl_0.001": Arm("--kl 0.001", "KL with weight 0.001"),
    "two_epochs": Arm("--epochs 2", "two epochs (a control)", predicted="1 to 5")}
PREDICTED_OF_REAL = {  # the arms of the real model, and their gains in points, before any run
    PLAIN: "", "top_k_4": "", "top_k_4_trained_on_all": "-2 to 1",
    "sampled_at_0.8": "", "sampled_at_0.8_trained_at_1": "-2 to 1",
    "two_epochs": "2 to 10", "no_std": "-3 to 1", "end_untrained": "-2 to 1",
    "kl_0.04": "-2 to 1", "per_answer": "-2 to 2", "per_group": "-2 to 2", "kl_0.001": "-1 to 1",
    "constant": "-1 to 1"}
CONTROL = "two_epochs"


@dataclass(frozen=True)
class Form:
    """A model that the arms are trained with, and how."""
    result: str  # what the result is called in research/results
    arms: dict[str, Arm]
    common: str  # the flags that all runs have, but for the model of a real one
    steps: int


TINY = Form("choices", ARMS, "--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 "
            "--sample_every 0 --threads 1 --learning_rate 2.5e-4", 60)
REAL = Form("choices_real",
            {name: replace(ARMS[name], predicted=gain) for name, gain in PREDICTED_OF_REAL.items()},
            f"--prompt expression --questions 8 --answers 8 {COMMON_OF_REAL_BOARD}",
            FORMS["expression"].steps)
SEEDS = range(40, 52)
FLAGS = {
    "model": Flag("", "folder of a real model to train in the place of the tiny one"),
    "device": Flag("cpu", "device to train a real model on: cpu, cuda or cuda:N"),
    "arms": Flag("", "arms to train, with commas between them. By default they are all"),
    "first_seed": Flag(SEEDS[0], "the first seed", least=0, most=10_000),
    "seeds": Flag(len(SEEDS), "number of seeds", least=1, most=1000),
    **flags_of_runs("runs/price"), **AFRESH,
    "exact": Flag(False, "no runs: direction and noise of the gradient with each choice, computed "
                         "exactly in a task whose answers are all listed")}


def main(argv: list[str]) -> None:
    args = with_defaults(make_parser("python -m research price", __doc__, FLAGS).read(argv), FLAGS)
    if args.exact:
        print_findings(exact_findings())
        return
    register_weightings()
    run_leaderboard("price", str(__doc__), FLAGS, plan, report, argv)


def form_of(args: SimpleNamespace) -> Form:
    return REAL if args.model else TINY


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    """The runs, seed by seed: when time is out, all arms have the same seeds."""
    if args.device != "cpu" and not args.model:
        raise UserError("--device has no effect without --model, because the tiny model is trained "
                        "on a CPU")
    form = form_of(args)
    arms = named_arms(args.arms, form.arms)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    keys = [(arm, seed) for seed in seeds for arm in arms]
    return Experiment(planned_run(args), known=published(args)), [(name_of_result(args), keys)]


def name_of_result(args: SimpleNamespace) -> str:
    name = form_of(args).result
    return name if args.device == "cpu" else f"{name}_gpu"


def planned_run(args: SimpleNamespace) -> Callable[[str, int], PlannedRun]:
    """What plans a run of an arm. It is made by a program that knows the weightings."""
    form, common, folder = form_of(args), [], Path(args.runs)
    if args.model:
        common = ["--model", args.model]
        folder /= name_of_result(args).removeprefix("choices_")
    if args.device != "cpu":
        common += ["--device", args.device]
    plan_run = planner(folder, flags_of_arms(form), [*common, *form.common.split()], form.steps,
                       keeps_checkpoints=False)
    return lambda arm, seed: replace(plan_run(arm, seed), program=TRAINED_BY)


def flags_of_arms(form: Form) -> dict[str, str]:
    return {name: arm.flags for name, arm in form.arms.items()}


def published(args: SimpleNamespace) -> dict[Key, Run]:
    """The published runs of a real model. Those of the tiny one are not used again."""
    if args.afresh or not args.model:
        return {}
    return published_runs(name_of_result(args), settings_of_real(args), flags_of_arms(REAL))


def settings_of_real(args: SimpleNamespace) -> dict:
    device = "cpu" if args.device == "cpu" else "cuda"  # which of several GPUs is no matter
    return {"steps": REAL.steps, "model": model_name(args), "common": REAL.common,
            "device": device}


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    """Write the gain of each arm over all seeds that its folder has, and print it."""
    form, name = form_of(args), name_of_result(args)
    arms = experiment.arms((arm, seed) for arm in form.arms for seed in range(200))
    made = by_run_name(arms)
    runs = {one: short_form(run) for one, run in made.items()}
    findings = Findings("What does a difference between codes called GRPO cost?", [],
                        [gains_table(arms, form.arms)], {"runs": runs})
    settings = settings_of_real(args) if args.model else {"steps": form.steps}
    write_report(name, name, findings, {**settings, "arms": flags_of_arms(form)}, made, command)


def gains_table(arms: Arms, known: Mapping[str, Arm]) -> Table:
    """A row for each of the known arms that has two pairs."""
    compared = {name: arm.compared for name, arm in known.items() if arm.compared}
    found = {name: gain_over(arms.get(name, {}), arms.get(other, {}))
             for name, other in compared.items()}
    planned = [name for name in found if name != CONTROL]
    # an arm without runs counts as a test, because it was planned as one
    corrected = dict(zip(planned, holm([np.nan_to_num(found[name].p, nan=1.0)
                                        for name in planned])))
    rows: list[Row] = []
    for name, gain in found.items():
        if gain.pairs > 1:
            rows.append([known[name].words, known[compared[name]].words, gain.pairs, gain.estimate,
                         gain.p, corrected.get(name), known[name].predicted])
    formats = {"choice": "", "compared": "", "seeds": "d", "gain": "points", "p": "p",
               "corrected": "p", "predicted": ""}
    return Table("price", "What a choice costs: the gain in mean success in training, in points",
                 by_row(formats, rows), "",
                 ["Runs are compared in pairs with the same seed, and the interval is Student's t "
                  "over these pairs. The corrected p is Holm's over all arms that were planned but "
                  "the control"],
                 {"compared": "compared with", "gain": f"gain{WITH_INTERVAL}",
                  "corrected": "p, corrected"})
