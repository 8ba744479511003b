"""Ideas and tasks that are wrong: Python's own words, or a sentence on what they returned; and no
run that is in the way of the next attempt."""
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mitigations
from conftest import refusal
from small import StateIdea, hand_made, put_in
from lab.countdown import Task
from lab.engine.methods import checked_credit, make, metrics_of
from lab.harness.settings import make_settings, read_flags
from lab.harness.tasks import score_again
from lab_runs import SHORT, run
from runs import arrays, lines
from lab.tools.idea import arms_of

ONE_STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--eval_every", "0"]


def settings_of(argv):
    return make_settings(read_flags(argv))


class Even:
    """The same weight for all, and whatever metrics."""
    def __init__(self, policy):
        pass

    def __call__(self, rollouts, policy):
        return torch.ones_like(rollouts.entropy)


def with_metrics(metrics):
    return type("WithMetrics", (Even,), {"metrics": metrics, "__module__": __name__})


@pytest.fixture
def said_of(monkeypatch, tmp_path):
    """What a step with this weighting ends with; nothing is left of the run."""
    def said_of(idea):
        put_in(monkeypatch, idea, "mine")
        said = run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
        assert list(tmp_path.iterdir()) == []
        return said
    return said_of


def test_an_idea_that_raises_is_told_by_python_and_leaves_no_folder(monkeypatch, tmp_path):
    put_in(monkeypatch, lambda rollouts: 1 + rollouts.logprob, "mine")
    with pytest.raises(AttributeError, match="has no attribute 'logprob'"):
        run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made_of", [
    lambda x: None, lambda x: x + 1j, lambda x: x.to("meta"), lambda x: x.to_sparse()])
def test_what_an_idea_returns_is_checked(rollouts, made_of):
    """And told with the place of the function."""
    def idea(rollouts, policy):
        return made_of(rollouts.entropy)

    said = refusal(checked_credit, idea, "the weighting mine", rollouts)
    line, shape = idea.__code__.co_firstlineno, tuple(rollouts.mask.shape)
    assert said.startswith(f"the weighting mine (test_own_code.py:{line}) should "
                           f"return a tensor (B, T) = {shape}, got ")
    assert len(said) < 400


def test_what_an_idea_changes_in_place_is_its_own_copy(rollouts):
    """Also hidden states, which are computed once for all methods."""
    def vandal(batch, policy):
        batch.hidden.zero_()
        batch.texts.clear()
        return torch.ones(batch.mask.shape)

    hidden, texts = rollouts.hidden.clone(), [*rollouts.texts]
    checked_credit(vandal, "mine", rollouts)
    assert hidden.any() and torch.equal(rollouts.hidden, hidden) and rollouts.texts == texts


def test_metrics_take_no_place_of_the_loops(said_of):
    said = said_of(with_metrics({"loss": 1.0}))
    assert "a weighting or an advantage has a metric loss, but " in said


def test_metrics_of_numpy_and_torch_are_numbers_and_null_where_undefined(monkeypatch, tmp_path):
    metrics = {"b": float("inf"), "c": 10 ** 20, "d": np.float32(0.5), "e": torch.tensor(2.0),
               "f": None}
    put_in(monkeypatch, with_metrics(metrics), "mine")
    run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine")
    [line] = lines(tmp_path / "x/metrics.jsonl")
    assert [line[name] for name in metrics] == [None, 10 ** 20, 0.5, 2.0, None]


class TakesNothing:
    def __call__(self, rollouts, policy):
        pass


class CannotBeCalled:
    def __init__(self, policy):
        pass


@pytest.mark.parametrize("method, wanted", [
    (lambda: None, r"\(rollouts, \*, flags\): too many positional arguments"),
    (lambda rollouts, policy: None,
     r"\(rollouts, \*, flags\): missing a required argument: 'policy'"),
    (TakesNothing, r"\(self, policy, \*, flags\) in __init__: "),
    (CannotBeCalled, r"\(self, rollouts, policy\) in __call__: ")])
