"""A run goes on only from what is as it was; what is on record is never lost in silence."""
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from conftest import ROOT
from engine.errors import UserError
from harness import run as start
from harness.resume import CHANGEABLE, resumed
from harness.run import Run
from harness.run_folder import RunFolder
from harness.settings import OPTIONS
from runs import assert_same_run, config_of, edit_config, lines, run

FLAGS = ["--steps", "4", "--eval_every", "2", "--checkpoint_every", "2", "--sample_every", "1"]


@pytest.fixture(scope="module")
def finished(learner, tmp_path_factory):
    """Four steps, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("going_on") / "finished"
    run("--model", learner, "--out", folder, *FLAGS)
    return folder


@pytest.fixture
def stopped(finished, tmp_path):
    """The same run as a kill after the third step leaves it."""
    folder = shutil.copytree(finished, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000004")
    cut(folder / "metrics.jsonl", 3)
    cut(folder / "evaluations.jsonl", 4)
    cut(folder / "samples.jsonl", 5)
    return folder


def cut(path, count):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def everything(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_a_kill_leaves_goes_on(finished, stopped):
    """What people put beside the credit files stays, and an empty folder is in nobody's way."""
    (stopped / "checkpoints/step_000004").mkdir()
    notes = stopped / "credit/step_000003.txt"
    notes.write_text("mine")
    run("--resume", stopped)
    assert_same_run(finished, stopped)
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("way", ["--resume", "--continue"])
def test_a_record_without_checkpoints_is_not_erased(finished, learner, tmp_path, way):
    folder = shutil.copytree(finished, tmp_path / "x")
    shutil.rmtree(folder / "checkpoints")
    argv = ["--resume", folder]
    if way == "--continue":
        argv = ["--model", learner, "--out", folder, *FLAGS, "--continue"]
    assert "has 4 of its 4 steps, and no more" in run(*argv).stdout
    cut(folder / "metrics.jsonl", 3)
    before = everything(folder)
    said = run(*argv, "--checkpoint_every", 100, expect=1).stderr
    assert "holds a record of 3 steps, and no checkpoint to go on from" in said
    assert everything(folder) == before


def test_a_run_that_never_keeps_checkpoints_is_not_erased_either(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "x")
    shutil.rmtree(folder / "checkpoints")
    edit_config(folder, checkpoint_every=0)
    assert "has 4 of its 4 steps" in run("--resume", folder).stdout
    said = run("--resume", folder, "--steps", 6, expect=1).stderr
    assert "a record of 4 steps" in said


def test_a_run_that_was_stopped_is_not_called_finished(stopped):
    said = run("--resume", stopped, "--steps", 1).stdout
    assert "has 3 of its 4 steps, and no more were asked for" in said


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield torch.set_num_threads(1)
    torch.set_num_threads(before)


def test_what_is_computed_stays_the_same_with_other_flags(finished, stopped, one_thread):
    """Two layers of this model, kept or made again, and one answer at a time: within rounding."""
    printed = run("--resume", stopped, "--micro_batch", 1, "--checkpointing", "--offload_optimizer",
                  "--sample_every", 0, "--checkpoint_every", 4).stdout
    assert "note: --micro_batch 1, --checkpointing True, --offload_optimizer True: " in printed
    whole, resumed = lines(finished / "metrics.jsonl"), lines(stopped / "metrics.jsonl")
    for name in ("loss", "gradient_norm"):
        assert [line[name] for line in resumed] == pytest.approx([line[name] for line in whole],
                                                                 rel=1e-3, abs=1e-6)
    assert {line["step"] for line in lines(stopped / "samples.jsonl")} == {1, 2}
    expected = {**config_of(finished), "micro_batch": 1, "checkpointing": True,
                "offload_optimizer": True, "sample_every": 0, "checkpoint_every": 4}
    assert config_of(stopped) == expected


@pytest.mark.parametrize("name, before, now", [("threads", 1, 2), ("device", "cuda", "cpu")])
def test_what_changes_rounding_is_said_and_remembered(stopped, one_thread, monkeypatch, name,
                                                      before, now):
    monkeypatch.setattr(Run, "steps", lambda run: [])
    edit_config(stopped, **{name: before})
    printed = run("--resume", stopped, f"--{name}", now).stdout
    assert f"note: --{name} {now}: the same computation with other rounding" in printed
    assert config_of(stopped)[name] == now
    assert "note:" not in run("--resume", stopped, f"--{name}", now).stdout


