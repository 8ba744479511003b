"""Rank by every definition, matrices A, B and C against explicit ones, whole runs."""
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from conftest import ASKED, SPOKEN, hand_made, spoken
from torch.nn.functional import linear

from analysis.statistics import Estimate
from engine.forward import response_log_probs
from research.probes import rank, spectra
from research.probes.common import run_probe
from research.probes.planted import planted_lab, sample_planted, true_rewards
from research.probes.rank_claims import (
    Row, about_2, against_z, change_verdict, claim_about_2, claim_any_size, claim_others,
    claim_rank_2, sentences)
from research.probes.rank_gradients import centred_matrices, group_gradients, weight_matrices
from research.probes.rank_measurements import ONES, Measurements, Z, answer_arms, measure_question
from research.probes.rank_tables import by_definition
from research.probes.spectra import (
    RANKS, energy_count, gram, matrix_ranks, mean_gradients, off_the_line, outside, ranks,
    singular_values, span_of)

NAN = pytest.approx(math.nan, nan_ok=True)


def drawn_matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_every_definition_by_hand():
    assert list(matrix_ranks(torch.eye(5)).values()) == pytest.approx([5] * 6)
    rank_one = torch.outer(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, -1]))
    assert list(matrix_ranks(rank_one).values()) == pytest.approx([1] * 6)
    # Singular values 4 and 3: shares 4/7 and 3/7, energies 16 and 9, fourth powers 256 and 81.
    two = matrix_ranks(torch.diag(torch.tensor([3.0, 4.0])))
    assert list(two) == list(RANKS)
    entropy = (7 / 4) ** (4 / 7) * (7 / 3) ** (3 / 7)
    assert list(two.values()) == pytest.approx([entropy, 25 / 16, 625 / 337, 2, 2, 2])
    assert list(ranks(torch.zeros(3)).values()) == [NAN] * 6


def test_how_many_singular_values_hold_a_share():
    s = torch.tensor([4.0, 3.0, 1e-3])
    counts = [energy_count(s, share) for share in (0.5, 0.64 - 1e-6, 0.65, 0.99)]
    assert counts == [1, 1, 2, 2]
    assert energy_count(torch.ones(10), 0.9) == 9  # exactly reached
    assert ranks(torch.tensor([1.0, 2e-5, 5e-6]))["numerical"] == 2


def test_the_gram_route_is_the_decomposition_of_the_matrix(monkeypatch):
    monkeypatch.setattr(spectra, "AT_ONCE", 500)  # so that 1207 columns are three parts
    x = drawn_matrix(4, 1207, seed=0) * torch.tensor([[1.0], [2.0], [0.1], [3.0]])
    expected = torch.linalg.svdvals(x.double())
    torch.testing.assert_close(singular_values(gram(x)), expected, rtol=1e-9, atol=0)
    tall = x[:, :30].T
    expected = torch.linalg.svdvals(tall.double())
    torch.testing.assert_close(singular_values(gram(tall.T)), expected)
    assert matrix_ranks(tall) == pytest.approx(matrix_ranks(tall.T))


def test_rows_in_random_directions_have_the_null_of_their_lengths():
    x = drawn_matrix(6, 300_000, seed=1)
    x *= (torch.tensor([1.0, 5, 2, 0.5, 3, 4]) / x.norm(dim=1))[:, None]
    null = ranks(torch.tensor([5.0, 4, 3, 2, 1, 0.5]).double())
    assert ranks(singular_values(gram(x))) == pytest.approx(null, rel=0.01)
    assert null["stable rank"] == pytest.approx((25 + 16 + 9 + 4 + 1 + 0.25) / 25)


def test_mean_gradients_by_hand():
    rows = drawn_matrix(5, 1000, seed=2)
    two = mean_gradients(rows, torch.tensor([1.1, 0.1, 0.1, 1.1, 0.1]))
    expected = torch.stack([rows[[1, 2, 4]].mean(0), rows[[0, 3]].mean(0)])
    torch.testing.assert_close(two, expected)
    three = mean_gradients(rows, torch.tensor([0.0, 1.0, 0.5, 0.5, 0.0]))
    assert len(three) == matrix_ranks(three)["numerical"] == 3
    torch.testing.assert_close(three[1], rows[2:4].mean(0))


