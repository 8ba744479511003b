"""What a run is made of: each kind of change is refused when the run is resumed, and named; with
--accept_changes it goes on, and says so; what did not change never stands in the way."""
import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, StateIdea, put_in
from safetensors.torch import load_file, save_file

import analyze
from harness import made_of
from harness.made_of import kept, needed_by, with_imports
from engine.errors import UserError
from harness.record import read_columns, read_lines
from harness.settings import Settings
from runs import (SHORT, WHOLE, after_credit_of, assert_same_run, config_of, edit_config,
                  everything, lines, run)

STATE = "checkpoints/step_000004/trainer/state.safetensors"
MODEL = "checkpoints/step_000004/model.safetensors"


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def without_moments(path):
    save_file({"x": torch.zeros(1)}, path)


def of_another_shape(path):
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("exp_avg."))
    save_file(tensors | {name: torch.zeros(3)}, path)


def without_line_3(path):
    kept_lines = [text for number, text in enumerate(path.read_text().splitlines(True), 1)
                  if number != 3]
    path.write_text("".join(kept_lines))


CHANGES = {  # what is done to the run, and what is said
    "a setting": (lambda run: edit_config(run, learning_rate=0.1),
                  "config.json says learning_rate 0.1, and the run was made with"),
    "a bit of the model": (lambda run: flip_a_bit(run / MODEL), "model.safetensors has changed"),
    "a bit of the state": (lambda run: flip_a_bit(run / STATE), "state.safetensors has changed"),
    "no moments": (lambda run: without_moments(run / STATE), "state.safetensors has changed"),
    "another shape": (lambda run: of_another_shape(run / STATE), "state.safetensors has changed"),
    "another step": (lambda run: (run / "checkpoints/step_000002").rename(run / "checkpoints/old")
                     and shutil.copytree(run / "checkpoints/step_000004",
                                         run / "checkpoints/step_000005"),
                     "holds the state after step 4"),
    "no digests": (lambda run: (run / "checkpoints/step_000004/trainer/state.json").write_text(
                       '{"step": 4, "files": []}'), "has no digests of its files"),
    "a step's line": (lambda run: without_line_3(run / "metrics.jsonl"),
                      "metrics.jsonl has no line of step 3"),
    "a credit file": (lambda run: (run / "credit/step_000002.npz").unlink(),
                      "there is no credit file of step 2")}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_and_named_and_nothing_is_touched(stopped, name):
    change, said = CHANGES[name]
    change(stopped)
    before = everything(stopped)
    found = run("--resume", stopped, expect=1).stderr
    assert said in found and "--accept_changes" in found and "\n" not in found
    assert everything(stopped) == before


def test_a_checkpoint_of_another_run(stopped, learner, tmp_path):
    other = tmp_path / "other"
    run("--model", learner, "--out", other, *WHOLE, "--seed", 5)
    shutil.rmtree(stopped / "checkpoints/step_000004")
    shutil.copytree(other / "checkpoints/step_000004", stopped / "checkpoints/step_000004")
    assert "is of another run" in run("--resume", stopped, expect=1).stderr


def test_what_is_accepted_is_written_down_and_told(stopped, capsys):
    edit_config(stopped, learning_rate=0.0002)
    assert "going on although config.json says learning_rate" in run(
        "--resume", stopped, "--accept_changes").stdout
    [accepted] = kept(stopped)["accepted"]
    assert accepted["after_step"] == 4 and "learning_rate" in accepted["changes"]
    assert kept(stopped)["settings"]["learning_rate"] == 0.0002
    analyze.main([str(stopped)])
    assert "after step 4 the run went on although" in " ".join(capsys.readouterr().out.split())
    assert "no effect without --resume" in run("--accept_changes", expect=1).stderr


def test_an_older_run_goes_on_with_a_sentence(whole, stopped):
    (stopped / made_of.NAME).unlink()
    path = stopped / "checkpoints/step_000004/trainer/state.json"
    path.write_text(json.dumps({"step": 4}))
    assert "it is not known whether" in run("--resume", stopped).stdout
    assert_same_run(whole, stopped)


def test_the_state_of_an_older_run_is_still_checked(stopped):
    """Without digests: AdamW's moments have to be there and have the right shape."""
    (stopped / made_of.NAME).unlink()
    path = stopped / "checkpoints/step_000004/trainer/state.json"
    path.write_text(json.dumps({"step": 4}))
    for change, said in ((of_another_shape, "with shape (3,)"),
                         (without_moments, "so AdamW would start anew"),
                         (lambda path: path.write_bytes(b"broken"), "is damaged")):
        change(stopped / STATE)
        assert said in run("--resume", stopped, expect=1).stderr


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
    flip_a_bit(model / "model.safetensors")
    run("--resume", tmp_path / "x")  # it has a checkpoint, and needs the first model no more
    assert "model.safetensors of the model folder" in run("--resume", tmp_path / "y",
                                                          expect=1).stderr


