"""Ideas and tasks that are wrong: one sentence that begins with their file and line, and no run
that is in the way of the next attempt."""
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import put_in
from engine.choices import ADVANTAGES
from harness.files import path_from_here
from runs import SHORT, lines, run
from test_own_task import TASK

HERE = re.escape(path_from_here(Path(__file__)))
ONE_STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--eval_every", "0"]


def misspelled(rollouts):
    return 1 + rollouts.logprob


def undefined(rollouts):
    return (rollouts.log_prob - rollouts.log_prob) / 0


def changes_the_batch(rollouts):
    return rollouts.entropy.mul_(2)


def changes_the_scores(rollouts):
    rollouts.scores["reward"] = torch.zeros(len(rollouts.reward))
    return torch.ones_like(rollouts.entropy)


class Even:
    """The same weight for all, and whatever metrics."""
    def __init__(self, policy):
        pass

    def __call__(self, rollouts, policy):
        return torch.ones_like(rollouts.entropy)


class NotMade(Even):
    def __init__(self, policy):
        self.layers = policy.layers


class Computed(Even):
    @property
    def metrics(self):
        return {"ratio": 1 / 0}


def with_metrics(metrics):
    return type("WithMetrics", (Even,), {"metrics": metrics, "__module__": __name__})


def giving(values):
    """An idea that returns what `values` makes of the batch's entropy."""
    return lambda rollouts: values(rollouts.entropy)


@pytest.mark.parametrize("idea, words", [
    (misspelled, r'"return 1 \+ rollouts.logprob": the weighting mine raises AttributeError: .*'
     r"no attribute 'logprob', did you mean log_prob\?$"),
    (lambda: 1.0, "the weighting mine raises TypeError: .* takes 0 positional"),
    (undefined, "the weighting mine is not finite at .* The last step on record is 0"),
    (changes_the_batch, "the weighting mine changed a tensor of the batch"),
    (changes_the_scores, "the weighting mine changed a tensor of the batch"),
    (NotMade, '"self.layers = policy.layers": mine raises AttributeError'),
    (Computed, '"return {"ratio": 1 / 0}": the weighting mine raises ZeroDivisionError'),
    *[(giving(values), "the weighting mine should return a tensor .B, T. = .8, 48. of real")
      for values in (lambda x: 1.0, lambda x: x[:, 0], lambda x: x.T, lambda x: x + 1j,
                     lambda x: x.to("meta"),
                     lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]))]])
def test_a_wrong_idea_is_told_its_own_file_and_line(monkeypatch, tmp_path, idea, words):
    put_in(monkeypatch, idea, "mine")
    said = run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    said = said[said.index("train.py: "):]  # PyTorch warns of nested tensors
    assert re.match(rf"train.py: {HERE}, line \d+.*{words}", said), said
    assert "\n" not in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metrics, words", [
    *[(metrics, "the weighting mine should return numbers and texts by name as its metrics")
      for metrics in (None, {"a": [1]}, {1: 2.0})],
    *[({name: 1.0}, f"the metric {name} of a weighting or an advantage needs another name")
      for name in ("step", "loss", "weight_max")]])
def test_metrics_are_numbers_and_take_no_place_of_the_loops(monkeypatch, tmp_path, metrics, words):
    put_in(monkeypatch, with_metrics(metrics), "mine")
    said = run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert words in said and list(tmp_path.iterdir()) == []


def test_the_line_is_the_innermost_of_that_file(monkeypatch, tmp_path):
    """Not the call of a helper in the same file, nor a line of PyTorch below."""
    def helper(rollouts):
        return rollouts.entropy.view(-7)  # here

    put_in(monkeypatch, lambda rollouts: helper(rollouts), "mine")
    said = run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    [number] = [number for number, line in enumerate(Path(__file__).read_text().split("\n"), 1)
                if line.endswith("# here")]
    assert f', line {number}, "return rollouts.entropy.view(-7)' in said


