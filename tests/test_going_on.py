"""A run goes on only from what is as it was; what is on record is never lost in silence."""
import errno
import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from conftest import ROOT, cut, write_lines
from engine.errors import UserError
from engine.tokens import load_tokenizer
from harness import run as start
from harness.resume import CHANGEABLE, resumed
from harness.run import Run
from harness.run_folder import RunFolder
from harness.settings import OPTIONS
from runs import WHOLE, arrays, assert_same_run, config_of, edit_config, lines, run


@pytest.fixture
def finished(whole, tmp_path):
    """Six steps: it could go on after the fourth and after the last."""
    return shutil.copytree(whole, tmp_path / "finished")


@pytest.fixture
def stopped(whole, tmp_path):
    """The same run as a kill after the fifth step leaves it."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000006")
    cut(folder / "metrics.jsonl", 5)
    cut(folder / "evaluations.jsonl", 4)
    return folder


def everything(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("way, every", [("--resume", 2), ("--continue", 2), ("--resume", 0)])
def test_a_record_without_checkpoints_is_not_erased(finished, learner, way, every):
    """Nor is that of a run that never keeps any."""
    shutil.rmtree(finished / "checkpoints")
    edit_config(finished, checkpoint_every=every)
    argv = ["--resume", finished]
    if way == "--continue":
        argv = ["--model", learner, "--out", finished, *WHOLE, "--continue"]
    assert "has 6 of its 6 steps, and no more" in run(*argv).stdout
    cut(finished / "metrics.jsonl", 3)
    before = everything(finished)
    said = run(*argv, "--checkpoint_every", 100, expect=1).stderr
    assert "holds a record of 3 steps, and no checkpoint to go on from" in said
    assert everything(finished) == before


def test_a_run_that_was_stopped_is_not_called_finished(stopped):
    said = run("--resume", stopped, "--steps", 1).stdout
    assert "has 5 of its 6 steps, and no more were asked for" in said


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield torch.set_num_threads(1)
    torch.set_num_threads(before)


def test_what_is_computed_stays_the_same_with_other_flags(whole, stopped, one_thread):
    """Two layers of this model, kept or made again, and one answer at a time: within rounding."""
    printed = run("--resume", stopped, "--micro_batch", 1, "--checkpointing", "--offload_optimizer",
                  "--sample_every", 0, "--checkpoint_every", 4).stdout
    assert "note: --micro_batch 1, --checkpointing True, --offload_optimizer True: " in printed
    for name in ("loss", "gradient_norm"):
        resumed, expected = ([line[name] for line in lines(folder / "metrics.jsonl")]
                             for folder in (stopped, whole))
        assert resumed == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert {line["step"] for line in lines(stopped / "samples.jsonl")} == {1, 2, 3, 4}
    expected = {**config_of(whole), "micro_batch": 1, "checkpointing": True,
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
    assert ("note: countdown_task.py: not the code that made the steps before, so from step 5 on"
            in told.stdout)
    today = {"countdown_task.py": code["1"]["countdown_task.py"]}
    assert now == before | {"5": today}
    for kept, cut_off in ((before | {"2": today}, {}), (code, {"5": {"train.py": "2" * 64}})):
        told, now = code_after(kept | cut_off)
        assert "note:" not in told.stdout and now == kept


def test_where_no_step_is_left_of_other_code_nothing_is_said(stopped, code_after):
    """All steps are made again. A run of an older version has nothing to compare with."""
    code = config_of(stopped)["code"]
    told, now = code_after({})
    assert "note:" not in told.stdout and list(now) == ["5"]
    shutil.rmtree(stopped / "checkpoints")
    cut(stopped / "metrics.jsonl", 2)
    told, now = code_after({"1": {"train.py": "0"}})
    assert "note:" not in told.stdout and list(now) == ["1"]
    assert now["1"].items() >= code["1"].items()  # what resumes is loaded besides


def test_a_finished_run_that_lost_an_evaluation_is_told_how_to_get_it(whole, finished):
    cut(finished / "evaluations.jsonl", 5)
    said = run("--resume", finished, expect=1).stderr
    assert "lost the greedy evaluation at step 6" in said and "checkpoints from step 6 on" in said
    shutil.rmtree(finished / "checkpoints/step_000006")
    run("--resume", finished)
    assert_same_run(whole, finished)


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


SEALED = "checkpoints/step_000004/"
STATE = SEALED + "trainer/state.safetensors"
DAMAGE = {
    "another model": (lambda run: spoil(run / SEALED / "model.safetensors"),
                      "model.safetensors was changed after it was written"),
    "another state": (lambda run: spoil(run / STATE), "state.safetensors was changed"),
    "no state": (lambda run: (run / STATE).unlink(), "cannot read .*state.safetensors"),
    "another step": (lambda run: os.rename(run / SEALED, run / "checkpoints/step_000005"),
                     "its step is 4, not 5")}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_said_and_nothing_is_touched(stopped, name):
    damage, words = DAMAGE[name]
    damage(stopped)
    before = everything(stopped)
    with pytest.raises(UserError, match=words):
        train.main(["--resume", str(stopped)])
    assert everything(stopped) == before


def test_a_damaged_checkpoint_is_moved_away_and_the_one_before_goes_on(whole, finished, tmp_path):
    newest = finished / "checkpoints/step_000006"
    spoil(newest / "model.safetensors")
    assert f"Move {newest} away" in run("--resume", finished, "--steps", 7, expect=1).stderr
    newest.rename(tmp_path / "damaged")
    run("--resume", finished)
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
        train.main(["--model", str(model), "--out", str(folder), *WHOLE])
        results.put("done")
    except UserError as error:
        results.put(str(error))


def test_of_two_starts_at_once_one_is_told(whole, learner, tmp_path):
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
        replace_at(3, patch, lambda: patch.setattr(call, no_room))
        printed = run("--model", learner, "--out", tmp_path / "x", *WHOLE, expect=1).stderr
    assert "cannot write" in printed and said in printed
    assert [path.name for path in (tmp_path / "x/checkpoints").iterdir()] == ["step_000002"]
    run("--resume", tmp_path / "x")
    assert_same_run(whole, tmp_path / "x")
