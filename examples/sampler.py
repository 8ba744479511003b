"""A plain sampler with a KV cache: several answers to one prompt, one token a step.

A token's hidden state depends on the tokens before it only through their keys and values. So these
are kept, and each step feeds the model nothing but the newest token of each answer:

    prefill    the prompt's P tokens, once for each answer    keys and values of P tokens
    step 1     token 0 of each answer, at position P          of P + 1 tokens
    step 2     token 1 of each answer, at position P + 1      of P + 2 tokens

lab/engine/sampler.py draws the same tokens (a test compares them) and is faster: it computes a
prompt once for all of its answers, lets answers that have ended leave the batch, takes the cache's
memory beforehand instead of copying the cache in every step, and joins matrices.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python examples/one_step.py")
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.engine.model import Qwen2


class KVCache:
    """The keys and values of all tokens so far, for each layer (B, heads, tokens, size)."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add the new tokens of a layer, and let them see all tokens up to themselves. q, k and v
        are (B, new tokens, heads, size)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        is_prefill = layer not in self.keys
        if not is_prefill:
            k = torch.cat([self.keys[layer], k], dim=2)
            v = torch.cat([self.values[layer], v], dim=2)
        self.keys[layer], self.values[layer] = k, v
        # In the prefill a token may not see those after it. In a step the one new token sees all.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_prefill, enable_gqa=True)
        return attended.transpose(1, 2)


@torch.no_grad()
def sample(model: Qwen2, prompt: list[int], answers: int, max_new_tokens: int,
           stop_ids: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample B answers. Returns their tokens, a mask of the tokens that belong to an answer, its
    stop token included, and the log-prob of each token, all (B, T); beyond the mask all is 0."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(answers, max_new_tokens, generator=generator)  # a number for each token
    cache = KVCache()
    fed = torch.tensor([prompt] * answers)                               # (B, P)
    positions = torch.arange(len(prompt))
    has_ended = torch.zeros(answers, dtype=torch.bool)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []  # for each step: token, mask and log-prob
    for t in range(max_new_tokens):
        hidden = model.model(fed, positions, cache.attend)               # (B, fed, D)
        log_p = model.logits(hidden[:, -1]).float().log_softmax(-1)      # (B, V)
        # The inverse of the cumulative sum: a token of probability p covers a piece of length p of
        # the line from 0 to 1, and the random number lies on it with probability p.
        cumulative = log_p.exp().cumsum(-1)
        place = uniform[:, t:t + 1] * cumulative[:, -1:]  # the sum is 1, but for rounding
        token = torch.searchsorted(cumulative, place, right=True)        # (B, 1)
        columns.append((token, ~has_ended[:, None], log_p.gather(1, token)))
        has_ended |= torch.isin(token[:, 0], torch.tensor(stop_ids))
        if has_ended.all():
            break
        fed, positions = token, torch.tensor([len(prompt) + t])
    tokens, mask, log_prob = (torch.cat(column, dim=1) for column in zip(*columns))
    return tokens * mask, mask, log_prob * mask
