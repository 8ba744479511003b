"""Every group of answers that training could draw in the small world, and what arms make of it.

The functions of --advantage and --mitigation are given each possible batch, a single group. What is
a function of the batch is listed. What draws random numbers, or is a class (it may keep a state, or
sample answers), is not: tables show n/a, and a note gives the reason. A class can have a static
method listed(tokens) with the numbers that stand for it here.
"""
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch

from credit.belief import credit_of_beliefs, thought_lengths
from credit.critic import generalised_advantage
from credit.monte_carlo import segment_starts
from credit.weight import token_weight
from harness.checked import call_choice
from harness.registry import make
from engine.rollouts import Rollouts
from research.probes.arms import choices, rescaling
from research.probes.world import ONE, OPENING, PROMPT, World

IS_A_CLASS = "(made once a run: it may keep a state, or sample answers of its own)"
DRAWS = "(draws random numbers)"
# stand here with values that are exact: critic, one-step, vine, hindsight, belief
VALUES_KNOWN = ("gae", "vine", "hindsight", "belief")
FLOOR = 0.01  # added to V in a logarithm: of a reward that is out of reach it has none


@dataclass
class Batches:
    """Every group of G answers that can be drawn, order aside."""
    which: torch.Tensor         # (M, G) the answers' numbers
    probability: torch.Tensor   # (M,)

    @classmethod
    def all(cls, world: World, G: int) -> "Batches":
        which = list(itertools.combinations_with_replacement(range(len(world.probability)), G))
        orders = torch.tensor([number_of_orders(group) for group in which])
        which = torch.tensor(which)
        return cls(which, orders.double() * world.probability[which].prod(1))


def number_of_orders(group: tuple[int, ...]) -> float:
    repeats = [math.factorial(count) for count in Counter(group).values()]
    return math.factorial(len(group)) / math.prod(repeats)


@dataclass
class Listed:
    """Numbers (M, G, T) of each arm, and the reason for each arm that has none."""
    names: list[str]
    values: dict[str, torch.Tensor]
    reasons: dict[str, str]

    def note(self, without=()) -> str:
        """Which arms have no numbers, and why."""
        names = {}
        for name, reason in self.reasons.items():
            if name not in without:
                names.setdefault(reason, []).append(name)
        return "n/a: " + "; ".join(f"{', '.join(of)} {reason}" for reason, of in names.items())


def rows_of(rollouts: Rollouts, rows: torch.Tensor, group: torch.Tensor) -> Rollouts:
    """A batch of these answers. Hidden states and attention come from one look at all answers."""
    of_rows = {}
    for name, value in vars(rollouts).items():
        if torch.is_tensor(value):
            of_rows[name] = value[rows]
    for name in ("texts", "responses"):
        of_rows[name] = [getattr(rollouts, name)[i] for i in rows.tolist()]
    seen = rollouts.forward.look(rollouts, attention=True)

    def look(batch, attention=False):
        return {name: value[rows] for name, value in seen.items()}

    questions = int(group.max()) + 1
    scores = {name: value[rows] for name, value in rollouts.scores.items()}
    return replace(rollouts, **{**of_rows, "group": group}, scores=scores,
                   problems=[None] * questions, prompt_ids=[PROMPT] * questions,
                   forward=SimpleNamespace(look=look))


def list_weights(world: World, batches: Batches, advantage: torch.Tensor,
                 progress=lambda share: None) -> Listed:
    """Of each --mitigation, rescaled as in training. A weighting may look at `advantage`."""
    functions, reasons = {}, {}
    for name, function in choices()[0].items():
        weigh = weighting(world, name, function)
        if weigh is None:
            reasons[name] = IS_A_CLASS
        else:
            functions[name] = partial(rescaled, name, weigh)
    listed = on_every_batch(world, batches, functions, advantage, progress)
    return Listed(list(choices()[0]), listed.values, reasons | listed.reasons)


def weighting(world: World, name: str, function) -> Callable | None:
    """(tokens, rows) -> weights. None for a class, unless it has `listed(tokens)`."""
    if name == "oracle":  # its credit is known here
        return lambda tokens, rows: world.credit[rows].abs().float()
    return of_tokens_alone(function)


def of_tokens_alone(function) -> Callable | None:
    if inspect.isclass(function):
        listed = getattr(function, "listed", None)
        return listed and (lambda tokens, rows: listed(tokens))
    made = make(function, {}, None)
    return lambda tokens, rows: made(tokens, None)


