"""PPO's critic: a learned value V(prefix) at every token, trained beside the policy.

    head    a linear function of the policy's hidden state, which is detached
    trunk   a network of its own, as in PPO: a copy of the model, in float32 with AdamW's state,
            which takes 16 bytes a parameter
"""
import copy
import typing
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from grpo import states_before
from lab.engine.methods import Metrics, advantage
from lab.engine.errors import UserError, refuse_undefined
from lab.engine.lora import rank_of
from lab.engine.optimizer import AdamW
from lab.engine.policy import Policy
from lab.engine.rollouts import Problem, Rollouts
from lab.engine.declared import Flag
from lab.engine.model import Qwen2, tensors_on

Gamma = typing.Annotated[float, Flag(1.0, "discount of later rewards", least=0, most=1)]
Lambda = typing.Annotated[float, Flag(1.0, "lambda of GAE: at 1 the rest of the answer is judged "
                                           "by its reward alone, at 0 by the critic alone",
                                      least=0, most=1)]
Critic = typing.Annotated[str, Flag("head", "head: a linear function of the policy's hidden "
                                            "states. trunk: a network of its own, which begins as "
                                            "a copy of the model", choices=("head", "trunk"))]
HEAD = (lambda s: s.critic == "head", "--critic head")
HeadRate = typing.Annotated[float, Flag(1e-2, "learning rate of the head", above=0, most=10,
                                        requires=HEAD)]
Process = typing.Annotated[float, Flag(0.0, "reward that is paid where a right step of the "
                                            "reasoning ends", least=0, most=1000)]
TRUNK_RATE = 1e-3  # the learning rate of a trunk. All runs here had this number
# A batch is cut into 8 parts. The critic takes a step on each, and keeps only one in memory.
PARTS = 8
Module = typing.TypeVar("Module", bound=nn.Module)


