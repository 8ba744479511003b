"""Pointers: weights that say where an answer is decided, not whether it was decided well.

The next token decides much where the values of what could be drawn differ. With p the chance of the
token that was drawn, V the value behind it and O the mean value behind all others,

    decided = p (1 - p) (V - O)^2

is the variance between the two cases. It is about the same whichever of them was drawn, so a weight
made of it depends on the prefix alone: nothing that could have been drawn there is preferred. The
weight is its root, and a tenth of the mean everywhere.

    pointer           a ridge regression on the hidden state that predicts the token, which learns
                      from fresh answers at a few places of each batch
    free_pointer      the same regression, from the squares of an advantage that samples nothing
    measured_pointer  no regression: fresh answers at every undecided place, whatever it costs

These are choices of --mitigation in the runs of an experiment: python -m research.train has them.
"""
import math
import typing

import torch
import torch.nn.functional as F

from credit.hindsight import hindsight
from credit.measured import chain, chance_of_others, deviations, refuse_other_temperatures
from credit.monte_carlo import continuation_rewards
from engine.choices import mitigation
from engine.rollouts import Rollouts
from harness.flags import Flag

Places = typing.Annotated[int, Flag(64, "measured in each of the first ten steps, an eighth of "
                                        "them afterwards", least=8, most=100_000)]
Answers = typing.Annotated[int, Flag(8, "fresh answers that leave a token which is a free choice; "
                                        "of the others fewer", least=2, most=10_000)]
FLOOR = 0.1      # of the mean weight, everywhere
UNSURE = 0.02    # places where 1 - p is above this are measured
EAGER = 10       # steps
KEPT = 0.98      # of what earlier steps have taught, from step to step
NAMES = ("pointer", "free_pointer", "measured_pointer")
RIDGE = 1000.0   # as if so many tokens had shown that no direction of the hidden state matters


class Regression:
    """Ridge regression with a constant, on hidden states of length sqrt(D): its sums are its
    state, and older ones fade."""

    def __init__(self, policy):
        size = policy.model.config.hidden_size + 1
        self.product = torch.zeros(size, dtype=torch.float64, device=policy.model.device)
        self.square = self.product.diag()

    def learn(self, hidden: torch.Tensor, target: torch.Tensor) -> None:
        x = features(hidden)
        self.square = KEPT * self.square + x.T @ x
        self.product = KEPT * self.product + x.T @ target.double()

    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        penalty = torch.full_like(self.product, RIDGE)
        penalty[-1] = 1e-6  # the constant is free
        slope = torch.linalg.solve(self.square + penalty.diag(), self.product)
        return (features(hidden) @ slope).clamp(min=0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"square": self.square, "product": self.product}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        self.square, self.product = tensors["square"], tensors["product"]


def features(hidden: torch.Tensor) -> torch.Tensor:
    x = F.normalize(hidden.double(), dim=-1) * math.sqrt(hidden.shape[-1])
    return F.pad(x, (0, 1), value=1.0)


def as_weight(decided: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T): the root, with a floor; 1 everywhere where nothing is known to decide."""
    size = decided.clamp(min=0).sqrt() * mask
    mean = size.sum() / mask.sum()
    return size / mean + FLOOR if mean > 0 else torch.ones_like(size)


@mitigation
class pointer(Regression):
    """How much the next token decides, as a regression on the hidden state predicts it, which
    learns from fresh answers at a few places."""

    def __init__(self, policy, *, pointer_places: Places = 64):
        refuse_other_temperatures(policy)
        super().__init__(policy)
        self.places, self.metrics = pointer_places, {}

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        hidden, count = rollouts.hidden, self.places if rollouts.step <= EAGER else self.places // 8
        places, decided, self.metrics = decided_at_some(rollouts, policy, count)
        b, t = places.T.to(hidden.device)
        self.learn(hidden[b, t], decided.to(hidden.device))
        return as_weight(self.predict(hidden), rollouts.mask)


def decided_at_some(rollouts: Rollouts, policy, count: int):
    """Places (n, 2) drawn from those that are not sure, an unbiased estimate of what each decides,
    and what was sampled for it. V is known from the answer itself and from a fresh one that goes on
    behind the token, O from two that leave it."""
    other_chance = chance_of_others(rollouts)
    unsure = (other_chance > UNSURE).nonzero()
    places = unsure[torch.randperm(len(unsure), generator=rollouts.generator)[:count]]
    if not len(places):
        return places, torch.zeros(0), {}
    ids, groups = rollouts.ids.tolist(), rollouts.group.tolist()
    kept = [(groups[b], tuple(ids[b][:t + 1])) for b, t in places.tolist()]
    behind, first = continuation_rewards(policy, rollouts, kept, 1)
    left, second = deviations(policy, rollouts, places.tolist(), [2] * len(places))
    b, t = places.T
    left, q = torch.stack(left), other_chance[b, t]
    own, behind = rollouts.reward.double().cpu()[b], behind[:, 0].double().cpu()
    squared = own * behind + left.prod(1) - (own + behind) * left.sum(1) / 2  # (V - O)^2
    return places, q * (1 - q) * squared, {name: first[name] + second[name] for name in first}


@mitigation
class free_pointer(Regression):
    """The same regression, from the squares of hindsight credit: nothing more is sampled."""

    def __init__(self, policy):
        super().__init__(policy)
        self.teacher = hindsight(policy)

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        hidden, mask = rollouts.hidden, rollouts.mask
        self.learn(hidden[mask], self.teacher(rollouts, policy)[mask].square())
        return as_weight(self.predict(hidden), mask)


@mitigation
class measured_pointer:
    """How much each token decides, measured by fresh answers: what a pointer by truth is worth."""

    def __init__(self, policy, *, pointer_k: Answers = 8):
        refuse_other_temperatures(policy)
        self.k, self.metrics = pointer_k, {}

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        decided, self.metrics = decided_everywhere(rollouts, policy, self.k)
        return as_weight(decided.to(rollouts.log_prob), rollouts.mask)


def decided_everywhere(rollouts: Rollouts, policy, k: int) -> tuple[torch.Tensor, dict]:
    """(B, T), from the product of two halves of the fresh answers; and what was sampled."""
    other_chance = chance_of_others(rollouts)
    places = (other_chance > UNSURE).nonzero().tolist()
    counts = [2 * math.ceil(k * other_chance[b, t].item() / 2) for b, t in places]
    rewards, spent = deviations(policy, rollouts, places, counts)
    others = torch.full((2, *rollouts.mask.shape), math.nan, dtype=torch.float64)
    for (b, t), reward in zip(places, rewards):
        others[:, b, t] = reward.view(-1, 2).mean(0)
    one, two = (chain(rollouts, other_chance, half, torch.zeros_like(half))[0] for half in others)
    odds = (1 - other_chance) / other_chance.clamp(min=UNSURE)
    return odds * one * two, spent
