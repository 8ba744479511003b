"""Qwen2, Qwen2.5 and Qwen3 (dense) written out by hand.

The modules have the names of the published safetensors files, so a checkpoint loads key by key,
and one that is written here opens in `transformers`. lab/engine/model_folder.py reads and writes
such folders. Left out on purpose: rope scaling, sliding windows, dropout and mixtures of experts; a
folder that needs one of them is refused.

Everything but attention treats each token alone, so tokens may come in any shape: as rows (B, L),
or as all answers end to end (N,). Only one function knows which tokens see each other. It is passed
in as `attend`:

    causal         (this file)   each token sees its own row up to itself
    SharedPrompts  (packing.py)  training: a prompt is there once, and all its answers see it
    Cache          (cache.py)    sampling: one new token in each row sees all before it

Shapes: B rows, L positions, N tokens of a forward pass (in grpo.py N is the number of generated
tokens in a batch), D width, H query heads, K key/value heads, V vocabulary.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --mitigation none")
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v


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
        """The tokens that end an answer. The pad token is one of them, because nothing may follow
        it."""
        pad = () if self.pad_token_id is None else (self.pad_token_id,)
        return tuple(dict.fromkeys([*self.eos_token_id, *pad]))

    def to_json(self) -> dict[str, object]:
        """The content of config.json, with the keys of `transformers` version 4 and version 5."""
        name = "Qwen3ForCausalLM" if self.model_type == "qwen3" else "Qwen2ForCausalLM"
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        stop = list(self.eos_token_id) or None
        return {"architectures": [name], **asdict(self), "eos_token_id": stop,
                "hidden_act": "silu", "rope_parameters": rope, "attention_dropout": 0.0,
                "use_sliding_window": False}


def rotary(positions: Tensor, config: ModelConfig,
           dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency (2104.09864), each (..., 1, head_dim). The first
    half of the sine is negated here, so that `rotate` is x * cos + swapped * sin."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=dtype)
    frequency = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angle = positions[..., None, None].to(dtype) * frequency  # (..., 1, frequencies)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate every pair (a, b) of a head into (a cos - b sin, b cos + a sin), where a is in the
    head's first half and b at the same index of its second half. `out` may be x."""
    swapped = x.roll(x.shape[-1] // 2, -1)  # (b, a); the minus sign is already in `sin`
    return torch.addcmul(x * cos, swapped, sin, out=out)  # x * cos + swapped * sin


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which to multiply matrices. It is `dtype` with one exception: on a CPU on which
    oneDNN does not multiply bfloat16 it is float32, because bfloat16 would be 40 times slower. The
    products are then added up in another order, and nothing else differs."""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16()
    return torch.float32 if is_slow else dtype


def has_bfloat16() -> bool:
    """Whether oneDNN, torch's library for products on a CPU, multiplies bfloat16 matrices on this
    CPU. It does so from AVX-512 on."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_fast_in_bfloat16() -> bool:
    """Whether bfloat16 is also faster than float32 on this CPU. For that it needs instructions that
    multiply in bfloat16 (AVX-512's, or AMX). Without them oneDNN converts every number first, which
    is slower than float32."""
    return has_bfloat16() and bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ matrix.T + bias in the type of x, whatever type the weights are kept in."""
    product_dtype = product_type(x.dtype, x.device)
    # the weights are rounded to the type of x even if the product is computed in another type
    matrix = matrix.to(x.dtype).to(product_dtype)
    if bias is not None:
        bias = bias.to(x.dtype).to(product_dtype)
    return F.linear(x.to(product_dtype), matrix, bias).to(x.dtype)


class Layer(nn.Module):
    """A module whose call returns a tensor, for the type checker."""
    __call__: Callable[..., Tensor]


class RMSNorm(Layer):
    """x / sqrt(mean of x^2 + eps) * weight (1910.07467). The norm computes in float32 at least and
    casts its output to `output_dtype`. Thereby the norms decide in which type matrices are
    multiplied, because each Linear computes in the type of its input."""
    output_dtype = torch.float32  # `Qwen2.compute_in` changes it

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # in bfloat16 a small square would be lost when it is added to a large sum
        wide = at_least_float32(self.output_dtype)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(self.output_dtype)


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, so that weights which are kept in
    float32 can be multiplied in bfloat16."""
    __call__: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding that draws no initial weights on the device "meta", where tensors have a shape
    and no numbers. torch would import its whole compiler to draw nothing."""
    __call__: Callable[..., Tensor]

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(Layer):
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, shape)  # (..., H, head_dim)
        k = self.k_proj(x).unflatten(-1, shape)  # (..., K, head_dim)
        v = self.v_proj(x).unflatten(-1, shape)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        sizes = [q.shape[-2], k.shape[-2]]
        turned = rotate(torch.cat([q, k], -2), cos, sin)  # together, with half the operations
        turned = turned.type_as(v)  # cos and sin are in float32 at least
        q, k = turned.split(sizes, -2)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over (rows, heads, length, head_dim); without a mask it is causal.

    A mask, of 0 and -inf, is added to the scores. With a mask, the query heads that share a key
    head are computed as one head with H / K times as many queries: first all queries of the first
    head, then those of the second, and so on. So the mask's shape is
    (rows, 1, H / K * length, keys).
    """
    H, K = q.shape[1], k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)
    product_dtype = product_type(q.dtype, q.device)
    by_key_head = q.unflatten(1, (K, -1)).flatten(2, 3)  # (rows, K, H / K * length, head_dim)
    attended = F.scaled_dot_product_attention(
        by_key_head.to(product_dtype), k.to(product_dtype), v.to(product_dtype),
        mask.to(product_dtype))
    return attended.to(q.dtype).reshape(q.shape)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over rows (B, L, heads, head_dim): every token sees its own row up to itself."""
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class MLP(Layer):
    """The feed-forward part of a layer, SwiGLU (2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(Layer):
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


class Decoder(Layer):
    """The embeddings and the layers, without the output matrix: `model.` in the published names."""
    checkpointing = False  # True: activations within a layer are computed again, not kept

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor | None = None,
                attend: Attend = causal) -> Tensor:
        """Ids of any shape -> hidden states (..., D). Without `positions` they are rows (B, L) that
        begin at position 0."""
        if positions is None:
            positions = torch.arange(ids.shape[-1], device=ids.device)
        wide = at_least_float32(self.norm.output_dtype)  # the type of x between the layers
        cos, sin = rotary(positions, self.config, wide)
        x = self.embed_tokens(ids).to(wide)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False,
                               preserve_rng_state=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.norm(x)


class Qwen2(Layer):
    """The whole model; a Qwen3 if `config.model_type` says so."""

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
        """Draw the parameters of a new model: matrices are normal, biases 0; norms stay at 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.model(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V). With a large vocabulary, pass only the positions you need."""
        return linear(hidden, self.output_matrix)

    @property
    def output_matrix(self) -> Tensor:
        """(V, D): the matrix that makes logits, which is the embedding itself if they are tied."""
        return (self.lm_head or self.model.embed_tokens).weight

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def is_large(self) -> bool:
        """Whether the model has more than 100 million parameters. With such a model programs say
        so before they begin something that takes long."""
        return sum(parameter.numel() for parameter in self.parameters()) > 1e8

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.model.norm.output_dtype

    def compute_in(self, dtype: torch.dtype) -> "Qwen2":
        """Multiply matrices in this type, whatever type the parameters are kept in. It is enough to
        set the output type of the norms, because every Linear computes in the type of its input."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.output_dtype = dtype
        return self
