"""Runs side by side: made, stopped and gone on with, waited for, failed."""
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import refusal

import train
from engine.errors import UserError
from harness.record import checkpoint_folders, locked
from tools.runs import PlannedRun, Runs, make_runs


@pytest.fixture
def planned(learner, tmp_path):
    def plan(arm="none", seed=0, steps=2, more="--eval_every 0"):
        flags = f"--model {learner} --questions 2 --answers 2 {more}"
        return PlannedRun(arm, seed, tmp_path / arm / f"s{seed}", flags.split(), steps)
    return plan


def stop_when(condition):
    """Sends this process Ctrl-C once the condition holds."""
    def wait():
        while not condition():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_stopped_and_started_again(planned, capfd, monkeypatch):
    """Ctrl-C: the run that is being made keeps a checkpoint, no other is begun. Started again it
    goes on from there, and what is finished is passed over."""
    more = "--eval_every 0 --checkpoint_every 1000"
    first, second = planned(steps=80, more=more), planned(seed=1, steps=80, more=more)
    monkeypatch.setattr("tools.runs.PAUSE", 0.02)
    stop_when(lambda: first.steps_made() > 0)
    with pytest.raises(SystemExit) as ended:
        make_runs([first, second], 1, "the same command")
    assert ended.value.code == 130
    said = capfd.readouterr().out
    assert "stopped, 0 of 2 runs are finished. Go on with: the same command" in said
    done = max(checkpoint_folders(first.folder))
    assert 0 < done < 80 and not first.is_finished() and not second.folder.exists()
    assert make_runs([first], 2, "") == {} and first.is_finished()
    assert f"going on after step {done}" in first.log.read_text()
    assert not Runs([first], 2).waiting


def test_a_failed_arm_is_left_and_the_others_are_made(planned, capfd):
    bad = [planned("bad", seed, more="--model nowhere") for seed in range(2)]
    failed = make_runs([*bad, planned()], 1, "")
    assert list(failed) == ["bad"] and failed["bad"].startswith("bad-s0: train.py: ")
    assert "nowhere" in failed["bad"] and not bad[1].log.exists() and planned().is_finished()
    assert "finished: none-s0" in capfd.readouterr().out


def test_a_damaged_run_is_named_with_the_way_out(planned):
    run = planned()
    train.main(run.command[1:])
    (run.folder / "metrics.jsonl").write_text("no JSON\n")
    said = refusal(Runs, [run], 1)
    assert "metrics.jsonl, line 1" in said and said.endswith(f"Remove {run.folder}, and it is made "
                                                             "again")


def test_the_time_left_is_that_of_the_busiest_process(planned, monkeypatch):
    """Three runs of 60 steps on two processes, foretold to take 240 s each: the third comes after
    one of the others. The first takes 780 s; the second is at its half then."""
    runs = Runs([replace(planned(seed=seed, steps=60), seconds=240) for seed in range(3)], 2)
    made = [0, 0, 0]
    monkeypatch.setattr(PlannedRun, "steps_made", lambda run: made[run.seed])
    monkeypatch.setattr(PlannedRun, "is_finished", lambda run: made[run.seed] == 60)
    monkeypatch.setattr(Runs, "start", lambda runs, run: runs.running.append(
        (run, SimpleNamespace(poll=lambda: 0 if made[run.seed] == 60 else None))))
    monkeypatch.setattr(time, "monotonic", lambda: 0)
    assert runs.time_left() == ", about 8 min left"
    runs.start_some()
    made[:] = 30, 15, 0  # 120 + 240 on one, 180 on the other
    assert runs.time_left() == ", about 6 min left"
    made[:] = 60, 30, 0  # 390 on one, 780 on the other
    monkeypatch.setattr(time, "monotonic", lambda: 780)
    runs.collect()
    assert runs.finished == 1 and runs.time_left() == ", about 13 min left"
    assert Runs([planned(seed=0, steps=60)], 1).time_left() == ""  # it is finished


def test_all_or_nothing(planned, capfd):
    """The second arm fails: the third is not begun, and nobody is finished who is not."""
    arms = [planned("good"), planned("bad", more="--model nowhere"), planned("late")]
    runs = Runs(arms, 1, all_or_nothing=True)
    assert runs.make() and list(runs.failed) == ["bad"] and runs.finished == 1
    assert not arms[2].log.exists() and "failed" not in capfd.readouterr().out


def test_a_run_that_another_process_writes_is_told(planned):
    run = planned()
    run.folder.mkdir(parents=True)
    with locked(run.folder):
        failed = make_runs([run, planned("other")], 1, "")
    assert failed == {"none": f"none-s0: {run.folder} is being written by another process"}
    assert not run.log.exists() and planned("other").is_finished()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells of a parent's end")
def test_a_killed_program_leaves_no_training_behind(planned):
    """Its run keeps a checkpoint, as after Ctrl-C."""
    run = planned(steps=10_000)
    parent = multiprocessing.get_context("fork").Process(target=Runs([run], 1).make)
    parent.start()
    while not run.steps_made():
        time.sleep(0.01)
    parent.kill()
    parent.join()
    while is_written(run.folder):
        time.sleep(0.01)
    assert "Go on with: python train.py --resume" in run.log.read_text()


def is_written(folder):
    try:
        with locked(folder):
            return False
    except UserError:
        return True
