"""The leaderboard of a real model, from runs made by hand."""
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import write_log

from analysis.gains import chance_to_be_called
from engine.errors import UserError
from harness.settings import make_settings, read_flags
from research.__main__ import main
from research.boards import leaderboard, real_board
from research.boards.leaderboard import by_run_name, power_table, short_form
from research.boards.real_board import (ARMS, COMMON, CONTROLS, FORMS, LATER, complete_gains,
                                        flags_of_arms, keys_of, later_table, plan, quarters_table,
                                        real_leaderboard)
from research.publish.results import write_result

ARGS = SimpleNamespace(model="models/tiny", prompt="brief", seeds=6, arms="", questions=0,
                       device="cpu", runs="runs/x", processes=0, afresh=False)


def real_runs(args):
    """The plan of every run, arm by arm."""
    experiment, [(_, keys)] = plan(SimpleNamespace(**vars(args) | {"afresh": True}))
    return [experiment.plan_run(*key) for key in keys]


def run_of(curve, seconds=2.0, questions=4):
    metrics = [{"success": success, "seconds": seconds, "processor_seconds": seconds}
               for success in curve]
    return {"metrics": metrics, "config": {"questions": questions, "answers": 8,
                                           "git_commit": None, "versions": {}}}


def arms(gains):
    """Plain GRPO from 25% to 50%, more with the seed; each arm gains so much, and a point more
    and less in turns."""
    found = {}
    for arm, gain in {"none": 0.0, **gains}.items():
        found[arm] = {}
        for seed in range(6):
            luck = 0.01 * (-1) ** seed if arm != "none" else 0.0
            curve = np.linspace(0.25, 0.5, 16) + seed / 100 + gain + luck
            found[arm][seed] = run_of(curve, 8.0 if arm == "measured" else 2.0)
    return found


@pytest.mark.parametrize("prompt", FORMS)
def test_the_flags_of_every_arm_are_taken_and_arms_come_one_after_the_other(prompt):
    args = SimpleNamespace(**vars(ARGS) | {"prompt": prompt})
    planned = real_runs(args)
    for run in planned:
        s = make_settings(read_flags([*run.flags, "--seed", str(run.seed)]))
        assert (s.eval_every, s.save_model, s.method_flags["prompt"]) == (0, False, prompt)
    assert [run.arm for run in planned] == [arm for arm in flags_of_arms(args)
                                            for _ in range(4 if arm in LATER else 6)]
    assert len({run.folder for run in planned}) == len(planned)
    times = {run.arm: make_settings(read_flags(run.flags)).questions / FORMS[prompt].questions
             for run in planned if "--questions" in run.flags}
    others = {"four times": 4} if prompt == "brief" else {"four times": 4, "twice": 2, "half": 0.5}
    assert times == others
    assert ("outcome_conditional 0.5" in flags_of_arms(args)) == (prompt == "brief")


def test_a_gpu_and_another_number_of_problems_have_a_leaderboard_of_their_own():
    args = SimpleNamespace(**vars(ARGS) | {"device": "cuda:1", "questions": 8})
    assert real_board.name_of_board(ARGS) == "real_board_brief"
    assert real_board.name_of_board(args) == "real_board_brief_8_gpu"
    assert real_board.common_flags(args) == f"{COMMON} --device cuda"  # whichever GPU it is
    folders = {run.folder for run in real_runs(ARGS)}
    for run in real_runs(args):
        s = make_settings(read_flags(run.flags))
        assert s.device == "cuda:1" and s.questions == (32 if run.arm == "four times" else 8)
        assert run.folder not in folders


@pytest.mark.parametrize("experiment", ["board", "notes", "real_board"])
def test_every_experiment_makes_as_many_runs_at_a_time_as_there_is_memory_for(
        monkeypatch, tmp_path, experiment):
    """Three here. On the leaderboard of a real model they share the eight cores."""
    def stop(missing, processes, command):
        raise SystemExit(f"{processes} at a time, {missing[0].threads} threads")

    monkeypatch.setattr("harness.planned.runs_at_a_time", lambda s: 3)
    monkeypatch.setattr("harness.planned.usable_cores", lambda: 8)
    monkeypatch.setattr("harness.planned.is_large", lambda folder: experiment == "real_board")
    monkeypatch.setattr("analysis.experiment.make_runs", stop)
    flags = [] if experiment == "notes" else ["--afresh"]
    threads = 2 if experiment == "real_board" else 1
    with pytest.raises(SystemExit, match=f"3 at a time, {threads} threads"):
        main([experiment, *flags, "--runs", str(tmp_path)])


def test_the_arms_that_are_made_can_be_chosen():
    def arms_made(typed):
        _, [(_, keys)] = plan(SimpleNamespace(**vars(ARGS) | {"arms": typed, "afresh": True}))
        return list(dict.fromkeys(arm for arm, _ in keys))

    assert arms_made("four times, none") == ["four times", "none"]
    assert arms_made("") == list(flags_of_arms(ARGS))
    with pytest.raises(UserError, match="--arms: there is no arm 'nothing', only none, measured,"):
        arms_made("none, nothing")


