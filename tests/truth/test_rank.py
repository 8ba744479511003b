"""Rank by every definition, matrices A, B and C against explicit ones, sparsity by enumeration."""
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from truth import __main__ as probes
from conftest import ASKED, SPOKEN, credit_columns, hand_made, spoken, write_log
from analysis.statistics import Estimate
from engine.errors import UserError
from engine.forward import response_log_probs
from truth import sparsity, spectra
from truth.planted import planted_lab, sample_planted, true_rewards
from truth.rank import against_z, by_definition, claim_about_2, claim_any_size, claim_others, claim_rank_2, sentence, word
from truth.spectra import (ONES, RANKS, Found, Z, answer_arms, answers_apart, centred_matrices, energy_count, gram, matrix_ranks, mean_gradients,
                           off_the_line, outside, ranks, singular_values, span_of, study, weight_matrices)

NAN = pytest.approx(math.nan, nan_ok=True)


def test_every_definition_by_hand():
    assert list(matrix_ranks(torch.eye(5)).values()) == pytest.approx([5, 5, 5, 5, 5, 5])
    assert list(matrix_ranks(torch.outer(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, -1]))).values()) == pytest.approx([1] * 6)
    found = matrix_ranks(torch.diag(torch.tensor([3.0, 4.0])))  # of 4/7 and 3/7; energies 16 and 9, fourth powers 256 and 81
    assert list(found) == list(RANKS)
    entropy = (7 / 4) ** (4 / 7) * (7 / 3) ** (3 / 7)
    assert list(found.values()) == pytest.approx([entropy, 25 / 16, 625 / 337, 2, 2, 2])
    assert list(ranks(torch.zeros(3)).values()) == [NAN] * 6


def test_how_many_singular_values_hold_a_share():
    s = torch.tensor([4.0, 3.0, 1e-3])
    assert [energy_count(s, share) for share in (0.5, 0.64 - 1e-6, 0.65, 0.99)] == [1, 1, 2, 2]
    assert energy_count(torch.ones(10), 0.9) == 9  # exactly reached
    assert ranks(torch.tensor([1.0, 2e-5, 5e-6]))["numerical"] == 2


def test_the_gram_route_is_the_decomposition_of_the_matrix(monkeypatch):
    monkeypatch.setattr(spectra, "AT_ONCE", 500)
    x = torch.randn(4, 1207, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [2.0], [0.1], [3.0]])  # in three parts
    torch.testing.assert_close(singular_values(gram(x)), torch.linalg.svdvals(x.double()), rtol=1e-9, atol=0)
    tall = x[:, :30].T
    torch.testing.assert_close(singular_values(gram(tall.T)), torch.linalg.svdvals(tall.double()))
    assert matrix_ranks(tall) == pytest.approx(matrix_ranks(tall.T))


def test_rows_in_random_directions_have_the_null_of_their_lengths():
    x = torch.randn(6, 300_000, generator=torch.Generator().manual_seed(1))
    x *= (torch.tensor([1.0, 5, 2, 0.5, 3, 4]) / x.norm(dim=1))[:, None]
    null = ranks(torch.tensor([5.0, 4, 3, 2, 1, 0.5]).double())
    assert ranks(singular_values(gram(x))) == pytest.approx(null, rel=0.01)
    assert null["stable rank"] == pytest.approx((25 + 16 + 9 + 4 + 1 + 0.25) / 25)


def test_the_update_and_the_span_of_mean_gradients():
    rows, reward = torch.randn(5, 1000, generator=torch.Generator().manual_seed(2)), torch.tensor([1.1, 0.1, 0.1, 1.1, 0.1])
    means = mean_gradients(rows, reward)
    torch.testing.assert_close(means, torch.stack([rows[[1, 2, 4]].mean(0), rows[[0, 3]].mean(0)]))
    std = math.sqrt(0.24)
    z = (reward - 0.5) / (std + 1e-4)
    torch.testing.assert_close(z @ rows, math.sqrt(2 * 3) * std / (std + 1e-4) * (means[1] - means[0]), rtol=1e-4, atol=1e-5)
    assert off_the_line(z @ rows, means, reward) < 1e-6
    assert off_the_line((reward - 0.5) @ rows, means, reward) == pytest.approx(1 / std - 1, rel=1e-3)  # the same direction, another length
    whole, differences = span_of(means), span_of(means[1:] - means[0])
    assert outside(z @ rows, differences) < 1e-6 and outside(reward @ rows, whole) < 1e-6
    assert outside(reward @ rows, differences) > 0.3 and outside(torch.tensor([1.0, -1, 0, 0, 0]) @ rows, whole) > 0.5
    three = mean_gradients(rows, torch.tensor([0.0, 1.0, 0.5, 0.5, 0.0]))
    assert len(three) == matrix_ranks(three)["numerical"] == 3
    torch.testing.assert_close(three[1], rows[2:4].mean(0))


