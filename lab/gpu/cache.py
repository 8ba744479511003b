"""The cache of the GPU's sampler: keys and values of all earlier tokens, and the attention to them.

A layer has one tensor (R, 2 K, P + slots, head_dim): for each row K heads of keys, K of values.
The row's prompt comes first, padded to the longest prompt, of P tokens. Then come the row's own
tokens, one in each slot. A row may also continue from within its prompt; then it sees only the
first tokens of it.

Example: two answers to a prompt of 3 tokens and two to one of 5. This is the mask in the step that
feeds token 1 (x is seen, . is not):

             prompt       slots 0 1 2
    row 0    x x x . .          x x .
    row 1    x x x . .          x x .
    row 2    x x x x x          x x .
    row 3    x x x x x          x x .

In bfloat16 lab/gpu/kernels.py computes this attention without the mask.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen2_model import ModelConfig


class Cache:
    """Keys and values of R rows, and of the prompts that they answer.

    Call `arrange` first, and then `add_prompts` for one layer after the other. After `set_window`,
    each step calls `open_slot`, and `attend` in every layer. Between two calls of `arrange` tensors
    keep their addresses, because a CUDA graph repeats what it recorded at the same addresses."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, longest_prompt: int,
                 has_mask: bool = True):
        """`has_mask` is False if lab/gpu/kernels.py computes the attention of the steps, because
        its kernels know what a row sees."""
        self.has_mask = has_mask
        self.heads = config.num_attention_heads // config.num_key_value_heads  # for each key head
        self.dtype = dtype
        self.P, self.slots = longest_prompt, 0
        self.stored: list[Tensor] = []  # for each layer (R, 2 K, P + slots, head_dim)
        self.mask: Tensor    # (R, 1, heads, P + slots): 0 if seen, else -inf
        self.column: Tensor  # (1,) the index of the present slot
        self.end = 0         # the steps see only what is stored before this index

    def add_prompts(self, new: Tensor, prompt: Tensor) -> None:
        """Store the next layer's keys and values of the prompts (Q, 2 K, P, head_dim). Row r
        answers prompt[r]."""
        self.stored.append(F.pad(new[prompt], (0, 0, 0, self.slots)))

    def arrange(self, rows: Tensor, seen: Tensor, slots: int, written: int) -> None:
        """Keep these of the present rows, with room for `slots` tokens each, of which `written` are
        there already. seen (R,): how many tokens of its prompt each row sees."""
        end = self.P + written
        for layer, stored in enumerate(self.stored):
            self.stored[layer] = F.pad(stored[rows, :, :end], (0, 0, 0, slots - written))
        self.slots = slots
        self.column = torch.full((1,), end - 1, device=seen.device)
        if self.has_mask:
            self.make_mask(seen, written)

    def make_mask(self, seen: Tensor, written: int) -> None:
        """Make the mask as it is before the next slot is written."""
        # a GPU's kernel needs lines that begin at multiples of 16 numbers
        width = -(-(self.P + self.slots) // 16) * 16  # rounded up
        place = torch.arange(width, device=seen.device)
        is_seen = (place < seen[:, None]) | ((place >= self.P) & (place < self.P + written))
        mask = torch.zeros(is_seen.shape, dtype=self.dtype, device=seen.device)
        mask.masked_fill_(~is_seen, float("-inf"))
        self.mask = mask[:, None, None].repeat(1, 1, self.heads, 1)

    def set_window(self, end: int) -> None:
        """Let the next steps read slots 0 to end - 1. Those that are not written yet are masked."""
        self.end = self.P + end

    def open_slot(self) -> None:
        """Go to the next slot."""
        self.column += 1
        if self.has_mask:
            self.mask.index_fill_(3, self.column, 0)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """(R, K, H / K, head_dim): the attention of queries q (R, H, head_dim) to the keys of the
        row's prompt and of the row itself. Before it, the keys and values of the new tokens, kv
        (R, 2 K, head_dim), are stored."""
        self.stored[layer].index_copy_(2, self.column, kv[:, :, None])
        keys, values = self.stored[layer][:, :, :self.end].chunk(2, 1)
        queries = q.unflatten(1, (-1, self.heads))  # (R, K, heads, head_dim)
        return F.scaled_dot_product_attention(queries, keys, values, self.mask[..., :self.end])
