"""Qwen2, Qwen2.5 and Qwen3 (dense) written out by hand, with the cache and the sampler that make rollouts.

The module names are those of the published safetensors files, so a checkpoint loads key by key and one
that we write opens in `transformers`. Left out on purpose: rope scaling, sliding windows, dropout and
mixtures of experts. A folder that needs one of them is refused with a sentence that names it.

Shapes: B rows, L positions, T generated tokens, D width, H query heads, K key/value heads, V vocabulary.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


class UserError(ValueError):
    """Something at the edges (a file, a flag, a folder) that the user can put right: shown as one line."""


@dataclass(frozen=True)
class ModelConfig:
    """The part of `config.json` that decides what is computed."""
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
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; a sampled pad is one of them, nothing may follow it."""
        return tuple(dict.fromkeys([*self.eos_token_id, *([] if self.pad_token_id is None else [self.pad_token_id])]))

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        raw = read_json(folder / "config.json")
        refuse_what_is_not_implemented(raw, folder)
        heads, width = raw["num_attention_heads"], raw["hidden_size"]
        head_dim = raw.get("head_dim") or (128 if raw["model_type"] == "qwen3" else width // heads)
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        return cls(
            **{name: raw[name] for name in REQUIRED}, head_dim=head_dim, model_type=raw["model_type"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            eos_token_id=read_stop_tokens(raw, folder),
            **{name: raw[name] for name in OPTIONAL if name in raw})

    def to_json(self) -> dict:
        """Both spellings of the keys that were renamed between versions 4 and 5 of `transformers`."""
        name = "Qwen3ForCausalLM" if self.model_type == "qwen3" else "Qwen2ForCausalLM"
        own = {key: getattr(self, key) for key in (*REQUIRED, *OPTIONAL, "head_dim", "model_type", "rope_theta")}
        return {"architectures": [name], **own, "eos_token_id": list(self.eos_token_id) or None, "hidden_act": "silu",
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
                "attention_dropout": 0.0, "use_sliding_window": False}


def rotary(positions: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency (2104.09864), each (B or 1, 1, L, head_dim)."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angle = positions[:, None, :, None].float() * (1.0 / config.rope_theta ** exponent)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()  # the mean of squares in bfloat16 would lose the small ones
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads."""
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        D, size, qwen2 = config.hidden_size, config.head_dim, config.model_type == "qwen2"
        self.layer, self.head_dim = layer, size
        self.q_proj = nn.Linear(D, config.num_attention_heads * size, bias=qwen2)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * size, bias=qwen2)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * size, bias=qwen2)
        self.o_proj = nn.Linear(config.num_attention_heads * size, D, bias=False)
        if not qwen2:  # Qwen3 drops the biases and normalises each head's queries and keys instead
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def heads(self, x, cos, sin):
        """Queries, keys and values with their positions turned in, each (B, heads, L, head_dim)."""
        B, L, _ = x.shape
        q, k, v = (project(x).view(B, L, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v), v

    def probabilities(self, x, cos, sin):
        """(B, L, L): how much each position looks at each one up to itself, mean over heads. For looking at only:
        `forward` never has these numbers."""
        q, k, _ = self.heads(x, cos, sin)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        score = (q @ k.transpose(-1, -2)).float() / self.head_dim ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return score.masked_fill(later, float("-inf")).softmax(-1).mean(1)

    def forward(self, x, cos, sin, mask, cache):
        B, L, _ = x.shape
        q, k, v = self.heads(x, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)
        causal = mask is None and L > 1
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, L, -1))


class MLP(nn.Module):
    """SwiGLU (2002.05202)."""
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, mask, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids, cache=None):
        """(B, L) ids -> (B, L, D) hidden states. Without a cache, position 0 is the first id of every row."""
        L = ids.shape[1]
        if cache is None:
            positions, mask = torch.arange(L, device=ids.device)[None], None
        else:
            positions, mask = cache.positions_and_mask(L)
        cos, sin = rotary(positions, self.config)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, cache)
        if cache is not None:
            cache.length += L
        return self.norm(x)


class Qwen2(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, hidden):
        """(..., D) -> (..., V). Callers with a large vocabulary pass only the positions they need."""
        return F.linear(hidden, (self.lm_head or self.model.embed_tokens).weight)

    def forward(self, ids, cache=None):
        return self.logits(self.model(ids, cache))

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @classmethod
    def from_pretrained(cls, folder, device="cpu", dtype=torch.float32) -> "Qwen2":
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"there is no model folder {folder}")
        config = ModelConfig.from_folder(folder)
        with torch.device("meta"):
            model = cls(config)
        model.to_empty(device=device).to(dtype)
        load_weights(model, folder)
        return model

    def save_pretrained(self, folder) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config = {**self.config.to_json(), "dtype": dtype, "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads")
KINDS = ("qwen2", "qwen3")
OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "pad_token_id")


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object")
    return content


def refuse_what_is_not_implemented(raw: dict, folder: Path) -> None:
    check_values(raw, folder)
    kind, window = raw.get("model_type"), raw.get("sliding_window", 4096)
    slides = raw.get("use_sliding_window") and window and raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    found = {
        "rope_scaling": not plain_rope(raw.get("rope_scaling")),
        "rope_parameters": not plain_rope(raw.get("rope_parameters")),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "layer_types": set(raw.get("layer_types") or []) - {"full_attention"},
        "use_sliding_window": slides,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_dropout": raw.get("attention_dropout"),
        "attention_bias": raw.get("attention_bias") and kind == "qwen3",
        "quantization_config": raw.get("quantization_config"),
        "num_key_value_heads": raw["num_attention_heads"] % raw["num_key_value_heads"],
    }
    for key, refused in found.items():
        if refused:
            raise UserError(f"{folder / 'config.json'}: {key} {raw.get(key)!r} is not implemented here")


def check_values(raw: dict, folder: Path) -> None:
    """Every value the model is built from is of its kind, before anything is built."""
    def whole(value, least=1):
        return type(value) is int and least <= value < 2 ** 31

    def positive(value):
        return type(value) in (int, float) and 0 < value < float("inf")

    def some(value, test):
        return value is None or test(value)

    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    right = {key: whole(raw.get(key)) for key in REQUIRED} | {
        "head_dim": some(raw.get("head_dim"), whole), "rms_norm_eps": positive(raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": whole(raw.get("max_position_embeddings", 1)),
        "tie_word_embeddings": type(raw.get("tie_word_embeddings", False)) is bool,
        "rope_theta": positive(raw.get("rope_theta", 1.0)),
        "rope_parameters": isinstance(rope, dict) and positive(rope.get("rope_theta", 1.0)),
        "layer_types": some(raw.get("layer_types"), lambda value: isinstance(value, list)),
        **{key: some(raw.get(key), lambda value: whole(value, 0)) for key in ("bos_token_id", "pad_token_id")}}
    wrong = [f"{key} {raw.get(key)!r}" for key, fine in right.items() if not fine] if raw.get("model_type") in KINDS else []
    if wrong:
        raise UserError(f"{folder / 'config.json'} has no sensible value for {wrong[0]}")
    if raw.get("model_type") not in KINDS:
        raise UserError(f"{folder / 'config.json'}: model_type {raw.get('model_type')!r} is not implemented here")


def read_stop_tokens(raw: dict, folder: Path) -> tuple[int, ...]:
    """The generation config's list first: an instruct model's is longer than that of config.json."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    found = raw.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{folder}: eos_token_id {found!r} should be a token number or a list of them")
    return tuple(ids)


def plain_rope(rope: dict | None) -> bool:
    """Whether these rotary settings, in the older or the newer spelling, ask for nothing but a base frequency."""
    rope = rope or {}
    return set(rope) <= {"rope_type", "type", "rope_theta", "partial_rotary_factor"} \
        and rope.get("rope_type", rope.get("type", "default")) == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0


def weight_files(folder: Path) -> list[Path]:
    """One file, or the many that an index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{folder} has neither {single.name} nor {index.name} (weights in pickle files are not read)")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map of tensors to files")
    return [folder / name for name in sorted(set(names.values()))]


def load_weights(model: Qwen2, folder: Path) -> None:
    """Every tensor of the files must have its place, and every place its tensor."""
    places, repeated = dict(model.named_parameters()), []
    if model.lm_head is None:  # a tied model's files may hold the output matrix a second time
        places["lm_head.weight"] = torch.empty_like(model.model.embed_tokens.weight)
        repeated = ["lm_head.weight"]
    missing, extra = set(places), []
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    if name in places:
                        copy_tensor(places[name], file.get_tensor(name), name, path)
                        missing.discard(name)
                    else:
                        extra.append(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read, it may be cut off: {error}") from None
    for name in set(repeated) - missing:
        if not torch.equal(places[name], model.model.embed_tokens.weight):
            extra.append(f"{name} (not the embeddings, although tie_word_embeddings is true)")
    for names, what in ((sorted(missing - set(repeated)), "lacks"), (extra, "has, beyond what config.json asks for,")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UserError(f"{folder} {what} {', '.join(names[:5])}{more}")


@torch.no_grad()
def copy_tensor(place: torch.Tensor, tensor: torch.Tensor, name: str, path: Path) -> None:
    if place.shape != tensor.shape:
        raise UserError(f"{path}: {name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(place.shape)}")
    place.copy_(tensor)


class KVCache:
    """Keys and values of every layer, allocated once. Rows are padded on the left, so that all of them
    write to the same slot; `pad` counts the unused slots of each row (None when there are none)."""

    def __init__(self, model: Qwen2, rows: int, slots: int, pad: torch.Tensor | None = None, dtype=None):
        config = model.config
        shape = (rows, config.num_key_value_heads, slots, config.head_dim)
        dtype = dtype or next(model.parameters()).dtype
        self.keys = [torch.empty(shape, dtype=dtype, device=model.device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.empty_like(k) for k in self.keys]
        self.rows, self.length, self.pad = rows, 0, pad

    def write(self, layer: int, k, v):
        end = self.length + k.shape[2]
        keys, values = self.keys[layer][:self.rows], self.values[layer][:self.rows]
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, :end], values[:, :, :end]

    def positions_and_mask(self, L: int):
        """For L new tokens: their positions (B or 1, L), and what they may see (None: all, or plainly causal)."""
        device = self.keys[0].device
        slot = torch.arange(self.length, self.length + L, device=device)[None]  # (1, L)
        if self.pad is None and (L == 1 or self.length == 0):
            return slot, None
        pad = torch.zeros(1, dtype=torch.long, device=device) if self.pad is None else self.pad
        key = torch.arange(self.length + L, device=device)
        seen = (key <= slot[..., None]) & (key >= pad[:, None, None])  # (B, L, keys)
        seen |= key == slot[..., None]  # a padded slot sees itself: a row of -inf would turn into NaN
        return (slot - pad[:, None]).clamp(min=0), seen[:, None]

    def keep(self, rows: torch.Tensor) -> None:
        """Only these rows go on; the others' memory stays allocated and is not touched again."""
        for tensor in (*self.keys, *self.values):
            tensor[:len(rows), :, :self.length] = tensor[rows, :, :self.length]
        self.rows = len(rows)
        self.pad = None if self.pad is None else self.pad[rows]

    def copy_repeated(self, other: "KVCache", times: int) -> None:
        """Start from another cache's rows, each of them `times` over: a prompt is computed once per question."""
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values)):
            mine[:, :, :other.length] = theirs.repeat_interleave(times, 0)
        self.length = other.length


