"""A large model on a CPU: before it trains, how long a step and an evaluation take, how much memory
and disk, and which type is faster; and what becomes of memory that was freed.

The model is not run. One matrix product is timed, and the time is computed from it: a forward pass
is 2 operations a parameter and token, an update 6 (forward, and twice as much backward). Answers
are taken at their full length, so a run whose answers are shorter takes less.
"""
import ctypes
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from timeit import repeat

import torch

from engine import processes
from engine.packing import common_prefix
from engine.policy import Policy, encode_prompts
from harness.settings import Settings
from qwen2_model import Qwen2, linear, product_type

REACHED = 0.7  # a whole step reaches this share of the speed of one product
# Bytes a parameter.
TRAINING = 24  # 16 for weights, gradient and two moments, 8 for tensors that come and go
KEPT = 12      # weights and moments in a checkpoint
REUSED = 8     # more where freed memory is kept,
ROOM = 40      # which is done where the machine has so much memory
TRUNK = 16     # of a critic that is trained, too
FROZEN = 4     # of a copy that is not
MEMORY = Path("/proc/meminfo")  # of Linux


def forecast(s: Settings, policy: Policy) -> list[str]:
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    rows, T = s.questions * s.answers, s.max_new_tokens
    sampled = prompt_tokens(s, policy, rows) + rows * T
    trained = prompt_tokens(s, policy, s.micro_batch) + rows * T
    step = (seconds_of(2 * size * sampled, policy, rows)
            + seconds_of(6 * size * trained, policy, 512))
    asked = s.eval_tasks * (s.eval_answers + (s.eval_modes == "both"))
    # as many problems at a time as a batch has answers, each with its prompt
    prompts = asked * prompt_tokens(s, policy, rows) / s.questions
    evaluation = seconds_of(2 * size * (prompts + asked * T), policy, rows) if s.eval_every else 0.0
    count = 1 + -(-s.steps // s.eval_every) if s.eval_every else 0
    of_evaluation = f"{in_words(evaluation)} an evaluation, " if count else ""
    return [f"on this CPU about {in_words(step)} a step, {of_evaluation}"
            f"{in_words(s.steps * step + count * evaluation)} in all, if every answer had its {T} "
            "tokens",
            f"about {memory_of(s, policy.model) / 1e9:.0f} GB of memory; {disk_of(s, size)}"]


def prompt_tokens(s: Settings, policy: Policy, at_once: int) -> int:
    """How many tokens the prompts of a step have, if so many answers are computed at once: what all
    begin with stands once in each part, the rest of a prompt in each part that has an answer to it
    (engine/packing.py)."""
    problems = policy.task.training_problems(s.seed, 1, s.questions)
    prompts = encode_prompts(policy.tokenizer, policy.task, problems)
    prefix = common_prefix(prompts)
    parts = -(-s.questions * s.answers // at_once)
    parts_of_problem = -(-s.answers // at_once)
    return parts * prefix + parts_of_problem * sum(len(prompt) - prefix for prompt in prompts)


def memory_of(s: Settings, model: Qwen2) -> int:
    """Bytes that a run takes at its peak."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return size * (TRAINING + REUSED * keeps_memory(model)
                   + TRUNK * (s.method_flags.get("critic") == "trunk")
                   + FROZEN * (s.kl > 0 or s.loss == "dpo"))


def available_memory() -> float:
    """Bytes that new programs can have before the machine is short of memory: what Linux says, or
    where the system does not say it half of all there is."""
    if MEMORY.exists():
        found = re.search(r"MemAvailable: *(\d+) kB", MEMORY.read_text())
        if found:
            return 1024 * float(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def disk_of(s: Settings, size: int) -> str:
    if s.checkpoint_every:
        return f"on disk {KEPT * size / 1e9:.1f} GB for each of the two newest checkpoints"
    if s.save_model:
        bytes_each = 2 if s.dtype == "bfloat16" else 4
        return f"on disk {bytes_each * size / 1e9:.1f} GB for the trained model, at the end"
    return "nothing of the model on disk"


def seconds_of(operations: float, policy: Policy, rows: int) -> float:
    """By the rate of the largest product of a layer with so many rows."""
    config, device = policy.model.config, policy.model.device
    dtype = product_type(policy.model.compute_dtype, device)
    left = torch.ones(rows, config.hidden_size, dtype=dtype)
    right = torch.ones(config.hidden_size, 2 * config.intermediate_size, dtype=dtype)
    left @ right  # the first one warms up
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        left @ right
        count += 1
    rate = count * 2 * left.numel() * right.shape[1] / (time.perf_counter() - start)
    return operations / (REACHED * rate)


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def compare_types(chosen: str) -> None:
    """Says if this CPU would be faster in the other type, by a product as training makes it: some
    that have instructions for bfloat16 are slower with them, others take half the time. Nothing
    but this sentence depends on the clock."""
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    matrix = torch.ones(1024, 1024)
    taken, faster = (min(repeat(partial(linear, matrix[:256].to(getattr(torch, name)), matrix),
                                repeat=15, number=1)) for name in (chosen, other))
    if taken > 1.5 * faster and processes.is_main_process():
        print(f"this CPU computes {other} faster: a product in {chosen} takes {taken / faster:.1f} "
              f"times as long (--dtype {other})", file=sys.stderr, flush=True)


def keeps_memory(model: Qwen2) -> bool:
    """In bfloat16 each micro-batch makes a copy of each matrix, and memory that is kept saves a
    fifth of an update; in float32 a fiftieth. The machine has to have room for it."""
    size = sum(parameter.numel() for parameter in model.parameters())
    is_mixed = model.device.type == "cpu" and model.compute_dtype == torch.bfloat16
    return is_mixed and sys.platform == "linux" and (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > ROOM * size)


def keep_memory() -> None:
    """Within a step, freed memory is used again; `return_memory` has to follow. By default glibc
    gives a large tensor back to the system at once, which fills the next one with zeros. A
    threshold of -1 is never reached."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt
    of_glibc("mallopt", M_MMAP_MAX, 0)
    of_glibc("mallopt", M_TRIM_THRESHOLD, -1)


def return_memory() -> None:
    """What a step has freed goes back to the system. glibc keeps it, in gaps that the next step's
    tensors do not fill: 14 steps of a 0.5B grew from 9 to 15 GB."""
    of_glibc("malloc_trim", 0)


def of_glibc(name: str, *values: int) -> None:
    """Other C libraries have no such function, and need none."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*values)
