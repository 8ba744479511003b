"""The table of what a single batch knows, and which methods it measures."""
import json

import pytest
import torch

from analysis.statistics import Estimate
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from research.experiments.experiments import LEADERBOARD
from research.probes import noise
from research.probes.common import run_probe
from research.probes.methods import make_methods
from research.probes.noise import COSTLY, left_out, noise_table


def numbers(one):
    nan = float("nan")
    return {"one batch": Estimate(one, one - 0.1, one + 0.1, nan),
            "cosine": Estimate(1.0, nan, nan, nan), "noise": Estimate(1.0, nan, nan, nan)}


def test_methods_come_in_the_order_of_their_signal():
    table = noise_table({"none": numbers(0.2), "lost": numbers(float("nan")),
                         "wrong": numbers(-0.3), "quiet": numbers(0.5)})
    assert [row[0] for row in table.rows] == ["quiet", "none", "wrong", "lost"]
    assert "cosine of 0.20 (0.10 to 0.30)" in table.finding
    assert table.finding.endswith("The highest has quiet: 0.50.")
    assert noise_table({"none": numbers(float("nan"))}).finding.startswith("Too few batches")


@pytest.mark.filterwarnings("error")
def test_the_probe_measures_every_arm_of_the_board(tmp_path, learner, capsys):
    folder = tmp_path / "noise"
    run_probe("noise", noise.__doc__, noise.FLAGS, noise.measure,
              ["--quick", "--threads", "1", "--model", str(learner), "--out", str(folder)])
    [table] = json.loads((folder / "numbers.json").read_text())["tables"]
    assert table["name"] == "noise"
    assert {"arm", "one batch", "95%", "cosine", "cosine 95%"} <= set(table["columns"])
    measured = {row["arm"] for row in table["rows"]}
    flags = " ".join(LEADERBOARD.arms.values()).split()
    assert measured <= {*flags, "none"}
    # the weighting none, and a multiple of rloo
    assert {*MITIGATIONS, *ADVANTAGES} - measured == {*COSTLY, "grpo", "dr_grpo"}


def test_a_method_alone_has_the_numbers_that_it_has_beside_others(policy, rollouts):
    """`random` draws the same weights from a generator that others have drawn from. Asked for alone
    it is measured beside plain GRPO and the true gradient."""
    methods = make_methods(policy)
    without = left_out("random", methods)
    alone = methods.coefficients(policy, rollouts, without)
    assert set(alone) == {"random", "none", "rloo"}
    later = methods.coefficients(policy, rollouts, without)
    assert torch.equal(alone["random"], later["random"])
    with pytest.raises(UserError, match="--only randomly: there is no method randomly, only"):
        left_out("randomly", methods)


def test_measured_credit_is_that_of_the_board(policy):
    assert LEADERBOARD.arms["measured"] == \
        f"--advantage measured --measured_k {make_methods(policy).advantages['measured'].k}"
