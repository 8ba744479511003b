"""Data parallelism, a process a GPU:  torchrun --nproc_per_node 8 train.py ...

Every rank holds the whole model and samples the answers to its shard of the problems. They are
gathered, so that every rank sees the whole batch and computes advantages, weights and statistics by
the same code as a single process. Each rank computes the gradient of its own answers, and gradients
are all-reduced (summed). The replicas stay equal because they all take the same step. Rank 0 prints
and writes; the others write their credit.

A model that does not fit on one GPU is sharded as well with --shard: see engine/sharded.py.
"""
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import UserError

PATIENCE = 10  # seconds that rank 0 may be behind another process
WAY_OUT = ("What was saved is whole: the same torchrun with train.py --resume RUN goes on from the "
           "last checkpoint")


class LostProcess(UserError):
    """Another process has ended. Whoever notices says so: it may be rank 0 that is gone."""


def start(device: str) -> str:
    """Join the other processes, if torchrun started this one, and return this one's device. A
    second call only returns the device."""
    if is_alone():
        return device
    refuse_half_an_environment()
    if device == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])
        devices = torch.cuda.device_count()
        if local_rank >= devices:
            raise UserError(f"--device cuda: {local_rank + 1} processes or more on this machine, "
                            f"and PyTorch sees {devices} CUDA devices here")
        device = f"cuda:{local_rank}"
        torch.cuda.set_device(device)
    elif device != "cpu":
        raise UserError(f"--device {device}: every process takes a device of its own, say cuda")
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
            dist.all_reduce(torch.zeros(1))  # one that left now would cut off those still meeting
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise LostProcess(f"the processes did not meet: {reason}") from None
    return device


def is_alone() -> bool:
    """Whether no other process shares the run, as the environment that torchrun sets has it."""
    return os.environ.get("WORLD_SIZE", "") in ("", "1")


def refuse_half_an_environment() -> None:
    """torchrun sets all of these numbers for every process; another program may set only some."""
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
            dist.barrier()  # a process that left early would abort those that still communicate
        dist.destroy_process_group()


def leave_at_once(sentence: str) -> NoReturn:
    """Say why and end without waiting for the others: one of them may be gone, and a message to it
    on its way for half an hour."""
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
    os._exit(1)


def rank_0_says_so() -> bool:
    """Whether rank 0 has ended, too, so that an error of this process needs no words of its own.
    torchrun stops all as soon as one has ended, rank 0 in the middle of its sentence: so this waits
    for it."""
    if is_main_process():
        return False
    if not dist.is_initialized():
        time.sleep(PATIENCE)
        return True
    try:
        dist.irecv(torch.zeros(1), src=0).wait(timedelta(seconds=PATIENCE))  # nothing is ever sent
    except RuntimeError as error:
        return "Timed out" not in str(error)
    return False


def count() -> int:
    """How many processes share the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this process is the one that prints. The environment knows it before the processes
    have met. A RANK that another program left there does not silence a run that is alone."""
    return is_alone() or os.environ.get("RANK", "0") == "0"


def shard_of(n: int) -> range:
    """This rank's shard of n things."""
    return range(n * rank() // count(), n * (rank() + 1) // count())


def all_reduce(*tensors: torch.Tensor) -> None:
    """Sum over all processes, in place. Each has 0 in the rows of the others, so this gathers
    shards, too."""
    if count() == 1:
        return
    for tensor in tensors:
        is_whole = tensor.dtype in (torch.bool, torch.long)
        summed = tensor.float() if is_whole else tensor  # token numbers are below 2^24
        together(dist.all_reduce, summed)
        if is_whole:
            tensor.copy_(summed)


def all_reduce_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """The sum over all processes of each number; all of them have the same names."""
    values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
    all_reduce(values)
    return dict(zip(numbers, values.tolist()))


def barrier() -> None:
    """Wait for all processes."""
    if count() > 1:
        together(dist.barrier)


def all_reduce_max(number: int) -> int:
    """The largest over all processes."""
    largest = torch.tensor(number)
    if count() > 1:
        together(dist.all_reduce, largest, dist.ReduceOp.MAX)
    return int(largest)


def any_of(asked: bool) -> bool:
    """Whether any process was asked, by Ctrl-C say: all have to stop after the same step."""
    return bool(all_reduce_max(int(asked)))


def together(operation, *arguments) -> None:
    """Do what all processes take part in. If one of them has ended, say so in one line."""
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise LostProcess(about_loss(error)) from None


def about_loss(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"rank {rank()} lost another process ({reason}). {WAY_OUT}"


def is_loss(error: Exception) -> bool:
    """Whether this error came up because another process has ended, in a message between processes
    that PyTorch sends by itself."""
    return count() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error))
