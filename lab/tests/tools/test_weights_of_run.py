"""Weights seen on recorded tokens: the same as training would have made, and nothing written."""

import numpy as np
import pytest

from lab.tools import idea
from lab.analysis import weights as weights_of_run
import lab.run as train
from conftest import credit_columns, refusal, write_log
from lab.harness.settings import make_settings
from runs import SHORT, everything


@pytest.mark.parametrize("flags, said", [
    ("outcome_conditional --think_discount 1.0", "[1.00]"), ("entropy_ratio", "answer ")])
def test_weightings_are_seen_on_recorded_tokens_and_nothing_is_written(
        recorded, flags, said, capsys):
    before = everything(recorded)
    idea.main([*flags.split(), "--look", str(recorded)])
    printed = capsys.readouterr().out
    assert "run has 8 answers and " in printed and said in printed
    assert printed.count("\nanswer ") == 4
    assert "of all weight" in printed
    assert before == everything(recorded)


def test_what_is_seen_is_what_training_would_have_done(recorded, tmp_path):
    """The weights that are shown against those of a run that samples the same batch with that
    weighting. Answers that the run dropped are dropped here, too."""
    train.train_beyond([*SHORT, "--max_new_tokens", "40", "--drop_unfinished", "--steps",
                        "1", "--mitigation", "inverse_logprob", "--out", str(tmp_path / "x")])
    settings = make_settings({"config": recorded / "config.json", "mitigation": "inverse_logprob"})
    rollouts, weight, _ = weights_of_run.weighed(recorded, 1, settings)
    assert not rollouts.finished.all()
    with np.load(tmp_path / "x/credit/step_000001.npz") as credit:
        np.testing.assert_allclose(weight[rollouts.mask], credit["weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [
    {"advantage": "trl_group_dapo"}, {"notes": ["From elsewhere."]}])
def test_a_run_without_its_task_shows_what_its_credit_files_tell(tmp_path, config, capsys):
    folder = write_log(tmp_path / "x", {1: credit_columns([3, 2], [0, 0])},
                       {"task": None, **config})
    idea.main(["entropy_weighted", "--look", str(folder)])
    printed = capsys.readouterr().out
    assert "x has 2 answers and 5 tokens. The weights of entropy_weighted" in printed
    for name, said in (("oracle", "oracle keeps a state or samples answers, which a record does"),
                       ("attention_credit", "hidden and attention need a model, and this batch ")):
        assert said in refusal(idea.main, [name, "--look", str(folder)])
    (folder / "credit/step_000001.npz").unlink()
    assert "x has no credit files yet" in refusal(idea.main, ["by_kind", "--look", str(folder)])


def test_a_step_of_which_nothing_was_finished(tmp_path, capsys):
    train.train_beyond([*SHORT, "--drop_unfinished", "--steps", "1", "--max_new_tokens", "5",
                "--out", str(tmp_path / "x")])
    idea.main(["entropy_ratio", "--look", str(tmp_path / "x")])
    assert "40 tokens" in capsys.readouterr().out