@dataclass
class Generation:
    """What was sampled, in response coordinates: index t is the t-th generated token. Beyond the mask all is 0.

    log_prob, entropy -sum p log p and collision sum p^2 are of the temperature-1 distribution, the one
    that training sees, whatever the sampling temperature was. finished: the row ended itself.
    """
    tokens: torch.Tensor     # (B, T) int64
    mask: torch.Tensor       # (B, T) bool, the stop token included
    finished: torch.Tensor   # (B,) bool
    log_prob: torch.Tensor   # (B, T) float32
    entropy: torch.Tensor
    collision: torch.Tensor

    @classmethod
    def empty(cls, B: int, T: int, device) -> "Generation":
        return cls(torch.zeros(B, T, dtype=torch.long, device=device), torch.zeros(B, T, dtype=torch.bool, device=device),
                   torch.zeros(B, dtype=torch.bool, device=device), *torch.zeros(3, B, T, device=device))

    def record(self, rows, live, t: int, token, log_probs, stop) -> None:
        """One token for each of these rows that are still live; the others stay as they are."""
        probs = log_probs.exp()
        self.tokens[rows, t], self.mask[rows, t] = token * live, live
        self.log_prob[rows, t] = log_probs.gather(1, token[:, None]).squeeze(1) * live
        self.entropy[rows, t] = -torch.special.xlogy(probs, probs).sum(-1) * live
        self.collision[rows, t] = probs.square().sum(-1) * live
        self.finished[rows] |= torch.isin(token, stop) & live


