"""The training forward pass, in the frame of a batch.

`response_log_probs` is all that the loss needs of the model. It calls, in this order:

    first_of_equals  equal answers to a problem are computed once
    lay_out          the tokens as one flat sequence, and which position predicts token t
    SharedPrompts    (packing.py) the attention: answers to a problem share its prompt, and prompts
                     share the tokens that all of them begin with
    TokenLogProbs    log softmax of single tokens, without the logits of the whole batch at once
"""
from typing import Any

import torch
from torch import Tensor

from engine import processes
from engine.packing import SharedPrompts, pack, send
from engine.processes import reshard_layers
from engine.rollouts import Rollouts
from qwen2_model import Qwen2, linear

LOGITS_AT_ONCE = 2 ** 27  # at most so many float32 logits exist at the same time, or twice bfloat16


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """(rows, T): log-probs of these rows' tokens, with gradient; 0 where masked."""
    distinct, number = first_of_equals(rollouts, rows)
    computed = log_probs_of_each(model, rollouts, distinct)  # (distinct, T)
    return computed.index_select(0, send(number, rollouts.ids.device))


def first_of_equals(rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the rows that differ in tokens or problem, and for each of all rows its number among
    them (rows,): equal answers have equal log-probs. Both are on the CPU.

        problems 0 0 0 1, answers x x y x, rows 4 5 6 7      distinct 4 6 7, number 0 0 1 2
    """
    group_of, tokens = rollouts.lists
    distinct: dict[tuple[int, ...], int] = {}  # in the order of their first rows
    answers = []
    for row in rows.tolist():  # an update waits for a GPU here, in every micro-batch
        answers.append((group_of[row], *tokens[row]))
        distinct.setdefault(answers[-1], row)
    number_of = {answer: number for number, answer in enumerate(distinct)}
    return (torch.tensor([*distinct.values()], dtype=torch.long),
            torch.tensor([number_of[answer] for answer in answers], dtype=torch.long))


def log_probs_of_each(model: Qwen2, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """As `response_log_probs`, each row by itself."""
    ids, shared, predicts = lay_out(rollouts, rows)
    answers = [rollouts.lists[1][row] for row in rows.tolist()]
    length = torch.tensor(list(map(len, answers)))
    is_token = torch.arange(rollouts.ids.shape[1]) < length[:, None]
    places = send(is_token.flatten().nonzero().squeeze(1), ids.device)  # in (rows, T), end to end
    hidden = model.model(ids, shared.positions, shared)          # (N, D)
    states = hidden.index_select(0, predicts.flatten()[places])  # one for each generated token
    targets = send(torch.tensor(sum(answers, []), dtype=torch.long), ids.device)
    log_prob: Tensor = TokenLogProbs.apply(states, model.output_matrix, targets)
    return log_prob.new_zeros(predicts.numel()).index_copy(0, places, log_prob).view_as(predicts)


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor, micro_batch: int) -> Tensor:
    """(B, T): log-probs of these rows' tokens, detached; 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    for part in micro_batches(rollouts, rows, micro_batch):
        log_prob[part] = response_log_probs(model, rollouts, part)
    reshard_layers(model)
    return log_prob


def lay_out(rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, SharedPrompts, Tensor]:
    """Pack these rows. Returns the ids of the flat sequence (N,), each prompt once, and once what
    all of them begin with; its attention mask, as SharedPrompts; and for token t the index that
    predicts it (rows, T).

    This is the one place where the shift is made: the end of the prompt predicts token 0, and token
    t - 1 predicts token t. The last token predicts nothing and is left out. Beyond the mask the
    index is 0.

        prompt a b c, answer x y z       ids a b c x y,  predicts 2 3 4
    """
    device = rollouts.ids.device
    group_of, tokens = rollouts.lists
    numbers = rows.tolist()
    groups = [group_of[row] for row in numbers]
    distinct = sorted(set(groups))
    prompts = [rollouts.prompt_ids[group] for group in distinct]
    prompt_of = torch.tensor([distinct.index(group) for group in groups], dtype=torch.long)
    ids, shared = pack(prompts, [tokens[row][:-1] for row in numbers], prompt_of)
    last = torch.tensor(list(map(len, prompts)), dtype=torch.long) - 1  # of each prompt
    predicts = torch.zeros(len(numbers), rollouts.ids.shape[1], dtype=torch.long)
    predicts[:, 0] = shared.prompts[prompt_of, last[prompt_of]]
    predicts[:, 1:1 + shared.answers.shape[1]] = shared.answers
    return send(ids, device), shared.to(device), send(predicts, device)


def micro_batches(rollouts: Rollouts, rows: Tensor, size: int) -> list[Tensor]:
    """Cut rows into parts that fit into memory; answers to one problem stay side by side. The
    largest part, counted as if no answers were equal, comes first: the others fit into the memory
    it leaves. A process with fewer parts than another gets empty ones at the end: engine/sharded.py
    says why.

    A GPU starts as many kernels for few tokens as for many: there, parts are joined while they have
    no more tokens, prompts included, than `size` answers of full length.
    """
    group_of, tokens = rollouts.lists
    numbers = rows.tolist()

    def count_tokens(part: slice) -> int:
        groups = {group_of[row] for row in numbers[part]}
        return (sum(len(rollouts.prompt_ids[group]) for group in groups)
                + sum(len(tokens[row]) for row in numbers[part]))

    most = size * rollouts.ids.shape[1] if rows.device.type == "cuda" else 0
    parts: list[slice] = []
    for start in range(0, len(numbers), size):
        joined = slice(parts[-1].start if parts else 0, start + size)
        if parts and count_tokens(joined) <= most:
            parts[-1] = joined
        else:
            parts.append(slice(start, start + size))
    parts.sort(key=count_tokens, reverse=True)
    missing = processes.all_reduce_max(len(parts)) - len(parts)
    return [rows[part] for part in parts] + [rows[:0]] * missing


class TokenLogProbs(torch.autograd.Function):
    """log softmax(W h)_y of n tokens: (n, D), (V, D), (n,) -> (n,).

    The gradient at the logits is g (onehot(y) - p), so p (n, V) is all that is saved for backward.
    Above LOGITS_AT_ONCE nothing is: p is computed in the backward pass, in chunks of tokens.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        cast = matrix.to(hidden.dtype)
        ctx.chunk = max(1, 4 * LOGITS_AT_ONCE // hidden.element_size() // len(matrix))
        if len(hidden) <= ctx.chunk:
            log_prob, p = token_distribution(hidden, cast, targets)
            ctx.save_for_backward(hidden, matrix, targets, p)
            return log_prob
        ctx.save_for_backward(hidden, matrix, targets)
        return torch.cat([
            linear(h, cast).log_softmax(-1, dtype=torch.float32).gather(1, y[:, None])
            for h, y in zip(hidden.split(ctx.chunk), targets.split(ctx.chunk))]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, matrix, targets, *kept = ctx.saved_tensors
        cast = matrix.to(hidden.dtype)
        at_hidden: list[Tensor] = []
        at_matrix: Tensor | None = None
        parts = zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), gradient.split(ctx.chunk))
        for h, y, g in parts:
            p = kept[0] if kept else linear(h, cast).softmax(-1, dtype=torch.float32)
            # float32, but for what is written; p stays: another backward pass may ask for it
            at_logits = torch.mul(p, -g[:, None], out=torch.empty_like(p, dtype=h.dtype))
            at_target = p.gather(1, y[:, None]) * -g[:, None] + g[:, None]
            at_logits.scatter_(1, y[:, None], at_target.to(h.dtype))
            at_hidden.append(linear(at_logits, cast.T))
            product = linear(at_logits.T, h.T)
            at_matrix = product.to(matrix.dtype) if at_matrix is None else at_matrix.add_(product)
            del p, at_logits, product  # before the next chunk takes memory
        return torch.cat(at_hidden), at_matrix, None


def token_distribution(hidden: Tensor, matrix: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets (n,), and p (n, V) of the whole vocabulary."""
    logits = linear(hidden, matrix).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    log_prob = (logits.gather(1, targets[:, None]) - normaliser).squeeze(1)
    return log_prob, logits.sub_(normaliser).exp_()
