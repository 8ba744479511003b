"""On a GPU answers and gradients are those of the CPU. Run it before you train on one:

    python -m pytest -m slow lab/tests/test_gpu.py
"""
from dataclasses import replace

import pytest
import torch

from lab.engine.update import update
from grpo import grpo
from lab.engine.optimizer import AdamW
from lab.harness.build import load_policy
from lab.harness.settings import make_settings

pytestmark = pytest.mark.slow
# how far a gradient may be from the CPU's, as a share of its norm: both round, bfloat16 to 8 bits
CLOSE = {"float32": 1e-3, "bfloat16": 0.05}


def gradient_of(policy, batch):
    """The gradient of all parameters after an update too small to move them, end to end."""
    model = policy.model
    update(model, AdamW(model.parameters(), 1e-12), batch.to(model.device),
           batch.mask.float().to(model.device), policy.settings)
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it compares a GPU, and none is seen")
def test_a_gpu_gives_the_answers_and_the_gradient_of_the_cpu(dtype):
    """Rounding may draw another token now and then, and all after it then differ. The gradient is
    that of the CPU's answers."""
    policies, batches = [], []
    for place in ("cpu", "cuda"):
        policy = load_policy(make_settings({"device": place, "dtype": dtype, "max_grad_norm": 0}))
        problems = policy.task.training_problems(0, 1, 8)
        policies.append(policy)
        batches.append(policy.ask(problems, 8, seed=1).to("cpu"))
    expected, found = batches
    assert expected.ids.shape == found.ids.shape
    assert (expected.ids == found.ids).all(1).float().mean() > 0.1
    batch = replace(expected, advantage=grpo(expected))
    assert batch.advantage.any()
    there, here = (gradient_of(policy, batch) for policy in reversed(policies))
    assert (there - here).norm() / here.norm() < CLOSE[dtype]
