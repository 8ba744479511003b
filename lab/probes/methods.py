"""The methods that are compared: every --mitigation and every --advantage, as a run has it."""
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from engine.choices import NEVER_RESCALED, checked_credit
from engine.policy import Policy
from engine.rollouts import Rollouts
from mitigations import rescaled_weight


@dataclass
class ComparedMethod:
    """A weighting is paired with plain GRPO's advantage, an advantage with weights of 1."""
    name: str
    function: Callable
    is_weighting: bool

    def numbers(self, rollouts: Rollouts, policy: Policy | SimpleNamespace | None) -> torch.Tensor:
        """(B, T): the method's weights as the loss takes them by default, or its advantages."""
        if self.is_weighting:
            rescale = "none" if self.name in NEVER_RESCALED else "mean"
            return rescaled_weight(self.function, self.name, rollouts, policy, rescale)[0]
        return checked_credit(self.function, f"the advantage {self.name}", rollouts, policy)