def test_outside_by_hand():
    assert outside(torch.tensor([3.0, 4, 0]), span_of(torch.tensor([[2.0, 0, 0]]))) == pytest.approx(0.8)


def test_the_arms_of_a_group_are_those_of_training():
    """Of six answers the first four: one of four is right, so z is sqrt 3 and three times -1 / sqrt 3."""
    reward = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    batch = hand_made([[True] * 2] * 6, scores={"reward": reward})
    arms = answer_arms(batch, 4)
    assert arms[Z].tolist() == pytest.approx([-1 / math.sqrt(3), math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)], rel=1e-3)
    assert arms["mean only"].tolist() == [-0.25, 0.75, -0.25, -0.25]
    torch.testing.assert_close(arms["rloo"], arms["mean only"] * 4 / 3)
    assert arms["raw reward"].tolist() == [0, 1, 0, 0] and arms[ONES].tolist() == [1] * 4
    assert arms["random zero-sum"].sum().abs() < 1e-6 < arms["random zero-sum"].abs().min()
    shuffled = [answer_arms(batch, 4)["shuffled rewards"] for _ in range(8)]
    assert all(sorted(a.tolist()) == sorted(arms[Z].tolist()) for a in shuffled) and len({tuple(a.tolist()) for a in shuffled}) > 1


def planted_group(answers=6):
    lab = planted_lab(1, 6)
    rollouts = sample_planted(lab, 3, 1, answers)
    reward = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.0, 1.0])[:answers]  # so that it is known which groups have spread
    return lab, dataclasses.replace(rollouts, scores={"reward": reward})


def explicit_update(lab, rollouts, coefficient):
    lab.model.zero_grad()
    (coefficient * response_log_probs(lab.model, rollouts, torch.arange(len(rollouts.mask)))).sum().backward()
    found = {name: p.grad.clone() for name, p in lab.model.named_parameters()}
    lab.model.zero_grad()
    return found


def test_what_is_studied_is_what_one_would_write_down():
    """Matrix A row by row and B from .backward() of the whole loss, for an arm by answer and one by token."""
    lab, rollouts = planted_group()
    found, tokens = Found(6), true_rewards(lab, rollouts)
    study(lab, rollouts, 0, {"true": tokens}, {}, found)
    assert found.main == 4 and found.sizes == [2, 4]
    z = answer_arms(rollouts, 4)[Z]
    for arm, coefficient in ((Z, z[:, None].expand(4, 6)), ("true", tokens[:4])):
        coefficient = torch.cat([coefficient, torch.zeros(2, 6)])
        single = [explicit_update(lab, rollouts, coefficient * (torch.arange(6) == i)[:, None]) for i in range(4)]
        rows = torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in single]).double()
        assert found.values["A", arm, 4][0] == pytest.approx(ranks(torch.linalg.svdvals(rows)), rel=1e-4)
        assert found.values["A null", arm, 4][0] == pytest.approx(ranks(rows.norm(dim=1).sort(descending=True).values), rel=1e-4)
        matrices = [g for g in explicit_update(lab, rollouts, coefficient).values() if g.dim() == 2]
        entropy = [ranks(torch.linalg.svdvals(g.double()))["entropy rank"] for g in matrices]
        assert len(matrices) == 9 and found.values["B", arm, 4][0]["entropy rank"] == pytest.approx(np.median(entropy), rel=1e-4)
        if arm == Z:
            assert found.values["B each", "lm_head.weight", 4][0] == pytest.approx(matrix_ranks(matrices[-1]), rel=1e-4)


def test_a_group_without_spread_is_left_out_and_few_answers_have_some_arms():
    lab, rollouts = planted_group()
    found = Found(6)
    study(lab, rollouts, 7, {"true": true_rewards(lab, rollouts)}, {"true": 2}, found)
    assert ("A", Z, 2) not in found.values and list(found.values["A", Z, 4]) == [7]  # the first two rewards are equal
    assert ("A", "true", 4) not in found.values and found.values["C", "", 4][7]["rewards"] == 3
    assert found.values["outside", Z, 4][7]["differences"] < 1e-5 < found.values["outside", "raw reward", 4][7]["differences"]
    for name in RANKS:  # multiples of the same rows
        assert found.values["A", "rloo", 4][7][name] == pytest.approx(found.values["A", Z, 4][7][name])


