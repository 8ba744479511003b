"""The batch that the probes and the claims measure, and the gradient of one."""
from dataclasses import replace

import torch
from torch import Tensor

from grpo import grpo
from lab.engine.forward import response_log_probs
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts


def sample_batch(policy: Policy, questions: int, answers: int, step: int = 1) -> Rollouts:
    """Sample as training does, with plain GRPO's advantages."""
    seed = policy.settings.seed
    problems = policy.task.training_problems(seed, step, questions)
    rollouts = policy.ask(problems, answers, derived_seed("probe", seed, step))
    generator = torch.Generator().manual_seed(derived_seed("probe credit", seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    return replace(rollouts, advantage=grpo(rollouts))


def gradient(policy: Policy, batch: Rollouts, factor: Tensor) -> Tensor:
    """(P,) of sum_t factor_t log p_t with respect to all parameters."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in parameters]
    total = torch.zeros(sum(sizes), device=policy.model.device)
    for p, part in zip(parameters, total.split(sizes)):
        p.grad = part.view_as(p)  # each backward pass adds to its part of the total
    for rows in batch.rows.split(policy.settings.micro_batch):
        log_prob = response_log_probs(policy.model, batch, rows)
        (factor[rows] * log_prob).sum().backward()
    policy.model.zero_grad()
    return total
