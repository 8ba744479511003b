"""A world whose difficulty for credit is set by dials; all values and credits in it are exact.

An answer is T symbols long. At K of its places, the keys, one of four symbols is right: these
decide the reward. The others decide nothing.

    128/12    T = 128, K = 12, spread evenly; the reward is the share of keys that are right
    all       the reward is 1 if all keys are right, else 0
    own       the other places write with four symbols of their own

The policy is a small Qwen2 that is given a cue, one for each key and one for all other places, and
sees nothing of what was written. All weights are shared: what an update does for the others, it
does to the keys.

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
    all: bool = False
    own: bool = False

    @classmethod
    def read(cls, text: str) -> "Dials":
        """From words as above."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})((?: all| own)*)", text.strip())
        if not match or not 1 <= int(match[2]) <= int(match[1]):
            raise UserError(f"--worlds {text!r}: a world is written as 128/12, tokens and how many "
                            "of them decide, and then any of: all, own")
        return cls(int(match[1]), int(match[2]), all="all" in match[3], own="own" in match[3])

    @property
    def vocabulary(self) -> int:
        return SYMBOLS * (1 + self.own)


@cache
def fresh_policy(dials: Dials, seed: int) -> tuple[Qwen2, torch.Tensor, torch.Tensor]:
    """An untrained model, its cues (K + 1, D) and the right symbols (K,)."""
    config = ModelConfig(dials.vocabulary, HIDDEN, 2 * HIDDEN, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=HIDDEN // 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("dial", seed))
        model = Qwen2(config)
        # as large as fresh embeddings
        cues = 0.02 * torch.randn(dials.decide + 1, HIDDEN)
        return model, cues, torch.randint(SYMBOLS, (dials.decide,))


def used(model: Qwen2) -> dict[str, torch.Tensor]:
    """Its parameters by name. A place attends to itself alone, so queries and keys say nothing."""
    return {name.removeprefix("model.").removeprefix("layers.0."): parameter.detach()
            for name, parameter in model.named_parameters()
            if "q_proj" not in name and "k_proj" not in name}


@dataclass
class Sample:
    """B answers of each policy."""
    ids: torch.Tensor       # (S, B, T)
    hit: torch.Tensor       # (S, B, K) float: the key is right
    reward: torch.Tensor    # (S, B)


class World:
    """Policies of these seeds, one after another also several of one seed: `parameters` (S, P)."""

    def __init__(self, dials: Dials, seeds: list[int]) -> None:
        self.dials, self.seeds = dials, seeds
        T, K = dials.tokens, dials.decide
        models, cues, right = zip(*(fresh_policy(dials, seed) for seed in seeds))
        self.cue, self.right = torch.stack(cues), torch.stack(right)        # (S, K + 1, D), (S, K)
        self.config = models[0].config
        self.shapes = {name: value.shape for name, value in used(models[0]).items()}
        self.parameters = torch.stack([
            torch.cat([value.flatten() for value in used(model).values()]) for model in models])
        self.keys = torch.tensor([(2 * j + 1) * T // (2 * K) for j in range(K)])
        self.cue_of = torch.full((T,), K).index_copy(0, self.keys, torch.arange(K))
        self.offset = torch.zeros(K + 1, dials.vocabulary)                  # added to the logits
        if dials.own:
            self.offset[:K, SYMBOLS:] = NEVER
            self.offset[K, :SYMBOLS] = NEVER

    def forward(self, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (S, K + 1, D) and log-probs (S, K + 1, V), by cue: qwen2_model.py's layer
        for many models at once."""
        parts = parameters.split([shape.numel() for shape in self.shapes.values()], 1)
        w = {name: part.unflatten(1, shape)
             for (name, shape), part in zip(self.shapes.items(), parts)}
        x = self.cue
        x = x + (norm(x, w["input_layernorm.weight"]) @ w["self_attn.v_proj.weight"].mT
                 + w["self_attn.v_proj.bias"][:, None]) @ w["self_attn.o_proj.weight"].mT
        n = norm(x, w["post_attention_layernorm.weight"])
        gate = F.silu(n @ w["mlp.gate_proj.weight"].mT)
        x = x + (gate * (n @ w["mlp.up_proj.weight"].mT)) @ w["mlp.down_proj.weight"].mT
        hidden = norm(x, w["norm.weight"])
        return hidden, (hidden @ w["lm_head.weight"].mT + self.offset).log_softmax(-1)

    def after_keys(self, log_prob: torch.Tensor) -> torch.Tensor:
        """(K + 1, S): what is still to come, in front of each key and behind the last. It is a
        number of hits; where all have to be right, the chance of it."""
        K = self.dials.decide
        chance = log_prob.exp()[:, :K, :SYMBOLS]
        hit = F.one_hot(self.right, SYMBOLS).float()                        # (S, K, 4)
        to_come = [torch.full((len(chance),), 1.0 if self.dials.all else 0.0)]
        for j in reversed(range(K)):
            behind = to_come[-1][:, None]
            worth = hit[:, j] * behind if self.dials.all else hit[:, j] + behind
            to_come.append((chance[:, j] * worth).sum(-1))
        return torch.stack(to_come[::-1])

    def value(self, to_come: torch.Tensor) -> torch.Tensor:
        """(S,): the expected reward."""
        return to_come[0] / (1 if self.dials.all else self.dials.decide)

    def sample(self, log_prob: torch.Tensor, uniform: torch.Tensor) -> Sample:
        """Answers by inverse-CDF sampling from `uniform` (S, B, T)."""
        cumulative = log_prob.exp().cumsum(-1)[:, None, self.cue_of]        # (S, 1, T, V)
        ids = torch.zeros(uniform.shape, dtype=torch.uint8)  # small numbers: a third of the time
        for bound in cumulative.movedim(-1, 0).contiguous()[:-1]:
            ids += (uniform >= bound).byte()
        hit = (ids[..., self.keys] == self.right[:, None]).float()
        return Sample(ids.long(), hit, hit.prod(-1) if self.dials.all else hit.mean(-1))

    def credit(self, sample: Sample, to_come: torch.Tensor) -> torch.Tensor:
        """(S, B, T): V behind each token minus V before it. In all it is R - V."""
        before, behind = to_come.T[:, None, :-1], to_come.T[:, None, 1:]    # (S, 1, K)
        if self.dials.all:
            so_far = F.pad(sample.hit.cumprod(-1)[..., :-1], (1, 0), value=1.0)  # all before it
            at_key = so_far * (sample.hit * behind - before)
        else:
            at_key = (sample.hit + behind - before) / self.dials.decide
        return torch.zeros(sample.ids.shape).index_copy(2, self.keys, at_key)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(S, K + 1, D) with a weight (S, D)"""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * weight[:, None]
