"""Data parallelism, with one process for each GPU:  torchrun --nproc_per_node 8 train.py ...

Every process (rank) holds the whole model, unless --shard cuts it (engine/sharded.py), and samples
the answers to its shard of the problems. The answers are gathered, so credit is computed as in a
single process. Each rank computes the gradient of its own answers, and gradients are all-reduced
(summed). Rank 0 prints and writes the files; the others write only their credit files.
"""
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:  # this import takes a second
    from torch.distributed.tensor import DTensor

from engine.errors import NotFinite, UserError

progress = ""  # what this process has done of a long computation, such as "16 of 64 answers"


def note_progress(text: str) -> None:
    """Note it for the status line of a terminal (harness/screen.py)."""
    global progress
    progress = text


def start(device: str) -> str:
    """Join the other processes, if there are any, and return this one's device."""
    if is_alone():
        return device
    if device == "cuda":
        device, count = f"cuda:{os.environ['LOCAL_RANK']}", torch.cuda.device_count()
        if int(os.environ["LOCAL_RANK"]) >= count:
            raise UserError("--device cuda: each process takes a device of its own, and there are "
                            f"more processes than the {count} CUDA devices that PyTorch sees here")
        torch.cuda.set_device(device)
    elif device != "cpu":
        raise UserError(f"--device {device} is one device, and each process takes one of its own: "
                        "write --device cuda")
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return device


def is_alone() -> bool:
    """Whether this process runs alone, by the environment that torchrun sets."""
    return os.environ.get("WORLD_SIZE", "") in ("", "1")


def stop() -> None:
    """Leave the other processes at the end. After an error, do not wait for them."""
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            dist.barrier()  # a process that left early would abort those that still communicate
        dist.destroy_process_group()


def count() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this process prints. It is read from the environment, because it is needed before the
    processes are connected. A process that runs alone always prints, even if another program has
    left a RANK there."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def shard_of(n: int) -> range:
    """The share of n things that this process takes."""
    return range(n * rank() // count(), n * (rank() + 1) // count())


def all_reduce(*tensors: torch.Tensor) -> None:
    """Sum over all processes, in place. If each process has 0 in the rows of the others, this puts
    their shards together."""
    if count() == 1:
        return
    for tensor in tensors:
        is_integer = tensor.dtype in (torch.bool, torch.long)
        summed = tensor.float() if is_integer else tensor  # exact: token numbers are below 2^24
        dist.all_reduce(summed)
        if is_integer:
            tensor.copy_(summed)


def all_reduce_numbers(numbers: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    """The sum of each number over all processes, in float64."""
    values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
    all_reduce(values)
    return dict(zip(numbers, values.tolist()))


def barrier() -> None:
    if count() > 1:
        dist.barrier()


def all_reduce_max(number: int) -> int:
    """The largest of the processes' numbers."""
    largest = torch.tensor(number)
    if count() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def any_of(is_true: bool) -> bool:
    """Whether it is true in any process. After Ctrl-C in one of them, for example, all have to stop
    after the same step."""
    return bool(all_reduce_max(int(is_true)))


def is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether this process holds only some rows of the tensor (--shard)."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor that this process holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a whole tensor that this process holds of `parameter`."""
    if not is_sharded(parameter):
        return tensor
    rows = -(-len(tensor) // count())  # of each process; the last ones get fewer, or none
    return tensor[rows * rank():rows * (rank() + 1)]


def holds_for_all(is_true: bool, *tensors: torch.Tensor) -> bool:
    """Whether `is_true` holds: in every process if a tensor is sharded, otherwise in this one."""
    if not any(map(is_sharded, tensors)):
        return is_true
    return not any_of(not is_true)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all its rows. Every process has to call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def reshard_layers(model: torch.nn.Module) -> None:
    """Free the layers that are still gathered after a forward pass (--shard). A backward pass does
    that by itself."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


def refuse_undefined(what: str, *tensors: torch.Tensor) -> None:
    """Raise unless all tensors are finite, in all processes; `what` may be "the gradient is".

    If the 2-norm is finite, all numbers are. On a CPU it takes a tenth of the time that finding the
    largest number takes, so it is tried first. The largest number is needed only if the 2-norm is
    not finite, because squares of finite numbers can be too large.
    """
    own = [local_shard(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    parts = [part for part in own if part.numel()]
    is_finite = any(bool(get_total_norm(parts, order).isfinite()) for order in (2.0, float("inf")))
    if not holds_for_all(is_finite, *tensors):
        raise NotFinite(f"{what} not finite")
