"""GRPO (2402.03300) in the open: one reward an answer, compared within its group, given to every token.

    A_i   = (R_i - mean of the group) / (std of the group + 1e-4)
    loss  = - sum over answers i and tokens t of  weight_it * A_it * log pi(y_it | prompt, y_i<t)  / N

N is the number of response tokens of the whole batch. Everything per token is (B, T) in response
coordinates, index t being the t-th generated token, and everything is computed for the whole batch
before it is cut into micro-batches, so their size changes nothing.

Left out: the ratio and its clipping. With one update a batch the ratio is exactly 1 and the clipped
objective has this very gradient.
"""
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from countdown_task import END_OF_TURN, Problem, annotate, encode_prompt, score, token_bytes
from qwen2_model import Qwen2, generate

LOGITS_AT_ONCE = 2 ** 26  # more than this many logits are computed in chunks, and again in the backward pass


@dataclass
class Rollouts:
    """A batch of B answers to Q questions, group g holding the answers to question g."""
    prompt_ids: list[list[int]]     # of each question
    texts: list[str]                # of each answer
    group: torch.Tensor             # (B,) 0..Q-1
    tokens: torch.Tensor            # (B, T) int64, 0 beyond the mask
    mask: torch.Tensor              # (B, T) bool
    finished: torch.Tensor          # (B,) bool, ended itself before the limit
    log_prob: torch.Tensor          # (B, T) the sampler's, temperature 1
    entropy: torch.Tensor           # (B, T)
    collision: torch.Tensor         # (B, T) sum of squared probabilities
    section: torch.Tensor           # (B, T) uint8, codes in countdown_task.py
    kind: torch.Tensor              # (B, T) uint8
    scores: dict[str, torch.Tensor]  # reward, format, answer, reasoning: (B,) float32

    @property
    def length(self) -> torch.Tensor:
        return self.mask.sum(1)


