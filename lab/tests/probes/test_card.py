"""The card of a method: its rows by hand, its JSON, its verdict."""
import json
import shlex
from functools import partial

import pytest

from analysis.statistics import Estimate
from harness.load import load_policy
from harness.settings import make_settings
from lab.__main__ import main
from lab.probes import card, card_rows, dial, signal
from lab.probes.card import as_table, favoured, make_card, rows_after, to_json, verdict

FEW = {"questions": 2, "answers": 4, "max_new_tokens": 24, "threads": 1}
NUMBERS = {"direction": {"own": Estimate(0.98), "plain": Estimate(1.0)},
           "noise": {"own": Estimate(1.5)}, "batch_start": {"own": Estimate(2.0, 1.5, 2.5)},
           "batch_half": {"own": Estimate(0.5, 0.3, 0.9)},
           "few": {"own": Estimate(0.03, 0.01, 0.05), "plain": 0.5},
           "many": {"own": Estimate(-0.03, -0.05, -0.01), "plain": 0.5},
           "some": {"reason": "it needs the text"}}


def test_which_tokens_are_favoured():
    """Words in the think section get nothing, so their share is that of the words after it."""
    plain = make_settings(FEW)
    own = make_settings(FEW | {"mitigation": "by_kind", "word_weight": 0.0})
    policy = load_policy(plain)
    same = favoured(policy, plain, plain)
    assert {part.split()[-1] for part in same["kinds"]["own"].split(", ")} == {"1.00"}
    assert {part.split()[-1] for part in same["sure"]["own"].split(", ")} == {"1.00"}
    without = dict(part.rsplit(" ", 1) for part in favoured(policy, plain, own)["kinds"]["own"]
                   .split(", "))
    assert float(without["word"]) < 0.2 and float(without["number"]) > 1.5


@pytest.mark.parametrize("cosine, noise, said", [
    (0.47, 8.4, "mine turns the gradient away from the true one: where all answers are listed "
                "their cosine is 0.47, and the noise is 8.4 times"),
    (0.98, 0.7, "keeps the direction, with less noise: 0.70 times"),
    (0.98, 1.5, "keeps the direction, with more noise: 1.50 times"),
    (1.0, 1.0, "is as plain GRPO")])
def test_the_first_line_is_a_verdict_from_the_exact_rows(cosine, noise, said):
    rows = {"direction": {"own": Estimate(cosine)}, "noise": {"own": Estimate(noise)}}
    assert said in verdict("mine", rows)
    assert verdict("mine", {}) == ""


def test_a_row_is_shown_with_its_interval_or_with_the_reason_why_there_is_none():
    rows = {row[0]: row for row in as_table("mine", NUMBERS).rows}
    assert rows["gain where 3 of 128 tokens decide"][1:3] == ("+3.0 (+1.0 to +5.0)", "50.0% right")
    assert rows["gain where 12 of 128 decide"][-1] == "it needs the text"
    stored = json.loads(json.dumps(to_json({"rows": NUMBERS}), allow_nan=False))["rows"]
    assert stored["few"]["own"] == {"value": 0.03, "low": 0.01, "high": 0.05}


def test_rows_of_training_are_added_once_there_are_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(card, "rows_before", lambda *_: dict(NUMBERS))
    monkeypatch.setattr(card, "half_trained", lambda *_: None)
    monkeypatch.setattr(card, "rows_of_noise",
                        lambda *_: {"batch_start": {"own": Estimate(1.0, 0.9, 1.1)}})
    monkeypatch.setattr(card, "rows_after", lambda *_: {"training": {"own": Estimate(0.02, 0.01,
                                                                                     0.03)}})
    settings = dict.fromkeys(("plain", "idea", "placebo"), make_settings(FEW))

    def make(arms):
        return make_card("taco", {}, settings, arms, tmp_path / "taco", "again", "this", FEW)
    assert "training" not in make({})["rows"]
    assert "this trains it beside its placebo" in capsys.readouterr().out
    assert json.loads((tmp_path / "taco/settings.json").read_text()) == FEW
    assert "training" in make({"idea": {0: {}, 1: {}}})["rows"]
    printed = capsys.readouterr().out
    assert "gain in training" in printed and "this trains it" not in printed
    page = (tmp_path / "taco/report.html").read_text(encoding="utf-8")
    assert "The card of taco" in page and "taco keeps the direction, with more noise" in page


def test_a_card_of_another_model_is_measured_and_written(tmp_path, learner, monkeypatch, capsys):
    """Half of the advantage for all tokens is plain GRPO with another length. Of each measurement
    as little is made as gives numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(card, "BATCHES_OF_NOISE", 4)
    monkeypatch.setattr(card_rows, "POLICIES", 2)
    monkeypatch.setattr(dial, "gains_in_three_tasks", partial(dial.gains_in_three_tasks, seeds=2))
    main(["card", "dr_grpo", "--model", str(learner), "--questions", "2", "--answers", "4",
          "--max_new_tokens", "24", "--threads", "1"])
    printed = capsys.readouterr().out
    assert printed.startswith("dr_grpo is as plain GRPO") and "half trained" not in printed
    rows = json.loads((tmp_path / "cards/dr_grpo/card.json").read_text())["rows"]
    assert {"kinds", "cost", "noise", "batch_start", "few"} <= rows.keys()
    assert rows["batch_start"]["control"] is None


def test_gains_are_those_of_the_runs():
    def arm(*success):
        return {seed: {"metrics": [{"success": value, "entropy": 0.1}], "evaluations": [],
                       "config": {"steps": 1}} for seed, value in enumerate(success)}
    arms = {"plain": arm(0.2, 0.4), "idea": arm(0.3, 0.6), "placebo": arm(0.3, 0.5)}
    rows = rows_after(arms)
    assert rows["training"]["own"].value == pytest.approx(0.15)
    assert rows["training"]["plain"] == pytest.approx(0.3)
    assert rows["placebo"]["own"].value == pytest.approx(0.05) and "able" not in rows


def test_the_command_trains_nothing(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(card, "make_card", lambda *given, **more: asked.append(given))
    words = ["low_probability", "--probability_share", "0.5", "--cards",
             str(tmp_path), "--runs", str(tmp_path / "runs")]
    card.main(words)
    [(method, flags, settings, arms, folder, command, trains, given)] = asked
    assert method == "low_probability --probability_share 0.5"
    assert flags == {"probability_share": 0.5} and arms == {}
    assert folder == tmp_path / "low_probability"
    assert command == shlex.join(["python", "-m", "lab", "card", *words])
    assert trains == ("python -m tools.idea low_probability --probability_share 0.5 --runs "
                      f"{shlex.quote(str(tmp_path / 'runs'))}")
    assert settings["idea"].mitigation == "low_probability" and "mitigation" not in given


def test_the_noise_is_measured_with_the_settings_that_were_typed(tmp_path, monkeypatch):
    """The probe reads them from a file; plain GRPO beside itself is a batch as large as its own."""
    monkeypatch.setattr(card, "BATCHES_OF_NOISE", 4)
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({"loss_norm": "sequence", **FEW}))
    plain = make_settings({"config": str(config)})
    asked = []
    load = signal.policy_from_flags
    monkeypatch.setattr(signal, "policy_from_flags",
                        lambda args: asked.append(load(args)) or asked[-1])
    rows = card.rows_of_noise("none", plain, None, config)
    assert asked[0].settings.loss_norm == "sequence"
    assert rows["batch_start"]["own"].value == pytest.approx(1)
    assert rows["batch_start"]["control"] is None and rows.keys() == {"batch_start", "cosine_start"}
