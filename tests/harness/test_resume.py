"""What may be typed beside --resume and --continue: how a run is made, not which run it is."""
import json
import shutil

import pytest
import torch

from harness.run import Run, resumed
from engine.errors import UserError
from harness.resume import CHANGEABLE
from harness.settings import OPTIONS
from runs import assert_same_run, lines, run

FLAGS = ["--steps", "4", "--eval_every", "0", "--checkpoint_every", "2", "--sample_every", "1"]


@pytest.fixture(scope="module")
def finished(learner, tmp_path_factory):
    """Four steps, with checkpoints after the second and the fourth."""
    folder = tmp_path_factory.mktemp("resume") / "finished"
    run("--model", learner, "--out", folder, *FLAGS)
    return folder


@pytest.fixture
def stopped(finished, tmp_path):
    """The same run as a kill after the second step leaves it."""
    folder = shutil.copytree(finished, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000004")
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(text[:2]))
    return folder


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    yield torch.set_num_threads(1)
    torch.set_num_threads(before)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_what_is_computed_stays_the_same_with_other_flags(finished, stopped, one_thread):
    """Two layers of this model, kept or made again, and one answer at a time: within rounding."""
    printed = run("--resume", stopped, "--micro_batch", 1, "--checkpointing", "--offload_optimizer",
                  "--sample_every", 0, "--checkpoint_every", 4).stdout
    assert "note: --micro_batch 1, --checkpointing True, --offload_optimizer True: " in printed
    assert printed.count("\nnote: ") == 1
    whole, resumed = lines(finished / "metrics.jsonl"), lines(stopped / "metrics.jsonl")
    for name in ("loss", "gradient_norm"):
        assert [line[name] for line in resumed] == pytest.approx([line[name] for line in whole],
                                                                 rel=1e-3, abs=1e-6)
    assert {line["step"] for line in lines(stopped / "samples.jsonl")} == {1, 2}
    expected = {**config_of(finished), "micro_batch": 1, "checkpointing": True,
                "offload_optimizer": True, "sample_every": 0, "checkpoint_every": 4}
    assert config_of(stopped) == expected and list(config_of(stopped)) == list(expected)


def test_other_threads_are_taken_said_and_remembered(finished, stopped, one_thread, monkeypatch):
    printed = run("--resume", stopped, "--threads", 1).stdout
    assert "note:" not in printed and config_of(stopped) == config_of(finished)
    assert_same_run(finished, stopped)
    shutil.rmtree(stopped / "checkpoints/step_000004")
    monkeypatch.setattr(Run, "steps", lambda run: [])
    printed = run("--resume", stopped, "--threads", 2).stdout
    assert "note: --threads 2: the same computation with other rounding" in printed
    assert torch.get_num_threads() == 2 and config_of(stopped)["threads"] == 2
    run("--resume", stopped, "--threads", 0)
    assert config_of(stopped)["threads"] == 1  # one for every 64 hidden units


def test_another_device_is_said(stopped, monkeypatch):
    monkeypatch.setattr(Run, "steps", lambda run: [])
    config = config_of(stopped)
    (stopped / "config.json").write_text(json.dumps({**config, "device": "cuda"}))
    printed = run("--resume", stopped, "--device", "cpu").stdout
    assert "note: --device cpu: the same" in printed and config_of(stopped)["device"] == "cpu"


def test_what_a_run_is_cannot_be_changed(stopped):
    for name in set(OPTIONS) - set(CHANGEABLE):
        with pytest.raises(UserError, match=f"^--{name} cannot be changed in a resumed run, only "):
            resumed(stopped, {name: OPTIONS[name].default}, False)


def test_a_loop_can_be_started_again_with_flags_that_change_no_result(finished, stopped, learner):
    argv = ["--model", learner, "--out", stopped, *FLAGS, "--continue"]
    assert "note:" not in run(*argv, "--sample_every", 0).stdout
    assert config_of(stopped)["sample_every"] == 0 and len(lines(stopped / "metrics.jsonl")) == 4
    assert "is finished" in run(*argv, "--micro_batch", 1, "--threads", 1).stdout
    assert config_of(stopped)["micro_batch"] == config_of(finished)["micro_batch"]
    said = run(*argv, "--dtype", "bfloat16", expect=1).stderr
    assert "with dtype float32 instead of bfloat16" in said


def test_a_finished_run_without_its_last_checkpoint_stays_finished(finished, tmp_path):
    """Its only checkpoint is of a Ctrl-C; --checkpoint_every 1 now does not make it unfinished."""
    folder = shutil.copytree(finished, tmp_path / "x")
    shutil.rmtree(folder / "checkpoints/step_000004")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), "checkpoint_every": 0}))
    assert "is finished after 4 steps" in run("--resume", folder, "--checkpoint_every", 1).stdout


def test_all_that_names_no_run_can_be_changed():
    unnamed = {name for name, flag in OPTIONS.items() if not flag.changes_result}
    assert unnamed == {"threads", "micro_batch", "rollouts_timeout", "sample_every",
                       "checkpoint_every", "out"}
    assert unnamed - set(CHANGEABLE) == {"out"}


def test_another_checkpoint_every_erases_no_record(stopped):
    """With --checkpoint_every 2 a record of three steps had a checkpoint, which was removed."""
    shutil.rmtree(stopped / "checkpoints")
    with open(stopped / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "run_id": config_of(stopped)["run_id"]}) + "\n")
    said = run("--resume", stopped, "--checkpoint_every", 100, expect=1).stderr
    assert "holds a record of 3 steps, and no checkpoint to go on from (they were removed)" in said


