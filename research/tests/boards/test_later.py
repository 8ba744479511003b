"""The test of what is told before training, from runs made by hand."""
import json
from types import SimpleNamespace

import numpy as np
import pytest

from harness.settings import make_settings, read_flags
from research.boards.later import (ARMS, PLAIN, TESTED, by_direction, by_noise, flags_of_arm,
                                   looks_table, measured_before, p_of_rank, plan,
                                   rank_with_interval, report)
from research.publish.recompute import check_later
from research.publish.results import table_rows

ARGS = SimpleNamespace(runs="runs/x", seeds=2, arms=",".join(ARMS), afresh=True)


def test_every_arm_differs_from_plain_grpo_in_its_method_alone():
    experiment, [(_, keys)] = plan(ARGS)
    planned = [experiment.plan_run(*key) for key in keys]
    assert len({run.folder for run in planned}) == len(planned) == 2 * (1 + len(ARMS))
    own = {"mitigation", "advantage", "loss", "loss_norm", "entropy_bonus"}
    settings = {run.arm: make_settings(read_flags([*run.flags, "--steps", str(run.steps), "--seed",
                                                   str(run.seed)])).to_json() for run in planned}
    plain = settings[PLAIN]
    for arm, found in settings.items():
        shared = found.keys() & plain.keys()
        differ = {name for name in shared if found[name] != plain[name]}
        assert arm == PLAIN or differ and differ <= own, arm
    _, [(_, keys)] = plan(SimpleNamespace(runs="runs/x", seeds=1, arms="gdpo, rlsd",
                                           afresh=True))
    assert [arm for arm, _ in keys] == [PLAIN, "gdpo", "rlsd"]
    assert flags_of_arm("dr_grpo --loss_norm constant")[0] == "--advantage"


def test_a_smaller_cosine_predicts_a_smaller_gain():
    """A method with plain GRPO's direction and noise has by its noise no gain; one with half of its
    noise has that of a doubled batch, unless it points elsewhere."""
    doubled = next(row for row in table_rows("board", "board") if row["arm"] == "none-16x8")
    kinds = ((1.0, 1.0), (1.0, 2.0), (0.5 ** 0.5, 2.0))
    same, less_noise, elsewhere = ({"cosine": {"value": cosine}, "factor": {"value": factor}}
                                   for cosine, factor in kinds)
    assert by_direction(same) > by_direction(elsewhere)
    assert by_noise(same) == pytest.approx(0)
    assert by_noise(less_noise) == pytest.approx(doubled["gain"]["value"])
    assert by_noise(elsewhere) == pytest.approx(0)


def test_ranks_that_agree_are_told_from_ranks_that_do_not():
    gains = np.array([-5.0, -3.0, -2.0, 0.0, 0.5, 0.7, 1.0, 1.5])
    assert rank_with_interval(gains ** 3, gains).low > 0.9
    assert p_of_rank(gains ** 3, gains) < 0.001
    assert p_of_rank(np.array([1.0, -1.0] * 4), gains) > 0.2


def test_a_method_with_one_pair_is_ranked_but_not_tested(tmp_path, monkeypatch, capsys):
    """The smaller the cosine, the larger the loss: the rank correlation is 1, with one pair each
    but for the first arm."""
    monkeypatch.chdir(tmp_path)
    order = sorted(ARMS, key=lambda arm: measured_before()[arm]["cosine"]["value"])
    runs = {PLAIN: {seed: run_of(32 + seed) for seed in (0, 1)}}
    runs |= {arm: {0: run_of(10 + place)} for place, arm in enumerate(order)}
    runs[ARMS[0]][1] = run_of(12 + order.index(ARMS[0]))
    experiment = SimpleNamespace(arms=lambda keys: runs)
    report(ARGS, experiment, "the command")
    assert "one seed: no verdict" in capsys.readouterr().out
    result = json.loads((tmp_path / "results/later/numbers.json").read_text())
    found = {table["name"]: table["rows"] for table in result["tables"]}
    assert found["rules"][0]["rank"]["value"] == pytest.approx(1)
    tested = {row["arm"] for row in found["gains"] if row["p"] is not None}
    assert tested == {ARMS[0]}
    assert not [check for check in check_later(result) if not check.agrees]


def test_a_look_has_its_own_seeds():
    """In seed 40 a larger cosine comes with a larger gain, in seed 46 with a smaller one."""
    before = {arm: {"cosine": {"value": place}} for place, arm in enumerate(TESTED)}
    plain = {40: run_of(9), 46: run_of(9)}
    family = {arm: ({40: run_of(10 + place), 46: run_of(40 - place)}, plain)
              for place, arm in enumerate(TESTED)}
    first, later = looks_table(before, family).rows
    assert first[1] == later[1] == len(TESTED)
    assert first[2].value == pytest.approx(1) and later[2].value == pytest.approx(-1)


def run_of(right):
    """A run in whose steps so many of 64 answers are right."""
    config = {"questions": 8, "answers": 8, "git_commit": None, "versions": {}}
    lines = [{"success": right / 64, "processor_seconds": 1.0, "entropy": 0.5}] * 3
    return {"metrics": lines, "evaluations": [], "config": config}
