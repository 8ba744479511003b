"""A batch of rollouts (sampled answers), and all that is known about each of their tokens.

Everything per token is (B, T) in answer coordinates: index t is the t-th generated token. The
sampler writes in this frame, `lay_out` in forward.py makes the one shift that brings a training
forward pass into it, and nobody else does arithmetic with positions.

    3 5 7 make 22 -> " 3 * 5 = 15 ...", " no ..."   two answers to one problem, 30 and 8 tokens
    ids, mask, log_prob, ... (2, 30)                mask[1, 8:] is False
    group [0, 0], reward [1.1, 0.1]  (2,)
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from tokenizers import Tokenizer

from engine import processes
from engine.choices import Problem, Task
from engine.errors import UserError
from engine.tokens import token_bytes

NOTHING = torch.zeros(0)  # what is not known yet


class Forward(Protocol):
    """An extra forward pass: forward.Forward, as a rule."""
    def look(self, rollouts: "Rollouts", attention: bool = False) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Rollouts:
    """B answers to Q problems; group g holds the answers to problem g.

    log_prob, entropy (-sum p log p) and collision (sum p^2) come from the sampler.
    """
    problems: Sequence[Problem]     # Q of them
    prompt_ids: list[list[int]]     # of each problem
    group: torch.Tensor             # (B,) 0..Q-1
    ids: torch.Tensor               # (B, T) int64, 0 beyond the mask
    mask: torch.Tensor              # (B, T) bool
    finished: torch.Tensor          # (B,) bool: the answer ended before the limit
    log_prob: torch.Tensor          # (B, T) at temperature 1
    entropy: torch.Tensor           # (B, T)
    collision: torch.Tensor         # (B, T)

    # empty until the answers are scored
    answers: list[str] = field(default_factory=list)      # of each answer its text
    texts: list[list[str]] = field(default_factory=list)  # of each answer, token by token
    section: torch.Tensor = NOTHING                       # (B, T) uint8, codes in engine/tokens.py
    kind: torch.Tensor = NOTHING                          # (B, T) uint8
    scores: dict[str, torch.Tensor] = field(default_factory=dict)  # of each part of the reward (B,)

    # empty until credit is spread
    step: int = 0
    advantage: torch.Tensor = NOTHING                     # (B, T)
    generator: torch.Generator = field(default_factory=torch.Generator)  # for random numbers; CPU
    forward: Forward | None = None                        # makes hidden and attention
    true_credit: torch.Tensor = NOTHING                   # (B, T), where a probe measured it

    @property
    def length(self) -> torch.Tensor:
        return self.mask.sum(1)

    @cached_property
    def lists(self) -> tuple[list[int], list[list[int]]]:
        """The group and the tokens of each answer, fetched from a GPU once."""
        rows = zip(self.ids.tolist(), self.length.tolist())
        return self.group.tolist(), [ids[:length] for ids, length in rows]

    @property
    def reward(self) -> torch.Tensor:
        return self.scores["reward"]

    @property
    def hidden(self) -> torch.Tensor:
        """(B, T, D): the state that predicted token t. Costs one extra forward pass."""
        return self.look()["hidden"]

    @property
    def attention(self) -> torch.Tensor:
        """(B, T, T): [b, i, j] is the attention that token j received when token i was predicted,
        0 unless j < i. Last layer, mean over heads. Costs one extra forward pass."""
        return self.look(attention=True)["attention"]

    def look(self, attention: bool = False) -> dict[str, torch.Tensor]:
        if self.forward is None:
            raise UserError("hidden and attention need a model, and this batch has none")
        return self.forward.look(self, attention)

    def to(self, device: torch.device) -> "Rollouts":
        return self.with_each(lambda tensor: tensor.to(device))

    def of_problems(self, problems: range) -> "Rollouts":
        """The part of the batch that answers these problems, which are numbered from 0 again."""
        rows, asked = self.rows_of(problems), slice(problems.start, problems.stop)
        part = self.with_each(lambda tensor: tensor[rows])
        return replace(part, group=part.group - problems.start, problems=self.problems[asked],
                       prompt_ids=self.prompt_ids[asked],
                       answers=[self.answers[row] for row in rows.tolist()],
                       texts=[self.texts[row] for row in rows.tolist()])

    def rows_of(self, problems: range) -> torch.Tensor:
        """The rows of the answers to these problems."""
        inside = (self.group >= problems.start) & (self.group < problems.stop)
        return inside.nonzero().squeeze(1)

    def rows_of_rank(self) -> torch.Tensor:
        """The rows of this rank's shard: all, in a run of one process."""
        return self.rows_of(processes.shard_of(len(self.prompt_ids)))

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Rollouts":
        """The batch with each of its tensors changed."""
        def known(tensor: torch.Tensor) -> torch.Tensor:
            return change(tensor) if tensor.numel() else tensor

        return replace(
            self, group=change(self.group), ids=change(self.ids), mask=change(self.mask),
            finished=change(self.finished), log_prob=change(self.log_prob),
            entropy=change(self.entropy), collision=change(self.collision),
            section=known(self.section), kind=known(self.kind), advantage=known(self.advantage),
            true_credit=known(self.true_credit),
            scores={part: change(score) for part, score in self.scores.items()})


def score_answers(rollouts: Rollouts, tokenizer: Tokenizer, task: Task) -> Rollouts:
    """Add what follows from the text: scores of each answer, section and kind of each token."""
    section, kind = torch.zeros(2, *rollouts.mask.shape, dtype=torch.uint8)
    texts, answers, scores = [], [], []
    for row, (group, ids) in enumerate(zip(*rollouts.lists)):
        pieces = token_bytes(tokenizer, ids)
        sections, kinds = task.label(pieces)
        section[row, :len(ids)] = torch.tensor(sections, dtype=torch.uint8)
        kind[row, :len(ids)] = torch.tensor(kinds, dtype=torch.uint8)
        texts.append([piece.decode(errors="replace") for piece in pieces])
        answers.append(b"".join(pieces).decode(errors="replace"))
        scores.append(task.score(rollouts.problems[group], answers[-1]))
    device = rollouts.mask.device
    return replace(rollouts, texts=texts, answers=answers,
                   scores=columns_of(scores, device), section=section.to(device),
                   kind=kind.to(device))


def columns_of(scores: list[dict[str, float]], device: torch.device) -> dict[str, torch.Tensor]:
    """(B,) of each part. A task may give more parts than the lab needs, but all of them always."""
    return {part: torch.tensor([score[part] for score in scores], dtype=torch.float32,
                               device=device) for part in scores[0]}
