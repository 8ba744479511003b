"""How bridges are found and started, and what a page tells a reader to paste elsewhere."""
import json

import pytest

from runs import assert_programs_say_how_to_start, block, copy_project, printed_by


def test_a_bridge_that_is_started_as_a_file_says_how_to_start_it():
    assert_programs_say_how_to_start("bridges")


def test_a_weighting_of_log_probs_alone_is_a_loss_of_verl(tmp_path):
    """Told to a stand-in: verl's own loss gets 0.2 p + 0.8 times the advantage."""
    told = printed_by(copy_project(tmp_path),
                      VERL + block("bridges/your_own_run.md", "register_policy_loss"))
    assert json.loads(told) == pytest.approx([0.9 * 2, 1.0 * 2])


VERL = """
import json
import sys
from types import SimpleNamespace

import torch

def register(name):
    def call(loss):
        p, advantage = torch.tensor([[0.5, 1.0]]), torch.tensor([[2.0, 2.0]])
        print(json.dumps(loss(old_log_prob=p.log(), log_prob=p.log(), advantages=advantage,
                              response_mask=torch.ones(1, 2), config=None)))
    return call

def vanilla(advantages, config, **more): return advantages[0].tolist()

for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"):
    sys.modules[name] = SimpleNamespace(register_policy_loss=register,
                                        get_policy_loss_fn={"vanilla": vanilla}.__getitem__)
"""
