"""--shard: parameters, gradients and AdamW's moments, cut by rows over the processes.

PyTorch's `fully_shard` does it (FSDP2; the idea is ZeRO-3, 1910.02054). With n parameters and P
processes, each process has

    kept               16 n / P bytes, in float32: parameters, gradients, two moments
    passing through    one layer at a time is all-gathered before it is used, in the compute type,
                       and freed afterwards; its gradient is reduce-scattered

Loop, loss and files are the same as without it; all code that differs is here, or calls this file.
Processes wait for each other at every layer, so all of them make the same number of forward passes.
A process that has no answers left makes them with empty batches. In sampling every token step would
gather every layer, so FusedQwen2 is a whole copy.

Left out: sampling layer by layer. So each process needs memory for a whole copy in bfloat16, beside
its own rows.
"""
from pathlib import Path

import torch

from engine import processes
from engine.model_folder import copy_whole, read_model_folder
from engine.processes import full_tensor, is_sharded, local_shard, reshard_layers, shard_like
from qwen2_model import Qwen2


def shard(model: Qwen2, device: torch.device, dtype: torch.dtype) -> None:
    """Shard a model that is on the meta device. Layers are gathered in `dtype`, and gradients are
    summed in float32."""
    from torch.distributed.device_mesh import init_device_mesh  # this import takes a second
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(device.type, (processes.count(),))
    types = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=types)
    if model.lm_head is not None:  # stays gathered after the forward pass, because the loss uses it
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, mesh=mesh,
                    mp_policy=types)
    fully_shard(model.model, mesh=mesh, mp_policy=types)  # the embeddings, which stay gathered too
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the sum of the gradients, instead of their mean
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def load_shard(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen2:
    """Load the model of a folder; this process takes memory for its own rows only."""
    def shard_fn(model: Qwen2) -> None:
        shard(model, device, dtype)
        model.to_empty(device=device).to(torch.float32)

    return read_model_folder(folder, device, shard_fn=shard_fn, copy=copy_rows)


@torch.no_grad()
def copy_rows(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Copy this process's rows of a tensor into a parameter. Returns whether the numbers of all
    processes are finite."""
    is_finite = copy_whole(local_shard(parameter), shard_like(parameter, tensor))
    return processes.holds_for_all(is_finite, parameter)


@torch.no_grad()
def whole_model(model: Qwen2, dtype: torch.dtype) -> Qwen2:
    """The model itself, or if it is sharded a whole copy with its matrices in `dtype`. Every
    process has to call this."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return model
    reshard_layers(model)
    gathered = {}
    for name, p in model.named_parameters():
        kept_in = dtype if p.dim() == 2 else torch.float32
        gathered[name] = full_tensor(p.detach().to(kept_in))
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.load_state_dict(gathered, assign=True)
    copy.model.checkpointing = model.model.checkpointing
    return copy.compute_in(model.compute_dtype).requires_grad_(False)
