"""What the leaderboards share, by hand: means over runs, the short form, plans, reports."""
from pathlib import Path

import pytest

from engine.errors import UserError
from harness.flags import Flag
from research.boards.leaderboard import (arm_and_key, end_with, flags_of_runs, from_short_form,
                                         mean_step_seconds, planner, require_same_plan,
                                         run_leaderboard, short_form, success_by_parts,
                                         total_seconds, write_report)
from research.probes.common import Findings


def run_of(success, seconds=2.0):
    """A run whose steps took so many seconds of the processor, and ten times as many on a clock."""
    metrics = [{"success": share, "processor_seconds": seconds, "seconds": 10 * seconds}
               for share in success]
    return {"metrics": metrics, "config": {"git_commit": "x", "versions": {}, "questions": 2,
                                           "answers": 4}}


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
    stored = short_form(run_of([0.25, 0.5], 1.23456))
    assert stored == [8, 1.2346, [2, 4]]
    result = {"made_by": [{"git_commit": "older", "versions": {"torch": "1"}, "runs": ["none-s1"]},
                          {"git_commit": "abc", "versions": {"torch": "2"}, "runs": ["none-s0"]}]}
    again = from_short_form(stored, result, "none-s0")
    config = again["config"]
    assert config["git_commit"] == "abc" and config["questions"] * config["answers"] == 8
    assert short_form(again) == stored


def test_every_setting_of_a_plan_is_compared():
    settings = {"common": "x", "steps": 60}
    require_same_plan("board", {"settings": settings}, settings)
    for setting in settings:
        words = f"Its {setting} is 1, and here it is {settings[setting]}"
        with pytest.raises(UserError, match=words):
            require_same_plan("board", {"settings": settings | {setting: 1}}, settings)


def test_the_plan_of_a_run(tmp_path):
    """The folder has no spaces and no --, and the arm's own flags come last."""
    plan_run = planner(tmp_path, {"four times": "--questions 32"}, ["--questions", "8"], 60)
    planned = plan_run("four times", 3)
    assert (planned.folder, planned.steps) == (tmp_path / "four-times-s3", 60)
    assert planned.flags == ["--questions", "8", "--questions", "32"]
    plan_run = planner(tmp_path, {"none --loss dpo": ""}, [], 60)
    assert plan_run("none --loss dpo", 3).folder == tmp_path / "none-loss-dpo-s3"
    assert planned.name == "four times-s3"
    assert arm_and_key(planned.name) == ("four times", ("four times", 3))


class Made:
    """An experiment whose runs are made at once, but for those of a failing arm."""

    def __init__(self, failing=""):
        self.made, self.failing = [], failing

    def missing(self, keys):
        return [planner(Path("x"), {key[0]: ""}, ["--threads", "1"], 2)(*key) for key in keys
                if key not in self.made]

    def make(self, keys, command, processes, threads):
        self.made += [key for key in keys if key[0] != self.failing]
        return {arm: command for arm, _ in keys if arm == self.failing}


@pytest.mark.parametrize("failing, argv, made, reported", [
    ("", [], ["one", "two"], True), ("one", [], [], True), ("", ["--report_only"], [], True),
    ("", ["--dry_run"], [], False)])
def test_stages_are_made_one_after_the_other(failing, argv, made, reported, capsys):
    """Where an arm fails, the stages after it are not begun, and what is finished is reported."""
    experiment, reports = Made(failing), []

    def stages():
        yield "first", [("one", 0)]
        assert experiment.made, "a stage is asked for when those before it are finished"
        yield "second", [("one", 0), ("two", 0)]

    def run():
        run_leaderboard("x", "A question?", {"more": Flag(1, "more"), **flags_of_runs("runs")},
                        lambda args: (experiment, stages()), lambda *known: reports.append(known),
                        [*argv, "--runs", "y"])

    if failing:
        with pytest.raises(SystemExit):
            run()
        assert "failed: one: python -m research x --runs y" in capsys.readouterr().out
    else:
        run()
    assert [arm for arm, _ in dict.fromkeys(experiment.made)] == made
    assert [known[2] for known in reports] == ["python -m research x"] * reported
    printed = capsys.readouterr().out
    assert ("x/one-s0\n" in printed) == (argv == ["--dry_run"])
    if made:
        assert "first: 0 of 1 runs are finished\nsecond: 1 of 2 runs are finished" in printed


def test_arms_that_failed_end_in_an_error(capsys):
    end_with({})
    with pytest.raises(SystemExit) as stopped:
        end_with({"rloo": "rloo-s0: no memory"})
    assert stopped.value.code == 1 and "failed: rloo: rloo-s0: no mem" in capsys.readouterr().out


@pytest.mark.parametrize("name, command", [
    ("board", "publish results/board"), ("notes-1", "publish results/notes-1 --name notes_1")])
def test_the_report_names_the_command_that_publishes_it(tmp_path, monkeypatch, capsys, name,
                                                        command):
    monkeypatch.chdir(tmp_path)
    write_report(name, "board", Findings("Who gains?", [], []), {}, {"none-s0": run_of([0.5])},
                 "python -m research board")
    last_line = capsys.readouterr().out.strip().splitlines()[-1]
    assert last_line == f"  python -m research {command}"
    assert (tmp_path / "results" / name / "numbers.json").is_file()
