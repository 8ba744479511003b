"""Data parallelism, a process a GPU:  torchrun --nproc_per_node 8 train.py ...

Every rank holds the whole model (but with --shard, engine/sharded.py) and samples the answers to
its shard of the problems. They are gathered, so credit is computed as in a single process. Each
rank computes the gradient of its own answers; gradients are all-reduced (summed). Rank 0 prints and
writes; the others write their credit.
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


def start(device: str) -> str:
    """Join the other processes, if there are any, and return this one's device."""
    if is_alone():
        return device
    if device == "cuda":
        device, count = f"cuda:{os.environ['LOCAL_RANK']}", torch.cuda.device_count()
        if int(os.environ["LOCAL_RANK"]) >= count:
            raise UserError(f"--device cuda: more processes than the {count} CUDA devices that "
                            "PyTorch sees on this machine")
        torch.cuda.set_device(device)
    elif device != "cpu":
        raise UserError(f"--device {device}: every process takes a device of its own, say cuda")
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return device


def is_alone() -> bool:
    """Whether no other process shares the run, as the environment that torchrun sets has it."""
    return os.environ.get("WORLD_SIZE", "") in ("", "1")


def stop() -> None:
    """Leave the others, at the end. An error ends the process without waiting for them."""
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            dist.barrier()  # a process that left early would abort those that still communicate
        dist.destroy_process_group()


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this process prints. The environment knows it before the processes have met. A RANK
    that another program left there does not silence a run that is alone."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def shard_of(n: int) -> range:
    return range(n * rank() // count(), n * (rank() + 1) // count())


def all_reduce(*tensors: torch.Tensor) -> None:
    """Sum over all processes, in place. With 0 in the rows of the others it gathers shards."""
    for tensor in tensors if count() > 1 else ():
        is_whole = tensor.dtype in (torch.bool, torch.long)
        summed = tensor.float() if is_whole else tensor  # token numbers are below 2^24
        dist.all_reduce(summed)
        if is_whole:
            tensor.copy_(summed)


def all_reduce_numbers(numbers: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
    all_reduce(values)
    return dict(zip(numbers, values.tolist()))


def barrier() -> None:
    if count() > 1:
        dist.barrier()


def all_reduce_max(number: int) -> int:
    largest = torch.tensor(number)
    if count() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def any_of(asked: bool) -> bool:
    """Whether any process was asked, by Ctrl-C say: all have to stop after the same step."""
    return bool(all_reduce_max(int(asked)))


def is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "to_local")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a whole tensor that belong in this process's part of `place`."""
    if not is_sharded(place):
        return tensor
    rows = -(-len(tensor) // count())  # a process; the last ones get fewer, or none
    return tensor[rows * rank():rows * (rank() + 1)]


def holds_for_all(is_true: bool, *tensors: torch.Tensor) -> bool:
    """Whether `is_true` in every process, if a tensor is sharded; otherwise in this one."""
    return not any_of(not is_true) if any(map(is_sharded, tensors)) else is_true


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, all rows of it. Every process has to call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def reshard_layers(model: torch.nn.Module) -> None:
    """Those still gathered after a forward pass. A backward pass reshards by itself."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


def refuse_undefined(what: str, *tensors: torch.Tensor) -> None:
    """Raise unless all tensors are finite, in all processes; `what` is "the gradient is", say.
    Mostly their norm says so, in a tenth of a CPU's time for the largest number. Only where its
    squares are too large does the largest decide."""
    own = [local_shard(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    parts = [part for part in own if part.numel()]
    is_finite = any(bool(get_total_norm(parts, order).isfinite()) for order in (2.0, float("inf")))
    if not holds_for_all(is_finite, *tensors):
        raise NotFinite(f"{what} not finite")