def rescaled(name: str, weigh: Callable, tokens: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    def mitigation(tokens, lab):
        return weigh(tokens, rows)

    return token_weight(mitigation, name, tokens, None, rescaling(name))[0]


def list_advantages(world: World, batches: Batches, seed: int,
                    progress=lambda share: None) -> Listed:
    """Of each --advantage that is a function, and of critics whose values are known."""
    functions, reasons = {}, {}
    for name, function in choices()[1].items():
        spread = of_tokens_alone(function)
        if spread is not None:
            functions[name] = partial(credit_of, name, spread)
        elif name not in VALUES_KNOWN:
            reasons[name] = IS_A_CLASS
    listed = on_every_batch(world, batches, functions, None, progress)
    from_group = {name: listed.values.pop(name) for name in ("grpo", "dr_grpo", "rloo")}
    values = from_group | credit_from_values(world, batches, seed) | listed.values
    reasons |= listed.reasons
    return Listed([*values, *reasons], values, reasons)


def credit_of(name: str, spread: Callable, tokens: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    return call_choice(lambda tokens, lab: spread(tokens, rows), f"the advantage {name}", tokens)


def credit_from_values(world: World, batches: Batches, seed: int) -> dict[str, torch.Tensor]:
    """(M, G, T) of critics, of vine, of hindsight and of belief, with values without noise.

    A critic that is right knows V, a wrong one has a random number for each index. The segments of
    vine are two tokens long. Hindsight is log V(after) - log V(before).
    """
    (M, G), T = batches.which.shape, world.node.shape[1]
    rows = rows_of(world.rollouts, batches.which.flatten(), torch.arange(M * G) // G)
    right = world.worth[batches.which.flatten()]
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(world.worth.shape[1], generator=generator).expand_as(right)

    def critic(value, trust):
        return generalised_advantage(value[:, :T].float(), rows.reward, rows.mask, 1.0, trust)

    credit = {"critic": critic(right, 1.0), "one-step": critic(right, 0.0),
              "vine": by_segments(right, rows, "2"),
              "belief": credit_of_beliefs(forced_beliefs(world).expand_as(right).float(),
                                          thought_lengths(rows), rows),
              "hindsight": (right + FLOOR).log().diff() * rows.mask,
              "wrong critic": critic(wrong, 1.0), "wrong, one-step": critic(wrong, 0.0)}
    return {name: value.view(M, G, T).double() for name, value in credit.items()}


@torch.no_grad()
def forced_beliefs(world: World) -> torch.Tensor:
    """(T + 1,): the probability of "1" behind a tag that is forced after the first t tokens. What
    comes before a tag in this world is nothing but "1"."""
    beliefs = []
    for t in range(world.worth.shape[1]):
        ids = torch.tensor([PROMPT + [ONE] * t + [OPENING]])
        beliefs.append(world.model(ids)[0, -1].softmax(-1)[ONE])
    return torch.stack(beliefs)


def by_segments(worth: torch.Tensor, rows: Rollouts, every: str) -> torch.Tensor:
    """What vine would give with continuations without end: V after a segment minus V before it."""
    advantage = torch.zeros_like(rows.log_prob)
    for b, (texts, V) in enumerate(zip(rows.texts, worth.tolist())):
        starts = segment_starts(texts, every)
        for start, end in zip(starts, [*starts[1:], len(texts)]):
            advantage[b, start:end] = V[end] - V[start]
    return advantage


def on_every_batch(world: World, batches: Batches, functions: dict[str, Callable],
                   advantage: torch.Tensor | None, progress=lambda share: None) -> Listed:
    """Call each function (tokens, rows) with each batch."""
    (M, G), T = batches.which.shape, world.node.shape[1]
    group = torch.zeros(G, dtype=torch.long)
    values = {name: torch.zeros(M, G, T) for name in functions}
    generators = {name: torch.Generator().manual_seed(0) for name in functions}
    reasons = {}
    for m, rows in enumerate(batches.which):
        tokens = rows_of(world.rollouts, rows, group)
        if advantage is not None:
            tokens = replace(tokens, advantage=advantage[m].float())
        for name in [name for name in functions if name not in reasons]:
            own_tokens = replace(tokens, generator=generators[name])
            try:
                values[name][m] = functions[name](own_tokens, rows)
            except Exception as error:  # an idea may need what this world lacks: the note names it
                reasons[name] = f"(stops in this world: {type(error).__name__}, {error})"
        if m % 100 == 0:
            progress(m / M)
    unused = torch.Generator().manual_seed(0).get_state()
    for name, generator in generators.items():
        if not torch.equal(generator.get_state(), unused):
            reasons.setdefault(name, DRAWS)
    known = {name: value.double() for name, value in values.items() if name not in reasons}
    return Listed(list(functions), known, reasons)
