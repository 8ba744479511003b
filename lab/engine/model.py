"""The model of qwen2_model.py with what a run beyond the book asks of it: products in bfloat16, any
device, and layers whose activations are computed again (--checkpointing).

The model is the book's, and so is each function that computes it: here hooks are added, which
change types, and torch's Linear gives way to one that takes any type. Shapes are told in the book.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qwen2_model
from lab.engine import log_probs
from qwen2_model import Decoder as Decoder  # many take these from here
from qwen2_model import ModelConfig as ModelConfig
from qwen2_model import rotary as rotary


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
    bias = None if bias is None else bias.type_as(x)
    if getattr(matrix, "is_frozen", False) and not torch.is_grad_enabled() and x.is_cpu:
        return frozen_product(x, matrix, bias)
    return F.linear(x, matrix.type_as(x), bias)


def frozen_product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """The same for a matrix that LoRA has frozen. It is kept beside itself in the layout in which
    oneDNN reads it fastest with few rows, as in sampling."""
    if not hasattr(matrix, "laid_out"):
        laid_out = torch.ops.mkldnn._reorder_linear_weight(matrix.detach().type_as(x))
        matrix.laid_out = laid_out  # type: ignore[attr-defined]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.flatten(0, -2), matrix.laid_out, bias, "none", [], "")  # type: ignore[attr-defined]
    return product.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, so that weights which are kept in
    float32 can be multiplied in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Qwen2(qwen2_model.Qwen2):
    """The book's model with more methods: none of the book's is replaced."""
    product = staticmethod(linear)  # type: ignore[assignment]
    __call__: Callable[..., Tensor]
    compute_dtype = torch.float32  # `compute_in` changes it
    temperature = 1.0              # of `log_probs`
    hooks: tuple[Any, ...] = ()

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        of_lab(self)
        self.draw_parameters()

    def draw_parameters(self) -> None:
        """Draw the parameters of a new model: matrices are normal, biases 0; norms stay at 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def log_probs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Those of the book, in chunks. The logits are linear in the states, so dividing the states
        by the temperature divides the logits, too."""
        if self.temperature != 1:
            hidden = hidden / self.temperature
        return log_probs.token_log_probs(self, hidden, ids)

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

    def compute_in(self, dtype: torch.dtype) -> "Qwen2":
        """Multiply matrices in this type, whatever type the parameters are kept in. The norms
        compute in float32 at least, because in bfloat16 a small square would be lost when it is
        added to a large sum. What they hand on is cast to this type, in which then every product
        is computed, and attention. Between the layers x is float32 at least."""
        for hook in self.hooks:
            hook.remove()
        self.compute_dtype, self.hooks = dtype, ()
        wide, product = at_least_float32(dtype), product_type(dtype, self.device)
        if dtype != torch.float32:
            norms = [one for one in self.modules() if isinstance(one, qwen2_model.RMSNorm)]
            self.hooks = (
                self.model.embed_tokens.register_forward_hook(lambda _, x, y: y.to(wide)),
                *(norm.register_forward_pre_hook(lambda _, x: (x[0].to(wide),)) for norm in norms),
                *(norm.register_forward_hook(lambda _, x, y: y.to(dtype).to(product))
                  for norm in norms))
        return self


def of_lab(model: qwen2_model.Qwen2) -> Qwen2:
    """A model of the book with the methods above, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    model.__class__ = Qwen2
    return cast(Qwen2, model)


def keep_less_of_layers(model: Qwen2) -> None:
    """--checkpointing: for the backward pass a layer keeps its input alone and is computed again.
    """
    for layer in model.model.layers:
        layer.forward = partial(again, layer.forward)


def again(forward: Callable[..., Tensor], *given: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*given)
    found: Tensor = checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False)
    return found