class Trained(typing.Generic[Module]):
    """A small module that is trained beside the policy, with an AdamW of its own. `state_dict`
    contains both, so that a resumed run forgets nothing."""

    def __init__(self, module: Module, learning_rate: float, device: torch.device):
        self.module = module.to(device)
        self.optimizer = AdamW(module.parameters(), learning_rate)
        self.parameters = dict(self.module.named_parameters())

    def gradient_step(self, loss: torch.Tensor) -> None:
        self.module.zero_grad()
        loss.backward()
        self.optimizer.step()
        refuse_undefined("after its update, what is trained beside the policy is",
                         *self.module.parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict() | self.optimizer.tensors(self.parameters)

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict({name: tensors[name] for name in self.parameters})
        self.optimizer.put_back(self.parameters, tensors)


class Head(nn.Linear):
    """A linear function of the hidden state that predicted the token. The state is normalised, so
    that the learning rate does not depend on the model's scale."""

    def __init__(self, model: Qwen2):
        super().__init__(model.config.hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
        """(tokens of these rows,): the value before each token."""
        states = rollouts.hidden[rows][rollouts.mask[rows]]
        value: torch.Tensor = self(F.normalize(states, dim=-1))
        return value.squeeze(-1)


class Trunk(nn.Module):
    """A copy of the model's layers and a linear value head."""

    def __init__(self, model: Qwen2):
        super().__init__()
        if rank_of(model):
            raise UserError("--critic trunk copies the model's layers and trains all of their "
                            "numbers, which --lora does not: use --critic head, or --lora 0")
        self.decoder = copy.deepcopy(model.model).float().requires_grad_()
        self.read = Head(model)

    def values(self, rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
        """(tokens of these rows,): the value before each token."""
        with tensors_on(rollouts.ids.device):
            states = states_before(self.decoder, rollouts, rows)
        value: torch.Tensor = self.read(states.float())
        return value.squeeze(-1)


@advantage
class gae:
    """Generalised advantage estimation with a learned critic, as in PPO.

    No gradient flows from the critic's loss to the policy.

    With --process_reward (arXiv 2305.20050) a reward is paid where a right step of the reasoning
    ends. It comes in addition to the reward of the answer, which is paid at its last token, or to
    those of its turns. At gamma = lambda = 1 the advantage is the sum of the rewards from the token
    on, minus the critic's value. So every right step pays, whether it is needed or not, and an
    answer with many steps gets most.
    """

    def __init__(self, policy: Policy, *, gamma: Gamma = 1.0, gae_lambda: Lambda = 1.0,
                 critic: Critic = "head", critic_lr: HeadRate = 1e-2,
                 process_reward: Process = 0.0):
        if process_reward and not hasattr(policy.task, "right_steps"):
            raise UserError(f"--process_reward {process_reward} needs a task with a method "
                            "right_steps, which says where right steps end, and "
                            f"--task {policy.settings.task} has none")
        self.gamma, self.gae_lambda, self.process_reward = gamma, gae_lambda, process_reward
        is_head = critic == "head"
        module = Head(policy.model) if is_head else Trunk(policy.model)
        self.critic = Trained(module, critic_lr if is_head else TRUNK_RATE, policy.model.device)
        self.metrics: Metrics = {"explained_variance": None, "value_loss": None}
        self.state_dict, self.load_state_dict = self.critic.state_dict, self.critic.load_state_dict

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        """Compute advantages with the critic as it is; then train the critic on this batch, by
        eight steps of regression."""
        mask, values = rollouts.mask, self.critic.module.values
        value = torch.zeros_like(rollouts.log_prob)
        with torch.no_grad():
            for rows in torch.arange(len(mask), device=mask.device).chunk(PARTS):
                of_rows = torch.zeros_like(value[rows])
                of_rows[mask[rows]] = values(rollouts, rows)
                value[rows] = of_rows
        paid = rollouts.paid
        if self.process_reward:
            paid = paid + self.process_reward * steps_ended(rollouts, policy)
        advantage = generalised_advantage(value, paid, mask, self.gamma, self.gae_lambda)
        target = advantage + value
        self.metrics = quality((target - value)[mask], target[mask])
        order = torch.randperm(len(mask), generator=rollouts.generator).to(mask.device)
        for rows in order.chunk(PARTS):
            error = values(rollouts, rows) - target[rows][mask[rows]]
            self.critic.gradient_step(error.square().mean())
        return advantage


def quality(error: torch.Tensor, target: torch.Tensor) -> Metrics:
    """Metrics of how well the critic predicts the targets, before it is trained on them."""
    explained, variance = None, target.var(correction=0)
    if variance > 0:
        explained = (1 - error.var(correction=0) / variance).item()
    return {"explained_variance": explained, "value_loss": error.square().mean().item()}


def steps_ended(rollouts: Rollouts, policy: Policy) -> torch.Tensor:
    """(B, T): how many right steps of the reasoning end with the token."""
    right_steps: Callable[[Problem, list[str]], list[int]] = getattr(policy.task, "right_steps")
    ended = torch.zeros(rollouts.mask.shape)
    for row, (group, texts) in enumerate(zip(rollouts.group.tolist(), rollouts.texts)):
        for t in right_steps(rollouts.problems[group], texts):
            ended[row, t] += 1
    return ended.to(rollouts.mask.device)


def generalised_advantage(value: torch.Tensor, paid: torch.Tensor, mask: torch.Tensor,
                          gamma: float, gae_lambda: float) -> torch.Tensor:
    """GAE (1506.02438): A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t.

    `paid` (B, T) is r_t. After an answer's last token the value of what follows is 0, also for an
    answer that was cut off by the limit. With gamma = lambda = 1 A_t is what is paid from t on,
    minus V_t. What an environment wrote is no step: after a turn's last token the next turn's first
    one follows.
    """
    B, T = mask.shape
    advantage = torch.zeros_like(value)
    following = torch.zeros(B, device=value.device)   # A_{t+1}
    next_value = torch.zeros(B, device=value.device)  # V_{t+1}
    for t in range(T - 1, -1, -1):
        delta = paid[:, t] + gamma * next_value - value[:, t]
        following = torch.where(mask[:, t], delta + gamma * gae_lambda * following, following)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        advantage[:, t] = following * mask[:, t]
    return advantage
