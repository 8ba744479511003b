"""The test of what is told before training, from runs made by hand."""
from types import SimpleNamespace

import numpy as np
import pytest

from harness.settings import make_settings, read_flags
from research.boards.later import (ARMS, PLAIN, by_direction, by_noise, flags_of_arm, p_of_rank,
                                   plan, rank_with_interval)
from research.publish.results import table_rows


def test_every_arm_differs_from_plain_grpo_in_its_method_alone():
    experiment, [(_, keys)] = plan(SimpleNamespace(runs="runs/x", seeds=2, arms=",".join(ARMS)))
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
