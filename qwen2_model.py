"""Qwen2, Qwen2.5 and Qwen3 (dense) written out by hand.

The module names are those of the published safetensors files, so a checkpoint loads key by key and one
that we write opens in `transformers`. Left out on purpose: rope scaling, sliding windows, dropout and
mixtures of experts. A folder that needs one of them is refused with a sentence that names it.

Everything but attention treats each token alone, so the tokens may stand in any shape: rows (B, L), or
all end to end (N,). Which of them see each other is the affair of one function, `attend`:

    causal          rows of their own, each token sees those before it
    SharedPrompts   prompts stand once, and the answers to each go on from there: training, and the start of sampling
    Answering       one new token a row, what came before is in a cache (sampler.py)

Shapes: B rows, L positions, N tokens, D width, H query heads, K key/value heads, V vocabulary.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
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
    """Cosine and signed sine of position times frequency (2104.09864), each (..., 1, head_dim): the same for all heads."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angle = positions[..., None, None].float() * (1.0 / config.rope_theta ** exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Element i of the first half and element i of the second are the two sides of a plane that is turned."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 + eps) * weight (1910.07467). What comes out has the type that products are made in:
    every Linear follows its input."""
    compute = torch.float32

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        # the mean of squares in bfloat16 would lose the small ones
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(self.compute)


class Linear(nn.Linear):
    """Parameters may be kept in float32 and multiplied in bfloat16."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention: H query heads share K key/value heads."""
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        D, size, qwen2 = config.hidden_size, config.head_dim, config.model_type == "qwen2"
        self.layer, self.head_dim = layer, size
        self.q_proj = Linear(D, config.num_attention_heads * size, bias=qwen2)
        self.k_proj = Linear(D, config.num_key_value_heads * size, bias=qwen2)
        self.v_proj = Linear(D, config.num_key_value_heads * size, bias=qwen2)
        self.o_proj = Linear(config.num_attention_heads * size, D, bias=False)
        if not qwen2:  # Qwen3 drops the biases and normalises each head's queries and keys instead
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def heads(self, x, cos, sin):
        """Queries, keys and values with their positions turned in, each (..., heads, head_dim)."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v), v

    def forward(self, x, cos, sin, attend):
        return self.o_proj(attend(self.layer, *self.heads(x, cos, sin)).flatten(-2))


def mix(q, k, v, mask=None) -> torch.Tensor:
    """Softmax attention over (rows, heads, length, head_dim), causal unless a mask says who sees whom."""
    if mask is not None and q.is_cuda:  # the kernel there that takes a mask wants every query head's own keys
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])


def causal(layer: int, q, k, v) -> torch.Tensor:
    """(B, L, heads, head_dim): every token sees its own row up to itself."""
    return mix(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class SharedPrompts:
    """Each prompt stands once, however many answers go on from it: their tokens see the prompt's, and their own up to themselves.

    All tokens stand end to end, (N,): prompt after prompt, then answer after answer. Only for attention are they put into
    rows, (Q, P) prompts and blocks of (r, S) answers of like length, padded on the right. The gradient is exact: a prompt's
    keys and values collect it from all answers.
    """
    ROWS = 8  # of a block

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int], prompt_of: torch.Tensor):
        device, lengths = prompt_of.device, torch.tensor(answer_lengths, dtype=torch.long, device=prompt_of.device)
        self.prompt_of = prompt_of                                                      # (R,) rows of self.prompts
        self.prompts, asked = places(prompt_lengths, 0, device)                         # (Q, P) indices of tokens
        self.answers, answered = places(answer_lengths, sum(prompt_lengths), device)    # (R, S)
        self.positions = torch.cat([torch.arange(n) for n in prompt_lengths]
                                   + [prompt_lengths[g] + torch.arange(n) for g, n in zip(prompt_of.tolist(), answer_lengths)]).to(device)
        before = torch.ones(self.answers.shape[1], self.answers.shape[1], dtype=torch.bool, device=device).tril()
        self.blocks, stand, inside = [], [self.prompts.flatten()], [asked.flatten()]
        for rows in lengths.argsort(stable=True)[int((lengths == 0).sum()):].split(self.ROWS) if lengths.any() else ():
            S = int(lengths[rows[-1]])
            own = before[:S, :S].expand(len(rows), -1, -1)
            self.blocks.append((rows, self.answers[rows, :S], torch.cat([asked[prompt_of[rows]][:, None].expand(-1, S, -1), own], -1)[:, None]))
            stand.append(self.answers[rows, :S].flatten()), inside.append(answered[rows, :S].flatten())
        stand, inside = torch.cat(stand), torch.cat(inside).nonzero().squeeze(1)
        self.back = torch.empty_like(inside).index_copy_(0, stand[inside], inside)  # from rows to end to end

    def rows(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, heads, head_dim) -> (rows, heads, length, head_dim)"""
        return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)

    def __call__(self, layer: int, q, k, v) -> torch.Tensor:
        asked, keys, values = (self.rows(x, self.prompts) for x in (q, k, v))
        mixed = [mix(asked, keys, values)]
        for rows, places, mask in self.blocks:
            seen = (torch.cat([prompt[self.prompt_of[rows]], self.rows(x, places)], 2) for prompt, x in ((keys, k), (values, v)))
            mixed.append(mix(self.rows(q, places), *seen, mask))
        return torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in mixed]).index_select(0, self.back)

    def received(self, q, k) -> torch.Tensor:
        """(R, S, S): how much each token of an answer looks at each one up to itself, mean over heads; 0 beyond its length or
        not earlier. For looking at only: `mix` never has these numbers."""
        R, S = self.answers.shape
        found = torch.zeros(R, S, S, device=q.device)
        for rows, places, mask in self.blocks:
            keys = torch.cat([self.rows(k, self.prompts)[self.prompt_of[rows]], self.rows(k, places)], 2)
            keys = keys.repeat_interleave(q.shape[1] // k.shape[1], 1)
            score = (self.rows(q, places) @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            n = places.shape[1]
            found[rows, :n, :n] = score.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)[..., -n:]
        return found


def places(lengths: list[int], start: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a flat sequence that begins at `start` the tokens of each row stand, (rows, longest), and which are no padding."""
    length = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
    step = torch.arange(max(lengths, default=0), device=device)
    inside = step < length
    return torch.where(inside, start + length.cumsum(0) - length + step, 0), inside


class MLP(nn.Module):
    """SwiGLU (2002.05202)."""
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    checkpointing = False  # True: a layer's inside is computed again in the backward pass instead of being kept

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids, positions=None, attend=causal):
        """Ids of any shape -> hidden states (..., D). By default (B, L), and position 0 is the first id of every row."""
        positions = torch.arange(ids.shape[-1], device=ids.device) if positions is None else positions
        cos, sin = rotary(positions, self.config)
        x = self.embed_tokens(ids).float()  # from layer to layer it stays float32
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.norm(x)


class Qwen2(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, hidden):
        """(..., D) -> (..., V). Callers with a large vocabulary pass only the positions they need."""
        return F.linear(hidden, self.output_matrix.to(hidden.dtype))

    def forward(self, ids):
        return self.logits(self.model(ids))

    @property
    def output_matrix(self) -> torch.Tensor:
        return (self.lm_head or self.model.embed_tokens).weight

    def compute_in(self, dtype: torch.dtype) -> "Qwen2":
        """Products in this type, whatever the parameters are kept in."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.compute = dtype
        return self

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def keep_matrices_in(self, dtype: torch.dtype) -> "Qwen2":
        """2 bytes a parameter in bfloat16; norms and biases stay as they are, they are few."""
        for p in self.parameters():
            p.data = p.data.to(dtype) if p.dim() == 2 else p.data
        return self

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
        return model.compute_in(dtype)

    def save_pretrained(self, folder, parameters: dict[str, torch.Tensor] | None = None) -> None:
        """With these parameters, if they are kept elsewhere with more digits."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (parameters or self.state_dict()).items()}
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
