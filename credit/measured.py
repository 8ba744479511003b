"""A token's advantage by Monte Carlo: the value of the prefix with it, minus the value without.

    A_t = V(prefix and y_t) - V(prefix),   V(prefix) = E[reward | prefix]

Estimated from the end. Let p be the probability of y_t, and O_t the mean reward of answers that
have the same prefix, some other token in its place, and go on as the policy likes:

    V_t = p V_{t+1} + (1 - p) O_t,   V_T = R,   A_t = V_{t+1} - V_t = (1 - p) (V_{t+1} - O_t)

Only O_t is sampled. This is the difference of two Monte Carlo values with the part they share
computed instead of drawn: a token that is nearly certain needs hardly an answer, and where every
O_t is a mean of independent answers A_t is unbiased. `measured` is A_t, an advantage; `oracle` is
its size alone, a weight.
"""
import math
import typing
from collections.abc import Callable

import torch

from credit.monte_carlo import Places, continuation_rewards
from engine.choices import Metrics, advantage, mitigation
from engine.errors import UserError
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.flags import Flag

Count = typing.Annotated[int, Flag(4, "continuations that leave each undecided token", least=1,
                                   most=10_000)]
Most = typing.Annotated[int, Flag(8, "continuations that leave a token which is a free choice; of "
                                     "the others fewer", least=1, most=10_000)]
Above = typing.Annotated[float, Flag(0.15, "tokens whose 1 - p is above this are measured, the "
                                           "others get credit 0", least=0, most=1)]
SURE = 1e-3  # a token with 1 - p below this is taken to have no credit


@advantage
class measured:
    """Monte Carlo advantage of each undecided token, against continuations that deviate there.

    A token that is not measured gets 0, and the value passes it unchanged. The advantage is a
    difference of rewards, not standardised: most are small beside plain GRPO's. AdamW is invariant
    to a constant factor, unless --max_grad_norm clips or the gradient is near its epsilon.
    """

    def __init__(self, policy: Policy, *, measured_k: Count = 4, measured_above: Above = 0.15):
        refuse_other_temperatures(policy)
        self.k, self.above = measured_k, measured_above
        self.metrics: Metrics = {}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        places = (chance_of_others(rollouts) > self.above).nonzero().tolist()
        credit, self.metrics = credit_at(policy, rollouts, places, [self.k] * len(places))
        return credit


@mitigation
class oracle:
    """|V(after) - V(before)|, measured by Monte Carlo: expensive, a reference for the others.

    Measured as --advantage measured does it, at every token with 1 - p above a thousandth, by
    oracle_k (1 - p) continuations, rounded up. A token of probability p cannot be credited with
    more than (1 - p) of the reward's range, so the others get 0. The sign stays the outcome's, so
    this is no upper bound; that is --advantage measured.
    """

    def __init__(self, policy: Policy, *, oracle_k: Most = 8):
        refuse_other_temperatures(policy)
        self.k = oracle_k
        self.metrics: Metrics = {}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        other_chance = chance_of_others(rollouts)
        places = (other_chance > SURE).nonzero().tolist()
        counts = [math.ceil(self.k * other_chance[b, t].item()) for b, t in places]
        credit, self.metrics = credit_at(policy, rollouts, places, counts)
        return credit.abs()


def refuse_other_temperatures(policy: Policy) -> None:
    if policy.settings.temperature != 1:
        raise UserError(f"--temperature {policy.settings.temperature}: the chance of leaving a "
                        "token is that of temperature 1")


def chance_of_others(rollouts: Rollouts) -> torch.Tensor:
    """(B, T) on the CPU: 1 - p of each token, 0 beyond the mask."""
    return (-torch.expm1(rollouts.log_prob.double()) * rollouts.mask).cpu()


def credit_at(policy: Policy, rollouts: Rollouts, places: Places,
              counts: list[int]) -> tuple[torch.Tensor, Metrics]:
    """(B, T) credit, 0 but at these places (b, t), from so many continuations at each; and what was
    sampled for it."""
    rewards, spent = deviations(policy, rollouts, places, counts)
    others = torch.full(rollouts.mask.shape, float("nan"), dtype=torch.float64)
    for (b, t), reward in zip(places, rewards):
        others[b, t] = reward.mean()
    credit, _ = chain(rollouts, chance_of_others(rollouts), others, torch.zeros_like(others))
    return credit.to(rollouts.log_prob), spent


def deviations(policy: Policy, rollouts: Rollouts, places: Places, counts: list[int],
               progress: Callable[[float], None] = lambda share: None
               ) -> tuple[list[torch.Tensor], Metrics]:
    """Rewards of answers that have another token at each place (b, t) and go on from there."""
    if not counts:
        return [], {}
    ids, groups = rollouts.ids.tolist(), rollouts.group.tolist()
    prefixes, own_tokens = [], []
    for (b, t), count in zip(places, counts):
        prefixes += [(groups[b], tuple(ids[b][:t]))] * count
        own_tokens += [ids[b][t]] * count
    rewards, spent = continuation_rewards(policy, rollouts, prefixes, 1, progress, own_tokens)
    return list(rewards[:, 0].double().cpu().split(counts)), spent


def chain(rollouts: Rollouts, other_chance: torch.Tensor, others: torch.Tensor,
          variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) each: credit, and its variance.

    From the end, where the value is the reward. All is linear in `others`, whose variance is given;
    where `others` is NaN the credit is 0.
    """
    mask, worth = rollouts.mask.cpu(), rollouts.reward.double().cpu()
    credit = torch.zeros(mask.shape, dtype=torch.float64)
    credit_variance, worth_variance = torch.zeros_like(credit), torch.zeros_like(worth)
    for t in range(mask.shape[1] - 1, -1, -1):
        q = other_chance[:, t] * ~others[:, t].isnan()
        credit[:, t] = q * (worth - others[:, t].nan_to_num(0.0))
        credit_variance[:, t] = q.square() * (worth_variance + variance[:, t])
        worth_variance = (1 - q).square() * worth_variance + q.square() * variance[:, t]
        worth = worth - credit[:, t]
    return credit, credit_variance
