"""The model of qwen2_model.py with what a run beyond the book asks of it. Every function that
computes it is the book's. Here something is done before and after:

    --dtype         `Qwen2.compute_in` hooks a change of type onto the embedding and the norms, and
                    torch's Linear gives way to one that multiplies in the type of its input
    --device        in the context `tensors_on` new tensors are on the device
    --temperature   `Qwen2.log_probs` divides the states by it
    --checkpointing `keep_less_of_layers` wraps each layer
    --lora          is in lora.py

Shapes are told in the book.
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
from qwen2_model import ModelConfig, RMSNorm


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
    """A linear layer that computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Qwen2(qwen2_model.Qwen2):
    """The book's model with more methods."""
    product = staticmethod(linear)  # type: ignore[assignment]
    __call__: Callable[..., Tensor]
    compute_dtype = torch.float32  # `compute_in` changes it
    temperature = 1.0              # of `log_probs`
    hooks: tuple[Any, ...] = ()

    def __init__(self, config: ModelConfig):
        """A new model, whose matrices are normal, and whose biases are 0."""
        super().__init__(config)
        of_lab(self)
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
        """Multiply matrices in this type, whatever type the parameters are kept in:

            x, between the layers     float32 at least, because the embedding's output is widened
            a norm                    float32 at least, because its input is widened: in bfloat16 a
                                      small square would be lost when it is added to a large sum
            what a norm hands on      this type, and so is every product and attention after it
        """
        for hook in self.hooks:
            hook.remove()
        self.compute_dtype, self.hooks = dtype, ()
        if dtype == torch.float32:
            return self
        wide, of_products = at_least_float32(dtype), product_type(dtype, self.device)

        def widen_input(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            return (given[0].to(wide),)

        def widen(_: nn.Module, given: tuple[Tensor], found: Tensor) -> Tensor:
            return found.to(wide)

        def narrow(_: nn.Module, given: tuple[Tensor], found: Tensor) -> Tensor:
            return found.to(dtype).to(of_products)

        norms = [module for module in self.modules() if isinstance(module, RMSNorm)]
        self.hooks = (self.model.embed_tokens.register_forward_hook(widen),
                      *(norm.register_forward_pre_hook(widen_input) for norm in norms),
                      *(norm.register_forward_hook(narrow) for norm in norms))
        return self


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def product_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which to multiply matrices. It is `dtype` with one exception: on a CPU on which
    oneDNN does not multiply bfloat16 it is float32, because bfloat16 would be 40 times slower. Then
    less is rounded: the outputs of norms, but neither matrices nor products."""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16()
    return torch.float32 if is_slow else dtype


def has_bfloat16() -> bool:
    """Whether oneDNN, torch's library for products on a CPU, multiplies bfloat16 matrices on this
    CPU. It does so from AVX-512 on."""
    has_onednn = torch.backends.mkldnn.is_available()
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def of_lab(model: qwen2_model.Qwen2) -> Qwen2:
    """A model of the book with the methods above, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    model.__class__ = Qwen2
    return cast(Qwen2, model)


def keep_less_of_layers(model: Qwen2) -> None:
    """For the backward pass a layer keeps its input alone and is computed again."""
    for layer in model.model.layers:
        layer.forward = partial(again, layer.forward)


def again(forward: Callable[..., Tensor], *given: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*given)
    found: Tensor = checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False)
    return found
