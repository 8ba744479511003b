"""Kernels for a GPU, in Triton: what torch's operations would read and write several times, each of
these reads once and writes once. They are loaded only on CUDA, in bfloat16, and if Triton is there
(torch for Linux brings it). Without them model.py, cache.py and sampler.py of this room call torch.

A Triton kernel is a Python function for one *program*. A launch starts a grid of programs, which do
not know of each other. Each computes with tiles: `tl.arange` makes the indices of a tile, `tl.load`
reads the numbers at these addresses, and a mask says which of them to leave out.

In a token step with R rows:

    kernel          what it computes                                   one program for each
    norm            RMSNorm, rounded                                   row
    attend          rotates queries and keys, stores keys and values,  row, key head, part of the
                    attention of a row's new token                     keys
    join            puts the parts of the keys together                eight heads of queries
    silu_times_up   silu(gate) * up                                    row, part of the width
    logit_parts     the largest logit, and sums over e^logit           row, part of the vocabulary
    draw            draws the token; its log p, entropy, collision     row

In an update, for the log p of n tokens with logits (n, V):

    log_sum_exp     log sum exp of the logits                          token
    logit_gradient  g (onehot - p)                                     token, part of the vocabulary

Why this is faster. A token step has little arithmetic and hundreds of kernels. It takes a
microsecond until one begins, and each waits for the slowest program of the one before it. So there
should be few kernels, and many programs in each. torch's attention with a mask computes tiles of 64
queries, though a row has 7 for each key head. In an update the logits are the largest tensor by
far, and the time goes into reading them.

Sums are float32. What training rounds to bfloat16 is rounded here, too, so that the model that
samples is the one that is trained. Nothing is added with atomics, so each run adds in the same
order.
"""
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lab.engine.model import linear
from lab.gpu.cache import Cache
from lab.gpu.model import ModelOnGPU

BELOW_ALL = tl.constexpr(-1e30)  # a score below all others, but finite: -inf - -inf is undefined
# Measured on an H200. The keys are cut into parts as long as there are fewer programs than this,
# because a GPU of 132 processors would otherwise be idle in part.
PROGRAMS, MOST_PARTS = 128, 8
KEYS = 8192              # a tile of keys has so many numbers: 128 keys of 64
VOCABULARY_PART = 2048
LOGIT_BYTES = 2 ** 32    # of logits at a time in an update


def next_power(n: int) -> int:
    """The first power of 2 from n on, as a tile has to have."""
    return 1 << (n - 1).bit_length()


# ---- the norm and the MLP ------------------------------------------------------------------------