def test_the_update_of_two_rewards_is_a_difference_of_mean_gradients():
    rows, reward = drawn_matrix(5, 1000, seed=2), torch.tensor([1.1, 0.1, 0.1, 1.1, 0.1])
    means, std = mean_gradients(rows, reward), math.sqrt(0.24)
    z = (reward - 0.5) / (std + 1e-4)
    expected = math.sqrt(2 * 3) * std / (std + 1e-4) * (means[1] - means[0])
    torch.testing.assert_close(z @ rows, expected, rtol=1e-4, atol=1e-5)
    assert off_the_line(z @ rows, means, reward) < 1e-6
    longer = off_the_line((reward - 0.5) @ rows, means, reward)  # the same direction
    assert longer == pytest.approx(1 / std - 1, rel=1e-3)


def test_the_update_lies_in_the_span_of_mean_gradients():
    rows, reward = drawn_matrix(5, 1000, seed=2), torch.tensor([1.1, 0.1, 0.1, 1.1, 0.1])
    means = mean_gradients(rows, reward)
    whole, differences = span_of(means), span_of(means[1:] - means[0])
    one_against_one = torch.tensor([1.0, -1, 0, 0, 0])
    assert outside((reward - 0.5) @ rows, differences) < 1e-6
    assert outside(reward @ rows, whole) < 1e-6
    assert outside(reward @ rows, differences) > 0.3
    assert outside(one_against_one @ rows, whole) > 0.5


def test_outside_by_hand():
    span = span_of(torch.tensor([[2.0, 0, 0]]))
    assert outside(torch.tensor([3.0, 4, 0]), span) == pytest.approx(0.8)


def test_the_arms_of_a_group_are_those_of_training():
    """Of six answers the first four: one of four is right, so z is sqrt 3 and three times
    -1 / sqrt 3."""
    reward = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    batch = hand_made([[True] * 2] * 6, scores={"reward": reward})
    arms = answer_arms(batch, 4)
    low, high = -1 / math.sqrt(3), math.sqrt(3)
    assert arms[Z].tolist() == pytest.approx([low, high, low, low], rel=1e-3)
    assert arms["mean only"].tolist() == [-0.25, 0.75, -0.25, -0.25]
    torch.testing.assert_close(arms["rloo"], arms["mean only"] * 4 / 3)
    assert arms["raw reward"].tolist() == [0, 1, 0, 0]
    assert arms[ONES].tolist() == [1] * 4
    noise = arms["random zero-sum"]
    assert noise.sum().abs() < 1e-6 < noise.abs().min()
    shuffled = [answer_arms(batch, 4)["shuffled rewards"].tolist() for _ in range(8)]
    assert all(sorted(values) == sorted(arms[Z].tolist()) for values in shuffled)
    assert len(set(map(tuple, shuffled))) > 1


def planted_group():
    """Six answers with rewards of our own, so that it is known which groups have spread."""
    lab = planted_lab(1, 6)
    rollouts = sample_planted(lab, 3, 1, 6)
    reward = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, 1.0])
    return lab, dataclasses.replace(rollouts, scores={"reward": reward})


def explicit_update(lab, rollouts, coefficient):
    lab.model.zero_grad()
    log_prob = response_log_probs(lab.model, rollouts, torch.arange(len(rollouts.mask)))
    (coefficient * log_prob).sum().backward()
    update = {name: p.grad.clone() for name, p in lab.model.named_parameters()}
    lab.model.zero_grad()
    return update


