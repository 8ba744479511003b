"""The one frame: a batch of sampled answers, and all that is known about each of their tokens.

Everything per token is (B, T) in response coordinates: index t is the t-th generated token. The sampler
writes in this frame, `lay_out` makes the one shift that brings a training forward pass into it, and nobody
else does arithmetic with positions.
"""
from dataclasses import dataclass, replace

import torch

from engine import processes as ranks
from countdown_task import Problem, annotate, encode_prompt, score
from engine.tokens import END_OF_TURN, token_bytes
from qwen2_model import Qwen2
from engine.sampler import generate


@dataclass(frozen=True)
class Rollouts:
    """A batch of B answers to Q questions, group g holding the answers to question g: `tokens` to a mitigation.

    log_prob, entropy (-sum p log p) and collision (sum p^2) are the sampler's, the numbers on record.
    """
    problems: list[Problem]         # of each question
    prompt_ids: list[list[int]]     # of each question
    responses: list[str]            # of each answer, whole
    texts: list[list[str]]          # of each answer, token by token
    group: torch.Tensor             # (B,) 0..Q-1
    ids: torch.Tensor               # (B, T) int64, 0 beyond the mask
    mask: torch.Tensor              # (B, T) bool
    finished: torch.Tensor          # (B,) bool, ended itself before the limit
    log_prob: torch.Tensor          # (B, T) at temperature 1
    entropy: torch.Tensor           # (B, T)
    collision: torch.Tensor         # (B, T)
    section: torch.Tensor           # (B, T) uint8, codes in countdown_task.py
    kind: torch.Tensor              # (B, T) uint8
    scores: dict[str, torch.Tensor]  # reward, format, answer, reasoning: (B,) float32
    advantage: torch.Tensor | None = None    # (B, T), once it is known
    step: int = 0
    generator: torch.Generator | None = None  # on the CPU, for whoever needs random numbers
    forward: "Forward | None" = None          # where hidden and attention come from
    true_credit: torch.Tensor | None = None   # (B, T), where it is known

    def to(self, device) -> "Rollouts":
        moved = {key: value.to(device) for key, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, scores={name: value.to(device) for name, value in self.scores.items()})

    def of_questions(self, share: range) -> "Rollouts":
        """The batch of the answers to these questions alone, which are numbered from 0."""
        rows = self.rows_of(share)
        moved = {name: value[rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        listed = {name: [getattr(self, name)[i] for i in rows.tolist()] for name in ("responses", "texts")}
        asked = {name: getattr(self, name)[share.start:share.stop] for name in ("problems", "prompt_ids")}
        return replace(self, **{**moved, **listed, **asked, "group": moved["group"] - share.start},
                       scores={name: value[rows] for name, value in self.scores.items()})

    def rows_of(self, share: range) -> torch.Tensor:
        return ((self.group >= share.start) & (self.group < share.stop)).nonzero().squeeze(1)

    @property
    def length(self) -> torch.Tensor:
        return self.mask.sum(1)

    @property
    def reward(self) -> torch.Tensor:
        return self.scores["reward"]

    @property
    def hidden(self) -> torch.Tensor:
        """(B, T, D): the state that predicted token t. Looking costs one extra forward pass."""
        return self.forward.look(self)["hidden"]

    @property
    def attention(self) -> torch.Tensor:
        """(B, T, T): [b, i, j] is what token j received when token i was predicted, 0 unless j < i.
        Last layer, mean over heads. Looking costs one extra forward pass."""
        return self.forward.look(self, attention=True)["attention"]


def collect(model: Qwen2, tokenizer, problems: list[Problem], prompt_form: str, answers: int, **sampling) -> Rollouts:
    """Sample `answers` answers to each problem, label every token, score every answer."""
    prompts = [encode_prompt(tokenizer, problem, prompt_form) for problem in problems]
    generation = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer), share=ranks.share(len(prompts)), **sampling)
    ranks.add_up(*vars(generation).values())
    rows = [row[:n] for row, n in zip(generation.tokens.tolist(), generation.mask.sum(1).tolist())]
    return label(tokenizer, rows, problems=problems, prompt_ids=prompts, group=torch.arange(len(rows)) // answers,
                 ids=generation.tokens, **{k: v for k, v in vars(generation).items() if k != "tokens"})


def stop_ids(model: Qwen2, tokenizer) -> tuple[int, ...]:
    ends = [tokenizer.token_to_id(token) for token in END_OF_TURN]  # a base model's own list lacks <|im_end|>
    return tuple({*model.config.stop_ids, *(i for i in ends if i is not None)})


def label(tokenizer, rows: list[list[int]], *, problems, group, ids, **known) -> Rollouts:
    """What follows from the tokens alone: the section and kind of each, and the scores of each answer."""
    section, kind = torch.zeros(2, *ids.shape, dtype=torch.uint8)
    texts, responses, scores = [], [], []
    for i, (row, g) in enumerate(zip(rows, group.tolist())):
        pieces = token_bytes(tokenizer, row)
        section[i, :len(row)], kind[i, :len(row)] = torch.tensor(annotate(pieces), dtype=torch.uint8)
        texts.append([piece.decode(errors="replace") for piece in pieces])
        responses.append(b"".join(pieces).decode(errors="replace"))
        scores.append(score(responses[-1], problems[g].numbers, problems[g].target))
    device = ids.device
    return Rollouts(problems=problems, group=group.to(device), ids=ids, responses=responses, texts=texts,
                    section=section.to(device), kind=kind.to(device),
                    scores={name: torch.tensor([s[name] for s in scores], device=device) for name in scores[0]}, **known)
