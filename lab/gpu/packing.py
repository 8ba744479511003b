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
is padding). The prompts are causal rows. The answers are rows of queries, whose keys are those of
their prompt and their own:

    prompts (2, P) = (2, 5)   answers, queries (4, S) = (4, 3)   answers, keys (4, P + S) = (4, 8)
    s0 s1 p2  _  _            a0 a1  _                           s0 s1 p2  _  _ a0 a1  _
    s0 s1 r2 r3 r4            b0  _  _                           s0 s1 p2  _  _ b0  _  _
                              c0  _  _                           s0 s1 r2 r3 r4 c0  _  _
                              d0 d1 d2                           s0 s1 r2 r3 r4 d0 d1 d2

The results are put back into the flat order, without the padding. The gradient is exact: the keys
and values of a prompt collect it from all its answers, those of the prefix from all prompts.

The sampler computes its prompts so, too.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.engine.model import product_type

# Sharing fewer tokens saves less than its operations cost: on a CPU an update of a tiny model with
# two prompts takes as long with 16 shared tokens as with none, and 1.08 times as long with 8.
LEAST_PREFIX = 16


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over (rows, heads, length, head_dim); without a mask it is causal.

    A mask, of 0 and -inf, is added to the scores. With a mask, the query heads that share a key
    head are computed as one head with H / K times as many queries: first all queries of the first
    head, then those of the second, and so on. So the mask's shape is
    (rows, 1, H / K * length, keys).
    """
    H, K = q.shape[1], k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
    product_dtype = product_type(q.dtype, q.device)
    by_key_head = q.unflatten(1, (K, -1)).flatten(2, 3)  # (rows, K, H / K * length, head_dim)
    attended = F.scaled_dot_product_attention(
        by_key_head.to(product_dtype), k.to(product_dtype), v.to(product_dtype),
        mask.to(product_dtype))
    return attended.to(q.dtype).reshape(q.shape)


class SharedPrompts:
    """Attention over Q prompts and R answers in one flat sequence. It is a model's `attend`.

    All prompts begin with the same `prefix` tokens, and are longer than this. Answer i, which may
    have no tokens, continues prompt `prompt_of[i]`."""

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int], prompt_of: Tensor,
                 prefix: int = 0):
        self.prefix = prefix
        self.lengths = prompt_lengths, answer_lengths, prompt_of.tolist()
        rest_lengths = [length - prefix for length in prompt_lengths]
        rests, rest_mask = indices_of(rest_lengths, prefix)  # (Q, P - prefix)
        shared = torch.arange(prefix).expand(len(rests), -1)
        self.prompts = torch.cat([shared, rests], 1)  # (Q, P) where their tokens stand
        is_prefix = torch.ones_like(shared, dtype=torch.bool)
        self.prompt_mask = torch.cat([is_prefix, rest_mask], 1)
        start = prefix + sum(rest_lengths)
        self.answers, self.answer_mask = indices_of(answer_lengths, start)  # (R, S)
        self.positions = positions_of(prompt_lengths, answer_lengths, prompt_of, prefix)  # (N,)
        self.keys = torch.cat([self.prompts[prompt_of], self.answers], 1)   # (R, P + S)
        self.sees = self.prompt_mask[prompt_of]                             # (R, P)
        # (N,): where each token of the flat sequence stands in the padded rows, laid end to end
        is_first = torch.arange(len(rests))[:, None] == 0  # the prefix is taken from the first row
        is_token = torch.cat([torch.cat([is_prefix & is_first, rest_mask], 1).flatten(),
                              self.answer_mask.flatten()])
        stands = torch.cat([self.prompts.flatten(), self.answers.flatten()])[is_token]
        self.place = torch.empty_like(stands).index_copy_(0, stands, is_token.nonzero()[:, 0])
        self.mask: Tensor | None = None  # of the answers, made for the first layer

    def to(self, device: torch.device) -> "SharedPrompts":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def make_mask(self, dtype: torch.dtype, heads: int = 1) -> Tensor:
        """(R, 1, heads * S, P + S), to be added to the scores: 0 where a query of an answer sees a
        key, and -inf elsewhere."""
        (R, P), S = self.sees.shape, self.answers.shape[1]
        mask = torch.full((R, 1, S, P + S), float("-inf"), dtype=dtype, device=self.sees.device)
        mask[..., :P].masked_fill_(self.sees[:, None, None], 0)
        mask[..., P:].triu_(1)  # query i sees the row's own tokens 0 to i
        return mask.repeat(1, 1, heads, 1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, H, head_dim): attention over flat queries, keys and values (N, heads, head_dim)."""
        attended = [attention(*(to_rows(x, self.prompts) for x in (q, k, v)))]
        if self.answers.numel():
            if self.mask is None:
                self.mask = self.make_mask(q.dtype, q.shape[1] // k.shape[1])
            attended.append(attention(to_rows(q, self.answers), to_rows(k, self.keys),
                                      to_rows(v, self.keys), self.mask))
        end_to_end = torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in attended])
        return end_to_end.index_select(0, self.place)


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
