"""What only several processes need: how they meet, and how one of them ends when another is lost.

torchrun sends SIGTERM to those that are left when one has died. They may wait for it in C++, where
Python cannot react to a signal: so a thread says why and ends the process, before torchrun kills it
in silence.
"""
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import LostProcess, UserError

PATIENCE = 10  # seconds that rank 0 may be behind another process


def join(device: str) -> str:
    """Meet the other processes, and return this one's device. A second call only returns it."""
    for name in ("RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "").isdecimal():
            raise LostProcess(f"{name} is {os.environ.get(name)!r}, while WORLD_SIZE is "
                              f"{os.environ['WORLD_SIZE']}: several processes are started by "
                              "torchrun, and a single one without WORLD_SIZE")
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):  # it would wait for half an hour
        raise LostProcess(f"RANK is {os.environ['RANK']}, but WORLD_SIZE is "
                          f"{os.environ['WORLD_SIZE']}: ranks count from 0")
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


def hard_exit(sentence: str) -> NoReturn:
    """Say why and end without waiting for the others: one of them may be gone, and a message to it
    on its way for half an hour."""
    with suppress(OSError):
        os.write(2, f"{sentence}\n".encode())
    os._exit(1)


def wait_for_rank0_error() -> bool:
    """Whether rank 0 has ended, too, so that an error of this process needs no words of its own.
    torchrun stops all as soon as one has ended, rank 0 in the middle of its sentence: so this waits
    for it."""
    if not dist.is_initialized():
        time.sleep(PATIENCE)
        return True
    try:
        if waiting := dist.irecv(torch.zeros(1), src=0):  # nothing is ever sent
            waiting.wait(timedelta(seconds=PATIENCE))
    except RuntimeError as error:
        return "Timed out" not in str(error)
    return False


def end_after_signal(readable: int) -> None:
    """End the process if it has not ended by itself in two thirds of the time torchrun gives."""
    while os.read(readable, 1)[0] not in (signal.SIGINT, signal.SIGTERM):
        pass
    seconds = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) * 2 / 3
    time.sleep(seconds)
    hard_exit(f"rank {dist.get_rank()} was told to stop and has not come to the end of its step in "
              f"{seconds:.0f} s: another process has ended, or the step takes longer "
              f"(TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 gives it more). {LostProcess.WAY_OUT}")
