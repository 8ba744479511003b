"""A laboratory for page 3 of the course: a world in which the first token decides the reward, and
all others are useless.

    python examples/useless_tokens.py                   # as on the page
    python examples/useless_tokens.py --wrong 0.1       # a judge that is wrong for one in ten
    python examples/useless_tokens.py --divide no       # without the standard deviation

Each token is 0 or 1, by a probability p of its own, which is 0.5 at first. 200 models are trained
at once. After some steps a line says how far p has spread at the useless tokens: their mean stays
at 0.5, so the spread is drift.
"""
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from any folder

import torch
from torch import Tensor

from lab.harness.flags import Flag, read
from qwen2_model import UserError

SHOWN = (25, 100, 400, 1600)  # steps


def trained(tokens: int, answers: int, wrong: float, divide: str, baseline: str
            ) -> Iterator[tuple[int, Tensor]]:
    """The probabilities (200, tokens) of a 1, after each of the steps that are shown."""
    torch.manual_seed(0)
    logit = torch.zeros(200, tokens)
    for step in range(1, SHOWN[-1] + 1):
        p = logit.sigmoid()
        token = (torch.rand(answers, 200, tokens) < p).float()
        reward = token[:, :, :1]                                       # (answers, 200, 1)
        if wrong:
            is_wrong = torch.rand_like(reward) < wrong
            reward = torch.where(is_wrong, 1 - reward, reward)
        advantage = reward - reward.mean(0) if baseline == "mean" else reward
        if divide == "yes":
            advantage = advantage / (reward.std(0, correction=0) + 0.0001)
        logit += (advantage * (token - p)).mean(0)                     # token - p is the arrow
        if step in SHOWN:
            yield step, logit.sigmoid()


FLAGS = {
    "tokens": Flag(11, "tokens of an answer, of which the first is useful", least=2, most=10_000),
    "answers": Flag(16, "answers of a group", least=2, most=10_000),
    "wrong": Flag(0.0, "the share of rewards that are wrong", least=0, most=1),
    "divide": Flag("yes", "whether the standard deviation divides", choices=("yes", "no")),
    "baseline": Flag("mean", "what is subtracted from the reward", choices=("mean", "none"))}


def main(argv: list[str]) -> None:
    dials = read(argv, "python examples/useless_tokens.py [dials]", __doc__, FLAGS)
    print(" step   p of the first token   p of a useless token: spread   lowest   highest")
    for step, p in trained(*(getattr(dials, name) for name in FLAGS)):
        useless = p[:, 1:]
        print(f"{step:5} {p[:, 0].mean():22.2f} {useless.std():28.3f} {useless.min():8.2f} "
              f"{useless.max():9.2f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"useless_tokens.py: {error}") from None
