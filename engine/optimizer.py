"""AdamW (1711.05101) with everything that is 4 bytes a parameter on the CPU: `--offload_optimizer`.

On the device stay the parameters in the type they are multiplied in, 2 bytes each in bfloat16. As soon as the
backward pass has made a gradient it is added to a float32 sum on the CPU and forgotten, so a step of n parameters
needs 2 n bytes of the device, and 16 n of the CPU: float32 parameters, gradients, and AdamW's two moments.
The price is that gradients of every micro-batch and parameters of every step cross the bus.
"""
import torch
import torch.nn as nn

from engine.errors import UserError
from qwen2_model import Qwen2


def make_optimizer(model: Qwen2, learning_rate: float, weight_decay: float, offload: bool, device) -> torch.optim.Optimizer:
    """For a model that stands on the device, or with `offload` still on the CPU."""
    if offload:
        return OffloadedAdamW(model, device, lr=learning_rate, weight_decay=weight_decay)
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True)


class OffloadedAdamW(torch.optim.AdamW):
    """Its parameters are float32 copies on the CPU of the model's, in the same order."""

    def __init__(self, model: Qwen2, device, **settings):
        exact = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        super().__init__(exact, fused=True, **settings)
        self.pairs = list(zip(model.parameters(), exact))
        model.keep_matrices_in(model.model.norm.compute).to(device)
        for used, kept in self.pairs:
            used.register_post_accumulate_grad_hook(lambda used, kept=kept: self.take(used, kept))

    def take(self, used: torch.Tensor, kept: torch.Tensor) -> None:
        gradient = used.grad.to("cpu", torch.float32)
        kept.grad = gradient if kept.grad is None else kept.grad.add_(gradient)
        used.grad = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        super().step(closure)
        for used, kept in self.pairs:
            used.copy_(kept)


ADAM = ("step", "exp_avg", "exp_avg_sq")


def optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters; empty before its first step."""
    return {f"{key}.{name}": value for name, parameter in parameters.items() for key, value in optimizer.state[parameter].items()}


def load_optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    wanted = {f"{key}.{name}" for name in parameters for key in ADAM}
    if tensors and set(tensors) != wanted:
        raise UserError(f"the checkpoint does not fit the model: {sorted(set(tensors) ^ wanted)[0]}")
    for name, parameter in parameters.items() if tensors else ():
        optimizer.state[parameter] = {key: tensors[f"{key}.{name}"].clone().to(parameter.device) for key in ADAM}
