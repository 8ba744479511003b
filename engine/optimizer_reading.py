"""AdamW's state, read back from a checkpoint: engine/optimizer.py says how it is written."""
import torch
import torch.nn as nn

from engine import processes
from engine.errors import UserError
from engine.optimizer import STATE
from engine.processes import shard_like


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