@triton.jit
def norm_kernel(x, weight, normed, eps, D: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, TILE)
    inside = at < D
    value = tl.load(x + row * D + at, mask=inside, other=0.0)
    scale = 1 / tl.sqrt(tl.sum(value * value) / D + eps)
    value = value * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(normed + row * D + at, value.to(normed.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm(x) * weight of each row (R, D), in this type."""
    R, D = x.shape
    normed = torch.empty(R, D, dtype=dtype, device=x.device)
    norm_kernel[(R,)](x, weight, normed, eps, D, next_power(D), num_warps=4)
    return normed


@triton.jit
def silu_times_up_kernel(gate_up, out, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0)
    silu = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * WIDTH + at, silu * up, mask=inside)


def silu_times_up(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for the two side by side (R, 2 width): (R, width)."""
    R, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(R, width)
    silu_times_up_kernel[(R, triton.cdiv(width, 1024))](gate_up, out, width, 1024, num_warps=4)
    return out


# ---- attention -----------------------------------------------------------------------------------

@triton.jit
def rotated(line, norm, cos, sin, mask, eps, HALF: tl.constexpr, NORMED: tl.constexpr):
    """A head of N tokens, rotated: (N, 2 HALF), rounded to the type of what is read. `line` has the
    addresses of its first half. As in `rotate` of qwen2_model.py, number i of the first half and
    number i of the second are a pair."""
    a = tl.load(line, mask=mask, other=0.0)
    b = tl.load(line + HALF, mask=mask, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORMED:  # Qwen3
        at = tl.arange(0, HALF)
        scale = 1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)
        a = (a * scale[:, None] * tl.load(norm + at)[None]).to(dtype).to(tl.float32)
        b = (b * scale[:, None] * tl.load(norm + HALF + at)[None]).to(dtype).to(tl.float32)
    both = tl.join((a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype))  # (N, HALF, 2)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (a.shape[0], 2 * HALF))


@triton.jit(do_not_specialize=["P", "rows", "length"])
def attend_kernel(qkv, norm, cos_sin, position, seen, column, stored, out, sums_of, facts_of,
                  P, rows, length, scale, eps,
                  H: tl.constexpr, K: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr,
                  TILE: tl.constexpr, NORMED: tl.constexpr, ALONE: tl.constexpr):
    """The queries of a row that belong to one key head, and the keys they see (as in
    lab/gpu/cache.py; | is where the program's own part of the keys ends):

        prompt      slot 0 | slot 1   the open slot
        x x x . .     x    |   x       own, from qkv

    What a row sees is computed from the index of the key, so no mask is read. A softmax in one pass
    (online, 1805.02867): when a larger score comes, the sums so far shrink. The new token's own key
    is not yet in the cache, so it comes first, out of the registers of part 0, which also stores
    it. ALONE says that there is one part; else `join` adds the parts up."""
    row, key_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = SIZE // 2
    PER: tl.constexpr = H // K
    query, dim, half = tl.arange(0, QUERIES), tl.arange(0, SIZE), tl.arange(0, HALF)
    is_query = query < PER
    head = key_head * PER + query
    line = qkv + row * ((H + 2 * K) * SIZE)
    angle = cos_sin + tl.load(position + row) * (2 * SIZE) + half[None]
    cos = tl.load(angle)
    sin = tl.load(angle + SIZE + HALF)  # the half of the sine that is not negated

    # the new token: its queries, and its key and value, which it sees and others do not
    at_head = line + half[None]
    q = rotated(at_head + head[:, None] * SIZE, norm, cos, sin, is_query[:, None], eps, HALF,
                NORMED)
    own_k = rotated(at_head + (H + key_head) * SIZE, norm + H * SIZE, cos, sin, half[None] < HALF,
                    eps, HALF, NORMED)
    own_v = tl.load(line + (H + K + key_head) * SIZE + dim[None])
    keys = stored + (row.to(tl.int64) * (2 * K) + key_head) * length * SIZE
    values = keys + K * length * SIZE
    end = tl.load(column)  # what stands before this column is written
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    if part == 0:
        own_score = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
        most, total = own_score, tl.full((QUERIES,), 1.0, tl.float32)
        sums += own_v.to(tl.float32)
        there = end * SIZE + dim[None]
        tl.store(keys + there, own_k)
        tl.store(values + there, own_v)
    else:
        most = tl.full((QUERIES,), BELOW_ALL, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)

    sees = tl.load(seen + row)  # so many tokens of the prompt
    chunk = tl.cdiv(tl.cdiv(end, tl.num_programs(2)), TILE) * TILE
    first = part * chunk
    stop = tl.minimum(end, first + chunk)
    for start in range(first, stop, TILE):
        key = start + tl.arange(0, TILE)
        there = key[:, None] * SIZE + dim[None]
        inside = (key < stop)[:, None]
        k = tl.load(keys + there, mask=inside, other=0.0)
        v = tl.load(values + there, mask=inside, other=0.0)
        visible = (key < stop) & ((key < sees) | (key >= P))
        score = tl.where(visible[None], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, 1))
        e = tl.exp(score - new_most[:, None])
        shrink = tl.exp(most - new_most)
        total = total * shrink + tl.sum(e, 1)
        sums = sums * shrink[:, None] + tl.dot(e.to(v.dtype), v)
        most = new_most

    number = row * H + head
    if ALONE:
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + number[:, None] * SIZE + dim[None], result, mask=is_query[:, None])
    else:
        number += part * rows * H
        tl.store(sums_of + number[:, None] * SIZE + dim[None], sums, mask=is_query[:, None])
        tl.store(facts_of + number * 2, most, mask=is_query)
        tl.store(facts_of + number * 2 + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["heads"])
