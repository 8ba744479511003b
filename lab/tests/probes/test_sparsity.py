"""Sparsity by hand, and which runs it can be measured on."""
import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import credit_columns, gradients, hand_made, spoken, write_log

from lab.analysis.statistics import Estimate
from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from lab.__main__ import main
from lab.probes.sparsity import (changes, hoyer, hoyer_of_gradient, of_checkpoint,
                                 sums_of_problems, verdict, without_spread)


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
    assert without_spread(run, 0, 1) == [True, False] and all(without_spread(run, 1, 2))
    assert sum(without_spread(run, 0, 3)) == 4 and len(without_spread(run, 0, 3)) == 6
    assert without_spread(run, 3, 9) == []


def test_a_change_has_an_interval_over_problems_or_groups_and_a_verdict_follows_from_it():
    """One token a problem: 0 0 1 0 and then 1 0 1 1, paired by problem. Groups: 1 of 4 and 3 of 4,
    by the two variances."""
    def tokens(values):
        return hand_made([[True]] * 4, group=torch.arange(4),
                         collision=1 - torch.tensor(values)[:, None])

    found = changes([[], [True, False, False, False], [True, True, True, False]],
                    [sums_of_problems(tokens(values)) for values in ([0., 0, 1, 0], [1., 0, 1, 1])])
    of_tokens, of_groups = found["1 - sum p^2"], found["groups without spread"]
    half = 3.182446 * math.sqrt((2 * 0.25 + 2 * 0.25) / 3 / 4)  # t of 3 degrees of freedom
    assert (of_tokens.value, of_tokens.high) == pytest.approx((0.5, 0.5 + half), abs=1e-3)
    half = 2.446912 * math.sqrt(2 * 0.25 / 4)  # t of 6
    assert (of_groups.value, of_groups.high) == pytest.approx((0.5, 0.5 + half), abs=1e-3)
    assert "Hoyer, GRPO" not in found and verdict(None, 1) == ", which has no interval"
    assert verdict(Estimate(0.001, -0.01, 0.012), 1).endswith("no difference is seen")
    for value, sign, word in ((0.2, 1, "sparser"), (-0.2, 1, "less sparse"), (-0.2, -1, "sparser")):
        said = verdict(Estimate(value, value - 0.1, value + 0.1), sign)
        assert said.endswith(f"became {word}") and f"(by {value:+.3f}, 95% interval" in said


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
