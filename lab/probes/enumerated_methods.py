"""What every weighting and advantage makes of every batch of the enumerated task (enumerated.py).

The functions of --advantage and --mitigation get each possible batch, a single group. exact.py says
what is not listed.
"""
import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from lab.credit.critic import generalised_advantage
from lab.engine.methods import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, checked_credit, make
from lab.engine.errors import UserError
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.probes.enumerated import Batches, EnumeratedTask
from lab.credit.weightings import rescaled_weight

CHECKED = 12  # batches on which one large call has to give what each gives alone
VALUES_KNOWN = ("gae", "vine")  # stand here with values that are exact: critic, one-step, vine


@dataclass
class ComparedMethod:
    """A weighting is paired with plain GRPO's advantage, an advantage with weights of 1."""
    name: str
    function: Callable
    is_weighting: bool

    def numbers(self, rollouts: Rollouts, policy: Policy | SimpleNamespace | None) -> torch.Tensor:
        """(B, T): the method's weights as the loss takes them by default, or its advantages."""
        if self.is_weighting:
            rescale = "none" if self.name in NEVER_RESCALED else "mean"
            return rescaled_weight(self.function, self.name, rollouts, policy, rescale)[0]
        return checked_credit(self.function, f"the advantage {self.name}", rollouts, policy)


@dataclass
class Listed:
    """Numbers (M, G, T) of each method, and the reason for each that has none."""
    values: dict[str, torch.Tensor]
    reasons: dict[str, str]


def list_weights(task: EnumeratedTask, batches: Batches, advantage: torch.Tensor,
                 progress: Callable[[float], None] = lambda share: None,
                 only: Container[str] | None = None) -> Listed:
    """The weights of each --mitigation, rescaled as in training. A weighting may look at
    `advantage`."""
    weightings = {**MITIGATIONS, "oracle": lambda rollouts: rollouts.true_credit.abs()}
    if only is not None:
        weightings = {name: weightings[name] for name in weightings if name in only}
    return on_every_batch(task, batches, weightings, advantage, progress)


def list_advantages(task: EnumeratedTask, batches: Batches, seed: int,
                    progress: Callable[[float], None] = lambda share: None,
                    only: Container[str] | None = None) -> Listed:
    """The advantages of each --advantage that is a function, and of critics whose values are
    known."""
    asked = {}
    for name, chosen in ADVANTAGES.items():
        if name not in VALUES_KNOWN and (only is None or name in only):
            asked[name] = chosen
    listed = on_every_batch(task, batches, asked, None, progress)
    for name, credit in credit_from_values(task, seed).items():
        listed.values[name] = credit[batches.which].double()
    return listed


def on_every_batch(task: EnumeratedTask, batches: Batches, chosen: dict,
                   advantage: torch.Tensor | None, progress: Callable[[float], None]) -> Listed:
    """The numbers of weightings, which are given an advantage; or those of advantages."""
    reasons = {name: "a class, which may keep a state or sample answers"
               for name, one in chosen.items() if inspect.isclass(one)}
    functions = [name for name in chosen if name not in reasons]
    values = {}
    for number, name in enumerate(functions):
        progress(number / len(chosen))
        method = ComparedMethod(name, make(chosen[name], {}, None),
                                is_weighting=advantage is not None)
        try:
            values[name] = numbers_of_all(method, task, batches, advantage).double()
        except Exception as error:  # an idea may need what this task lacks: the note names it
            reasons[name] = f"stops in this task: {error}"
    return Listed(values, reasons)


def numbers_of_all(method: ComparedMethod, task: EnumeratedTask, batches: Batches,
                   advantage: torch.Tensor | None) -> torch.Tensor:
    """(M, G, T): all batches in one call, as problems of a large one, where this gives some of them
    what each has alone; else one after another. A weight where no advantage is may stay 0."""
    (M, G), mask = batches.which.shape, task.rollouts.mask[batches.which]
    generator = torch.Generator().manual_seed(0)

    def rollouts_of(which: torch.Tensor, of: slice | int) -> Rollouts:
        rollouts = replace(rows_of(task.rollouts, which.flatten()), generator=generator)
        if advantage is None:
            return rollouts
        return replace(rollouts, advantage=advantage[of].float().reshape(which.numel(), -1))

    asked = list(range(M))
    if advantage is not None:
        asked = advantage.any(-1).any(-1).nonzero()[:, 0].tolist()
    unused = generator.get_state()
    alone = {}  # the numbers of some batches, each asked by itself
    for m in asked[::max(1, len(asked) // CHECKED)]:
        alone[m] = method.numbers(rollouts_of(batches.which[m], m), None)
    if not torch.equal(generator.get_state(), unused):
        raise UserError("it draws random numbers")
    whole = rollouts_of(batches.which, slice(None))
    whole = replace(whole, group=torch.arange(M).repeat_interleave(G),
                    problems=M * whole.problems, prompt_ids=M * whole.prompt_ids)
    numbers = method.function(whole, None).expand(M * G, mask.shape[-1])
    values = as_loss_takes(method, numbers, mask)
    if all(torch.allclose(values[m], of, rtol=1e-4, atol=1e-5) for m, of in alone.items()):
        return values
    values = torch.zeros(mask.shape)
    for m in asked:
        values[m] = method.function(rollouts_of(batches.which[m], m), None)
    return as_loss_takes(method, values, mask)


def as_loss_takes(method: ComparedMethod, numbers: torch.Tensor,
                  mask: torch.Tensor) -> torch.Tensor:
    """A method's numbers (M, G, T) as the loss takes them: 0 beyond the mask, weights with mean 1
    over each batch."""
    numbers = numbers.float().view(mask.shape).masked_fill(~mask, 0)
    if not method.is_weighting or method.name in NEVER_RESCALED:
        return numbers
    is_zero = ~numbers.any(-1).any(-1)[:, None, None]
    numbers = torch.where(is_zero, mask.float(), numbers)
    rescale = mask.sum((1, 2)) / numbers.sum((1, 2))  # (M,)
    return numbers * rescale[:, None, None]


def rows_of(rollouts: Rollouts, rows: torch.Tensor) -> Rollouts:
    """A group of these answers. Hidden states and attention come from one look at all answers."""
    seen = rollouts.forward.look(rollouts, attention=True)

    def look(batch: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        return {name: value[rows] for name, value in seen.items()}

    return replace(rollouts.of_rows(rows), forward=SimpleNamespace(look=look))


def credit_from_values(task: EnumeratedTask, seed: int) -> dict[str, torch.Tensor]:
    """(n, T) the advantages of critics and of vine, with exact values.

    A critic that is right knows V, a wrong one has a random number for each index. The segments of
    vine are two tokens long.
    """
    rollouts, right, T = task.rollouts, task.worth, task.node.shape[1]
    start = torch.arange(T) // 2 * 2  # of each token's segment
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(right.shape[1], generator=generator).expand_as(right)

    def critic(value: torch.Tensor, trust: float) -> torch.Tensor:
        return generalised_advantage(value[:, :-1].float(), rollouts.reward, rollouts.mask, 1.0,
                                     trust)

    end = (start + 2).clamp(max=T)
    of_segment = right[:, end] - right[:, start]
    return {
        "critic": critic(right, 1.0),
        "one-step": critic(right, 0.0),
        "vine": of_segment * rollouts.mask,
        "wrong critic": critic(wrong, 1.0),
        "wrong, one-step": critic(wrong, 0.0)}
