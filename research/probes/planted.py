"""A task whose credit is known: a few positions of the answer decide the reward, others are noise.

An answer is `length` symbols long. At each of a few key positions, spread evenly over it, one
symbol is right; the reward is the share of keys that are right. What stands between them does not
matter at all.

    length 12, keys at 2, 6, 10, right d a a:   "bb d cab b dca a b"   reward 2/3

The policy is a small Qwen2 of our own code, trained by the same functions as any other. A cue at
the position that predicts a key tells it where the keys are, so that finding the place is not what
is learned, and it does not see the symbols it wrote in between. So what follows depends on the
keys alone: every value is a short sum, the credit of every token is exact, and all symbols up to
the next key can be drawn at once. All weights are shared: what an update does for the noise
positions, it does to the keys.
"""
import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, models

from engine.policy import Policy, derived_seed
from harness.settings import Settings
from qwen2_model import Decoder, ModelConfig, Qwen2

SYMBOLS, PROMPT = "abcd", [0]
SMALL = ModelConfig(vocab_size=len(SYMBOLS), hidden_size=32, intermediate_size=64,
                    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16)


@dataclass
class PlantedPolicy(Policy):
    """A policy with its task, and what trains it."""
    optimizer: object = None
    length: int = 0                                   # of every answer
    keys: list[int] = field(default_factory=list)     # positions that decide
    right: list[int] = field(default_factory=list)    # the right symbol at each key

    def reward_of(self, problem, ids) -> float:
        hits = [ids[t] == symbol for t, symbol in zip(self.keys, self.right) if t < len(ids)]
        return sum(hits) / len(self.keys)


def planted_policy(seed: int, length: int, keys: int = 3, **settings) -> PlantedPolicy:
    """A fresh policy and its task; the same seed gives the same of both at any length."""
    usual = dict(max_new_tokens=length, learning_rate=3e-3, questions=8, answers=8, micro_batch=64,
                 max_grad_norm=0.0)
    s = Settings(**{**usual, **settings, "model": "planted", "seed": seed})
    model, cues = fresh_model(seed, keys)
    draw = random.Random(f"planted {seed}")
    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    policy = PlantedPolicy(
        settings=s, folder=None, model=model, task=None,
        tokenizer=Tokenizer(models.WordLevel(vocabulary, unk_token=SYMBOLS[0])),
        optimizer=torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=0.0),
        length=length,
        keys=[(2 * j + 1) * length // (2 * keys) for j in range(keys)],
        right=[draw.randrange(len(SYMBOLS)) for _ in range(keys)])
    model.model.__class__ = CuedDecoder
    model.model.set_cues(cues, policy.keys, length)
    return policy


def fresh_model(seed: int, keys: int) -> tuple[Qwen2, torch.Tensor]:
    """The policy, and a cue (D,) for each key and one for all other positions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("planted", seed))
        model = Qwen2(SMALL)
        cues = 0.02 * torch.randn(keys + 1, SMALL.hidden_size)  # as large as fresh embeddings
    return model, cues


class CuedDecoder(Decoder):
    """Adds to each embedding the cue for what it predicts; hides what was written between the keys.

    Token t stands at position 1 + t, after the prompt, and is predicted at position t.
    """

    def set_cues(self, cues: torch.Tensor, keys: list[int], length: int) -> None:
        self.cue, self.visible = cues[-1].repeat(length + 1, 1), torch.zeros(length + 1, 1)
        self.cue[keys] = cues[:-1]
        self.visible[[0, *(1 + t for t in keys)]] = 1

    def embed(self, ids, positions):
        # rows that are done may stay in a batch a little longer
        positions = positions.clamp(max=len(self.cue) - 1)
        return self.embed_tokens(ids) * self.visible[positions] + self.cue[positions]