def test_centred_inputs_against_positions_one_by_one(lab):
    """sum_t delta_t (x_t - mean x)', the mean over the positions of the first two answers that carry gradient."""
    rollouts, generator = spoken(lab, SPOKEN[:3], ASKED[:1]), torch.Generator().manual_seed(4)
    drawn = torch.randn(rollouts.mask.shape, generator=generator) * rollouts.mask
    drawn[:, 9:] = 0  # the mean is over all positions where log-probs have gradients, whatever an arm makes of them
    found = answers_apart(lab, rollouts, {ONES: rollouts.mask.float(), "drawn": drawn})
    a = torch.tensor([1.0, -2.0])
    update = a @ found.rows["drawn"][:2]
    centred = centred_matrices(found, weight_matrices(lab.model, update), "drawn", a)
    for name in ("model.layers.2.mlp.gate_proj", "model.layers.0.self_attn.k_proj"):  # without gradient at the prompt, and with
        seen = [by_position(lab, rollouts, name, b, drawn) for b in range(2)]
        middle = torch.cat([x for x, _ in seen]).mean(0)
        expected = sum(w * torch.einsum("to,ti->oi", delta, x - middle) for w, (x, delta) in zip(a, seen))
        plain = sum(w * torch.einsum("to,ti->oi", delta, x) for w, (x, delta) in zip(a, seen))
        size = plain.abs().max().item()
        torch.testing.assert_close(weight_matrices(lab.model, update)[f"{name}.weight"], plain, rtol=0, atol=1e-5 * size)
        torch.testing.assert_close(centred[f"{name}.weight"], expected, rtol=0, atol=1e-5 * size)
        assert (plain - expected).abs().max() > 0.01 * size
    embedding = "model.embed_tokens.weight"
    assert torch.equal(centred[embedding], weight_matrices(lab.model, update)[embedding])
    assert not any(module._forward_hooks for module in lab.model.modules())


def by_position(lab, rollouts, name, b, coefficient):
    """Inputs of the layer and gradients at its output, at the positions of answer b where log-probs depend on the output."""
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


def test_means_and_paired_changes_by_hand():
    assert [(Found(n).sizes, Found(n).main) for n in (32, 15, 2)] == [([2, 4, 8, 16, 32], 8), ([2, 4, 8], 8), ([2], 2)]
    found = Found(4)
    for q, (z, other) in enumerate([(1.0, 2.0), (2.0, 5.0), (3.0, None)]):
        found.add("A", Z, 4, q, {"entropy rank": z})
        if other:
            found.add("A", "other", 4, q, {"entropy rank": other})
    mean, change = found.mean("A", Z, 4), found.against_z("A", "other")
    assert mean.value == 2 and mean.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-4)  # t with 2 degrees of freedom
    assert change.value == 2 and change.high - 2 == pytest.approx(12.7062 * 1.0, rel=1e-3)  # of 1 and 3, standard error 1
    assert found.mean("A", "absent", 4).value == NAN and found.arms() == [Z, "other"]


def test_words_and_sentences():
    cases = [((0.1, 0.3), "higher"), ((-0.3, -0.1), "lower"), ((-0.1, 0.3), "none seen"), ((1e-9, 3e-8), "the same"),
             ((math.nan, math.nan), "too few")]
    assert [word(Estimate(0.1, *interval, 0.5)) for interval, _ in cases] == [said for _, said in cases]
    assert word(Estimate(0.2, 0.1, 0.3, 0.01), "grows", "falls") == "grows"
    rows = [("A, one, R = 8, minus", 1.234, None, "lower"), ("B, two", 1e-9, None, "higher"), ("D", math.nan, None, "too few"),
            ("C", -3.0, None, "lower")]
    assert sentence("So", rows) == "So: lower: A, one (1.23), C (-3); higher: B, two (1e-09); too few: D (-)."


def told_of(values):
    """What is found for four questions at R = 2 and 8, the same by every definition: `values` by (matrix, arm, R)."""
    found = Found(8)
    for (matrix, arm, R), several in values.items():
        for q, value in enumerate(several):
            found.add(matrix, arm, R, q, dict.fromkeys([*RANKS, "means", "differences"], value))
    return found


