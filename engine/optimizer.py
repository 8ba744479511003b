"""AdamW (1711.05101): a step with a clipped gradient, its state by name, and CPU offload.

With --offload_optimizer the float32 parameters, gradients and AdamW's two moments lie on the CPU,
16 bytes a parameter. The device keeps parameters in the compute type, 2 bytes in bfloat16. As soon
as the backward pass has made a gradient, it is accumulated in float32 on the CPU and freed. The
price: in the compute type, gradients cross the bus every micro-batch and parameters every step.
"""
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn as nn
from torch.optim.adamw import adamw

from engine import processes
from engine.errors import UserError
from engine.processes import full_tensor, is_sharded, refuse_undefined, shard_like
from qwen2_model import Qwen2

STATE = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter


def make_optimizer(model: Qwen2, learning_rate: float, weight_decay: float, offload: bool, device):
    """The optimizer of a model. With `offload` the model is still on the CPU and is moved here."""
    if offload:
        return OffloadedAdamW(model, device, learning_rate, weight_decay)
    return AdamW(model.parameters(), learning_rate, weight_decay)


def clip_and_step(optimizer, max_grad_norm: float) -> float:
    """All-reduce the gradient, clip it, step; returns its norm before clipping.
    Where the gradient is not finite nothing is changed, and the run stops."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if processes.count() > 1 and not is_sharded(parameters[0]):  # FSDP reduces them itself
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        processes.all_reduce(*(p.grad for p in parameters))
    limit = max_grad_norm or float("inf")
    norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, limit))
    refuse_undefined("the gradient is", norm)
    optimizer.step()
    refuse_undefined("after the update a parameter is", *parameters)
    return norm.item()


class AdamW:
    """The step of torch.optim.AdamW with fused=True, to the bit.

    torch's own imports the whole compiler when it is made, and nothing of that is used here: more
    than a second and 70 MB at every start.
    """
    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float,
                 weight_decay: float = 0.0):
        self.param_groups = [{"params": list(parameters)}]  # named as torch's optimizers have it
        self.state = defaultdict(dict)  # STATE by name of each parameter that has had a gradient
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        moved = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in moved:
            if not self.state[p]:
                count = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p] = dict(zip(STATE, (count, torch.zeros_like(p), torch.zeros_like(p))))
        states = [self.state[p] for p in moved]
        counts = [state["step"] for state in states]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        adamw(moved, [p.grad for p in moved], means, squares, [], counts, fused=True,
              amsgrad=False, maximize=False, lr=self.learning_rate, beta1=self.BETAS[0],
              beta2=self.BETAS[1], eps=self.EPSILON, weight_decay=self.weight_decay)


class OffloadedAdamW(AdamW):
    """AdamW on float32 master weights on the CPU, in the order of the model's parameters."""

    def __init__(self, model: Qwen2, device, learning_rate: float, weight_decay: float):
        copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        super().__init__(copies, learning_rate, weight_decay)
        self.pairs = list(zip(model.parameters(), copies))
        model.cast_weights(model.compute_dtype).to(device)
        # page-locked where there is a GPU: the bus is twice as fast from there
        self.buffer = torch.empty(max(parameter.nbytes for parameter, _ in self.pairs),
                                  dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
        for parameter, copy in self.pairs:
            parameter.register_post_accumulate_grad_hook(partial(self.take_gradient, copy))

    def on_the_way(self, parameter: torch.Tensor) -> torch.Tensor:
        """Memory of the CPU for numbers that cross the bus, with the parameter's shape and type."""
        return self.buffer[:parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def take_gradient(self, copy: torch.Tensor, parameter: torch.Tensor) -> None:
        """Accumulate the gradient of the model's parameter in its copy, and free it there."""
        gradient = self.on_the_way(parameter).copy_(parameter.grad)
        if copy.grad is None:
            copy.grad = torch.zeros_like(copy)
        copy.grad += gradient
        parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for parameter, copy in self.pairs:
            parameter.copy_(self.on_the_way(parameter).copy_(copy))


def parameters_by_name(model: Qwen2, optimizer: "AdamW") -> dict[str, nn.Parameter]:
    """The float32 parameters that the optimizer moves. With --offload_optimizer they are copies on
    the CPU, not the model's own."""
    names = dict(model.named_parameters())
    return dict(zip(names, optimizer.param_groups[0]["params"], strict=True))


def optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters; empty before its first step."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


def load_optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter],
                           tensors: dict[str, torch.Tensor]) -> None:
    """Give the optimizer what `optimizer_tensors` has returned."""
    if not tensors:  # saved before the first step
        return
    wanted = {f"{key}.{name}" for name in parameters for key in STATE}
    if set(tensors) != wanted:
        wrong = sorted(set(tensors) ^ wanted)[0]
        raise UserError(f"the checkpoint does not fit the model: {wrong}")
    for name, parameter in parameters.items():
        state = {key: tensors[f"{key}.{name}"] for key in STATE}
        check_state(name, state, parameter)
        optimizer.state[parameter] = {
            "step": state["step"].clone().to(parameter.device),
            "exp_avg": copy_like(parameter, state["exp_avg"]),
            "exp_avg_sq": copy_like(parameter, state["exp_avg_sq"])}


def copy_like(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """A copy of the value on the parameter's device, and cut if the parameter is (--shard)."""
    copy = torch.empty_like(parameter, requires_grad=False)
    processes.local_shard(copy).copy_(shard_like(parameter, value))
    return copy


def check_state(name: str, state: dict[str, torch.Tensor], parameter: nn.Parameter) -> None:
    for key, value in state.items():
        shape = () if key == "step" else tuple(parameter.shape)
        if tuple(value.shape) != shape or value.dtype != torch.float32:
            raise UserError(f"the checkpoint does not fit the model: {key}.{name} is "
                            f"{value.dtype} of shape {tuple(value.shape)}")
        part = value if key == "step" else shard_like(parameter, value)
        is_sound = part.isfinite().all() and (key == "exp_avg" or (part >= 0).all())
        if not processes.holds_for_all(is_sound, parameter):
            raise UserError(f"the checkpoint is broken: {key}.{name} holds numbers that no "
                            "optimizer leaves")
