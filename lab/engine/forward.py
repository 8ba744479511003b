"""The training forward pass of a run beyond the book: that of grpo.py on any device, and at any
temperature."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import grpo
from lab.engine.model import Qwen2, tensors_on
from lab.engine.rollouts import Rollouts


@contextmanager
def at_temperature(model: Any, temperature: float, device: torch.device) -> Iterator[None]:
    """Here `model.log_probs` are those of probabilities at this temperature, and new tensors are on
    this device."""
    before, model.temperature = getattr(model, "temperature", 1.0), temperature
    try:
        with tensors_on(device):
            yield
    finally:
        model.temperature = before


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor,
                       temperature: float = 1.0) -> Tensor:
    """grpo.py's `log_probs` (rows, T)."""
    with at_temperature(model, temperature, rollouts.ids.device):
        return grpo.log_probs(model, rollouts, rows)


def frozen_log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor, micro_batch: int,
                     temperature: float = 1.0) -> Tensor:
    """(B, T): the log-probs of these rows' tokens, without gradient; 0 in other rows."""
    log_prob = torch.zeros_like(rollouts.log_prob)
    if len(rows):
        with at_temperature(model, temperature, rollouts.ids.device):
            log_prob[rows] = grpo.frozen_log_probs(model, rollouts.of_rows(rows), micro_batch)
    return log_prob