def test_what_the_table_says():
    """A gain of 10 points with one point to either side is seen, one of half a point is not, and
    the control's p is its own."""
    gains = {"measured": 0.1, "random": -0.1, "inverse_logprob": 0.005, "four times": 0.2}
    table = real_leaderboard(arms(gains), {"random": -0.03})
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert list(rows) == ["four times", "measured", "inverse_logprob", "random"]
    reach = 2.5706 * 0.01 * np.sqrt(6 / 5) / np.sqrt(6)  # t of 5 degrees of freedom
    assert rows["random"]["gain"].value == pytest.approx(-0.1)
    assert rows["random"]["gain"].interval == pytest.approx((-0.1 - reach, -0.1 + reach), abs=1e-5)
    assert rows["measured"]["verdict"] == "better" and rows["random"]["verdict"] == "worse"
    assert rows["inverse_logprob"]["verdict"] == "no difference seen"
    assert rows["measured"]["seconds"] == 4 and rows["random"]["predicted"] == -0.03
    alone = {row[0]: row[3] for row in real_leaderboard(arms({"random": -0.1}), {}).rows}
    assert rows["random"]["p"] == pytest.approx(2 * alone["random"])  # of two methods
    begun = arms(gains)
    del begun["random"][3]
    assert "random" not in {row[0] for row in real_leaderboard(begun, {}).rows}
    assert set(CONTROLS) <= set(ARMS)
    curve = quarters_table(arms({})).rows[0]
    assert list(curve[:2]) == ["none", 6] and curve[2] == pytest.approx(0.4)
    assert curve[3] < curve[4] < curve[5] < curve[6]


def test_later_methods_do_not_move_the_published_verdicts():
    """They are not in the leaderboard, and its correction does not count them."""
    gains = {"random": -0.1, "rlsd": -0.1, "negative_only": 0.0}
    before, after = arms({"random": -0.1}), arms(gains)
    assert real_leaderboard(after, {}).rows == real_leaderboard(before, {}).rows
    rows = {row[0]: row for row in later_table(after, {"rlsd": -0.06}).rows}
    assert list(rows) == ["rlsd", "negative_only"]
    alone = {row[0]: row[3] for row in real_leaderboard(before, {}).rows}
    assert rows["rlsd"][3] == pytest.approx(2 * alone["random"]) and rows["rlsd"][4] == -0.06


def test_what_the_leaderboard_could_have_seen():
    """Six pairs, one point to either side. Of two methods one is called: the other is tested at 5%,
    and the one that is called at 2.5%, as it had the smallest p. The control is tested alone."""
    table = power_table(complete_gains(arms({"measured": 0.1, "random": -0.1,
                                             "inverse_logprob": 0.005})), list(CONTROLS))
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert {arm: row["tests"] for arm, row in rows.items()} == {
        "measured": 1, "random": 2, "inverse_logprob": 1}
    for row in rows.values():
        spread = 0.01 * (6 / 5) ** 0.5
        assert row["spread"] == pytest.approx(spread, rel=1e-3)
        assert row["2"] == pytest.approx(
            chance_to_be_called(0.02, spread, 6, row["tests"]), rel=1e-2)


def test_a_finished_run_is_taken_whatever_number_of_threads_it_had(tmp_path, monkeypatch):
    """The plan names none: what suits a machine is on record."""
    args = SimpleNamespace(**vars(ARGS) | {"runs": str(tmp_path)})
    monkeypatch.setattr(real_board, "COMMON", f"{COMMON} --threads 0")  # as of a real model
    run, other, *_ = real_runs(args)
    flags = [*run.flags, "--steps", str(run.steps), "--seed", str(run.seed)]
    config = make_settings(read_flags(flags)).to_json() | {"threads": 7}
    lines = [{"step": step, "success": 0.5, "processor_seconds": 1.0}
             for step in range(1, run.steps + 1)]
    write_log(run.folder, {}, config, lines)
    write_log(other.folder, {}, config | {"seed": other.seed}, lines[:-1])  # not finished
    experiment, _ = plan(SimpleNamespace(**vars(args) | {"afresh": True}))
    [found] = experiment.arms(keys_of(args, ["none"]))["none"].values()
    assert len(found["metrics"]) == run.steps


def test_a_published_leaderboard_is_gone_on_with(tmp_path, monkeypatch):
    """Where an arm's flags have changed since, it is made again; so is all with other settings."""
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    assert plan(ARGS)[0].known == {}
    whole = arms({"random": -0.1, "measured": 0.1})
    settings = {"common": COMMON, "steps": FORMS["brief"].steps, "model": "tiny",
                "arms": flags_of_arms(ARGS) | {"random": "--mitigation other"}}
    stored = {name: short_form(run) for name, run in by_run_name(whole).items()}
    result = {"settings": settings, "values": {"runs": stored},
              "made_by": [{"git_commit": "x", "versions": {}}]}
    write_result(tmp_path / "real_board_brief.json", result)
    experiment, [(title, keys)] = plan(ARGS)
    kept = experiment.known
    assert {arm for arm, _ in kept} == {"none", "measured"} and len(kept) == 12
    assert title == "real_board_brief" and len(keys) == 6 * len(flags_of_arms(ARGS))
    again = experiment.arms(keys)
    before, after = (real_leaderboard(part, {}).rows for part in (whole, again))
    assert after[0][2].value == pytest.approx(before[0][2].value, abs=0.5 / 32)
    assert after[0][5] == 4
    other = SimpleNamespace(**vars(ARGS) | {"model": "models/other"})
    with pytest.raises(UserError, match="Its model is .*, and here it is .* --afresh"):
        plan(other)
    settings["steps"] = 3
    write_result(tmp_path / "real_board_brief.json", result)
    with pytest.raises(UserError, match="Its steps is .*, and here it is .* --afresh"):
        plan(ARGS)
