"""What a first step of the planned training would do: is its gradient more signal than noise, and
does it raise success?

Each of K problems is answered by one group, and two gradients are measured of each group, without
making a step:

    g_i     of the reward, as plain GRPO follows it
    s_i     of success: the same with 1 for a right answer and 0 for a wrong one

Groups are independent. So the mean of <g_i, g_j> over all pairs i != j is the squared length of the
gradient that all groups share, the signal. What |g_i|^2 has on top of it is the noise of one group,
and a batch of Q groups has 1/Q of it. The mean of <g_i, s_j> over the same pairs says whether a
step along the reward's gradient raises success at problems that it has not seen. Both have
intervals by the jackknife over the groups.

What is not measured: AdamW divides each parameter's gradient by its usual size, so in training the
parameters have other weights than here.
"""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.gradients import Unmoved, folded, inner_products, mean_of_pairs
from analysis.statistics import Estimate, Floats, jackknife
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from grpo import grpo, update
from harness.memory import return_memory
from harness.screen import show_status
from harness.settings import Settings


@dataclass(frozen=True)
class FirstStep:
    """The inner products of the groups' gradients, (K, K) each."""
    reward: Floats   # [i, j] is <g_i, g_j>
    success: Floats  # [i, j] is <s_i, s_j>
    both: Floats     # [i, j] is <g_i, s_j>

    @property
    def groups(self) -> int:
        return len(self.reward)

    def signal(self) -> Estimate:
        """The squared length of the reward's mean gradient."""
        return over_groups(self.reward)

    def groups_worth(self) -> float:
        """How many groups a batch needs until its noise is as large as its squared signal. It is
        infinite if no signal is seen."""
        signal = self.signal().value
        noise = float(np.trace(self.reward)) / self.groups - signal
        return max(noise, 0.0) / signal if signal > 0 else np.inf

    def fewest_groups_worth(self) -> float:
        """The same with the largest signal of its 95% interval: so many at the least."""
        signal = self.signal().high
        noise = float(np.trace(self.reward)) / self.groups - signal
        return max(noise, 0.0) / signal if signal > 0 else np.inf

    def raises_success(self) -> Estimate:
        """The mean of <g_i, s_j>: above 0 if a step raises success elsewhere."""
        return over_groups(self.both)


def over_groups(products: Floats) -> Estimate:
    """The mean over pairs of different groups, with its interval over groups."""
    groups = np.arange(len(products))
    return jackknife(lambda kept: mean_of_pairs(products[kept][:, kept]), groups)


def measure_first_step(policy: Policy, s: Settings, problems: Sequence[Any]) -> FirstStep:
    """Sample a group for each problem, and fold the two gradients of each."""
    optimizer = Unmoved(policy.model.parameters(), learning_rate=0.0)
    of_reward: list[Tensor] = []
    of_success: list[Tensor] = []
    for first in range(0, len(problems), s.questions):
        part = problems[first:first + s.questions]
        show_status(f"measured the gradients of {first} of {len(problems)} groups")
        with torch.no_grad():
            batch = policy.ask(part, s.answers, derived_seed("first step", s.seed, first))
        for number in range(len(part)):
            group = batch.of_problems(range(number, number + 1))
            right = replace(group, scores={**group.scores, "reward": group.scores["answer"]})
            of_reward.append(gradient_of(policy, optimizer, group, s))
            of_success.append(gradient_of(policy, optimizer, right, s))
        if policy.model.is_large:
            return_memory()
    optimizer.zero_grad()
    inner = inner_products([of_reward, of_success])
    return FirstStep(inner[0, 0], inner[1, 1], inner[0, 1])


def gradient_of(policy: Policy, optimizer: Unmoved, group: Rollouts, s: Settings) -> Tensor:
    """The folded gradient of plain GRPO's loss on one group; 0 if all rewards are equal."""
    rollouts = replace(group, advantage=grpo(group))
    optimizer.zero_grad()
    plain = replace(s, kl=0.0, max_grad_norm=0.0, epochs=1)
    update(policy.model, optimizer, rollouts, rollouts.mask.float(), plain)
    return folded(policy.model.parameters())
