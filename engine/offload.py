"""AdamW whose numbers lie on the CPU: --offload_optimizer.

Float32 parameters, gradients and AdamW's two moments are there, 16 bytes a parameter. The device
keeps parameters in the compute type, 2 bytes in bfloat16. As soon as the backward pass has made a
gradient, it is accumulated in float32 on the CPU and freed. The price: in the compute type,
gradients cross the bus every micro-batch and parameters every step.
"""
from functools import partial

import torch
from torch import Tensor, nn

from engine.optimizer import AdamW
from qwen2_model import Qwen2


class OffloadedAdamW(AdamW):
    def __init__(self, model: Qwen2, device: torch.device | str, learning_rate: float,
                 weight_decay: float):
        """`model` is still on the CPU, and is moved to the device here."""
        copies = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
        super().__init__(copies, learning_rate, weight_decay)
        self.pairs = list(zip(model.parameters(), copies))
        cast_weights(model, model.compute_dtype).to(device)
        # page-locked where there is a GPU: the bus is twice as fast from there
        self.buffer = torch.empty(max(parameter.nbytes for parameter, _ in self.pairs),
                                  dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
        for parameter, copy in self.pairs:
            parameter.register_post_accumulate_grad_hook(partial(self.take_gradient, copy))

    def on_the_way(self, parameter: Tensor) -> Tensor:
        """Memory of the CPU for numbers that cross the bus, with the parameter's shape and type."""
        return self.buffer[:parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def take_gradient(self, copy: Tensor, parameter: Tensor) -> None:
        """Accumulate the gradient of the model's parameter in its copy, and free it there."""
        if parameter.grad is not None:
            gradient = self.on_the_way(parameter).copy_(parameter.grad)
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
            copy.grad += gradient
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for parameter, copy in self.pairs:
            parameter.copy_(self.on_the_way(parameter).copy_(copy))


def cast_weights(model: Qwen2, dtype: torch.dtype) -> Qwen2:
    """Keep the matrices in this type; norms and biases stay as they are, they are few."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)
    return model
