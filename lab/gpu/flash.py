"""Packed attention on a GPU, in bfloat16: one call of flash attention (2205.14135, 2307.08691) a
layer, for sequences of any length, without padding and without a mask.

The flat sequence is that of lab/engine/packing.py. It is cut into sequences of queries: the prefix,
the rest of each prompt, each answer. The keys of a sequence are the tokens before it, and its own:
so they are taken by index, and a prompt's are taken once for each of its answers. In the example
there

    queries   s0 s1 | p2    | r2 r3 r4       | a0 a1          | b0          | ...
    keys      s0 s1 | s s p2| s s r2 r3 r4   | s s p2 a0 a1   | s s p2 b0   | ...

Flash attention is causal from the end: the last query of a sequence sees all its keys, the one
before it all but the last. So each query sees its prompt and its own answer up to itself.

torch's kernel for masks, which lab/engine/packing.py calls otherwise, computes also what is masked,
and takes twice as long; the padded rows have to be put together and taken apart again.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.engine.packing import SharedPrompts


def attention_of_sequences(q: Tensor, k: Tensor, v: Tensor, cut: "Sequences") -> Tensor:
    """Queries (N, H, head_dim), and for each sequence its keys and values: (N, H, head_dim)."""
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cut.query_ends, cut.key_ends, cut.most_queries, cut.most_keys, 0.0, True, False)[0]
    return result


class Sequences:
    """Where the sequences of a packed batch begin and end, and which tokens are their keys.

    All prompts begin with `prefix` common tokens; answer i continues prompt `prompt_of[i]`. `send`
    sends what is computed here, on the CPU, to the GPU."""

    def __init__(self, prefix: int, prompts: list[int], answers: list[int], prompt_of: list[int],
                 send: Callable[[Tensor], Tensor]):
        shared = torch.arange(prefix)
        sequences = [(shared[:0], shared)]  # pairs: the tokens before, and the own ones
        whole, start = [], prefix
        for length in prompts:
            own = torch.arange(start, start + length - prefix)
            sequences.append((shared, own))
            whole.append(torch.cat([shared, own]))
            start += len(own)
        for prompt, length in zip(prompt_of, answers):
            sequences.append((whole[prompt], torch.arange(start, start + length)))
            start += length
        sequences = [(before, own) for before, own in sequences if len(own)]
        queries = [len(own) for _, own in sequences]
        keys = [len(before) + len(own) for before, own in sequences]
        self.most_queries, self.most_keys = max(queries), max(keys)
        self.query_ends, self.key_ends = (
            send(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32))
            for lengths in (queries, keys))
        index = torch.cat([part for sequence in sequences for part in sequence])
        self.index = send(index)  # (keys,): the token that each key is
        first, repeated = places_of(index, start, prefix)
        self.first = send(first)
        self.repeated = [(send(tokens), send(places), send(factor))
                         for tokens, places, factor in repeated]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (TakeKeys.apply(x, self.index, self.first, self.repeated) for x in (k, v))
        return attention_of_sequences(q, keys, values, self)


def places_of(index: Tensor, N: int, prefix: int
              ) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Where the N tokens stand among the keys. First (N,): the first place of each. Then, for the
    tokens that stand at several places, in two lists, as those of the prefix stand at many more:
    the tokens (n,), their places (n, most), and 1 for a place, 0 for padding (n, most, 1, 1)."""
    count = index.bincount(minlength=N)
    places = index.argsort(stable=True)  # the places of token 0, then those of token 1
    begin = count.cumsum(0) - count
    repeated = []
    for tokens in (torch.arange(prefix), torch.arange(prefix, N)):
        tokens = tokens[count[tokens] > 1]
        if len(tokens):
            step = torch.arange(int(count[tokens].max()))
            is_place = step < count[tokens][:, None]
            of_tokens = places[torch.where(is_place, begin[tokens][:, None] + step, 0)]
            factor = is_place[..., None, None].float()
            repeated.append((tokens, of_tokens, factor))
    return places[begin], repeated


class TakeKeys(torch.autograd.Function):
    """Keys by index: (N, K, head_dim) -> (keys, K, head_dim). A token that stands at several places
    gets the sum of their gradients, added in float32 and always in the same order. torch's own
    operation would add in bfloat16, in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, first: Tensor,
                repeated: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        ctx.first, ctx.repeated = first, repeated
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        result = gradient.index_select(0, ctx.first)
        for tokens, places, factor in ctx.repeated:
            total = (gradient[places] * factor).sum(1)  # in float32, as the factor is
            result.index_copy_(0, tokens, total.to(gradient.dtype))
        return result, None, None, None


def send(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the CPU to the device. With CUDA it is first put into page-locked memory,
    from which a GPU reads it later by itself, so that the CPU does not wait."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


class FlashPrompts(SharedPrompts):
    """The engine's attention over prompts and answers. On a GPU, in bfloat16, one call of flash
    attention takes the place of the padded rows."""
    sequences: Sequences | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not uses_flash(q):
            return super().__call__(layer, q, k, v)
        if self.sequences is None:
            self.sequences = Sequences(self.prefix, *self.lengths, lambda x: send(x, q.device))
        return self.sequences(q, k, v)


def uses_flash(q: Tensor) -> bool:
    """Whether there is a kernel of flash attention. It has to be bfloat16."""
    return q.is_cuda and q.dtype == torch.bfloat16
