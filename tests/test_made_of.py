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
from conftest import ROOT, StateIdea, cut, put_in, write_lines
from safetensors.torch import load_file, save_file

import analyze
from harness import made_of, record
from harness.made_of import kept, needed_by, of_record, with_imports
from engine.errors import UserError
from harness.record import read_columns, read_lines, replace_text
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


def with_another_number(path):
    path.write_text(path.read_text().replace('"success": ', '"success": 1', 1))


def first_and_second_swapped(path):
    first, second, *others = path.read_text().splitlines(True)
    path.write_text("".join([second, first, *others]))


def with_a_line_twice(path):
    first, *others = path.read_text().splitlines(True)
    path.write_text("".join([first, first, *others]))


def with_a_line_of_a_tool(path):
    with open(path, "a") as file:
        file.write('{"step": 4, "mode": "mine", "success": 1.0}\n')


def without_its_last_line(path):
    cut(path, len(path.read_text().splitlines()) - 1)


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
                      "line 3 of metrics.jsonl is not the one of step 3"),
    "a number": (lambda run: with_another_number(run / "metrics.jsonl"),
                 "line 1 of metrics.jsonl is not the one of step 1"),
    "a line of a tool": (lambda run: with_a_line_of_a_tool(run / "evaluations.jsonl"),
                         "line 5 of evaluations.jsonl was not written by the run"),
    "a credit file": (lambda run: (run / "credit/step_000002.npz").unlink(),
                      "credit/step_000002.npz is missing")}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_and_named_and_nothing_is_touched(stopped, name):
    change, said = CHANGES[name]
    change(stopped)
    before = everything(stopped)
    found = run("--resume", stopped, expect=1).stderr
    assert said in found and "--accept_changes" in found and "\n" not in found
    assert everything(stopped) == before


@pytest.mark.parametrize("change, name, said", [
    (with_another_number, "evaluations.jsonl", "line 1 of evaluations.jsonl is not the one of"),
    (with_another_number, "digests.jsonl", ""),  # which holds none
    (first_and_second_swapped, "metrics.jsonl", "line 1 of metrics.jsonl is not the one of"),
    (first_and_second_swapped, "samples.jsonl", "line 1 of samples.jsonl is not the one of"),
    (with_a_line_twice, "metrics.jsonl", "line 2 of metrics.jsonl is not the one of"),
    (with_a_line_of_a_tool, "metrics.jsonl", "line 7 of metrics.jsonl was not written by"),
    (without_its_last_line, "metrics.jsonl", "metrics.jsonl has lost its last lines, from step 6"),
    (without_its_last_line, "digests.jsonl", "line 6 of evaluations.jsonl was not written by"),
    (lambda path: shutil.copy(path.with_stem("step_000002"), path), "credit/step_000003.npz",
     "credit/step_000003.npz is not the one that the run wrote"),
    (lambda path: shutil.copy(path.with_stem("step_000002"), path), "credit/step_000007.npz",
     "credit/step_000007.npz was not written by the run"),
    (lambda path: shutil.rmtree(path), "credit", "")])
def test_a_finished_record_that_was_changed_by_hand(change, name, said, whole, tmp_path):
    """A user may remove all credit files."""
    folder = shutil.copytree(whole, tmp_path / "x")
    assert list(of_record(folder)) == []
    change(folder / name)
    assert [said] * bool(said) == [found[:len(said)] for found in of_record(folder)]


def test_the_page_says_that_the_record_was_changed(whole, tmp_path, undrawn, capsys):
    folder = shutil.copytree(whole, tmp_path / "x")
    with_another_number(folder / "metrics.jsonl")
    analyze.main([str(folder)])
    said = " ".join(capsys.readouterr().out.split())
    assert "line 1 of metrics.jsonl is not the one of step 1 that the run wrote there" in said
    (folder / "digests.jsonl").unlink()
    analyze.main([str(folder)])
    assert "it is not known whether its record has changed" in " ".join(
        capsys.readouterr().out.split())


