"""What is measured of a whole answer: the numbers that follow has for each of its tokens."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import refusal

import lab.analysis.program as analyze
from lab.analysis.kept_credit import file_of, keep, kept_answers
from lab.analysis.run_folders import read_run
from lab.analysis.token_table import read_step
from lab.engine.tokens import load_tokenizer
from lab.harness.read_record import read_credit
from lab.tools import follow
from lab.tools.helpers import token


def measure(run, step, b, k=10):
    """Measure an answer, keep that, and make the page."""
    follow.main([str(run), "--step", str(step), "--answer", str(b), "--credit", str(k), "--keep"])
    analyze.main([str(run)])


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def an_answer(run, step):
    """One that the step trained on, with tokens before and after those that have a gradient."""
    batch = read_credit(run, step, load_tokenizer(run))
    trained = batch.finished & (batch.advantage[:, 0] != 0)
    return int(trained.nonzero()[0])


def answers_on_page(run):
    data = (run / "analysis/report.html").read_text().split('id="data">')[1]
    return json.loads(data.split("</script>")[0])["answers"]


@pytest.mark.usefixtures("undrawn")
def test_of_an_answer_that_was_left_out_the_credit_is_measured(run):
    b = int((~read_credit(run, 1, load_tokenizer(run)).finished).nonzero()[0])
    measure(run, 1, b)
    [kept] = kept_answers(run).values()
    assert len(kept["credit"]) == len(kept["token_id"])


def test_v_after_a_token_is_v_before_the_next_one(recorded, monkeypatch):
    """Each beginning is continued once, and after the last token V is the reward."""
    asked = []

    def given(policy, rollouts, prefixes, k, progress):
        asked.append(prefixes)
        means = torch.arange(len(prefixes)).float()
        return means[:, None].repeat(1, k), {}

    monkeypatch.setattr(token, "continuation_rewards", given)
    b, model = an_answer(recorded, 1), read_run(recorded)["config"]["model"]
    length = int(read_credit(recorded, 1, load_tokenizer(recorded)).length[b])
    found = token.measure_credits(recorded, model, 1, b, range(length), 10, seed=0)
    [prefixes] = asked
    assert [len(ids) for _, ids in prefixes] == list(range(length + 1))
    assert [(one.before, one.after) for one in found] == [(t, t + 1) for t in range(length)]
    # At the last token the value after it has no error. Before it 10 rewards are length - 1, beside
    # two of 0 and two of length.
    last = np.array([length - 1.0] * 10 + [0, length] * 2)
    assert found[-1].interval[1] - found[-1].interval[0] == pytest.approx(
        2 * 1.96 * (last.var() / 14) ** 0.5)


@pytest.mark.usefixtures("undrawn")
def test_it_is_measured_once_and_shown_by_both_programs(run, capsys, monkeypatch):
    b = an_answer(run, 3)
    measure(run, 3, b)
    assert f"kept in {file_of(run, 3, b)}" in capsys.readouterr().out
    [kept] = kept_answers(run).values()
    answers = answers_on_page(run)
    [shown] = [one for one in answers if (one["step"], one["episode"]) == (3, b)]
    assert shown["values"]["credit"] == pytest.approx(kept["credit"], rel=1e-3)
    width = kept["high"][0] - kept["low"][0]  # of a normal 95% interval
    assert shown["values"]["credit's error"][0] == pytest.approx(width / (2 * 1.96), rel=1e-3)
    others = [one for one in answers if one is not shown]
    assert {value for one in others for value in one["values"]["credit"]} == {None}

    follow.main([str(run), "--step", "3", "--answer", str(b), "--token", "1"])
    printed = " ".join(capsys.readouterr().out.split())
    for name in ("others", "credit in words"):
        text = re.sub(r" (qwen2_model|lab/credit/monte_carlo)\.py: \S+", "", printed)
        assert " ".join(kept[name][1].split()) in text
    assert "How much did it change the expected reward?" not in printed

    monkeypatch.setattr(token, "measure_credits", None)  # it is not measured again
    measure(run, 3, b)
    with pytest.raises(TypeError):  # but with more continuations it is
        measure(run, 3, b, k=11)


@pytest.mark.usefixtures("undrawn")
def test_an_answer_of_another_run_is_not_shown(run):
    """The run was made again since, and the answer has another first token."""
    tokens = read_step(run, 1).tokens_of(0)["token_id"].tolist()
    for first, is_shown in ((tokens[0], True), (tokens[0] + 1, False)):
        keep(run, measured_by_hand([first, *tokens[1:]]))
        analyze.main([str(run)])
        answers = answers_on_page(run)
        assert answers and any("others" in one["account"] for one in answers) == is_shown


def measured_by_hand(tokens):
    """What is kept of answer 0 of step 1."""
    zeros, words = [0.0] * len(tokens), ["x"] * len(tokens)
    return {"step": 1, "answer": 0, "continuations": 10, "token_id": tokens, "credit": zeros,
            "low": zeros, "high": zeros, "credit in words": words, "others": words}


@pytest.mark.parametrize("name, value", [
    ("credit", ["x"]), ("credit", 0.5), ("step", "1"), ("others", [])])
def test_a_damaged_file_is_named(run, name, value):
    kept = measured_by_hand([1])
    path = file_of(run, 1, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept))
    assert kept_answers(run) == {(1, 0): kept}
    path.write_text(json.dumps(kept | {name: value}))
    assert f"{path} is damaged, because its " in refusal(kept_answers, run)