def test_an_advantage_that_asks_for_the_advantage_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setitem(ADVANTAGES, "mine", lambda rollouts: 2 * rollouts.advantage)
    said = run(*ONE_STEP, "--out", tmp_path / "x", "--advantage", "mine", expect=1).stderr
    assert re.match(rf"train.py: {HERE}, .*rollouts.advantage.*the advantage mine raises", said)
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_plain_numbers_and_null_where_no_float_can_hold_them(monkeypatch, tmp_path):
    metrics = {"a": 10 ** 400, "b": float("inf"), "c": 10 ** 20, "d": np.float32(0.5),
               "e": torch.tensor(2.0), "f": "a text"}
    put_in(monkeypatch, with_metrics(metrics), "mine")
    run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine")
    [line] = lines(tmp_path / "x/metrics.jsonl")
    assert [line[name] for name in metrics] == [None, None, 10 ** 20, 0.5, 2.0, "a text"]


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """Train with the task of tests/test_own_task.py after a change; returns what was said, and the
    path of the task."""
    def train_on(old, new, *flags):
        path = tmp_path / "changed_task.py"
        assert old in TASK
        path.write_text(TASK.replace(old, new))
        said = run(*ONE_STEP, "--eval_every", "1", "--eval_tasks", "4", "--task", "changed_task",
                   "--top", "20", "--out", tmp_path / "runs/x", *flags, expect=1).stderr
        assert "\n" not in said
        return said, path

    (tmp_path / "countdown_task.py").touch()  # the default task, imported already
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield train_on
    sys.modules.pop("changed_task", None)


DRAWN = "[Question(2 * rng.randint(1, self.top // 2)) for _ in range(count)]"
SCORED = '{"reward": right + short, "format": short, "answer": right, "reasoning": 0.5}'


@pytest.mark.parametrize("old, new, words", [
    ("import random", "import randon", '"import randon": --task changed_task raises Mod'),
    ("def show(", "def show_it(", "the Task of changed_task raises AttributeError: .*'show'"),
    ("    reward = ", "    def __post_init__(self):\n        self.x = self.y\n    reward = ",
     '"self.x = self.y": the Task of changed_task raises AttributeError'),
    ('reward = "next number"', "reward = 3", "reward should return a line of text, got 3"),
    (DRAWN, f"({DRAWN[1:-1]})", r"training_problems\(0, 1, .* should return a list of as many"),
    ("in range(count)]", "in range(count - 1)]", r"training_problems\(.* as many problems as"),
    ("[:count]", "[:count + 1]", r"held_out_problems\(1\) should .* not more .* \(2 entries\)"),
    ("[:count]", "[:0]", r"held_out_problems\(1\) should return a list .* at least one"),
    ("[Question(self.top)]", "Question(self.top)", "extreme_problems.. should return a list"),
    ("Question(2 * rng", "Question(1 + 0 * rng", "training_problems gives after 1 in step 1"),
    ('return f"after {problem.start}"', "return problem.start", "show.* should return a text, got"),
    ("{problem.start + 1}", "{problem.end}", r"\.end.* score\(Question.* raises AttributeError"),
    (SCORED, SCORED.replace("0.5", "short / (1 - right) ** 9 - 10.0 ** 40"), "finite numbers"),
    ("return sections, [", "return sections[1:], [", "label.* should return two lists")])
def test_a_wrong_task_is_told_its_own_file_and_line(own_task, tmp_path, old, new, words):
    said, path = own_task(old, new)
    assert re.match(rf"train.py: {re.escape(str(path))}, line \d+.*{words}", said), said
    assert not any(tmp_path.glob("runs/*"))


def test_a_held_out_problem_in_a_later_step_ends_the_run(own_task, tmp_path):
    """The record up to there stays. Resumed, it ends there again."""
    said, _ = own_task("Question(2 * rng", "Question((2 if step < 3 else 3) + 0 * rng",
                       "--steps", "4", "--checkpoint_every", "1", "--eval_every", "4")
    assert "training_problems gives after 3 in step 3, which is among the held_out" in said
    assert run("--resume", tmp_path / "runs/x", expect=1).stderr == said
    assert [line["step"] for line in lines(tmp_path / "runs/x/metrics.jsonl")] == [1, 2]
