"""The leaderboard of a real model, from runs made by hand."""
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import write_log

from engine.errors import UserError
from harness.settings import make_settings, read_flags
from research.experiments import real_board
from research.experiments.published import write_result
from research.experiments.real_board import (ARMS, COMMON, CONTROLS, FORMS, arms_of, board_table,
                                             curve_table, finished, kept_runs, planned_runs,
                                             values_of, wanted_arms)

ARGS = SimpleNamespace(model="models/tiny", prompt="brief", seeds=6, arms="", runs="runs/x",
                       processes=0)


def run_of(curve, seconds=2.0, questions=4):
    metrics = [{"success": success, "seconds": seconds, "processor_seconds": seconds}
               for success in curve]
    return {"metrics": metrics, "config": {"questions": questions, "answers": 8,
                                           "git_commit": None, "versions": {}}}


def arms(leads):
    """Plain GRPO from 25% to 50%, more with the seed; each arm leads by so much, and by a point
    more and less in turns."""
    found = {}
    for arm, lead in {"none": 0.0, **leads}.items():
        found[arm] = {}
        for seed in range(6):
            chance = 0.01 * (-1) ** seed if arm != "none" else 0.0
            curve = np.linspace(0.25, 0.5, 16) + seed / 100 + lead + chance
            found[arm][seed] = run_of(curve, 8.0 if arm == "measured" else 2.0)
    return found


@pytest.mark.parametrize("prompt", FORMS)
def test_the_flags_of_every_arm_are_taken_and_arms_come_one_after_the_other(prompt):
    args = SimpleNamespace(**vars(ARGS) | {"prompt": prompt})
    planned = planned_runs(args)
    for run in planned:
        s = make_settings(read_flags([*run.flags, "--seed", str(run.seed)]))
        assert (s.eval_every, s.save_model, s.method_flags["prompt"]) == (0, False, prompt)
    assert [run.arm for run in planned] == [arm for arm in arms_of(args) for _ in range(6)]
    assert len({run.folder for run in planned}) == len(planned)
    of_four = make_settings(read_flags(next(run.flags for run in planned
                                            if run.arm == "four times")))
    assert of_four.questions == 4 * FORMS[prompt].questions
    assert ("outcome_conditional 0.5" in arms_of(args)) == (prompt == "brief")


def test_the_arms_that_are_made_can_be_chosen():
    args = SimpleNamespace(**vars(ARGS) | {"arms": "four times, none"})
    assert wanted_arms(args) == ["four times", "none"]
    assert wanted_arms(ARGS) == [arm for arm in ARMS if arm != "measured 16"]
    args.arms = "none, nothing"
    with pytest.raises(UserError, match="there is no arm 'nothing'; the arms of --prompt brief"):
        wanted_arms(args)


def test_what_the_table_says():
    """A lead of 10 points with one point to either side is seen, one of half a point is not, and
    the control's p is its own."""
    leads = {"measured": 0.1, "random": -0.1, "inverse_logprob": 0.005, "four times": 0.2}
    table = board_table(arms(leads), {"random": -0.03})
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert list(rows) == ["four times", "measured", "inverse_logprob", "random"]
    reach = 2.5706 * 0.01 * np.sqrt(6 / 5) / np.sqrt(6)  # t of 5 degrees of freedom
    assert rows["random"]["lead"] == pytest.approx(-0.1)
    assert rows["random"]["95%"] == pytest.approx((-0.1 - reach, -0.1 + reach), abs=1e-5)
    assert rows["measured"]["verdict"] == "ahead" and rows["random"]["verdict"] == "behind"
    assert rows["inverse_logprob"]["verdict"] == "no difference seen, within 1.6 points"
    assert rows["measured"]["seconds"] == 4 and rows["random"]["predicted"] == -0.03
    alone = {row[0]: row[4] for row in board_table(arms({"random": -0.1}), {}).rows}
    assert rows["random"]["p"] == pytest.approx(2 * alone["random"])  # of two methods
    begun = arms(leads)
    del begun["random"][3]
    assert "random" not in {row[0] for row in board_table(begun, {}).rows}
    assert set(CONTROLS) <= set(ARMS)
    curve = curve_table(arms({})).rows[0]
    assert list(curve[:2]) == ["none", 6] and curve[2] == pytest.approx(0.4)
    assert curve[3] < curve[4] < curve[5] < curve[6]


def test_a_finished_run_is_taken_whatever_number_of_threads_it_had(tmp_path):
    """The plan names none: what suits a machine is on record."""
    args = SimpleNamespace(**vars(ARGS) | {"runs": str(tmp_path)})
    run, other, *_ = planned_runs(args)
    for one in (run, other):
        one.flags += ["--threads", "0"]  # as of a model without a recipe of its own
    flags = [*run.flags, "--steps", str(run.steps), "--seed", str(run.seed)]
    config = make_settings(read_flags(flags)).to_json() | {"threads": 7}
    lines = [{"step": step, "success": 0.5, "processor_seconds": 1.0}
             for step in range(1, run.steps + 1)]
    write_log(run.folder, {}, config, lines)
    write_log(other.folder, {}, config | {"seed": other.seed}, lines[:-1])  # not finished
    [found] = finished([run, other], {})["none"].values()
    assert len(found["metrics"]) == run.steps


def test_a_published_leaderboard_is_gone_on_with(tmp_path, monkeypatch):
    """Where an arm's flags have changed since, it is made again; so is all with other settings."""
    monkeypatch.setattr(real_board, "RESULTS", tmp_path)
    assert kept_runs(ARGS) == {}
    whole = arms({"random": -0.1, "measured": 0.1})
    settings = {"common": COMMON, "steps": FORMS["brief"].steps, "model": "tiny",
                "arms": arms_of(ARGS) | {"random": "--mitigation other"}}
    result = {"settings": settings, "values": values_of(whole),
              "made_by": [{"git_commit": "x", "versions": {}}]}
    write_result(tmp_path / "real_board_brief.json", result)
    kept = kept_runs(ARGS)
    assert {arm for arm, _ in kept} == {"none", "measured"} and len(kept) == 12
    again = {"none": {}, "measured": {}}
    for (arm, seed), run in kept.items():
        again[arm][seed] = run
    before, after = (board_table(part, {}).rows for part in (whole, again))
    assert after[0][2] == pytest.approx(before[0][2], abs=0.5 / 32) and after[0][6] == 4
    other = SimpleNamespace(**vars(ARGS) | {"model": "models/other"})
    with pytest.raises(UserError, match="made with another model: --afresh"):
        kept_runs(other)
    settings["steps"] = 3
    write_result(tmp_path / "real_board_brief.json", result)
    with pytest.raises(UserError, match="made with another steps: --afresh"):
        kept_runs(ARGS)
