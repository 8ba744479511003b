"""A forecast for a large model on a CPU, made before it trains: how long a step and an evaluation
will take, how much memory and disk the run needs, and which type is faster.

The model is not run. One matrix product is timed, and the time is computed from it: a forward pass
is 2 operations a parameter and token, an update 6 (forward, and twice as much backward). Every
answer is counted with its largest length, so a run whose answers are shorter takes less. A small
batch reaches less than the speed of one product, so a run of short answers may also take longer: 8
seconds a step were seen where 4 had been forecast. From the first step on, the column `left` is
about what was measured (Run.seconds_left).
"""
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
from harness.memory import should_keep_memory
from harness.settings import MODES, Settings
from qwen2_model import ModelConfig, Qwen2, linear, product_type

REACHED = 0.7  # a whole step reaches this share of the speed of one product
WRITTEN = 1e8  # bytes that a slow disk takes in a second, where none was timed yet
# bytes a parameter
TRAINING = 18  # 16 for weights, gradient and two moments, 2 for tensors that come and go
KEPT = 5       # in addition, if freed memory is kept
TRUNK = 16     # in addition, for a critic with a trunk of its own, which is trained, too
FROZEN = 4     # in addition, for a copy that is not trained
SAVED = 12     # on disk: weights and moments in a checkpoint
MEMORY = Path("/proc/meminfo")  # of Linux


def forecast(s: Settings, policy: Policy) -> list[str]:
    """Two sentences about a run: time, then memory and disk."""
    size = sum(parameter.numel() for parameter in policy.model.parameters())
    step, evaluation = seconds_of_step(s, policy, size), seconds_of_evaluation(s, policy, size)
    evaluations = 1 + -(-s.steps // s.eval_every) if s.eval_every else 0
    of_evaluation = f"{in_words(evaluation)} for an evaluation, " if evaluations else ""
    saves = -(-s.steps // s.checkpoint_every) if s.checkpoint_every else int(s.save_model)
    in_all = s.steps * step + evaluations * evaluation + saves * seconds_of_saving(s, size)
    gigabytes = memory_of(s, policy.model) / 1e9
    return [f"forecast for this CPU: about {in_words(step)} for a step, {of_evaluation}and "
            f"{in_words(in_all)} in all, if every answer had the full {s.max_new_tokens} tokens. "
            "Shorter answers take less time, and the column `left` comes from the steps made so "
            "far",
            f"the run needs about {gigabytes:.0f} GB of memory; {disk_of(s, size)}"]


def seconds_of_step(s: Settings, policy: Policy, size: int) -> float:
    answers = s.questions * s.answers
    tokens = answers * s.max_new_tokens
    sampled = prompt_tokens(s, policy, answers) + tokens
    trained = prompt_tokens(s, policy, s.micro_batch) + tokens
    return (seconds_of(2 * size * sampled, policy, answers)
            + seconds_of(6 * size * trained, policy, 512))


def seconds_of_evaluation(s: Settings, policy: Policy, size: int) -> float:
    if not s.eval_every:
        return 0.0
    sampled = s.eval_tasks * s.eval_answers
    if "greedy" in MODES[s.eval_modes]:
        sampled += s.eval_tasks
    # as many problems at a time as a batch has answers, each with its prompt
    at_once = s.questions * s.answers
    prompts = sampled * prompt_tokens(s, policy, at_once) / s.questions
    return seconds_of(2 * size * (prompts + sampled * s.max_new_tokens), policy, at_once)


def prompt_tokens(s: Settings, policy: Policy, at_once: int) -> int:
    """The number of prompt tokens that a step computes, if so many answers are computed at a time.

    The tokens that all prompts begin with are computed once in each part of the batch, the others
    of a prompt once in each part that has an answer to it (engine/packing.py).
    """
    problems = policy.task.training_problems(s.seed, 1, s.questions)
    prompts = encode_prompts(policy.tokenizer, policy.task, problems)
    prefix = common_prefix(prompts)
    parts = -(-s.questions * s.answers // at_once)
    parts_of_problem = -(-s.answers // at_once)
    return parts * prefix + parts_of_problem * sum(len(prompt) - prefix for prompt in prompts)


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
    each has its full length. A layer keeps about 8 tensors as wide as the hidden states and 4 as
    wide as its MLP. Runs of a 0.5B with 768 to 2,048 such tokens took what this function says, to
    half a gigabyte."""
    tokens = min(s.micro_batch, s.questions * s.answers) * s.max_new_tokens
    of_layer = 8 * config.hidden_size + 4 * config.intermediate_size
    kept = config.num_hidden_layers * of_layer
    if s.checkpointing:
        kept = config.num_hidden_layers * config.hidden_size + of_layer
    return tokens * kept * (2 if s.dtype == "bfloat16" else 4)


def available_memory() -> float:
    """Bytes that new programs can have before the machine is short of memory: what Linux says, or
    half of all there is if the system does not say it."""
    if MEMORY.exists():
        found = re.search(r"MemAvailable: *(\d+) kB", MEMORY.read_text())
        if found:
            return 1024 * float(found[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def disk_of(s: Settings, size: int) -> str:
    gigabytes = bytes_saved(s) * size / 1e9
    if s.checkpoint_every:
        return f"each of the two newest checkpoints takes {gigabytes:.1f} GB on disk"
    if s.save_model:
        return f"the trained model takes {gigabytes:.1f} GB on disk, at the end"
    return "nothing of the model is written to disk"


def bytes_saved(s: Settings) -> int:
    """Bytes a parameter in a checkpoint, or without checkpoints in the model that is kept."""
    if s.checkpoint_every:
        return SAVED
    return 2 if s.dtype == "bfloat16" else 4


def seconds_of_saving(s: Settings, size: int) -> float:
    """Seconds of a checkpoint, or of the model that is kept at the end, on a slow disk."""
    return bytes_saved(s) * size / WRITTEN


def seconds_of(operations: float, policy: Policy, rows: int) -> float:
    """Seconds, by the speed of the largest product of a layer with so many rows."""
    config, device = policy.model.config, policy.model.device
    dtype = product_type(policy.model.compute_dtype, device)
    left = torch.ones(rows, config.hidden_size, dtype=dtype)
    right = torch.ones(config.hidden_size, 2 * config.intermediate_size, dtype=dtype)
    left @ right  # the first one warms up
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        left @ right
        count += 1
    speed = count * 2 * left.numel() * right.shape[1] / (time.perf_counter() - start)
    return operations / (REACHED * speed)


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def compare_types(chosen: str) -> None:
    """Print a sentence if this CPU would be much faster in the other type. With instructions for
    bfloat16 some CPUs are slower than in float32, and others take half the time. So one product is
    timed in each type, by the function that training uses. The times decide whether the sentence is
    printed, and nothing else."""
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    of_chosen, of_other = seconds_of_product(chosen), seconds_of_product(other)
    if of_chosen > 1.5 * of_other and processes.is_main_process():
        print(f"this CPU computes faster in {other}: a matrix product in {chosen} takes "
              f"{of_chosen / of_other:.1f} times as long. --dtype {other} chooses it",
              file=sys.stderr, flush=True)


def seconds_of_product(dtype: str) -> float:
    matrix = torch.ones(1024, 1024)
    rows = matrix[:256].to(getattr(torch, dtype))
    return min(repeat(partial(linear, rows, matrix), repeat=15, number=1))
