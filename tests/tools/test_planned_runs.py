"""Runs side by side: made, stopped and gone on with, waited for, failed."""
import os
import signal
import threading
import time

import pytest

from harness.record import checkpoint_folders
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


def test_all_or_nothing(planned, capfd):
    """The second arm fails: the third is not begun, and nobody is finished who is not."""
    arms = [planned("good"), planned("bad", more="--model nowhere"), planned("late")]
    runs = Runs(arms, 1, all_or_nothing=True)
    assert runs.make() and list(runs.failed) == ["bad"] and runs.finished == 1
    assert not arms[2].log.exists() and "failed" not in capfd.readouterr().out
