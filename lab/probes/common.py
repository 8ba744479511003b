"""The batch that the probes and the claims measure."""
from dataclasses import replace

import torch

from grpo import grpo
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
