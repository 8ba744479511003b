"""The arms that are compared: every --mitigation and every --advantage, as a run has it."""
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from credit.weight import token_weight
from harness.checked import call_choice
from engine.lab import Lab
from harness.registry import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, make
from engine.rollouts import Rollouts

IN_OTHER_ARMS = ("grpo", "dr_grpo")  # grpo is the weighting none; dr_grpo is a multiple of rloo


def choices() -> tuple[dict, dict]:
    """All choices of --mitigation, and all of --advantage: functions or classes, by name."""
    return in_order(MITIGATIONS), in_order(ADVANTAGES)


def in_order(functions: dict) -> dict:
    """Functions as they stand, then classes by name.

    Arms that draw random numbers draw one after another, so the order must not depend on which
    module was imported first.
    """
    classes = sorted(name for name, function in functions.items() if inspect.isclass(function))
    names = [*(name for name in functions if name not in classes), *classes]
    return {name: functions[name] for name in names}


def rescaling(name: str) -> str:
    """The --rescale that a run with this weighting has by default."""
    return "none" if name in NEVER_RESCALED else "mean"


@dataclass
class Arms:
    """Weightings are paired with plain GRPO's advantage, advantages with weights of 1."""
    mitigations: dict[str, Callable]
    advantages: dict[str, Callable]

    def weights(self, lab: Lab, rollouts: Rollouts, without=()) -> dict[str, torch.Tensor]:
        """(B, T) of each weighting, as the loss would take it."""
        weights = {}
        for name, mitigation in self.mitigations.items():
            if name not in without:
                weights[name] = token_weight(mitigation, name, rollouts, lab, rescaling(name))[0]
        return weights

    def credits(self, lab: Lab, rollouts: Rollouts) -> dict[str, torch.Tensor]:
        """(B, T) of each advantage."""
        return {name: call_choice(advantage, f"the advantage {name}", rollouts, lab)
                for name, advantage in self.advantages.items()}

    def coefficients(self, lab: Lab, rollouts: Rollouts, without=()) -> dict[str, torch.Tensor]:
        """What multiplies each token's gradient: weight * advantage, over the number of answers."""
        products = {name: weight * rollouts.advantage
                    for name, weight in self.weights(lab, rollouts, without).items()}
        products |= self.credits(lab, rollouts)
        return {name: product / len(rollouts.mask) for name, product in products.items()}


def make_arms(lab: Lab, oracle_k: int) -> Arms:
    """All flags at their defaults, but for the oracle's number of continuations."""
    mitigations, advantages = choices()
    flags = {"oracle": {"oracle_k": oracle_k}}
    arms = Arms({}, {})
    for name, function in mitigations.items():
        arms.mitigations[name] = make(function, flags.get(name, {}), lab)
    for name, function in advantages.items():
        if name not in IN_OTHER_ARMS:
            arms.advantages[name] = make(function, {}, lab)
    return arms
