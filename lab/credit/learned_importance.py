"""Weights from attention pooling: a small network learns to predict an answer's advantage from a
weighted mean of its hidden states, and these weights are used in the loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from lab.credit.critic import Trained
from lab.engine.methods import Metrics, mitigation
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.declared import CountOrNone

NET_RATE = 1e-3  # the learning rate of the network. All runs here had this number


class ImportanceNet(nn.Module):
    """A positive importance of each hidden state, and a linear head on their weighted mean."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 32), nn.Linear(32, 1)
        self.read = nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.0
            nn.init.normal_(parameter, std=std, generator=generator)

    def importance(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T)"""
        return F.softplus(self.outer(F.silu(self.inner(hidden)))).squeeze(-1)


@mitigation
class learned_importance:
    """A small network gives each hidden state a weight. It learns to predict an answer's advantage
    from the weighted mean of the hidden states (attention pooling), and the loss uses its weights.

    For the first importance_warmup steps the weight is 1. A large weight means that the token helps
    to predict the advantage, not that it causes it.
    """

    def __init__(self, policy: Policy, *, importance_warmup: CountOrNone = 10):
        net = ImportanceNet(policy.model.config.hidden_size, policy.settings.seed)
        self.net = Trained(net, NET_RATE, policy.model.device)
        self.state_dict, self.load_state_dict = self.net.state_dict, self.net.load_state_dict
        self.warmup = importance_warmup
        self.metrics: Metrics = {"importance_loss": None}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        with torch.no_grad():
            weight = self.net.module.importance(rollouts.hidden)
        with torch.enable_grad():
            loss = self.loss(rollouts)
        self.metrics = {"importance_loss": loss.item()}
        self.net.gradient_step(loss)
        return weight if rollouts.step > self.warmup else torch.ones_like(weight)

    def loss(self, rollouts: Rollouts) -> torch.Tensor:
        importance = self.net.module.importance(rollouts.hidden) * rollouts.mask
        total = importance.sum(1, keepdim=True).clamp(min=1e-6)
        pooled = torch.einsum("bt,btd->bd", importance, rollouts.hidden) / total
        predicted: torch.Tensor = self.net.module.read(pooled).squeeze(-1)
        has_tokens = rollouts.length > 0
        # one number for each answer, also if the advantages of its tokens differ
        advantage = (rollouts.advantage * rollouts.mask).sum(1) / rollouts.length.clamp(min=1)
        return (predicted - advantage)[has_tokens].square().mean()