@pytest.mark.parametrize("arm", [Z, "true"])
def test_what_is_measured_is_what_one_would_write_down(arm):
    """Matrix A row by row and B from .backward() of the whole loss, for an arm by answer and one
    by token."""
    lab, rollouts = planted_group()
    measured, tokens = Measurements(6), true_rewards(lab, rollouts)
    measure_question(lab, rollouts, 0, {"true": tokens}, {}, measured)
    assert measured.main == 4 and measured.sizes == [2, 4]

    coefficient = torch.zeros(6, 6)
    coefficient[:4] = answer_arms(rollouts, 4)[Z][:, None] if arm == Z else tokens[:4]
    rows = []
    for i in range(4):
        alone = coefficient * (torch.arange(6) == i)[:, None]
        update = explicit_update(lab, rollouts, alone)
        rows.append(torch.cat([g.flatten() for g in update.values()]))
    rows = torch.stack(rows).double()
    lengths = rows.norm(dim=1).sort(descending=True).values
    of_rows, of_lengths = ranks(torch.linalg.svdvals(rows)), ranks(lengths)
    assert measured.values["A", arm, 4][0] == pytest.approx(of_rows, rel=1e-4)
    assert measured.values["A null", arm, 4][0] == pytest.approx(of_lengths, rel=1e-4)

    whole = explicit_update(lab, rollouts, coefficient)
    matrices = [g for g in whole.values() if g.dim() == 2]
    assert len(matrices) == 9
    entropy = [ranks(torch.linalg.svdvals(g.double()))["entropy rank"] for g in matrices]
    median = measured.values["B", arm, 4][0]["entropy rank"]
    assert median == pytest.approx(np.median(entropy), rel=1e-4)
    if arm == Z:
        head = measured.values["B each", "lm_head.weight", 4][0]
        assert head == pytest.approx(matrix_ranks(matrices[-1]), rel=1e-4)


def test_a_group_without_spread_is_left_out_and_few_answers_have_some_arms():
    lab, rollouts = planted_group()
    measured, tokens = Measurements(6), true_rewards(lab, rollouts)
    measure_question(lab, rollouts, 7, {"true": tokens}, {"true": 2}, measured)
    values = measured.values
    assert ("A", Z, 2) not in values  # the first two rewards are equal
    assert list(values["A", Z, 4]) == [7]
    assert ("A", "true", 4) not in values
    assert values["C", "", 4][7]["rewards"] == 3
    assert values["outside", Z, 4][7]["differences"] < 1e-5
    assert values["outside", "raw reward", 4][7]["differences"] > 1e-5
    for name in RANKS:  # multiples of the same rows
        assert values["A", "rloo", 4][7][name] == pytest.approx(values["A", Z, 4][7][name])


# The prompt gives no gradient to the first of these, and does to the second.
@pytest.mark.parametrize("name", ["model.layers.2.mlp.gate_proj",
                                  "model.layers.0.self_attn.k_proj"])
def test_centred_inputs_against_positions_one_by_one(lab, name):
    """sum_t delta_t (x_t - mean x)', the mean over the positions of the first two answers that
    carry gradient, whatever an arm makes of them."""
    rollouts = spoken(lab, SPOKEN[:3], ASKED[:1])
    coefficient = drawn_matrix(*rollouts.mask.shape, seed=4) * rollouts.mask
    coefficient[:, 9:] = 0
    kinds = {ONES: rollouts.mask.float(), "drawn": coefficient}
    gradients = group_gradients(lab, rollouts, kinds)
    assert not any(module._forward_hooks for module in lab.model.modules())
    factors = torch.tensor([1.0, -2.0])
    plain = weight_matrices(lab.model, factors @ gradients.rows["drawn"][:2])
    centred = centred_matrices(gradients, plain, "drawn", factors)

    seen = [by_position(lab, rollouts, name, b, coefficient) for b in range(2)]
    mean_input = torch.cat([x for x, _ in seen]).mean(0)
    expected_plain = expected_centred = 0
    for factor, (x, delta) in zip(factors, seen):
        expected_plain = expected_plain + factor * delta.T @ x
        expected_centred = expected_centred + factor * delta.T @ (x - mean_input)
    size = expected_plain.abs().max().item()
    close = dict(rtol=0, atol=1e-5 * size)
    torch.testing.assert_close(plain[f"{name}.weight"], expected_plain, **close)
    torch.testing.assert_close(centred[f"{name}.weight"], expected_centred, **close)
    assert (expected_plain - expected_centred).abs().max() > 0.01 * size
    embedding = "model.embed_tokens.weight"
    assert torch.equal(centred[embedding], plain[embedding])


