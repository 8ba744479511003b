"""The same run in several processes, one a GPU:  torchrun --nproc_per_node 8 train.py ...

Every process (rank) holds the whole model. It samples the answers to its own questions; then the answers of all are put
together, so that each rank sees the whole batch and computes advantages, weights and statistics for all of it, by the
same code as a single process. Each makes the gradient of its own answers, and the gradients are added up. The model's
copies stay equal because they all take the same step. Rank 0 speaks and writes; the others write their credit.

Left out: models that do not fit on one GPU (`--offload_optimizer` and `--checkpointing` are what there is for those).
"""
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import UserError


class LostRank(UserError):
    """Another process has ended. Every rank that notices says so: rank 0 may be the one."""


def start(device: str) -> str:
    """Join the others, if torchrun started this process; the device that is this one's."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return device
    if device == "cuda":
        own, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if own >= there:
            raise UserError(f"--device cuda: {own + 1} processes or more on this machine, and PyTorch sees {there} CUDA devices here")
        device = f"cuda:{own}"
        torch.cuda.set_device(device)
    elif device != "cpu":
        raise UserError(f"--device {device}: every process takes a device of its own, say cuda")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device != "cpu" else "gloo", timeout=timedelta(minutes=30))
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def speaks() -> bool:
    """Whether this process is the one that prints; torchrun says so before they have met."""
    return os.environ.get("RANK", "0") == "0"


def share(n: int) -> range:
    """Which of n things are this rank's."""
    return range(n * rank() // count(), n * (rank() + 1) // count()) if count() > 1 else range(n)


def add_up(*tensors: torch.Tensor) -> None:
    """In place, over all ranks. What a rank has nothing to say of is 0 there, so this also puts shares together."""
    for tensor in tensors if count() > 1 else ():
        whole = tensor.float() if tensor.dtype in (torch.bool, torch.long) else tensor  # token numbers are below 2^24
        together(dist.all_reduce, whole)
        if whole is not tensor:
            tensor.copy_(whole)


def wait() -> None:
    """Until all have come this far."""
    if count() > 1:
        together(dist.barrier)


def any_of(asked: bool) -> bool:
    """Whether any rank was asked, by Ctrl-C say: they have to stop after the same step."""
    votes = torch.tensor(float(asked))
    add_up(votes)
    return bool(votes)


def together(operation, *arguments) -> None:
    try:
        operation(*arguments)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise LostRank(f"rank {rank()} lost another process ({reason}). What was saved is whole: "
                        "the same torchrun with train.py --resume RUN goes on from the last checkpoint") from None
