"""A batch of rollouts (sampled answers), and all that is known about each of their tokens.

Everything per token is (B, T) in answer coordinates: index t is the t-th generated token. The
sampler writes in this frame, `lay_out` in forward.py makes the one shift that brings a training
forward pass into it, and nobody else does arithmetic with positions.

    3 5 7 make 22 -> " 3 * 5 = 15 ...", " no ..."   two answers to one problem, 30 and 8 tokens
    ids, mask, log_prob, ... (2, 30)                mask[1, 8:] is False
    group [0, 0], reward [1.1, 0.1]  (2,)
"""
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine import processes
from engine.tokens import token_bytes


@dataclass(frozen=True)
class Rollouts:
    """B answers to Q problems; group g holds the answers to problem g.

    log_prob, entropy (-sum p log p) and collision (sum p^2) come from the sampler.
    """
    problems: list                  # Q of them
    prompt_ids: list[list[int]]     # of each problem
    group: torch.Tensor             # (B,) 0..Q-1
    ids: torch.Tensor               # (B, T) int64, 0 beyond the mask
    mask: torch.Tensor              # (B, T) bool
    finished: torch.Tensor          # (B,) bool: the answer ended before the limit
    log_prob: torch.Tensor          # (B, T) at temperature 1
    entropy: torch.Tensor           # (B, T)
    collision: torch.Tensor         # (B, T)

    # known once the answers are scored
    answers: list[str] | None = None             # of each answer its text
    texts: list[list[str]] | None = None         # of each answer, token by token
    section: torch.Tensor | None = None          # (B, T) uint8, codes in engine/tokens.py
    kind: torch.Tensor | None = None             # (B, T) uint8
    scores: dict[str, torch.Tensor] | None = None  # reward, format, answer, reasoning: (B,) float32

    # known once credit is spread
    step: int = 0
    advantage: torch.Tensor | None = None        # (B, T)
    generator: torch.Generator | None = None     # on the CPU, for whoever needs random numbers
    forward: object = None                       # a forward.Forward: makes hidden and attention
    true_credit: torch.Tensor | None = None      # (B, T), where a probe measured it

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
        return self.forward.look(self)["hidden"]

    @property
    def attention(self) -> torch.Tensor:
        """(B, T, T): [b, i, j] is the attention that token j received when token i was predicted,
        0 unless j < i. Last layer, mean over heads. Costs one extra forward pass."""
        return self.forward.look(self, attention=True)["attention"]

    def to(self, device) -> "Rollouts":
        return replace(self, **self.map_tensors(lambda tensor: tensor.to(device)))

    def of_problems(self, problems: range) -> "Rollouts":
        """The part of the batch that answers these problems, which are numbered from 0 again."""
        rows = self.rows_of(problems)
        part = self.map_tensors(lambda tensor: tensor[rows])
        part["group"] = part["group"] - problems.start
        for name in ("answers", "texts"):
            part[name] = [getattr(self, name)[row] for row in rows.tolist()]
        for name in ("problems", "prompt_ids"):
            part[name] = getattr(self, name)[problems.start:problems.stop]
        return replace(self, **part)

    def rows_of(self, problems: range) -> torch.Tensor:
        """The rows of the answers to these problems."""
        inside = (self.group >= problems.start) & (self.group < problems.stop)
        return inside.nonzero().squeeze(1)

    def rows_of_rank(self) -> torch.Tensor:
        """The rows of this rank's shard: all, in a run of one process."""
        return self.rows_of(processes.shard_of(len(self.prompt_ids)))

    def map_tensors(self, function) -> dict:
        """What `function` makes of every tensor of the batch, by the name of the field."""
        results = {name: function(value) for name, value in vars(self).items()
                   if isinstance(value, torch.Tensor)}
        if self.scores is not None:
            results["scores"] = {part: function(score) for part, score in self.scores.items()}
        return results


def score_answers(rollouts: Rollouts, tokenizer, task) -> Rollouts:
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


def columns_of(scores: list[dict], device) -> dict[str, torch.Tensor]:
    """(B,) of each part. A task may give more parts than the lab needs, but all of them always."""
    return {part: torch.tensor([score[part] for score in scores], dtype=torch.float32,
                               device=device) for part in scores[0]}
