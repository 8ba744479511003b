"""An excerpt of a run says of its steps what the run says."""
import numpy as np
import pytest
import torch
from conftest import refusal

import analyze
from engine.tokens import load_tokenizer
from harness.record import credit_steps, read_credit
from research.earlier import excerpt
from tools import follow, preview


@pytest.fixture(scope="module")
def smaller(recorded, tmp_path_factory):
    out = tmp_path_factory.mktemp("excerpt") / "few"
    excerpt.main([str(recorded), str(out), "--model", "a model"])
    return out


def test_every_token_is_spelled_and_numbered_again_and_all_else_is_as_it_was(recorded, smaller):
    assert credit_steps(smaller) == [1, 3]
    mine, theirs = (read_credit(run, 3, load_tokenizer(run)) for run in (smaller, recorded))
    assert mine.texts == theirs.texts and mine.answers == theirs.answers
    for name in ("mask", "log_prob", "entropy", "advantage", "section", "kind", "reward"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    known = load_tokenizer(smaller).get_vocab_size()
    assert mine.ids.max() < known < load_tokenizer(recorded).get_vocab_size()
    prompts = [[load_tokenizer(run).decode(ids, skip_special_tokens=False)
                for ids in rollouts.prompt_ids]
               for run, rollouts in ((smaller, mine), (recorded, theirs))]
    assert prompts[0] == prompts[1] and "make" in prompts[0][0]


@pytest.mark.usefixtures("undrawn")
def test_it_is_analysed_and_previewed(smaller, capsys):
    analyze.main([str(smaller)])
    preview.main([str(smaller), "--mitigation", "entropy_weighted", "--show", "1"])
    printed = capsys.readouterr().out
    assert "a model" in printed and "answer " in printed


def test_the_model_is_not_asked_about_tokens_that_it_numbers_otherwise(recorded, tmp_path):
    """The model that sampled step 1 is there, but the excerpt's numbers mean other words to it."""
    out = tmp_path / "x"
    excerpt.main([str(recorded), str(out), "--steps", "1"])
    said = refusal(preview.main, [str(out), "--mitigation", "attention_credit"])
    assert "so another model sampled step 1, or its tokens have other numbers there" in said
    followed = [str(out), "--step", "1", "--answer", "0", "--token", "0"]
    assert said == refusal(follow.main, [*followed, "--moved"])
    assert "--moved needs --token" in refusal(follow.main, [*followed[:-2], "--moved"])


def test_steps_that_are_not_there_and_folders_that_are(recorded, tmp_path):
    out = tmp_path / "out"
    assert "no credit file of step 9" in refusal(
        excerpt.main, [str(recorded), str(out), "--steps", "1,9"])
    assert not out.exists()
    out.mkdir()
    assert "exists already" in refusal(excerpt.main, [str(recorded), str(out)])


def test_a_tokenizer_keeps_the_special_ones_that_occur():
    words = {"a": 0, "b": 1, "c": 2}
    added = [{"id": 3, "content": "<x>"}, {"id": 4, "content": "<y>"}]
    tokenizer = {"added_tokens": added, "model": {"vocab": words, "merges": ["a b"]}}
    found = excerpt.reduced_tokenizer(tokenizer, np.array([1, 4]).tolist())
    assert found["model"] == {"vocab": {"b": 0, "<y>": 1}, "merges": []}
    assert found["added_tokens"] == [{"id": 1, "content": "<y>"}]
