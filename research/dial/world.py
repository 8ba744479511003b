"""A world whose difficulty for credit is set by dials; all values and credits in it are exact.

An answer is T symbols long. At K of its places, spread evenly, one of four symbols is right: these
decide the reward. The others decide nothing.

    tokens, decide   T and K                 sure     logit added to one symbol at the other places
    reward           the share of keys that are right, or 1 if all are ("all")
    own              the other places write with four symbols of their own
    seen             a place sees which symbol stands at the last key before it
    found            each place has a cue of its own; else keys have, and all others share one

The policy is a small Qwen2 that is given a cue for each place, and of what was written nothing, or
one symbol: so what comes next depends on the cue and that symbol, its context, and contexts are
few. All weights are shared: what an update does for the others, it does to the keys.

    128/12           T = 128, K = 12           512/48 sure 4 own          128/6 all seen found

Policies of several seeds stand side by side, S rows of one tensor, and are computed at once. A step
of one of them depends on its own seed alone.
"""
import re
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from engine.errors import UserError
from engine.policy import derived_seed
from qwen2_model import ModelConfig, Qwen2

SYMBOLS, HIDDEN, NEVER = 4, 32, -1e4


@dataclass(frozen=True)
class Dials:
    tokens: int
    decide: int
    sure: float = 0.0
    all: bool = False
    own: bool = False
    seen: bool = False
    found: bool = False

    @classmethod
    def read(cls, text: str) -> "Dials":
        """From words as above."""
        words = r"(?: (?:sure \d+(?:\.\d+)?|all|own|seen|found))*"
        match = re.fullmatch(rf"(\d{{1,6}})/(\d{{1,6}})({words})", text.strip())
        if not match or not 1 <= int(match[2]) <= int(match[1]):
            raise UserError(f"--worlds {text!r}: a world is written as 128/12, tokens and how many "
                            "of them decide, and then any of: sure 4, all, own, seen, found")
        sure = re.search(r"sure ([\d.]+)", match[3])
        said = {name: True for name in ("all", "own", "seen", "found") if name in match[3]}
        return cls(int(match[1]), int(match[2]), float(sure[1]) if sure else 0.0, **said)

    @property
    def vocabulary(self) -> int:
        return SYMBOLS * (1 + self.own)


