"""A run goes on only from what is as it was; what is on record is never lost in silence."""
import errno
import gc
import os
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

import lab.run as train
import train as train_book
from conftest import ROOT, write_lines
from lab.countdown import Task
from lab.engine.tokens import load_tokenizer
from lab.harness.checkpoint import Checkpoints
from lab.harness.settings import CHANGEABLE, OPTIONS
from lab_runs import WHOLE, after_credit_of, keep_lines, run
from runs import arrays, assert_same_run, config_of, edit_config, everything, lines

TWO_STEPS = ["--steps", "2", "--eval_every", "0"]


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture
def finished(whole, tmp_path):
    """Six steps: it could go on after the fourth and after the last."""
    return shutil.copytree(whole, tmp_path / "x")


@pytest.mark.parametrize("way, every", [
    ("--resume", 2), ("--continue", 2), ("--resume", 0), ("--resume", 100), ("--continue", 100)])
def test_a_record_without_checkpoints_is_not_erased(finished, learner, way, every):
    """Nor is that of a run that never keeps any, and was stopped. Where none was due before the
    end, a user has removed the folder."""
    shutil.rmtree(finished / "checkpoints")
    if every < 100:
        (finished / "checkpoints").mkdir()
    edit_config(finished, checkpoint_every=every)
    argv = ["--resume", finished]
    if way == "--continue":
        argv = ["--model", learner, "--out", finished, *WHOLE, "--continue"]
    before = everything(finished)
    said = run(*argv, "--checkpoint_every", 100, expect=1).stderr
    assert "has 6 steps on record, and no checkpoint to go on from" in said
    assert everything(finished) == before


def put(source, folder, name):
    shutil.copy(source / name, folder / "checkpoints/step_000004" / name.split("/", 2)[2])


def give_others(name):
    """A task whose method returns other problems than it did."""
    def damage(folder, whole, patch):
        method = getattr(Task, name)
        patch.setattr(Task, name, lambda self, *given: method(self, *given)[::-1])
    return damage


STATE, LATER = "trainer/state.safetensors", "checkpoints/step_000006"
OTHERS = {  # what is not as it was when the checkpoint of step 4 was made, and what is said of it
    "a setting": (lambda folder, *_: edit_config(folder, learning_rate=0.5),
                  "a setting in config.json has changed"),
    "training problems": (give_others("training_problems"), "the task's choice of problems has"),
    "held-out problems": (give_others("held_out_problems"), "the task's choice of problems has"),
    "model of step 6": (lambda folder, whole, _: put(whole, folder, f"{LATER}/model.safetensors"),
                        "its model has changed"),
    "state of step 6": (lambda folder, whole, _: put(whole, folder, f"{LATER}/{STATE}"),
                        "its trainer's state has changed"),
    "number": (lambda folder, *_: (folder / "checkpoints/step_000004").rename(
        folder / "checkpoints/step_000005"), "its number has changed"),
    "hole": (lambda folder, *_: keep_lines(folder / "metrics.jsonl", 1, 2, 4, 5),
             "one line for each of the steps 1 to 4, in order"),
    "twice": (lambda folder, *_: keep_lines(folder / "metrics.jsonl", 1, 2, 3, 4, 4, 5),
              "one line for each of the steps 1 to 4, in order")}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_goes_on_only_with_what_belongs_together(stopped, whole, monkeypatch, name):
    damage, said = OTHERS[name]
    damage(stopped, whole, monkeypatch)
    before = everything(stopped)
    assert said in run("--resume", stopped, expect=1).stderr
    assert everything(stopped) == before


def test_a_run_goes_on_from_the_checkpoint_before_one_that_was_cut(finished, whole):
    """As by a power cut."""
    last = finished / "checkpoints/step_000006"
    os.truncate(last / STATE, 1000)
    assert f"{last} is damaged" in run("--resume", finished, "--steps", 7).stdout
    again, first = (arrays(folder / "checkpoints/step_000006/model.safetensors")
                    for folder in (finished, whole))
    assert all((again[name] == first[name]).all() for name in first)


