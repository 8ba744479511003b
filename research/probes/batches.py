"""Every group of answers that training could draw in the small world, and what methods make of it.

The functions of --advantage and --mitigation are given each possible batch, a single group, and
the gradient's mean and covariance are sums over all of them. exact.py says what is not listed.
"""
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from credit.critic import generalised_advantage
from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED
from engine.errors import UserError
from engine.rollouts import Rollouts
from harness.load import make
from research.probes.methods import Method
from research.probes.world import World

CHECKED = 12  # batches on which one large call has to give what each gives alone
VALUES_KNOWN = ("gae", "vine")  # stand here with values that are exact: critic, one-step, vine


@dataclass
class Batches:
    """Every group of G answers that can be drawn, order aside."""
    which: torch.Tensor         # (M, G) the answers' numbers
    probability: torch.Tensor   # (M,)

    @classmethod
    def all(cls, world: World, G: int) -> "Batches":
        which = list(itertools.combinations_with_replacement(range(len(world.probability)), G))
        orders = torch.tensor([math.factorial(G) / math.prod(map(math.factorial, Counter(
            group).values())) for group in which])  # that a group can come in
        which = torch.tensor(which)
        return cls(which, orders.double() * world.probability[which].prod(1))


@dataclass
class Listed:
    """Numbers (M, G, T) of each method, and the reason for each that has none."""
    values: dict[str, torch.Tensor]
    reasons: dict[str, str]


def list_weights(world: World, batches: Batches, advantage: torch.Tensor,
                 progress: Callable[[float], None] = lambda share: None,
                 only: Container[str] | None = None) -> Listed:
    """Of each --mitigation, rescaled as in training. A weighting may look at `advantage`."""
    weightings = {**MITIGATIONS, "oracle": lambda rollouts: rollouts.true_credit.abs()}
    weightings = {name: chosen for name, chosen in weightings.items()
                  if only is None or name in only}
    return on_every_batch(world, batches, weightings, advantage, progress)


def list_advantages(world: World, batches: Batches, seed: int,
                    progress: Callable[[float], None] = lambda share: None,
                    only: Container[str] | None = None) -> Listed:
    """Of each --advantage that is a function, and of critics whose values are known."""
    functions = {name: chosen for name, chosen in ADVANTAGES.items() if name not in VALUES_KNOWN
                 and (only is None or name in only)}
    listed = on_every_batch(world, batches, functions, None, progress)
    known = {name: credit[batches.which].double()
             for name, credit in credit_from_values(world, seed).items()}
    return Listed(listed.values | known, listed.reasons)


def on_every_batch(world: World, batches: Batches, chosen: dict, advantage: torch.Tensor | None,
                   progress: Callable[[float], None]) -> Listed:
    """Weightings, which are given an advantage; or advantages."""
    reasons = {name: "a class" for name, one in chosen.items() if inspect.isclass(one)}
    values = {}
    for number, name in enumerate(name for name in chosen if name not in reasons):
        progress(number / len(chosen))
        method = Method(name, make(chosen[name], {}, None), advantage is not None)
        try:
            values[name] = numbers_of_all(method, world, batches, advantage).double()
        except Exception as error:  # an idea may need what this world lacks: the note names it
            reasons[name] = f"stops in this world: {error}"
    return Listed(values, reasons)


