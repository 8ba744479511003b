"""The same run in several processes, one a GPU:  torchrun --nproc_per_node 8 train.py ...

Every process holds the whole model and has a rank: 0, 1, ... It samples the answers to its share of
the problems. The answers of all are then put together, so that every process sees the whole
batch and computes advantages, weights and statistics by the same code as a single one. Each makes
the gradient of its own answers, and the gradients are added up. The copies of the model stay equal
because they all take the same step. Rank 0 speaks and writes; the others write their credit.

A model that does not fit on one GPU is shared out as well with --shard: see engine/sharded.py.
"""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import UserError


class LostProcess(UserError):
    """Another process has ended. Whoever notices says so: it may be rank 0 that is gone."""


def start(device: str) -> str:
    """Join the others, if torchrun started this process. Returns this one's own device. Calling it
    again only returns the device."""
    if is_alone():
        return device
    refuse_half_an_environment()
    if device == "cuda":
        rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if rank >= count:
            raise UserError(f"--device cuda: {rank + 1} processes or more on this machine, and "
                            f"PyTorch sees {count} CUDA devices here")
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    elif device != "cpu":
        raise UserError(f"--device {device}: every process takes a device of its own, say cuda")
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LostProcess(f"the processes did not meet: {reason}") from None
    return device


def is_alone() -> bool:
    """Whether this process shares its run with nobody, as far as torchrun has told."""
    return os.environ.get("WORLD_SIZE", "") in ("", "1")


def refuse_half_an_environment() -> None:
    """torchrun tells every process these numbers; somebody else may have told only some."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(name, "").isdecimal():
            raise LostProcess(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, but {name} is "
                              f"{os.environ.get(name)!r}: several processes are started by "
                              "torchrun, and a single one without WORLD_SIZE")
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):  # it would wait for half an hour
        raise LostProcess(f"RANK is {os.environ['RANK']}, but WORLD_SIZE is "
                          f"{os.environ['WORLD_SIZE']}: ranks count from 0")


def stop() -> None:
    """Leave the others, at the end. An error ends the process without waiting for them."""
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            dist.barrier()  # who leaves while another still talks makes that one abort
        dist.destroy_process_group()


def count() -> int:
    """How many processes share the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def speaks() -> bool:
    """Whether this process is the one that prints. torchrun tells before the processes have met; a
    RANK that something else has left in the environment does not silence a run."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def share(n: int) -> range:
    """Which of n things are this process's."""
    return range(n * rank() // count(), n * (rank() + 1) // count())


def add_up(*tensors: torch.Tensor) -> None:
    """Add over all processes, in place. What is not a process's own is 0 there, so this also puts
    shares together."""
    for tensor in tensors if count() > 1 else ():
        whole = tensor
        if tensor.dtype in (torch.bool, torch.long):
            whole = tensor.float()  # token numbers are below 2^24
        together(dist.all_reduce, whole)
        if whole is not tensor:
            tensor.copy_(whole)


def add_up_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """The sum over all processes of each number; all of them have the same names."""
    values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
    add_up(values)
    return dict(zip(numbers, values.tolist()))


def wait() -> None:
    """Wait until all have come this far."""
    if count() > 1:
        together(dist.barrier)


def most(number: int) -> int:
    """The largest over all processes."""
    largest = torch.tensor(number)
    if count() > 1:
        together(dist.all_reduce, largest, dist.ReduceOp.MAX)
    return int(largest)


def any_of(asked: bool) -> bool:
    """Whether any process was asked, by Ctrl-C say: all have to stop after the same step."""
    votes = torch.tensor(float(asked))
    add_up(votes)
    return bool(votes)


def together(operation, *arguments) -> None:
    """Do what all processes take part in. If one of them has ended, say so in one line."""
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise LostProcess(about_loss(error)) from None


def about_loss(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return (f"rank {rank()} lost another process ({reason}). What was saved is whole: the same "
            "torchrun with train.py --resume RUN goes on from the last checkpoint")


def is_loss(error: Exception) -> bool:
    """Whether this came of another process's end, out of PyTorch's own talk between processes."""
    return count() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))