def prefill(model: Qwen2, prompts: list[list[int]], answers: int, max_new_tokens: int):
    """Cache for all rows and the hidden state after each prompt (B, D); every prompt is computed once."""
    P = max(map(len, prompts))
    pad = torch.tensor([P - len(prompt) for prompt in prompts], device=model.device)
    ids = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in prompts], device=model.device)
    pad = pad if pad.any() else None
    dtype = torch.get_autocast_dtype(model.device.type) if torch.is_autocast_enabled(model.device.type) else None
    questions = KVCache(model, len(prompts), P, pad, dtype)
    hidden = model.model(ids, questions)[:, -1]
    rows = KVCache(model, len(prompts) * answers, P + max_new_tokens - 1,
                   None if pad is None else pad.repeat_interleave(answers), dtype)
    rows.copy_repeated(questions, answers)
    return rows, hidden.repeat_interleave(answers, 0)


def pick(log_probs, uniform, temperature: float, greedy: bool):
    """One token a row by inverting the cumulative distribution at that row's own random number."""
    if greedy:
        return log_probs.argmax(-1)
    probs = log_probs.exp() if temperature == 1 else (log_probs / temperature).softmax(-1)
    cumulative = probs.cumsum(-1)
    # `right` skips tokens of probability zero; the sum may fall short of 1 by rounding, so scale by it
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1).clamp(
        max=probs.shape[-1] - 1)