def test_a_method_that_takes_other_arguments_is_told_with_its_place(method, wanted):
    said = refusal(make, method, {}, None)
    assert re.match(rf"{method.__name__} \(lab/tests/harness/test_own_code.py:\d+\) should "
                    "take the arguments " + wanted, said), said


@pytest.mark.parametrize("metrics", [[1], None, {"x": torch.ones(3)}, {"x": np.ones(2)}])
def test_metrics_that_are_no_numbers_by_name_are_told(metrics):
    said = refusal(metrics_of, with_metrics(metrics)(None))
    assert re.match(r"metrics of WithMetrics \(.*\) should be a dict with a number for each name",
                    said)


def test_a_state_without_a_way_back_is_refused(said_of, monkeypatch):
    """A resumed run would forget it."""
    monkeypatch.delattr(StateIdea, "load_state_dict")
    assert "needs both state_dict and load_state_dict" in said_of(
        type("Idea", (StateIdea,), {"__module__": __name__}))


@pytest.mark.parametrize("state, words", [
    ({"count": 7}, "count is 7"), (None, "it is None"), ({1: torch.ones(1)}, "1 is tensor"),
    ({"a": torch.ones(1).to_sparse()}, "a is tensor")])
def test_a_state_that_is_no_tensor_is_refused_before_the_first_step(said_of, state, words):
    """At the first checkpoint, the steps up to there would be lost."""
    said = said_of(type("Idea", (StateIdea,), {
        "state_dict": lambda self: state, "__module__": __name__}))
    assert "mine (" in said and f"dense tensors by name from state_dict, but {words}" in said


def test_a_state_may_be_a_count_and_its_tensors_may_share_their_memory(monkeypatch, tmp_path):
    class Counting(StateIdea):
        def state_dict(self):
            return {"mean": self.mean, "view": self.mean.view(1, 1), "count": torch.tensor(7),
                    "is_new": torch.tensor(True)}

    put_in(monkeypatch, Counting, "mine")
    run(*SHORT, "--steps", "1", "--out", tmp_path / "x", "--mitigation", "mine")
    state = arrays(tmp_path / "x/checkpoints/step_000001/trainer/state.safetensors")
    assert (state["mitigation.count"], state["mitigation.is_new"]) == (7, 1)
    assert state["mitigation.view"][0] == state["mitigation.mean"] > 0


@pytest.fixture
def trained_with(tmp_path, monkeypatch):
    """Train with a task that has these methods, and the others of Countdown; returns what was
    said."""
    def trained_with(*flags, expect=1, **methods):
        for name, method in methods.items():
            monkeypatch.setattr(Task, name, method)
        return run(*ONE_STEP, "--eval_every", "1", "--eval_tasks", "4", "--out",
                   tmp_path / "runs/x", *flags, expect=expect).stderr
    return trained_with


class Remembering:
    """A reward of 1 for a text that is new to it."""
    seen: set[str] = set()

    def score(self, problem, text):
        is_new, self.seen = text not in self.seen, self.seen | {text}
        return {"reward": float(is_new)}


def test_a_reward_that_depends_on_more_than_the_answer_is_told(capsys):
    """Two problems with two answers each, which are scored again: also the second answer."""
    task = Remembering()
    batch = hand_made([[True]] * 4, group=torch.tensor([0, 0, 1, 1]), answers=list("abcd"),
                      problems=[{"target": 1}, {"target": 2}],
                      scores={"reward": torch.tensor([task.score({}, text)["reward"]
                                                      for text in "abcd"])})
    score_again(batch, task, "mine")
    assert "--task mine: the same answer was scored twice and earned 1 and 0" in (
        capsys.readouterr().out)
    known_first = replace(batch, scores={"reward": torch.tensor([0.0, 1, 0, 0])})
    score_again(known_first, task, "mine")
    assert "earned 1 and 0" in capsys.readouterr().out
    score_again(replace(batch, scores={"reward": torch.zeros(4)}), task, "mine")
    assert not capsys.readouterr().out


