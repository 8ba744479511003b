"""The policy: the model with its tokenizer and its task, and how answers are sampled. Weightings
and advantages get it with each batch, for whatever they need of the model."""
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.engine.errors import refuse_undefined
from lab.engine.rollouts import Problem, Rollouts, Task, has_turns, score_answers, turns_of
from lab.engine.sampler import Seed, generate
from lab.engine.tokens import END_OF_TURN, encode_prompt, spelt_by
from lab.engine.model import Qwen2
from grpo import generator_of

if TYPE_CHECKING:
    from lab.engine.turns import Environment  # imported only for a task that replies

# The settings of a run. lab/harness/settings.py declares them, so the engine does not know their
# type. It reads max_new_tokens, temperature and micro_batch. Methods may read any setting.
RunSettings = Any


class Forward:
    """An extra forward pass over a batch, made only if a method needs it, and only once."""

    def __init__(self, model: Qwen2, micro_batch: int):
        self.model, self.micro_batch = model, micro_batch
        self.results: dict[str, Tensor] = {}

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, Tensor]:
        wanted = "attention" if attention else "hidden"
        if wanted not in self.results:
            from lab.engine.extra_forward import look_inside
            self.results = look_inside(self.model, rollouts, self.micro_batch, attention)
        return self.results


@dataclass
class Policy:
    """A model that answers the problems of a task."""
    model: Qwen2
    tokenizer: Tokenizer
    task: Task[Problem]
    settings: RunSettings
    folder: Path           # the folder that the model was read from

    def sample(self, problems: Sequence[Problem], answers: int, seed: Seed,
               greedy: bool = False) -> Rollouts:
        """Sample `answers` answers to each problem, without scores."""
        prompts = encode_prompts(self.tokenizer, self.task, problems)
        reply = None
        if environment := self.environment:
            def reply(row: int, ids: list[int], drawn: list[bool]) -> list[int] | None:
                return environment.reply(problems[row // answers], ids, drawn)
        sampled = generate(self.model, prompts, answers=answers, seed=seed, greedy=greedy,
                           max_new_tokens=self.settings.max_new_tokens,
                           temperature=self.settings.temperature,
                           stop_ids=stop_ids(self.model, self.tokenizer), reply=reply)
        refuse_undefined("the model's probabilities are", sampled.log_prob, sampled.entropy,
                         sampled.collision)
        group = torch.arange(len(problems), device=sampled.mask.device).repeat_interleave(answers)
        return Rollouts(problems, prompts, group, sampled.tokens, sampled.mask, sampled.finished,
                        sampled.log_prob, sampled.entropy, sampled.collision,
                        written=sampled.written)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Add the reward of each answer, and the section and kind of each token. What is scored
        already stays as it is: a task may give another reward the second time, and may be slow."""
        if rollouts.scores:
            return rollouts
        return score_answers(rollouts, self.tokenizer, self.task)

    def ask(self, problems: Sequence[Problem], answers: int, seed: Seed,
            greedy: bool = False) -> Rollouts:
        """Sample answers to each problem and score them."""
        return self.score(self.sample(problems, answers, seed, greedy))

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
        return Environment(self.task, self.tokenizer, stop_ids(self.model, self.tokenizer))

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


def encode_prompts(tokenizer: Tokenizer, task: Task[Problem],
                   problems: Sequence[Problem]) -> list[list[int]]:
    return [encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
            for problem in problems]


def stop_ids(model: Qwen2, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer: those of the model's config, and the end of a turn, which the
    config of a base model lacks."""
    stop = set(model.config.eos_token_id)
    for token in END_OF_TURN:
        number = tokenizer.token_to_id(token)
        if number is not None:
            stop.add(number)
    return tuple(stop)


def derived_seed(*parts: object) -> int:
    """The seed of the book's generator, which depends on these parts alone."""
    return generator_of(*parts).initial_seed()
