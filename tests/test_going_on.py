"""A run goes on only from what is as it was; what is on record is never lost in silence."""
import errno
import os
import re
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from conftest import ROOT, cut, write_lines
from engine.errors import UserError
from engine.tokens import load_tokenizer
from harness import run as start
from harness.run import Run
from harness.settings import OPTIONS
from runs import (WHOLE, after_credit_of, arrays, assert_same_run, config_of, edit_config,
                  everything, run)


@pytest.fixture
def finished(whole, tmp_path):
    """Six steps: it could go on after the fourth and after the last."""
    return shutil.copytree(whole, tmp_path / "x")


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run as a kill after the fifth step leaves it."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000006")
    cut(folder / "metrics.jsonl", 5)
    cut(folder / "evaluations.jsonl", 4)
    return folder


@pytest.mark.parametrize("way, every", [("--resume", 2), ("--continue", 2), ("--resume", 0)])
def test_a_record_without_checkpoints_is_not_erased(finished, learner, way, every):
    """Nor is that of a run that never keeps any, also where its metrics are lost."""
    shutil.rmtree(finished / "checkpoints")
    edit_config(finished, checkpoint_every=every)
    argv = ["--resume", finished]
    if way == "--continue":
        argv = ["--model", learner, "--out", finished, *WHOLE, "--continue"]
    assert "has 6 of its 6 steps, and no more" in run(*argv).stdout
    for lines in 5, 0:
        cut(finished / "metrics.jsonl", lines)
        before = everything(finished)
        said = run(*argv, "--checkpoint_every", 100, expect=1).stderr
        assert "holds a record of 5 steps, and no checkpoint to go on from" in said
        assert everything(finished) == before


def test_a_plan_without_checkpoints_begins_again(whole, finished, learner):
    """The same flags, and --continue: whoever typed them wants the run, and gets it."""
    argv = ["--model", learner, *WHOLE, "--checkpoint_every", 0, "--continue", "--out"]
    shutil.rmtree(finished / "checkpoints")
    edit_config(finished, checkpoint_every=0)
    cut(finished / "metrics.jsonl", 3)
    assert "starting again at step 1" in run(*argv, finished).stdout
    shutil.copytree(whole / "checkpoints", finished / "checkpoints")
    assert_same_run(whole, finished)


def test_a_run_that_was_stopped_is_not_called_finished(stopped):
    said = run("--resume", stopped, "--steps", 1).stdout
    assert "has 5 of its 6 steps, and no more were asked for" in said


@pytest.mark.parametrize("name, before, now", [
    ("threads", 2, 1), ("device", "cuda", "cpu"), ("micro_batch", 8, 1), ("sample_every", 1, 0)])
def test_what_is_changed_is_remembered_and_other_rounding_is_said(
        stopped, monkeypatch, name, before, now):
    monkeypatch.setattr(Run, "steps", lambda run: [])
    edit_config(stopped, **{name: before})
    expected = config_of(stopped) | {name: now}
    printed = run("--resume", stopped, f"--{name}", now).stdout
    said = f"note: --{name} {now}: the same computation with other rounding" in printed
    assert said == (name in CHANGES_ROUNDING) and config_of(stopped) == expected
    assert "note:" not in run("--resume", stopped, f"--{name}", now).stdout


def test_other_code_than_made_the_steps_before_is_named_and_both_are_kept(stopped, monkeypatch):
    """Where no step of other code is left, nothing is said; a run of an older version has nothing
    to compare with."""
    def code_after(code):
        edit_config(stopped, code=code)
        return run("--resume", stopped).stdout, config_of(stopped)["code"]

    monkeypatch.setattr(Run, "steps", lambda run: [])
    code = config_of(stopped)["code"]
    before = {"1": {**code["1"], "countdown_task.py": "0" * 64, "harness/removed.py": "1" * 64}}
    told, now = code_after(before)
    assert "countdown_task.py: not the code that made the steps before, so from step 5 on" in told
    today = {"countdown_task.py": code["1"]["countdown_task.py"]}
    assert now == before | {"5": today}
    for kept, cut_off in ((before | {"2": today}, {}), (code, {"5": {"train.py": "2" * 64}})):
        told, now = code_after(kept | cut_off)
        assert "note:" not in told and now == kept
    told, now = code_after({})
    assert "note:" not in told and list(now) == ["5"]


def test_credit_files_that_are_lost_are_said(stopped, monkeypatch):
    monkeypatch.setattr(Run, "steps", lambda run: [])
    assert "has lost" not in run("--resume", stopped).stdout
    (stopped / "credit/step_000002.npz").unlink()
    assert "has lost the files of 1 steps, the first is step 2;" in run("--resume", stopped).stdout


def test_what_a_run_is_cannot_be_changed(stopped):
    for name in set(OPTIONS) - set(CHANGEABLE):
        with pytest.raises(UserError, match=f"^--{name} cannot be changed in a resumed run, only "):
            resumed(stopped, {name: OPTIONS[name].default})
    unnamed = {name for name, flag in OPTIONS.items() if not flag.changes_result}
    assert unnamed - set(CHANGEABLE) == {"out"}