def collect(model: Qwen2, tokenizer, problems: list[Problem], prompt_form: str, answers: int, **sampling) -> Rollouts:
    """Sample `answers` answers to each problem, label every token, score every answer."""
    prompts = [encode_prompt(tokenizer, problem, prompt_form) for problem in problems]
    ends = [tokenizer.token_to_id(token) for token in END_OF_TURN]  # a base model's own list lacks <|im_end|>
    stop_ids = tuple({*model.config.stop_ids, *(i for i in ends if i is not None)})
    generation = generate(model, prompts, answers=answers, stop_ids=stop_ids, **sampling)
    section, kind = torch.zeros(2, *generation.tokens.shape, dtype=torch.uint8)
    texts, scores = [], []
    for i, (row, length) in enumerate(zip(generation.tokens.tolist(), generation.mask.sum(1).tolist())):
        pieces = token_bytes(tokenizer, row[:length])
        labels = annotate(pieces)
        section[i, :length], kind[i, :length] = torch.tensor(labels, dtype=torch.uint8)
        problem = problems[i // answers]
        texts.append(b"".join(pieces).decode(errors="replace"))
        scores.append(score(texts[-1], problem.numbers, problem.target))
    device = model.device
    return Rollouts(
        prompt_ids=prompts, texts=texts, group=torch.arange(len(texts), device=device) // answers, **vars(generation),
        section=section.to(device), kind=kind.to(device),
        scores={name: torch.tensor([s[name] for s in scores], device=device) for name in scores[0]})


def group_z_score(reward: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B,). A group whose rewards are all equal gets exactly 0: there is nothing to compare."""
    reward = reward.double()  # in float32 the mean of equal rewards can be off by a bit, and eps would magnify it
    count = torch.bincount(group)
    mean = torch.zeros_like(count, dtype=reward.dtype).index_add(0, group, reward) / count
    centred = reward - mean[group]
    std = (torch.zeros_like(mean).index_add(0, group, centred.square()) / count).sqrt()[group]
    return torch.where(std < 1e-8, 0.0, centred / (std + 1e-4)).float()


ADVANTAGES = {"grpo": group_z_score}


def token_advantage(name: str, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): the answer's advantage at each of its tokens."""
    advantage = ADVANTAGES[name](rollouts.scores["reward"], rollouts.group)
    return advantage[:, None] * rollouts.mask


def token_log_probs(model: Qwen2, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(n, D), (n,) -> (n,). With a large vocabulary the logits are made a chunk at a time and not kept."""
    def log_prob(hidden, targets):
        return -F.cross_entropy(model.logits(hidden).float(), targets, reduction="none")

    chunk = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    if len(hidden) <= chunk:
        return log_prob(hidden, targets)
    return torch.cat([checkpoint(log_prob, *part, use_reentrant=False, preserve_rng_state=False)
                      for part in zip(hidden.split(chunk), targets.split(chunk))])


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    """The training forward pass of some rows in response coordinates: (rows, T), 0 beyond the mask.

    The one place where the shift is made: the state at position P - 1 + t of a row, P the length of its
    prompt, is the one that predicts generated token t. Rows are padded on the right, where causal
    attention never looks.
    """
    mask, tokens = rollouts.mask[rows], rollouts.tokens[rows]
    lengths, groups = mask.sum(1).tolist(), rollouts.group[rows].tolist()
    sequences = [rollouts.prompt_ids[g] + row[:n - 1] for g, row, n in zip(groups, tokens.tolist(), lengths)]
    L = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (L - len(row)) for row in sequences], device=tokens.device)
    first = torch.tensor([len(rollouts.prompt_ids[g]) - 1 for g in groups], device=tokens.device)
    hidden = model.model(ids).flatten(0, 1)  # (rows * L, D)
    row, t = mask.nonzero(as_tuple=True)
    log_prob = token_log_probs(model, hidden.index_select(0, row * L + first[row] + t), tokens[row, t])
    return torch.zeros(mask.shape, device=tokens.device).index_put((row, t), log_prob)


def policy_loss(log_prob, advantage, weight, mask, total: int) -> torch.Tensor:
    """The formula at the top of this file, for the rows given; `total` is N of the whole batch."""
    return -(weight * advantage * log_prob * mask).sum() / total


def update(model: Qwen2, optimizer, rollouts: Rollouts, advantage, weight, micro_batch: int, max_grad_norm: float,
           autocast=nullcontext()) -> dict:
    """One optimizer step on the whole batch; the numbers worth watching come back.

    Answers whose every token has weight times advantage 0 add nothing to the gradient and are not computed;
    they still count in N. When no answer is left, or the gradient is not finite, nothing is changed.
    """
    credit = (weight * advantage * rollouts.mask).abs().sum(1)
    rows = credit.nonzero().squeeze(1)
    rows = rows[rollouts.length[rows].argsort(stable=True)]  # answers of like length together: less padding
    total, loss, gap, computed = int(rollouts.mask.sum()), 0.0, 0.0, 0
    optimizer.zero_grad(set_to_none=True)
    for part in rows.split(micro_batch) if len(rows) else ():
        mask = rollouts.mask[part]
        with autocast:
            log_prob = response_log_probs(model, rollouts, part)
        part_loss = policy_loss(log_prob, advantage[part], weight[part], mask, total)
        part_loss.backward()
        loss += part_loss.item()
        gap += ((log_prob.detach() - rollouts.log_prob[part]) * mask).abs().sum().item()
        computed += int(mask.sum())
    if not computed:
        return {"loss": 0.0, "gradient_norm": None, "sampler_gap": None, "trained_tokens": 0,
                "skipped": "every group's answers had equal rewards" if not advantage.any() else "all weights are 0"}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")).item()
    finite = bool(np.isfinite(norm))
    if finite:
        optimizer.step()
    return {"loss": loss, "gradient_norm": norm, "sampler_gap": gap / computed, "trained_tokens": computed,
            "skipped": None if finite else "the gradient was not finite"}


def write_credit(path: Path, rollouts: Rollouts, advantage: torch.Tensor, weight: torch.Tensor) -> None:
    """One step's record: a value a token (answers end to end), an answer, or a question. See the README."""
    mask, lengths = rollouts.mask, rollouts.length.cpu().numpy()

    def flat(values, dtype=np.float32):
        return values[mask].cpu().numpy().astype(dtype)

    def starts(sizes):
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)

    columns = {
        "token_id": flat(rollouts.tokens, np.int32), "log_prob": flat(rollouts.log_prob),
        "entropy": flat(rollouts.entropy), "collision": flat(rollouts.collision),
        "weight": flat(weight), "advantage": flat(advantage),
        "section": flat(rollouts.section, np.uint8), "kind": flat(rollouts.kind, np.uint8),
        "episode_start": starts(lengths), "group": rollouts.group.cpu().numpy().astype(np.int32),
        "finished": rollouts.finished.cpu().numpy(),
        "reward": rollouts.scores["reward"].cpu().numpy(),
        **{f"reward_{name}": rollouts.scores[name].cpu().numpy() for name in ("format", "answer", "reasoning")},
        "prompt_ids": np.concatenate(rollouts.prompt_ids).astype(np.int32),
        "prompt_start": starts([len(prompt) for prompt in rollouts.prompt_ids])}
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, **columns)
    os.replace(unfinished, path)
