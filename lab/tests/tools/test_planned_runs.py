"""Runs side by side: made, stopped and gone on with, waited for, failed; and used again."""
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest

from conftest import ROOT, refusal, write_log
from lab.harness.made_of import files_of_run, made_of
from lab.tools import planned_runs
from lab.tools.planned_runs import (PlannedRun, finished_run, make_runs, side_by_side,
                                    time_left)
from run import copy_files

TRAIN = """
# As train.py, without a model: a line for each step, and on SIGINT the end after this step.
import json, signal, sys, time
from pathlib import Path

words, told = dict(zip(sys.argv[1:], sys.argv[2:])), []
signal.signal(signal.SIGINT, lambda *_: told.append(True))
folder, steps = Path(words.get("--out") or words["--resume"]), int(words["--steps"])
for name in ("checkpoints", "code"):
    (folder / name).mkdir(parents=True, exist_ok=True)
config = {"mitigation": "none", "steps": steps}
(folder / "config.json").write_text(json.dumps(config))
lines = folder / "metrics.jsonl"
lines.touch()
done = lines.read_text().count("\\n")
print("continuing after step", done, flush=True)
for step in range(done + 1, steps + 1):
    time.sleep(0.02)
    with open(lines, "a") as file:
        print(json.dumps({"step": step, "seconds": 0.02}), file=file)
    if told:
        sys.exit(f"stopped after step {step}")
"""


@pytest.fixture
def planned(tmp_path):
    """A planned run of the book, by a train.py that needs no torch."""
    def plan(arm="none", seed=0, steps=2, more="", text=TRAIN):
        project = tmp_path / f"project_of_{arm}"
        project.mkdir(exist_ok=True)
        (project / "train.py").write_text(text)
        flags = f"--model {ROOT / 'models/tiny'} --eval_every 0 {more}"
        return PlannedRun(arm, seed, tmp_path / arm / f"s{seed}", flags.split(), steps, project,
                          is_book=True)
    return plan


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(planned_runs, "PAUSE", 0.02)


def test_stopped_and_started_again(planned, capfd):
    """Ctrl-C: the run that is being made is told, and no other is begun. Started again it goes on
    from there, and what is finished is passed over."""
    first, second = planned(steps=500), planned(seed=1)

    def stop():
        while not first.steps_made():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        make_runs([first, second], "the same command", 1)
    assert ended.value.code == 130
    said = capfd.readouterr().out
    assert "stopped. 0 of 2 runs are finished. Continue with: the same command" in said
    done = first.steps_made()
    assert f"stopped after step {done}" in first.log.read_text()
    assert 0 < done < 500 and not first.is_finished() and not second.folder.exists()
    shorter = replace(first, steps=done + 1)
    assert make_runs([shorter], "", 2) == {} and shorter.is_finished()
    assert f"continuing after step {done}" in first.log.read_text()
    assert make_runs([shorter], "", 2) == {}
    assert "0 of 1 runs have to be made" in capfd.readouterr().out


def test_a_run_without_checkpoints_leaves_none(planned):
    """Once it is finished; and a finished one is left as it is."""
    first, second = (replace(planned(seed=seed), keeps_checkpoints=False) for seed in range(2))
    assert make_runs([first], "", 1) == {} and not (first.folder / "checkpoints").exists()
    before = [(path, path.stat().st_mtime_ns) for path in sorted(first.folder.rglob("*"))]
    assert make_runs([first, second], "", 1) == {} and second.is_finished()
    assert [(path, path.stat().st_mtime_ns) for path in sorted(first.folder.rglob("*"))] == before


def test_the_time_left_is_that_of_the_runs_made_here(monkeypatch):
    """One was made in 200 seconds, and three are left."""
    monkeypatch.setattr(planned_runs.time, "time", lambda: 1200)
    assert time_left(1000, 1, 3) == ", about 10 min left"
    assert time_left(1000, 0, 4) == time_left(1000, 4, 0) == ""


def test_a_run_has_the_threads_that_are_planned(planned):
    run = planned(text="import os; print(os.environ['OMP_NUM_THREADS'])\n")
    for threads in (1, 3):
        make_runs([run], "", 1, threads)
    assert run.log.read_text().split() == ["1", "3"]


def test_the_run_that_needs_most_decides_how_many_are_made_at_a_time(planned, monkeypatch):
    """One of a small model on a CPU needs a core, one of a large model all, and one on a GPU that.
    """
    eight_cores(monkeypatch, is_large=False)
    runs = [planned(seed=0), planned(seed=1), planned("gpu", more="--device cuda")]
    assert side_by_side([run.settings for run in runs[:2]], 0) == (8, 1)
    assert side_by_side([run.settings for run in runs], 0) == (1, 1)
    eight_cores(monkeypatch, is_large=True)  # these share the cores
    assert side_by_side([run.settings for run in runs[:2]], 0) == (1, 8)
    assert side_by_side([run.settings for run in runs[:2]], 3) == (3, 2)  # as it was typed


