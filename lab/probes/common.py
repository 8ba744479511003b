"""The batch that the probes and the claims measure."""
from dataclasses import replace

import torch

from grpo import grpo
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts


def sample_batch(policy: Policy, questions: int, answers: int, step: int = 1,
                 again: bool = False) -> Rollouts:
    """Sample as training does, with plain GRPO's advantages. `again`: other answers to the same
    problems."""
    seed = policy.settings.seed
    problems = policy.task.training_problems(seed, step, questions)
    of_answers = ("probe again", seed, step) if again else ("probe", seed, step)
    rollouts = policy.ask(problems, answers, derived_seed(*of_answers))
    generator = torch.Generator().manual_seed(derived_seed("probe credit", seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    return replace(rollouts, advantage=grpo(rollouts))
