"""From noise to a gain, by hand."""
import json
import math
from statistics import fmean

import pytest
import torch


from engine.errors import UserError
from research.__main__ import main
from research.dial.arms import EXACT, PLAIN, named_arm
from research.dial.task import SyntheticTask, TaskSpec
from research.dial.training import batch_gradients
from research.probes.law import (RULES, mean_of_pairs, noise_beside, noise_of_arms,
                                 noise_ratio_to_gain, prediction_errors)
from research.probes.law_board import gain_of_batch

QUICK = "--steps 3 --seeds 4 --rates 1e-2,3e-2".split()
CURVE = {0.5: -4.0, 1.0: 0.0, 4.0: 6.0, 16.0: 8.0, math.inf: 10.0}


@pytest.mark.parametrize("ratio, gain", [
    (1, 0), (0.25, 6), (0.5, 3),          # a doubling is half of the way to four times
    (0.125, 7), (1 / 64, 9.5), (0, 10),     # from 16 to the exact gradient by the noise
    (2, -4), (math.sqrt(2), -2), (50, -4)])  # beyond what was measured: as there
def test_a_gain_from_noise(ratio, gain):
    assert noise_ratio_to_gain(ratio, CURVE) == pytest.approx(gain)


@pytest.mark.parametrize("times, gain", [
    (1, 0), (2, 3), (4, 9), (2 ** 1.5, 6), (8, 15), (0.5, -3)])  # the line goes on beyond its ends
def test_the_gain_of_a_batch_from_the_leaderboards_curve(times, gain):
    assert gain_of_batch(times, [0.0, 3.0, 9.0]) == pytest.approx(gain)


def test_the_leaderboards_predictions_are_compared_with_its_gains(tmp_path, monkeypatch):
    """Every method and the control, by three rules; the larger batches are the curve itself."""
    monkeypatch.chdir(tmp_path)
    main(["law", "--against", "board", "--out", "rules"])
    rules, arms = json.loads((tmp_path / "rules/numbers.json").read_text())["tables"]
    names = {row["arm"] for row in arms["rows"]}
    assert "measured" in names and not names & {"none", "none-16x8", "none-32x8"}
    assert [row["arms"] for row in rules["rows"]] == [len(names)] * 3
    *_, none = rules["rows"]
    assert none["deviation"] == pytest.approx(fmean(abs(row["gain"]) for row in arms["rows"]))


def test_what_was_predicted_against_what_was_measured():
    """Off by 1, 2 and 0, the second beyond its interval; (2 + 8 + 36) / (4 + 16 + 36)."""
    measured = [{"value": gain, "low": gain - 1, "high": gain + 1} for gain in (1.0, 2.0, 6.0)]
    assert prediction_errors([2, 4, 6], measured) == pytest.approx([3, 2, 1, 1, 46 / 56])
    assert prediction_errors([6, 4, 2], measured)[3] == pytest.approx(-1)
    *of_none, rank, slope = prediction_errors([0, 0, 0], measured)
    assert of_none == pytest.approx([3, 1, 3]) and math.isnan(rank) and math.isnan(slope)


def test_each_rule_by_hand():
    """Ratios 1/16 and 1/4: geometric mean 1/8; arithmetic 5/32, so 6.4 times the batch."""
    row = {"gain": 7.0, "untrained": 1 / 16, "half": 1 / 4}
    predicted = {rule: predict(row, CURVE) for rule, predict in RULES.items()}
    by_mean = predicted.pop("the prediction, arithmetic mean")
    assert by_mean == pytest.approx(6 + math.log(1.6, 4) * 2)
    assert predicted == {"the prediction": 7, "its gain times 0.6": pytest.approx(4.2),
                        "as the exact gradient": 10, "no gain": 0}


def test_published_predictions_are_compared_with_published_gains(tmp_path, monkeypatch):
    """Eight tasks of true credit: `all` is another reward."""
    monkeypatch.chdir(tmp_path)
    main(["law", "--against", "law,dial", "--only", "true credit", "--out", "rules"])
    [rules] = json.loads((tmp_path / "rules/numbers.json").read_text())["tables"]
    assert [row["worlds"] for row in rules["rows"]] == [8] * len(RULES)


@pytest.mark.parametrize("names, sentence", [
    ("board,dial", "board.json has no predictions of python -m research law"),
    ("law_rules,dial", "law_rules.json has no predictions of python -m research law"),
    ("law,board", "board.json has no gains of python -m research dial"),
    ("law,nothing", "there is no .*nothing.json")])
def test_results_of_other_commands_are_not_compared(tmp_path, monkeypatch, names, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        main(["law", "--against", names])
    with pytest.raises(UserError, match="none of the arms span is both in law.json and in dial"):
        main(["law", "--against", "law,dial", "--only", "span"])


def test_noise_and_cosine_of_four_gradients():
    """Mean (2, 0), variance 4/3 in the second: noise 4/3 / 4. Along (1, 1) the mean is sqrt 2."""
    found = torch.tensor([[2.0, 1], [2, -1], [2, 1], [2, -1]]).double()
    noise, cosine = noise_beside(found, torch.tensor([3.0, 0]).double())
    assert noise == pytest.approx(1 / 3)
    assert cosine == 1  # 4 - 1/3 of the mean's square is sure, less than 2^2
    assert noise_beside(found, torch.tensor([1.0, 1]).double())[0] == pytest.approx(2 / 3)
    assert noise_beside(found, torch.tensor([1.0, 1]).double())[1] == pytest.approx(
        math.sqrt(2) / math.sqrt(11 / 3))


def test_noise_falls_with_the_batch_and_plain_grpo_points_the_true_way():
    """Four times the answers: a quarter of the noise. Half of the keys are half of the truth."""
    found = noise_of_arms(TaskSpec.read("16/4"), {name: named_arm(name) for name in (
        PLAIN, "batch 4x", "half known 0")}, 1e-2, 4, range(2))
    untrained = {name: mean_of_pairs(found[name]["untrained"]) for name in found}
    assert untrained[PLAIN][0] == pytest.approx(1)
    assert mean_of_pairs(found["batch 4x"]["half"])[0] == pytest.approx(0.25, rel=0.4)
    assert untrained[PLAIN][1] > 0.9
    assert untrained["half known 0"][1] < 0.85


def test_the_mean_of_many_batches_is_the_exact_gradient():
    world = SyntheticTask(TaskSpec.read("8/2"), [0] * 8)
    big = named_arm("batch 64x")
    found, _ = batch_gradients(world, big, named_arm("true credit").start(world), 1, list(range(8)))
    true, _ = batch_gradients(SyntheticTask(world.spec, [0]), named_arm(EXACT), None, 1)
    # the loss counts tokens: of 8 tokens an answer, so an eighth
    assert torch.allclose(8 * found.mean(0), true[0], atol=0.05 * true.norm().item())


def test_predictions_are_made_without_training_a_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["law", *QUICK, "--policies", "1", "--worlds", "8/2", "--out", "law",
          "--only", "mask 0,gae --gae_lambda 0.5,deletion"])
    tables = json.loads((tmp_path / "law/numbers.json").read_text())["tables"]
    predictions = next(table for table in tables if table["name"] == "predictions")
    assert [row["arm"] for row in predictions["rows"]] == ["true credit", "mask 0"]  # gae learns
    assert predictions["notes"][-1].endswith(": gae --gae_lambda 0.5, deletion")
    assert all(row["ratio"] < 1 for row in predictions["rows"])
