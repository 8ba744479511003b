"""LoRA (2106.09685): the matrices stay as they are, and a small addition to each is learned.

    y = W x + (alpha / r) B A x        W (outputs, inputs) is frozen
                                       A (r, inputs) begins random, B (outputs, r) with zeros

So a new model computes what it computed before, and B A, of rank r, is all that can change. What
this saves, in an update with parameters that are not LoRA's for comparison:

    memory        W is kept in the type of the products, and has neither a gradient nor moments:
                  2 bytes for each of its numbers in bfloat16, instead of 16
    arithmetic    no gradient of W is computed: 4 operations for each token and number, instead of 6
    sampling      W is laid out for the sampler once in a run, instead of once in a step

All matrices of the layers have an addition. Embeddings, norms, biases and the output matrix have
none. A and B are float32, so that small steps are not rounded away.

The sampler does not merge the addition into W: in bfloat16 a number of 0.02 has steps of 0.0001, and
most of a step would be lost, so it would sample another model than the one that is trained. It
computes W x and B A x one beside the other, as training does (engine/fused.py).
"""
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qwen2_model import Linear, Qwen2, linear, product_type

ALPHA = 32.0  # so B A counts 32 / r times; powers of 2 multiply without rounding


class LoRALinear(Linear):
    """A linear layer with an addition of low rank."""
    A: nn.Parameter  # (r, inputs)
    B: nn.Parameter  # (outputs, r)
    scale: float     # alpha / r

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        # added within the product, whose sums are float32, and so rounded only once
        dtype = product_type(x.dtype, x.device)
        inner = linear(x, self.A).flatten(0, -2).to(dtype)
        b = (self.scale * self.B).to(x.dtype).to(dtype)
        return torch.addmm(y.flatten(0, -2).to(dtype), inner, b.T).to(x.dtype).view_as(y)


def add_lora(model: Qwen2, rank: int, seed: int = 0) -> Qwen2:
    """Freeze the model and give each matrix of its layers an addition, in place. Matrices and
    embeddings are from now on kept in the type in which the model computes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = model.compute_dtype
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
            parameter.is_frozen = True  # type: ignore[attr-defined]  # for the sampler
    for module in model.model.layers.modules():
        if isinstance(module, Linear):
            outputs, inputs = module.weight.shape
            # on the CPU, so that the same command begins with the same numbers on any device
            drawn = torch.randn(rank, inputs, generator=generator) * inputs ** -0.5
            module.__class__ = LoRALinear
            module.A = nn.Parameter(drawn.to(model.device))
            module.B = nn.Parameter(torch.zeros(outputs, rank, device=model.device))
            module.scale = ALPHA / rank
    return model


def additions(model: Qwen2) -> Iterator[tuple[str, LoRALinear]]:
    """The linear layers that have an addition, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def rank_of(model: Qwen2) -> int:
    """The rank of a model's additions, 0 if it has none."""
    return next((len(module.A) for _, module in additions(model)), 0)


def largest_rank(model: Qwen2) -> int:
    """The smallest side of any matrix of the layers: a larger rank would add nothing."""
    return min(min(module.weight.shape) for module in model.model.layers.modules()
               if isinstance(module, Linear))


@torch.no_grad()
def merged(model: Qwen2) -> dict[str, Tensor]:
    """The parameters of an ordinary model that computes the same: W + scale B A, added up in
    float32."""
    tensors = {name: parameter for name, parameter in model.named_parameters()
               if not name.endswith((".A", ".B"))}
    for name, module in additions(model):
        addition = module.scale * (module.B @ module.A)
        tensors[f"{name}.weight"] = module.weight.float() + addition
    return tensors


def adapter_tensors(model: Qwen2) -> dict[str, Tensor]:
    """A and B under the names of `peft`, which other programs read."""
    tensors = {}
    for name, module in additions(model):
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.A
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.B
    return tensors


def adapter_config(model: Qwen2, base: str) -> dict[str, object]:
    """adapter_config.json, as `peft` reads it. `base` is the folder of the frozen model."""
    names = sorted({name.rpartition(".")[2] for name, _ in additions(model)})
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
            "r": rank_of(model), "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none",
            "target_modules": names, "inference_mode": True}


@torch.no_grad()
def load_adapter(model: Qwen2, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `adapter_tensors` returned. The names and shapes are checked by the caller."""
    for name, tensor in adapter_tensors(model).items():
        tensor.copy_(tensors[name])