def join_kernel(sums_of, facts_of, out, heads, PARTS: tl.constexpr, MANY: tl.constexpr,
                SIZE: tl.constexpr):
    """Each part has sums of e^(score - its own largest score), so each is multiplied by
    e^(its largest - the largest of all) before they are added."""
    number = tl.program_id(0) * MANY + tl.arange(0, MANY)  # of a row's head
    dim = tl.arange(0, SIZE)
    inside = number < heads
    most = tl.full((MANY,), BELOW_ALL, tl.float32)
    for part in tl.static_range(PARTS):
        of_part = tl.load(facts_of + (part * heads + number) * 2, mask=inside, other=0.0)
        most = tl.maximum(most, of_part)
    total = tl.zeros((MANY,), tl.float32)
    sums = tl.zeros((MANY, SIZE), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * heads + number
        weight = tl.exp(tl.load(facts_of + at * 2, mask=inside, other=0.0) - most)
        total += weight * tl.load(facts_of + at * 2 + 1, mask=inside, other=1.0)
        of_part = tl.load(sums_of + at[:, None] * SIZE + dim[None], mask=inside[:, None], other=0.0)
        sums += weight[:, None] * of_part
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + number[:, None] * SIZE + dim[None], result, mask=inside[:, None])


def attend(cache: Cache, layer: int, qkv: Tensor, qk_norm: Tensor | None, eps: float,
           cos_sin: Tensor, position: Tensor, seen: Tensor, H: int, K: int) -> Tensor:
    """The attention of R new tokens, whose queries, keys and values are qkv (R, (H + 2 K) size),
    not yet rotated: (R, H size). Their keys and values are stored in the cache's open slot."""
    stored = cache.stored[layer]
    R, SIZE = len(qkv), stored.shape[3]
    parts = max(1, min(MOST_PARTS, PROGRAMS // (R * K)))
    parts = 1 << (parts.bit_length() - 1)  # rounded down to a power of 2: few kernels are compiled
    out = qkv.new_empty(R, H * SIZE)
    of_parts = parts if parts > 1 else 0
    sums = qkv.new_empty(of_parts, R * H, SIZE, dtype=torch.float32)
    facts = qkv.new_empty(of_parts, R * H, 2, dtype=torch.float32)
    queries = max(16, next_power(H // K))  # a tile of a product has 16 lines at least
    tile = min(128, KEYS // next_power(SIZE))
    attend_kernel[(R, K, parts)](
        qkv, qkv if qk_norm is None else qk_norm, cos_sin, position, seen, cache.column, stored,
        out, sums, facts, cache.P, R, stored.shape[2], SIZE ** -0.5, eps, H, K, queries, SIZE, tile,
        qk_norm is not None, parts == 1, num_warps=4, num_stages=3)
    if parts > 1:
        join_kernel[(triton.cdiv(R * H, 8),)](sums, facts, out, R * H, parts, 8, SIZE, num_warps=4)
    return out


# ---- logits --------------------------------------------------------------------------------------

@triton.jit
def logit_parts_kernel(logits, found, V, parts, warmth, WIDTH: tl.constexpr):
    """Of each part of a row's logits: the largest, m; and with z = logit - m the sums of e^z,
    e^z z, e^2z and, for drawing at a temperature, e^(z / temperature)."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * WIDTH + tl.arange(0, WIDTH)
    inside = at < V
    z = tl.load(logits + row.to(tl.int64) * V + at, mask=inside, other=float("-inf"))
    z = z.to(tl.float32)
    most = tl.max(z)
    z = tl.where(inside, z - most, 0.0)
    e = tl.where(inside, tl.exp(z), 0.0)
    there = found + (row * parts + part) * 5
    tl.store(there, most)
    tl.store(there + 1, tl.sum(e))
    tl.store(there + 2, tl.sum(e * z))
    tl.store(there + 3, tl.sum(e * e))
    tl.store(there + 4, tl.sum(tl.where(inside, tl.exp(z * warmth), 0.0)))


@triton.jit
def first_above(height, e, index, NONE: tl.constexpr):
    """The first index at which the cumulative sum of e is above the height. Where e is 0 it is
    never taken; if rounding leaves none, it is the last where e is not 0."""
    above = (tl.cumsum(e) > height) & (e > 0)
    first = tl.min(tl.where(above, index, NONE))
    last = tl.max(tl.where(e > 0, index, 0))
    return tl.where(first == NONE, last, first)


@triton.jit
def draw_kernel(logits, found, uniform, line, answer, token, tokens, facts, V, parts, warmth,
                PARTS: tl.constexpr, WIDTH: tl.constexpr, GREEDY: tl.constexpr):
    """First the part of the vocabulary is drawn, then the token within it, by the same random
    number. Only the second reads logits, those of this part."""
    row = tl.program_id(0)
    part, at = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    there = found + (row * parts + part) * 5
    is_part = part < parts
    of_part = tl.load(there, mask=is_part, other=float("-inf"))
    most = tl.max(of_part)
    below = tl.where(is_part, of_part - most, 0.0)
    scale = tl.where(is_part, tl.exp(below), 0.0)
    e = tl.load(there + 1, mask=is_part, other=0.0)
    ez = tl.load(there + 2, mask=is_part, other=0.0)
    Z = tl.sum(scale * e)
    entropy = tl.log(Z) - tl.sum(scale * (ez + below * e)) / Z
    square = tl.load(there + 3, mask=is_part, other=0.0)
    collision = tl.sum(scale * scale * square) / (Z * Z)

    cell = tl.load(line) + tl.load(answer + row)
    here = logits + row.to(tl.int64) * V
    if GREEDY:
        chosen = tl.min(tl.where(of_part == most, part, PARTS))
        index = chosen * WIDTH + at
        z = tl.load(here + index, mask=index < V, other=float("-inf")).to(tl.float32)
        picked = tl.min(tl.where(z == most, index, V - 1))
    else:
        drawn_from = tl.where(is_part, tl.exp(below * warmth), 0.0)
        drawn_from *= tl.load(there + 4, mask=is_part, other=0.0)
        share = tl.minimum(tl.load(uniform + cell), 1 - 1.1920929e-07)  # below 1 after rounding
        height = share * tl.sum(drawn_from)
        chosen = first_above(height, drawn_from, part, PARTS)
        height -= tl.sum(tl.where(part < chosen, drawn_from, 0.0))
        index = chosen * WIDTH + at
        z = tl.load(here + index, mask=index < V, other=float("-inf")).to(tl.float32)
        picked = first_above(height, tl.exp((z - most) * warmth), index, V)
    log_p = tl.load(here + picked).to(tl.float32) - most - tl.log(Z)
    tl.store(token + row, picked.to(tl.int64))
    tl.store(tokens + cell, picked.to(tl.int64))
    tl.store(facts + cell * 3, log_p)
    tl.store(facts + cell * 3 + 1, entropy)
    tl.store(facts + cell * 3 + 2, collision)


def draw(logits: Tensor, uniform: Tensor, line: Tensor, answer: Tensor, token: Tensor,
         tokens: Tensor, facts: Tensor, temperature: float, greedy: bool) -> None:
    """Draw the next token of each row from logits (R, V) by inverse-CDF sampling, and record it
    with log p, entropy and collision at temperature 1. `uniform`, `tokens` and `facts` are the flat
    tables of `Decoding`, whose cell of this step is line + answer."""
    R, V = logits.shape
    parts = triton.cdiv(V, VOCABULARY_PART)
    found = torch.empty(R, parts, 5, dtype=torch.float32, device=logits.device)
    warmth = 1.0 if greedy else 1 / temperature
    logit_parts_kernel[(R, parts)](logits, found, V, parts, warmth, VOCABULARY_PART, num_warps=4)
    draw_kernel[(R,)](logits, found, uniform, line, answer, token, tokens, facts, V, parts, warmth,
                      next_power(parts), VOCABULARY_PART, greedy, num_warps=4)


@triton.jit
def log_sum_exp_kernel(logits, normaliser, V, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    here = logits + row.to(tl.int64) * V
    most, total = tl.full((WIDTH,), BELOW_ALL, tl.float32), tl.zeros((WIDTH,), tl.float32)
    for start in range(0, V, WIDTH):  # each lane has a maximum and a sum of its own
        at = start + tl.arange(0, WIDTH)
        z = tl.load(here + at, mask=at < V, other=float("-inf")).to(tl.float32)
        new_most = tl.maximum(most, z)
        total = total * tl.exp(most - new_most) + tl.exp(z - new_most)
        most = new_most
    of_all = tl.max(most)
    tl.store(normaliser + row, of_all + tl.log(tl.sum(total * tl.exp(most - of_all))))


def log_sum_exp(logits: Tensor) -> Tensor:
    """log sum exp of each row: (n, V) -> (n,) in float32."""
    n, V = logits.shape
    normaliser = torch.empty(n, dtype=torch.float32, device=logits.device)
    log_sum_exp_kernel[(n,)](logits, normaliser, V, 2048, num_warps=8)
    return normaliser


@triton.jit
def logit_gradient_kernel(logits, normaliser, target, gradient, result, V, WIDTH: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < V
    g = tl.load(gradient + row)
    here = row.to(tl.int64) * V + at
    z = tl.load(logits + here, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(z - tl.load(normaliser + row))
    is_target = (at == tl.load(target + row)).to(tl.float32)
    value = g * (is_target - p)
    tl.store(result + here, value.to(result.dtype.element_ty), mask=inside)


def logit_gradient(logits: Tensor, normaliser: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
    """g (onehot(target) - p) of each row: (n, V), in the type of the logits."""
    n, V = logits.shape
    result = torch.empty_like(logits)
    logit_gradient_kernel[(n, triton.cdiv(V, 4096))](logits, normaliser, target,
                                                     gradient.contiguous(), result, V, 4096,
                                                     num_warps=8)
    return result


class LogProbsByKernels(torch.autograd.Function):
    """What `token_log_probs` of lab/engine/log_probs.py computes, with two kernels, each of which
    reads the logits once. The logits are kept as they are for the backward pass, in bfloat16; if
    they would take more than LOGIT_BYTES, they are computed again, in chunks of tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
        rounded, ctx.matrix_dtype = matrix.to(hidden.dtype), matrix.dtype
        ctx.chunk = max(1, LOGIT_BYTES // (rounded.element_size() * len(rounded)))
        kept, log_probs = [], []
        for h, y in zip(hidden.split(ctx.chunk), targets.split(ctx.chunk)):
            logits = linear(h, rounded)
            normaliser = log_sum_exp(logits)
            log_probs.append(logits.gather(1, y[:, None]).squeeze(1).float() - normaliser)
            if len(hidden) <= ctx.chunk:
                kept = [logits, normaliser]
            del logits  # before the next chunk takes memory
        ctx.save_for_backward(hidden, rounded, targets, *kept)
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, rounded, targets, *kept = ctx.saved_tensors
        at_hidden, at_matrix = [], None
        if ctx.needs_input_grad[1]:  # it does not if the matrix is frozen
            at_matrix = torch.zeros_like(rounded, dtype=ctx.matrix_dtype)
        parts = zip(hidden.split(ctx.chunk), targets.split(ctx.chunk), gradient.split(ctx.chunk))
        for h, y, g in parts:
            if kept:
                logits, normaliser = kept
            else:
                logits = linear(h, rounded)
                normaliser = log_sum_exp(logits)
            at_logits = logit_gradient(logits, normaliser, y, g)
            at_hidden.append(linear(at_logits, rounded.T))
            if at_matrix is not None:
                at_matrix += linear(at_logits.T, h.T)
            del logits, at_logits  # before the next chunk takes memory
        return torch.cat(at_hidden), at_matrix, None


def token_states(model: ModelOnGPU, ids: Tensor, positions: Tensor, seen: Tensor,
                 cache: Cache) -> Tensor:
    """`hidden` of the model in a token step: (R,) ids and positions -> (R, D). Row r sees the first
    seen[r] tokens of its prompt."""
    config, eps, dtype = model.config, model.config.rms_norm_eps, model.dtype
    H, K = config.num_attention_heads, config.num_key_value_heads
    x = F.embedding(ids, model.embeddings).to(model.wide)
    for number, layer in enumerate(model.layers):
        qkv = model.product(norm(x, layer.before, eps, dtype), layer.qkv)
        attended = attend(cache, number, qkv, layer.qk_norm, eps, model.cos_sin, positions, seen,
                          H, K)
        x = model.add_product(x, attended, layer.o)
        gate_up = model.product(norm(x, layer.after, eps, dtype), layer.gate_up)
        x = model.add_product(x, silu_times_up(gate_up), layer.down)
    return norm(x, model.norm, eps, dtype)
