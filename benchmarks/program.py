"""Where the benchmarks call the program they measure: its update, step, flags and memory."""
from pathlib import Path

import torch

from harness.command_line import read_flags
from harness.credit_file import write_credit
from harness.files import PROJECT
from engine.policy import Policy
from harness.load import load_policy
from engine.optimizer import AdamW, make_optimizer
from engine.rollouts import Rollouts
from harness.run_folder import RunFolder
from harness.metrics import peak_memory
from harness.settings import Settings, make_settings
from grpo import update
from qwen2_model import Qwen2
from train import train_step

TINY = PROJECT / "models/tiny"
NO_LEARNING = 1e-12  # as good as zero: every turn does the same work on the same weights


def optimizer_of(model: Qwen2, device: str, offload: bool = False) -> AdamW:
    return make_optimizer(model, NO_LEARNING, 0.0, offload, device)


def train_on(model: Qwen2, optimizer, batch: Rollouts, micro_batch: int) -> None:
    """One update, every token with weight 1."""
    update(model, optimizer, batch, batch.mask.float(), Settings(micro_batch=micro_batch))


def record(batch: Rollouts, path: Path) -> None:
    """Write the credit file of a batch."""
    write_credit(path, batch, batch.mask.float())


def shipped_lab(**settings) -> Policy:
    """The shipped model on its own task."""
    return load_policy(make_settings({"model": str(TINY), "learning_rate": NO_LEARNING,
                                   "sample_every": 0, **settings}))


def step_of(policy: Policy, run: Path) -> dict:
    """The first step of a run in this folder; returns its line of metrics.jsonl."""
    return train_step(policy, RunFolder(run), 1)


def parameters_beside(flags: list[str]) -> int:
    """Parameters beside the policy's in a run with these flags."""
    return load_policy(make_settings(read_flags(["--model", str(TINY), *flags]))).extra_parameters


def peak_of_process(device: torch.device) -> int:
    """Most bytes that this process has had: on a GPU of tensors, on a CPU of everything."""
    return peak_memory(device)
