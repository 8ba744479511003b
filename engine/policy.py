"""The policy: the model, its tokenizer, its task, and how answers are sampled. Weightings and
advantages get it with each batch, for whatever else they need of the model."""
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine import processes
from engine.processes import refuse_undefined
from engine.rollouts import Problem, Rollouts, Task, score_answers
from engine.sampler import Generation, generate
from engine.tokens import END_OF_TURN, encode_prompt, token_bytes
from qwen2_model import Qwen2


# The settings of a run, which harness/settings.py declares: the engine knows no flags, and reads
# max_new_tokens, temperature and micro_batch of them. Methods may read any.
RunSettings = Any


class Forward:
    """One extra forward pass over a batch, when somebody looks, and once."""

    def __init__(self, model: Qwen2, micro_batch: int):
        self.model, self.micro_batch = model, micro_batch
        self.results: dict[str, Tensor] = {}

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, Tensor]:
        if ("attention" if attention else "hidden") not in self.results:
            from engine.extra_forward import look_inside
            self.results = look_inside(self.model, rollouts, self.micro_batch, attention)
        return self.results


@dataclass
class Policy:
    model: Qwen2
    tokenizer: Tokenizer
    task: Task[Problem]
    settings: RunSettings
    folder: Path           # the model was read from here

    def sample(self, problems: Sequence[Problem], answers: int, seed: int,
               greedy: bool = False) -> Rollouts:
        return sample_answers(self.model, self.tokenizer, self.task, problems, answers,
                              max_new_tokens=self.settings.max_new_tokens, greedy=greedy,
                              temperature=self.settings.temperature, seed=seed)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The batch with the reward of each answer, and the section and kind of each token."""
        return score_answers(rollouts, self.tokenizer, self.task)

    def ask(self, problems: Sequence[Problem], answers: int, seed: int,
            greedy: bool = False) -> Rollouts:
        return self.score(self.sample(problems, answers, seed, greedy))

    def extra_forward(self) -> Forward:
        return Forward(self.model, self.settings.micro_batch)

    def reward_of(self, problem: Problem, ids: Iterable[int]) -> float:
        """The reward of any answer to this problem, whole or cut off."""
        text = b"".join(token_bytes(self.tokenizer, ids)).decode(errors="replace")
        return self.task.score(problem, text)["reward"]

    @torch.no_grad()
    def refuse_broken_model(self) -> None:
        """Finite parameters can still overflow: compute the logits of one prompt."""
        problem = self.task.held_out_problems(1)[0]
        prompt = encode_prompt(self.tokenizer, self.task.prompt_for(problem), "")
        logits = self.model(torch.tensor([prompt], device=self.model.device))
        refuse_undefined("the model's logits are", logits)


def sample_answers(model: Qwen2, tokenizer: Tokenizer, task: Task[Problem],
                   problems: Sequence[Problem], answers: int, *, max_new_tokens: int,
                   temperature: float = 1.0, greedy: bool = False, seed: int = 0) -> Rollouts:
    """`answers` answers to each problem. With several processes, each samples its share."""
    prompts = encode_prompts(tokenizer, task, problems)
    sampled = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer),
                       share=processes.shard_of(len(prompts)), max_new_tokens=max_new_tokens,
                       temperature=temperature, greedy=greedy, seed=seed)
    return gather(problems, prompts, answers, sampled)


def encode_prompts(tokenizer: Tokenizer, task: Task[Problem],
                   problems: Sequence[Problem]) -> list[list[int]]:
    return [encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
            for problem in problems]


def gather(problems: Sequence[Problem], prompts: list[list[int]], answers: int,
           sampled: Generation) -> Rollouts:
    """The whole batch, from all processes."""
    processes.all_reduce(*vars(sampled).values())
    refuse_undefined("the model's probabilities are", sampled.log_prob, sampled.entropy,
                     sampled.collision)
    group = torch.arange(len(problems), device=sampled.mask.device).repeat_interleave(answers)
    return Rollouts(problems, prompts, group, sampled.tokens, sampled.mask, sampled.finished,
                    sampled.log_prob, sampled.entropy, sampled.collision)


def stop_ids(model: Qwen2, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those of the model's config, and the end of a turn, which that of a base model lacks."""
    ends = [tokenizer.token_to_id(token) for token in END_OF_TURN]
    return tuple({*model.config.stop_ids, *(end for end in ends if end is not None)})


def derived_seed(*parts: object) -> int:
    """A number that follows from these parts alone, for a random generator."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
