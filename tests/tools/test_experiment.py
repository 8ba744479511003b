"""An experiment: which runs are planned, made, and used again."""
from pathlib import Path

import pytest
from conftest import write_log

from tools.helpers import experiment as experiments
from tools.helpers.experiment import Experiment, finished_run
from engine.errors import UserError
from tools.helpers.planned import PlannedRun
from harness.settings import make_settings, read_flags


@pytest.fixture
def planned(tmp_path):
    flags = "--threads 1 --eval_every 0".split()
    return PlannedRun("none", 0, tmp_path / "none-s0", flags, steps=2)


def config_of(planned):
    flags = [*planned.flags, "--steps", str(planned.steps), "--seed", str(planned.seed)]
    return make_settings(read_flags(flags)).to_json()


METRICS = [{"step": 1, "success": 0.5}, {"step": 2, "success": 0.25}]


def test_a_run_is_used_again_when_it_has_its_last_step(planned):
    assert finished_run(planned) is None
    write_log(planned.folder, {}, config_of(planned), METRICS)
    assert [line["success"] for line in finished_run(planned)["metrics"]] == [0.5, 0.25]
    (planned.folder / "metrics.jsonl").write_text('{"step": 1, "success": 0.5}\n')
    assert finished_run(planned) is None


def test_a_run_with_other_settings_is_refused(planned):
    write_log(planned.folder, {}, config_of(planned) | {"threads": 2}, METRICS)
    refusal = "has --threads 2, not 1: remove it, and the run is made again"
    with pytest.raises(UserError, match=refusal):
        finished_run(planned)


def test_a_setting_that_changes_no_number_may_differ(planned):
    write_log(planned.folder, {}, config_of(planned) | {"checkpoint_every": 7}, METRICS)
    assert finished_run(planned) is not None


def test_an_older_run_lacks_a_flag_that_came_later(planned):
    config = config_of(planned)
    del config["change_every"]
    write_log(planned.folder, {}, config, METRICS)
    assert finished_run(planned) is not None


def test_a_run_that_was_made_of_another_file_is_refused(planned, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("new")
    made_of = {str(words): "0" * 64}
    write_log(planned.folder, {}, config_of(planned) | {"made_of": made_of}, METRICS)
    with pytest.raises(UserError, match=f"is an earlier run, and since then {words} has changed.*"
                                         "--accept_changes"):
        finished_run(planned)


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