@cache
def fresh_policy(dials: Dials, seed: int) -> tuple[Qwen2, torch.Tensor, torch.Tensor]:
    """An untrained model, its cues (cues, D) and the right symbols (K,)."""
    config = ModelConfig(dials.vocabulary, HIDDEN, 2 * HIDDEN, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=HIDDEN // 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("dial", seed))
        model = Qwen2(config)
        cues = dials.tokens if dials.found else dials.decide + 1
        # as large as fresh embeddings
        return model, 0.02 * torch.randn(cues, HIDDEN), torch.randint(SYMBOLS, (dials.decide,))


def used(model: Qwen2) -> dict[str, torch.Tensor]:
    """Its parameters by name. A place attends to itself alone, so queries and keys say nothing."""
    return {name.removeprefix("model.").removeprefix("layers.0."): parameter.detach()
            for name, parameter in model.named_parameters()
            if "q_proj" not in name and "k_proj" not in name}


@dataclass
class Sample:
    """B answers of each policy. `context` may have 1 in place of S and B."""
    ids: torch.Tensor       # (S, B, T)
    context: torch.Tensor   # (S, B, T)
    keys_seen: torch.Tensor  # (S, B, K): the symbol that is seen at each key
    hit: torch.Tensor       # (S, B, K) float: the key is right
    reward: torch.Tensor    # (S, B)


class World:
    """Policies of these seeds, one after another also several of one seed: `parameters` (S, P)."""

    def __init__(self, dials: Dials, seeds: list[int]):
        self.dials, self.seeds = dials, seeds
        T, K = dials.tokens, dials.decide
        models, cues, right = zip(*(fresh_policy(dials, seed) for seed in seeds))
        self.cue, self.right = torch.stack(cues), torch.stack(right)        # (S, cues, D), (S, K)
        self.config = models[0].config
        self.shapes = {name: value.shape for name, value in used(models[0]).items()}
        self.parameters = torch.stack([
            torch.cat([value.flatten() for value in used(model).values()]) for model in models])
        self.keys = torch.tensor([(2 * j + 1) * T // (2 * K) for j in range(K)])
        decides = torch.zeros(T, dtype=torch.bool).index_fill(0, self.keys, True)
        self.decides, self.keys_before = decides, decides.cumsum(0) - decides.long()
        if dials.found:
            self.cue_of = torch.arange(T)
        else:
            self.cue_of = torch.where(decides, self.keys_before, K)
        self.sights = 1 + SYMBOLS * dials.seen  # what may be seen at a place: nothing, a symbol
        self.cue_at = torch.arange(self.cue.shape[1]).repeat_interleave(self.sights)  # (U,)
        self.seen_at = torch.arange(self.sights).repeat(self.cue.shape[1])
        self.offset = self.offsets()[self.cue_at]                           # (U, V)

    def offsets(self) -> torch.Tensor:
        """(cues, V): added to the logits."""
        offset = torch.zeros(self.dials.tokens, self.dials.vocabulary)
        others, keys = ~self.decides, self.decides
        if self.dials.own:
            offset[keys, SYMBOLS:] = NEVER
            offset[others, :SYMBOLS] = NEVER
        offset[others, SYMBOLS * self.dials.own] += self.dials.sure
        at_cues = torch.zeros(self.cue.shape[1], self.dials.vocabulary)
        return at_cues.index_copy(0, self.cue_of, offset)  # places of one cue have the same

    def forward(self, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (S, U, D) and log-probs (S, U, V) of all contexts: qwen2_model.py's layer
        for many models at once."""
        parts = parameters.split([shape.numel() for shape in self.shapes.values()], 1)
        w = {name: part.unflatten(1, shape)
             for (name, shape), part in zip(self.shapes.items(), parts)}
        x = self.cue[:, self.cue_at]
        if self.dials.seen:
            shown = (self.seen_at > 0)[:, None]
            x = x + w["embed_tokens.weight"][:, (self.seen_at - 1).clamp(min=0)] * shown
        x = x + (norm(x, w["input_layernorm.weight"]) @ w["self_attn.v_proj.weight"].mT
                 + w["self_attn.v_proj.bias"][:, None]) @ w["self_attn.o_proj.weight"].mT
        n = norm(x, w["post_attention_layernorm.weight"])
        gate = F.silu(n @ w["mlp.gate_proj.weight"].mT)
        x = x + (gate * (n @ w["mlp.up_proj.weight"].mT)) @ w["mlp.down_proj.weight"].mT
        hidden = norm(x, w["norm.weight"])
        return hidden, (hidden @ w["lm_head.weight"].mT + self.offset).log_softmax(-1)

    def after_keys(self, log_prob: torch.Tensor) -> torch.Tensor:
        """(K + 1, S, sights): what is still to come, in front of each key and behind the last, by
        what is seen there. It is a number of hits; where all have to be right, the chance of it."""
        K, start = self.dials.decide, 0.0 if not self.dials.all else 1.0
        by_cue = log_prob.exp().unflatten(1, (-1, self.sights))
        chance = by_cue[:, self.cue_of[self.keys], :, :SYMBOLS]             # (S, K, sights, 4)
        hits = F.one_hot(self.right, SYMBOLS).float()                       # (S, K, 4)
        to_come = [torch.full(chance[:, 0, :, 0].shape, start)]
        for j in reversed(range(K)):
            hit, behind = hits[:, j], to_come[-1][:, 1 if self.dials.seen else 0:]
            worth = hit * behind if self.dials.all else hit + behind        # (S, 4): of each symbol
            to_come.append((chance[:, j] * worth[:, None]).sum(-1))
        return torch.stack(to_come[::-1])

    def value(self, to_come: torch.Tensor) -> torch.Tensor:
        """(S,): the expected reward."""
        return to_come[0, :, 0] / (1 if self.dials.all else self.dials.decide)

    def sample(self, log_prob: torch.Tensor, uniform: torch.Tensor) -> Sample:
        """Answers by inverse-CDF sampling from `uniform` (S, B, T)."""
        cumulative = log_prob.exp().cumsum(-1)
        (S, B, _), row = uniform.shape, torch.arange(len(log_prob))[:, None, None]
        keys_seen = torch.zeros(S, B, self.dials.decide + 1, dtype=torch.long)
        context = (self.cue_of * self.sights)[None, None]
        if self.dials.seen:
            for j, key in enumerate(self.keys.tolist()):
                chance = cumulative[row[:, 0], context[0, 0, key] + keys_seen[..., j]]
                keys_seen[..., j + 1] = 1 + pick(chance[..., :SYMBOLS], uniform[..., key])
            context = context + keys_seen[..., self.keys_before]
        ids = pick(cumulative[row, context], uniform)
        hit = (ids[..., self.keys] == self.right[:, None]).float()
        reward = hit.prod(-1) if self.dials.all else hit.mean(-1)
        return Sample(ids, context, keys_seen[..., :-1], hit, reward)

    def credit(self, sample: Sample, to_come: torch.Tensor) -> torch.Tensor:
        """(S, B, T): V behind each token minus V before it. In all it is R - V."""
        S, B, K = sample.hit.shape
        row, seen = torch.arange(S)[:, None], sample.keys_seen
        at_key = torch.zeros(S, B, K)
        past = torch.ones(S, B)  # whether all keys so far were right, where all have to be
        for j, key in enumerate(self.keys.tolist()):
            symbol = 1 + sample.ids[..., key] if self.dials.seen else torch.zeros_like(seen[..., j])
            hit, before = sample.hit[..., j], to_come[j, row, seen[..., j]]
            behind = to_come[j + 1, row, symbol]
            if self.dials.all:
                at_key[..., j] = past * (hit * behind - before)
                past = past * hit
            else:
                at_key[..., j] = (hit + behind - before) / K
        return torch.zeros(sample.ids.shape).index_copy(2, self.keys, at_key)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(S, U, D) with a weight (S, D)"""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * weight[:, None]


def pick(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """(...,) from cumulative probabilities (..., V): the number of those that u has reached."""
    ids = torch.zeros(uniform.shape, dtype=torch.uint8)  # small numbers: a third of the time
    for bound in cumulative.movedim(-1, 0).contiguous()[:-1]:
        ids += (uniform >= bound).byte()
    return ids.long()