@pytest.fixture
def code_after(stopped, monkeypatch):
    """What is said when the run goes on that holds this entry `code`, and the entry then."""
    monkeypatch.setattr(Run, "steps", lambda run: [])

    def go_on(code, **flags):
        edit_config(stopped, code=code)
        return run("--resume", stopped, **flags), config_of(stopped).get("code")
    return go_on


def test_other_code_than_made_the_steps_before_is_named_and_both_are_kept(stopped, code_after):
    code = config_of(stopped)["code"]
    before = {"1": {**code["1"], "countdown_task.py": "0" * 64, "harness/removed.py": "1" * 64}}
    told, now = code_after(before)
    assert ("note: countdown_task.py: not the code that made the steps before, so from step 3 on"
            in told.stdout)
    today = {"countdown_task.py": code["1"]["countdown_task.py"]}
    assert now == before | {"3": today}
    for kept, cut_off in ((before | {"2": today}, {}), (code, {"3": {"train.py": "2" * 64}})):
        told, now = code_after(kept | cut_off)
        assert "note:" not in told.stdout and now == kept


def test_where_no_step_is_left_of_other_code_nothing_is_said(stopped, code_after):
    """All steps are made again. A run of an older version has nothing to compare with."""
    code = config_of(stopped)["code"]
    told, now = code_after({})
    assert "note:" not in told.stdout and list(now) == ["3"]
    shutil.rmtree(stopped / "checkpoints")
    cut(stopped / "metrics.jsonl", 2)
    told, now = code_after({"1": {"train.py": "0"}})
    assert "note:" not in told.stdout and list(now) == ["1"]
    assert now["1"].items() >= code["1"].items()  # what resumes is loaded besides


def test_a_finished_run_that_lost_an_evaluation_is_told_how_to_get_it(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "x")
    cut(folder / "evaluations.jsonl", 5)
    said = run("--resume", folder, expect=1).stderr
    assert "lost the greedy evaluation at step 4" in said and "checkpoints from step 4 on" in said
    shutil.rmtree(folder / "checkpoints/step_000004")
    run("--resume", folder)
    assert_same_run(finished, folder)


def test_what_a_run_is_cannot_be_changed(stopped):
    for name in set(OPTIONS) - set(CHANGEABLE):
        with pytest.raises(UserError, match=f"^--{name} cannot be changed in a resumed run, only "):
            resumed(stopped, {name: OPTIONS[name].default})
    unnamed = {name for name, flag in OPTIONS.items() if not flag.changes_result}
    assert unnamed - set(CHANGEABLE) == {"out"}


def test_a_finished_run_without_its_last_checkpoint_stays_finished(finished, tmp_path):
    """Its only checkpoint is of a Ctrl-C; --checkpoint_every 1 now does not make it unfinished."""
    folder = shutil.copytree(finished, tmp_path / "x")
    shutil.rmtree(folder / "checkpoints/step_000004")
    edit_config(folder, checkpoint_every=0)
    printed = run("--resume", folder, "--checkpoint_every", 1).stdout
    assert "has 4 of its 4 steps, and no more" in printed


def edit(path, change):
    path.write_text("\n".join(change(path.read_text().split("\n"))))


def rewrite(path, change):
    tensors = load_file(path)
    save_file({name: change(name, tensor) for name, tensor in tensors.items()
               if change(name, tensor) is not None}, path)


