"""A bonus for entropy (--entropy_bonus), written as an advantage.

Many trainers subtract c H from the loss, where H is the mean entropy at the sampled tokens. At one
position the gradient of H = -sum p log p is

    grad H = -sum over all tokens v of  p_v (log p_v + H) grad log p_v

and that is a mean over tokens drawn from p. So the one token that was drawn estimates it without
bias if it was drawn from p, that is at --temperature 1: c (-log p_y - H) is an advantage. A token
that was less likely than usual at its position is pushed up, one that was likelier is pushed down.
No other forward pass is needed, and the loss stays the policy loss. (That the policy also decides
which positions it reaches is left out, as it is in those trainers.)
"""
from torch import Tensor

from engine.choices import Method, Metrics, metrics_of
from engine.rollouts import Rollouts


class WithEntropyBonus:
    """An advantage with the bonus added."""

    def __init__(self, advantage: Method, coefficient: float):
        self.advantage, self.coefficient = advantage, coefficient

    def __call__(self, rollouts: Rollouts, policy: object) -> Tensor:
        bonus = -rollouts.log_prob - rollouts.entropy
        return (self.advantage(rollouts, policy) + self.coefficient * bonus) * rollouts.mask

    @property
    def metrics(self) -> Metrics:
        return metrics_of(self.advantage)

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = getattr(self.advantage, "state_dict", dict)()
        return state

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self.advantage.load_state_dict(tensors)  # type: ignore[attr-defined]
