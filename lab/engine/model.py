"""The model of qwen2_model.py with what a run beyond the book asks of it: products in bfloat16, any
device, layers whose activations are computed again (--checkpointing), and attention in fewer
operations.

A model is built by the book, and then its modules get the classes of this file in place, which have
the same parameters and another `forward`. The cache is the book's, and shapes are told there.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qwen2_model
from qwen2_model import Attend, causal, rotate
from qwen2_model import ModelConfig as ModelConfig  # many take it from here


def rotary(positions: Tensor, config: ModelConfig,
           dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The book's, on any device and in any type."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=dtype)
    frequency = 1.0 / config.rope_theta ** (steps / config.head_dim)
    angle = positions[..., None, None].to(dtype) * frequency  # (..., 1, frequencies)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


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


def tensors_on(device: torch.device) -> AbstractContextManager[Any]:
    """The book makes tensors without naming a device. In this context they are on this one."""
    return nullcontext() if device.type == "cpu" else device


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ matrix.T + bias in the type of x, whatever type the weights are kept in."""
    if getattr(matrix, "is_frozen", False) and not torch.is_grad_enabled() and x.is_cpu:
        return frozen_product(x, matrix, bias)
    if x.dtype == matrix.dtype == torch.float32:  # the usual case, with nothing to round
        return F.linear(x, matrix, bias)
    product_dtype = product_type(x.dtype, x.device)
    # the weights are rounded to the type of x even if the product is computed in another type
    matrix = matrix.to(x.dtype).to(product_dtype)
    if bias is not None:
        bias = bias.to(x.dtype).to(product_dtype)
    return F.linear(x.to(product_dtype), matrix, bias).to(x.dtype)


def frozen_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The same for a matrix that LoRA has frozen. It is kept beside itself in the layout in which
    oneDNN reads it fastest with few rows, as in sampling."""
    product_dtype = product_type(x.dtype, x.device)
    if not hasattr(matrix, "laid_out"):
        rounded = matrix.detach().to(x.dtype).to(product_dtype).contiguous()
        laid_out = torch.ops.mkldnn._reorder_linear_weight(rounded)
        matrix.laid_out = laid_out  # type: ignore[attr-defined]
    if bias is not None:
        bias = bias.to(x.dtype).to(product_dtype)
    rows = x.flatten(0, -2).to(product_dtype)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        rows, matrix.laid_out, bias, "none", [], "")  # type: ignore[attr-defined]
    return product.to(x.dtype).view(*x.shape[:-1], -1)


class RMSNorm(qwen2_model.RMSNorm):
    """The norm computes in float32 at least and casts its output to `output_dtype`. Thereby the
    norms decide in which type matrices are multiplied, because each Linear computes in the type of
    its input."""
    output_dtype = torch.float32  # `Qwen2.compute_in` changes it

    def forward(self, x: Tensor) -> Tensor:
        # in bfloat16 a small square would be lost when it is added to a large sum
        if x.dtype == self.weight.dtype == self.output_dtype == torch.float32:
            return super().forward(x)
        wide = at_least_float32(self.output_dtype)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(self.output_dtype)


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, so that weights which are kept in
    float32 can be multiplied in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Attention(qwen2_model.Attention):
    """The book's attention, in the types of the norms, with half the operations of a rotation."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shape = (-1, self.head_dim)
        q = self.q_proj(x).unflatten(-1, shape)  # (..., H, head_dim)
        k = self.k_proj(x).unflatten(-1, shape)  # (..., K, head_dim)
        v = self.v_proj(x).unflatten(-1, shape)
        q, k = self.q_norm(q), self.k_norm(k)
        sizes = [q.shape[-2], k.shape[-2]]
        turned = rotate(torch.cat([q, k], -2), cos, sin)  # together, with half the operations
        # rounded to the type of v, as cos and sin are in float32 at least
        kind = product_type(v.dtype, v.device)
        q, k = turned.type_as(v).to(kind).split(sizes, -2)
        return self.o_proj(attend(self.layer, q, k, v.to(kind)).type_as(v).flatten(-2))


class Decoder(qwen2_model.Decoder):
    """The book's decoder on any device, whose layers may keep less for the backward pass."""
    checkpointing = False  # True: activations within a layer are computed again, not kept
    __call__: Callable[..., Tensor]
    config: ModelConfig
    norm: RMSNorm

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


class Qwen2(qwen2_model.Qwen2):
    """The whole model; a Qwen3 if `config.model_type` says so."""
    __call__: Callable[..., Tensor]
    config: ModelConfig
    model: Decoder

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        exchange_classes(self)
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


EXCHANGED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear, qwen2_model.RMSNorm: RMSNorm, qwen2_model.Attention: Attention,
    qwen2_model.Decoder: Decoder, qwen2_model.Qwen2: Qwen2}


def exchange_classes(model: nn.Module) -> None:
    """Give the modules of a model of the book the classes of this file, in place."""
    for module in model.modules():
        module.__class__ = EXCHANGED.get(type(module), type(module))