@torch.no_grad()
def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int], answers: int = 1,
             temperature: float = 1.0, greedy: bool = False, seed: int = 0, stop_ids: tuple[int, ...] | None = None) -> Generation:
    """`answers` continuations of every prompt, rows in the order of the prompts; `max_new_tokens` for all or one for each.

    The random numbers of all (row, t) are drawn before the first token, so what a row samples does not
    depend on which other rows are still there. Rows that are done leave the batch a few at a time,
    since every departure moves the cache.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    check_generate(model, prompts, limits, answers, temperature)
    device, B, T = model.device, len(prompts) * answers, max(limits)
    limit = torch.tensor(limits, device=device).repeat_interleave(answers)
    uniform = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)).to(device)
    stop = torch.tensor(model.config.stop_ids if stop_ids is None else stop_ids, dtype=torch.long, device=device)
    result, rows = Generation.empty(B, T, device), torch.arange(B, device=device)
    done = torch.zeros(B, dtype=torch.bool, device=device)
    cache, hidden = prefill(model, prompts, answers, T)
    for t in range(T):
        log_probs = model.logits(hidden).float().log_softmax(-1)  # (rows, V)
        token = pick(log_probs, uniform[rows, t], temperature, greedy)
        result.record(rows, ~done, t, token, log_probs, stop)
        done = result.finished[rows] | (t + 1 >= limit[rows])
        if done.all():
            break
        if 8 * done.sum() >= len(rows):
            stay = (~done).nonzero().squeeze(1)
            cache.keep(stay)
            rows, token, done = rows[stay], token[stay], done[stay]
        hidden = model.model(token[:, None], cache)[:, -1]
    return result


def check_generate(model, prompts, limits, answers, temperature) -> None:
    if not prompts or not all(prompts) or len(limits) != len(prompts):
        raise UserError("generate needs at least one prompt, no empty one, and one max_new_tokens for all or one for each")
    if min(limits) < 1 or answers < 1 or not temperature > 0:
        raise UserError(f"max_new_tokens {min(limits)} and answers {answers} must be at least 1, "
                        f"temperature {temperature} above 0 (greedy=True takes the likeliest token)")
    longest, limit = max(len(p) + n for p, n in zip(prompts, limits)), model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"prompt and answer can reach {longest} tokens, the model's limit is {limit}")
