"""Packed attention with shared prompts: a prompt stands once, and all its answers attend to it.

Example: prompts p (3 tokens) and r (5 tokens), two answers each: a and b (2 and 1 tokens) go on
from p, c and d (1 and 3 tokens) from r. The model takes one flat sequence of N = 15 tokens:

    token      p0 p1 p2 r0 r1 r2 r3 r4 a0 a1 b0 c0 d0 d1 d2
    index       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
    position    0  1  2  0  1  2  3  4  3  4  3  5  5  6  7

A token of a prompt attends to that prompt up to itself. A token of an answer attends to the whole
prompt and to its own answer up to itself (the row attends to the column):

        p p p r r r r r a a b c d d d
    p0  x . . . . . . . . . . . . . .
    p1  x x . . . . . . . . . . . . .
    p2  x x x . . . . . . . . . . . .
    r0  . . . x . . . . . . . . . . .
    r1  . . . x x . . . . . . . . . .
    r2  . . . x x x . . . . . . . . .
    r3  . . . x x x x . . . . . . . .
    r4  . . . x x x x x . . . . . . .
    a0  x x x . . . . . x . . . . . .
    a1  x x x . . . . . x x . . . . .
    b0  x x x . . . . . . . x . . . .
    c0  . . . x x x x x . . . x . . .
    d0  . . . x x x x x . . . . x . .
    d1  . . . x x x x x . . . . x x .
    d2  . . . x x x x x . . . . x x x

Most of this (N, N) mask is empty, so it is never built (nor in the sampler, whose blocks of rows
share a prompt token by token: engine/cache.py). Attention works on padded rows instead (_ is
padding): first the Q = 2 prompts, whose mask is plain causal, then blocks of at most ROWS answers
of like length. A row of a block has the answer's tokens as queries; its keys are those of its
prompt and its own. Here one block holds all four answers, b and c first as they are shortest:

    prompts (Q, P) = (2, 5)     block, queries (4, 3)     block, keys (4, P + S) = (4, 8)
    p0 p1 p2  _  _              b0  _  _                  p0 p1 p2  _  _ b0  _  _
    r0 r1 r2 r3 r4              c0  _  _                  r0 r1 r2 r3 r4 c0  _  _
                                a0 a1  _                  p0 p1 p2  _  _ a0 a1  _
                                d0 d1 d2                  r0 r1 r2 r3 r4 d0 d1 d2

Where answers are longer than LONG, only some tokens ask at once, and keys that come after all of
them are left out. The results go back into the flat order, without the padding. The gradient is
exact: a prompt's keys and values collect it from all their answers.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from qwen2_model import attention

LONG, QUERIES = 512, 256  # answers of more than LONG tokens ask in blocks of QUERIES


class Block(NamedTuple):
    """r answers of like length, padded on the right to the longest of them, S tokens."""
    answers: Tensor  # (r,) which answers
    places: Tensor   # (r, S) indices of their tokens in the flat sequence
    keys: Tensor     # (r, P + S) of the prompt's tokens before them, too
    ask: int         # so many tokens are queries at once

    def windows(self) -> list[slice]:
        S = self.places.shape[1]
        return [slice(start, min(start + self.ask, S)) for start in range(0, S, self.ask)]


class SharedPrompts:
    """Attention over Q prompts and R answers as one flat sequence; call it as a model's `attend`.
    Answer i, which may have no tokens, goes on from prompt `prompt_of[i]`. It is made on the CPU,
    where numbers can be read without waiting; `to` sends it where the model is."""
    ROWS = 8  # of a block, at most

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int], prompt_of: Tensor):
        self.prompt_of = prompt_of  # (R,)
        self.prompts, self.prompt_mask = places_of(prompt_lengths, 0)  # (Q, P)
        start = sum(prompt_lengths)
        self.answers, self.answer_mask = places_of(answer_lengths, start)  # (R, S)
        self.positions = positions_of(prompt_lengths, answer_lengths, prompt_of)  # (N,)
        self.blocks = [self.block_of(answers, answer_lengths[answers[-1]])
                       for answers in cut_by_length(answer_lengths, self.ROWS)]
        self.padded_index = self.find_padded_index()  # (N,)
        self.masks: list[list[Tensor]] = []  # of the blocks, once the first layer asks

    def block_of(self, numbers: list[int], longest: int) -> Block:
        answers = torch.tensor(numbers)
        places = self.answers[answers, :longest]
        keys = torch.cat([self.prompts[self.prompt_of[answers]], places], 1)
        return Block(answers, places, keys, longest if longest <= LONG else QUERIES)

    def to(self, device: torch.device) -> "SharedPrompts":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, send(value, device))
        self.blocks = [Block(send(block.answers, device), send(block.places, device),
                             send(block.keys, device), block.ask) for block in self.blocks]
        return self

    def mask_of(self, block: Block, window: slice, dtype: torch.dtype, heads: int = 1) -> Tensor:
        """(r, 1, heads * queries, P + end), to be added to the scores: 0 where a query sees a key,
        -inf elsewhere. Lines begin at multiples of 16 numbers, as a GPU's kernel wants it."""
        r, start, end = len(block.answers), window.start, window.stop
        sees_prompt = self.prompt_mask[self.prompt_of[block.answers]]  # (r, P)
        P = sees_prompt.shape[1]
        mask = torch.full((r, 1, end - start, -(-(P + end) // 16) * 16), float("-inf"),
                          dtype=dtype, device=block.places.device)
        mask[..., :P].masked_fill_(sees_prompt[:, None, None], 0)
        mask[..., P:P + end].triu_(start + 1)  # causal
        return mask.repeat(1, 1, heads, 1)[..., :P + end]

    def find_padded_index(self) -> Tensor:
        """(N,): where each token of the flat sequence stands among the padded rows of the prompts
        and of all blocks, laid end to end."""
        places, is_token = [self.prompts.flatten()], [self.prompt_mask.flatten()]
        for block in self.blocks:
            places.append(block.places.flatten())
            is_token.append(self.answer_mask[block.answers, :block.places.shape[1]].flatten())
        in_rows = torch.cat(is_token).nonzero().squeeze(1)
        in_flat = torch.cat(places)[in_rows]
        return torch.empty_like(in_rows).index_copy_(0, in_flat, in_rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, H, head_dim): attention over flat queries, keys and values (N, heads, head_dim)."""
        if not self.masks:
            heads = q.shape[1] // k.shape[1]
            self.masks = [[self.mask_of(block, window, q.dtype, heads)
                           for window in block.windows()] for block in self.blocks]
        attended = [attention(*(to_rows(x, self.prompts) for x in (q, k, v)))]
        for block, masks in zip(self.blocks, self.masks):
            queries, keys, values = (to_rows(x, places) for x, places in zip(
                (q, k, v), (block.places, block.keys, block.keys)))
            parts = [attention(queries[:, :, window], keys[:, :, :mask.shape[-1]],
                               values[:, :, :mask.shape[-1]], mask)
                     for window, mask in zip(block.windows(), masks)]
            attended.append(torch.cat(parts, 2) if parts[1:] else parts[0])
        end_to_end = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in attended])
        return end_to_end.index_select(0, self.padded_index)


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device. From page-locked memory a GPU takes it when it comes to
    it; nobody waits."""
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)


def places_of(lengths: list[int], start: int) -> tuple[Tensor, Tensor]:
    """Where each row's tokens stand in a flat sequence that begins at `start`: (rows, longest). The
    second tensor is False for padding, whose place is given as 0."""
    length = torch.tensor(lengths, dtype=torch.long)[:, None]
    first = start + length.cumsum(0) - length  # (rows, 1)
    step = torch.arange(max(lengths, default=0))
    is_token = step < length
    return torch.where(is_token, first + step, 0), is_token


def positions_of(prompt_lengths: list[int], answer_lengths: list[int], prompt_of: Tensor) -> Tensor:
    """(N,): a prompt counts from 0, an answer from the end of its prompt."""
    positions = [torch.arange(0)]  # there may be no prompt
    positions += [torch.arange(length) for length in prompt_lengths]
    for prompt, length in zip(prompt_of.tolist(), answer_lengths):
        positions.append(prompt_lengths[prompt] + torch.arange(length))
    return torch.cat(positions)


def cut_by_length(lengths: list[int], size: int) -> list[list[int]]:
    """The answers that have tokens, the shortest first, cut into lists of at most `size`."""
    answers = [answer for answer, length in enumerate(lengths) if length]
    answers.sort(key=lambda answer: lengths[answer])
    return [answers[start:start + size] for start in range(0, len(answers), size)]


def to_rows(x: Tensor, places: Tensor) -> Tensor:
    """(N, heads, head_dim) -> (rows, heads, length, head_dim)"""
    return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:]).transpose(1, 2)
