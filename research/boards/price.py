"""What does a difference between codes called GRPO cost? Each is an arm, trained beside plain GRPO.

    python -m research price                          # all runs, about two hours on two cores
    python -m research price --arms plain,per_answer  # some arms
    python -m research price --arms none --runs FOLDER  # the table of finished runs alone
    python -m research price --exact                  # without runs: price_exact.py

An arm is flags of train.py, or a weighting of this file, with --rescale none, so that nothing but
the named difference changes. Every arm is trained with the same seeds and so on the same problems.
The gain is the mean success of all answers sampled in training minus that of the arm it is compared
with, on the same seed. Arms that sample at temperature 0.8, or from the 4 most probable tokens, are
compared with each other, because then an untrained model, too, has another success.
research/results/price/protocol.txt has the predictions.
"""
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import train
from analysis.experiment import Arms, Experiment
from analysis.gains import gain_over
from analysis.statistics import holm
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.choices import mitigation
from engine.rollouts import Rollouts
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.planned import PlannedRun
from research.boards.leaderboard import (by_run_name, named_arms, planner, short_form,
                                         write_report)
from research.boards.price_exact import exact_findings
from research.probes.common import Findings, print_findings

PLAIN = "plain"
RESULT = "choices"  # what the result is called in research/results
STEPS = 60
COMMON = ("--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 "
          "--sample_every 0 --threads 1 --learning_rate 2.5e-4")


@dataclass(frozen=True)
class Arm:
    flags: str            # of train.py, beside COMMON
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
CONTROL = "two_epochs"
SEEDS = range(40, 52)
FLAGS = {
    "arms": Flag(",".join(ARMS), "arms to train, with commas between them", kind=str),
    "first_seed": Flag(SEEDS[0], "the first seed", least=0, most=10_000),
    "seeds": Flag(len(SEEDS), "number of seeds", least=1, most=1000),
    "runs": Flag("runs/price", "folder in which the runs are kept"),
    "exact": Flag(False, "no runs: direction and noise of the gradient with each choice, computed "
                         "exactly in a task whose answers are all listed")}


def end_untrained(rollouts: Rollouts) -> Tensor:
    """Weight 0 at the last token of an answer that ended, and 1 elsewhere: what a code does that
    pads with the end token and masks the padding."""
    weight = torch.ones_like(rollouts.log_prob)
    ended = rollouts.finished.nonzero().flatten()
    weight[ended, rollouts.length[ended] - 1] = 0
    return weight


def per_group(rollouts: Rollouts) -> Tensor:
    """Every group counts the same, and every token within it."""
    return of_parts(rollouts, rollouts.group)


def micro_batches_of_4(rollouts: Rollouts) -> Tensor:
    """Each four answers after each other count the same: a token is divided by the number of tokens
    of its micro-batch, and not by that of the batch."""
    return of_parts(rollouts, torch.arange(len(rollouts.group)) // 4)


def of_parts(rollouts: Rollouts, part: Tensor) -> Tensor:
    """(B, T): N / (number of parts * tokens of the answer's part)."""
    length = rollouts.length.double()
    parts = int(part.max()) + 1
    tokens = torch.zeros(parts, dtype=torch.float64).index_add(0, part, length)[part]
    weight = (length.sum() / (parts * tokens)).float()
    return weight[:, None] * rollouts.mask


def main(argv: list[str]) -> None:
    register_weightings()
    args = with_defaults(make_parser("python -m research price", __doc__, FLAGS).read(argv), FLAGS)
    if args.exact:
        print_findings(exact_findings())
        return
    experiment = experiment_in(Path(args.runs))
    for arm in named_arms(args.arms, ARMS) if args.arms != "none" else ():
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        for planned in experiment.missing([(arm, seed) for seed in seeds]):
            train_here(planned)
    report(experiment, "python -m research price")


def register_weightings() -> None:
    """Make the weightings above choices of --mitigation, in this program alone."""
    for weighting in (end_untrained, per_group, micro_batches_of_4):
        mitigation(rescaled=False)(weighting)


def experiment_in(folder: Path) -> Experiment:
    flags = {name: arm.flags for name, arm in ARMS.items()}
    return Experiment(planner(folder, flags, COMMON.split(), STEPS))


def train_here(planned: PlannedRun) -> None:
    """Train in this process, which knows the weightings above, and keep the settings and metrics
    alone. An unfinished run begins again."""
    shutil.rmtree(planned.folder, ignore_errors=True)
    train.main(planned.command[1:])
    shutil.rmtree(planned.folder / "credit", ignore_errors=True)


def report(experiment: Experiment, command: str) -> None:
    """Write the gain of each arm over all seeds that its folder has, and print it."""
    arms = experiment.arms((arm, seed) for arm in ARMS for seed in range(200))
    made = by_run_name(arms)
    runs = {name: short_form(run) for name, run in made.items()}
    findings = Findings("What does a difference between codes called GRPO cost?", [],
                        [gains_table(arms)], {"runs": runs})
    write_report(RESULT, RESULT, findings, {"steps": STEPS}, made, command)


def gains_table(arms: Arms) -> Table:
    compared = {name: arm.compared for name, arm in ARMS.items() if arm.compared}
    found = {name: gain_over(arms.get(name, {}), arms.get(other, {}))
             for name, other in compared.items()}
    planned = [name for name in found if name != CONTROL]
    # an arm without runs counts as a test, because it was planned as one
    corrected = dict(zip(planned, holm([np.nan_to_num(found[name].p, nan=1.0)
                                        for name in planned])))
    rows: list[Row] = []
    for name, gain in found.items():
        if gain.pairs > 1:
            rows.append([ARMS[name].words, ARMS[compared[name]].words, gain.pairs, gain.estimate,
                         gain.p, corrected.get(name), ARMS[name].predicted])
    formats = {"choice": "", "compared": "", "seeds": "d", "gain": "points", "p": "p",
               "corrected": "p", "predicted": ""}
    return Table("price", "What a choice costs: the gain in mean success in training, in points",
                 by_row(formats, rows), "",
                 ["Runs are compared in pairs with the same seed, and the interval is Student's t "
                  "over these pairs. The corrected p is Holm's over all arms that were planned but "
                  "the control"],
                 {"compared": "compared with", "gain": f"gain{WITH_INTERVAL}",
                  "corrected": "p, corrected"})
