"""Qwen2, Qwen2.5 and Qwen3 (dense) written out by hand, and a sampler with a cache of keys and
values. `python qwen2_model.py` shows an answer of models/tiny, token by token.

The modules have the names of the tensors in published files, so a checkpoint loads key by key, and
one from here opens in `transformers`. Everything is computed in float32 on a CPU. Left out on
purpose: rope scaling, sliding windows, dropout and mixtures of experts; a folder that needs one is
refused.

From top to bottom: the model; the cache; the sampler, `generate`; a model's folder.

Everything but attention treats each token alone. Which tokens see each other is decided by one
function, which every layer is given as the argument `attend`:

    causal          each token sees its own row up to itself: rows (B, L), as in a textbook
    Cache.prefill   prompts: the same, and the keys and values are kept for the answers
    Cache.attend    answers: the next tokens of each row see all before them. In sampling that is
                    one token of each row at a time, in training it is all of them at once

Shapes: B rows, L positions, D width, H query heads, K key/value heads, V vocabulary.
"""
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v -> what each token saw


class UserError(ValueError):
    """A mistake of the person at the keyboard: train.py prints it as one line."""


@dataclass(frozen=True)
class ModelConfig:
    """The part of `config.json` that the computation depends on."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "qwen2"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()  # the tokens that end an answer


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """RoPE (arXiv 2104.09864): cosine and sine of position * frequency, each (..., 1, head_dim).
    Both halves of a head have the same, but the first half's sine is negated."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device).float()
    frequency = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angle = positions[..., None, None].float() * frequency  # (..., 1, head_dim / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (a, b) of a head into (a cos - b sin, b cos + a sin), where a is in the
    head's first half and b at the same index of its second half. Rolling exchanges the halves."""
    turned = torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)  # x * cos + (b, a) * sin
    return turned.type_as(x)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, for each head, over rows (B, L, heads, head_dim), where
    every token sees its own row up to itself."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 + eps) * weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): H query heads share K key/value heads."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        D, is_qwen2 = config.hidden_size, config.model_type == "qwen2"
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(D, H * config.head_dim, bias=is_qwen2)
        self.k_proj = nn.Linear(D, K * config.head_dim, bias=is_qwen2)
        self.v_proj = nn.Linear(D, K * config.head_dim, bias=is_qwen2)
        self.o_proj = nn.Linear(H * config.head_dim, D, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if not is_qwen2:  # Qwen3 drops the biases and normalises queries and keys instead
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., H, head_dim)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., K, head_dim)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """The feed-forward part of a layer, SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer: attention, then the MLP, each applied to the normalised x and added to x."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The embeddings and the layers, without the output matrix. Published names begin `model.`"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # nn.Embedding's own way to draw these imports torch's compiler, which takes seconds
        embedding = torch.randn(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend = causal) -> Tensor:
        """Ids of any shape, and the position of each -> hidden states (..., D)."""
        cos, sin = rotary(positions, self.config)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class Qwen2(nn.Module):
    """The whole model; a Qwen3 if `config.model_type` says so."""
    product = staticmethod(F.linear)  # a subclass may keep a matrix in another type

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of ids (B, L) -> logits (B, L, V)."""
        return self.logits(self.model(ids, torch.arange(ids.shape[1], device=ids.device)))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V). With a large vocabulary, pass only the positions you need."""
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return self.product(hidden, output.weight)

    def log_probs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """(n, D), (n,) -> (n,): the log-prob of each token by the state that predicts it."""
        log_p = self.logits(hidden).log_softmax(-1, torch.float32)  # (n, V)
        return log_p.gather(1, ids[:, None])[:, 0]


# ------------------------------------------------------------------------------------ the sampler
class Sampled(NamedTuple):
    """Answers as they were drawn: index t is the t-th new token. Each position has a log-prob, an
    entropy (-sum p log p) and a collision (sum p^2). Beyond the mask everything is 0."""
    ids: Tensor        # (B, T) int64
    mask: Tensor       # (B, T) bool: the token belongs to the answer, its stop token included
    finished: Tensor   # (B,) bool: the answer ended with a stop token, not at the limit
    log_prob: Tensor   # (B, T)
    entropy: Tensor    # (B, T)
    collision: Tensor  # (B, T)


ROOM = 64  # slots by which a cache grows


class Cache:
    """The keys and values of all earlier tokens. A token's hidden state depends on earlier tokens
    only through these. So each prompt is computed once, for all its answers, and after that `read`
    computes new tokens alone:

        Cache(...)    the prompts, once each                keys and values of P tokens
        read          token 0 of each answer, position P    of P + 1
        read          token 1 of each answer, at P + 1      of P + 2

    In training all tokens of the answers are known, and one call of `read` computes them.

    A layer has a tensor (B, slots, 2 K, head_dim): K heads of keys, then K of values. The prompt of
    a row is in the slots from 0 on, its new tokens are in those from P on, where P is the length of
    the longest prompt. No token looks at the slots between them:

        prompts p q r and s     slots   p q r x y ...
        answers x y and u v             s _ _ u v ...
    """

    def __init__(self, decoder: Decoder, prompts: list[list[int]], prompt_of: Tensor):
        """Compute the prompts. Row i will hold an answer to prompt `prompt_of[i]`."""
        self.decoder, self.prompt_of = decoder, prompt_of
        self.kept: dict[int, Tensor] = {}  # of each layer
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.P = self.end = int(lengths.max())  # `end` is the number of slots in use
        # padded on the right, where no token of a prompt sees it
        ids = torch.tensor([prompt + [0] * (self.P - len(prompt)) for prompt in prompts])
        self.prompt_states = decoder(ids, torch.arange(self.P), self.prefill)  # (prompts, P, D)
        self.length = lengths[prompt_of]  # (B,) of each row's prompt

    def last_states(self) -> Tensor:
        """(B, D): the states at the ends of the prompts, which predict the answers' token 0."""
        return self.prompt_states[self.prompt_of, self.length - 1]

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the prompts' keys and values, and let each token see its prompt up to itself."""
        self.kept[layer] = torch.cat([k, v], 2)[self.prompt_of]
        return causal(layer, q, k, v)

    def read(self, ids: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Compute the next n tokens of each row: (B, n) -> hidden states (B, n, D). Where
        `is_token` (B, n) is False a row is padded, its state is 0, and no `read` may follow."""
        start, self.end = self.end, self.end + ids.shape[1]
        slot = torch.arange(self.end)
        new = slot[start:, None]                                                 # (n, 1)
        in_prompt = slot < self.length[:, None, None]                            # (B, 1, slots)
        self.sees = in_prompt | ((slot >= self.P) & (slot <= new))               # (B, n, slots)
        position = self.length[:, None] + new[:, 0] - self.P                     # (B, n)
        if is_token is None:
            return self.decoder(ids, position, self.attend)

        # Only attention needs rows. All else is computed for the N tokens without the padding.
        def in_rows(x: Tensor) -> Tensor:  # (N, ...) -> (B, n, ...)
            return x.new_zeros(*is_token.shape, *x.shape[1:]).index_put_((is_token,), x)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend(layer, in_rows(q), in_rows(k), in_rows(v))[is_token]

        return in_rows(self.decoder(ids[is_token], position[is_token], attend))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep the new tokens' keys and values (B, n, K, head_dim), and let each see its row."""
        kept, (n, K) = self.kept[layer], k.shape[1:3]
        start, new = self.end - n, torch.cat([k, v], 2)                 # (B, n, 2 K, head_dim)
        if torch.is_grad_enabled():  # training: what was there is needed in the backward pass
            kept = torch.cat([kept[:, :start], new], 1)
        else:
            if kept.shape[1] < self.end:  # no slot is left: make room for more
                kept = F.pad(kept, (0, 0, 0, 0, 0, n + ROOM))
            kept[:, start:self.end] = new
        self.kept[layer] = kept
        keys, values = kept[:, :self.end].transpose(1, 2).chunk(2, 1)
        # The G query heads of a key head stand as G * n queries of one head, because enable_gqa
        # would copy keys and values once for each query head.
        G = q.shape[2] // K
        queries = q.transpose(1, 2).unflatten(1, (K, G)).flatten(2, 3)  # (B, K, G * n, head_dim)
        sees = self.sees.repeat(1, G, 1)[:, None]                       # (B, 1, G * n, slots)
        out = F.scaled_dot_product_attention(queries, keys, values, sees)
        return out.unflatten(2, (G, n)).flatten(1, 2).transpose(1, 2)   # (B, n, H, head_dim)

    def take(self, rows: Tensor) -> None:
        """Go on with these rows alone. They move up within their memory, which takes less time than
        new memory of this size."""
        self.length, self.prompt_of = self.length[rows], self.prompt_of[rows]
        for layer, kept in self.kept.items():
            self.kept[layer] = kept[:len(rows)]
            self.kept[layer][:, :self.end] = kept[rows, :self.end]


Choose = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]  # arguments of `draw`
Follow = Callable[[Tensor, int, Tensor, Tensor], tuple[Tensor, Tensor]]  # row, t, token, ends


