"""What only several processes need: how they meet."""
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.errors import LostProcess, UserError



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