def test_a_run_of_the_book_is_gone_on_with_by_the_book(tmp_path):
    train_book.main(["--model", str(ROOT / "models/tiny"), "--threads", "1", "--questions", "2",
                     "--max_new_tokens", "4", "--eval_every", "0", "--steps", "1", "--out",
                     str(tmp_path / "x")])
    gc.collect()  # unlocks the folder, as the end of the book's process does
    said = run("--resume", tmp_path / "x", "--steps", 2, expect=1).stderr
    assert f"python train.py --resume {tmp_path}/x goes on from it" in said


@pytest.mark.parametrize("name, before, now", [("threads", 2, 1), ("change_every", 1, 0)])
def test_what_is_changed_is_remembered(stopped, monkeypatch, name, before, now):
    monkeypatch.setattr("lab.harness.loop.train", lambda run: None)
    edit_config(stopped, **{name: before})
    expected = config_of(stopped) | {name: now}
    run("--resume", stopped, f"--{name}", now)
    assert config_of(stopped) == expected


def test_decay_lets_the_rate_fall_to_0_after_the_steps_that_were_planned(learner, tmp_path):
    out = tmp_path / "x"
    run("--model", learner, "--out", out, "--steps", 4, "--eval_every", 0, "--learning_rate", 8e-3,
        "--decay", "linear", "--checkpoint_every", 2)
    rates = [line["learning_rate"] for line in lines(out / "metrics.jsonl")]
    assert rates == pytest.approx([8e-3, 6e-3, 4e-3, 2e-3])
    said = run("--resume", out, "--steps", 5, expect=1).stderr
    assert "learning rates follow from --steps 4" in said


def test_what_a_run_is_cannot_be_changed(stopped):
    before = everything(stopped)
    for name in set(OPTIONS) - set(CHANGEABLE):
        default = OPTIONS[name].default
        value = "x" if default is None else "yes" if default is False else default
        said = run("--resume", stopped, f"--{name}", value, expect=1).stderr
        assert f"--{name} cannot be changed in a resumed run, only steps" in said
    assert everything(stopped) == before


@pytest.mark.parametrize("name, every", [("write", 2), ("write_last", 0)])
def test_killed_before_its_model_is_left_a_run_is_not_finished(
        whole, learner, tmp_path, monkeypatch, name, every):
    """All steps and evaluations are on record then: nothing else says that something is missing."""
    argv = ["--model", learner, "--out", tmp_path / "x", *WHOLE, "--steps", 2, "--checkpoint_every",
            every]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, name, interrupt)
        run(*argv)
    edit_config(tmp_path / "x", made_of={"data.jsonl": "0"})
    run(*argv, "--continue")
    assert "changed" not in config_of(tmp_path / "x")  # of a run that starts again nothing has
    last = "checkpoints/step_000002/model.safetensors"
    assert (tmp_path / "x" / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trained_model_alone_is_left_in_the_type_of_the_products(
        whole, learner, tmp_path, dtype):
    """Beside a run that keeps a checkpoint, whose parameters are float32."""
    for name, flags in (("x", ["--checkpoint_every", 0]), ("y", [])):
        run("--model", learner, "--out", tmp_path / name, *TWO_STEPS, "--seed", 4, "--dtype",
            dtype, *flags)
    [model] = (tmp_path / "x/checkpoints").iterdir()
    assert model.name == "step_000002" and not (model / "trainer").exists()
    found = load_file(model / "model.safetensors")
    kept = load_file(tmp_path / "y/checkpoints/step_000002/model.safetensors")
    # in float32 the gap is about 1e-7; in bfloat16 it may be 0, where both round alike
    metrics = lines(tmp_path / "y/metrics.jsonl")
    assert max(line["sampler_gap"] or 0 for line in metrics) < (
        1e-6 if dtype == "float32" else 0.2)
    [in_float32, *_] = lines(whole / "metrics.jsonl")
    assert (metrics[0]["entropy"] == in_float32["entropy"]) == (dtype == "float32")
    for name, parameter in kept.items():
        assert parameter.dtype == torch.float32
        expected = parameter.to(getattr(torch, dtype)) if parameter.dim() > 1 else parameter
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected)
    assert load_tokenizer(model).to_str() == load_tokenizer(learner).to_str()
    assert "is finished. It kept nothing" in run("--resume", tmp_path / "x").stdout


