"""LoRA (2106.09685): the matrices stay as they are, and a small addition to each is learned.

    y = W x + (alpha / r) B A x        W (outputs, inputs) is frozen
                                       A (r, inputs) begins random, B (outputs, r) with zeros

So a new model computes what it computed before, and B A, of rank r, is all that can change. What
this saves, in an update with parameters that are not LoRA's for comparison:

    memory        W is kept in the type of the products, and has neither a gradient nor moments:
                  2 bytes for each of its numbers in bfloat16, instead of 16
    arithmetic    no gradient of W is computed: 4 operations for each token and number, instead of 6
    sampling      W is kept in the layout that the sampler reads fastest

All matrices of the layers have an addition. Embeddings, norms, biases and the output matrix have
none. A and B are float32, so that small steps are not rounded away.

The sampler does not merge the addition into W. In bfloat16 a number of 0.02 has steps of 0.0001,
so most of a step would be lost, and another model would be sampled than the one that is trained.
The sampler computes W x and B A x one beside the other, as training does.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lab.engine.errors import UserError
from lab.engine.model import Linear, Qwen2, linear
from qwen2_model import MLP

ALPHA = 32.0  # so B A counts 32 / r times; powers of 2 multiply without rounding
# The default learning rate is so many times that of all parameters, and at most the second number:
# for a small model, and for a large one. A small step of A and B moves a matrix less than an equal
# step of all its numbers, and the less the wider it is. Above the second number a task was ruined
# in which others learn (docs/reference/real_models.md).
RATE, RATE_OF_LARGE = (4.0, 1e-3), (25.0, 5e-5)


def rate_of_lora(rate: float, is_large: bool) -> float:
    """The default learning rate of a model whose learning rate without LoRA would be `rate`."""
    factor, most = RATE_OF_LARGE if is_large else RATE
    return min(float(f"{factor * rate:g}"), most)


class LoRALinear(Linear):
    """A linear layer with an addition of low rank."""
    A: nn.Parameter  # (r, inputs)
    B: nn.Parameter  # (outputs, r)
    scale: float     # alpha / r

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        # added within the product, whose sums are float32, and so rounded only once
        inner, b = linear(x, self.A).flatten(0, -2), (self.scale * self.B).type_as(x)
        return y.flatten(0, -2).addmm_(inner, b.T).view_as(y)


def add_lora(model: Qwen2, rank: int, seed: int = 0) -> Qwen2:
    """Freeze the model and give each matrix of its layers an addition, in place."""
    linears = [module for module in model.model.layers.modules() if isinstance(module, Linear)]
    largest = min(min(module.weight.shape) for module in linears)
    if rank > largest:
        raise UserError(f"--lora {rank}: the smallest side of this model's matrices is {largest}, "
                        "and a larger rank adds nothing")
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for module in linears:
        outputs, inputs = module.weight.shape
        # on the CPU, so that the same command begins with the same numbers on any device
        drawn = torch.randn(rank, inputs, generator=generator) * inputs ** -0.5
        module.__class__ = LoRALinear
        added = cast(LoRALinear, module)
        added.A = nn.Parameter(drawn.to(model.device))
        added.B = nn.Parameter(torch.zeros(outputs, rank, device=model.device))
        added.scale = ALPHA / rank
    return model


def keep_rounded(model: Qwen2) -> Qwen2:
    """Keep the frozen matrices and embeddings in the type in which the model computes. The sampler
    lays them out once."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.requires_grad:
            parameter.data = parameter.data.to(model.compute_dtype)
            # smaller products are not faster in oneDNN's layout
            parameter.is_frozen = (model.config.hidden_size >= 512  # type: ignore[attr-defined]
                                   and torch.backends.mkldnn.is_available())
    return model


def keep_less(model: Qwen2) -> Qwen2:
    """Let the MLPs of a frozen model keep less. With --checkpointing whole layers do that."""
    for module in model.modules():
        if isinstance(module, MLP):
            module.forward = partial(  # type: ignore[method-assign]
                keep_gate_and_up, module, module.forward)
    return model


def keep_gate_and_up(mlp: MLP, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The book's MLP in half the memory. For the backward pass gate and up are kept, and
    silu(gate) and silu(gate) * up are computed again, which takes a moment, because no matrix is
    multiplied. Which tensors these are is seen by their numbers: an MLP that was edited keeps all.
    """
    if not torch.is_grad_enabled():
        return forward(x)
    found: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda module, x, y: found.append(y.detach()))
             for one in (mlp.gate_proj, mlp.up_proj)]

    def keep(tensor: Tensor) -> Callable[[], Tensor]:
        shape, kept = tensor.shape, [one.data_ptr() for one in found]  # rows may be flattened
        if len(found) == 2 and tensor.data_ptr() not in kept and shape.numel() == found[0].numel():
            for compute in (activated, product):
                if torch.equal(compute(*found).view(shape), tensor):
                    return lambda: compute(*found).view(shape)
        return lambda: tensor

    try:
        with saved_tensors_hooks(keep, lambda compute: compute()):
            return forward(x)
    finally:
        for hook in hooks:
            hook.remove()


def activated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate)


def product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def additions(model: Qwen2) -> Iterator[tuple[str, LoRALinear]]:
    """The linear layers that have an addition, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def rank_of(model: Qwen2) -> int:
    """The rank of a model's additions, 0 if it has none."""
    return next((len(module.A) for _, module in additions(model)), 0)


@torch.no_grad()
def merged_parameter(model: Qwen2, name: str) -> Tensor:
    """A parameter of the ordinary model that computes the same: W + scale B A, in float32. What has
    no addition stays as it is."""
    tensor = model.get_parameter(name).detach()
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, LoRALinear) and name.endswith(".weight"):
        tensor = torch.addmm(tensor.float(), module.B, module.A, alpha=module.scale)
    return tensor
