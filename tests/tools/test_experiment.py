"""An experiment: which runs are planned, made, and used again."""
from pathlib import Path

import pytest
from conftest import refusal, write_log

from tools.helpers import experiment as experiments
from tools.helpers.experiment import Experiment, finished_run, settings_of
from engine.errors import UserError
from tools.helpers.planned import PlannedRun
from harness.made_of import made_of


@pytest.fixture
def planned(tmp_path):
    flags = "--threads 1 --eval_every 0".split()
    return PlannedRun("none", 0, tmp_path / "none-s0", flags, steps=2)


METRICS = [{"step": 1, "success": 0.5}, {"step": 2, "success": 0.25}]


def write_run(planned, **changed):
    """A finished run without checkpoints."""
    settings = settings_of(planned)
    config = {**settings.to_json(), "made_of": made_of(settings), "finished": 2, **changed}
    write_log(planned.folder, {}, config, METRICS)


def test_a_run_is_used_again_when_it_is_finished(planned):
    assert finished_run(planned) is None
    write_run(planned)
    assert [line["success"] for line in finished_run(planned)["metrics"]] == [0.5, 0.25]
    path = planned.folder / "config.json"
    path.write_text(path.read_text().replace('"finished": 2', '"finished": 1'))
    assert finished_run(planned) is None
    state = planned.folder / "checkpoints/step_000002/trainer/state.safetensors"
    state.parent.mkdir(parents=True)
    (state.parent.parent / "config.json").touch()
    assert finished_run(planned) is None
    state.touch()
    assert finished_run(planned) is not None


def test_a_run_whose_record_has_a_hole_is_refused(planned):
    write_run(planned)
    (planned.folder / "metrics.jsonl").write_text('{"step": 2, "success": 0.5}\n')
    assert "metrics.jsonl does not have one line for each" in refusal(finished_run, planned)


def test_a_run_with_other_settings_is_refused(planned):
    write_run(planned, threads=2)
    refusal = "has --threads 2, not 1: remove it, and the run is made again"
    with pytest.raises(UserError, match=refusal):
        finished_run(planned)


def test_a_setting_that_changes_no_number_may_differ(planned):
    write_run(planned, checkpoint_every=7)
    assert finished_run(planned) is not None


def test_a_run_that_was_made_of_another_file_is_refused(planned, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("new")
    write_run(planned, made_of={**made_of(settings_of(planned)), str(words): "0" * 64})
    said = refusal(finished_run, planned)
    assert f"is an earlier run, and since then {words} has changed" in said


def test_published_runs_need_no_folder_and_each_folder_is_read_once(monkeypatch):
    read = []

    def finished(planned):
        read.append(planned.name)
        return {0: "of a folder", 1: "of a folder"}.get(planned.seed)

    monkeypatch.setattr(experiments, "finished_run", finished)
    monkeypatch.setattr(experiments, "make_runs", lambda planned, *_, **more: (planned, more))
    experiment = Experiment(lambda arm, seed: PlannedRun(arm, seed, Path("x"), [], 60),
                            known={("none", 1): "published"})
    keys = [("none", seed) for seed in range(3)]
    for _ in range(2):
        assert experiment.arms(keys) == {"none": {0: "of a folder", 1: "published"}}
    assert read == ["none-s0", "none-s2", "none-s2"]
    assert [run.name for run in experiment.missing(keys)] == ["none-s2"]
    assert list(experiment.finished) == [("none", 1), ("none", 0)]
    made, more = experiment.make(keys, "command", 2, 3, before=None)
    assert [(run.name, run.threads) for run in made] == [("none-s0", 3), ("none-s2", 3)]
    assert more == {"before": None}
