"""Experiments and probes: what was found with the lab, and the commands that find it again.

    python -m research board         the leaderboard: which way of spreading credit over tokens
                                     trains the tiny model better than plain GRPO?
    python -m research real_board    the leaderboard of a real model, on a laptop
    python -m research notes         three experiments from the notes of the work that this project
                                     started from

These experiments consist of many training runs. They can be stopped at any moment, and the same
command continues them.

    python -m research scoreboard    which tokens decide the reward, and which weighting finds them?
    python -m research large         which tokens decide the reward of a model that is too large for
                                     scoreboard?
    python -m research exact         what are the bias and variance of every weighting and
                                     advantage? They are computed exactly, by listing all answers
                                     of a small task. With --model, what is computed is the exact
                                     credit of a real model's tokens
    python -m research dial          in which synthetic tasks does credit by token help?
    python -m research law           how much should it help there? This is predicted from the
                                     variance of the gradient, before training
    python -m research phase1        did phase 1 of the earlier experiment measure credit? Its
                                     gradient does not depend on the reward
    python -m research rank          does GRPO's gradient have rank 2?
    python -m research sparsity      does the gradient become sparse during training?
    python -m research signal        how noisy is the gradient of one batch, and how much less noisy
                                     does a method make it?
    python -m research baseline      when is the group's mean the best number to subtract from the
                                     reward?
    python -m research change        does the change of a token's log-prob follow its credit?
    python -m research group         what becomes of one group's rewards in one step?
    python -m research failure       how does a run fail? its signs, beside those of a run that
                                     learns

These are probes. Each answers one question, prints its findings, and writes a folder with its
numbers and picture. On a CPU a probe takes minutes. python -m research NAME --help lists the flags
of each command.

    python -m research publish [FOLDER]  copy a result into research/results, and update the pages
                                         and pictures that show it
"""
from importlib import import_module

from engine.errors import UserError
from harness.screen import run_as_program
from research.probes.common import run_probe

PROBES = ("scoreboard", "large", "exact", "dial", "law", "change", "phase1", "rank", "sparsity",
          "signal", "baseline", "group", "failure")
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
        raise UserError(f"there is no probe or experiment {name}, only "
                        f"{', '.join([*PROBES, *OTHERS])}")


if __name__ == "__main__":
    run_as_program("research", main, interrupted="stopped at once. The same command continues an "
                   "experiment, and begins a probe again")
