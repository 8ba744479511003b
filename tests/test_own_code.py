"""Ideas and tasks that are wrong: Python's own words, or a sentence on what they returned; and no
run that is in the way of the next attempt."""
import asyncio
import os
import re
import sys

import numpy as np
import pytest
import torch

import train
from conftest import ROOT, StateIdea, put_in, refusal
from engine.errors import UserError
from harness.settings import Share
from harness.own_code import checked_credit
from harness.screen import sentence_about
from runs import SHORT, lines, run

ONE_STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--eval_every", "0"]


def misspelled(rollouts):
    return 1 + rollouts.logprob


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
    put_in(monkeypatch, misspelled, "mine")
    with pytest.raises(AttributeError, match="has no attribute 'logprob'"):
        run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made_of", [
    lambda x: 1.0, lambda x: x[:, 0], lambda x: x.T, lambda x: x + 1j, lambda x: x.to("meta"),
    lambda x: [x.tolist()] * 9, lambda x: x.to_sparse(),
    lambda x: torch.nested.nested_tensor([x[0], x[1]])])
def test_what_an_idea_returns_is_checked(rollouts, made_of):
    """And told with the place of the function; tensors that are no plain memory, too."""
    def idea(rollouts, policy):
        return made_of(rollouts.entropy)

    said = refusal(checked_credit, idea, "the weighting mine", rollouts)
    line, shape = idea.__code__.co_firstlineno, tuple(rollouts.mask.shape)
    assert said.startswith(f"the weighting mine (tests/test_own_code.py:{line}) should return a "
                           f"tensor (B, T) = {shape} of real numbers on cpu, got ")
    assert len(said) < 400


@pytest.mark.parametrize("error", [
    SystemExit, SystemExit(130), BrokenPipeError, asyncio.CancelledError])
def test_a_run_that_is_left_before_its_last_step_has_failed(said_of, error):
    """Of a program that leaves, or whose reader goes away, the exit status would be 0; 130 is that
    of Ctrl-C. What is no Exception, as a panic of Rust, would end it with a traceback."""
    def leaves(rollouts):
        raise error

    said = said_of(leaves)
    assert "left before its end" in said and "test_own_code.py" in said


@pytest.mark.parametrize("error, words", [
    (TimeoutError(), "TimeoutError"), (OSError(28, "No space"), "No space"),
    (MemoryError(), "there is not enough memory"), (KeyError("x\ny"), "KeyError: 'x")])
def test_what_an_idea_raises_is_one_line_with_its_own(rollouts, error, words):
    """Whatever it is; who raises an error of this program says enough. The working directory, the
    gradient mode, the threads and the default dtype are as before."""
    def idea(rollouts, policy):
        os.chdir("/")
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        raise error

    threads = torch.get_num_threads()
    with pytest.raises(type(error)) as raised:
        checked_credit(idea, "the weighting mine", rollouts)
    said = sentence_about(raised.value)
    assert re.match(r"the weighting mine, tests/test_own_code\.py:\d+: raise error; ", said)
    assert words in said and "\n" not in said
    assert os.getcwd() != "/" and torch.is_grad_enabled()
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float32)
    error = UserError("enough")
    assert sentence_about(error) == "enough"


def test_what_an_idea_changes_in_its_batch_nobody_else_reads(rollouts):
    """Whatever way it takes. Random numbers and the forward pass are those of the batch."""
    def changes_all(batch, policy):
        assert batch.generator is rollouts.generator and batch.forward is rollouts.forward
        batch.entropy.mul_(2)
        batch.ids.numpy()[:] = 0
        batch.mask.data.zero_()
        batch.prompt_ids[0][:] = [5]
        batch.answers[:] = ["x"]
        batch.problems.clear()
        batch.scores["reward"] = torch.zeros(6)
        return torch.ones(batch.mask.shape)

    before = repr(rollouts)
    checked_credit(changes_all, "mine", rollouts)
    assert repr(rollouts) == before


@pytest.mark.parametrize("name", ["step", "loss", "weight_max", "run_id"])
def test_metrics_take_no_place_of_the_loops(said_of, name):
    said = said_of(with_metrics({name: 1.0}))
    assert f"the metric {name} of a weighting or an advantage needs another name" in said


def test_metrics_are_plain_numbers_and_null_where_no_float_can_hold_them(monkeypatch, tmp_path):
    metrics = {"a": 10 ** 400, "b": float("inf"), "c": 10 ** 20, "d": np.float32(0.5),
               "e": torch.tensor(2.0), "f": None}
    put_in(monkeypatch, with_metrics(metrics), "mine")
    run(*ONE_STEP, "--out", tmp_path / "x", "--mitigation", "mine")
    [line] = lines(tmp_path / "x/metrics.jsonl")
    assert [line[name] for name in metrics] == [None, None, 10 ** 20, 0.5, 2.0, None]


