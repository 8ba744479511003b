"""Packed attention: the prefix that all prompts share is computed once, each prompt once, and all
answers to a prompt attend to it.

Example: prompts p (3 tokens) and r (5 tokens) begin with the same two tokens, s. (In fact so short
a prefix is not shared, see LEAST_PREFIX.) They have two answers each: a and b (2 and 1 tokens)
continue p, c and d (1 and 3 tokens) continue r. The model takes one flat sequence of N = 13 tokens:

    token      s0 s1 p2 r2 r3 r4 a0 a1 b0 c0 d0 d1 d2
    index       0  1  2  3  4  5  6  7  8  9 10 11 12
    position    0  1  2  2  3  4  3  4  3  5  5  6  7

A token of a prompt attends to this prompt up to itself, including the prefix. A token of an answer
attends to the whole prompt and to its own answer up to itself. The row attends to the column:

        s s p r r r a a b c d d d
    s0  x . . . . . . . . . . . .
    s1  x x . . . . . . . . . . .
    p2  x x x . . . . . . . . . .
    r2  x x . x . . . . . . . . .
    r3  x x . x x . . . . . . . .
    r4  x x . x x x . . . . . . .
    a0  x x x . . . x . . . . . .
    a1  x x x . . . x x . . . . .
    b0  x x x . . . . . x . . . .
    c0  x x . x x x . . . x . . .
    d0  x x . x x x . . . . x . .
    d1  x x . x x x . . . . x x .
    d2  x x . x x x . . . . x x x

Most of this (N, N) mask is empty, so it is never built. Attention works on padded rows instead (_
is padding), in three steps. First the prefix is one row, whose mask is plain causal. Then comes a
block with one row for each of the Q = 2 prompts: the rest of the prompt, which is what follows the
prefix. The queries of this block are the rests, and its keys are the prefix and the rests. Last
come blocks of at most ROWS answers of similar length, whose keys are those of their prompt and
their own. Here one block holds all four answers, b and c first because they are the shortest:

    prefix (1, 2)   rests, queries (2, 3)   rests, keys (2, P) = (2, 5)
    s0 s1           p2  _  _                s0 s1 p2  _  _
                    r2 r3 r4                s0 s1 r2 r3 r4

    answers, queries (4, S) = (4, 3)   answers, keys (4, P + S) = (4, 8)
    b0  _  _                           s0 s1 p2  _  _ b0  _  _
    c0  _  _                           s0 s1 r2 r3 r4 c0  _  _
    a0 a1  _                           s0 s1 p2  _  _ a0 a1  _
    d0 d1 d2                           s0 s1 r2 r3 r4 d0 d1 d2

If no prefix is shared, the whole prompts (Q, P) are causal rows, and there are no rests.

The results are put back into the flat order, without the padding. The gradient is exact: the keys
and values of a prompt collect it from all its answers, those of the prefix from all prompts.

On a GPU, in bfloat16, lab/gpu/flash.py takes the place of the padded rows.

The sampler does not use this file for its answers: there a prompt is shared token by token, by
blocks of rows (lab/gpu/cache.py).
"""
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lab.engine.model import attention

if TYPE_CHECKING:
    from lab.gpu.flash import Sequences

# Sharing fewer tokens saves less than its operations cost: on a CPU an update of a tiny model with
# two prompts takes as long with 16 shared tokens as with none, and 1.08 times as long with 8.
LEAST_PREFIX = 16


