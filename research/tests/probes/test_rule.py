"""Which methods are asked, what they cost, and the verdict of the rule."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.statistics import Estimate
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from research.experiments.experiments import LEADERBOARD
from research.pointers import NAMES as POINTERS
from research.probes import rule
from research.probes.common import run_probe
from research.probes.direction import TRUE, Directions
from research.probes.methods import Method, make_methods
from research.probes.rule import COSTLY, Costs, chosen, coefficients, held_by_top, verdict


@pytest.mark.filterwarnings("error")
def test_the_probe_measures_every_arm_of_the_board(tmp_path, learner):
    folder = tmp_path / "rule"
    run_probe("rule", rule.__doc__, rule.FLAGS, rule.measure,
              ["--quick", "--only", "all", "--threads", "1", "--model", str(learner),
               "--out", str(folder)])
    table, decided = json.loads((folder / "numbers.json").read_text())["tables"]
    assert table["name"] == "rule" and decided["name"] == "kind"
    measured = {row["arm"] for row in table["rows"]}
    flags = " ".join(LEADERBOARD.arms.values()).split()
    assert measured | {"rloo"} <= {*flags, *POINTERS, "none"}
    # the weighting none, and what the true gradient is made of, of which dr_grpo is a multiple
    assert {*MITIGATIONS, *ADVANTAGES} - measured == {*COSTLY, "grpo", "dr_grpo", "rloo"}


def test_a_method_has_the_numbers_alone_that_it_has_beside_others(policy, rollouts):
    """`random` draws the same weights from a generator that others have drawn from."""
    methods = chosen("random,entropy_weighted", make_methods(policy))
    assert set(methods) == {"none", "random", "entropy_weighted", "rloo"}
    beside = coefficients(policy, methods, rollouts, Costs())
    alone = coefficients(policy, chosen("random", methods), rollouts, Costs())
    assert torch.equal(alone["random"], beside["random"])
    with pytest.raises(UserError, match="--only randomly: there is no method randomly, only"):
        chosen("randomly", methods)


def test_a_method_costs_what_it_takes_beside_a_plain_step(policy, rollouts):
    class samples_more:
        metrics = {"extra_tokens": 30}

        def __call__(self, rollouts, policy):
            return torch.ones_like(rollouts.log_prob)

    costs = Costs()
    costs.tokens["none"] = 60
    coefficients(policy, {"own": Method("own", samples_more(), True)}, rollouts, costs)
    assert costs.ratio("own", costs.tokens) == 1.5 and costs.ratio("none", costs.tokens) == 1.0


def test_it_pays_only_above_both_costs():
    ratio = Estimate(2.0, 1.5, 2.5, 0.0)
    assert verdict(ratio, [1.4, 1.0], "pointer") == "pays"
    assert verdict(ratio, [1.4, 2.0], "pointer") == "open"
    assert verdict(ratio, [1.0, 2.6], "pointer") == "does not"
    assert verdict(ratio, [1.0, 1.0], "none") == ""


def test_the_noise_ratio_by_hand():
    """The second gradient scatters twice as far: four times the variance."""
    directions, generator = Directions(400), torch.Generator().manual_seed(0)
    for _ in range(400):
        mean, noise = torch.eye(4)[0], torch.randn(4, generator=generator)
        directions.add({TRUE: mean + noise, "loud": mean + 2 * noise})
    found = directions.noise_ratio("loud", TRUE)
    assert found.value == pytest.approx(4, rel=0.2) and found.low < 4 < found.high


def test_what_the_top_quarter_holds():
    tokens = SimpleNamespace(decided=np.array([0.1, 0.6, 0.1, 0.2]))
    assert held_by_top(tokens, np.array([1.0, 4.0, 2.0, 3.0])) == pytest.approx(0.6)


def test_measured_credit_is_that_of_the_board(policy):
    assert LEADERBOARD.arms["measured"] == \
        f"--advantage measured --measured_k {make_methods(policy)['measured'].function.k}"
