"""The other answers to "compared with what?": a value for every prefix of an answer, learned or sampled.

    gae    V(prefix) is a linear function of the policy's own hidden state, trained beside it (PPO's critic)
    vine   V(prefix) is the mean reward of fresh answers that go on from there (VinePPO, 2410.01679)

Both have the form of a mitigation with state: made once a run, called with each batch, saved in checkpoints.
A critic of its own size, the usual PPO, would be a second model in memory; the head here is one number for
each hidden unit, at the price of features that are trained for something else.
"""
import torch
import torch.nn as nn

from credit.monte_carlo import vine
from credit.trained import Trained
from engine.rollouts import Rollouts


def generalised_advantage(value: torch.Tensor, reward: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """GAE (1506.02438): delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}.

    The reward (B,) comes with the last token, and nothing is worth anything after it: an answer cut off by the
    limit ends there like any other. gamma = lam = 1 gives R - V_t.
    """
    B, T = mask.shape
    advantage, following, value = torch.zeros_like(value), torch.zeros(B, device=value.device), value * mask
    last = mask.sum(1) - 1
    for t in range(T - 1, -1, -1):
        next_value = value[:, t + 1] if t + 1 < T else 0.0
        delta = reward * (last == t) + gamma * next_value - value[:, t]
        following = (delta + gamma * lam * following) * mask[:, t]
        advantage[:, t] = following
    return advantage


class gae:
    """A critic: linear in the direction of the hidden state that predicted the token (its length would only make the
    learning rate depend on the model). The critic's loss never reaches the policy."""

    def __init__(self, lab):
        s = lab.settings
        head = nn.Linear(lab.model.config.hidden_size, 1)
        nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
        self.gamma, self.lam = s.gamma, s.gae_lambda
        self.critic, self.metrics = Trained(head, s.critic_lr, lab.model.device), {}

    def __call__(self, rollouts: Rollouts, lab) -> torch.Tensor:
        """Advantages by the critic as it was; then it learns from this batch, in eight steps."""
        state = nn.functional.normalize(rollouts.hidden, dim=-1)
        with torch.no_grad():
            value = self.critic.module(state).squeeze(-1)
        advantage = generalised_advantage(value, rollouts.reward, rollouts.mask, self.gamma, self.lam)
        target, mask = advantage + value, rollouts.mask
        error, spread = (target - value)[mask].var(correction=0), target[mask].var(correction=0)
        self.metrics = {"explained_variance": (1 - error / spread).item() if spread > 0 else None,
                        "value_loss": (target - value)[mask].square().mean().item()}
        order = torch.randperm(len(mask), generator=rollouts.generator).to(mask.device)
        for rows in order.chunk(8):
            predicted = self.critic.module(state[rows][mask[rows]]).squeeze(-1)
            self.critic.descend((predicted - target[rows][mask[rows]]).square().mean())
        return advantage

    def state_dict(self):
        return self.critic.state_dict()

    def load_state_dict(self, tensors):
        self.critic.load_state_dict(tensors)


CRITICS = {"gae": gae, "vine": vine}
