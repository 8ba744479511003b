"""What a run is made of: each kind of change is refused when the run is resumed, and named; with
--accept_changes it goes on, and says so; what did not change never stands in the way."""
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import cut, put_in, refusal

import analyze
from engine.errors import UserError
from harness import record
from harness.resume import changes
from harness.made_of import digest_of_part, made_of, used_by
from harness.read_record import missing_steps, read_columns, read_tokenizer
from harness.settings import make_settings
from runs import (SHORT, after_credit_of, assert_same_run, config_of, edit_config, everything,
                  lines, run)

STATE = "checkpoints/step_000004/trainer/state.safetensors"


def with_lines(name, chosen):
    """Replace the lines of a log by the chosen ones, which are counted from 1."""
    def change(run):
        texts = (run / name).read_text().splitlines(True)
        (run / name).write_text("".join(texts[number - 1] for number in chosen))
    return change


def without_line(number):
    return with_lines("metrics.jsonl", [line for line in range(1, 6) if line != number])


MISSING = {  # what is done to the run, and what is said
    "a line": (without_line(3), "metrics.jsonl has no line of step 3"),
    "the last lines": (lambda run: cut(run / "metrics.jsonl", 3),
                       "metrics.jsonl has no line of step 4"),
    "a credit file": (lambda run: (run / "credit/step_000002.npz").unlink(),
                      "there is no credit file of step 2"),
    "a line twice": (with_lines("metrics.jsonl", [1, 2, 2, 3, 4, 5]),
                     "metrics.jsonl has a step twice, or its steps are not in order"),
    "the order": (with_lines("metrics.jsonl", [2, 1, 3, 4, 5]),
                  "metrics.jsonl has a step twice, or its steps are not in order"),
    "an evaluation": (with_lines("evaluations.jsonl", [1, 2, 3]),
                      "evaluations.jsonl has not 2 lines of step 4")}


@pytest.mark.parametrize("name", MISSING)
def test_what_the_record_lacks_is_named(stopped, name):
    assert list(missing_steps(stopped, 4)) == []
    change, said = MISSING[name]
    change(stopped)
    assert list(missing_steps(stopped, 4)) == [said]


@pytest.mark.parametrize("change, said", [
    MISSING["a credit file"],
    (lambda run: (run / STATE).write_bytes(b"broken"), "trainer/state.safetensors cannot be read")])
def test_a_change_is_refused_and_named_and_nothing_is_touched(stopped, change, said):
    change(stopped)
    before = everything(stopped)
    found = run("--resume", stopped, expect=1).stderr
    assert said in found and "\n" not in found
    assert everything(stopped) == before


