"""Prompts that stand once for all their answers: who sees whom when tokens stand end to end.

The model takes one flat sequence of tokens: first all prompts, then all answers. Two prompts, a b c
and d e, with answers p q and r s t to the first, and u to the second:

    place       0  1  2 | 3  4 | 5  6 | 7  8  9 | 10
    token       a  b  c | d  e | p  q | r  s  t | u
    position    0  1  2 | 0  1 | 3  4 | 3  4  5 | 2

A token sees its own row up to itself, and an answer's token also sees the whole prompt: s sees
a b c r s, u sees d e u, e sees d e. The gradient is exact: a prompt's keys and values collect it
from all its answers.

Only for attention are tokens put into rows, padded on the right with place 0:

    prompts (Q, P)   [[0 1 2], [3 4 .]]             causal
    answers (R, S)   [[5 6 .], [7 8 9], [10 . .]]   in blocks of like length, each with a mask

    a block of answers 2 and 0, S = 2, and which keys each of its queries sees:

        query        prompt d e .   own u .         query   prompt a b c   own p q
        u                   1 1 .       1 .         p              1 1 1       1 .
        (padding)           1 1 .       1 1         q              1 1 1       1 1
"""
from dataclasses import dataclass

import torch

from qwen2_model import mix


@dataclass
class Block:
    """Answers of like length, whose attention is computed together."""
    rows: torch.Tensor     # (r,) which answers
    places: torch.Tensor   # (r, S) where their tokens stand in the flat sequence
    mask: torch.Tensor     # (r, 1, S, P + S) which keys a token sees: its prompt's, its own row's


class SharedPrompts:
    """The `attend` of qwen2_model.py for tokens that stand as shown above."""
    ROWS = 8  # answers in a block

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int],
                 prompt_of: torch.Tensor):
        """`prompt_of` (R,) says which prompt an answer belongs to."""
        device = prompt_of.device
        self.prompt_of = prompt_of
        self.prompts, self.in_prompt = places(prompt_lengths, 0, device)
        self.answers, self.in_answer = places(answer_lengths, sum(prompt_lengths), device)
        starts = [0] * len(prompt_lengths) + [prompt_lengths[g] for g in prompt_of.tolist()]
        lengths = [*prompt_lengths, *answer_lengths]
        positions = [start + torch.arange(n) for start, n in zip(starts, lengths)]
        self.positions = torch.cat(positions).to(device)      # (N,)
        self.blocks = self.make_blocks(answer_lengths)
        self.flat_order = self.find_flat_order()              # (N,)

    def make_blocks(self, answer_lengths: list[int]) -> list[Block]:
        """The answers that have tokens, the shortest first, a few at a time: little padding."""
        lengths = torch.tensor(answer_lengths, dtype=torch.long, device=self.prompt_of.device)
        empty = int((lengths == 0).sum())
        rows_by_length = lengths.argsort(stable=True)[empty:]
        if not len(rows_by_length):
            return []
        parts = rows_by_length.split(self.ROWS)
        return [self.make_block(rows, int(lengths[rows[-1]])) for rows in parts]

    def make_block(self, rows: torch.Tensor, S: int) -> Block:
        causal = torch.ones(S, S, dtype=torch.bool, device=rows.device).tril()
        own = causal.expand(len(rows), -1, -1)                                       # (r, S, S)
        prompt = self.in_prompt[self.prompt_of[rows]][:, None].expand(-1, S, -1)     # (r, S, P)
        mask = torch.cat([prompt, own], -1)[:, None]
        return Block(rows, self.answers[rows, :S], mask)

    def find_flat_order(self) -> torch.Tensor:
        """(N,): where each token stands when the rows of prompts and blocks are laid end to end."""
        place, is_token = [self.prompts.flatten()], [self.in_prompt.flatten()]
        for block in self.blocks:
            S = block.places.shape[1]
            place.append(block.places.flatten())
            is_token.append(self.in_answer[block.rows, :S].flatten())
        place, index = torch.cat(place), torch.cat(is_token).nonzero().squeeze(1)
        return torch.empty_like(index).index_copy_(0, place[index], index)

    def __call__(self, layer: int, q, k, v) -> torch.Tensor:
        """(N, heads, head_dim) of each -> (N, query heads, head_dim)."""
        prompt_keys, prompt_values = in_rows(k, self.prompts), in_rows(v, self.prompts)
        mixed = [mix(in_rows(q, self.prompts), prompt_keys, prompt_values)]
        for block in self.blocks:
            keys = self.with_prompt(block, prompt_keys, k)
            values = self.with_prompt(block, prompt_values, v)
            mixed.append(mix(in_rows(q, block.places), keys, values, block.mask))
        rows_end_to_end = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in mixed])
        return rows_end_to_end.index_select(0, self.flat_order)

    def with_prompt(self, block: Block, of_prompts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(r, heads, P + S, head_dim): what a block's answers look at, their prompt first."""
        return torch.cat([of_prompts[self.prompt_of[block.rows]], in_rows(x, block.places)], 2)

    def received(self, q, k) -> torch.Tensor:
        """(R, S, S): how much each token of an answer looks at each one up to itself, mean over
        heads; 0 elsewhere. For looking at only: `mix` never has these numbers."""
        R, S = self.answers.shape
        looks, prompt_keys = torch.zeros(R, S, S, device=q.device), in_rows(k, self.prompts)
        for block in self.blocks:
            n = block.places.shape[1]
            keys = self.with_prompt(block, prompt_keys, k)
            keys = keys.repeat_interleave(q.shape[1] // k.shape[1], 1)  # one for each query head
            score = (in_rows(q, block.places) @ keys.transpose(-1, -2)).float()
            score = score * q.shape[-1] ** -0.5
            share = score.masked_fill(~block.mask, float("-inf")).softmax(-1).mean(1)
            looks[block.rows, :n, :n] = share[..., -n:]
        return looks


def places(lengths: list[int], first: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, longest): where the tokens of rows of these lengths stand, one row after the other
    from `first` on; and which of them are no padding."""
    length = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
    step = torch.arange(max(lengths, default=0), device=device)
    is_token = step < length
    row_starts = first + length.cumsum(0) - length
    return torch.where(is_token, row_starts + step, 0), is_token


def in_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(N, heads, head_dim) -> (rows, heads, length, head_dim)"""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)
