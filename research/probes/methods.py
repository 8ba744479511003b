"""The methods that are compared: every --mitigation and every --advantage, as a run has it."""
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from harness.own_code import checked_credit
from engine.policy import Policy, derived_seed
from harness.load import make
from engine.rollouts import Rollouts
from mitigations import rescaled_weight

MEASURED_K = 2  # as in the arm `measured` of the leaderboard
ALIKE = ("grpo", "dr_grpo")  # grpo is the weighting none; dr_grpo is a multiple of rloo


def choices() -> tuple[dict, dict]:
    """All choices of --mitigation, and all of --advantage: functions or classes, by name."""
    return functions_first(MITIGATIONS), functions_first(ADVANTAGES)


def functions_first(functions: dict) -> dict:
    """Functions as they stand, then classes by name, whichever module was imported first."""
    classes = sorted(name for name, function in functions.items() if inspect.isclass(function))
    names = [*(name for name in functions if name not in classes), *classes]
    return {name: functions[name] for name in names}


def rescale_of(name: str) -> str:
    """The --rescale that a run with this weighting has by default."""
    return "none" if name in NEVER_RESCALED else "mean"


@dataclass
class Methods:
    """Weightings are paired with plain GRPO's advantage, advantages with weights of 1."""
    weightings: dict[str, Callable]
    advantages: dict[str, Callable]

    def weights(self, policy: Policy, rollouts: Rollouts, without=()) -> dict[str, torch.Tensor]:
        """(B, T) of each weighting, as the loss would take it."""
        return {name: rescaled_weight(weighting, name, for_method(name, rollouts, policy), policy,
                                      rescale_of(name))[0]
                for name, weighting in self.weightings.items() if name not in without}

    def credits(self, policy: Policy, rollouts: Rollouts, without=()) -> dict[str, torch.Tensor]:
        """(B, T) of each advantage."""
        return {name: checked_credit(advantage, f"the advantage {name}",
                                     for_method(name, rollouts, policy), policy)
                for name, advantage in self.advantages.items() if name not in without}

    def coefficients(self, policy: Policy, rollouts: Rollouts,
                     without=()) -> dict[str, torch.Tensor]:
        """What multiplies each token's gradient: weight * advantage, over the number of answers."""
        products = {name: weight * rollouts.advantage
                    for name, weight in self.weights(policy, rollouts, without).items()}
        products |= self.credits(policy, rollouts, without)
        return {name: product / len(rollouts.mask) for name, product in products.items()}


def for_method(name: str, rollouts: Rollouts, policy: Policy) -> Rollouts:
    """With the random numbers of this method, the same whichever others are measured beside it."""
    rollouts.generator.manual_seed(derived_seed("probe method", name, policy.settings.seed,
                                                rollouts.step))
    return rollouts


def make_methods(policy: Policy, oracle_k: int = 1) -> Methods:
    """All flags as the leaderboard has them; the oracle's number of continuations is given."""
    weightings, advantages = choices()
    flags = {"oracle": {"oracle_k": oracle_k}, "measured": {"measured_k": MEASURED_K}}
    return Methods({name: make(chosen, flags.get(name, {}), policy)
                    for name, chosen in weightings.items()},
                   {name: make(chosen, flags.get(name, {}), policy)
                    for name, chosen in advantages.items() if name not in ALIKE})
