"""Training in a world with dials, many policies side by side, each at a learning rate of its own;
and the gradients of single batches."""
import torch

from engine.policy import derived_seed
from grpo import policy_loss
from research.dial.arms import ANSWERS, Arm, Batch
from research.dial.world import Dials, World

AT_ONCE = 2 ** 21  # sampled tokens


class AdamW:
    """As torch.optim.AdamW without decay, of the rows of (S, P), each at its own learning rate."""

    def __init__(self, parameters: torch.Tensor, rates: list[float]):
        self.rates, self.steps = torch.tensor(rates)[:, None], 0
        self.mean, self.square = torch.zeros(2, *parameters.shape)

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient.square()
        spread = (self.square / (1 - 0.999 ** self.steps)).sqrt() + 1e-8
        return -self.rates * self.mean / (1 - 0.9 ** self.steps) / spread


def train(dials: Dials, arm: Arm, seeds: list[int], rates: list[float], steps: int) -> list[float]:
    """Of each pair of seed and rate: the mean of the expected reward over the training."""
    most = max(1, round(AT_ONCE / (dials.tokens * arm.problems * ANSWERS)))
    if len(seeds) > most:
        return [run for start in range(0, len(seeds), most) for run in train(
            dials, arm, seeds[start:start + most], rates[start:start + most], steps)]
    world = World(dials, seeds)
    optimizer, method = AdamW(world.parameters, rates), arm.start and arm.start(world)
    values = []
    for step in range(1, steps + 1):
        gradient, value = gradients(world, arm, method, step)
        world.parameters = world.parameters + optimizer.change(gradient)
        values.append(value)
    with torch.no_grad():
        values.append(world.value(world.after_keys(world.forward(world.parameters)[1])))
    curve = torch.stack(values, 1)
    return ((curve[:, 1:] + curve[:, :-1]) / 2).mean(1).tolist()


def gradients(world: World, arm: Arm, method, step: int,
              draws: list | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, P) of the loss, of a batch of each policy; and the value of each (S,). `draws` are what
    the random numbers follow from, where that is not the seed."""
    parameters = world.parameters.detach().requires_grad_()
    hidden, log_prob = world.forward(parameters)
    to_come = world.after_keys(log_prob)
    value = world.value(to_come)
    if method is None:  # the exact gradient
        loss = -value.sum()
    else:
        with torch.no_grad():
            uniform = random_numbers(world, arm, step, draws or world.seeds)
            sample = world.sample(log_prob, uniform)
        batch = Batch(world, sample, hidden.detach(), log_prob.detach(), to_come.detach(), step)
        credit = by_context(world, sample, method(batch))  # a critic trains itself meanwhile
        # the formula of grpo.py: tokens of one context and symbol have one log-prob
        loss = policy_loss(log_prob, credit, 1.0, 1.0, sample.ids[0].numel())
    gradient, = torch.autograd.grad(loss, parameters)
    return gradient, value.detach()


def random_numbers(world: World, arm: Arm, step: int, draws: list) -> torch.Tensor:
    """(S, B, T): rows of one seed have the same, also where their rates differ."""
    drawn = {}
    for draw in dict.fromkeys(draws):
        generator = torch.Generator().manual_seed(derived_seed("dial batch", draw, step))
        shape = (arm.problems * ANSWERS, world.dials.tokens)
        drawn[draw] = torch.rand(shape, generator=generator)
    return torch.stack([drawn[draw] for draw in draws])


def by_context(world: World, sample, coefficients: torch.Tensor) -> torch.Tensor:
    """(S, B, T) -> (S, U, V): the sum over the tokens of each context and symbol."""
    S, U, V = len(coefficients), len(world.offset), world.dials.vocabulary
    row = torch.arange(S)[:, None, None]
    place = (row * U + sample.context) * V + sample.ids
    total = torch.zeros(S * U * V).index_add(0, place.flatten(), coefficients.flatten())
    return total.view(S, U, V)