def test_killed_after_its_model_is_left_a_run_is_finished(learner, tmp_path, monkeypatch):
    """Although its config does not say so yet. More steps cannot be asked for, as before."""
    folder, flags = tmp_path / "x", [*TWO_STEPS, "--checkpoint_every", 0]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lab.harness.run.change_config", interrupt)
        run("--model", learner, "--out", folder, *flags)
    before = everything(folder)
    for argv in (["--model", learner, "--out", folder, *flags, "--continue"], ["--resume", folder]):
        assert "is finished. It kept nothing" in run(*argv).stdout
    said = run("--resume", folder, "--steps", 3, expect=1).stderr
    assert "no checkpoint to go on from" in said and everything(folder) == before


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_that_was_stopped_once_leaves_its_model_and_nothing_to_go_back_to(
        learner, tmp_path, monkeypatch, step):
    """Stopped after this step, of two, it keeps a checkpoint; the resumed run makes the rest."""
    folder, flags = tmp_path / "x", [*TWO_STEPS, "--checkpoint_every", 0]
    after_credit_of(step, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
    if step < 2:
        with pytest.raises(SystemExit):
            train.train_beyond([*map(str, ["--model", learner, "--out", folder, *flags])])
        assert (folder / f"checkpoints/step_{step:06d}/trainer").exists()
        run("--resume", folder)
    else:
        train.train_beyond([*map(str, ["--model", learner, "--out", folder, *flags])])
    assert (folder / "checkpoints/step_000002/model.safetensors").exists()
    assert not list(folder.glob("checkpoints/*/trainer"))
    before = everything(folder)
    assert "no checkpoint to go on from" in run("--resume", folder, "--steps", 3,
                                                    expect=1).stderr
    assert everything(folder) == before


def test_problems_of_a_file_are_trained_on(learner, tmp_path):
    data, folder = tmp_path / "problems.jsonl", tmp_path / "x"
    problems = [{"nums": [a, b, 3], "target": a + b + 3} for a in range(1, 8) for b in range(1, 8)]
    write_lines(data, problems)
    flags = ["--model", learner, "--data", data, "--steps", 1, "--eval_every", 0]
    run(*flags, "--out", folder)
    prompt_ids = arrays(folder / "credit/step_000001.npz")["prompt_ids"].tolist()
    prompts = load_tokenizer(learner).decode(prompt_ids, skip_special_tokens=False)
    found = re.findall(r"user\n (\d+) (\d+) 3 make (\d+)<", prompts)
    assert len(found) == 4 and all(int(a) + int(b) + 3 == int(c) for a, b, c in found)
    write_lines(data, [*problems, {"nums": [3, 5, 700], "target": 22}])
    assert "cannot spell" in run(*flags, "--out", tmp_path / "y", expect=1).stderr


def test_a_folder_that_is_moved_stays_whole_and_so_does_the_run_under_its_name(
        whole, learner, tmp_path, monkeypatch):
    """A new run begins under the old name, while the old process still writes its first step."""
    folder, moved = tmp_path / "x", tmp_path / "moved"
    argv = ["--model", learner, "--out", folder, *WHOLE]

    def move_and_begin():
        folder.rename(moved)
        monkeypatch.undo()
        run(*argv)

    after_credit_of(1, monkeypatch, move_and_begin)
    said = run(*argv, expect=1).stderr
    assert "x was moved or removed while this run was writing it" in said
    assert_same_run(whole, folder)
    assert not (moved / "metrics.jsonl").exists()
    run("--resume", moved)
    assert_same_run(whole, moved)


@pytest.mark.parametrize("call", [
    "lab.harness.checkpoint.save_file", "numpy.savez_compressed"])
def test_a_full_disk_leaves_what_was_whole(whole, learner, tmp_path, monkeypatch, call):
    """The disk fills in step 4, at its checkpoint or credit file; then there is room again."""
    def no_room(path, *_, **columns):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        after_credit_of(3, patch, lambda: patch.setattr(call, no_room))
        printed = run("--model", learner, "--out", tmp_path / "x", *WHOLE, expect=1).stderr
    assert "No space left" in printed
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_000002"]
    run("--resume", tmp_path / "x")
    assert_same_run(whole, tmp_path / "x")
