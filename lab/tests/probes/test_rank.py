"""Ranks by hand, matrices A and B against explicit ones, a whole run."""
import json
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from conftest import gradients as explicit
from conftest import hand_made, spoken

from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from lab.engine.tokens import NUMBER, WORD
from lab.__main__ import main
from lab.probes import rank
from lab.probes.common import flags_of_model
from lab.probes.rank import (
    CRITIC, NO_BASELINE, ONES, PLANTED, Z, add_ranks, advantages_of, energy_rank,
    gradients_of_answers, gram, parameter_parts, part_count, planted, ranks_by_advantage,
    ranks_by_size, ranks_of)


def test_the_definitions_by_hand():
    """Singular values 4 and 3: shares 4/7 and 3/7, squares 16 and 9. Of squares 5, 4, 1 two make
    90%, three 99%; of 10, 1, 0.2 the first alone is below 90%. Of 8.1 and 0.9 the first alone makes
    exactly 90%, which in float64 is 0.8999999999999999."""
    entropy = (7 / 4) ** (4 / 7) * (7 / 3) ** (3 / 7)
    assert list(ranks_of(torch.diag(torch.tensor([9.0, 16.0]))).values()) == pytest.approx(
        [entropy, 25 / 16, 2, 2, 2])
    found = ranks_of(torch.diag(torch.tensor([5.0, 4, 1])))
    assert (found["90%"], found["99%"]) == (2, 3)
    assert ranks_of(torch.diag(torch.tensor([10.0, 1, 0.2])))["90%"] == 2
    nine_tenths = torch.tensor([8.1, 0.9], dtype=torch.float64).sqrt()
    assert energy_rank(nine_tenths, 0.9) == 1
    assert list(ranks_of(torch.eye(5)).values()) == pytest.approx([5] * 5)
    assert ranks_of(torch.diag(torch.tensor([1.0, 1e-3, 1e-5])))["threshold"] == 2  # s of 1, 0.03
    row = torch.outer(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, -1]))
    assert list(ranks_of(gram(row)).values()) == pytest.approx([1] * 5, abs=1e-3)
    assert all(math.isnan(value) for value in ranks_of(torch.zeros(3, 3)).values())


def test_the_arms_of_a_group_are_those_of_training():
    """Of six answers the first four: one of four is right, so z is sqrt 3 and three times
    -1 / sqrt 3."""
    reward = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    arms = advantages_of(hand_made([[True] * 2] * 6, scores={"reward": reward}), 4)
    low, high = -1 / math.sqrt(3), math.sqrt(3)
    assert arms[Z].tolist() == pytest.approx([low, high, low, low], rel=1e-3)
    assert sorted(arms["shuffled"]) == sorted(arms[Z]) and arms[ONES].tolist() == [1] * 4
    assert arms["random sum"].sum().item() == pytest.approx(0, abs=1e-12)
    assert arms[NO_BASELINE].tolist() == [0, 1, 0, 0]


def test_planted_rewards_by_hand():
    """Numbers at 0 and 2 of the first answer, at 1 of the second: to come are 2 1 1 and 1 1."""
    kind = torch.tensor([[NUMBER, WORD, NUMBER], [WORD, NUMBER, NUMBER]])
    batch = hand_made([[True] * 3, [True, True, False]], kind=kind)
    assert planted(batch).tolist() == [[0.5, 0, 0], [-0.5, 0, 0]]


def test_a_critic_has_learned_from_other_problems(policy, monkeypatch):
    """Problems 1 and 2 are measured. A reward of 1 for every answer: V grows from 0, so of the last
    token, where A = R - V, less than 1 is left."""
    rollouts, steps = spoken(policy, scores={"reward": torch.ones(6)}), []

    def sample(policy, questions, answers, step):
        steps.append(step)
        return rollouts
    monkeypatch.setattr(rank, "sample_batch", sample)
    args = SimpleNamespace(questions=2, answers=3, critic_batches=4, critic="trunk")
    critic = rank.critic_of(policy, args)
    assert steps == [3, 4, 5, 6]
    credit = rank.token_weights(policy, rollouts, critic)[CRITIC]
    last = credit[torch.arange(6), rollouts.length - 1]
    assert (last < 0.5).all() and not credit[~rollouts.mask].any()
    assert CRITIC not in rank.token_weights(policy, rollouts)


