"""Ranks by hand, matrices A and B against explicit ones, a whole run."""
import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import hand_made

from analysis.statistics import mean_over
from engine.forward import response_log_probs
from research.probes.planted import planted_policy, sample_planted, true_rewards
from research.probes.rank import (
    CRITIC, NOISE, ONES, RANKS, TRUE, Measurements, Z, answer_arms, arms_table,
    change_verdict, gram, measure_question, ranks, sizes_table)

NAN = pytest.approx(math.nan, nan_ok=True)


def ranks_of(singular_values):
    s = torch.as_tensor(singular_values).double()
    return {name: definition(s) for name, definition in RANKS.items()}


def test_the_definitions_by_hand():
    """Singular values 4 and 3: shares 4/7 and 3/7, squares 16 and 9. Squares 5, 4, 1: two of them
    are 90%; of 10, 1, 0.2 the first has less than that."""
    entropy = (7 / 4) ** (4 / 7) * (7 / 3) ** (3 / 7)
    assert list(ranks(torch.diag(torch.tensor([9.0, 16.0]))).values()) == pytest.approx(
        [entropy, 25 / 16, 2])
    assert ranks(torch.diag(torch.tensor([5.0, 4, 1])))["90% of the energy"] == 2
    assert ranks(torch.diag(torch.tensor([10.0, 1, 0.2])))["90% of the energy"] == 2
    assert list(ranks(torch.eye(5)).values()) == pytest.approx([5, 5, 5])
    rank_one = torch.outer(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, -1]))
    assert list(ranks(gram(rank_one)).values()) == pytest.approx([1, 1, 1])
    assert list(ranks(torch.zeros(3, 3)).values()) == [NAN, NAN, NAN]


def test_the_arms_of_a_group_are_those_of_training():
    """Of six answers the first four: one of four is right, so z is sqrt 3 and three times
    -1 / sqrt 3."""
    reward = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    arms = answer_arms(hand_made([[True] * 2] * 6, scores={"reward": reward}), 4)
    low, high = -1 / math.sqrt(3), math.sqrt(3)
    assert arms[Z].tolist() == pytest.approx([low, high, low, low], rel=1e-3)
    assert arms["rloo"].tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3])
    assert arms[ONES].tolist() == [1] * 4


def explicit_update(policy, rollouts, coefficient):
    policy.model.zero_grad()
    log_prob = response_log_probs(policy.model, rollouts, torch.arange(len(rollouts.mask)))
    (coefficient * log_prob).sum().backward()
    update = [p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    return update


@pytest.fixture(scope="module")
def group():
    """Six answers with rewards of our own, so that it is known which groups have spread."""
    policy = planted_policy(1, 6)
    rollouts = sample_planted(policy, 3, 1, 6)
    reward = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, 1.0])
    rollouts = dataclasses.replace(rollouts, scores={"reward": reward})
    measured = Measurements(6)
    measure_question(policy, rollouts, 7, {"true": true_rewards(policy, rollouts)}, measured)
    return policy, rollouts, measured


@pytest.mark.parametrize("arm", [Z, "true"])
def test_what_is_measured_is_what_one_would_write_down(group, arm):
    """Matrix A row by row and B from .backward() of the whole loss, for an arm by answer and one
    by token."""
    policy, rollouts, measured = group
    assert measured.main == 4 and measured.sizes == [2, 4]
    coefficient = torch.zeros(6, 6)
    coefficient[:4] = (answer_arms(rollouts, 4)[Z][:, None] if arm == Z
                       else true_rewards(policy, rollouts)[:4])
    rows = []
    for i in range(4):
        alone = coefficient * (torch.arange(6) == i)[:, None]
        rows.append(torch.cat([g.flatten() for g in explicit_update(policy, rollouts, alone)]))
    of_rows = ranks_of(torch.linalg.svdvals(torch.stack(rows).double()))
    assert measured.values["A", arm, 4][7] == pytest.approx(of_rows, rel=1e-4)

    matrices = [g for g in explicit_update(policy, rollouts, coefficient) if g.dim() == 2]
    assert len(matrices) == 9
    of_matrices = [ranks_of(torch.linalg.svdvals(g.double())) for g in matrices]
    medians = {name: np.median([each[name] for each in of_matrices]) for name in RANKS}
    assert measured.values["B", arm, 4][7] == pytest.approx(medians, rel=1e-4)


def test_a_group_without_spread_is_left_out_and_multiples_have_one_rank(group):
    values = group[2].values
    assert ("A", Z, 2) not in values  # the first two rewards are equal
    for matrix in "AB":
        assert values[matrix, "rloo", 4][7] == pytest.approx(values[matrix, Z, 4][7])


@pytest.mark.parametrize("values, expected", [
    ([1.0, 1.1, 1.2], "higher"), ([-1.0, -1.1, -1.2], "lower"), ([-1.0, 1.1, 1.2], "none seen"),
    ([1e-9, 3e-8, 2e-8], "the same"), ([1.0], "too few")])
def test_verdicts_on_changes(values, expected):
    assert change_verdict(mean_over(values)) == expected


def test_verdicts_follow_from_the_numbers():
    """A grows with R, B stays at 2; a critic raises A by 1, and changes B by -0.1, 0.5 and so on.
    On the planted task nothing is measured."""
    near, far = [1.9, 2.0, 2.1, 2.2], [6.0, 6.1, 6.2, 6.4]
    values = {(matrix, arm, R): near for matrix in "AB" for arm in (Z, ONES, "rloo", NOISE)
              for R in (2, 4, 8)}
    values |= {("A", arm, 8): far for arm in (Z, ONES, "rloo")}
    values |= {("A", CRITIC, 8): [x + 1 for x in far], ("B", CRITIC, 8): [1.8, 2.5, 1.9, 2.4]}
    measured = Measurements(8)
    for place, of_questions in values.items():
        measured.values[place] = {q: dict.fromkeys(RANKS, value)
                                  for q, value in enumerate(of_questions)}
    table = sizes_table(measured)
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert (rows["A: entropy rank"]["is it 2"], rows["A: entropy rank"]["it"]) == ("not 2", "grows")
    assert (rows["B: stable rank"]["is it 2"], rows["B: stable rank"]["it"]) == (
        "may be 2", "the same")
    assert rows["A: stable rank"]["R=8"] == pytest.approx(6.175)
    change = table.rows[0][-3:]  # an interval stands behind its number: seeds are joined by that
    assert change[0] == pytest.approx(4.125) and change[1][0] < 4.125 < change[1][1]
    table = arms_table(measured, Measurements(8))
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert rows[CRITIC]["A"] == pytest.approx(1)
    verdicts = {arm: (row["A is"], row["B is"]) for arm, row in rows.items()}
    assert verdicts[CRITIC] == ("higher", "none seen") and verdicts[NOISE] == ("lower", "the same")
    assert verdicts["rloo"] == ("the same", "the same")
    assert verdicts[f"planted: {TRUE}"] == ("too few", "too few")