def by_position(lab, rollouts, name, b, coefficient):
    """Inputs of the layer and gradients at its output, at the positions of answer b where log-probs
    depend on the output."""
    seen, module = {}, lab.model.get_submodule(name)

    def note(module, inputs, output):
        output = linear(inputs[0], module.weight, module.bias)
        seen.update(x=inputs[0].detach(), output=output)
        output.retain_grad()
        return output

    handle = module.register_forward_hook(note)
    log_prob = response_log_probs(lab.model, rollouts, torch.tensor([b]))
    handle.remove()
    log_prob.sum().backward(retain_graph=True)
    there = seen["output"].grad.abs().sum(1) > 0
    seen["output"].grad = None
    (coefficient[b] * log_prob).sum().backward()
    lab.model.zero_grad()
    return seen["x"][there], seen["output"].grad[there]


@pytest.mark.parametrize("answers, sizes, main", [
    (32, [2, 4, 8, 16, 32], 8), (15, [2, 4, 8], 8), (2, [2], 2)])
def test_group_sizes(answers, sizes, main):
    assert Measurements(answers).sizes == sizes
    assert Measurements(answers).main == main


def test_means_and_paired_changes_by_hand():
    measured = Measurements(4)
    for q, (z, other) in enumerate([(1.0, 2.0), (2.0, 5.0), (3.0, None)]):
        measured.add("A", Z, 4, q, {"entropy rank": z})
        if other:
            measured.add("A", "other", 4, q, {"entropy rank": other})
    mean = measured.mean("A", Z, 4)  # Student's t with 2 degrees of freedom
    assert mean.value == 2 and mean.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-4)
    change = measured.against_z("A", "other")  # of 1 and 3, standard error 1
    assert change.value == 2 and change.high - 2 == pytest.approx(12.7062 * 1.0, rel=1e-3)
    assert measured.mean("A", "absent", 4).value == NAN
    assert measured.arms() == [Z, "other"]


@pytest.mark.parametrize("low, high, expected", [
    (0.1, 0.3, "higher"), (-0.3, -0.1, "lower"), (-0.1, 0.3, "none seen"),
    (1e-9, 3e-8, "the same"), (1e-9, 0.3, "higher"), (math.nan, math.nan, "too few")])
def test_verdicts_on_changes(low, high, expected):
    assert change_verdict(Estimate(0.1, low, high, 0.5)) == expected


def test_verdicts_on_changes_in_other_words():
    assert change_verdict(Estimate(0.2, 0.1, 0.3, 0.01), "grows", "falls") == "grows"


@pytest.mark.parametrize("low, high, expected", [
    (1.0, 1.6, "may be 2"), (2.4, 9.0, "may be 2"), (2.6, 9.0, "not 2"), (1.0, 1.4, "not 2"),
    (math.nan, math.nan, "too few")])
def test_verdicts_on_about_2(low, high, expected):
    """From 1.5 to 2.5."""
    assert about_2(Estimate(2.0, low, high, 0.5)) == expected


def test_a_sentence_gathers_rows_by_verdict():
    rows = [Row("A, one, R = 8, minus", 1.234, None, None, None, "lower"),
            Row("B, two", 1e-9, None, None, None, "higher"),
            Row("D", math.nan, None, None, None, "too few"),
            Row("C", -3.0, None, None, None, "lower")]
    assert sentences("It", rows) == [
        "It, lower: A, one (1.23), C (-3).", "It, higher: B, two (1e-09).",
        "It, too little measured to say: D (-)."]


NEAR, FAR = [1.9, 2.0, 2.1, 2.2], [6.0, 6.1, 6.2, 6.4]


