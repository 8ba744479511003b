"""Sparsity by hand, and which runs it can be measured on."""
import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import credit_columns, gradients, spoken, write_log

from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from lab.__main__ import main
from lab.probes.sparsity import hoyer, hoyer_of_gradient, of_checkpoint, share_without_spread


def test_hoyer_by_hand():
    assert hoyer([torch.tensor([0.0, 0.0]), torch.tensor([-2.0, 0.0])]) == pytest.approx(1)
    assert hoyer([torch.full((9,), -0.5)]) == pytest.approx(0)
    two = (math.sqrt(2) - 7 / 5) / (math.sqrt(2) - 1)
    assert hoyer([torch.tensor([3.0]), torch.tensor([-4.0])]) == pytest.approx(two)
    assert math.isnan(hoyer([torch.zeros(3)]))


def test_hoyer_of_grpos_gradient_is_that_of_one_backward_pass(policy):
    rollouts = spoken(policy)
    policy.model.zero_grad()
    log_prob = response_log_probs(policy.model, rollouts, torch.arange(6))
    (rollouts.advantage * log_prob).sum().backward()
    expected = hoyer([gradients(policy.model)])
    assert hoyer_of_gradient(policy, rollouts) == pytest.approx(expected, rel=1e-4)
    policy.model.zero_grad(set_to_none=True)


def test_a_checkpoints_numbers_by_hand(policy):
    """Of three answers one and two are right: a pair is alike in 1 of 3 pairs, for both problems.
    Two of all tokens are sure."""
    rollouts = spoken(policy)
    scores = rollouts.scores | {"answer": torch.tensor([1.0, 0, 0, 1, 1, 0])}
    log_prob = torch.full_like(rollouts.log_prob, -0.5)
    log_prob[0, :2] = -0.005
    rollouts = dataclasses.replace(rollouts, scores=scores, log_prob=log_prob)
    success, alike, sure, saturation, *_ = of_checkpoint(policy, rollouts, 2)
    policy.model.zero_grad(set_to_none=True)
    assert (success, alike) == pytest.approx((0.5, 1 / 3))
    assert sure == pytest.approx(2 / rollouts.mask.sum().item())
    assert saturation == pytest.approx(
        1 - rollouts.collision.sum().item() / rollouts.mask.sum().item(), rel=1e-5)


def test_groups_without_spread_are_counted_since_the_checkpoint_before(tmp_path):
    one, both = (credit_columns([1] * 4, [0, 0, 1, 1], reward=reward)
                 for reward in ([1, 1, 0, 1], [1, 1, 0, 0]))
    run = write_log(tmp_path / "run", {1: one, 2: both, 3: one})
    assert share_without_spread(run, 0, 1) == 0.5 and share_without_spread(run, 1, 2) == 1
    assert share_without_spread(run, 0, 3) == pytest.approx(2 / 3)
    assert share_without_spread(run, 3, 9) is None


def test_a_run_and_those_that_are_refused(tmp_path, learner, capsys):
    run = write_log(tmp_path / "run", {1: credit_columns([1, 1], [0, 0])},
                    config={"model": str(learner), "answers": 3})
    flags = ["sparsity", "--threads", "1", "--questions", "3", "--run", str(run), "--answers"]
    with pytest.raises(UserError, match="has 1 checkpoints, and two are needed"):
        main([*flags, "4", "--out", str(tmp_path / "x")])
    shutil.copytree(learner, run / "checkpoints/step_000001")
    with pytest.raises(UserError, match="the run has groups of 3"):
        main([*flags, "2", "--out", str(tmp_path / "x")])
    main([*flags, "4", "--out", str(tmp_path / "x")])
    [table] = json.loads((tmp_path / "x/numbers.json").read_text())["tables"]
    (before, after) = table["rows"]  # one model, the same problems
    assert (before["step"], after["step"], after["groups without spread"]) == (0, 1, 1)
    assert before["p > 0.99"] == after["p > 0.99"] >= 0
    capsys.readouterr()