@torch.no_grad()
def generate(model: Qwen2, prompts: list[list[int]], answers: int, max_new_tokens: int,
             stop: tuple[int, ...], generator: torch.Generator, greedy: bool = False,
             cache: Cache | None = None, choose: Choose | None = None,
             follow: Follow | None = None) -> Sampled:
    """Sample `answers` answers to each prompt; those to the first prompt come first.

    The random numbers of all tokens are drawn before the first token, so what a row samples does
    not depend on which other rows are still growing.

    The last three arguments let answers grow in other ways, as in a game that replies. Answers may
    continue a `cache`. `choose` draws in the place of `draw`. `follow` is told the tokens (R,) that
    the rows have drawn, and which of them end an answer. It returns the tokens (R, n) that stand
    there, where n - 1 known ones may follow the first, and which answers end.
    """
    if cache is None:
        prompt_of = torch.arange(len(prompts)).repeat_interleave(answers)
        cache = Cache(model.model, prompts, prompt_of)
    hidden = cache.last_states()                                             # (B, D)
    B = len(hidden)
    uniform = torch.rand(B, max_new_tokens, generator=generator, device="cpu").to(hidden.device)
    row = torch.arange(B)                          # the answers that are still growing
    result = torch.zeros(B, max_new_tokens, dtype=torch.long)
    mask = torch.zeros_like(result, dtype=torch.bool)
    facts = torch.zeros(3, B, max_new_tokens)
    done = torch.zeros_like(row, dtype=torch.bool)
    stop_ids = torch.tensor(stop)
    t = 0
    while t < max_new_tokens:
        token, known = (choose or draw)(model.logits(hidden), uniform[row, t], greedy)
        tokens, ends = token[:, None], torch.isin(token, stop_ids)           # (R, 1) and (R,)
        if follow:
            tokens, ends = follow(row, t, token, ends)
        n = tokens.shape[1]
        result[row, t:t + n] = tokens
        facts[:, row, t] = known
        mask[row, t] = ~done
        done = done | ends
        mask[row, t + 1:t + n] = ~done[:, None]
        if done.all():
            break
        if 8 * int(done.sum()) >= len(done):  # once an eighth of the rows has ended, drop them
            stay = (~done).nonzero()[:, 0]
            cache.take(stay)
            row, tokens, done = row[stay], tokens[stay], done[stay]
        hidden = cache.read(tokens)[:, -1]
        t += n
    mask = mask[:, :int(mask.sum(1).max())]
    result = result[:, :mask.shape[1]] * mask
    facts = facts[..., :mask.shape[1]] * mask
    finished = (torch.isin(result, stop_ids) & mask).any(1)
    return Sampled(result, mask, finished, *facts)


