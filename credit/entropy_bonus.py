"""A bonus for entropy (--entropy_bonus), written as an advantage.

Many trainers subtract c H from the loss, where H is the mean entropy at the sampled tokens. At one
position the gradient of H = -sum p log p is

    grad H = -sum over all tokens v of  p_v (log p_v + H) grad log p_v

and that is a mean over tokens drawn from p. So the one token that was drawn estimates it without
bias: c (-log p_y - H) is an advantage. A token that was less likely than usual at its position is
pushed up, one that was likelier is pushed down. No other forward pass is needed, and the loss stays
the policy loss. (That the policy also decides which positions it reaches is left out, as it is in
those trainers.)

With --entropy_target the coefficient adapts (after 2505.22312): it grows by a tenth after each step
whose mean entropy lies below the target, and shrinks by a tenth after each one above it.
"""
import torch
from torch import Tensor

from engine.choices import Method, Metrics, metrics_of
from engine.rollouts import Rollouts

CHANGE = 1.1
LEAST, MOST = 1e-6, 1e3  # of an adapted coefficient


class WithEntropyBonus:
    """An advantage with the bonus added."""

    def __init__(self, advantage: Method, coefficient: float, target: float):
        self.advantage, self.target = advantage, target
        self.coefficient = torch.tensor(coefficient)

    def __call__(self, rollouts: Rollouts, policy: object) -> Tensor:
        bonus = -rollouts.log_prob - rollouts.entropy
        values = self.advantage(rollouts, policy) + self.coefficient.item() * bonus
        if self.target > 0 and rollouts.mask.any():
            is_low = rollouts.entropy[rollouts.mask].mean() < self.target
            change = CHANGE if is_low else 1 / CHANGE
            self.coefficient = (self.coefficient * change).clamp(LEAST, MOST)
        return values * rollouts.mask

    @property
    def metrics(self) -> Metrics:
        return metrics_of(self.advantage) | {"entropy_coefficient": self.coefficient.item()}

    def state_dict(self) -> dict[str, Tensor]:
        inner: dict[str, Tensor] = getattr(self.advantage, "state_dict", dict)()
        return {"entropy_coefficient": self.coefficient,
                **{f"inner.{name}": value for name, value in inner.items()}}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.coefficient = tensors["entropy_coefficient"]
        inner = {name.removeprefix("inner."): value for name, value in tensors.items()
                 if name.startswith("inner.")}
        if inner:
            self.advantage.load_state_dict(inner)  # type: ignore[attr-defined]
