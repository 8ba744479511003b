"""AdamW with its state on the CPU: --offload_optimizer.

The CPU keeps parameters, gradients and AdamW's two moments in float32, 16 bytes a parameter. The
device keeps parameters in the compute type, 2 bytes each in bfloat16. As soon as the backward pass
has made a gradient, it is added up in float32 on the CPU and freed on the device. The price is that
gradients cross the bus in every micro-batch and parameters in every step, in the compute type.
"""
from functools import partial

import torch
from torch import Tensor, nn

from engine.optimizer import AdamW
from qwen2_model import Qwen2


class OffloadedAdamW(AdamW):
    """AdamW on copies of the parameters that are on the CPU."""

    def __init__(self, model: Qwen2, device: torch.device | str, learning_rate: float,
                 weight_decay: float):
        """The model is on the CPU, and is moved to the device here."""
        copies = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
        super().__init__(copies, learning_rate, weight_decay)
        self.pairs = list(zip(model.parameters(), copies))
        cast_weights(model, model.compute_dtype).to(device)
        # page-locked if there is a GPU, because the bus is then twice as fast
        self.bus_memory = torch.empty(max(parameter.nbytes for parameter, _ in self.pairs),
                                  dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
        for parameter, copy in self.pairs:
            parameter.register_post_accumulate_grad_hook(partial(self.take_gradient, copy))

    def buffer_for(self, parameter: Tensor) -> Tensor:
        """CPU memory for numbers that cross the bus, with the shape and type of the parameter. All
        parameters use the same memory, one after the other."""
        return self.bus_memory[:parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def take_gradient(self, copy: Tensor, parameter: Tensor) -> None:
        """Add the gradient of the model's parameter to that of its copy, and free the first."""
        if parameter.grad is not None:
            gradient = self.buffer_for(parameter).copy_(parameter.grad)
            copy.grad = torch.zeros_like(copy) if copy.grad is None else copy.grad
            copy.grad += gradient
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for parameter, copy in self.pairs:
            on_cpu = self.buffer_for(parameter).copy_(copy)  # in the type of the parameter
            parameter.copy_(on_cpu)


def cast_weights(model: Qwen2, dtype: torch.dtype) -> Qwen2:
    """Keep the matrices in this type. Norms and biases stay as they are, because they are few."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)
    return model