def test_a_finished_run_without_its_last_checkpoint_stays_finished(finished):
    """Its only checkpoint is of a Ctrl-C; --checkpoint_every 1 now does not make it unfinished."""
    shutil.rmtree(finished / "checkpoints/step_000006")
    edit_config(finished, checkpoint_every=0)
    printed = run("--resume", finished, "--checkpoint_every", 1).stdout
    assert "has 6 of its 6 steps, and no more" in printed


def spoil(path):
    save_file({name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("damage, said", [
    (lambda run: spoil(run / "checkpoints/step_000006/model.safetensors"),
     "model.safetensors was changed after it was written .move .*/x/checkpoints/step_000006 away"),
    (lambda run: cut(run / "evaluations.jsonl", 5),
     "lost the greedy evaluation at step 6.* checkpoints from step 6 on")])
def test_a_finished_run_that_was_damaged_is_told_how_to_get_it_back(whole, finished, damage, said):
    """Moved away are checkpoints; the run goes on from the one before. One that has lost its state
    is made again."""
    damage(finished)
    assert re.search(said, run("--resume", finished, "--steps", 7, expect=1).stderr)
    shutil.rmtree(finished / "checkpoints/step_000006/trainer")
    printed = run("--resume", finished).stdout
    assert "step_000006 has no trainer/state.json" in printed and "all steps after 4" in printed
    assert_same_run(whole, finished)


def test_problems_of_a_file_are_trained_on_and_stay_what_they_were(learner, tmp_path):
    data, folder = tmp_path / "problems.jsonl", tmp_path / "x"
    problems = [{"nums": [a, b, 3], "target": a + b + 3} for a in range(1, 8) for b in range(1, 8)]
    write_lines(data, problems)
    flags = ["--model", learner, "--data", data, "--steps", 1, "--checkpoint_every", 1,
             "--eval_every", 0]
    run(*flags, "--out", folder)
    prompt_ids = arrays(folder / "credit/step_000001.npz")["prompt_ids"].tolist()
    prompts = load_tokenizer(learner).decode(prompt_ids, skip_special_tokens=False)
    found = re.findall(r"user\n (\d+) (\d+) 3 make (\d+)<", prompts)
    assert len(found) == 4 and all(int(a) + int(b) + 3 == int(c) for a, b, c in found)
    write_lines(data, [*problems, {"nums": [3, 5, 700], "target": 22}])
    assert "cannot spell" in run(*flags, "--out", tmp_path / "y", expect=1).stderr
    said = run("--resume", folder, "--steps", 2, expect=1).stderr
    assert "--data" in said and "is not what it was when this run began" in said
    data.unlink()
    assert "problems.jsonl" in run("--resume", folder, "--steps", 2, expect=1).stderr


def test_the_model_is_compared_where_it_is_still_needed(learner, tmp_path):
    model = shutil.copytree(learner, tmp_path / "model")
    flags = ["--model", model, "--steps", 1, "--checkpoint_every", 1, "--eval_every", 0]
    run(*flags, "--out", tmp_path / "free")
    run(*flags, "--out", tmp_path / "anchored", "--kl", 0.1)
    spoil(model / "model.safetensors")
    run("--resume", tmp_path / "free", "--steps", 2)  # goes on from its own checkpoint
    said = run("--resume", tmp_path / "anchored", "--steps", 2, expect=1).stderr
    assert "--model" in said and "is not what it was" in said


def test_of_two_starts_at_once_one_is_told(whole, learner, tmp_path, monkeypatch):
    """The other one comes when this one has looked, but not begun to write."""
    argv, create = ["--model", learner, "--out", tmp_path / "x", *WHOLE], start.create_folder

    def create_later(*given):
        monkeypatch.setattr(start, "create_folder", create)
        run(*argv)
        return create(*given)

    monkeypatch.setattr(start, "create_folder", create_later)
    assert "exists already" in run(*argv, expect=1).stderr
    assert_same_run(whole, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_run_goes_on_when_nobody_can_be_told(whole, learner, tmp_path):
    command = [sys.executable, ROOT / "train.py", "--model", learner, "--out", tmp_path / "x"]
    words = " ".join(f"'{word}'" for word in [*command, *WHOLE])
    subprocess.run(["sh", "-c", f"{words} 2> /dev/full | head -n 1"], capture_output=True)
    assert_same_run(whole, tmp_path / "x")


@pytest.mark.parametrize("call, said", [
    ("harness.run_folder.shutil.copyfile", "step_000004: No space left"),
    ("numpy.savez_compressed", "step_000004.npz: No space left")])
def test_a_full_disk_leaves_what_was_whole(whole, learner, tmp_path, monkeypatch, call, said):
    """The disk fills in step 4, at its checkpoint or credit file; then there is room again."""
    def no_room(path, *_, **columns):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        after_credit_of(3, patch, lambda: patch.setattr(call, no_room))
        printed = run("--model", learner, "--out", tmp_path / "x", *WHOLE, expect=1).stderr
    assert "cannot write" in printed and said in printed
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_000002"]
    run("--resume", tmp_path / "x")
    assert_same_run(whole, tmp_path / "x")
