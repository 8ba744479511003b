"""Bias, direction and variance of the gradient with every weighting and advantage, in a synthetic
task so small that all its answers are listed. Or, with --model, the exact credit of the tokens of a
real model.

    python -m research exact --seed 1         # takes seconds; another seed is another policy
    python -m research exact --policies 20    # medians of twenty policies, with 95% intervals
    python -m research exact --success 0.9    # the policy after a training
    python -m research exact --model runs/x   # takes minutes: the model before, in the middle of
                                              # and after this run

With --model, the answers to a problem whose probability is --above or more are all listed. So V of
each prefix, which is the expected reward of continuing from it, is known, and with it the credit of
each token (listed.py). The tables show the share of the reward's variance that each kind of token
decides, its share of plain GRPO's gradient, and whether the change of a token's log-prob in a step
follows its credit. The answers have to be short, because there are too many long ones to list.

Without --model, the policy is a Qwen2 of a few hundred parameters, which knows three tokens and
writes answers of at most four (enumerated.py). The true gradient is that of J, the probability of a
right answer. A batch is one group of G answers. From it an advantage and a weighting make an
estimate of the gradient, by the same functions that train:

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

All batches that can be drawn are listed with their probability, too, so the mean and the variance
of the estimate are exact. A method that keeps a state or samples more answers cannot be
listed in this way, and is shown as n/a.
"""
from pathlib import Path
from types import SimpleNamespace

from harness.flags import Flag, Requirement, check_value
from research.probes.common import COMMON, Findings
from research.probes.enumerated_tables import measure_enumerated
from research.probes.listed import measure_model

SMALL: Requirement = (lambda s: not s.model, "the synthetic task, which --model replaces")
REAL: Requirement = (lambda s: bool(s.model), "--model")
FLAGS = {
    "model": Flag(None, "a model folder, or several separated by commas, or a finished run"),
    "answers": Flag(None, "number of answers in a group. In the synthetic task 2 or 3 (default 3), "
                    "with --model 2 or more (default 8)", least=2, most=1000, kind=int),
    "length": Flag(4, "the most tokens of an answer", least=2, most=5, requires=SMALL),
    "policies": Flag(1, "number of policies: that of --seed, and those of the next seeds",
                     least=1, most=1000, requires=SMALL),
    "success": Flag(0.0, "train each policy first, along the true gradient, until it is right with "
                         "this probability", least=0, most=0.99, requires=SMALL),
    "only": Flag(None, "the methods to measure besides plain GRPO and exact credit, separated by "
                       "commas",
                 requires=SMALL),
    "config": Flag(None, "file of settings of train.py, with the task and its flags. By default "
                         "it is the config.json of the run that --model names, or lies in",
                   requires=REAL),
    "questions": Flag(24, "problems whose answers are listed", least=2, most=10_000,
                      requires=REAL),
    "training": Flag(False, "take the problems of a first training step, instead of held-out ones",
                     requires=REAL),
    "above": Flag(1e-4, "list the answers with at least this probability", above=0, most=0.1,
                  requires=REAL),
    "max_new_tokens": Flag(0, "the most tokens of an answer; 0 means the number that suits the "
                              "model",
                           most=10_000,
                           requires=REAL),
    "dtype": Flag("float32",
                  "type of the numbers to compute with. In bfloat16 changes contain rounding",
                  choices=("float32", "bfloat16"), requires=REAL),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N", requires=REAL),
    **COMMON}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    if args.model:
        args.answers = args.answers or 8
        return measure_model(args, folder)
    args.answers = args.answers or 3
    check_value("answers", args.answers, Flag(3, least=2, most=3))
    return measure_enumerated(args)
