"""What only several processes need: how they meet, and how one ends when another is lost."""
import os
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import UserError


def join(device: str) -> str:
    """Join the other processes, and return this one's device. A second call only returns it."""
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
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
            raise UserError(f"the processes did not meet: {reason}") from None
    return device


def hard_exit(sentence: str) -> NoReturn:
    """Say why and end without waiting for the others: one of them may be gone, and a message to it
    on its way for half an hour."""
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
    os._exit(1)
