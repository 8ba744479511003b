"""The table of what a single batch knows, and which methods it measures."""
import json

import pytest

from analysis.statistics import Estimate
from harness.registry import ADVANTAGES, MITIGATIONS
from research.experiments.experiments import LEADERBOARD
from research.probes import noise
from research.probes.common import run_probe
from research.probes.noise import COSTLY, noise_table


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