def test_verdicts_follow_from_the_numbers():
    near, far, flat = [1.9, 2.0, 2.1, 2.2], [6.0, 6.1, 6.2, 6.4], [1e-8, 2e-8, 1e-8, 2e-8]
    values = {("A", Z, 2): near, ("A", Z, 8): far, ("B", Z, 2): near, ("B", Z, 8): near, ("A", ONES, 8): far, ("B", ONES, 8): near,
              ("A", ONES, 2): near, ("B", ONES, 2): near, ("outside", Z, 8): flat, ("outside", "raw reward", 8): [0.5] * 4,
              ("outside", ONES, 8): [0.9] * 4, ("A", "critic", 8): [x + 1 for x in far], ("B", "critic", 8): [2.3, 1.5, 2.4, 1.8]}
    values |= {(matrix, arm, R): values[matrix, Z, R] for matrix in ("A", "B") for arm in ("mean only", "rloo") for R in (2, 8)}
    found = told_of(values)
    assert [row[-1] for row in claim_rank_2(found)[0]] == ["not rank 2", "rank 2", "inside", "outside"]
    assert "do not give A rank 2 (numerical rank 6.2 of 8" in claim_rank_2(found)[1]
    assert [row[-1] for row in claim_about_2(found)[0]] == ["not 2"] * 3 + ["may be 2"] * 3
    assert [row[-1] for row in claim_any_size(found)[0]] == ["grows"] * 3 + ["the same"] * 3
    assert [row[-1] for row in claim_others(found)[0]] == ["the same", "higher", "none seen"]
    assert against_z(found, "A", "critic", "planted ")[:2] == ("planted critic in A, R = 8, minus z-score", pytest.approx(1))
    found.add("A", "rloo", 8, 0, dict.fromkeys(RANKS, 9.0))
    assert claim_others(found)[0][0][1:] == (pytest.approx(3.0), None, None, None, "not the same")
    found.add("A null", Z, 8, 0, dict.fromkeys(RANKS, 7.5))
    rows = {row[0]: row for row in by_definition(found, "A").rows}
    assert rows["z-score, random directions"][1] == 7.5 and rows[Z][1] == pytest.approx(6.175)


@pytest.mark.parametrize("right, G, R", [(0, 4, 2), (1, 4, 2), (2, 5, 2), (3, 6, 3), (5, 5, 4), (2, 6, 6)])
def test_the_chance_of_equal_answers_by_drawing_all_groups(right, G, R):
    groups = list(itertools.combinations([1] * right + [0] * (G - right), R))
    assert sparsity.chance_of_equal(right, G, R) == pytest.approx(np.mean([len(set(group)) == 1 for group in groups]))


@pytest.mark.parametrize("p, G, R", [(0.3, 6, 2), (0.3, 6, 4), (0.8, 5, 5)])
def test_the_chance_of_equal_answers_is_estimated_without_bias(p, G, R):
    found = sum(math.comb(G, k) * p ** k * (1 - p) ** (G - k) * sparsity.chance_of_equal(k, G, R) for k in range(G + 1))
    assert found == pytest.approx(p ** R + (1 - p) ** R)
    assert sparsity.chance_of_equal(1, G, G + 1) == NAN


def test_hoyer_by_hand():
    assert sparsity.hoyer(torch.tensor([0.0, 0.0, -2.0, 0.0])) == pytest.approx(1)
    assert sparsity.hoyer(torch.full((9,), -0.5)) == pytest.approx(0)
    assert sparsity.hoyer(torch.tensor([3.0, -4.0])) == pytest.approx((math.sqrt(2) - 7 / 5) / (math.sqrt(2) - 1))
    assert sparsity.hoyer(torch.randn(100_000, generator=torch.Generator().manual_seed(0))) == pytest.approx(1 - math.sqrt(2 / math.pi), abs=0.01)


def three_groups():
    """Two answers each, of one and two tokens: the first group has advantages, the second none, the third in a second token only."""
    return credit_columns([1, 2] * 3, [0, 0, 1, 1, 2, 2], advantage=[1, -1, -1, 0, 0, 0, 0, 0, 1], collision=[0.5] * 3 + [1] * 3 + [0.75] * 3,
                          reward_answer=[1, 0, 1, 1, 0, 0])


