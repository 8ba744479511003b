"""What a single batch knows of the true gradient: by hand, and by a simulation with known signal."""
import json

import numpy as np
import pytest
import torch
from conftest import ROOT

from analysis.statistics import Estimate
from harness.registry import ADVANTAGES, MITIGATIONS
from research.experiments.experiments import LEADERBOARD
from research.probes import noise
from research.probes.common import run_probe
from research.probes.direction import Directions
from research.probes.noise import COSTLY, cheap_arms, draw, in_words, noise_table, one_batch


def directions_of(true, arm, blocks):
    """Batch n goes into block n * blocks // batches."""
    directions = Directions("rloo", blocks)
    for n, (one, other) in enumerate(zip(true, arm)):
        directions.add(n * blocks // len(true), {"rloo": torch.tensor(one, dtype=torch.float32),
                                                 "x": torch.tensor(other, dtype=torch.float32)})
    return directions


def test_one_batch_by_hand():
    """True gradients (1, 1), (1, -1): their product is 0, so the length of the mean is not seen.
    With (3, 1) and (1, 1) it is 3 + 1 = 4, and the arm's (2, 0), (0, 2) have with those of the
    other batch 2 * 1 + 0 and 0 + 2 * 1, 2 on average; the arm's mean square is 4."""
    assert np.isnan(one_batch(directions_of([[1, 1], [1, -1]], [[1, 0], [1, 0]], 2), "x").value)
    found = one_batch(directions_of([[3, 1], [1, 1]], [[2, 0], [0, 2]], 2), "x")
    assert found.value == pytest.approx(2 / np.sqrt(4 * 4))


@pytest.mark.filterwarnings("ignore:invalid value")  # truth.direction leaves out one batch of two
def test_an_arm_whose_own_mean_is_not_seen_is_known_all_the_same():
    """The two gradients of the arm have the product -1, so its cosine is unknown."""
    directions = directions_of([[3, 1], [1, 1]], [[1, 0], [-1, 2]], 2)
    assert np.isnan(directions.estimates("x")["cosine"].value)
    product = (1 * 1 + 0 + -1 * 3 + 2 * 1) / 2
    assert one_batch(directions, "x").value == pytest.approx(product / np.sqrt(4 * (1 + 5) / 2))


def test_signal_in_noise_is_found_and_its_interval_holds_it():
    """A signal of 1 beside 400 entries of noise with a spread of 0.5, squared length 100: a batch
    has the cosine 1 / sqrt(101). The arm's sum of signal and noise is scaled by 7."""
    rng, truth = np.random.default_rng(0), 1 / np.sqrt(101)
    found = []
    for _ in range(40):
        true, arm = rng.normal(0, 0.5, (2, 60, 400))
        true[:, 0] += 1
        arm[:, 0] += 1
        found.append(one_batch(directions_of(true, 7 * arm, 10), "x"))
    assert np.mean([one.value for one in found]) == pytest.approx(truth, abs=0.01)
    assert sum(one.low < truth < one.high for one in found) >= 34


def test_every_arm_of_the_board_is_measured(lab):
    arms = cheap_arms(lab)
    flags = " ".join(LEADERBOARD.arms.values()).split()
    measured = {*arms.mitigations, *arms.advantages}
    assert not measured & {*COSTLY}
    assert measured - {*flags, "none"} == set() and {"entropy_masking", "measured"} <= measured
    others = {*MITIGATIONS, *ADVANTAGES} - measured
    assert others == {*COSTLY, "grpo", "dr_grpo"}  # the weighting none, and a multiple of rloo


def numbers(one, cosine=1.0, noise=1.0):
    nan = float("nan")
    return {"one batch": Estimate(one, one - 0.1, one + 0.1, nan),
            "cosine": Estimate(cosine, nan, nan, nan), "noise": Estimate(noise, nan, nan, nan)}


OF_ARMS = {"none": numbers(0.2), "lost": numbers(float("nan")), "wrong": numbers(-0.3),
           "quiet": numbers(0.5)}


def test_arms_come_in_the_order_of_their_signal(tmp_path):
    table = noise_table(OF_ARMS)
    assert [row[0] for row in table.rows] == ["quiet", "none", "wrong", "lost"]
    assert table.finding == in_words(OF_ARMS)
    assert draw(table, tmp_path)[0].is_file()


def test_in_words():
    assert in_words(OF_ARMS) == ("A single batch of plain GRPO has a cosine of 0.20 (0.10 to 0.30) "
                                 "with the true gradient.\nThe highest has quiet: 0.50.")
    assert in_words({"none": numbers(float("nan"))}).startswith("Too few batches")


def test_the_probe_writes_what_the_board_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "noise"
    run_probe("noise", noise.__doc__, noise.FLAGS, noise.measure,
              ["--quick", "--threads", "1", "--out", str(folder)])
    [table] = json.loads((folder / "numbers.json").read_text())["tables"]
    assert table["name"] == "noise" and {"one batch", "cosine"} <= set(table["columns"])
    assert {"none", "span"} <= {row["arm"] for row in table["rows"]}
