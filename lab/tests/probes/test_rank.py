"""Ranks by hand, matrices A and B against explicit ones, and the claims that they decide; the best
baseline by hand and by a grid, and squares of gradients."""
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab.engine.forward import response_log_probs
from lab.engine.tokens import NUMBER, WORD
from lab.probes import rank
from lab.probes.baseline import (BATCH_MEAN, BEST, BY_LENGTH, MEAN, NONE, bandit, baselines,
                                 best_baseline, squares)
from lab.probes.claim_rules import Evidence, own_critic, trained_critic
from lab.probes.claims_of_rank import STABLE, beside_z_score
from lab.probes.rank import (CRITIC, NO_BASELINE, ONES, PLANTED, Z, add_ranks, advantages_of,
                             energy_rank, found_ranks, gradients_of_answers, gram, mean_rank,
                             parameter_parts, part_count, planted, ranks_of)
from small import gradients, gradients as explicit, hand_made, spoken


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
    """A reward of 1 for every answer: V grows from 0, so of the last token, where A = R - V, less
    than 1 is left."""
    rollouts, steps = spoken(policy, scores={"reward": torch.ones(6)}), []

    def sample(policy, questions, answers, step):
        steps.append(step)
        return rollouts
    monkeypatch.setattr("lab.probes.claim_rules.sample_batch", sample)
    credit = trained_critic(policy, None)(rollouts, policy)
    assert len(steps) == len(set(steps)) == 8 and min(steps) > 100  # claims ask steps 1 to 100
    seen = Evidence([None])
    monkeypatch.setattr(Evidence, "model", policy)
    first, second = (own_critic(seen)(rollouts, policy) for _ in range(2))
    assert torch.equal(first, second)  # judging a batch has taught the copy alone
    last = credit[torch.arange(6), rollouts.length - 1]
    assert (last < 0.9).all() and not credit[~rollouts.mask].any()


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


def test_groups_without_spread_are_left_out_and_differences_are_paired():
    """Gradients at right angles, of size 1: A has as many dimensions as answers; planted rewards
    double every row, which changes no rank. The first two rewards are equal."""
    reward = torch.tensor([0.0, 0.0, 1.0, 1.0] * 2)
    batch, found = hand_made([[True]] * 8, scores={"reward": reward}), defaultdict(list)
    eye = torch.eye(8, dtype=torch.float64)
    rows = dict.fromkeys((ONES, PLANTED, CRITIC), torch.eye(8)[:, None])
    alike = torch.ones(8, 8, dtype=torch.float64)  # a critic that makes all rows one
    for _ in range(2):
        add_ranks(batch, {ONES: eye, PLANTED: 4 * eye, CRITIC: alike}, rows, found)
    assert ("A", Z, 2) not in found
    assert found["A", Z, 4][0]["entropy"] == pytest.approx(4)
    assert mean_rank(found, "A", Z, 8, "stable").value == pytest.approx(8)
    assert mean_rank(found, "B", Z, 8, "stable").value == pytest.approx(1)  # one row
    seen = SimpleNamespace(of_model=lambda measure: found)
    assert beside_z_score(seen, PLANTED, STABLE).value == pytest.approx(0)
    change = beside_z_score(seen, CRITIC, ("", "A", "entropy"))
    assert (change.value, change.low, change.high) == pytest.approx((-7, -7, -7))


def test_the_ranks_of_a_model(policy):
    """With every advantage, of the problems whose answers differ in reward; a critic only if there
    is one."""
    arms = {arm for _, arm, _ in found_ranks(policy, 2)}
    assert Z in arms and not {PLANTED, CRITIC} & arms
    found = found_ranks(policy, 3, lambda rollouts, policy: rollouts.mask.float())
    assert found["A", CRITIC, 8][0] == pytest.approx(found["A", ONES, 8][0])
    entropy = [one["entropy"] for one in found["A", Z, 8]]
    assert len(entropy) == 2 and all(1 <= rank <= 8.001 for rank in entropy)
    assert len(found["A", Z, 8]) == len(found["B", PLANTED, 8])


def test_the_best_baseline_by_hand_and_by_a_grid():
    """|g|^2 = 1, 3 and R = 0, 1: b* = 3/4, where the noise is (9/16 + 3/16) / 2 = 3/8; the mean,
    1/2, adds (1/4)^2 * 2 = 1/8, a third of it."""
    reward, square, chance = np.array([0.0, 1.0]), np.array([1.0, 3.0]), np.array([0.5, 0.5])
    assert best_baseline(reward, square, chance) == pytest.approx((0.75, 0.5, 1 / 3))
    noise = [(chance * (reward - b) ** 2 * square).sum() for b in np.linspace(-1, 2, 301)]
    assert np.linspace(-1, 2, 301)[np.argmin(noise)] == pytest.approx(0.75)


def test_of_two_answers_the_best_baseline_is_the_chance_of_the_other():
    """|g|^2 is 2 (1 - p)^2 and 2 p^2: the mean is best at p = 1/2 alone."""
    for p in (0.2, 0.5):
        b, mean, cost = bandit([np.log(p / (1 - p)), 0.0], [1.0, 0.0])
        assert (b, mean) == pytest.approx((1 - p, p))
        assert (cost < 1e-9) == (p == 0.5)


def test_estimators_by_hand():
    """From the other answers. Rewards 0 1 1 have lengths 1 1 2 and |g|^2 1 2 3; and 0 0 3."""
    reward = np.array([[0.0, 1, 1], [0, 0, 3]])
    square, length = np.array([[1.0, 2, 3]] * 2), np.array([[1.0, 1, 2]] * 2)
    found = baselines(reward, square, length)
    assert found[NONE][0].tolist() == [0] * 3
    assert found[MEAN][0].tolist() == pytest.approx([1, 0.5, 0.5])
    assert found[BY_LENGTH][0].tolist() == pytest.approx([1, 2 / 3, 0.5])
    assert found[BEST][0].tolist() == pytest.approx([1, 3 / 4, 2 / 3])
    assert found[BATCH_MEAN].tolist() == [[1.0] * 3, [pytest.approx(2 / 3)] * 3]


def test_squares_are_those_of_one_backward_pass_each(policy):
    rollouts = spoken(policy)
    found = squares(policy, rollouts)
    for b in (0, 3):
        policy.model.zero_grad()
        response_log_probs(policy.model, rollouts, torch.tensor([b])).sum().backward()
        assert found[b] == pytest.approx(gradients(policy.model).double().square().sum().item(),
                                         rel=1e-4)
    tripled = squares(policy, rollouts, 3 * rollouts.mask.float())
    assert tripled == pytest.approx(9 * found, rel=1e-4)
    policy.model.zero_grad(set_to_none=True)
