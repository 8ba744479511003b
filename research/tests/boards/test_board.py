"""The leaderboard from runs made by hand: which run is planned next, and what is said of them."""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import write_log

from engine.errors import UserError
from harness.settings import make_settings, read_flags
from research.__main__ import main
from research.boards import arms, protocol
from research.boards import board as boards
from research.boards import leaderboard
from research.boards.board import board_leaderboard, board_values, second_look_table
from research.boards.protocol import (AGAIN, FIRST, RATES, REPORTED, Board, board_experiment,
                                      board_stages, close_rates)
from research.publish.results import write_result

MIDDLE = RATES[1]


def run_of(success, seconds=1.0):
    return {"metrics": [{"success": success, "processor_seconds": seconds}] * 60,
            "config": {"questions": 8, "answers": 8}}


def at(rate, arm, seed):
    return f"{arm}-{rate}", seed


def board_of(gains, seeds=REPORTED):
    """All rates are known: the middle one suits every arm. Plain GRPO is at 30% and more with the
    seed; an arm gains so much over it, and half a point more and less in turns."""
    known = {at(rate, arm, 100): run_of(0.4 if rate == MIDDLE else 0.3)
             for arm in arms.ARMS for rate in RATES}
    for seed in seeds:
        for arm, gain in {"none": 0.0, **gains}.items():
            luck = 0.005 * (-1) ** seed if arm != "none" else 0.0
            known[at(MIDDLE, arm, seed)] = run_of(0.3 + seed / 1000 + gain + luck,
                                                  2.0 if arm == "measured" else 1.0)
    return Board(board_experiment(Path("nowhere"), known))


def rows(table):
    return {row[0]: dict(zip(table.columns, row)) for row in table.rows}


def test_every_arm_has_flags_that_are_taken():
    for flags in (arms.ARMS | arms.placebos(list(arms.METHODS))).values():
        make_settings(read_flags(flags.split()))
    assert arms.placebos(["rloo", "gtpo", "by_kind"]) == {
        "gtpo-placebo": "--advantage gtpo --placebo advantages",
        "by_kind-placebo": "--mitigation by_kind --placebo weights"}


def test_two_rates_within_a_point_are_asked_again():
    low, middle, high = RATES
    assert close_rates({low: 0.3, middle: 0.4}) == []  # one is not known yet
    assert close_rates({low: 0.3, middle: 0.4, high: 0.385}) == [middle]
    assert close_rates({low: 0.3, middle: 0.4, high: 0.395}) == [middle, high]


def test_the_other_seed_decides_between_close_rates():
    known = {at(rate, "gtpo", 100): run_of(success)
             for rate, success in zip(RATES, (0.3, 0.4, 0.395))}
    board = Board(board_experiment(Path("nowhere"), known))
    assert board.rate("gtpo") is None
    known |= {at(RATES[1], "gtpo", 101): run_of(0.2), at(RATES[2], "gtpo", 101): run_of(0.3)}
    assert board.rate("gtpo") == board.rate("gtpo-placebo") == RATES[2]


def test_a_finished_run_is_taken_where_its_settings_are_the_plans(tmp_path):
    experiment = board_experiment(tmp_path, {})
    board, planned = Board(experiment), experiment.plan_run("none-16x8-2.5e-4", 40)
    assert planned.folder == tmp_path / "none-16x8-2.5e-4-s40"
    flags = [*planned.flags, "--steps", "60", "--seed", "40", "--out", str(planned.folder)]
    config = make_settings(read_flags(flags)).to_json() | {"out": "/elsewhere"}
    lines = [{"step": step, "success": 0.5, "processor_seconds": 1.0} for step in range(1, 61)]
    write_log(planned.folder, {}, config, lines)
    assert len(board.run("none-16x8", MIDDLE, 40)["metrics"]) == 60
    unfinished = experiment.plan_run("none-2.5e-4", 41).folder
    write_log(unfinished, {}, config | {"questions": 8, "seed": 41}, lines[:-1])
    assert board.run("none", MIDDLE, 41) is None and board.run("none", MIDDLE, 42) is None
    planned.folder.rename(tmp_path / "none-32x8-2.5e-4-s40")
    with pytest.raises(UserError, match="none-32x8-2.5e-4-s40 has --questions 16, not 32: remove"):
        board.run("none-32x8", MIDDLE, 40)