def test_a_steps_sparsity_by_hand():
    found = sparsity.measures(three_groups())
    assert found["success"] == 0.5 and found[sparsity.WITHOUT] == pytest.approx(1 / 3)
    assert found["expected, R = 2"] == pytest.approx(2 / 3) and found["expected, R = 4"] == NAN
    assert found[sparsity.SATURATION] == pytest.approx((0.5 + 0 + 0.25) / 3)


def test_thirds_by_hand():
    first, last, change = sparsity.thirds(np.array([0.0, 2.0, 50.0, 50.0, 7.0, 9.0]))
    assert (first, last, change.value) == (1, 8, 7)
    assert change.high - 7 == pytest.approx(4.302653 * math.sqrt(2), rel=1e-4)  # variances 2 and 2, two values each: 2 degrees of freedom
    assert not np.isfinite(sparsity.thirds(np.array([1.0, 2.0]))[2].low)


@pytest.mark.parametrize("low, high, sign, said", [
    (0.1, 0.2, 1, "sparser"), (0.1, 0.2, -1, "less sparse"), (-0.2, -0.1, 1, "less sparse"), (-0.2, -0.1, -1, "sparser"),
    (-0.1, 0.1, -1, "no change seen"), (math.nan, math.nan, 1, "too few")])
def test_what_counts_as_sparser(low, high, sign, said):
    assert sparsity.verdict(SimpleNamespace(low=low, high=high), sign) == said


def test_which_checkpoints_are_compared(tmp_path, learner):
    run = write_log(tmp_path / "run", {}, config={"model": str(learner)})
    for step in (10, 20, 30, 40):
        (run / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    (run / "checkpoints/step_000030_kept").mkdir()
    assert list(sparsity.checkpoints(run)) == [0, 20, 40] and sparsity.checkpoints(run)[0] == learner
    assert list(sparsity.checkpoints(write_log(tmp_path / "bare", {}, config={"model": "nowhere"}))) == []


def test_a_run_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        probes.main(["rank", "--quick", "--run", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    run = write_log(tmp_path / "run", {1: three_groups()})
    with pytest.raises(UserError, match="fewer than two credit files"):
        probes.main(["rank", "--quick", "--run", str(run), "--out", str(tmp_path / "out")])
    bare = write_log(tmp_path / "bare", {1: three_groups(), 2: three_groups()}, config={"model": "nowhere"})
    with pytest.raises(UserError, match="has no checkpoints"):
        probes.main(["rank", "--quick", "--run", str(bare), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_over_the_steps_of_a_run(tmp_path):
    table, steps, series = sparsity.over_steps(write_log(tmp_path / "run", {step: three_groups() for step in (1, 2, 5)}))
    assert steps == [1, 2, 5] and series["success"].tolist() == [0.5] * 3 and "expected, R = 4" not in series
    assert [row[0] for row in table.rows] == ["success", sparsity.WITHOUT, "expected, R = 2", sparsity.SATURATION]


def test_end_to_end(tmp_path, capsys):
    out = tmp_path / "found"
    probes.main(["rank", "--quick", "--threads", "1", "--out", str(out)])
    printed, numbers = capsys.readouterr().out, json.loads((out / "numbers.json").read_text())
    tables = {table["name"]: table for table in numbers["tables"]}
    assert list(tables)[0] == "verdicts" and all(table["finding"] for table in tables.values())
    claims = [row["claim"] for row in tables["verdicts"]["rows"] if row["claim"]]
    assert claims == ["zero-sum gives rank 2", "the rank is about 2", "whatever R is", "sparser over training", "tokens' rewards raise it",
                      "other baselines raise it"]
    by_arm = {row[""]: row for row in tables["C"]["rows"]}
    assert by_arm[Z]["outside their differences"] < 1e-5 < 0.1 < by_arm["raw reward"]["outside their differences"]
    a = {row[""]: row for row in tables["A by group size"]["rows"]}
    assert a["rloo"]["R=4"] == pytest.approx(a[Z]["R=4"], abs=1e-5) and 1 <= a[Z]["R=4"] <= 4 and a[Z]["null, R=4"] <= 4
    assert "step  reward" not in printed and (out / "run/checkpoints/step_000002").is_dir()
    assert {path.name for path in out.glob("*.png")} == {"rank.png", "sparsity.png"}
    assert numbers["in_short"] == [tables["verdicts"]["finding"]] and "(f) " in numbers["in_short"][0]
