"""Weights seen on recorded tokens: the same as training would have made, and nothing written."""
import dataclasses

import numpy as np
import pytest
import torch

from engine.choices import MITIGATIONS
from tools import preview
import train
from conftest import spoken
from engine.errors import UserError
from harness.settings import make_settings
from runs import SHORT


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train.main([*SHORT, "--mitigation", "learned_importance", "--importance_warmup", "1",
                "--out", str(folder)])
    return folder


@pytest.mark.parametrize("name", MITIGATIONS)
def test_every_mitigation_can_be_seen_on_recorded_tokens(recorded, name, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in recorded.rglob("*"))
    fewer = ["--oracle_k", "1"] if name == "oracle" else []
    preview.main([str(recorded), "--mitigation", name, *fewer, "--show", "1"])
    printed = capsys.readouterr().out
    assert "step 3: 8 answers" in printed
    assert f"; {name}" in printed
    assert printed.count("\nanswer ") == 1
    assert before == sorted((p, p.stat().st_mtime_ns) for p in recorded.rglob("*"))


@pytest.mark.parametrize(
    "name", ["equal_gradient", "attention_credit", "outcome_conditional"])
def test_what_is_seen_is_what_training_would_have_done(recorded, name, tmp_path):
    """The weights of the preview against those of a run that samples the same batch with that
    weighting."""
    train.main([*SHORT, "--mitigation", name, "--steps", "1", "--out", str(tmp_path / "x")])
    with np.load(tmp_path / "x/credit/step_000001.npz") as credit:
        trained = credit["weight"]
    settings = make_settings({"config": recorded / "config.json", "mitigation": name})
    found = preview.Recorded(recorded, 1, settings)
    rollouts = found.rollouts()
    weight, _ = found.weights(rollouts)
    np.testing.assert_allclose(weight[rollouts.mask].numpy(), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("argv, said", [
    (["nowhere"], "nowhere is not a run folder"),
    (["{run}", "--mitigation", "nome"], "--mitigation nome is not one of: none"),
    (["{run}", "--step", "9"], "has no credit file of step 9, only of 1 to 3"),
    (["{run}", "--epsilon", "1"], "--epsilon belongs to"),
    (["{run}", "--speed", "1"], "unknown argument --speed")])
def test_wrong_commands_of_the_preview(recorded, argv, said):
    with pytest.raises(UserError, match=said):
        preview.main([argument.format(run=recorded) for argument in argv])


def test_the_runs_own_mitigation_without_its_state(recorded, capsys):
    preview.main([str(recorded), "--show", "0"])
    printed = capsys.readouterr().out
    assert "; learned_importance" in printed and "as it is at the start of a run" in printed


def test_answers_that_a_run_dropped_are_dropped_here_too(tmp_path, capsys):
    flags = [*SHORT, "--drop_unfinished", "--steps", "1", "--mitigation", "inverse_logprob"]
    train.main([*flags, "--max_new_tokens", "30", "--out", str(tmp_path / "x")])
    settings = make_settings({"config": tmp_path / "x/config.json"})
    found = preview.Recorded(tmp_path / "x", 1, settings)
    rollouts = found.rollouts()
    weight, _ = found.weights(rollouts)
    with np.load(tmp_path / "x/credit/step_000001.npz") as credit:
        np.testing.assert_allclose(weight[rollouts.mask].numpy(), credit["weight"], rtol=1e-5)
    train.main([*flags, "--max_new_tokens", "5", "--out", str(tmp_path / "y")])
    preview.main([str(tmp_path / "y")])  # nothing was finished
    assert "40 tokens" in capsys.readouterr().out


def test_weights_stand_behind_their_tokens_without_colour(recorded, capsys):
    preview.main([str(recorded), "--mitigation", "none"])
    printed = capsys.readouterr().out
    assert "·1.00" in printed and "·0.99" not in printed


def test_the_choice_of_answers_begins_where_they_differ(policy):
    rollouts = spoken(policy)
    assert rollouts.reward.tolist() == pytest.approx([1.1, 0.1, 0.0, 0.0, 0.0, 1.1])
    assert preview.choose_answers(rollouts, 9) == [0, 2, 5, 3]
    assert preview.choose_answers(rollouts, 1) == [0]
    reward = torch.tensor([0.1, 0.1, 0.1, 0.0, 0.0, 1.1])
    alike = dataclasses.replace(rollouts, scores={"reward": reward})
    assert preview.choose_answers(alike, 9) == [5, 3, 0]