def test_what_is_accepted_is_written_down_and_told(stopped, capsys):
    without_line(3)(stopped)
    assert "--accept_changes" in run("--resume", stopped, expect=1).stderr
    went_on = run("--resume", stopped, "--accept_changes").stdout
    [accepted] = config_of(stopped)["accepted"]
    changes = accepted["changes"]
    assert accepted["after_step"] == 4 and changes.endswith("no line of step 3")
    assert f"going on although {changes}" in went_on
    analyze.main([str(stopped)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"after step 4: {changes}" in said
    assert "The record of" in said and "no effect without --resume" in run(
        "--accept_changes", expect=1).stderr


def test_a_finished_run_is_accepted_as_it_is(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "x")
    assert "nothing that it is made of has changed" in run(
        "--resume", folder, "--accept_changes").stdout
    (folder / "credit/step_000002.npz").unlink()
    assert "accepted: there is no credit file of step 2" in run(
        "--resume", folder, "--accept_changes").stdout
    assert len(config_of(folder)["accepted"]) == 1
    shutil.rmtree(folder / "credit")  # a user may remove all credit files
    assert list(missing_steps(folder)) == []


@pytest.mark.parametrize("missing", [KeyError, {}])
def test_an_older_run_goes_on_with_a_sentence(whole, stopped, missing):
    edit_config(stopped, made_of=missing)
    assert "it is not known whether" in run("--resume", stopped).stdout
    assert_same_run(whole, stopped)


def test_a_line_of_a_far_step_is_no_long_search(whole, tmp_path):
    """A record is asked for its first hole, and a set of a billion steps is never made."""
    folder = shutil.copytree(whole, tmp_path / "x")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1000000000}\n')
    assert list(missing_steps(folder))[0].endswith("no line of step 7")


def test_another_version_of_torch_is_told(whole, stopped):
    edit_config(stopped, versions={"torch": "2.6.0"})
    assert "had torch 2.6.0, and this is" in run("--resume", stopped).stdout
    assert_same_run(whole, stopped)


def test_changed_code_is_refused_and_a_changed_comment_is_not(stopped):
    """As if grpo.py had been another one: its digest is what the run has written down."""
    digests = config_of(stopped)["made_of"]
    assert {"grpo.py", "engine/sampler.py", "mitigations.py", "countdown_task.py"} <= digests.keys()
    assert not any(name.startswith(("harness/", "tests/", "analysis/")) for name in digests)
    edit_config(stopped, made_of=digests | {"grpo.py": "0" * 64})
    assert "grpo.py has changed. So what follows" in run("--resume", stopped, expect=1).stderr
    edit_config(stopped, made_of=digests | {"my_helper.py": "0" * 64})
    assert "my_helper.py is gone" in run("--resume", stopped, expect=1).stderr
    edit_config(stopped, made_of=digests)
    run("--resume", stopped)


def test_what_makes_a_task_of_a_reward_counts_and_what_writes_its_prompts():
    """They lie in harness/, which has no other file of a step."""
    given = {"task": "examples.own_reward"}, {"examples": 2}, {}
    found = [made_of(make_settings(settings)).keys() for settings in given]
    parts = "harness/short_task.py", "harness/solved_problems.py"
    assert [[part in digests for part in parts] for digests in found] == [
        [True, False], [False, True], [False, False]]


class Unseeded:
    """A task that draws its problems without the seed, those of training or those of evaluations.
    """
    drawn = iter(range(2, 10_000))

    def __init__(self, task, drawn_anew):
        self.task, self.drawn_anew, self.first = task, drawn_anew, next(self.drawn)

    def __getattr__(self, name):
        return getattr(self.task, name)

    def training_problems(self, seed, step, count):
        seed = next(self.drawn) if self.drawn_anew == "training" else seed
        return self.task.training_problems(seed, step, count)

    def held_out_problems(self, count):
        first = self.first if self.drawn_anew == "held out" else 0
        return self.task.held_out_problems(count + first)[first:]


@pytest.mark.parametrize("drawn_anew, said", [
    ("training", "returns other problems for step 2 than when the step was made"),
    ("held out", "returns other problems to evaluate than before: held_out_problems should")])
def test_a_task_that_draws_without_the_seed_is_told(learner, tmp_path, monkeypatch, drawn_anew,
                                                    said):
    from harness import load
    made = load.make_task
    monkeypatch.setattr(load, "make_task", lambda *given: Unseeded(made(*given), drawn_anew))
    folder = tmp_path / "x"
    interrupted_after(3, monkeypatch, "--model", learner, "--out", folder, "--eval_every", "3",
                      "--eval_tasks", "4")
    assert said in run("--resume", folder, expect=1).stderr
    assert "going on although --task" in run("--resume", folder, "--accept_changes").stdout


def test_the_file_of_another_step_and_another_tokenizer_are_told(whole, tmp_path):
    """Both would be shown as what this run did."""
    folder = shutil.copytree(whole, tmp_path / "x")
    read_columns(folder, 3)
    read_tokenizer(folder)
    shutil.copy(folder / "credit/step_000002.npz", folder / "credit/step_000003.npz")
    assert "step_000003.npz is damaged: its step is 2" in refusal(read_columns, folder, 3)
    path = folder / "credit/step_000002.npz"
    with np.load(path) as file:
        columns = {**file, "step": np.array([], int)}
    np.savez_compressed(path, **columns)
    assert "step_000002.npz is damaged: its step is none" in refusal(read_columns, folder, 2)
    with open(folder / "tokenizer.json", "a") as file:
        file.write("\n")
    assert "is not the tokenizer that the run was made with" in refusal(read_tokenizer, folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "problems.jsonl"
    problems = [{"nums": [a, b, 5], "target": a + b + 5} for a in range(2, 9) for b in range(2, 9)]
    path.write_text("\n".join(map(json.dumps, problems)))
    return path


def interrupted_after(step, monkeypatch, *argv):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        after_credit_of(step, patch, interrupt)
        run(*SHORT, *argv)


def test_a_data_file_and_a_reference_model_that_have_changed(data, learner, tmp_path, monkeypatch):
    model = shutil.copytree(learner, tmp_path / "model")
    for name, more in (("x", []), ("y", ["--kl", "0.01"])):
        interrupted_after(3, monkeypatch, "--data", data, "--out", tmp_path / name, "--model",
                          model, *more)
    data.write_text(data.read_text().replace("[2, 2, 5]", "[2, 2, 6]"))
    assert "problems.jsonl has changed" in run("--resume", tmp_path / "x", expect=1).stderr
    data.write_text(data.read_text().replace("[2, 2, 6]", "[2, 2, 5]"))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    run("--resume", tmp_path / "x")  # it has a checkpoint, and needs the first model no more
    assert "model.safetensors has changed" in run("--resume", tmp_path / "y", expect=1).stderr


def test_a_relative_path_to_another_file_is_refused(data, learner, tmp_path, monkeypatch):
    """Because the command is typed in another folder; a copy of the file does."""
    more = ("--model", learner, "--data", data.name, "--out", tmp_path / "x")
    monkeypatch.chdir(data.parent)
    interrupted_after(3, monkeypatch, *more)
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    (there / data.name).write_text(data.read_text().replace("5]", "7]"))
    said = run("--resume", tmp_path / "x", expect=1).stderr
    assert f"{there / data.name} is another file than the run was made with" in said
    shutil.copy(data, there)
    run("--resume", tmp_path / "x")


def test_a_function_counts_with_all_that_it_uses_and_nothing_else():
    import ast
    source = ("A = 2\nB: int = 3\ndef helper(x):\n    return x + A\n"
              "def mine(x):\n    return helper(x)\ndef other(x):\n    return B\n")

    def found(names, text=source):
        return ast.unparse(ast.Module(used_by(names, ast.parse(text).body), []))

    assert found({"mine"}) == found({"mine"}, source.replace("= 3", "= 4"))
    assert found({"other"}) != found({"other"}, source.replace("= 3", "= 4"))
    assert found({"mine"}) != found({"mine"}, source.replace("A = 2", "A = 1"))
    assert found({"mine"}) != found({"mine"}, source.replace("x + A", "x - A"))


def test_code_counts_by_what_it_does(tmp_path):
    """A comment, a docstring and a line break are no change. An operator is one, and in a file that
    is no code so is everything."""
    texts = ["def f(x):\n    return x + 1\n",
             '"""A page."""\ndef f(x):\n    "It adds."\n    # one\n    return (x +\n  1)\n',
             "def f(x):\n    return x - 1\n", "def f(x:\n"]
    found, s = [], make_settings({})
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
        (tmp_path / f"{number}.txt").write_text(text)
        found.append(digest_of_part(tmp_path / f"{number}.py", s))
    assert found[0] == found[1] and len(set(found)) == 3
    first, second = (digest_of_part(tmp_path / f"{number}.txt", s) for number in (0, 1))
    assert first != second


def test_a_method_that_a_run_does_not_have_does_not_count():
    """It is loaded here in both cases, as in a program that compares the two."""
    chosen = made_of(make_settings({"mitigation": "lambda_grpo"}))
    plain = made_of(make_settings({}))
    assert "credit/lambda_grpo.py" in chosen and "credit/lambda_grpo.py" not in plain
    assert chosen["mitigations.py"] != plain["mitigations.py"]


def test_a_file_of_the_project_counts_wherever_the_command_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    s = make_settings({"data": "models/tiny/recipe.json"})
    before = made_of(s)
    assert "models/tiny/recipe.json" in before and list(changes(before, s, 5)) == []


class NoState:
    def __init__(self, policy):
        self.count = 0

    def __call__(self, rollouts, policy):
        self.count += 1
        return torch.full_like(rollouts.entropy, float(self.count))


def test_a_state_that_cannot_be_saved_ends_the_first_step(monkeypatch, tmp_path):
    put_in(monkeypatch, NoState, "mine")
    said = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert "changes its count, which a resumed run would forget" in said
    assert len(lines(tmp_path / "x/metrics.jsonl")) == 1
    run(*SHORT, "--out", tmp_path / "y", "--mitigation", "mine", "--checkpoint_every", 0)


def test_a_pipe_and_an_endless_file_are_refused_at_once(stopped):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to("/dev/zero")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr
    (stopped / "credit/step_000002.npz").unlink()
    (stopped / "credit/step_000002.npz").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="no regular file"):
        read_columns(stopped, 2)
    with pytest.raises(UserError, match="no regular file"):
        record.digest_of(Path("/dev/null"))  # as of a credit file; a pipe would wait for ever
    (stopped / "config.json").unlink()
    os.mkfifo(stopped / "config.json")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr


def test_settings_of_another_shape(stopped):
    edit_config(stopped, mitigation=[1])
    assert "--mitigation [1] should be a text" in run("--resume", stopped, expect=1).stderr


def test_the_same_settings_have_the_same_record(whole, stopped):
    before = config_of(stopped)
    run("--resume", stopped)
    assert config_of(stopped) == before == {**config_of(whole), "out": before["out"]}
