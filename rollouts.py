"""The one frame: a batch of sampled answers, and all that is known about each of their tokens.

Everything per token is (B, T) in response coordinates: index t is the t-th generated token. The sampler
writes in this frame, `lay_out` makes the one shift that brings a training forward pass into it, and nobody
else does arithmetic with positions.
"""
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from countdown_task import END_OF_TURN, Problem, annotate, encode_prompt, score, token_bytes
from qwen2_model import Qwen2, generate

LOGITS_AT_ONCE = 2 ** 26  # more than this many logits are computed in chunks, and again in the backward pass


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
    generation = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer), **sampling)
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


def token_log_probs(model: Qwen2, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(n, D), (n,) -> (n,). With a large vocabulary the logits are made a chunk at a time and not kept."""
    def log_prob(hidden, targets):
        return -F.cross_entropy(model.logits(hidden).float(), targets, reduction="none")

    chunk = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(hidden) <= chunk:
        return log_prob(hidden, targets)
    return torch.cat([checkpoint(log_prob, *part, use_reentrant=False, preserve_rng_state=False)
                      for part in zip(hidden.split(chunk), targets.split(chunk))])


def lay_out(rollouts: Rollouts, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response of some rows, (rows, L) ids, and the position (rows,) that predicts their token 0.

    The one place where the shift is made: position first + t of a row is the one that predicts generated
    token t, and first + 1 + t is where that token stands. Rows are padded on the right, where causal
    attention never looks.
    """
    lengths, groups = rollouts.mask[rows].sum(1).tolist(), rollouts.group[rows].tolist()
    sequences = [rollouts.prompt_ids[g] + row[:n - 1] for g, row, n in zip(groups, rollouts.ids[rows].tolist(), lengths)]
    L = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (L - len(row)) for row in sequences], device=rollouts.ids.device)
    return ids, torch.tensor([len(rollouts.prompt_ids[g]) - 1 for g in groups], device=ids.device)


def by_length(rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    """Answers of like length together: less padding."""
    return rows[rollouts.length[rows].argsort(stable=True)]


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    """The training forward pass of some rows in response coordinates: (rows, T), 0 beyond the mask."""
    ids, first = lay_out(rollouts, rows)
    mask, L = rollouts.mask[rows], ids.shape[1]
    hidden = model.model(ids).flatten(0, 1)  # (rows * L, D)
    row, t = mask.nonzero(as_tuple=True)
    log_prob = token_log_probs(model, hidden.index_select(0, row * L + first[row] + t), rollouts.ids[rows][row, t])
    return torch.zeros(mask.shape, device=ids.device).index_put((row, t), log_prob)


class Forward:
    """One extra forward pass of the policy over a batch, made when somebody looks, and kept for the next one who does."""

    def __init__(self, model: Qwen2, micro_batch: int, autocast=nullcontext()):
        self.model, self.micro_batch, self.autocast, self.seen = model, micro_batch, autocast, {}

    @torch.no_grad()
    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        if attention and "attention" not in self.seen or not self.seen:
            (B, T), device = rollouts.mask.shape, rollouts.ids.device
            self.seen = {"hidden": torch.zeros(B, T, self.model.config.hidden_size, device=device)}
            if attention:
                self.seen["attention"] = torch.zeros(B, T, T, device=device)
            for rows in by_length(rollouts, rollouts.length.nonzero().squeeze(1)).split(self.micro_batch):
                self.look_at(rollouts, rows, attention)
        return self.seen

    def look_at(self, rollouts: Rollouts, rows: torch.Tensor, attention: bool) -> None:
        ids, first = lay_out(rollouts, rows)
        seen_by_last, layer = [], self.model.model.layers[-1].self_attn
        hook = layer.register_forward_pre_hook(lambda module, inputs: seen_by_last.append(inputs))
        with self.autocast:
            hidden = self.model.model(ids).float()
            received = layer.probabilities(*seen_by_last[0][:3]).float() if attention else None  # (rows, L, L)
        hook.remove()
        for i, (row, start, n) in enumerate(zip(rows.tolist(), first.tolist(), rollouts.length[rows].tolist())):
            self.seen["hidden"][row, :n] = hidden[i, start:start + n]
            if attention:
                self.seen["attention"][row, :n, :n - 1] = received[i, start:start + n, start + 1:start + n]
