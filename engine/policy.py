"""The policy: the model, its tokenizer, its task, and how answers are sampled.

The loop, the probes and the preview sample with it. Weightings and advantages get it with each
batch, for whatever else they need of the model.
"""
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.errors import BrokenModel
from engine.processes import refuse_undefined
from engine.forward import Forward
from engine.rollouts import Rollouts, sample_answers, score_answers
from engine.tokens import encode_prompt, token_bytes
from qwen2_model import Qwen2


@dataclass
class Policy:
    model: Qwen2
    tokenizer: Tokenizer
    task: object      # see Task in countdown_task.py
    settings: object  # max_new_tokens, temperature, micro_batch and the other flags of train.py
    folder: Path      # the model was read from here

    def sample(self, problems: list, answers: int, seed: int, greedy: bool = False) -> Rollouts:
        """`answers` answers to each problem."""
        s = self.settings
        return sample_answers(self.model, self.tokenizer, self.task, problems, answers,
                              max_new_tokens=s.max_new_tokens, temperature=s.temperature,
                              greedy=greedy, seed=seed)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The batch with the reward of each answer, and the section and kind of each token."""
        return score_answers(rollouts, self.tokenizer, self.task)

    def ask(self, problems: list, answers: int, seed: int, greedy: bool = False) -> Rollouts:
        """Sample and score."""
        return self.score(self.sample(problems, answers, seed, greedy))

    def extra_forward(self, micro_batch: int | None = None) -> Forward:
        """For `Rollouts.forward`: hidden states and attention, computed when they are read."""
        return Forward(self.model, micro_batch or self.settings.micro_batch)

    def reward_of(self, problem, ids) -> float:
        """The reward of any answer to this problem, whole or cut off."""
        text = b"".join(token_bytes(self.tokenizer, ids)).decode(errors="replace")
        return self.task.score(problem, text)["reward"]

    @torch.no_grad()
    def refuse_broken_model(self) -> None:
        """Finite parameters can still overflow: compute the logits of one prompt."""
        problem = self.task.held_out_problems(1)[0]
        prompt = encode_prompt(self.tokenizer, self.task.prompt_for(problem), "")
        hidden = self.model.model(torch.tensor([prompt], device=self.model.device))
        refuse_undefined("the model's logits are", self.model.logits(hidden[:, -1]),
                         kind=BrokenModel)


def derived_seed(*parts) -> int:
    """A number that follows from these parts alone, for a random generator."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