def test_a_comparison_says_of_which_run_the_record_was_changed(whole, tmp_path, undrawn, capsys):
    other = shutil.copytree(whole, tmp_path / "other")
    edit_config(other, seed=5)  # another seed, or it would be left out
    with_another_number(other / "metrics.jsonl")
    analyze.main([str(whole), str(other), "--output_dir", str(tmp_path / "page")])
    said = " ".join(capsys.readouterr().out.split())
    for change in ("config.json says seed 5", "line 1 of metrics.jsonl is not the one of step 1"):
        assert f"In other something is not as it was when the run was made: {change}" in said
    assert said.count("something is not as it was") == 2 and "made with another" not in said
    parts = json.loads((other / made_of.NAME).read_text())
    parts["model"]["model.safetensors"] = parts["files"]["grpo.py"] = "0"
    (other / made_of.NAME).write_text(json.dumps(parts))
    analyze.main([str(whole), str(other), "--output_dir", str(tmp_path / "page")])
    assert "other was made with another model.safetensors than run, and 1 more" in " ".join(
        capsys.readouterr().out.split())
    (other / "digests.jsonl").unlink()
    analyze.main([str(whole), str(other), "--output_dir", str(tmp_path / "page")])
    assert "not known of 1 of these runs" in " ".join(capsys.readouterr().out.split())


def test_a_kill_while_a_resumed_run_goes_back_is_no_change(whole, tmp_path, monkeypatch):
    """Whatever it has not come to remove yet."""
    for kept_calls in range(4):
        folder, calls = shutil.copytree(whole, tmp_path / str(kept_calls)), []

        def replace_or_die(path, text):
            calls.append(path)
            if len(calls) > kept_calls:
                raise KeyboardInterrupt
            replace_text(path, text)

        monkeypatch.setattr(record, "replace_text", replace_or_die)
        with pytest.raises(KeyboardInterrupt):
            record.RunFolder(folder).forget_after(4)
        assert list(of_record(folder)) == []


def test_a_kill_between_a_digest_and_its_line_is_no_change(whole, tmp_path):
    """Nor is one between a credit file and its digest, as of step 5; a line that came before that
    is missed."""
    folder, digests = shutil.copytree(whole, tmp_path / "x"), lines(whole / "digests.jsonl")
    without_its_last_line(folder / "evaluations.jsonl")
    assert digests[-1]["file"] == "evaluations.jsonl" and list(of_record(folder)) == []
    without_its_last_line(folder / "evaluations.jsonl")
    assert list(of_record(folder)) == ["evaluations.jsonl has lost its last lines, from step 6 on"]
    of_first_4 = [line for line in digests if line["step"] <= 4]
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        write_lines(folder / name, [line for line in lines(whole / name) if line["step"] <= 4])
    write_lines(folder / "digests.jsonl", of_first_4)
    (folder / "credit/step_000006.npz").unlink()
    assert list(of_record(folder)) == []


def test_what_was_accepted_is_not_refused_again(stopped):
    with_another_number(stopped / "metrics.jsonl")
    run("--resume", stopped, "--accept_changes")
    assert list(of_record(stopped)) == []
    assert "metrics.jsonl" in kept(stopped)["accepted"][0]["changes"]


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
    assert "after step 4: config.json says" in " ".join(capsys.readouterr().out.split())
    assert "nothing that it is made of has changed" in run(
        "--resume", stopped, "--accept_changes").stdout
    with_another_number(stopped / "metrics.jsonl")
    assert "accepted: line 1 of metrics.jsonl" in run(
        "--resume", stopped, "--accept_changes").stdout
    assert len(kept(stopped)["accepted"]) == 2 and list(of_record(stopped)) == []
    assert "no effect without --resume" in run("--accept_changes", expect=1).stderr


