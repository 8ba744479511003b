"""Qwen2, Qwen2.5 and Qwen3 (dense) written out by hand.

The module names are those of the published safetensors files, so a checkpoint loads key by key,
and one that we write opens in `transformers`. Left out on purpose: rope scaling, sliding windows,
dropout and mixtures of experts. engine/model_folder.py refuses a folder that needs one of them.

Everything but attention treats each token alone, so tokens may stand in any shape: rows (B, L),
or all answers end to end (N,). Only one function knows which tokens see each other. It is handed
in as `attend`:

    causal         (this file)          each token sees its own row up to itself
    SharedPrompts  (engine/packing.py)  training: a prompt stands once, all its answers see it
    Cache          (engine/cache.py)    sampling: one new token a row sees all before it

Shapes: B rows, L positions, N tokens, D width, H query heads, K key/value heads, V vocabulary.
"""
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from engine.errors import UserError
from engine.model_folder import (check_headers, check_layers, load_weights, read_config,
                                 read_headers, take_memory, write_tensors)


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
        """Tokens that end an answer. A sampled pad is one of them: nothing may follow it."""
        pad = () if self.pad_token_id is None else (self.pad_token_id,)
        return tuple(dict.fromkeys([*self.eos_token_id, *pad]))

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        return cls(**read_config(Path(folder)))

    def to_json(self) -> dict:
        """What config.json holds, with the keys of `transformers` version 4 and of version 5."""
        name = "Qwen3ForCausalLM" if self.model_type == "qwen3" else "Qwen2ForCausalLM"
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        stop = list(self.eos_token_id) or None
        return {"architectures": [name], **asdict(self), "eos_token_id": stop,
                "hidden_act": "silu", "rope_parameters": rope, "attention_dropout": 0.0,
                "use_sliding_window": False}


def rotary(positions: torch.Tensor, config: ModelConfig,
           dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of position times frequency (2104.09864), each (..., 1, head_dim).

    The sine's first half is negated, as `rotate` needs it.
    """
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=dtype)
    frequency = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angle = positions[..., None, None].to(dtype) * frequency  # (..., 1, frequencies)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every pair (a, b) of a head, a from its first half and b at the same place of its second
    half: into (a cos - b sin, b cos + a sin)."""
    swapped = x.roll(x.shape[-1] // 2, -1)  # the halves change places; -sin is in `sin`
    return torch.addcmul(x * cos, swapped, sin)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / sqrt(mean of x^2 + eps) * weight (1910.07467).

    The output's type decides in which type the model computes: a norm stands before every group
    of Linears, and they compute in the type of their input.
    """
    output_dtype = torch.float32  # `Qwen2.compute_in` sets it

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        # the mean of squares in bfloat16 would lose the small ones
        wide = at_least_float32(self.output_dtype)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(self.output_dtype)


class Linear(nn.Linear):
    """Computes in the type of its input: weights kept in float32 can be multiplied in bfloat16."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    """Draws no initial weights on the device "meta", where there is no memory for them: torch would
    import its whole compiler to do nothing."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    """Grouped-query attention (2305.13245): H query heads share K key/value heads."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = size = config.head_dim
        D = config.hidden_size
        is_qwen2 = config.model_type == "qwen2"
        self.q_proj = Linear(D, config.num_attention_heads * size, bias=is_qwen2)
        self.k_proj = Linear(D, config.num_key_value_heads * size, bias=is_qwen2)
        self.v_proj = Linear(D, config.num_key_value_heads * size, bias=is_qwen2)
        self.o_proj = Linear(config.num_attention_heads * size, D, bias=False)
        if not is_qwen2:  # Qwen3 drops the biases and normalises queries and keys instead
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        q, k, v = self.heads(x, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))

    def heads(self, x, cos, sin):
        """Queries, keys and values, each (..., heads, head_dim); the first two know positions."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v), v


def mix(q, k, v, mask=None) -> torch.Tensor:
    """Softmax attention over (rows, heads, length, head_dim), causal unless a mask says who sees
    whom."""
    H, K = q.shape[1], k.shape[1]
    if mask is not None and q.is_cuda:  # the CUDA kernel with a mask wants keys for every head
        k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                          enable_gqa=k.shape[1] != H)


def causal(layer: int, q, k, v) -> torch.Tensor:
    """(B, L, heads, head_dim): every token sees its own row up to itself."""
    return mix(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


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
    """One layer: attention, then the MLP, each added to x after a norm."""

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
    """The layers, without the output matrix: `model.` in the published names."""
    checkpointing = False  # True: a layer's inside is not kept but computed again for the gradient

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        count = config.num_hidden_layers
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(count))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids, positions=None, attend=causal):
        """Ids of any shape -> hidden states (..., D). By default rows (B, L) that begin at
        position 0."""
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        wide = at_least_float32(self.norm.output_dtype)  # x has this type from layer to layer
        cos, sin = rotary(positions, self.config, wide)
        x = self.embed_tokens(ids).to(wide)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False,
                               preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.norm(x)


class Qwen2(nn.Module):
    """The whole model, and a Qwen3 too where `config.model_type` says so."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if self.device.type != "meta":  # see Embedding
            self.draw_parameters()

    def draw_parameters(self) -> None:
        """For a new model: normal matrices, zero biases; norms begin at 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids):
        return self.logits(self.model(ids))

    def logits(self, hidden):
        """(..., D) -> (..., V). With a large vocabulary, pass only the positions you need."""
        return F.linear(hidden, self.output_matrix.to(hidden.dtype))

    @property
    def output_matrix(self) -> torch.Tensor:
        """(V, D): the embedding itself where the two are tied."""
        return (self.lm_head or self.model.embed_tokens).weight

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.model.norm.output_dtype

    def compute_in(self, dtype: torch.dtype) -> "Qwen2":
        """Make products in this type, whatever the parameters are kept in."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.output_dtype = dtype
        return self

    def keep_matrices_in(self, dtype: torch.dtype) -> "Qwen2":
        """2 bytes a parameter in bfloat16; norms and biases stay as they are, they are few."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.to(dtype)
        return self

    @classmethod
    def from_pretrained(cls, folder, device="cpu", dtype=torch.float32, cut=None) -> "Qwen2":
        """Load the model of a folder. `cut`, where given, is called on it before it takes memory:
        engine/sharded.py leaves each process its part."""
        folder = Path(folder)
        if not os.path.isdir(folder):  # Path.is_dir fails on names that are too long
            raise UserError(f"there is no model folder {folder}")
        config = ModelConfig.from_folder(folder)
        headers = read_headers(folder)
        check_layers(headers, config.num_hidden_layers, folder)
        with torch.device("meta"):  # no memory until the files are known to fit
            model = cls(config)
        check_headers(headers, model, folder)
        if cut:
            cut(model)
        take_memory(model, device, dtype)
        load_weights(model, headers, folder)
        return model.compute_in(dtype)

    def save_pretrained(self, folder, parameters: dict[str, torch.Tensor] | None = None) -> None:
        """Write config and weights. `parameters`, where given, are written instead of the model's
        own: the optimizer may keep them with more digits."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = parameters or self.state_dict()
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config = {**self.config.to_json(), "dtype": dtype, "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(folder / "model.safetensors", tensors, format="pt")
