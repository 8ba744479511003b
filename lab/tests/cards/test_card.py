"""The card of a method: its rows by hand, its JSON, its closing words."""
import json
import shlex

import pytest
from conftest import ROOT

from analysis.statistics import Estimate
from harness.load import load_policy
from harness.settings import make_settings
from lab.cards import card
from lab.cards.card import as_table, favoured, from_json, make_card, rows_after, to_json
from lab.cards.card_in_words import claim_of, closing, verdict
from lab.probes import signal

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


def test_the_closing_paragraph_says_what_the_rows_say():
    said = closing("mine", NUMBERS, "A paper: twice as fast", "python -m tools.idea mine")
    assert "to a cosine of 0.980, with 1.50 times" in said
    assert "On the untrained model its gradient has less noise than plain GRPO's" in said
    assert "On the half trained model its gradient has more noise" in said
    assert "better where few decide, and worse where many decide" in said
    assert "It has not been trained. python -m tools.idea mine trains it" in said
    assert said.endswith("Its paper, A paper: twice as fast.")


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


def test_a_card_is_read_as_it_was_written():
    stored = json.loads(json.dumps(to_json({"rows": NUMBERS}), allow_nan=False))
    again = from_json(stored)["rows"]
    assert repr(again) == repr(NUMBERS)
    rows = {row[0]: row for row in as_table("mine", again).rows}
    assert rows["gain where 3 of 128 tokens decide"][1:3] == ("+3.0 (+1.0 to +5.0)", "50.0% right")
    assert rows["gain where 12 of 128 decide"][-1] == "it needs the text"


def test_rows_are_measured_once_and_those_of_training_are_added(tmp_path, monkeypatch, capsys):
    measured = []

    def rows_before(*_):
        measured.append(1)
        return dict(NUMBERS)
    monkeypatch.setattr(card, "rows_before", rows_before)
    monkeypatch.setattr(card, "half_trained", lambda *_: None)
    monkeypatch.setattr(card, "rows_after", lambda *_: {"training": {"own": Estimate(0.02, 0.01,
                                                                                     0.03)}})
    settings = dict.fromkeys(("plain", "idea", "placebo"), make_settings(FEW))

    def make(made_of, arms):
        return make_card("taco", {}, settings, made_of, arms, tmp_path / "taco", "again", "this",
                         noise={"batch_start": {"own": Estimate(1.0, 0.9, 1.1)}})
    first = make("a", {})
    assert "training" not in first["rows"] and len(measured) == 1
    second = make("a", {"idea": {0: {}, 1: {}}})
    assert len(measured) == 1 and "it gains +2.0 (+1.0 to +3.0) points" in second["closing"]
    make("b", {})  # made of other code
    assert len(measured) == 2
    page = (tmp_path / "taco/report.html").read_text(encoding="utf-8")
    assert "The card of taco" in page and "this trains it" in page
    assert "gain in training" in capsys.readouterr().out


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
    [(method, flags, settings, _, arms, folder, command, trains)] = asked
    assert method == "low_probability --probability_share 0.5"
    assert flags == {"probability_share": 0.5} and arms == {}
    assert folder == tmp_path / "low_probability"
    assert command == shlex.join(["python", "-m", "lab", "card", *words])
    assert trains == ("python -m tools.idea low_probability --probability_share 0.5 --runs "
                      f"{shlex.quote(str(tmp_path / 'runs'))}")
    assert settings["idea"].mitigation == "low_probability"


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
    rows = card.rows_of_noise(["none"], plain, None, config)["none"]
    assert asked[0].settings.loss_norm == "sequence"
    assert rows["batch_start"]["own"].value == pytest.approx(1)
    assert rows["batch_start"]["control"] is None and rows.keys() == {"batch_start", "cosine_start"}


def test_a_claim_is_read_from_the_page_of_papers():
    if not (ROOT / "docs/methods.md").exists():
        pytest.skip("there is no page of papers")
    assert claim_of("optimal_token_baseline").startswith("2602.07078: ")
    assert claim_of("mine") == ""
