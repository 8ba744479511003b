"""--shard: every process keeps some rows of every parameter, and no process keeps them all.

PyTorch's `fully_shard` does it (FSDP2; the idea is ZeRO-3, 1910.02054). Gradients and AdamW's
moments are cut like the parameters. For n parameters and P processes:

    kept               16 n / P bytes, in float32: parameters, gradients, two moments
    passing through    a layer at a time is made whole before it is used, in the type that is
                       multiplied, and forgotten behind it; its gradient, made whole, is added up
                       over the processes, and each keeps the sum of its own rows

Loop, loss and files are those of a run without it. What is special is all here or asks here:

    micro_batches      (forward.py) every pass meets the others at every layer, so all processes
                       make equally many; who has nothing left passes an empty batch
    whole_model        a copy to sample from: no token can wait until 28 layers have been gathered
    whole, part_for    a tensor into a file and out of one, by the rows; a checkpoint does not
                       tell how many processes wrote it

Left out: sampling layer by layer. A copy in bfloat16 has to fit beside the parts.
"""
import torch

from engine import processes


def shard(model, device: torch.device, dtype: torch.dtype) -> None:
    """Cut a model that has no memory yet. Its layers are gathered in `dtype`, gradients are added
    up in float32."""
    from torch.distributed.device_mesh import init_device_mesh  # which takes a second
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    how = {"mesh": init_device_mesh(device.type, (processes.count(),)),
           "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)}
    for layer in model.model.layers:
        fully_shard(layer, **how)
    if model.lm_head is not None:  # stays whole behind the layers until the loss has used it
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **how)
    fully_shard(model.model, **how)  # what is left: the embeddings, which stay whole as long
    for module in model.modules():
        if isinstance(module, FSDPModule):  # add gradients up, instead of their mean
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether each process keeps some rows of it only: a DTensor."""
    return hasattr(tensor, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this process keeps."""
    return tensor.to_local() if is_part(tensor) else tensor


def part_for(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Those rows of a whole tensor that belong into this process's part of `place`."""
    if not is_part(place):
        return tensor
    rows = -(-len(tensor) // processes.count())  # of each process, while there are any
    return tensor[rows * processes.rank():rows * (processes.rank() + 1)]


def holds_for_all(is_true: bool, *tensors: torch.Tensor) -> bool:
    """What is true of this process's rows, is it of those of the others, where there are any?"""
    if any(is_part(tensor) for tensor in tensors):
        return not processes.any_of(not is_true)
    return is_true


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows. Every process has to ask."""
    return tensor.full_tensor() if is_part(tensor) else tensor


@torch.no_grad()
def whole_model(model, dtype: torch.dtype | None = None):
    """The model itself, or where it is cut a copy that is not, to sample from: matrices in `dtype`,
    by default the one that is multiplied. Every process has to ask."""
    if not any(is_part(parameter) for parameter in model.parameters()):
        return model
    dtype = dtype or model.compute_dtype
    keep_parts_only(model)
    gathered = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2
        gathered[name] = whole(parameter.detach().to(dtype if is_matrix else torch.float32))
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.load_state_dict(gathered, assign=True)
    copy.model.checkpointing = model.model.checkpointing
    return copy.compute_in(model.compute_dtype).requires_grad_(False)


def keep_parts_only(model) -> None:
    """Forget what a forward pass without a backward pass has left whole, where the model is cut."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