class Block(NamedTuple):
    """r rows, padded on the right to the longest of them, which has S tokens: answers of similar
    length, or the rests of prompts. Before each row come B tokens: those of its prompt, or of the
    prefix."""
    rows: Tensor     # (r,) the numbers of the answers, or of the prompts
    indices: Tensor  # (r, S) where the rows' tokens are in the flat sequence
    keys: Tensor     # (r, B + S) where the tokens before them and their own are
    sees: Tensor     # (r, B), or (1, B) for all rows: False if one of the B is padding

    def to(self, device: torch.device) -> "Block":
        return Block(*(send(part, device) for part in self))

    def mask(self, dtype: torch.dtype, heads: int = 1) -> Tensor:
        """(r or 1, 1, heads * S, B + S), to be added to the scores: 0 where a query sees a key, and
        -inf elsewhere. Its lines begin at multiples of 16 numbers, as a GPU's kernel needs."""
        (r, B), S = self.sees.shape, self.indices.shape[1]
        width = -(-(B + S) // 16) * 16  # rounded up
        mask = torch.full((r, 1, S, width), float("-inf"), dtype=dtype, device=self.sees.device)
        mask[..., :B].masked_fill_(self.sees[:, None, None], 0)
        mask[..., B:B + S].triu_(1)  # query i sees the row's own tokens 0 to i
        return mask.repeat(1, 1, heads, 1)[..., :B + S]


class SharedPrompts:
    """Attention over Q prompts and R answers in one flat sequence. It is a model's `attend`.

    All prompts begin with the same `prefix` tokens, and are longer than this. Answer i, which may
    have no tokens, continues prompt `prompt_of[i]`. The object is made on the CPU, where numbers
    can be read without waiting; `to` sends it to the model's device.
    """
    ROWS = 8  # the most answers in a block

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int], prompt_of: Tensor,
                 prefix: int = 0):
        self.prefix, self.prompt_of = prefix, prompt_of  # prompt_of (R,)
        # lists, which stay on the CPU
        self.lengths = prompt_lengths, answer_lengths, prompt_of.tolist()
        rest_lengths = [length - prefix for length in prompt_lengths]
        rests, rest_mask = indices_of(rest_lengths, prefix)  # (Q, P - prefix)
        shared = torch.arange(prefix).expand(len(rests), -1)
        self.prompts = torch.cat([shared, rests], 1)  # (Q, P)
        self.prompt_mask = torch.cat([torch.ones_like(shared, dtype=torch.bool), rest_mask], 1)
        start = prefix + sum(rest_lengths)
        self.answers, self.answer_mask = indices_of(answer_lengths, start)  # (R, S)
        self.positions = positions_of(prompt_lengths, answer_lengths, prompt_of, prefix)  # (N,)
        self.causal = shared[:1] if prefix else self.prompts  # rows with nothing before them
        self.rests = [self.block_of_rests(rests)] if prefix else []
        self.blocks = [self.block_of(answers, answer_lengths[answers[-1]])
                       for answers in cut_by_length(answer_lengths, self.ROWS)]
        self.padded_index = self.find_padded_index()  # (N,)
        self.masks: list[Tensor] = []  # of rests and blocks, made for the first layer
        self.sequences: Sequences | None = None  # instead of these, where `uses_flash`

    def block_of_rests(self, rests: Tensor) -> Block:
        Q, longest = rests.shape
        sees = torch.ones(1, self.prefix, dtype=torch.bool)
        return Block(torch.arange(Q), rests, self.prompts, sees)

    def block_of(self, numbers: list[int], longest: int) -> Block:
        answers = torch.tensor(numbers)
        prompt = self.prompt_of[answers]
        indices = self.answers[answers, :longest]
        keys = torch.cat([self.prompts[prompt], indices], 1)
        return Block(answers, indices, keys, self.prompt_mask[prompt])

    def to(self, device: torch.device) -> "SharedPrompts":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, send(value, device))
        self.rests = [block.to(device) for block in self.rests]
        self.blocks = [block.to(device) for block in self.blocks]
        return self

    def find_padded_index(self) -> Tensor:
        """(N,): for each token of the flat sequence its index in the padded rows. The padded rows
        are laid end to end: first the causal ones, then the rests, then all blocks."""
        rows, length = self.causal.shape  # the prefix, or whole prompts
        indices, masks = [self.causal], [self.prompt_mask[:rows, :length]]
        for block in self.rests:
            indices.append(block.indices)
            masks.append(self.prompt_mask[:, self.prefix:])
        for block in self.blocks:
            indices.append(block.indices)
            masks.append(self.answer_mask[block.rows, :block.indices.shape[1]])
        is_token = torch.cat([mask.flatten() for mask in masks])
        flat_index = torch.cat([of_rows.flatten() for of_rows in indices])
        padded_index = is_token.nonzero().squeeze(1)
        # the inverse of flat_index: at each token's place in the flat sequence its padded index
        found = torch.empty_like(padded_index)
        return found.index_copy_(0, flat_index[padded_index], padded_index)

    def keys_of(self, block: Block, x: Tensor) -> Tensor:
        """(r, heads, B + S, head_dim): the part of the keys or values x (N, heads, head_dim) that
        the rows of a block may see. The prefix is repeated by `expand`, because its gradient is
        then one sum over the rows. With `to_rows` a GPU would add them one by one, and in bfloat16
        it would round after each."""
        own = to_rows(x, block.keys[:, self.prefix:])
        if not self.prefix:
            return own
        shared = x[:self.prefix].transpose(0, 1)  # (heads, prefix, head_dim)
        return torch.cat([shared.expand(len(own), -1, -1, -1), own], 2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, H, head_dim): attention over flat queries, keys and values (N, heads, head_dim)."""
        if uses_flash(q):
            if self.sequences is None:
                from lab.gpu.flash import Sequences
                prefix, device = self.prefix, q.device
                self.sequences = Sequences(prefix, *self.lengths, lambda x: send(x, device))
            return self.sequences(q, k, v)
        blocks = [*self.rests, *self.blocks]
        if not self.masks:
            heads = q.shape[1] // k.shape[1]
            self.masks = [block.mask(q.dtype, heads) for block in blocks]
        attended = [attention(to_rows(q, self.causal), to_rows(k, self.causal),
                              to_rows(v, self.causal))]
        for block, mask in zip(blocks, self.masks):
            attended.append(attention(to_rows(q, block.indices), self.keys_of(block, k),
                                      self.keys_of(block, v), mask))
        end_to_end = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in attended])
        return end_to_end.index_select(0, self.padded_index)


def pack(prompts: list[list[int]], answers: list[list[int]],
         prompt_of: Tensor) -> tuple[Tensor, SharedPrompts]:
    """The ids of the flat sequence (N,), and the attention over it; both on the CPU."""
    prefix = common_prefix(prompts)
    rests = [prompt[prefix:] for prompt in prompts]
    ids = sum([*rests, *answers], prompts[0][:prefix] if prefix else [])
    shared = SharedPrompts(list(map(len, prompts)), list(map(len, answers)), prompt_of, prefix)
    return torch.tensor(ids, dtype=torch.long), shared


def common_prefix(prompts: list[list[int]]) -> int:
    """The number of tokens that all prompts begin with, such that at least one token of each prompt
    is left; 0 if they are too few to be worth sharing."""
    if len(prompts) < 2:
        return 0
    length = 0
    for tokens in zip(*prompts):  # up to the end of the shortest
        if len({*tokens}) > 1:
            break
        length += 1
    length = min(length, min(map(len, prompts)) - 1)
    return length if length >= LEAST_PREFIX else 0


def uses_flash(q: Tensor) -> bool:
    """Whether one call of flash attention computes all (lab/gpu/flash.py). It has to be
    bfloat16."""
    return q.is_cuda and q.dtype == torch.bfloat16


def send(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the CPU to the device. With CUDA it is first put into page-locked memory,
    from which a GPU reads it later by itself, so that the CPU does not wait."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def indices_of(lengths: list[int], start: int) -> tuple[Tensor, Tensor]:
    """The indices of each row's tokens (rows, longest) if the rows lie end to end from `start` on.
    The second tensor is False for padding, whose index is 0."""
    length = torch.tensor(lengths, dtype=torch.long)[:, None]
    first = start + length.cumsum(0) - length  # (rows, 1)
    step = torch.arange(max(lengths, default=0))
    is_token = step < length
    return torch.where(is_token, first + step, 0), is_token


def positions_of(prompt_lengths: list[int], answer_lengths: list[int], prompt_of: Tensor,
                 prefix: int) -> Tensor:
    """(N,): the position of each token. The prefix counts from 0, the rest of a prompt from the end
    of the prefix, an answer from the end of its prompt."""
    positions = [torch.arange(prefix)]
    positions += [torch.arange(prefix, length) for length in prompt_lengths]
    for prompt, length in zip(prompt_of.tolist(), answer_lengths):
        positions.append(prompt_lengths[prompt] + torch.arange(length))
    return torch.cat(positions)


def cut_by_length(lengths: list[int], size: int) -> list[list[int]]:
    """The numbers of the answers that have tokens, the shortest first, in lists of at most `size`.
    """
    answers = [answer for answer, length in enumerate(lengths) if length]
    answers.sort(key=lambda answer: lengths[answer])
    return [answers[start:start + size] for start in range(0, len(answers), size)]


def to_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Take tokens by indices (rows, length): (N, heads, head_dim) -> (rows, heads, length,
    head_dim)."""
    taken = x.index_select(0, indices.flatten())
    return taken.view(*indices.shape, *x.shape[1:]).transpose(1, 2)
