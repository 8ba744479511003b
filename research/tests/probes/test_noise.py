"""Which arms are asked, what they cost, and how noise is compared."""
import json

import numpy as np
import pytest
import torch

from analysis.statistics import Estimate
from engine.errors import UserError
from research.experiments.arms import ARMS
from research.probes import noise
from research.probes.common import run_probe
from research.probes.direction import Directions
from research.probes.methods import Method, make_method
from research.probes.noise import Costs, chosen, clipping, coefficients, criterion


def test_the_probe_measures_an_arm_as_its_flags_have_it(tmp_path, learner):
    folder = tmp_path / "noise"
    run_probe("noise", noise.__doc__, noise.FLAGS, noise.measure,
              ["--quick", "--only", "by_kind,gae-trunk,outcome_conditional", "--threads", "1",
               "--questions", "4", "--answers", "8", "--model", str(learner), "--out",
               str(folder)])
    [table] = json.loads((folder / "numbers.json").read_text())["tables"]
    found = {row["arm"]: row for row in table["rows"]}
    assert set(found) == {"none", "by_kind", "gae-trunk", "outcome_conditional"}
    assert found["none"]["noise"] == 1


def test_larger_batches_are_not_asked():
    assert chosen("all") == [arm for arm in ARMS if arm not in ("none-16x8", "none-32x8")]
    assert chosen("random") == ["none", "random"]
    with pytest.raises(UserError, match="--only randomly: there is no arm randomly, only"):
        chosen("randomly")


def test_a_method_has_the_numbers_alone_that_it_has_beside_others(policy, rollouts):
    """`random` draws the same weights from a generator that others have drawn from."""
    methods = {name: make_method(ARMS[name], policy) for name in ("entropy_weighted", "random")}
    beside = coefficients(policy, methods, rollouts, Costs())["random"]
    alone = coefficients(policy, {"random": methods["random"]}, rollouts, Costs())["random"]
    assert torch.equal(alone, beside)
    weight = alone * rollouts.mask.sum() / rollouts.advantage
    assert weight[rollouts.mask & (rollouts.advantage != 0)].mean() == pytest.approx(1, abs=0.5)


def test_a_method_costs_what_it_takes_beside_a_plain_step(policy, rollouts):
    class samples_more:
        metrics = {"extra_tokens": 30}

        def __call__(self, rollouts, policy):
            return torch.ones_like(rollouts.log_prob)

    costs = Costs()
    costs.tokens["none"] = 60
    coefficients(policy, {"own": Method("own", samples_more(), True)}, rollouts, costs)
    assert costs.ratio("own", costs.tokens) == 1.5 and costs.ratio("none", costs.tokens) == 1.0


def test_noise_is_below_cost_only_above_both_costs():
    ratio = Estimate(2.0, 1.5, 2.5, 0.0)
    assert criterion(ratio, [1.4, 1.0], "gtpo") == "noise below cost"
    assert criterion(ratio, [1.4, 2.0], "gtpo") == "open"
    assert criterion(ratio, [1.0, 2.6], "gtpo") == "noise above cost"
    assert criterion(ratio, [1.0, 1.0], "none") == ""
    assert (clipping(4.0, 1.0), clipping(0.5, 1.0), clipping(4.0, 0.0)) == (0.25, 1.0, 1.0)


def test_the_noise_ratio_by_hand():
    """The second gradient scatters twice as far: four times the variance. The third has the same
    scatter around a mean at 45 degrees that is sqrt(2) as long."""
    directions, generator = Directions(400, "plain"), torch.Generator().manual_seed(0)
    for _ in range(400):
        mean, chance = torch.eye(4)[0], torch.randn(4, generator=generator)
        directions.add({"plain": mean + chance, "loud": mean + 2 * chance,
                        "aside": mean + torch.eye(4)[1] + chance})
    found = directions.noise_ratio("loud", "plain")
    assert found.value == pytest.approx(4, rel=0.2) and found.low < 4 < found.high
    assert directions.noise_ratio("aside", "plain").value == pytest.approx(0.5, rel=0.2)
    assert directions.cosine("aside") == pytest.approx(np.sqrt(0.5), rel=0.1)
