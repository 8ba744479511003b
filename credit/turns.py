"""Credit of turns, for answers in which an environment replies to the model (engine/turns.py).

    value before a turn  ->  the model's turn  ->  value  ->  the reply to it  ->  value
                         \\____ credit ____/          \\____ luck ____/

The credit of a turn is what the model added to the reward that can be expected, and the luck is
what the reply added. On average over the replies luck is 0. So a gradient without it is right on
average, and less noisy.
"""
from typing import Annotated, Any

import torch

from engine.methods import advantage
from engine.errors import UserError
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.flags import Flag

Parts = Annotated[str, Flag(
    "credit", "what a turn gets. credit: the expected reward after it and before the reply, minus "
    "that before it. with_luck: the expected reward after the reply, minus that before the turn. "
    "baseline: the reward of the answer, minus what could be expected before the turn, as from a "
    "perfect critic", choices=("credit", "with_luck", "baseline"))]


@advantage
class turn_credit:
    """The true credit of each turn: the expected reward after the turn and before the reply to it,
    minus that before the turn. Both are computed from all that can follow, so a task has to know
    them (its method `true_credit`, as in examples/guess.py)."""

    def __init__(self, policy: Policy, *, turn_gets: Parts = "credit"):
        if not hasattr(policy.task, "true_credit"):
            raise UserError("--advantage turn_credit needs a task that knows the true credit of a "
                            f"turn, as examples.guess does: --task {policy.settings.task} has no "
                            "method true_credit")
        self.turn_gets = turn_gets

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        task: Any = policy.task
        credit: torch.Tensor = task.true_credit(rollouts, policy, self.turn_gets)
        return credit