def test_a_state_that_is_not_finite_is_its_methods(monkeypatch, tmp_path):
    class Broken(StateIdea):
        def state_dict(self):
            return {"mean": self.mean / 0}

    put_in(monkeypatch, Broken, "mine")
    said = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert re.match(r"train.py: mean of the mitigation's state_dict \(.*:\d+\) is not finite", said)
    assert "look at --speed 0.5;" in said and "learning_rate" not in said


@pytest.mark.parametrize("state", [
    [1], {"a": 1.0}, {1: torch.ones(1)}, {"a": torch.ones(1) + 1j}])
def test_a_state_that_no_file_can_hold_is_refused_before_the_first_step(
        said_of, monkeypatch, state):
    """And one without a way back to it."""
    idea = type("Idea", (StateIdea,), {"state_dict": lambda self: state, "__module__": __name__})
    words = "train.py: the mitigation's state_dict should return plain tensors by name"
    assert said_of(idea).startswith(words)
    monkeypatch.delattr(StateIdea, "load_state_dict")
    assert "needs both state_dict and load_state_dict" in said_of(idea)


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """Train with the task of tools/largest_last.py after a change; returns what was said."""
    def train_on(old, new, *flags):
        task = (ROOT / "tools/largest_last.py").read_text()
        assert old in task
        (tmp_path / "changed_task.py").write_text(task.replace(old, new))
        return run(*ONE_STEP, "--eval_every", "1", "--eval_tasks", "4", "--task", "changed_task",
                   "--out", tmp_path / "runs/x", *flags, expect=1).stderr

    (tmp_path / "countdown_task.py").touch()  # the default task, imported already
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield train_on
    sys.modules.pop("changed_task", None)


DRAWN = "self.draw(rng, wanted_held_out=False)"
EVERY = "list(problems)"


@pytest.mark.parametrize("old, new, words", [
    (f"[{DRAWN} for _ in range(count)]", "map(str, range(count))",
     r"training_problems\(0, 1, .* should return a list of as many"),
    ("in range(count)]", "in range(count - 1)]", r"training_problems\(.* as many problems as"),
    (EVERY, f"{EVERY} * 2", r"held_out_problems\(1\) should .* not more .* \(2 entries\)"),
    ("import random", "raise SystemExit", "--task changed_task, .*: raise SystemExit; left before"),
    (EVERY, "[]", r"held_out_problems\(1\) should return a list .* at least one"),
    ("def score(", "def scores(", r"Task \(.*changed_task.py.*\) has no score: docs/your_own"),
    (DRAWN, "self.held_out_problems(1)[0]", "training_problems gives 11 1 7 in step 1"),
    ("[(number,) * self.count for number in range(1, self.largest + 1)]", "[]",
     r"extreme_problems\(\) should return a list of problems, at least one"),
    ('" ".join(map(str, problem))', "problem", r"show\(.* should return a text"),
    ("annotate(pieces)", "annotate(pieces[1:])", "label.* should return two lists")])
def test_what_a_task_returns_is_checked(own_task, tmp_path, old, new, words):
    said = own_task(old, new)
    assert re.match(f"train.py: .*{words}", said) and "\n" not in said, said
    assert not any(tmp_path.glob("runs/*"))


def test_a_held_out_problem_in_a_later_step_ends_the_run(own_task, tmp_path):
    """The record up to there stays. Resumed, it ends there again."""
    said = own_task(DRAWN, f"(self.held_out_problems(1)[0] if step == 3 else {DRAWN})",
                    "--steps", "4", "--checkpoint_every", "1", "--eval_every", "4")
    assert re.search("training_problems gives .* in step 3, which is among the held_out", said)
    assert run("--resume", tmp_path / "runs/x", expect=1).stderr == said
    assert [line["step"] for line in lines(tmp_path / "runs/x/metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("name, words", [
    ("my_tsk", "there is no such module"), ("../my_task", "there is no such module"),
    ("tools/largest_last.py", "the file tools/my_task.py is the module tools.my_task"),
    ("harness.files", "this module has neither `problems` and")])
def test_a_module_that_is_no_task_is_named(name, words):
    assert words in refusal(train.main, ["--task", name])


def test_a_default_outside_of_its_own_range_is_told_with_its_function(said_of):
    def idea(rollouts, *, share: Share = 2.0):
        return rollouts.entropy * share

    line = idea.__code__.co_firstlineno
    assert said_of(idea) == ("train.py: --share 2.0 should be at most 1: the default of mine "
                             f"(tests/test_own_code.py:{line})")