def draw(logits: Tensor, uniform: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """A token for each row of logits (R, V), and (3, R) its log-prob, entropy and collision.

    A token of probability p covers a piece of length p of the line from 0 to 1. The row's random
    number falls into one token's piece: draw that token. Below, p is e / Z, log p is z - log Z."""
    z = logits - logits.amax(-1, keepdim=True)
    e = z.exp()
    Z = e.sum(-1)
    if greedy:
        token = logits.argmax(-1)
    else:
        ends = e.cumsum(-1)  # of the pieces, on the line from 0 to Z
        # below the end of the last piece even after rounding
        place = uniform[:, None].clamp(max=1 - 2 ** -23) * ends[:, -1:]
        token = torch.searchsorted(ends, place, right=True)[:, 0]
        token = token.clamp(max=e.shape[1] - 1)
    log_prob = z.gather(1, token[:, None])[:, 0] - Z.log()
    entropy = Z.log() - torch.linalg.vecdot(e, z) / Z  # -sum p log p = sum p (log Z - z)
    return token, torch.stack([log_prob, entropy, torch.linalg.vecdot(e, e) / Z.square()])


# ------------------------------------------------------------------------------ a model's folder
def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} should hold an object, as {{...}}")
    return found


def read_config(folder: Path) -> ModelConfig:
    """Read config.json. A model that would be computed wrongly, and silently so, is refused."""
    if not (folder / "config.json").exists():
        name = "Qwen2.5-Coder-0.5B-Instruct"
        raise UserError(f"{folder} is no model folder: it has no config.json. To get a model, such "
                        f"as this one: hf download Qwen/{name} --local-dir models/{name}")
    raw = {name: x for name, x in read_json(folder / "config.json").items() if x is not None}
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # older, newer spelling
    is_scaled = not isinstance(rope, dict) or "type" in rope or (
        rope.get("rope_type", "default") != "default")
    kind = raw.get("model_type")
    computed = {"hidden_act": ("silu",), "attention_bias": (kind == "qwen2",),
                "use_sliding_window": (), "attention_dropout": (), "quantization_config": ()}
    wrong = [f"model_type {kind!r}"] * (kind not in ("qwen2", "qwen3"))
    wrong += [f"{key} {raw[key]!r}" for key, known in computed.items()
              if raw.get(key) and raw[key] not in known]
    wrong += ["rope scaling"] * is_scaled
    if wrong:
        raise UserError(f"{folder}: {wrong[0]} is not implemented here. Plain qwen2 and qwen3 are")
    # an instruct model lists more of the tokens that end an answer in its generation_config.json
    generation = folder / "generation_config.json"
    ends = (read_json(generation) if generation.exists() else raw).get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and 0 <= end < 10 ** 9 for end in ends):
        raise UserError(f"{folder}: eos_token_id should not be {ends!r:.80}")
    raw["eos_token_id"] = tuple(ends)
    raw["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta", 10000.0)
    for name, of_type in ModelConfig.__annotations__.items():
        if name == "head_dim":  # most files leave it out
            raw.setdefault(name, raw["hidden_size"] // raw["num_attention_heads"])
        value: Any = raw.setdefault(name, getattr(ModelConfig, name, None))
        most = 1000 if name == "num_hidden_layers" else 10 ** 9  # a million layers take hours
        is_type = type(value) in (int, of_type, tuple)
        if not is_type or of_type in (int, float) and not 0 < value <= most:
            raise UserError(f"{folder}/config.json: {name} should not be {value!r:.80}")
    return ModelConfig(**{name: raw[name] for name in ModelConfig.__annotations__})


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def load_model(folder: Path) -> Qwen2:
    """The model of a folder, in float32."""
    config = read_config(folder)
    files = [*folder.glob("model.safetensors")] or sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no model.safetensors")
    found: dict[str, Tensor] = {}
    for path in files:
        tensors = read_tensors(path)
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{path} has {min(twice)} a second time: it may be of another download")
        found |= {name: tensor.float() for name, tensor in tensors.items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)  # some files store the embeddings a second time
    with torch.device("meta"):  # shapes without numbers: those of the files take their place
        model = Qwen2(config)
    if wrong := differing_tensors(model, found):
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise UserError(f"{folder} is not what its config.json asks for: {wrong[0]}{more}")
    model.load_state_dict(found, assign=True)
    return model.requires_grad_()


def differing_tensors(model: Qwen2, found: dict[str, Tensor]) -> list[str]:
    """What is wrong with each tensor that the files should not have as they have it."""
    wanted = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} is unexpected" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        shape, asked = (tuple(one[name].shape) for one in (found, wanted))
        if shape != asked:
            wrong.append(f"{name} has the shape {shape} and not {asked}")
    return sorted(wrong)


