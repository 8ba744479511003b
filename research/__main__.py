"""Experiments and probes: what was found with the lab, and the commands that find it again.

    python -m research board         which way of spreading credit trains the tiny model better than
                                     plain GRPO? the leaderboard
    python -m research real_board    the same question for a real model, on a laptop
    python -m research notes         experiments 1 to 3 of the earlier experiment that this project
                                     started from

These experiments consist of many training runs. They can be stopped at any moment, and the same
command continues them.

    python -m research scoreboard    which tokens decide the reward, and which weighting finds them?
    python -m research large         the same for a model for which that would take days
    python -m research exact         bias and variance of every weighting and advantage, in a task
                                     whose answers are all listed; with --model, the exact credit of
                                     a real model's tokens
    python -m research dial          where does credit by token pay? in synthetic tasks
    python -m research law           what should it be worth there? predicted from the variance of
                                     the gradient
    python -m research phase1        a gradient that never saw a reward, beside A log p
    python -m research rank          has GRPO's gradient rank 2?
    python -m research sparsity      does the gradient become sparse over a training?
    python -m research baseline      when is the group's mean the best number to subtract?
    python -m research change        does the change of a token's log-prob follow its credit?
    python -m research group         what becomes of one group's rewards in one step?

These are probes: each asks one question, prints its findings, and writes a folder with numbers.json
and its picture. On a CPU a probe takes minutes. NAME --help lists the flags of a command.

    python -m research publish [FOLDER]  keep what was measured, and bring pages and pictures up to
                                         date with it
"""
from importlib import import_module

from engine.errors import UserError
from harness.screen import run_as_program
from research.probes.common import run_probe

PROBES = ("scoreboard", "large", "exact", "dial", "law", "change", "phase1", "rank", "sparsity",
          "baseline", "group")
OTHERS = {"board": "board", "real_board": "real_board", "notes": "notes", "publish": "publish"}


def main(argv: list[str]) -> None:
    name, *flags = argv or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__.strip())
    elif name in PROBES:
        probe = import_module(f"research.probes.{name}")
        run_probe(name, probe.__doc__, probe.FLAGS, probe.measure, flags)
    elif name in OTHERS:
        import_module(f"research.experiments.{OTHERS[name]}").main(flags)
    else:
        raise UserError(f"there is no {name} here, only {', '.join([*PROBES, *OTHERS])}")


if __name__ == "__main__":
    run_as_program("research", main, interrupted="stopped at once; the same command of an "
                   "experiment continues, a probe begins again")
