"""A task whose credit is known: a few positions of the answer decide the reward, others are noise.

An answer is `length` symbols long. At each of a few key positions, spread evenly over it, one
symbol is right; the reward is the share of keys that are right. What stands between them does not
matter at all.

    length 12, keys at 2, 6, 10, right d a a:   "bb d cab b dca a b"   reward 2/3

The policy is a small Qwen2 of our own code. A cue at the position that predicts a key tells it
where the keys are, so that finding the place is not what is learned, and it does not see the
symbols it wrote in between. So what follows depends on the keys alone: every value is a short sum,
and the credit of every token is exact. All weights are shared: what an update does for the noise
positions, it does to the keys.
"""
import random
from dataclasses import dataclass

import torch

from engine.policy import derived_seed
from qwen2_model import Decoder, ModelConfig, Qwen2

SYMBOLS, PROMPT, KEYS = "abcd", [0], 3
SMALL = ModelConfig(vocab_size=len(SYMBOLS), hidden_size=32, intermediate_size=64,
                    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16)


@dataclass
class PlantedPolicy:
    """A policy with its task, and what trains it."""
    seed: int
    model: Qwen2
    optimizer: torch.optim.Optimizer
    length: int       # of every answer
    keys: list[int]   # positions that decide
    right: list[int]  # the right symbol at each key


def planted_policy(seed: int, length: int, learning_rate: float) -> PlantedPolicy:
    """A fresh policy and its task; the same seed gives the same of both at any length."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("planted", seed))
        model = Qwen2(SMALL)
        # one for each key and one for all other positions, as large as fresh embeddings
        cues = 0.02 * torch.randn(KEYS + 1, SMALL.hidden_size)
    keys = [(2 * j + 1) * length // (2 * KEYS) for j in range(KEYS)]
    draw = random.Random(f"planted {seed}")
    model.model.__class__ = CuedDecoder
    model.model.set_cues(cues, keys, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    return PlantedPolicy(seed, model, optimizer, length, keys,
                         right=[draw.randrange(len(SYMBOLS)) for _ in range(KEYS)])


class CuedDecoder(Decoder):
    """Adds to each embedding the cue for what it predicts; hides what was written between the keys.

    Token t stands at position 1 + t, after the prompt, and is predicted at position t.
    """

    def set_cues(self, cues: torch.Tensor, keys: list[int], length: int) -> None:
        self.cue, self.visible = cues[-1].repeat(length + 1, 1), torch.zeros(length + 1, 1)
        self.cue[keys] = cues[:-1]
        self.visible[[0, *(1 + t for t in keys)]] = 1

    def embed(self, ids, positions):
        return self.embed_tokens(ids) * self.visible[positions] + self.cue[positions]
