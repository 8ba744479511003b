"""The methods that are compared: every --mitigation and every --advantage, as a run has it."""
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, checked_credit
from engine.policy import Policy, derived_seed
from harness.load import make
from engine.rollouts import Rollouts
from mitigations import rescaled_weight

ALIKE = ("grpo", "dr_grpo")  # grpo is the weighting none; dr_grpo is a multiple of rloo


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

    def frame(self, policy: Policy, rollouts: Rollouts) -> torch.Tensor:
        """The same with random numbers of the method's own: they do not depend on which other
        methods are measured."""
        rollouts.generator.manual_seed(derived_seed("probe method", self.name,
                                                    policy.settings.seed, rollouts.step))
        return self.numbers(rollouts, policy)


def make_methods(policy: Policy) -> dict[str, ComparedMethod]:
    """All methods with their flags' defaults, but for `measured`, which is as on the
    leaderboard."""
    flags = {"measured": {"measured_k": 2}}
    methods = {}
    for choices, is_weighting in ((MITIGATIONS, True), (ADVANTAGES, False)):
        for name, chosen in choices.items():
            if name not in ALIKE:
                made = make(chosen, flags.get(name, {}), policy)
                methods[name] = ComparedMethod(name, made, is_weighting)
    return methods
