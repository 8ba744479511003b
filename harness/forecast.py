"""What is told of a large model on a CPU before it trains: how much memory and disk the run needs,
and which type is faster. The time is not forecast: after the first step the column `left` is about
what was measured (Run.seconds_left).
"""
import os
import re
import sys
from functools import partial
from pathlib import Path
from timeit import repeat

import torch

from harness.laptop import bytes_of_token
from harness.memory import should_keep_memory
from harness.settings import Settings
from qwen2_model import ModelConfig, Qwen2, linear

WRITTEN = 1e8  # bytes that a slow disk takes in a second, where none was timed yet
# bytes a parameter
TRAINING = 18  # 16 for weights, gradient and two moments, 2 for tensors that come and go
KEPT = 5       # in addition, if freed memory is kept
TRUNK = 16     # in addition, for a critic with a trunk of its own, which is trained, too
FROZEN = 4     # in addition, for a copy that is not trained
SAVED = 12     # on disk: weights and moments in a checkpoint
MEMORY = Path("/proc/meminfo")  # of Linux


def forecast(s: Settings, model: Qwen2) -> str:
    size = sum(parameter.numel() for parameter in model.parameters())
    return (f"the run needs about {memory_of(s, model) / 1e9:.0f} GB of memory; "
            f"{disk_of(s, size)}. How long it takes is known after the first step: the column "
            "`left`")


def memory_of(s: Settings, model: Qwen2) -> int:
    """Bytes that a run takes at its peak."""
    bytes_each = TRAINING
    if should_keep_memory(model):
        bytes_each += KEPT
    if s.method_flags.get("critic") == "trunk":
        bytes_each += TRUNK
    if s.kl > 0 or s.loss == "dpo":
        bytes_each += FROZEN
    size = sum(parameter.numel() for parameter in model.parameters())
    return bytes_each * size + bytes_of_activations(s, model.config)


def bytes_of_activations(s: Settings, config: ModelConfig) -> int:
    """Bytes that an update keeps for its backward pass: those of the answers of a micro-batch, if
    each has its full length."""
    tokens = min(s.micro_batch, s.questions * s.answers) * s.max_new_tokens
    return tokens * bytes_of_token(config, s.dtype, s.checkpointing)


def available_memory() -> float:
    """Bytes that new programs can have before the machine is short of memory: what Linux says, or
    half of all there is if the system does not say it."""
    try:
        told = MEMORY.read_text()
    except OSError:  # another system
        told = ""
    if found := re.search(r"MemAvailable: *(\d+) kB", told):
        return 1024 * float(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def disk_of(s: Settings, size: int) -> str:
    gigabytes = bytes_saved(s) * size / 1e9
    if s.checkpoint_every:
        return f"each of the two newest checkpoints takes {gigabytes:.1f} GB on disk"
    if s.save_model:
        return f"the trained model takes {gigabytes:.1f} GB on disk, at the end"
    return "nothing of the model is written to disk"


def size_of_checkpoint(model: Qwen2) -> str:
    """5.9 GB (59 s on a slow disk)"""
    size = SAVED * sum(parameter.numel() for parameter in model.parameters())
    return f"{size / 1e9:.1f} GB ({size / WRITTEN:.0f} s on a slow disk)"


def bytes_saved(s: Settings) -> int:
    """Bytes a parameter in a checkpoint, or without checkpoints in the model that is kept."""
    if s.checkpoint_every:
        return SAVED
    return 2 if s.dtype == "bfloat16" else 4


def seconds_of_saving(s: Settings, size: int) -> float:
    """Seconds of a checkpoint, or of the model that is kept at the end, on a slow disk."""
    return bytes_saved(s) * size / WRITTEN


def compare_types(chosen: str) -> None:
    """Print a sentence if this CPU would be much faster in the other type. With instructions for
    bfloat16 some CPUs are slower than in float32, and others take half the time. So one product is
    timed in each type, by the function that training uses. The times decide whether the sentence is
    printed, and nothing else."""
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    of_chosen, of_other = seconds_of_product(chosen), seconds_of_product(other)
    if of_chosen > 1.5 * of_other:
        print(f"this CPU computes faster in {other}: a matrix product in {chosen} takes "
              f"{of_chosen / of_other:.1f} times as long. --dtype {other} chooses it",
              file=sys.stderr, flush=True)


def seconds_of_product(dtype: str) -> float:
    matrix = torch.ones(1024, 1024)
    rows = matrix[:256].to(getattr(torch, dtype))
    return min(repeat(partial(linear, rows, matrix), repeat=15, number=1))