def test_an_older_run_goes_on_with_a_sentence(whole, stopped):
    (stopped / made_of.NAME).unlink()
    path = stopped / "checkpoints/step_000004/trainer/state.json"
    path.write_text(json.dumps({"step": 4}))
    assert "it is not known whether" in run("--resume", stopped).stdout
    assert_same_run(whole, stopped)


def test_another_version_of_torch_is_told(whole, stopped):
    edit_config(stopped, versions={"torch": "2.6.0"})
    assert "had torch 2.6.0, and this is" in run("--resume", stopped).stdout
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
    assert f"{there / data.name} is another file than {data}, which the run has read" in said
    shutil.copy(data, there)
    run("--resume", tmp_path / "x")


def test_a_file_of_the_project_counts_wherever_the_command_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "models/tiny/recipe.json" in made_of.parts_of_run(
        Settings(pairs="models/tiny/recipe.json"))["files"]


def test_a_function_counts_with_all_that_it_uses_and_nothing_else():
    source = ("A = 2\nB = 3\ndef helper(x):\n    return x + A\n"
              "def mine(x):\n    return helper(x)  # a comment\ndef other(x):\n    return B\n")
    found = needed_by("mine", source)
    assert found == needed_by("mine", source.replace("B = 3", "B = 4").replace("a comment", "one"))
    assert found != needed_by("mine", source.replace("A = 2", "A = 1"))
    assert found != needed_by("mine", source.replace("x + A", "x - A"))


def test_code_counts_by_what_it_does(tmp_path):
    """A comment, a docstring and a line break are no change. An operator is one, and in a file that
    is no code so is everything."""
    texts = ["def f(x):\n    return x + 1\n",
             '"""A page."""\ndef f(x):\n    "It adds."\n    # one\n    return (x +\n  1)\n',
             "def f(x):\n    return x - 1\n", "def f(x:\n"]
    found = []
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
        (tmp_path / f"{number}.txt").write_text(text)
        found.append(made_of.digest_of_part(tmp_path / f"{number}.py"))
    assert found[0] == found[1] and len(set(found)) == 3
    first, second = (made_of.digest_of_part(tmp_path / f"{number}.txt") for number in (0, 1))
    assert first != second


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


def test_a_file_that_a_users_code_writes_is_not_what_a_run_is_made_of(tmp_path):
    """A cache that is read, and written in place or under another name; and what the machine says
    of itself."""
    names = [tmp_path / name for name in ("data", "cache", "renamed")]
    for path in names:
        path.write_text("a")
    data, cache, renamed = map(str, names)
    made_of.watch_opened_files()
    made_of.opened.clear(), made_of.written.clear()

    def does(text):
        types.FunctionType(compile(text, str(tmp_path / "my_task.py"), "exec"), {"os": os})()

    does("".join(f"open({name!r}).read()\n" for name in (data, cache, renamed, "/proc/uptime")))
    assert made_of.read_by_users() == set(names)
    parts = {"files": dict.fromkeys(map(made_of.shown, names))}
    assert not made_of.has_opened_more(parts)
    does(f"open({cache!r}, 'a').write('b')\nopen({data!r} + 'x', 'w')\n"
         f"os.replace({data!r} + 'x', {renamed!r})")
    assert made_of.read_by_users() == {names[0]} and made_of.has_opened_more(parts)
    made_of.opened.clear(), made_of.written.clear()


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


def leaves_autocast_on(rollouts):
    torch.autocast("cpu").__enter__()
    return torch.ones_like(rollouts.entropy)


@pytest.mark.parametrize("function, said", [
    (leaves, "calls sys.exit"), (changes_the_type, "calls torch.set_default_dtype"),
    (leaves_autocast_on, "autocast is on for cpu")])
def test_what_a_function_does_to_the_program_ends_in_a_sentence(function, said, monkeypatch,
                                                                tmp_path):
    put_in(monkeypatch, function, "mine")
    found = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert said in found and torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


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