def save_model(model: Qwen2, folder: Path) -> None:
    """Write a folder that `load_model` and `transformers` can open."""
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    dtype = str(next(iter(tensors.values())).dtype)
    save_config(model.config, folder, dtype.removeprefix("torch."))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_config(config: ModelConfig, folder: Path, dtype: str = "float32") -> None:
    name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.model_type]
    values = {"architectures": [name], **asdict(config), "hidden_act": "silu",
              "dtype": dtype, "torch_dtype": dtype}  # newer, older spelling
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def small_files(folder: Path) -> dict[str, bytes]:
    """What a model's folder has beside its config and its weights, such as the tokenizer and a chat
    template. All is read at once, because the folder may be a checkpoint that is removed later."""
    others = ("config.json", "model.safetensors.index.json")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())
            if path.is_file() and path.name not in others and path.stat().st_size < 5e7
            and path.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf")}


def load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{folder}/tokenizer.json cannot be read: {error}. save_pretrained of a "
                        "tokenizer of transformers writes one") from None


def stop_tokens(model: Qwen2, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer: those of the config, and the end of a turn."""
    ends = map(tokenizer.token_to_id, ("<|im_end|>", "<|endoftext|>"))
    return tuple({*model.config.eos_token_id, *(end for end in ends if end is not None)})


@lru_cache(maxsize=200_000)
def spelling(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token. A token that is a part of a character is spelt as \\ufffd."""
    return tokenizer.decode([token], skip_special_tokens=False)


# ------------------------------------------------------------------------- python qwen2_model.py
def show() -> None:
    """An answer of models/tiny: each token with its probability when it was drawn."""
    folder = Path(__file__).parent / "models/tiny"
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    prompt = "<|im_start|>user\n 3 5 7 make 22<|im_end|>\n<|im_start|>assistant\n<think>"
    drawn = generate(model, [tokenizer.encode(prompt).ids], 1, 54, model.config.eos_token_id,
                     torch.Generator().manual_seed(2))
    print(repr(prompt))
    shown = [f"{spelling(tokenizer, int(token))!r} {p:.3f}"
             for token, p in zip(drawn.ids[0], drawn.log_prob[0].exp())]
    for start in range(0, len(shown), 6):
        print("".join(f"{text:>16}" for text in shown[start:start + 6]))


if __name__ == "__main__":
    show()
