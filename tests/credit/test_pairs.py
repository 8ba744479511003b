"""Preference pairs of a file: read, checked, laid out as a batch, trained on, made from a run."""
import json
import shutil
from types import SimpleNamespace

import pytest

import train
from conftest import SPOKEN, refusal
from countdown_task import Problem
from credit.pairs import KEYS, GivenPairs
from engine.tokens import load_tokenizer
from harness.read_record import read_credit
from runs import SHORT, assert_same_run, lines
from tools import pairs as tool

GOOD, BAD, *_ = SPOKEN
UNFINISHED = " hmm. first 3 * 5 = 15"
PAIR = {"problem": "3 5 7 make 15", "chosen": GOOD, "rejected": BAD}
OTHER = {"problem": "2 4 6 2", "chosen": UNFINISHED, "rejected": GOOD}  # against our reward


def written(path, *pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def test_a_step_takes_pairs_of_the_file(policy, tmp_path):
    """Two answers to each problem, the better one first; the next step takes others."""
    run, asked = SimpleNamespace(step=1), [None] * 8
    pairs = GivenPairs(written(tmp_path / "pairs.jsonl", PAIR, OTHER), policy, run)
    batch = policy.score(pairs.sample(asked, 2, seed=0))
    texts = {Problem((3, 5, 7), 15): [GOOD, BAD], Problem((2, 4, 6), 2): [UNFINISHED, GOOD]}
    assert set(batch.problems) == set(texts) and batch.group.tolist() == [i // 2 for i in range(16)]
    for row in range(16):
        problem = batch.problems[batch.group[row]]
        assert batch.answers[row] == texts[problem][row % 2]
        assert bool(batch.finished[row]) == (batch.answers[row] != UNFINISHED)
        prompt = policy.tokenizer.encode(policy.task.prompt_for(problem)).ids
        assert batch.prompt_ids[row // 2] == prompt
    assert pairs.sample(asked, 2, seed=1).problems == batch.problems
    run.step = 2
    assert pairs.sample(asked, 2, seed=0).problems != batch.problems


@pytest.mark.parametrize("line, said", [
    ("no json", 'line 2: expected {"problem": "...", "chosen": "...", "rejected": "..."}, got'),
    (json.dumps({**PAIR, "rejected": " "}), "line 2: expected"),
    (json.dumps({**PAIR, "problem": "3 x 7"}), "line 2: 'x' is not a whole positive number"),
    (json.dumps({**PAIR, "problem": "3 5 70000 15"}), "line 2: the tokenizer cannot spell the"),
    (json.dumps({**PAIR, "chosen": "Zebra"}), "line 2: the tokenizer cannot spell an answer"),
    (json.dumps({**PAIR, "chosen": GOOD * 40}), "tokens, and the model takes 1024")])
def test_a_bad_line_is_named(policy, tmp_path, line, said):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n" + line + "\n")
    assert said in refusal(GivenPairs, str(path), policy, None)


def test_files_that_hold_no_pairs(policy, tmp_path):
    of_another = SimpleNamespace(task=None, settings=SimpleNamespace(task="some_task"))
    for name, asked, said in (
            (written(tmp_path / "empty.jsonl"), policy, "holds no pairs"),
            ("nowhere.jsonl", policy, "cannot read nowhere.jsonl: No such file"),
            ("nowhere.jsonl", of_another, "--task some_task has none")):
        assert said in refusal(GivenPairs, name, asked, None)


def test_training_on_pairs_goes_on_as_if_never_stopped(tmp_path):
    """The better answer gains on the worse one, whatever the rewards; what pulls is on record."""
    flags = [flag for flag in SHORT if flag not in ("--answers", "4")]
    path = written(tmp_path / "pairs.jsonl", PAIR, OTHER)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main([*flags, "--loss", "dpo", "--pairs", path, "--learning_rate", "1e-3",
                "--out", str(whole)])
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints/step_000003")
    train.main(["--resume", str(stopped)])
    assert_same_run(whole, stopped)
    metrics = lines(whole / "metrics.jsonl")
    assert metrics[-1]["dpo_loss"] < metrics[0]["dpo_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert metrics[-1]["pairs"] == 2 and metrics[-1]["pairs_in_order"] == 1
    credit = read_credit(whole, 1, load_tokenizer(whole))
    assert credit.advantage[:, 0].sign().tolist() == [1, -1, 1, -1]
    assert "so it sampled no answers" in refusal(tool.main, [str(whole)])
    other = {"mitigation": "none", "imported": []}  # what it was asked only its own trainer knows
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert "is a run of another program" in refusal(tool.main, [str(tmp_path)])


def test_pairs_of_a_run_can_be_trained_on(policy, tmp_path, capsys):
    """The best and the worst answer to problems of the run, in the form that --pairs reads."""
    train.main([*SHORT, "--steps", "2", "--questions", "4", "--out", str(tmp_path / "x")])
    tool.main([str(tmp_path / "x")])
    path = tmp_path / "x/pairs.jsonl"
    pairs, trained = lines(path), []
    assert f"{len(pairs)} pairs are written to {path}" in capsys.readouterr().out and len(pairs) > 1
    for step in (1, 2):
        trained += map(policy.task.show, policy.task.training_problems(0, step, 4))
    for pair in pairs:
        problem = policy.task.read(pair["problem"].split())
        better, worse = (policy.task.score(problem, pair[key])["reward"] for key in KEYS[1:])
        assert pair["problem"] in trained and better > worse
    assert len(GivenPairs(str(path), policy, None).pairs) == len(pairs)
