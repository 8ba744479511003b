"""Prompts in one flat sequence, so that no padding is computed outside attention.

Example: for prompts p (3 tokens) and r (5 tokens) the model takes N = 8 tokens:

    token      p0 p1 p2 r0 r1 r2 r3 r4        attention works on rows, whose    p0 p1 p2  _  _
    index       0  1  2  3  4  5  6  7        results are put back into the     r0 r1 r2 r3 r4
    position    0  1  2  0  1  2  3  4        flat order
"""
import torch
import torch.nn.functional as F
from torch import Tensor


class PackedPrompts:
    """Causal attention over prompts of these lengths in one flat sequence. It is a model's
    `attend`."""

    def __init__(self, lengths: list[int]):
        length = torch.tensor(lengths)[:, None]
        step = torch.arange(max(lengths))
        is_token = step < length  # (Q, P), False for padding, whose index is 0
        self.rows = torch.where(is_token, length.cumsum(0) - length + step, 0)  # (Q, P) indices
        self.positions = torch.cat([torch.arange(length) for length in lengths])  # (N,)
        # (N,): where each token of the flat sequence stands in the rows, laid end to end
        self.place = is_token.flatten().nonzero()[:, 0]

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
    return torch.tensor(sum(prompts, [])), PackedPrompts(list(map(len, prompts)))


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
