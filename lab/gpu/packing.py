"""Prompts in one flat sequence: the prefix that all of them share is computed once, then the rest
of each, and no padding is computed outside attention.

Example: prompts p (3 tokens) and r (5 tokens) begin with the same two tokens, s. (In fact so short
a prefix is not shared, see LEAST_PREFIX.) The model takes N = 6 tokens:

    token      s0 s1 p2 r2 r3 r4        attention works on rows, whose      s0 s1 p2  _  _
    index       0  1  2  3  4  5        results are put back into the       s0 s1 r2 r3 r4
    position    0  1  2  2  3  4        flat order
"""
import torch
import torch.nn.functional as F
from torch import Tensor

# Sharing fewer tokens saves less than its operations cost: on a CPU an update of a tiny model with
# two prompts takes as long with 16 shared tokens as with none, and 1.08 times as long with 8.
LEAST_PREFIX = 16


class PackedPrompts:
    """Causal attention over prompts of these lengths in one flat sequence. It is a model's
    `attend`. All begin with the same `prefix` tokens, and are longer than this."""

    def __init__(self, lengths: list[int], prefix: int = 0):
        rests, is_rest = indices_of([length - prefix for length in lengths], prefix)
        shared = torch.arange(prefix).expand(len(rests), -1)
        self.rows = torch.cat([shared, rests], 1)  # (Q, P) where their tokens stand
        self.positions = torch.cat([torch.arange(prefix),
                                    *(torch.arange(prefix, length) for length in lengths)])  # (N,)
        # (N,): where each token of the flat sequence stands in the rows, laid end to end
        is_first = torch.arange(len(rests))[:, None] == 0  # the prefix is taken from the first row
        is_token = torch.cat([is_first.expand(-1, prefix), is_rest], 1).flatten()
        stands = self.rows.flatten()[is_token]
        self.place = torch.empty_like(stands).index_copy_(0, stands, is_token.nonzero()[:, 0])

    def to(self, device: torch.device) -> "PackedPrompts":
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, H, head_dim): attention over flat queries, keys and values (N, heads, head_dim)."""
        attended = F.scaled_dot_product_attention(
            to_rows(q, self.rows), to_rows(k, self.rows), to_rows(v, self.rows), is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1])
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


def pack(prompts: list[list[int]]) -> tuple[Tensor, PackedPrompts]:
    """The ids of the flat sequence (N,), and the attention over it; both on the CPU."""
    prefix = common_prefix(prompts)
    ids = sum([prompt[prefix:] for prompt in prompts], prompts[0][:prefix])
    return torch.tensor(ids, dtype=torch.long), PackedPrompts(list(map(len, prompts)), prefix)


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


def indices_of(lengths: list[int], start: int) -> tuple[Tensor, Tensor]:
    """The indices of each row's tokens (rows, longest) if the rows lie end to end from `start` on.
    The second tensor is False for padding, whose index is 0."""
    length = torch.tensor(lengths, dtype=torch.long)[:, None]
    first = start + length.cumsum(0) - length  # (rows, 1)
    step = torch.arange(max(lengths, default=0))
    is_token = step < length
    return torch.where(is_token, first + step, 0), is_token


def to_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Take tokens by indices (rows, length): (N, heads, head_dim) -> (rows, heads, length,
    head_dim)."""
    taken = x.index_select(0, indices.flatten())
    return taken.view(*indices.shape, *x.shape[1:]).transpose(1, 2)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor from the CPU to the device. With CUDA it is first put into page-locked memory,
    from which a GPU reads it later by itself, so that the CPU does not wait."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