def numbers_of_all(method: Method, world: World, batches: Batches, advantage: torch.Tensor | None
                   ) -> torch.Tensor:
    """(M, G, T): all batches in one call, as problems of a large one, where this gives some of them
    what each has alone; else one after another. A weight where no advantage is may stay 0."""
    (M, G), mask = batches.which.shape, world.rollouts.mask[batches.which]
    generator = torch.Generator().manual_seed(0)

    def rollouts_of(which: torch.Tensor, of: slice | int) -> Rollouts:
        rollouts = replace(rows_of(world.rollouts, which.flatten()), generator=generator)
        if advantage is None:
            return rollouts
        return replace(rollouts, advantage=advantage[of].float().reshape(which.numel(), -1))

    asked = range(M) if advantage is None else advantage.any(-1).any(-1).nonzero()[:, 0].tolist()
    unused = generator.get_state()
    alone = {m: method.numbers(rollouts_of(batches.which[m], m), None)
             for m in asked[::max(1, len(asked) // CHECKED)]}
    if not torch.equal(generator.get_state(), unused):
        raise UserError("it draws random numbers")
    whole = rollouts_of(batches.which, slice(None))
    whole = replace(whole, group=torch.arange(M).repeat_interleave(G),
                    problems=M * whole.problems, prompt_ids=M * whole.prompt_ids)
    values = as_loss_takes(method, method.function(whole, None).expand(M * G, mask.shape[-1]), mask)
    if all(torch.allclose(values[m], of, rtol=1e-4, atol=1e-5) for m, of in alone.items()):
        return values
    values = torch.zeros(mask.shape)
    for m in asked:
        values[m] = method.function(rollouts_of(batches.which[m], m), None)
    return as_loss_takes(method, values, mask)


def as_loss_takes(method: Method, numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a method returned (M, G, T): 0 beyond the mask, weights of mean 1 over each batch."""
    numbers = numbers.float().view(mask.shape).masked_fill(~mask, 0)
    if not method.is_weighting or method.name in NEVER_RESCALED:
        return numbers
    is_zero = ~numbers.any(-1).any(-1)[:, None, None]
    numbers = torch.where(is_zero, mask.float(), numbers)
    return numbers * (mask.sum((1, 2)) / numbers.sum((1, 2)))[:, None, None]


def rows_of(rollouts: Rollouts, rows: torch.Tensor) -> Rollouts:
    """A group of these answers. Hidden states and attention come from one look at all answers."""
    seen = rollouts.forward.look(rollouts, attention=True)

    def look(batch: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        return {name: value[rows] for name, value in seen.items()}

    return replace(rollouts.of_rows(rows), forward=SimpleNamespace(look=look))


def credit_from_values(world: World, seed: int) -> dict[str, torch.Tensor]:
    """(n, T) of critics and of vine, with values without noise.

    A critic that is right knows V, a wrong one has a random number for each index. The segments of
    vine are two tokens long.
    """
    rollouts, right, T = world.rollouts, world.worth, world.node.shape[1]
    start = torch.arange(T) // 2 * 2  # of each token's segment
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(right.shape[1], generator=generator).expand_as(right)

    def critic(value: torch.Tensor, trust: float) -> torch.Tensor:
        return generalised_advantage(value[:, :-1].float(), rollouts.reward, rollouts.mask, 1.0,
                                     trust)

    return {"critic": critic(right, 1.0), "one-step": critic(right, 0.0),
            "vine": (right[:, (start + 2).clamp(max=T)] - right[:, start]) * rollouts.mask,
            "wrong critic": critic(wrong, 1.0), "wrong, one-step": critic(wrong, 0.0)}


@dataclass
class Estimator:
    """What a batch's gradient is on average, and how it scatters."""
    mean: torch.Tensor      # (P,)
    variance: float         # trace of the covariance

    def against(self, true: torch.Tensor) -> dict[str, float]:
        size = self.mean.norm().item()
        along = (self.mean @ true / true.norm()).item()
        is_zero = size < 1e-9 * true.norm().item()
        return {"bias": ((self.mean - true).norm() / true.norm()).item(),
                "cosine": math.nan if is_zero else along / size,
                "noise": math.inf if is_zero or along <= 0 else self.variance / along ** 2}


def estimator(world: World, batches: Batches, factor: torch.Tensor) -> Estimator:
    """Of  sum factor * grad log pi  over a batch's tokens, `factor` being (M, G, T). A batch is a
    vector over the choices, of which there are few."""
    mask = world.rollouts.mask[batches.which]
    vectors = torch.zeros(len(batches.which), len(world.score), dtype=torch.float64)
    vectors.scatter_add_(1, world.node[batches.which].flatten(1), (factor * mask).flatten(1))
    mean = batches.probability @ vectors
    second = vectors.T @ (batches.probability[:, None] * vectors)
    gram = world.score @ world.score.T
    return Estimator(mean @ world.score, ((second * gram).sum() - mean @ gram @ mean).item())
