"""Bias, direction and variance of every way of spreading credit, in a synthetic task so small that
all its answers are listed; or, with --model, the exact credit of the tokens of a real model.

    python -m research exact --seed 1         # seconds; another seed is another policy
    python -m research exact --policies 20    # the median of twenty, and its 95% interval
    python -m research exact --model runs/x   # before, in the middle of and after this run: minutes

With --model, every answer to a problem that has a probability of --above or more is listed. So V
of each prefix is known, and with it the credit of each token (listed.py). The tables show the share
of the reward's variance that each kind of token decides, its share of plain GRPO's gradient, and
whether the change of a token's log-prob in a step follows its credit. The answers have to be short,
because there are too many long ones to list.

Without --model, the synthetic task (enumerated.py) is a Qwen2 of a few hundred parameters with
answers of at most four tokens out of three. The true gradient is that of J, the probability of a
right answer. An --advantage and a --mitigation make from a batch, which is one group, by the same
functions that train, the estimate

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

All batches that can be drawn are listed with their probability (batches.py). A method that is a
class keeps a state or samples further answers, so it is shown as n/a.
"""
from pathlib import Path
from types import SimpleNamespace

from engine.errors import UserError
from harness.flags import Flag, Requirement, check_value
from research.probes.common import COMMON, Findings
from research.probes.exact_enumerated import measure_enumerated
from research.probes.listed import measure_model

SMALL: Requirement = (lambda s: not s.model, "the synthetic task: leave --model out")
REAL: Requirement = (lambda s: bool(s.model), "--model")
FLAGS = {
    "model": Flag(None, "a model folder, several of them separated by commas, or a finished run"),
    "answers": Flag(None, "answers in a group: 2 or 3 in the synthetic task (default 3), with "
                    "--model 2 or more (default 8)", least=2, most=1000, kind=int),
    "length": Flag(4, "most tokens of an answer", least=2, most=5, requires=SMALL),
    "policies": Flag(1, "number of policies, of this seed and the next ones",
                     least=1, most=1000, requires=SMALL),
    "only": Flag(None, "methods to measure besides plain GRPO and exact credit, separated by "
                       "commas",
                 requires=SMALL),
    "config": Flag(None, "file of settings as for train.py, with the task and its flags; by "
                         "default the config.json of the run that --model is, or that it lies in",
                   requires=REAL),
    "questions": Flag(24, "problems whose answers are listed", least=2, most=10_000,
                      requires=REAL),
    "training": Flag(False, "take the training problems of a first step instead of held-out ones",
                     requires=REAL),
    "above": Flag(1e-4, "answers of at least this probability are listed", above=0, most=0.1,
                  requires=REAL),
    "max_new_tokens": Flag(0, "most tokens of an answer; 0 means the number that suits the model",
                           most=10_000,
                           requires=REAL),
    "dtype": Flag("float32", "number type to compute in; in bfloat16 each change contains rounding",
                  choices=("float32", "bfloat16"), requires=REAL),
    "device": Flag("cpu", "cpu, cuda or cuda:N", requires=REAL),
    **COMMON}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    for name, flag in FLAGS.items():
        if vars(args)[name] != flag.default and not flag.has_effect(vars(args)):
            raise UserError(f"--{name} has no effect without {flag.requires[1]}")
    if args.model:
        args.answers = args.answers or 8
        return measure_model(args, folder)
    args.answers = args.answers or 3
    check_value("answers", args.answers, Flag(3, least=2, most=3))
    return measure_enumerated(args)
