"""What can be asked in a synthetic task: every weighting and every advantage by its name, and what
lab/probes/dial.py lists beside them.

What the task cannot give is said in a sentence where a method asks for it: there is no text, no
attention from token to token, and no continuations, whose limit is the true credit.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch

import mitigations  # noqa: F401  it fills the lists of choices
from engine.choices import ADVANTAGES, MITIGATIONS, make
from engine.errors import UserError
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from engine.tokens import OPERATOR, THINK, WORD
from grpo import group_z_score
from harness.flags import Flag, check_value, value_of
from lab.dial.task import Sample, SyntheticTask
from lab.probes.methods import ComparedMethod

PLAIN, TRUE = "plain GRPO", "true credit"
QUESTIONS, ANSWERS = 8, 8
WEIGHT = Flag(1.0, most=1e6)  # at the end of a mask's name


@dataclass(frozen=True)
class Batch:
    """A batch of each policy of a task, and what is known about it."""
    task: SyntheticTask
    sample: Sample
    hidden: torch.Tensor    # (S, U, D) of all contexts
    log_prob: torch.Tensor  # (S, U, V)
    to_come: torch.Tensor   # SyntheticTask.after_keys
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
        """The rollouts of one policy, as a run would have them."""
        ids, reward = self.sample.ids[s], self.sample.reward[s]
        contexts = self.sample.context
        context = contexts[s % len(contexts)].expand_as(ids)  # (B, T)
        log_prob = self.log_prob[s]     # (U, V)
        probability = log_prob.exp()
        entropy = -(probability * log_prob).sum(-1)
        collision = probability.square().sum(-1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        kind = torch.where(self.task.decides, OPERATOR, WORD).byte().expand_as(ids)
        problems = int(self.group[-1]) + 1
        scores = {"reward": reward, "answer": reward, "reasoning": reward,
                  "format": torch.zeros_like(reward)}
        seed = derived_seed("dial method", self.task.seeds[s], self.step)
        return Rollouts(
            problems=[self.task.spec.tokens] * problems,
            prompt_ids=[[0]] * problems,
            group=self.group,
            ids=ids,
            mask=mask,
            finished=mask[:, 0],
            log_prob=log_prob[context, ids],
            entropy=entropy[context],
            collision=collision[context],
            answers=Missing("the text of answers"),
            texts=Missing("the text of answers"),
            kind=kind,
            section=torch.full_like(kind, THINK),
            step=self.step,
            scores=scores,
            advantage=self.advantage[s].expand(ids.shape),
            forward=SimpleNamespace(look=known_hidden_states(self.hidden[s][context])),
            generator=torch.Generator().manual_seed(seed))


def known_hidden_states(hidden: torch.Tensor) -> Callable[..., dict[str, torch.Tensor]]:
    """The extra forward pass of a run, which here is known already."""
    def look(rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        if attention:
            raise UserError("it needs attention between tokens, and in these tasks there is none")
        return {"hidden": hidden}
    return look


class Missing:
    """A stand-in for what the task has not: asking for a part of it is an error that says so."""

    def __init__(self, what: str):
        self.__dict__["what"] = what

    def refuse(self, *_):
        raise UserError(f"it needs {self.what}, which a synthetic task does not have")

    __iter__ = __getitem__ = __len__ = __call__ = refuse

    def __getattr__(self, name):
        if name.startswith("__"):  # Python's own questions, as of copy
            raise AttributeError(name)
        self.refuse()


def stand_in_policy(task: SyntheticTask, s: int) -> SimpleNamespace:
    """As much of engine.policy.Policy as there is."""
    model = Missing("a model that reads answers")
    vars(model).update(config=task.config, device=torch.device("cpu"))
    settings = SimpleNamespace(seed=task.seeds[s], temperature=1.0, top_k=0, loss_norm="token",
                               max_new_tokens=task.spec.tokens, micro_batch=QUESTIONS * ANSWERS)
    return SimpleNamespace(model=model, settings=settings, task=Missing("the text of answers"),
                           tokenizer=Missing("continuations of a prefix"),
                           reward_of=Missing("answers of another length"))


@dataclass(frozen=True)
class SyntheticArm:
    """A method in a synthetic task: `start(task)` is made anew for each training, and gives
    weight times advantage (S, B, T) of each batch."""
    name: str
    start: Callable[[SyntheticTask], Callable[[Batch], torch.Tensor]]


def plain_coefficients(task: SyntheticTask):
    return lambda batch: batch.advantage.expand(batch.sample.ids.shape)


def true_credit_coefficients(task: SyntheticTask):
    return lambda batch: task.credit(batch.sample, batch.to_come)


def masked(elsewhere: float):
    """Weight 1 at the tokens that decide, and less elsewhere; rescaled to a mean of 1."""
    def start(task):
        weight = torch.where(task.decides, 1.0, elsewhere)
        weight = weight / weight.mean()
        return lambda batch: weight * batch.advantage
    return start


def listed(name: str, flags: dict):
    """A choice of --mitigation or of --advantage."""
    is_weighting = name in MITIGATIONS

    def start(task):
        chosen = MITIGATIONS[name] if is_weighting else ADVANTAGES[name]
        policies = [stand_in_policy(task, s) for s in range(len(task.seeds))]
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


def named_arm(name: str, flags: dict | None = None) -> SyntheticArm:
    """The arm that has this name in a table, or in one of the two lists."""
    word, _, number = name.rpartition(" ")
    if name in MITIGATIONS or name in ADVANTAGES:
        return SyntheticArm(name, listed(name, flags or {}))
    if word == "mask":
        weight = value_of(number, WEIGHT)
        check_value(f"only {name}:", weight, WEIGHT)
        return SyntheticArm(name, masked(float(weight)))
    known = {PLAIN: plain_coefficients, TRUE: true_credit_coefficients}
    if name not in known:
        raise UserError(f"there is no weighting and no advantage {name}: is its function in "
                        "mitigations.py, below @mitigation or @advantage?")
    return SyntheticArm(name, known[name])
