"""--track: the curves of another program are the numbers on record, also of a resumed run."""
import sqlite3
import sys

import pytest

from conftest import INSTALL
from runs import SHORT, lines, run

FLAGS = [*SHORT, "--steps", "2", "--eval_every", "2", "--eval_tasks", "4"]
TRY = "to try it: pip install {}"


def tracked(name, folder):
    """The lines on record of a run of two steps that was resumed for a third; and what it said."""
    said = run(*FLAGS, "--track", name, "--out", folder).stdout
    run("--resume", folder, "--steps", "3")
    return lines(folder / "metrics.jsonl"), lines(folder / "evaluations.jsonl"), said


def test_tensorboard_shows_each_step_once(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason=INSTALL)
    folder = tmp_path / "run"
    steps, evaluations, said = tracked("tensorboard", folder)
    assert f"tensorboard --logdir {tmp_path}" in said
    shown = events.EventAccumulator(str(folder / "tensorboard")).Reload()

    def curve(name):
        return {event.step: pytest.approx(event.value) for event in shown.Scalars(name)}

    assert curve("train/reward") == {line["step"]: line["reward"] for line in steps}
    greedy = {line["step"]: line["success"] for line in evaluations if line["mode"] == "greedy"}
    assert curve("held_out/greedy/success") == greedy and sorted(greedy) == [0, 2, 3]


def test_trackio_keeps_them_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before it is imported
    pytest.importorskip("trackio", reason=TRY.format("trackio"))
    steps, _, said = tracked("trackio", tmp_path / "run")
    assert said.count("trackio show --project") == 1
    with sqlite3.connect(tmp_path / "trackio/grpo-credit-lab.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    kept: dict[str, list[int]] = {}
    for name, step, metrics in rows:
        if "train/reward" in str(metrics):
            kept.setdefault(name, []).append(step)
    assert sorted(kept.values()) == [[1, 2], [1, 2, 3]]  # the run, and all of it once resumed
    assert [line["step"] for line in steps] == [1, 2, 3]


def test_wandb_writes_into_the_runs_folder_and_sends_nothing(tmp_path):
    pytest.importorskip("wandb", reason=TRY.format("wandb"))
    *_, said = tracked("wandb", tmp_path / "run")
    written = list((tmp_path / "run/wandb").glob("offline-run-*/run-run-*.wandb"))
    assert len(written) == 2 and all(path.stat().st_size for path in written)
    assert "wandb sync" in said


@pytest.mark.parametrize("name, package", [
    ("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")])
def test_a_program_that_is_not_installed_is_one_sentence(monkeypatch, tmp_path, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = run(*FLAGS, "--track", name, "--out", tmp_path / "run", expect=1).stderr
    assert f"--track {name} needs the package {name}: pip install {name}" in said
    assert not (tmp_path / "run").exists()
