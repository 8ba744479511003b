"""What the experiments share, by hand: means over runs, the short form, plans and finished runs."""
from pathlib import Path

import pytest
from conftest import write_log

from engine.errors import UserError
from harness.planned import PlannedRun
from harness.settings import make_settings, read_flags
from research.boards import common
from research.boards.common import (end_with, finished_arms, finished_run, from_short_form,
                                         mean_step_seconds, require_same_plan, short_form,
                                         success_by_parts, total_seconds, write_report)
from research.probes.common import Findings


def run_of(success, seconds=2.0):
    """A run whose steps took so many seconds of the processor, and ten times as many on a clock."""
    metrics = [{"success": share, "processor_seconds": seconds, "seconds": 10 * seconds}
               for share in success]
    return {"metrics": metrics, "config": {"git_commit": "x", "versions": {}}}


def test_means_over_runs_by_hand():
    """Steps of 2 and 2 and of 5 seconds: the mean is over steps. Success is a mean over seeds."""
    runs = [run_of([0.1, 0.3]), run_of([0.5], 5.0)]
    assert mean_step_seconds(runs) == 3 and total_seconds(runs) == 9
    assert total_seconds(runs, "seconds") == 90
    seeds = {0: run_of([0.1, 0.2, 0.3, 0.4]), 1: run_of([0.1, 0.2, 0.3, 0.4]),
             2: run_of([0.7, 0.8, 0.9, 1.0])}
    assert success_by_parts(seeds, 2) == pytest.approx([0.35, 0.55])


def test_a_run_is_the_same_after_it_was_published():
    """The short form has the seconds to four digits, and its answers stand in the settings."""
    stored = short_form(run_of([0.25, 0.5], 1.23456), 8)
    assert stored == [8, 1.2346, [2, 4]]
    result = {"made_by": [{"git_commit": "older", "versions": {"torch": "1"}, "runs": ["none-s1"]},
                          {"git_commit": "abc", "versions": {"torch": "2"}, "runs": ["none-s0"]}]}
    again = from_short_form(stored, result, "none-s0")
    config = again["config"]
    assert config["git_commit"] == "abc" and config["questions"] * config["answers"] == 8
    assert short_form(again, 8) == stored


def test_every_setting_of_a_plan_is_compared():
    settings = {"common": "x", "steps": 60}
    require_same_plan("board", {"settings": settings}, settings)
    for setting in settings:
        words = f"Its {setting} is 1, and here it is {settings[setting]}"
        with pytest.raises(UserError, match=words):
            require_same_plan("board", {"settings": settings | {setting: 1}}, settings)


def test_a_published_run_needs_no_folder_and_is_taken_first(monkeypatch):
    planned = [PlannedRun("none", seed, Path(f"none-s{seed}"), [], 60) for seed in range(3)]
    folders = {"none-s0": "in a folder", "none-s1": "in a folder"}
    monkeypatch.setattr(common, "finished_run", lambda one: folders.get(one.folder.name))
    assert finished_arms(planned, {("none", 1): "published"}) == {
        "none": {0: "in a folder", 1: "published"}}


def test_a_run_with_as_many_threads_as_the_plan_says_is_taken(tmp_path):
    """And not before its last step."""
    flags = "--threads 1 --eval_every 0".split()
    planned = PlannedRun("none", 0, tmp_path / "none-s0", flags, steps=2)
    assert finished_run(planned) is None
    config = make_settings(read_flags([*flags, "--steps", "2", "--seed", "0"])).to_json()
    metrics = [{"step": 1, "success": 0.5}, {"step": 2, "success": 0.25}]
    write_log(planned.folder, {}, config, metrics)
    assert len(finished_run(planned)["metrics"]) == 2
    (planned.folder / "metrics.jsonl").write_text('{"step": 1, "success": 0.5}\n')
    assert finished_run(planned) is None
    planned.folder = tmp_path / "other-s0"
    write_log(planned.folder, {}, config | {"threads": 2}, metrics)
    refusal = "has --threads 2, not 1: remove it, and the run is made again"
    with pytest.raises(UserError, match=refusal):
        finished_run(planned)


def test_arms_that_failed_end_in_an_error(capsys):
    end_with({})
    with pytest.raises(SystemExit) as stopped:
        end_with({"rloo": "rloo-s0: no memory"})
    assert stopped.value.code == 1 and "failed: rloo: rloo-s0: no mem" in capsys.readouterr().out


@pytest.mark.parametrize("folder, command", [
    ("board", "publish {folder}$"), ("notes-1", "publish {folder} --name notes_1$")])
def test_the_report_names_the_command_that_publishes_it(tmp_path, capsys, folder, command):
    path = tmp_path / folder
    path.mkdir()
    write_report(path, "board", Findings("Who gains?", [], []), {}, {"none-s0": run_of([0.5])}, 3.0,
                 "python -m research board")
    last_line = capsys.readouterr().out.strip().splitlines()[-1]
    assert last_line.endswith(command.format(folder=path).removesuffix("$"))
    assert (path / "numbers.json").is_file()