def test_a_reward_that_changes_later_is_told_in_its_step(capsys):
    """Of a later step the first answer and one more are scored again."""
    batch = hand_made([[True]] * 4, group=torch.tensor([0, 0, 1, 1]), answers=list("abcd"),
                      scores={"reward": torch.zeros(4)}, step=6)
    for worth, agree in (("a", False), ("b", True), ("c", False), ("d", True)):
        task = SimpleNamespace(score=lambda problem, text: {"reward": float(text == worth)})
        assert score_again(batch, task, "mine", all_rows=False) is agree
        assert ("scored twice" in capsys.readouterr().out) is not agree


def test_answers_are_scored_again_in_every_step_until_they_differ(monkeypatch, tmp_path):
    asked = []

    def again(rollouts, *_, all_rows):
        asked.append((rollouts.step, all_rows))
        return rollouts.step < 2

    monkeypatch.setattr("lab.harness.run.score_again", again)
    run(*SHORT, "--out", tmp_path / "x")
    assert asked == [(1, True), (2, False)]


def leaks_in(*steps):
    """A method that returns a held-out problem in these steps."""
    drawn = Task.training_problems

    def training_problems(task, seed, step, count):
        is_leak = step in steps
        return task.held_out_problems(1) * count if is_leak else drawn(task, seed, step, count)
    return training_problems


def test_a_held_out_problem_in_the_first_step_leaves_no_run(trained_with, tmp_path):
    said = trained_with(training_problems=leaks_in(1))
    assert "in step 1, but held_out_problems has it" in said and "\n" not in said
    assert not any(tmp_path.glob("runs/*"))


def test_a_held_out_problem_in_a_later_step_ends_the_run(trained_with, tmp_path):
    """The record up to there stays. Resumed, it ends there again."""
    said = trained_with("--steps", "4", "--checkpoint_every", "1", "--eval_every", "4",
                        training_problems=leaks_in(3))
    assert re.search("training_problems returns .* in step 3, but held_out_problems has it", said)
    assert run("--resume", tmp_path / "runs/x", expect=1).stderr == said
    assert [line["step"] for line in lines(tmp_path / "runs/x/metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("methods", [
    {"training_problems": leaks_in(1, 2)}, {"held_out_problems": lambda task, count: []}])
def test_a_run_that_evaluates_nothing_needs_no_held_out_problems(trained_with, tmp_path, methods):
    """And may train on any problem, after its first checkpoint, too."""
    trained_with("--steps", "2", "--eval_every", "0", "--eval_tasks", "500",
                 "--checkpoint_every", "1", expect=0, **methods)
    assert len(lines(tmp_path / "runs/x/metrics.jsonl")) == 2


def test_a_forgotten_decorator_is_named(monkeypatch):
    """A function in mitigations.py that is no choice; and one that is nowhere."""
    def my_idea(rollouts):
        return rollouts.entropy

    my_idea.__module__ = "mitigations"
    monkeypatch.setattr(mitigations, "my_idea", my_idea, raising=False)
    for axis in ("mitigation", "advantage"):
        said = refusal(settings_of, [f"--{axis}", "my_idea"])
        assert "The function my_idea (lab/tests/harness/test_own_code.py:" in said
        assert said.endswith("has no @mitigation or @advantage above it.")
    assert "The function my_idea (" in refusal(arms_of, "my_idea", {})
    assert "The function" not in refusal(settings_of, ["--mitigation", "my_other_idea"])


def test_an_argument_before_the_star_is_no_flag(monkeypatch):
    def no_star(rollouts, strength: float = 1.0):
        return strength * rollouts.entropy

    put_in(monkeypatch, no_star, "no_star")
    said = refusal(settings_of, ["--mitigation", "no_star", "--strength", "2"])
    assert said == "unknown argument --strength (--help all lists the flags)"


def test_a_run_says_that_weights_were_not_rescaled(tmp_path, monkeypatch):
    put_in(monkeypatch, lambda rollouts: torch.zeros_like(rollouts.entropy), "zeros")
    printed = run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "zeros").stdout
    [line] = lines(tmp_path / "x/metrics.jsonl")
    assert line["weight_note"] in printed and f"no update: {line['skipped']}" in printed