SEALED = "checkpoints/step_000002/"
STATE = SEALED + "trainer/state.safetensors"
DAMAGE = {
    "a line is lost": (lambda run: edit(run / "metrics.jsonl", lambda lines: lines[1:]),
                       "line 1 is step 2: lines are missing"),
    "another model": (lambda run: rewrite(run / SEALED / "model.safetensors",
                                          lambda name, tensor: tensor + 1e-3),
                      "model.safetensors was changed after it was written"),
    "lost moments": (lambda run: rewrite(run / STATE, lambda name, tensor: None),
                     "state.safetensors was changed"),
    "no state": (lambda run: (run / STATE).unlink(), "cannot read .*state.safetensors"),
    "another recipe": (lambda run: (run / SEALED / "recipe.json").write_text("{}"),
                       "recipe.json was changed after it was written"),
    "another step": (lambda run: os.rename(run / SEALED, run / "checkpoints/step_000003"),
                     "its step is 2, not 3"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_said_and_nothing_is_touched(stopped, name):
    damage, words = DAMAGE[name]
    damage(stopped)
    before = everything(stopped)
    with pytest.raises(UserError, match=words):
        train.main(["--resume", str(stopped)])
    assert everything(stopped) == before


def test_a_damaged_checkpoint_is_moved_away_and_the_one_before_goes_on(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "x")
    rewrite(folder / "checkpoints/step_000004/model.safetensors", lambda name, tensor: tensor + 1)
    said = run("--resume", folder, "--steps", 5, expect=1).stderr
    assert f"Move {folder}/checkpoints/step_000004 away" in said
    (folder / "checkpoints/step_000004").rename(tmp_path / "damaged")
    run("--resume", folder)
    assert_same_run(finished, folder)


def test_other_problems_than_at_the_start_are_noticed(learner, tmp_path):
    data = tmp_path / "problems.jsonl"
    problems = [{"nums": [a, b, 3], "target": a + b + 3} for a in range(1, 8) for b in range(1, 8)]
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    flags = ["--model", learner, "--out", tmp_path / "x", "--data", data, "--steps", 1,
             "--checkpoint_every", 1, "--eval_every", 0]
    run(*flags)
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems[::-1]))
    said = run("--resume", tmp_path / "x", "--steps", 2, expect=1).stderr
    assert "--data" in said and "is not what it was when this run began" in said
    data.unlink()
    assert "problems.jsonl" in run("--resume", tmp_path / "x", "--steps", 2, expect=1).stderr


def test_the_model_is_compared_where_it_is_still_needed(learner, tmp_path):
    model = shutil.copytree(learner, tmp_path / "model")
    flags = ["--model", model, "--steps", 1, "--checkpoint_every", 1, "--eval_every", 0]
    run(*flags, "--out", tmp_path / "free")
    run(*flags, "--out", tmp_path / "anchored", "--kl", 0.1)
    rewrite(model / "model.safetensors", lambda name, tensor: tensor * 1.001)
    run("--resume", tmp_path / "free", "--steps", 2)  # goes on from its own checkpoint
    said = run("--resume", tmp_path / "anchored", "--steps", 2, expect=1).stderr
    assert "--model" in said and "is not what it was" in said


def replace_at(step, monkeypatch, deed):
    """Do this once the metrics of this step are on record."""
    append = RunFolder.append

    def append_and_do(self, name, line):
        append(self, name, line)
        if name == "metrics.jsonl" and line["step"] == step:
            deed()
    monkeypatch.setattr(RunFolder, "append", append_and_do)


def begin(model, folder, barrier, results):
    """What a second start meets that comes when the first has looked but not begun to write."""
    create = start.create_folder

    def wait_and_create(*given):
        barrier.wait()
        return create(*given)
    start.create_folder = wait_and_create
    torch.set_num_threads(1)
    try:
        train.main(["--model", str(model), "--out", str(folder), *FLAGS])
        results.put("done")
    except UserError as error:
        results.put(str(error))


def test_of_two_starts_at_once_one_is_told(finished, learner, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=begin, args=(learner, tmp_path / "x", barrier, results))
            for _ in range(2)]
    for process in both:
        process.start()
    said = sorted(results.get(timeout=120) for _ in both)
    for process in both:
        process.join()
    assert "done" in said
    other = said[1 - said.index("done")]
    assert "exists already" in other or "is being written by another process" in other
    assert_same_run(finished, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_run_goes_on_when_nobody_can_be_told(finished, learner, tmp_path):
    command = [sys.executable, ROOT / "train.py", "--model", learner, "--out", tmp_path / "x"]
    words = " ".join(f"'{word}'" for word in [*command, *FLAGS])
    subprocess.run(["sh", "-c", f"{words} 2> /dev/full | head -n 1"], capture_output=True)
    assert_same_run(finished, tmp_path / "x")


@pytest.mark.parametrize("call, said", [
    ("harness.run_folder.shutil.copyfile", "step_000004: No space left"),
    ("numpy.savez_compressed", "step_000004.npz: No space left")])
def test_a_full_disk_leaves_what_was_whole(finished, learner, tmp_path, monkeypatch, call, said):
    """The disk fills in step 4, at its checkpoint or credit file; then there is room again."""
    def no_room(path, *_, **columns):
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        replace_at(3, patch, lambda: patch.setattr(call, no_room))
        printed = run("--model", learner, "--out", tmp_path / "x", *FLAGS, expect=1).stderr
    assert "cannot write" in printed and said in printed
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_000002"]
    run("--resume", tmp_path / "x")
    assert_same_run(finished, tmp_path / "x")
