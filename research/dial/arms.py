"""What can be asked in a world with dials: every weighting and every advantage by its name, what
research/probes/dial.py lists, and the exact gradient, as of a batch without end.

What the world cannot give is said in a sentence where a method asks for it: there is no text, no
attention from token to token, and no continuations, whose limit is the true credit.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch

import mitigations  # noqa: F401  it fills the lists of choices
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from engine.tokens import OPERATOR, THINK, WORD
from grpo import group_z_score
from harness.load import make
from research.dial.world import Sample, World
from research.probes.methods import ComparedMethod

PLAIN, TRUE, EXACT = "plain GRPO", "true credit", "exact gradient"
QUESTIONS, ANSWERS = 8, 8


@dataclass(frozen=True)
class Batch:
    """A batch of each of the policies of a world, and what is known about it."""
    world: World
    sample: Sample
    hidden: torch.Tensor    # (S, U, D) of all contexts
    log_prob: torch.Tensor  # (S, U, V)
    to_come: torch.Tensor   # World.after_keys
    step: int

    @cached_property
    def group(self) -> torch.Tensor:
        return torch.arange(self.sample.reward.shape[1]) // ANSWERS

    @cached_property
    def advantage(self) -> torch.Tensor:
        """(S, B, 1): plain GRPO's."""
        S, B = self.sample.reward.shape
        groups = self.group + torch.arange(S)[:, None] * (self.group[-1] + 1)
        z = group_z_score(self.sample.reward.flatten(), groups.flatten())
        return z.view(S, B, 1)

    def rollouts(self, s: int) -> Rollouts:
        """Those of one policy, as a run would have them."""
        sample, log_prob, T = self.sample, self.log_prob[s], self.world.dials.tokens
        ids, reward = sample.ids[s], sample.reward[s]
        context = sample.context[s % len(sample.context)].expand_as(ids)
        chance, mask = log_prob.exp(), torch.ones_like(ids, dtype=torch.bool)
        kind = torch.where(self.world.decides, OPERATOR, WORD).byte().expand_as(ids)
        seed = derived_seed("dial method", self.world.seeds[s], self.step)

        def look(rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
            if attention:
                raise UserError("it needs attention from token to token: each sees its cue alone")
            return {"hidden": self.hidden[s][context]}

        return Rollouts(
            problems=[T] * (int(self.group[-1]) + 1), prompt_ids=[[0]] * (int(self.group[-1]) + 1),
            group=self.group, ids=ids, mask=mask, finished=mask[:, 0],
            log_prob=log_prob[context, ids], entropy=-(chance * log_prob).sum(-1)[context],
            collision=chance.square().sum(-1)[context], answers=Missing("the text of answers"),
            texts=Missing("the text of answers"), kind=kind,
            section=torch.full_like(kind, THINK), step=self.step,
            scores={"reward": reward, "answer": reward, "reasoning": reward,
                    "format": torch.zeros_like(reward)},
            advantage=self.advantage[s].expand(ids.shape), forward=SimpleNamespace(look=look),
            generator=torch.Generator().manual_seed(seed))


class Missing:
    """In the place of what the world has not: who asks for a part of it is told."""

    def __init__(self, what: str):
        self.__dict__["what"] = what

    def refuse(self, *_):
        raise UserError(f"it needs {self.what}, which this world has not")

    __iter__ = __getitem__ = __len__ = __call__ = refuse

    def __getattr__(self, name):
        if name.startswith("__"):  # Python's own questions, as of copy
            raise AttributeError(name)
        self.refuse()


def policy_of(world: World, s: int) -> SimpleNamespace:
    """As much of engine.policy.Policy as there is."""
    model = Missing("a model that reads answers")
    vars(model).update(config=world.config, device=torch.device("cpu"))
    settings = SimpleNamespace(seed=world.seeds[s], temperature=1.0, loss_norm="token",
                               max_new_tokens=world.dials.tokens, micro_batch=QUESTIONS * ANSWERS)
    return SimpleNamespace(model=model, settings=settings, task=Missing("the text of answers"),
                           tokenizer=Missing("continuations of a prefix"),
                           reward_of=Missing("answers of another length"))


@dataclass(frozen=True)
class Arm:
    """`coefficients(batch)` (S, B, T) is weight times advantage, made anew for each training."""
    name: str
    start: Callable[[World], Callable[[Batch], torch.Tensor]] | None
    times: float = 1  # the batch

    @property
    def problems(self) -> int:
        return round(QUESTIONS * self.times)


def plain(world: World):
    return lambda batch: batch.advantage.expand(batch.sample.ids.shape)


def masked(elsewhere: float, known: float = 1.0, is_placebo: bool = False):
    """Weight 1 at so large a share of the keys, or at as many places, and less elsewhere."""
    def start(world):
        weight = torch.full((len(world.seeds), 1, world.dials.tokens), elsewhere)
        for row, seed in zip(weight, world.seeds):
            generator = torch.Generator().manual_seed(derived_seed("dial mask", seed))
            if is_placebo:
                places = torch.randperm(world.dials.tokens, generator=generator)
            else:
                places = world.keys[torch.randperm(world.dials.decide, generator=generator)]
            row[0, places[:max(1, round(known * world.dials.decide))]] = 1.0
        weight = weight / weight.mean(-1, keepdim=True)
        return lambda batch: weight * batch.advantage
    return start


def listed(name: str, flags: dict):
    """A choice of --mitigation or of --advantage."""
    is_weighting = name in MITIGATIONS

    def start(world):
        chosen = MITIGATIONS[name] if is_weighting else ADVANTAGES[name]
        policies = [policy_of(world, s) for s in range(len(world.seeds))]
        methods = [ComparedMethod(name, make(chosen, flags, policy), is_weighting)
                   for policy in policies]

        def coefficients(batch):
            rows = []
            for s, (method, policy) in enumerate(zip(methods, policies)):
                numbers = method.numbers(batch.rollouts(s), policy)
                rows.append(numbers * batch.advantage[s] if is_weighting else numbers)
            return torch.stack(rows)
        return coefficients
    return start


def arm_of(name: str, flags: dict | None = None) -> Arm:
    """By its name in a table, or in the two lists."""
    word, _, number = name.rpartition(" ")
    if name in MITIGATIONS or name in ADVANTAGES:
        return Arm(name, listed(name, flags or {}))
    if word == "batch":
        return Arm(name, plain, float(number.removesuffix("x")))
    masks = {"mask": {}, "half known": {"known": 0.5}, "placebo": {"is_placebo": True}}
    if word in masks:
        return Arm(name, masked(float(number), **masks[word]))
    known = {PLAIN: plain, EXACT: None,
             TRUE: lambda world: lambda batch: world.credit(batch.sample, batch.to_come)}
    if name not in known:
        raise UserError(f"there is no weighting and no advantage {name}: is its function in "
                        "mitigations.py, below @mitigation or @advantage?")
    return Arm(name, known[name])
