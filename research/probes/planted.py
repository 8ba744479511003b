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
import itertools
import random
from dataclasses import dataclass, field, replace

import torch
from tokenizers import Tokenizer, models

from engine.tokens import OTHER, THINK, WORD
from engine.forward import Forward
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.sampler import Distribution, Generation
from harness.settings import Settings
from grpo import grpo
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


@torch.no_grad()
def draw_answers(policy: PlantedPolicy, count: int, seed: int) -> Generation:
    """The same distribution as generate(), one pass for each stretch up to a key."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, policy.length, generator=generator)
    tokens = torch.zeros(count, policy.length, dtype=torch.long)
    facts = torch.zeros(3, count, policy.length)
    prompt = torch.tensor(PROMPT).expand(count, 1)
    ends = [*(t + 1 for t in policy.keys), policy.length]
    for start, end in zip([0, *ends], ends):
        ids = torch.cat([prompt, tokens[:, :-1]], 1)
        logits = policy.model(ids[:, :end])  # (B, end, V)
        for t in range(start, end):
            distribution = Distribution(logits[:, t])
            tokens[:, t] = distribution.pick(uniform[:, t])
            facts[:, :, t] = torch.stack(distribution.facts(tokens[:, t]))
    limits = torch.full((count,), policy.length)
    return Generation.of_tokens(tokens, facts, limits, stop=torch.empty(0, dtype=torch.long))


def sample_planted(policy: PlantedPolicy, step: int, Q: int, G: int) -> Rollouts:
    """G answers to each of Q problems, which are all the same, with plain GRPO's advantages and the
    true credit."""
    s = policy.settings
    drawn = draw_answers(policy, Q * G, derived_seed("planted", s.seed, step))
    rows = drawn.tokens.tolist()
    texts = [[SYMBOLS[i] for i in row] for row in rows]
    section = torch.full(drawn.mask.shape, OTHER, dtype=torch.uint8)
    section[:, policy.keys] = THINK
    reward = torch.tensor([policy.reward_of(None, row) for row in rows])
    rollouts = Rollouts(
        problems=[None] * Q, prompt_ids=[PROMPT] * Q, group=torch.arange(Q * G) // G, step=step,
        ids=drawn.tokens, mask=drawn.mask, finished=torch.ones(Q * G, dtype=torch.bool),
        log_prob=drawn.log_prob, entropy=drawn.entropy, collision=drawn.collision,
        texts=texts, answers=["".join(row) for row in texts], section=section,
        kind=torch.full(drawn.mask.shape, WORD, dtype=torch.uint8),
        scores=dict.fromkeys(("reward", "format", "answer", "reasoning"), reward),
        generator=torch.Generator().manual_seed(derived_seed("planted credit", s.seed, step)),
        forward=Forward(policy.model, s.micro_batch))
    return replace(rollouts, advantage=grpo(rollouts), true_credit=exact_credit(policy, rollouts))


@torch.no_grad()
def worths(policy: PlantedPolicy) -> dict[tuple[int, ...], float]:
    """What an answer is worth whose first keys are these: V of every prefix, by its keys alone."""
    symbols, K = range(len(SYMBOLS)), len(policy.keys)
    paths = list(itertools.product(symbols, repeat=K - 1))  # all keys but the last
    probability = key_probabilities(policy, paths)
    worth = {path: sum(a == b for a, b in zip(path, policy.right)) / K
             for path in itertools.product(symbols, repeat=K)}
    for j in reversed(range(K)):
        for i, path in enumerate(paths):
            if not any(path[j:]):  # one path of those that begin alike
                prefix, chances = path[:j], probability[i][j]
                worth[prefix] = sum(p * worth[(*prefix, v)] for v, p in enumerate(chances))
    return worth


def key_probabilities(policy: PlantedPolicy, paths: list[tuple[int, ...]]) -> list:
    """(paths, keys, V): the probability of each symbol at each key, behind the keys of the path."""
    ids = torch.zeros(len(paths), policy.keys[-1] + 1, dtype=torch.long)
    ids[:, 0] = PROMPT[0]
    ids[:, [1 + t for t in policy.keys[:-1]]] = torch.tensor(paths).view(len(paths), -1)
    hidden = policy.model.model(ids)[:, policy.keys]
    return policy.model.logits(hidden).double().softmax(-1).tolist()


def exact_credit(policy: PlantedPolicy, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): V after the token minus V before, which is 0 between the keys."""
    worth, credit = worths(policy), torch.zeros_like(rollouts.log_prob)
    for b, row in enumerate(rollouts.ids[:, policy.keys].tolist()):
        for j, t in enumerate(policy.keys):
            credit[b, t] = worth[tuple(row[:j + 1])] - worth[tuple(row[:j])]
    return credit
