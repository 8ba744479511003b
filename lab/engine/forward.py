"""The training forward pass, in the coordinates of a batch: index t is the t-th generated token.

`response_log_probs` is all that the loss needs of the model. It uses, in this order:

    first_of_equals  so that equal answers to a problem are computed once
    lay_out          puts the tokens into one flat sequence and says which index predicts token t
    SharedPrompts    (packing.py) the attention, in which answers to a problem share its prompt, and
                     prompts share the tokens that all of them begin with
    TokenLogProbs    log softmax of single tokens, without the logits of the whole batch at once;
                     LogProbsOfFrozen if the output matrix is not trained, as with --lora
"""
from typing import Any

import torch
from torch import Tensor

from lab.engine.fused import has_kernels
from lab.engine.packing import SharedPrompts, pack, send
from lab.engine.rollouts import Rollouts
from lab.engine.model import Qwen2, linear

LOGITS_AT_ONCE = 2 ** 27  # the most logits at a time in float32; in bfloat16 twice as many
LOGITS_OF_FROZEN = 2 ** 24  # the most if the output matrix is frozen, in either type


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor,
                       temperature: float = 1.0) -> Tensor:
    """(rows, T): the log-probs of these rows' tokens, with gradient; 0 outside the mask."""
    distinct, number = first_of_equals(rollouts, rows)
    computed = log_probs_of_each(model, rollouts, distinct, temperature)  # (distinct, T)
    return computed.index_select(0, send(number, rollouts.ids.device))


def first_of_equals(rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows without repetitions, because equal answers to the same problem have equal log-probs.
    The second tensor (rows,) has for each row the index of its equal among the first. Both are on
    the CPU.

        problems 0 0 0 1, answers x x y x, rows 4 5 6 7      distinct 4 6 7, number 0 0 1 2
    """
    group_of, tokens = rollouts.groups_and_ids
    distinct: dict[tuple[int, ...], int] = {}  # the first row of each answer
    answers = []
    for row in rows.tolist():  # the CPU waits for the GPU here, in every micro-batch
        answer = (group_of[row], *tokens[row])
        answers.append(answer)
        distinct.setdefault(answer, row)
    number_of = {answer: number for number, answer in enumerate(distinct)}
    first_rows = torch.tensor(list(distinct.values()), dtype=torch.long)
    numbers = torch.tensor([number_of[answer] for answer in answers], dtype=torch.long)
    return first_rows, numbers


def log_probs_of_each(model: Qwen2, rollouts: Rollouts, rows: Tensor,
                      temperature: float = 1.0) -> Tensor:
    """The same as `response_log_probs`, but equal rows are computed several times."""
    ids, shared, predicts = lay_out(rollouts, rows)
    _, tokens = rollouts.groups_and_ids
    drawn = rollouts.drawn[rows.cpu()]  # what an environment wrote has no log-prob
    targets_of: list[int] = []
    for answer, is_own in zip((tokens[row] for row in rows.tolist()), drawn.tolist()):
        targets_of += [token for token, own in zip(answer, is_own) if own]
    # the indices of tokens in a flattened (rows, T)
    cells = send(drawn.flatten().nonzero().squeeze(1), ids.device)
    hidden = model.model(ids, shared.positions, shared)         # (N, D)
    states = hidden.index_select(0, predicts.flatten()[cells])  # one for each generated token
    if temperature != 1:
        states = states / temperature  # so the logits, which are linear in them, are divided too
    targets = send(torch.tensor(targets_of, dtype=torch.long), ids.device)
    log_prob: Tensor
    if has_kernels(states.dtype, states.device):
        from lab.gpu.kernels import LogProbsByKernels
        log_prob = LogProbsByKernels.apply(states, model.output_matrix, targets)
    elif not model.output_matrix.requires_grad:  # --lora, or a model that is not trained
        log_prob = LogProbsOfFrozen.apply(states, model.output_matrix, targets)
    else:
        log_prob = TokenLogProbs.apply(states, model.output_matrix, targets)
    flat = log_prob.new_zeros(predicts.numel()).index_copy(0, cells, log_prob)
    return flat.view_as(predicts)


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor, micro_batch: int,
                     temperature: float = 1.0) -> Tensor:
    """(B, T): the log-probs of these rows' tokens, without gradient; 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    for part in micro_batches(rollouts, rows, micro_batch):
        log_prob[part] = response_log_probs(model, rollouts, part, temperature)
    return log_prob


def lay_out(rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, SharedPrompts, Tensor]:
    """Put these rows into one flat sequence. Returns its ids (N,), with each prompt once and the
    beginning of all prompts once; its attention; and for token t of a row the index in the sequence
    that predicts it (rows, T).

    Only here are indices shifted: the end of the prompt predicts token 0, and token t - 1 predicts
    token t. The last token predicts nothing and is left out. Beyond the mask the index is 0.

        prompt a b c, answer x y z       ids a b c x y,  predicts 2 3 4
    """
    device = rollouts.ids.device
    group_of, tokens = rollouts.groups_and_ids
    numbers = rows.tolist()
    groups = [group_of[row] for row in numbers]
    distinct = sorted(set(groups))
    prompts = [rollouts.prompt_ids[group] for group in distinct]
    prompt_of = torch.tensor([distinct.index(group) for group in groups], dtype=torch.long)
    ids, shared = pack(prompts, [tokens[row][:-1] for row in numbers], prompt_of)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], dtype=torch.long)
    predicts = torch.zeros(len(numbers), rollouts.ids.shape[1], dtype=torch.long)
    predicts[:, 0] = shared.prompts[prompt_of, last[prompt_of]]
    predicts[:, 1:1 + shared.answers.shape[1]] = shared.answers
    return send(ids, device), shared.to(device), send(predicts, device)


