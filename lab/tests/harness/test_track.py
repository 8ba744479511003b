"""--track: the curves of TensorBoard are the numbers on record, also of a resumed run."""
import shutil
import sys

import pytest

from conftest import INSTALL
from lab_runs import SHORT, run
from runs import lines

FLAGS = [*SHORT, "--steps", "2", "--eval_every", "2", "--eval_tasks", "4"]


def tracked(folder):
    """The lines on record of a run of two steps that lost the second checkpoint, and was resumed
    for a third step; and what it said."""
    said = run(*FLAGS, "--track", "tensorboard", "--out", folder).stdout
    shutil.rmtree(folder / "checkpoints/step_000002")
    run("--resume", folder, "--steps", "3")
    return lines(folder / "metrics.jsonl"), lines(folder / "evaluations.jsonl"), said


def test_tensorboard_shows_each_step_once(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason=INSTALL)
    folder = tmp_path / "run"
    steps, evaluations, said = tracked(folder)
    assert f"tensorboard --logdir {tmp_path}" in said
    shown = events.EventAccumulator(str(folder / "tensorboard")).Reload()

    def curve(name):
        return [(event.step, pytest.approx(event.value)) for event in shown.Scalars(name)]

    assert curve("train/reward") == [(line["step"], line["reward"]) for line in steps]
    greedy = [(line["step"], line["success"]) for line in evaluations if line["mode"] == "greedy"]
    assert curve("held_out/greedy/success") == greedy
    assert [step for step, _ in greedy] == [0, 2, 3]


def test_a_program_that_is_not_installed_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = run(*FLAGS, "--track", "tensorboard", "--out", tmp_path / "run", expect=1).stderr
    assert "--track tensorboard needs the package tensorboard: pip install tensorboard" in said
    assert not (tmp_path / "run").exists()