def four_questions():
    """Measurements of four problems at R = 2 and 8, the same by every definition of rank."""
    values = {("A", ONES, 2): NEAR, ("A", ONES, 8): FAR, ("B", ONES, 2): NEAR, ("B", ONES, 8): NEAR,
              ("A", "critic", 8): [x + 1 for x in FAR], ("B", "critic", 8): [2.3, 1.5, 2.4, 1.8],
              ("outside", Z, 8): [1e-8, 2e-8, 1e-8, 2e-8],
              ("outside", "raw reward", 8): [0.5] * 4, ("outside", ONES, 8): [0.9] * 4}
    for arm in (Z, "mean only", "rloo"):
        values |= {("A", arm, 2): NEAR, ("A", arm, 8): FAR, ("B", arm, 2): NEAR,
                   ("B", arm, 8): NEAR}
    measured = Measurements(8)
    for place, of_questions in values.items():
        for q, value in enumerate(of_questions):
            measured.add(*place, q, dict.fromkeys([*RANKS, "means", "differences"], value))
    return measured


def test_verdicts_follow_from_the_numbers():
    measured = four_questions()
    rows, (text, _) = claim_rank_2(measured)
    assert [row.verdict for row in rows] == ["not rank 2", "rank 2", "inside", "outside"]
    assert text.startswith("No: with R = 8 answers the numerical rank of A is 6.2")
    rows, _ = claim_about_2(measured)
    assert [row.verdict for row in rows] == ["not 2"] * 3 + ["may be 2"] * 3
    rows, _ = claim_any_size(measured)
    assert [row.verdict for row in rows] == ["grows"] * 3 + ["the same"] * 3
    rows, _ = claim_others(measured)
    assert [row.verdict for row in rows] == ["the same", "higher", "none seen"]
    row = against_z(measured, "A", "critic", "planted ")
    assert row.measured == "planted critic in A, R = 8, minus z-score"
    assert row.value == pytest.approx(1)


def test_an_arm_that_differs_in_one_question_is_not_the_same():
    measured = four_questions()
    measured.add("A", "rloo", 8, 0, dict.fromkeys(RANKS, 9.0))
    row = claim_others(measured)[0][0]
    assert row.value == pytest.approx(3.0) and row.verdict == "not the same"


def test_arms_stand_beside_their_null():
    measured = four_questions()
    measured.add("A null", Z, 8, 0, dict.fromkeys(RANKS, 7.5))
    rows = {row[0]: row for row in by_definition(measured, "A").rows}
    assert rows["z-score, random directions"][1] == 7.5
    assert rows[Z][1] == pytest.approx(6.175)


def run(folder, *more):
    argv = ["--quick", "--threads", "1", "--out", str(folder), *more]
    run_probe("rank", rank.__doc__, rank.FLAGS, rank.measure, argv)


def test_end_to_end(tmp_path, capsys):
    out = tmp_path / "result"
    run(out)
    numbers = json.loads((out / "numbers.json").read_text())
    tables = {table["name"]: table for table in numbers["tables"]}
    assert list(tables)[0] == "verdicts"
    claims = [row["claim"] for row in tables["verdicts"]["rows"] if row["claim"]]
    assert claims == ["zero-sum gives rank 2", "the rank is about 2", "whatever R is",
                      "sparser over training", "tokens' rewards raise it",
                      "other baselines raise it"]
    c = {row[""]: row["outside their differences"] for row in tables["C"]["rows"]}
    assert c[Z] < 1e-5 < 0.1 < c["raw reward"]
    a = {row[""]: row for row in tables["A by group size"]["rows"]}
    assert a["rloo"]["R=4"] == pytest.approx(a[Z]["R=4"], abs=1e-5)
    assert 1 <= a[Z]["R=4"] <= 4 and a[Z]["null, R=4"] <= 4
    assert "step  reward" not in capsys.readouterr().out
    assert (out / "run/checkpoints/step_000002").is_dir()
    assert {path.name for path in out.glob("*.png")} == {"rank.png", "sparsity.png"}
    assert numbers["in_short"] == tables["verdicts"]["finding"].split("\n")
    asked = [line.partition("?")[0] for line in numbers["in_short"] if "? " in line]
    assert [line.lower() for line in asked] == [claim.lower() for claim in claims]