def micro_batches(rollouts: Rollouts, rows: Tensor, size: int) -> list[Tensor]:
    """Cut the rows into parts of `size` that fit into memory, with the answers to a problem side by
    side. The part with most tokens comes first, because the others then fit into the memory that it
    has taken. (Equal answers are counted as if each were computed.)

    On a GPU neighbouring parts are joined, because a GPU needs as many kernels for few tokens as
    for many. A joined part has no more tokens, prompts included, than `size` answers of full
    length.
    """
    group_of, tokens = rollouts.groups_and_ids
    numbers = rows.tolist()

    def count_tokens(part: slice) -> int:
        groups = {group_of[row] for row in numbers[part]}
        of_prompts = sum(len(rollouts.prompt_ids[group]) for group in groups)
        of_answers = sum(len(tokens[row]) for row in numbers[part])
        return of_prompts + of_answers

    most = size * rollouts.ids.shape[1] if rows.device.type == "cuda" else 0
    parts: list[slice] = []
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        if parts:
            joined = slice(parts[-1].start, part.stop)
            if count_tokens(joined) <= most:
                parts[-1] = joined
                continue
        parts.append(part)
    parts.sort(key=count_tokens, reverse=True)
    return [rows[part] for part in parts]


class TokenLogProbs(torch.autograd.Function):
    """log softmax(W h)_y of n tokens: (n, D), (V, D), (n,) -> (n,).

    The gradient at the logits is g (onehot(y) - p), so p (n, V) is saved for the backward pass. If
    it has more than LOGITS_AT_ONCE numbers, it is not saved but computed again in the backward
    pass, in chunks of tokens.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        cast, ctx.matrix_dtype = matrix.to(hidden.dtype), matrix.dtype
        bytes_of_a_row = hidden.element_size() * len(matrix)  # of the logits of a token
        ctx.chunk = max(1, 4 * LOGITS_AT_ONCE // bytes_of_a_row)
        if len(hidden) <= ctx.chunk:
            log_prob, p = token_distribution(hidden, cast, targets)
            ctx.save_for_backward(hidden, cast, targets, p)
            return log_prob
        ctx.save_for_backward(hidden, cast, targets)
        parts = []
        for h, y in zip(hidden.split(ctx.chunk), targets.split(ctx.chunk)):
            log_p = linear(h, cast).log_softmax(-1, dtype=torch.float32)
            parts.append(log_p.gather(1, y[:, None]))
            del log_p  # before the next chunk takes memory
        return torch.cat(parts).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, cast, targets, *kept = ctx.saved_tensors
        at_hidden: list[Tensor] = []
        at_matrix: Tensor | None = None
        parts = zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), gradient.split(ctx.chunk))
        for h, y, g in parts:
            p = kept[0] if kept else linear(h, cast).softmax(-1, dtype=torch.float32)
            # The gradient at the logits is -g p, and at the target g more. It is computed in
            # float32 and written in h's type; not into p, which another backward pass may need.
            rows = torch.arange(len(y), device=y.device)
            at_target = p[rows, y] * -g + g
            at_logits = torch.mul(p, -g[:, None], out=torch.empty_like(p, dtype=h.dtype))
            # not by `scatter_`, which copies all of a matrix in bfloat16
            at_logits[rows, y] = at_target.to(h.dtype)
            at_hidden.append(linear(at_logits, cast.T))
            if ctx.needs_input_grad[1]:  # it does not if the matrix is frozen
                product = linear(at_logits.T, h.T)
                if at_matrix is None:
                    at_matrix = product.to(ctx.matrix_dtype)
                else:
                    at_matrix.add_(product)
                del product
            del p, at_logits  # before the next chunk takes memory
        return torch.cat(at_hidden), at_matrix, None


class LogProbsOfFrozen(torch.autograd.Function):
    """The same as TokenLogProbs for a matrix that is not trained.

    The gradient at a hidden state is then g W^T (onehot(y) - p), a number times a vector that is
    known in the forward pass. So this vector (n, D) is computed there and saved, in chunks of
    tokens, and p (n, V) is neither saved nor computed again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        cast, log_probs, directions = matrix.to(hidden.dtype), [], []
        chunk = max(1, LOGITS_OF_FROZEN // len(matrix))
        for h, y in zip(hidden.split(chunk), targets.split(chunk)):
            log_prob, p = token_distribution(h, cast, y)
            log_probs.append(log_prob)
            if ctx.needs_input_grad[0]:
                at_logits = p.neg_().to(h.dtype)
                rows = torch.arange(len(y), device=y.device)
                at_logits[rows, y] = (1 - log_prob.exp()).to(h.dtype)
                directions.append(linear(at_logits, cast.T))
                del at_logits  # before the next chunk takes memory
            del p
        if directions:
            ctx.save_for_backward(torch.cat(directions))
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [direction] = ctx.saved_tensors
        return (gradient[:, None] * direction).to(direction.dtype), None, None


def token_distribution(hidden: Tensor, matrix: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the targets (n,), and p of the whole vocabulary (n, V)."""
    logits = linear(hidden, matrix).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    log_prob = (logits.gather(1, targets[:, None]) - normaliser).squeeze(1)
    return log_prob, logits.sub_(normaliser).exp_()