def test_a_dry_run_lists_what_the_first_stage_lacks(tmp_path, capsys):
    main(["board", "--dry_run", "--afresh", "--runs", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"learning rates: 0 of {3 * len(arms.ARMS)} runs are finished" in printed
    assert f"{tmp_path}/none-1.25e-4-s100\n" in printed and "-s101" not in printed


def test_the_stages_follow_from_the_runs(monkeypatch):
    """One arm is stopped after six seeds, and one is looked at again beside its placebo."""
    few = {name: arms.ARMS[name] for name in ("none", "measured", "by_kind", "span", "gtpo")}
    monkeypatch.setattr(protocol, "ARMS", few)
    monkeypatch.setattr(protocol, "METHODS", {name: few[name] for name in list(few)[2:]})
    board = board_of({"measured": 0.04, "by_kind": 0.02, "span": -0.05, "gtpo": 0.0})
    found = {title: keys for title, keys in board_stages(board)}
    assert len(found["learning rates"]) == 15 and found["close learning rates"] == []
    assert {seed for _, seed in found["six seeds"]} == set(FIRST)
    later = {name for name, seed in found["twelve seeds"] if seed not in FIRST}
    assert later == {f"{arm}-{MIDDLE}" for arm in ("none", "measured", "by_kind", "gtpo")}
    assert {name for name, _ in found["second look"]} == {
        f"{arm}-{MIDDLE}" for arm in ("none", "by_kind", "by_kind-placebo")}
    assert {seed for _, seed in found["second look"]} == set(AGAIN)


def test_what_the_table_says(tmp_path, monkeypatch):
    """Gains are worked out by hand: twelve seeds, half a point to either side in turns."""
    gains = {"measured": 0.04, "by_kind": 0.02, "span": -0.05, "gtpo": 0.0, "none-16x8": 0.05,
             "taco": 0.02}
    board = board_of(gains)
    assert board.better_at_first() == ["by_kind", "taco"] and not second_look_table(board)
    found = rows(board_leaderboard(board, {"gtpo": 0.01}))
    assert "second look to come" in found["by_kind"]["verdict"]
    again = board_of({**gains, "taco": 0.0, "by_kind-placebo": 0.01}, AGAIN).experiment.known
    known = board.experiment.known
    known |= {key: run for key, run in again.items() if key[1] in AGAIN}
    found = rows(board_leaderboard(board, {"gtpo": 0.01}))
    assert found["by_kind"]["gain"].value == pytest.approx(0.02) and found["by_kind"]["pairs"] == 12
    assert found["by_kind"]["verdict"] == "ahead" == found["measured"]["verdict"]
    [again] = map(rows, second_look_table(board))
    assert again["by_kind"]["gain"].value == pytest.approx(0.02) and again["taco"]["pairs"] == 12
    placebo = again["by_kind"]["placebo"]
    assert placebo.low < 0.01 < placebo.high and again["taco"]["placebo"] is None
    reach = 2.201 * 0.005 * np.sqrt(12 / 11) / np.sqrt(12)  # t of 11 degrees of freedom
    assert found["gtpo"]["gain"].interval == pytest.approx((-reach, reach), abs=2e-5)
    assert found["gtpo"]["verdict"] == "no difference seen"
    assert found["taco"]["verdict"] == "better once, then no difference seen"
    assert found["span"]["pairs"] == 6 and found["span"]["verdict"] == "behind"
    assert found["gtpo"]["predicted"] == 0.01 and found["measured"]["seconds"] == 2.0
    assert found["gtpo"]["rate"] == MIDDLE
    kept = json.loads(json.dumps(board_values(board.experiment)))
    assert kept["runs"][f"gtpo {MIDDLE} 41"] == [64, 1.0, [22] * 60]  # of 0.336
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)

    def published_again(**settings):
        write_result(tmp_path / "board.json", {
            "values": kept, "made_by": [{"git_commit": "x", "versions": {}}],
            "settings": {"common": protocol.COMMON, "steps": 60, "arms": arms.ARMS} | settings})
        return boards.plan(SimpleNamespace(afresh=False, runs="nowhere"))[0].known

    again = published_again()
    assert again.keys() == known.keys()
    assert again[at(MIDDLE, "gtpo", 41)]["metrics"] == run_of(22 / 64)["metrics"]
    # an arm that has other flags today is made again, and a new one beside what is there
    again = published_again(arms={**arms.ARMS, "by_kind": "--mitigation by_kind --word_weight 1"})
    assert known.keys() - again.keys() == {key for key in known if key[0].startswith("by_kind-")}
    with pytest.raises(UserError, match="Its steps is 30, and here it is 60"):
        published_again(steps=30)
