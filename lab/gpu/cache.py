"""The cache of the GPU's sampler: keys and values of all earlier tokens, and the attention to them.

Rows that answer the same prompt are put into blocks of G rows, which share one copy of the prompt.

Example: prompts p (3 tokens) and r (5 tokens) begin with the same two tokens, s. There are three
answers to p and two to r, and G = 2. A block with too few answers is filled up with copies of the
prompt's first row, whose results nobody reads:

    row      0   1   2   3   4   5
    answer   p0  p1  p2 (p0) r0  r1        3 blocks; row 3 is a copy

A layer has one tensor (blocks, 2 K, P + slots * G, head_dim): K heads of keys, then K of values. A
block's prompt comes first, padded to P = 5 tokens; s is computed once and copied into every block.
Then come the tokens of its rows, slot by slot: slot t holds token t of every row. If the model has
2 query heads for each key head, a block has G * 2 = 4 queries, and one call of attention computes a
whole layer. This is its mask in the step that feeds token 1 (x is seen, . is not, _ is not written
yet):

                         s s rest     slot 0  slot 1  slot 2
    row 0, both heads    x x x . .    x .     x .     _ _
    row 1, both heads    x x x . .    . x     . x     _ _
    row 2, both heads    x x x . .    x .     x .     _ _
    row 3, both heads    x x x . .    . x     . x     _ _
    row 4, both heads    x x x x x    x .     x .     _ _
    row 5, both heads    x x x x x    . x     . x     _ _

With a larger G a prompt is read less often. But each query then has a score for all G tokens of a
slot, and G - 1 of these are masked. So G falls while the answers grow (`rows_of_block`). Rows may
also continue from within a prompt; then they see only its first tokens.

In bfloat16 lab/gpu/kernels.py computes this attention without the mask.

When rows are dropped or the slots run out, the remaining rows are arranged again (`arrange`).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from qwen2_model import ModelConfig

# Blocks of G pay while G^2 slots / P is below this; measured on a CPU with the heads of models/tiny
# and prompts of 40 to 360 tokens.
BREAK_EVEN = 24


class Cache:
    """Keys and values of R rows in blocks of G, and of the prompts that they answer.

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
        self.P, self.G, self.slots = longest_prompt, 1, 0
        self.stored: list[Tensor] = []  # for each layer (blocks, 2 K, P + slots * G, head_dim)
        self.mask: Tensor       # (blocks, 1, G * heads, P + slots * G): 0 if seen, else -inf
        self.columns: Tensor    # (G,) indices of the present slot's tokens
        self.slot_mask: Tensor  # (blocks, 1, G * heads, G): a row sees its own token alone
        self.end = 0            # the steps see only what is stored before this index

    def add_prompts(self, new: Tensor, prompt: Tensor) -> None:
        """Store the next layer's keys and values of the prompts (Q, 2 K, P, head_dim). Row r
        answers prompt[r]."""
        of_blocks = new[prompt[::self.G]]
        self.stored.append(F.pad(of_blocks, (0, 0, 0, self.slots * self.G)))

    def arrange(self, rows: Tensor, seen: Tensor, G: int, slots: int, written: int) -> None:
        """Rearrange the rows: the new row r is the present row rows[r]. Blocks have G rows and room
        for `slots` tokens a row, of which `written` are there already. seen (R,): how many tokens
        of its prompt each row sees."""
        for layer, stored in enumerate(self.stored):
            self.stored[layer] = self.moved(stored, rows, G, slots, written)
        self.G, self.slots = G, slots
        self.columns = self.P + (written - 1) * G + torch.arange(G, device=seen.device)
        if self.has_mask:
            self.make_mask(seen, written)

    def moved(self, old: Tensor, rows: Tensor, G: int, slots: int, written: int) -> Tensor:
        """A copy of a layer in which the present row rows[r] is row r, in blocks of G."""
        block, within = rows // self.G, rows % self.G  # in the old blocks, which have self.G rows
        P = self.P
        _, heads, _, head_dim = old.shape  # 2 K heads
        new = old.new_empty(len(rows) // G, heads, P + slots * G, head_dim)
        # the prompt of a new block is that of its first row
        new[:, :, :P] = old[block[::G], :, :P]
        new[:, :, P + written * G:] = 0
        old_slots = old[:, :, P:P + written * self.G].unflatten(2, (written, self.G))
        of_rows = old_slots[block, :, :, within]  # (R, 2 K, written, head_dim)
        in_blocks = of_rows.unflatten(0, (-1, G))  # (blocks, G, 2 K, written, head_dim)
        new_slots = new[:, :, P:P + written * G].unflatten(2, (written, G))
        new_slots.copy_(in_blocks.permute(0, 2, 3, 1, 4))  # (blocks, 2 K, written, G, head_dim)
        return new

    def make_mask(self, seen: Tensor, written: int) -> None:
        """Make the mask as it is before the next slot is written."""
        blocks, P, G = len(seen) // self.G, self.P, self.G
        # a GPU's kernel needs lines that begin at multiples of 16 numbers
        width = -(-(P + self.slots * G) // 16) * 16  # rounded up
        mask = torch.full((blocks, G, width), float("-inf"), dtype=self.dtype, device=seen.device)
        in_prompt = torch.arange(P, device=seen.device) < seen.view(blocks, G, 1)
        same_row = torch.eye(G, dtype=torch.bool, device=seen.device)
        slot = mask[..., :G].masked_fill(same_row, 0)  # a copy; all of the mask is still -inf
        mask[..., :P].masked_fill_(in_prompt, 0)
        slots = mask[..., P:P + written * G].unflatten(2, (written, G))  # (blocks, G, written, G)
        slots.masked_fill_(same_row[:, None], 0)
        # every row has the same mask for each of its query heads
        self.slot_mask = slot.repeat_interleave(self.heads, 1)[:, None]
        self.mask = mask.repeat_interleave(self.heads, 1)[:, None]

    def set_window(self, end: int) -> None:
        """Let the next steps read slots 0 to end - 1. Those that are not written yet are masked."""
        self.end = self.P + end * self.G

    def open_slot(self) -> None:
        """Go to the next slot, in which every row sees its own token."""
        self.columns += self.G
        if self.has_mask:
            self.mask.index_copy_(3, self.columns, self.slot_mask)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """(R, K, H / K, head_dim): the attention of queries q (R, H, head_dim) to the keys of the
        row's prompt and of the row itself. Before it, the keys and values of the new tokens, kv
        (R, 2 K, head_dim), are stored."""
        new = kv.unflatten(0, (-1, self.G)).transpose(1, 2)  # (blocks, 2 K, G, head_dim)
        self.stored[layer].index_copy_(2, self.columns, new)
        keys, values = self.stored[layer][:, :, :self.end].chunk(2, 1)
        q = q.unflatten(1, (-1, self.heads))               # (R, K, heads, head_dim)
        q = q.unflatten(0, (-1, self.G)).transpose(1, 2)   # (blocks, K, G, heads, head_dim)
        queries = q.flatten(2, 3)                          # (blocks, K, G * heads, head_dim)
        attended = F.scaled_dot_product_attention(queries, keys, values, self.mask[..., :self.end])
        # the same steps backwards
        attended = torch.unflatten(attended, 2, (self.G, self.heads))
        return attended.transpose(1, 2).flatten(0, 1)


def rows_of_block(answers: list[int], P: int, slots: int, least: int = 1) -> int:
    """G, the rows of a block, for prompts of P tokens, each with its number of answers.

    A row reads P / G keys of its prompt and G keys for each slot, so a larger G pays while
    G^2 slots <= 24 P. At most one row in 17 may be a copy. With fewer than `least` blocks a GPU,
    which computes them at the same time, would not be busy.
    """
    for G in (4, 2):
        rows = sum(-(-count // G) * G for count in answers)  # with the copies
        pays = G * G * slots <= BREAK_EVEN * P
        if pays and 16 * rows <= 17 * sum(answers) and rows // G >= least:
            return G
    return 1


def fill_blocks(answers: Tensor, G: int) -> tuple[Tensor, Tensor]:
    """The rows that fill the blocks: for each place in the blocks the row that stands there, and
    whether it is a copy. answers (Q,): how many rows each prompt has. With G = 2 and answers 3 2
    the places have rows 0 1 2 0 3 4, and the fourth is a copy."""
    sizes = -(-answers // G) * G  # places of each prompt, copies included: 4 2
    # for each place: the first place of its prompt, the first row of its prompt
    first_place = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    first_row = (answers.cumsum(0) - answers).repeat_interleave(sizes)
    # counts the places of each prompt from 0
    number = torch.arange(len(first_place), device=answers.device) - first_place
    is_copy = number >= answers.repeat_interleave(sizes)
    return first_row + number.masked_fill(is_copy, 0), is_copy
