"""The policy: the model with its tokenizer and its task, and how answers are sampled. Weightings
and advantages get it with each batch, for whatever they need of the model."""
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import grpo
from lab.engine.errors import refuse_undefined
from lab.engine.extra_forward import Forward
from lab.engine.rollouts import ByTurns, Problem, Rollouts, Task, has_turns, turns_of
from lab.engine.sampler import Seed, generate
from lab.engine.tokens import encode_prompt, normalised, spelt_by
from lab.engine.model import Qwen2
from qwen2_model import Sampled, stop_tokens

if TYPE_CHECKING:
    from lab.engine.turns import Environment  # imported only for a task that replies

# The settings of a run. lab/harness/settings.py declares them, so the engine does not know their
# type. It reads max_new_tokens, temperature and micro_batch. Methods may read any setting.
RunSettings = Any


@dataclass
class Policy:
    """A model that answers the problems of a task."""
    model: Qwen2
    tokenizer: Tokenizer
    task: Task[Problem]
    settings: RunSettings
    folder: Path           # the folder that the model was read from

    def ask(self, problems: Sequence[Problem], answers: int, seed: Seed,
            greedy: bool = False) -> Rollouts:
        """Sample answers to each problem and score them, by grpo.py's `sample`."""
        asked = Asked(self, problems, answers)
        generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        batch = grpo.sample(self.model, self.tokenizer, asked, problems, answers,
                            self.settings.max_new_tokens, generator, greedy, asked.generate)
        return asked.completed(batch)

    def known_values(self, rollouts: Rollouts, prefixes: Sequence[tuple[int, tuple[int, ...]]],
                     without: Sequence[int] | None) -> Tensor | None:
        """(n,) the mean rewards of continuations, where they are known and need not be sampled, as
        in the worlds of lab/worlds.py; else None."""
        return None

    def extra_forward(self) -> Forward:
        return Forward(self.model, self.settings.micro_batch)

    @property
    def environment(self) -> "Environment | None":
        """What replies to the model; None if answers have one turn."""
        if not has_turns(self.task):
            return None
        from lab.engine.turns import Environment
        return Environment(self.task, self.tokenizer, stop_tokens(self.model, self.tokenizer))

    def reward_of(self, problem: Problem, ids: Sequence[int]) -> float:
        """The reward of any answer to this problem, finished or cut off."""
        if environment := self.environment:
            drawn = environment.drawn_in(problem, ids)
            turns = turns_of(self.tokenizer, list(ids), drawn)
            return float(self.task.score(problem, turns)["reward"])
        return float(self.task.score(problem, spelt_by(self.tokenizer, ids))["reward"])

    @torch.no_grad()
    def refuse_broken_model(self) -> None:
        """Raise if the logits after one prompt are not finite. That the parameters are finite is
        not enough, because a product of them can overflow.

        The prompt is that of an extreme problem. If it were a held-out one, a run that evaluates
        nothing could not train on this problem any more (lab/harness/tasks.py)."""
        problem = self.task.extreme_problems()[0]
        prompt = encode_prompt(self.tokenizer, self.task.prompt_for(problem), "")
        ids = torch.tensor([prompt], device=self.model.device)
        hidden = self.model.model(ids, torch.arange(len(prompt), device=self.model.device))
        # of the last token alone, because the prompt may be long
        refuse_undefined("the model's logits are", self.model.logits(hidden[:, -1]))


class Asked:
    """What grpo.py's `sample` is given in the place of a policy's task, which it asks through this,
    and of `generate`."""

    def __init__(self, policy: Policy, problems: Sequence[Problem], answers: int):
        self.policy, self.problems = policy, [one for one in problems for _ in range(answers)]
        self.label, self.score = policy.task.label, policy.task.score
        self.by_turns: ByTurns | None = None

    def prompt_for(self, problem: Problem) -> str:
        tokenizer, text = self.policy.tokenizer, self.policy.task.prompt_for(problem)
        encode_prompt(tokenizer, text, self.policy.task.show(problem))  # refuses what it cannot say
        return normalised(tokenizer, text)

    def generate(self, model: Qwen2, prompts: list[list[int]], answers: int, max_new_tokens: int,
                 stop: tuple[int, ...], generator: torch.Generator, greedy: bool) -> Sampled:
        """The mask is what is written; what of it the model drew is known here."""
        reply = None
        if environment := self.policy.environment:
            def reply(row: int, ids: list[int], drawn: list[bool]) -> list[int] | None:
                return environment.reply(self.problems[row], ids, drawn)
        found = generate(model, prompts, answers=answers, seed=generator, greedy=greedy,
                         max_new_tokens=max_new_tokens, stop_ids=stop, reply=reply,
                         temperature=self.policy.settings.temperature)
        refuse_undefined("the model's probabilities are", found.log_prob, found.entropy,
                         found.collision)
        self.found = found
        if environment:
            self.by_turns = ByTurns(self.policy.task, self.policy.tokenizer, self.problems, found)
            self.score = self.by_turns.score
        return Sampled(found.ids, found.written, found.finished, found.log_prob, found.entropy,
                       found.collision)

    def completed(self, batch: grpo.Rollouts) -> Rollouts:
        """The batch as the lab knows it: its mask leaves out what an environment wrote."""
        known = vars(batch) | {"mask": batch.mask & self.found.mask, "written": batch.mask}
        whole = Rollouts(**known).to(self.policy.model.device)
        return self.by_turns.with_turns(whole) if self.by_turns else whole


def encode_prompts(tokenizer: Tokenizer, task: Task[Problem],
                   problems: Sequence[Problem]) -> list[list[int]]:
    return [encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
            for problem in problems]


def derived_seed(*parts: object) -> int:
    """The seed of the book's generator, which depends on these parts alone."""
    return grpo.generator_of(*parts).initial_seed()
