"""Credit measured by Monte Carlo: the value of the prefix with a token, minus the value without it.

    A_t = V(prefix and y_t) - V(prefix),   V(prefix) = E[reward | prefix]

It is estimated from the end of the answer. Let p be the probability of y_t, and O_t the mean reward
of answers that have the same prefix and then another token than y_t, continued by the policy:

    V_t = p V_{t+1} + (1 - p) O_t,   V_T = R,   A_t = V_{t+1} - V_t = (1 - p) (V_{t+1} - O_t)

Only O_t is sampled. A_t is the difference of two values. The answers that go on with y_t are a part
of both, and this part is computed instead of sampled. So a token that is nearly certain needs
hardly any answers, and if every O_t is a mean of independent answers, A_t is unbiased.
"""
import typing

import torch

from lab.credit.monte_carlo import Positions, continuation_rewards
from lab.engine.methods import Metrics, advantage
from lab.engine.errors import UserError
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts, double
from lab.engine.declared import Flag

Count = typing.Annotated[int, Flag(4, "how many answers with another token in its place are "
                                      "sampled for each token that is measured", least=1,
                                   most=10_000)]
Above = typing.Annotated[float, Flag(0.15, "only tokens with 1 - p above this are measured; the "
                                           "others get credit 0", least=0, most=1)]


@advantage
class measured:
    """The credit of each token that the model was unsure of, measured by Monte Carlo: the expected
    reward after the token minus that before it. For this, answers are sampled that begin in the
    same way and then have another token.

    A token that is not measured gets 0, as if the expected reward were the same before and after
    it. The advantage is a difference of rewards and is not standardised, so most advantages are
    smaller than plain GRPO's. A constant factor makes no difference to AdamW, unless
    --max_grad_norm clips the gradient or the gradient is as small as AdamW's epsilon.
    """

    def __init__(self, policy: Policy, *, measured_k: Count = 4, measured_above: Above = 0.15):
        refuse_other_temperatures(policy)
        self.k, self.above = measured_k, measured_above
        self.metrics: Metrics = {}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        positions = (probability_of_others(rollouts) > self.above).nonzero().tolist()
        counts = [self.k] * len(positions)
        credit, self.metrics = credit_at(policy, rollouts, positions, counts)
        return credit


def refuse_other_temperatures(policy: Policy) -> None:
    s = policy.settings
    if s.temperature != 1:
        raise UserError(f"--temperature {s.temperature}: measured credit needs the probabilities "
                        "of temperature 1")


def probability_of_others(rollouts: Rollouts) -> torch.Tensor:
    """(B, T) on the CPU: the probability of another token, 1 - p; 0 beyond the mask."""
    return -torch.expm1(double(rollouts.log_prob)) * rollouts.mask.cpu()


def credit_at(policy: Policy, rollouts: Rollouts, positions: Positions,
              counts: list[int]) -> tuple[torch.Tensor, Metrics]:
    """(B, T) the credit at these positions (b, t), from `counts` continuations at each, and 0
    elsewhere; and how much was sampled for it."""
    rewards, spent = deviations(policy, rollouts, positions, counts)
    others = torch.full(rollouts.mask.shape, float("nan"), dtype=torch.float64)
    for (b, t), reward in zip(positions, rewards):
        others[b, t] = reward.mean()
    credit, _ = chain(rollouts, probability_of_others(rollouts), others, torch.zeros_like(others))
    return credit.to(rollouts.log_prob), spent


def deviations(policy: Policy, rollouts: Rollouts, positions: Positions, counts: list[int]
               ) -> tuple[list[torch.Tensor], Metrics]:
    """For each position (b, t) the rewards of sampled answers that deviate there: they have another
    token and are then continued by the policy. The second result says how much was sampled."""
    if not counts:
        return [], {}
    ids, groups = rollouts.ids.tolist(), rollouts.group.tolist()
    prefixes, own_tokens = [], []
    for (b, t), count in zip(positions, counts):
        prefixes += [(groups[b], tuple(ids[b][:t]))] * count
        own_tokens += [ids[b][t]] * count
    rewards, spent = continuation_rewards(policy, rollouts, prefixes, 1, without=own_tokens)
    return list(double(rewards[:, 0]).split(counts)), spent


def chain(rollouts: Rollouts, other_probability: torch.Tensor, others: torch.Tensor,
          variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) each: the credit, and its variance, by the recursion at the top of this file.

    It starts from the end, where the value is the reward. `others` are the O_t, and `variance` is
    their variance. An O_t that was not measured is NaN, and there the credit is 0. The credit is
    linear in the O_t, so its variance follows from theirs.
    """
    mask, worth = rollouts.mask.cpu(), double(rollouts.reward)
    credit = torch.zeros(mask.shape, dtype=torch.float64)
    credit_variance, worth_variance = torch.zeros_like(credit), torch.zeros_like(worth)
    for t in range(mask.shape[1] - 1, -1, -1):
        # here `worth` (B,) is V_{t+1}. q is 1 - p, or 0 if O_t was not measured
        is_measured = ~others[:, t].isnan()
        q = other_probability[:, t] * is_measured
        credit[:, t] = q * (worth - others[:, t].nan_to_num(0.0))
        credit_variance[:, t] = q.square() * (worth_variance + variance[:, t])
        worth_variance = (1 - q).square() * worth_variance + q.square() * variance[:, t]
        worth = worth - credit[:, t]
    return credit, credit_variance
