"""Training in a synthetic task, many policies at once, each at a learning rate of its own."""
from collections.abc import Callable

import torch

from engine.policy import derived_seed
from grpo import policy_loss
from lab.dial.arms import ANSWERS, QUESTIONS, Batch, SyntheticArm
from lab.dial.task import Sample, SyntheticTask, TaskSpec

AT_ONCE = 2 ** 21  # sampled tokens
Coefficients = Callable[[Batch], torch.Tensor]  # weight times advantage (S, B, T)


class AdamWOfRows:
    """torch.optim.AdamW without decay, for the rows of (S, P), each at its own learning rate."""

    def __init__(self, parameters: torch.Tensor, rates: list[float]):
        self.rates, self.steps = torch.tensor(rates)[:, None], 0
        self.mean, self.square = torch.zeros(2, *parameters.shape)

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient.square()
        spread = (self.square / (1 - 0.999 ** self.steps)).sqrt() + 1e-8
        return -self.rates * self.mean / (1 - 0.9 ** self.steps) / spread


def train_policies(spec: TaskSpec, arm: SyntheticArm, seeds: list[int], rates: list[float],
                   steps: int) -> list[float]:
    """The mean of the expected reward over the training, for each pair of seed and rate."""
    most = max(1, round(AT_ONCE / (spec.tokens * QUESTIONS * ANSWERS)))
    means = []
    for start in range(0, len(seeds), most):
        part = slice(start, start + most)
        means += train_at_once(spec, arm, seeds[part], rates[part], steps)
    return means


def train_at_once(spec: TaskSpec, arm: SyntheticArm, seeds: list[int], rates: list[float],
                  steps: int) -> list[float]:
    task = SyntheticTask(spec, seeds)
    optimizer, method = AdamWOfRows(task.parameters, rates), arm.start(task)
    values = []
    for step in range(1, steps + 1):
        gradient, value = batch_gradients(task, arm, method, step)
        task.parameters = task.parameters + optimizer.change(gradient)
        values.append(value)
    with torch.no_grad():
        values.append(task.value(task.after_keys(task.forward(task.parameters)[1])))
    curve = torch.stack(values, 1)
    return ((curve[:, 1:] + curve[:, :-1]) / 2).mean(1).tolist()


def batch_gradients(task: SyntheticTask, arm: SyntheticArm, method: Coefficients, step: int
                    ) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss's gradient (S, P) on a batch of each policy, and each policy's value (S,)."""
    parameters = task.parameters.detach().requires_grad_()
    hidden, log_prob = task.forward(parameters)
    to_come = task.after_keys(log_prob)
    value = task.value(to_come)
    with torch.no_grad():
        sample = task.sample(log_prob, random_numbers(task, step))
    batch = Batch(task, sample, hidden.detach(), log_prob.detach(), to_come.detach(), step)
    credit = by_context(task, sample, method(batch))  # a critic trains itself meanwhile
    # the formula of grpo.py: tokens of one context and symbol have one log-prob
    loss = policy_loss(log_prob, credit, 1.0, 1.0, sample.ids[0].numel())
    gradient, = torch.autograd.grad(loss, parameters)
    return gradient, value.detach()


def random_numbers(task: SyntheticTask, step: int) -> torch.Tensor:
    """(S, B, T): rows of one seed have the same, also where their rates differ."""
    drawn = {}
    for seed in dict.fromkeys(task.seeds):
        generator = torch.Generator().manual_seed(derived_seed("dial batch", seed, step))
        shape = (QUESTIONS * ANSWERS, task.spec.tokens)
        drawn[seed] = torch.rand(shape, generator=generator)
    return torch.stack([drawn[seed] for seed in task.seeds])


def by_context(task: SyntheticTask, sample: Sample, coefficients: torch.Tensor) -> torch.Tensor:
    """(S, B, T) -> (S, U, V): the sum over the tokens of each context and symbol."""
    S, U, V = len(coefficients), len(task.offset), task.spec.vocabulary
    row = torch.arange(S)[:, None, None]
    cell = (row * U + sample.context) * V + sample.ids
    total = torch.zeros(S * U * V).index_add(0, cell.flatten(), coefficients.flatten())
    return total.view(S, U, V)
