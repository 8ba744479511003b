"""A synthetic task whose difficulty for credit is set by parameters; all values and credits in it
are exact.

An answer is T symbols long. At K of its positions, spread evenly, one of four symbols is right:
these decide the reward, and are called keys. The others decide nothing.

    tokens, decide   T and K                 sure     logit added to one symbol at other positions
    reward           the share of keys that are right, or 1 if all are ("all")
    own              the other positions write with four symbols of their own
    seen             a position sees which symbol was written at the last key before it
    found            each position has a cue of its own; else keys have, and all others share one

The policy is a small Qwen2 that is given a cue for each position, and of what was written nothing,
or one symbol: so what comes next depends on the cue and that symbol, its context, and contexts are
few. All weights are shared: what an update does for the other positions, it does to the keys.

    128/12           T = 128, K = 12           512/48 sure 4 own          128/6 all seen found

Policies of several seeds are computed at once, S rows of one tensor. A step of one of them depends
on its own seed alone.
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
SWITCHES = ("all", "own", "seen", "found")


@dataclass(frozen=True)
class TaskSpec:
    """The parameters of a synthetic task."""
    tokens: int
    decide: int
    sure: float = 0.0
    all: bool = False
    own: bool = False
    seen: bool = False
    found: bool = False

    @classmethod
    def read(cls, text: str) -> "TaskSpec":
        """The parameters that a text like `512/48 sure 4 own` names."""
        words = rf"(?: (?:sure \d+(?:\.\d+)?|{'|'.join(SWITCHES)}))*"
        match = re.fullmatch(rf"(\d{{1,6}})/(\d{{1,6}})({words})", text.strip())
        if not match or not 1 <= int(match[2]) <= int(match[1]):
            raise UserError(f"--worlds {text!r}: a task is written as 128/12, if 12 of 128 tokens "
                            "decide, and then any of: sure 4, all, own, seen, found")
        sure = re.search(r"sure ([\d.]+)", match[3])
        switches = {name: True for name in SWITCHES if name in match[3]}
        return cls(int(match[1]), int(match[2]), float(sure[1]) if sure else 0.0, **switches)

    @property
    def vocabulary(self) -> int:
        return 2 * SYMBOLS if self.own else SYMBOLS


@cache
def fresh_policy(spec: TaskSpec, seed: int) -> tuple[Qwen2, torch.Tensor, torch.Tensor]:
    """An untrained model, its cues (cues, D) and the right symbols (K,)."""
    config = ModelConfig(spec.vocabulary, HIDDEN, 2 * HIDDEN, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=HIDDEN // 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("dial", seed))
        model = Qwen2(config)
        cues = spec.tokens if spec.found else spec.decide + 1
        cue = 0.02 * torch.randn(cues, HIDDEN)  # as large as fresh embeddings
        right = torch.randint(SYMBOLS, (spec.decide,))
    return model, cue, right


def used_parameters(model: Qwen2) -> dict[str, torch.Tensor]:
    """The model's parameters by name, but those of queries and keys: a position attends to itself
    alone, so they change nothing."""
    used = {}
    for name, parameter in model.named_parameters():
        if "q_proj" not in name and "k_proj" not in name:
            used[name.removeprefix("model.").removeprefix("layers.0.")] = parameter.detach()
    return used


@dataclass
class Sample:
    """B answers of each policy. `context` may have 1 in place of S and B."""
    ids: torch.Tensor       # (S, B, T)
    context: torch.Tensor   # (S, B, T)
    keys_seen: torch.Tensor  # (S, B, K): the symbol that is seen at each key
    hit: torch.Tensor       # (S, B, K) float: the key is right
    reward: torch.Tensor    # (S, B)


class SyntheticTask:
    """A task and policies for it, one for each of these seeds, which may repeat: `parameters`
    (S, P)."""

    def __init__(self, spec: TaskSpec, seeds: list[int]):
        self.spec, self.seeds = spec, seeds
        T, K = spec.tokens, spec.decide
        parameters, cues, right = [], [], []
        for seed in seeds:
            model, cue, symbols = fresh_policy(spec, seed)
            parameters.append(flat_parameters(model))
            cues.append(cue)
            right.append(symbols)
        self.cue, self.right = torch.stack(cues), torch.stack(right)        # (S, cues, D), (S, K)
        self.config = model.config
        self.shapes = {name: value.shape for name, value in used_parameters(model).items()}
        self.parameters = torch.stack(parameters)
        self.keys = (2 * torch.arange(K) + 1) * T // (2 * K)  # in the middle of K equal parts
        decides = torch.zeros(T, dtype=torch.bool).index_fill(0, self.keys, True)
        self.decides, self.keys_before = decides, decides.cumsum(0) - decides.long()
        if spec.found:
            self.cue_of = torch.arange(T)
        else:
            self.cue_of = torch.where(decides, self.keys_before, K)
        self.sights = 1 + SYMBOLS * spec.seen  # what may be seen at a position: nothing, a symbol
        self.cue_at = torch.arange(self.cue.shape[1]).repeat_interleave(self.sights)  # (U,)
        self.seen_at = torch.arange(self.sights).repeat(self.cue.shape[1])
        self.offset = self.offsets()[self.cue_at]                           # (U, V)

    def offsets(self) -> torch.Tensor:
        """(cues, V): added to the logits."""
        offset = torch.zeros(self.spec.tokens, self.spec.vocabulary)
        others, keys = ~self.decides, self.decides
        first_of_others = 0
        if self.spec.own:
            offset[keys, SYMBOLS:] = NEVER
            offset[others, :SYMBOLS] = NEVER
            first_of_others = SYMBOLS
        offset[others, first_of_others] += self.spec.sure
        at_cues = torch.zeros(self.cue.shape[1], self.spec.vocabulary)
        return at_cues.index_copy(0, self.cue_of, offset)  # positions of one cue have the same

    def forward(self, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (S, U, D) and log-probs (S, U, V) of all contexts: qwen2_model.py's layer
        for many models at once."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = parameters.split(sizes, 1)
        w = {}
        for (name, shape), part in zip(self.shapes.items(), parts):
            w[name] = part.unflatten(1, shape)
        x = self.cue[:, self.cue_at]
        if self.spec.seen:
            is_seen = (self.seen_at > 0)[:, None]
            symbol = (self.seen_at - 1).clamp(min=0)
            x = x + w["embed_tokens.weight"][:, symbol] * is_seen
        n = rms_norm(x, w["input_layernorm.weight"])
        v = n @ w["self_attn.v_proj.weight"].mT + w["self_attn.v_proj.bias"][:, None]
        x = x + v @ w["self_attn.o_proj.weight"].mT
        n = rms_norm(x, w["post_attention_layernorm.weight"])
        gate = F.silu(n @ w["mlp.gate_proj.weight"].mT)
        up = n @ w["mlp.up_proj.weight"].mT
        x = x + (gate * up) @ w["mlp.down_proj.weight"].mT
        hidden = rms_norm(x, w["norm.weight"])
        logits = hidden @ w["lm_head.weight"].mT + self.offset
        return hidden, logits.log_softmax(-1)

    def after_keys(self, log_prob: torch.Tensor) -> torch.Tensor:
        """(K + 1, S, sights): what is still to come, before each key and after the last, by what is
        seen there. It is a number of hits, or where all have to be right its probability."""
        start = 1.0 if self.spec.all else 0.0
        by_cue = log_prob.exp().unflatten(1, (-1, self.sights))
        at_keys = by_cue[:, self.cue_of[self.keys], :, :SYMBOLS]            # (S, K, sights, 4)
        hits = F.one_hot(self.right, SYMBOLS).float()                       # (S, K, 4)
        to_come = [torch.full(at_keys[:, 0, :, 0].shape, start)]
        for j in reversed(range(self.spec.decide)):
            hit, after = hits[:, j], to_come[-1]                            # (S, 4), (S, sights)
            if self.spec.seen:
                after = after[:, 1:]  # after a key a symbol is seen, never nothing
            worth = hit * after if self.spec.all else hit + after           # (S, 4): of each symbol
            to_come.append((at_keys[:, j] * worth[:, None]).sum(-1))
        return torch.stack(to_come[::-1])

    def value(self, to_come: torch.Tensor) -> torch.Tensor:
        """(S,): the expected reward."""
        return to_come[0, :, 0] / (1 if self.spec.all else self.spec.decide)

    def sample(self, log_prob: torch.Tensor, uniform: torch.Tensor) -> Sample:
        """Answers by inverse-CDF sampling from `uniform` (S, B, T)."""
        cumulative = log_prob.exp().cumsum(-1)
        (S, B, _), row = uniform.shape, torch.arange(len(log_prob))[:, None, None]
        keys_seen = torch.zeros(S, B, self.spec.decide + 1, dtype=torch.long)
        context = (self.cue_of * self.sights)[None, None]
        if self.spec.seen:
            for j, key in enumerate(self.keys.tolist()):
                context_of_key = context[0, 0, key] + keys_seen[..., j]     # (S, B)
                at_key = cumulative[row[:, 0], context_of_key]
                keys_seen[..., j + 1] = 1 + drawn(at_key[..., :SYMBOLS], uniform[..., key])
            context = context + keys_seen[..., self.keys_before]
        ids = drawn(cumulative[row, context], uniform)
        hit = (ids[..., self.keys] == self.right[:, None]).float()
        reward = hit.prod(-1) if self.spec.all else hit.mean(-1)
        return Sample(ids, context, keys_seen[..., :-1], hit, reward)

    def credit(self, sample: Sample, to_come: torch.Tensor) -> torch.Tensor:
        """(S, B, T): V after each token minus V before it. In all it is R - V."""
        S, B, K = sample.hit.shape
        row, seen = torch.arange(S)[:, None], sample.keys_seen
        at_key = torch.zeros(S, B, K)
        past = torch.ones(S, B)  # whether all keys so far were right, where all have to be
        for j, key in enumerate(self.keys.tolist()):
            symbol = torch.zeros_like(seen[..., j])
            if self.spec.seen:
                symbol = 1 + sample.ids[..., key]
            hit, before = sample.hit[..., j], to_come[j, row, seen[..., j]]
            after = to_come[j + 1, row, symbol]
            if self.spec.all:
                at_key[..., j] = past * (hit * after - before)
                past = past * hit
            else:
                at_key[..., j] = (hit + after - before) / K
        return torch.zeros(sample.ids.shape).index_copy(2, self.keys, at_key)


def flat_parameters(model: Qwen2) -> torch.Tensor:
    """(P,)"""
    values = used_parameters(model).values()
    return torch.cat([value.flatten() for value in values])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(S, U, D) with a weight (S, D)"""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * weight[:, None]


def drawn(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """(...,) from cumulative probabilities (..., V): how many of them u has reached."""
    ids = torch.zeros(uniform.shape, dtype=torch.uint8)  # small numbers: a third of the time
    for bound in cumulative.movedim(-1, 0).contiguous()[:-1]:
        ids += (uniform >= bound).byte()
    return ids.long()