def eight_cores(monkeypatch, is_large):
    monkeypatch.setattr(planned_runs, "is_large", lambda folder: is_large)
    monkeypatch.setattr(planned_runs, "usable_cores", lambda: 8)


def test_a_failed_arm_is_left_and_the_others_are_made(planned, capfd):
    """What the program itself says at its end is the reason."""
    text = "import sys; sys.exit('train.py: there is no model folder nowhere')\n"
    bad = [planned("bad", seed, text=text) for seed in range(2)]
    failed = make_runs([*bad, planned()], "", 1)
    assert list(failed) == ["bad"] and failed["bad"].startswith("bad-s0: train.py: ")
    assert "nowhere" in failed["bad"] and not bad[1].log.exists() and planned().is_finished()
    assert "finished: none-s0" in capfd.readouterr().out


def test_a_run_that_the_system_killed_says_so(planned):
    """Its log says nothing about it."""
    run = planned(text="import os; print('step 1', flush=True); os.kill(os.getpid(), 9)\n")
    reason = make_runs([run], "", 1)["none"]
    assert "it was killed. The system does that when there is not enough memory" in reason
    assert f"(log: {run.log})" in reason


@pytest.fixture
def run(tmp_path):
    flags = "--threads 1 --eval_every 0".split()
    return PlannedRun("none", 0, tmp_path / "none-s0", flags, steps=2)


METRICS = [{"step": 1, "success": 0.5}, {"step": 2, "success": 0.25}]


def write_run(run, **changed):
    """A finished run of the lab without checkpoints."""
    settings = run.settings
    config = {**settings.to_json(), "made_of": made_of(settings), "finished": 2,
              "model_config": {}, **changed}
    write_log(run.folder, {}, config, METRICS)
    copy_files(files_of_run(settings), run.folder / "code")


def test_a_run_is_used_again_when_it_is_finished(run):
    assert finished_run(run) is None
    write_run(run)
    assert [line["success"] for line in finished_run(run).metrics] == [0.5, 0.25]
    path = run.folder / "config.json"
    path.write_text(path.read_text().replace('"finished": 2', '"finished": 1'))
    assert finished_run(run) is None
    state = run.folder / "checkpoints/step_000002/trainer/state.safetensors"
    state.parent.mkdir(parents=True)
    (state.parent.parent / "config.json").touch()
    assert finished_run(run) is None
    state.touch()
    assert finished_run(run) is not None


METHOD = "@mitigation\ndef mine(rollouts):\n    return 1\n"


@pytest.mark.parametrize("changed, file, said", [
    ({"threads": 2}, {}, "with --threads 2 instead of 1: remove it, and the run is made again"),
    ({"made_of": {"x.jsonl": "0" * 64}}, {}, "an earlier run, and since then x.jsonl has changed"),
    ({}, {"code/grpo.py": "X = 1\n"}, "an earlier run, and since then X (grpo.py) has changed"),
    ({}, {"code_after_000001/grpo.py": "X = 1\n"}, "it is an earlier run, and since then "),
    ({}, {"code": ""}, "it is an earlier run, and since then "),  # of a version without copies
    ({"checkpoint_every": 7}, {"code/mitigations.py": METHOD}, None)])  # which changes no number
def test_a_run_that_is_not_what_the_plan_says_is_refused(run, changed, file, said):
    write_run(run, **changed)
    for name, text in file.items():
        if not text:
            shutil.rmtree(run.folder / name)
            continue
        (run.folder / name).parent.mkdir(exist_ok=True)
        with open(run.folder / name, "a") as opened:
            opened.write(text)
    if said:
        assert said in refusal(finished_run, run)
    else:
        assert finished_run(run) is not None
        (run.folder / "metrics.jsonl").write_text('{"step": 2, "success": 0.5}\n')
        assert "metrics.jsonl does not have one line for each" in refusal(finished_run, run)


def test_a_plan_takes_any_number_of_threads_and_a_setting_that_an_earlier_version_had_not(run):
    """The setting had its default."""
    run.flags[1] = "0"
    write_run(run, threads=2)
    path = run.folder / "config.json"
    path.write_text(path.read_text().replace('"kl": 0.0, ', ""))
    assert "kl" not in json.loads(path.read_text()) and finished_run(run) is not None
    run.flags.extend(["--kl", "0.5"])
    assert "was made with --kl 0.0 instead of 0.5" in refusal(finished_run, run)