def test_a_function_counts_with_all_that_it_uses_and_nothing_else():
    source = ("A = 2\nB = 3\ndef helper(x):\n    return x + A\n"
              "def mine(x):\n    return helper(x)  # a comment\ndef other(x):\n    return B\n")
    found = needed_by("mine", source)
    assert found == needed_by("mine", source.replace("B = 3", "B = 4").replace("a comment", "one"))
    assert found != needed_by("mine", source.replace("A = 2", "A = 1"))
    assert found != needed_by("mine", source.replace("x + A", "x - A"))


def test_code_counts_with_the_modules_that_it_imports(tmp_path):
    """As a module, for a constant, by way of another one, and as a package."""
    texts = {"my_task.py": "import helper\nfrom table import BONUS\n", "table.py": "BONUS = 1\n",
             "helper.py": "import pack\n", "pack/__init__.py": "K = 2\n", "other.py": ""}
    (tmp_path / "pack").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = with_imports({tmp_path / "my_task.py"})
    assert found == {tmp_path / name for name in texts.keys() - {"other.py"}}


def test_a_runs_code_is_that_which_its_task_imports(monkeypatch, tmp_path):
    (tmp_path / "a_task.py").write_text("from a_table import BONUS\n")
    (tmp_path / "a_table.py").write_text("BONUS = 1\n")
    module = types.SimpleNamespace(__file__=str(tmp_path / "a_task.py"))
    monkeypatch.setitem(sys.modules, "a_task", module)
    found = made_of.code_files(Settings(task="a_task"))
    assert {tmp_path / "a_table.py", ROOT / "countdown_task.py"} <= found


def test_a_file_is_noted_if_the_code_that_opens_it_is_a_users(tmp_path):
    """The function lies in a file outside the project; a second one opens through pathlib. What the
    project itself opens is not noted."""
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("a"), second.write_text("b")
    code = compile(f"open({str(first)!r}).read()\nPath({str(second)!r}).read_text()",
                   str(tmp_path / "my_task.py"), "exec")
    made_of.watch_opened_files()
    made_of.opened.clear()
    read_lines(second)
    assert not made_of.opened
    types.FunctionType(code, {"Path": Path})()
    assert made_of.opened == {str(first), str(second)}
    with open(first, "w"):  # written, and by a test
        pass
    made_of.opened.clear()


class Sharing(StateIdea):
    """Two tensors of its state share their memory."""

    def state_dict(self):
        return {"mean": self.mean, "view": self.mean.view(1, 1)}


def test_a_state_whose_tensors_share_memory_is_saved(monkeypatch, tmp_path):
    put_in(monkeypatch, Sharing, "mine")
    run(*SHORT, "--steps", "1", "--out", tmp_path / "x", "--mitigation", "mine")
    saved = load_file(tmp_path / "x/checkpoints/step_000001/trainer/state.safetensors")
    assert torch.equal(saved["mitigation.mean"], saved["mitigation.view"][0])


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


def leaves(rollouts):
    raise SystemExit(0)


def changes_the_type(rollouts):
    torch.set_default_dtype(torch.float64)
    return torch.ones_like(rollouts.entropy)


@pytest.mark.parametrize("function, said", [
    (leaves, "calls sys.exit"), (changes_the_type, "calls torch.set_default_dtype")])
def test_what_a_function_does_to_the_program_ends_in_a_sentence(function, said, monkeypatch,
                                                                tmp_path):
    put_in(monkeypatch, function, "mine")
    found = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert said in found and torch.get_default_dtype() == torch.float32


def test_a_pipe_and_an_endless_file_are_refused_at_once(stopped):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to("/dev/zero")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr
    (stopped / "credit/step_000002.npz").unlink()
    (stopped / "credit/step_000002.npz").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="no regular file"):
        read_columns(stopped, 2)
    (stopped / "config.json").unlink()
    os.mkfifo(stopped / "config.json")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr


def test_a_log_and_settings_of_another_shape(stopped):
    edit_config(stopped, mitigation=[1])
    assert "--mitigation [1] should be a text" in run(
        "--resume", stopped, expect=1).stderr
    for line in ('{"reward": 1}', '{"step": "2"}'):
        (stopped / "metrics.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match="line 1 does not say of which step"):
            read_lines(stopped / "metrics.jsonl")


def test_the_same_settings_have_the_same_record(whole, stopped):
    before = kept(stopped)
    run("--resume", stopped)
    assert kept(stopped) == before and config_of(stopped) == config_of(whole)