@pytest.mark.parametrize("memory", [2 ** 32, 10 ** 7])
def test_what_is_measured_is_what_one_would_write_down(policy, memory, monkeypatch):
    """The Gram matrix and one layer's gradients, from backward() of each answer alone; also where
    the parameters are taken in parts."""
    monkeypatch.setattr(rank, "MEMORY", memory)
    rollouts = spoken(policy)
    noise = torch.randn(rollouts.mask.shape, generator=rollouts.generator) * rollouts.mask
    kinds = {ONES: rollouts.mask.float(), "noise": noise}
    assert (part_count(policy, kinds, 6) == 1) == (memory == 2 ** 32)
    grams, kept = gradients_of_answers(policy, rollouts, kinds)
    for kind, coefficient in ((ONES, rollouts.mask), ("noise", noise)):
        rows, matrices = [], []
        for b in range(6):
            policy.model.zero_grad()
            log_prob = response_log_probs(policy.model, rollouts, torch.tensor([b]))[0]
            (coefficient[b] * log_prob).sum().backward()
            rows.append(explicit(policy.model).double())
            matrices.append(policy.model.model.layers[1].mlp.up_proj.weight.grad.clone())
        policy.model.zero_grad()
        rows = torch.stack(rows)
        torch.testing.assert_close(grams[kind], rows @ rows.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kept[kind], torch.stack(matrices))
    parts = list(parameter_parts(policy, 5))
    assert 1 < len(parts) <= 5
    assert [id(p) for part in parts for p in part] == list(map(id, policy.model.parameters()))


def test_groups_without_spread_are_left_out_and_tables_say_what_is_there():
    """Gradients at right angles, of size 1: A has as many dimensions as answers; planted rewards
    double every row, which changes no rank. The first two rewards are equal."""
    reward = torch.tensor([0.0, 0.0, 1.0, 1.0])
    batch, found = hand_made([[True]] * 4, scores={"reward": reward}), defaultdict(list)
    eye = torch.eye(4, dtype=torch.float64)
    rows = dict.fromkeys((ONES, PLANTED, CRITIC), torch.eye(4)[:, None])
    alike = torch.ones(4, 4, dtype=torch.float64)  # a critic that makes all rows one
    add_ranks(batch, {ONES: eye, PLANTED: 4 * eye, CRITIC: alike}, rows, found)
    add_ranks(batch, {ONES: eye, PLANTED: 4 * eye, CRITIC: alike}, rows, found)
    assert ("A", Z, 2) not in found
    assert found["A", Z, 4][0]["entropy"] == pytest.approx(4)
    assert found["B", Z, 4][0]["entropy"] == pytest.approx(1)  # one row
    sizes = {row[0]: row[1].value for row in ranks_by_size(found).rows}
    assert sizes["A: stable"] == pytest.approx(4) and sizes["B: stable"] == pytest.approx(1)
    arms = {row[0]: row for row in ranks_by_advantage(found).rows}
    assert arms[PLANTED][3].value == pytest.approx(0) and arms[ONES][1] == pytest.approx(4)
    change = arms[CRITIC][3]
    assert (change.value, change.low, change.high) == pytest.approx((-3, -3, -3))


def test_another_task_may_be_asked_about():
    flags = {name: flag.default for name, flag in rank.FLAGS.items()}
    asked = flags_of_model(SimpleNamespace(**flags | {"task": "examples.own_reward"}))
    assert asked["task"] == "examples.own_reward"
    assert "task" not in flags_of_model(SimpleNamespace(**flags))


def test_a_run(tmp_path, learner, capsys):
    usual = ["rank", "--threads", "1", "--model", str(learner)]
    main([*usual, "--questions", "3", "--answers", "8", "--critic_batches", "1", "--out",
          str(tmp_path / "x")])
    result = json.loads((tmp_path / "x/numbers.json").read_text())
    sizes, arms = result["tables"]
    assert {row["advantage"] for row in arms["rows"]} >= {Z, ONES, PLANTED, CRITIC}
    of_8 = [row["R=8"]["value"] for row in sizes["rows"] if row["rank"].startswith("A")]
    assert of_8 and all(1 <= rank <= 8.001 for rank in of_8)
    capsys.readouterr()
    with pytest.raises(UserError, match="equal rewards"):
        main([*usual, "--questions", "1", "--answers", "2", "--max_new_tokens", "1", "--out",
              str(tmp_path / "y")])
