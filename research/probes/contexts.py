"""The planted task with its contexts listed: the same digits but for rounding, in a tenth of time.

What comes next in an answer depends on the place and on the keys written before it (planted.py). So
there are few contexts: one a place up to the first key, 4 up to the second, then 16, then 64. And
the model has one layer, so what a token gives to those behind it does not depend on what stands
before it. Hence every place whose token is hidden is attended to once, for all contexts, and a
context adds the keys that it sees:

    softmax over  logsumexp of the scores of what is hidden, score of key 1, score of key 2, ...
"""
import itertools

import torch

from engine.policy import derived_seed
from qwen2_model import rotary
from research.probes.planted import PROMPT, SYMBOLS, PlantedPolicy

V = len(SYMBOLS)


class Contexts:
    """All N contexts of a policy; those behind j keys stand side by side, path by path."""

    def __init__(self, policy: PlantedPolicy):
        self.policy, keys, length = policy, policy.keys, policy.length
        shown_at = [key + 1 for key in keys]  # token t is the input of place t + 1
        hidden_at = [t for t in range(length) if t not in shown_at]
        # the inputs: what is hidden, place by place, then each symbol at each key
        self.ids = torch.tensor([PROMPT[0]] * len(hidden_at) + [*range(V)] * len(keys))
        self.places = torch.tensor(hidden_at + [t for t in shown_at for _ in range(V)])
        self.hidden, number = len(hidden_at), {t: i for i, t in enumerate(hidden_at)}
        own, sees = [], []  # of each context: the input at its place; the keys that it sees
        stretches = []      # behind j keys: the first context, the first place, how many places
        for j, (start, end) in enumerate(zip([0, *shown_at], [*shown_at, length])):
            stretches.append((len(own), start, end - start))
            for path in itertools.product(range(V), repeat=j):
                seen = [V * i + symbol for i, symbol in enumerate(path)]
                own += [number[t] if t in number else self.hidden + seen[-1]
                        for t in range(start, end)]
                sees += [[place in seen for place in range(V * len(keys))]] * (end - start)
        self.own, self.sees = torch.tensor(own), torch.tensor(sees)  # (N,), (N, V keys)
        self.stretches = torch.tensor(stretches)
        self.keys_before = torch.bucketize(torch.arange(length), torch.tensor(keys))

    def log_probs(self, contexts: torch.Tensor) -> torch.Tensor:
        """(n, V) of the next symbol, with its graph."""
        decoder = self.policy.model.model
        [block] = decoder.layers
        x = decoder.embed(self.ids, self.places)  # (inputs, D)
        def attend(layer, q, k, v):
            asked, which = self.own[contexts].unique(return_inverse=True)
            score = torch.einsum("qhd,khd->qhk", q[asked], k) / q.shape[-1] ** 0.5
            hidden, shown = score.tensor_split([self.hidden], -1)
            later = self.places[:self.hidden] > self.places[asked, None]
            hidden = hidden.masked_fill(later[:, None], -torch.inf)
            of_hidden = torch.einsum("qhk,khd->qhd", hidden.softmax(-1), v[:self.hidden])
            shown = shown[which].masked_fill(~self.sees[contexts, None], -torch.inf)
            weight = torch.cat([hidden.logsumexp(-1, keepdim=True)[which], shown], -1).softmax(-1)
            return (weight[..., :1] * of_hidden[which] +
                    torch.einsum("nhk,khd->nhd", weight[..., 1:], v[self.hidden:]))

        attended = block.self_attn(block.input_layernorm(x),
                                   *rotary(self.places, decoder.config), attend)
        x = x[self.own[contexts]] + attended
        x = x + block.mlp(block.post_attention_layernorm(x))
        return self.policy.model.logits(decoder.norm(x)).log_softmax(-1)

    def of_answers(self, path: torch.Tensor) -> torch.Tensor:
        """(B, T) from the keys (B, keys) of each answer."""
        number = [torch.zeros(len(path), dtype=torch.long)]
        for symbol in path.T:
            number.append(number[-1] * V + symbol)
        j = self.keys_before
        first, start, size = self.stretches[j].T
        return first + torch.stack(number, 1)[:, j] * size + torch.arange(len(j)) - start

    @torch.no_grad()
    def chances(self) -> list[torch.Tensor]:
        """Probability of the symbols of each key: a dimension for each key up to it."""
        keys = len(self.policy.keys)
        paths = torch.tensor([*itertools.product(range(V), repeat=keys)])
        at_keys = self.of_answers(paths)[:, self.policy.keys].T  # (keys, V ^ keys)
        used = [at[::V ** (keys - j)] for j, at in enumerate(at_keys)]
        parts = self.log_probs(torch.cat(used)).exp().split([len(at) for at in used])
        return [part.view((V,) * (j + 1)) for j, part in enumerate(parts)]

    def values(self, chances: list[torch.Tensor]) -> list[torch.Tensor]:
        """V behind no key, one, two ...: a dimension for each key."""
        hits = torch.meshgrid(*(torch.arange(V) == symbol for symbol in self.policy.right),
                              indexing="ij")
        values = [torch.stack(hits).double().mean(0)]
        for chance in reversed(chances):
            values.insert(0, (chance * values[0]).sum(-1))
        return values

    def sample(self, chances: list[torch.Tensor], step: int, count: int):
        """Ids (B, T) with their log-probs, and probabilities of all symbols (B, T, V), from the
        random numbers of planted.py: keys first, then only the contexts that occur."""
        seed = derived_seed("planted", self.policy.seed, step)
        uniform = torch.rand(count, self.policy.length,
                             generator=torch.Generator().manual_seed(seed))
        path = torch.empty(count, 0, dtype=torch.long)
        for key, chance in zip(self.policy.keys, chances):
            symbol = pick(chance[tuple(path.T)].expand(count, V), uniform[:, key])
            path = torch.cat([path, symbol[:, None]], 1)
        used, which = self.of_answers(path).unique(return_inverse=True)
        log_probs = self.log_probs(used)
        chance = log_probs.detach().exp()[which]
        ids = pick(chance, uniform)
        return ids, log_probs.flatten()[which * V + ids], chance


def pick(chance: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """By inverse-CDF sampling, as engine.sampler does it."""
    cumulative = chance.cumsum(-1)
    return (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1).clamp(max=V - 1)
