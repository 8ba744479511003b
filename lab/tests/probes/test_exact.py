"""The small world against plain loops: every ordered group, autograd of the loss, every order."""
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import lab.engine.update as grpo
from conftest import StateIdea, gradients
from lab.analysis.statistics import Estimate
from lab.engine.methods import ADVANTAGES, MITIGATIONS
from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from grpo import policy_loss
from lab.credit.weightings import rescaled_weight
from lab.probes import exact
from lab.probes.common import run_probe
from lab.probes.enumerated import (Batches, Estimator, estimator, make_enumerated,
                                        without_rounding)
from lab.probes.enumerated_methods import list_advantages, list_weights, rows_of
from lab.probes.exact import median_of, named_methods


@pytest.fixture(scope="module")
def world():
    return make_enumerated(seed=3, length=2)


@pytest.fixture(scope="module")
def pairs(world):
    return Batches.all(world, 2)


@pytest.fixture(scope="module")
def advantages(world, pairs):
    return list_advantages(world, pairs, 0).values


@pytest.fixture(scope="module")
def weights(world, pairs, advantages):
    return list_weights(world, pairs, advantages["grpo"]).values


def brute(world, name: str | None, advantage: str, G: int = 2):
    """Mean and variance of the estimate over all ordered groups, by autograd of the loss."""
    first, second, n = 0.0, 0.0, len(world.probability)
    weigh, spread = MITIGATIONS[name or "none"], ADVANTAGES[advantage]
    for group in itertools.product(range(n), repeat=G):
        rows = rows_of(world.rollouts, torch.tensor(group))
        chance = world.probability[list(group)].prod()
        weight = rescaled_weight(lambda rollouts, policy: weigh(rollouts), name, rows)[0]
        world.model.zero_grad()
        log_prob = response_log_probs(world.model, rows, torch.arange(G))
        policy_loss(log_prob, spread(rows), weight, rows.mask, -float(G)).backward()
        estimate = gradients(world.model).double()
        first = first + chance * estimate
        second = second + chance * estimate.square().sum()
    return first, (second - first.square().sum()).item()


@pytest.mark.parametrize("advantage, name", [
    ("rloo", None), ("grpo", "entropy_ratio"), ("dr_grpo", "inverse_logprob"),
    ("span", "attention_credit"), ("rloo", "entropy_masking")])  # the last two differ by batch
def test_mean_and_variance_are_those_of_a_plain_loop(world, pairs, advantages, weights, advantage,
                                                     name):
    weight = weights[name] if name else 1.0
    listed = estimator(world, pairs, weight * advantages[advantage] / 2)
    mean, variance = brute(world, name, advantage)
    torch.testing.assert_close(listed.mean, mean, rtol=1e-4, atol=1e-6)
    assert listed.variance == pytest.approx(variance, rel=1e-4)


def test_a_policy_is_trained_until_it_has_the_success(world, monkeypatch):
    """Its numbers are those of the trained model: J of the listed answers, and rloo is unbiased."""
    trained = make_enumerated(seed=3, length=2, success=0.6)
    assert world.J < 0.5 and 0.6 <= trained.J < 0.65
    batches = Batches.all(trained, 2)
    rloo = list_advantages(trained, batches, 0, only=["rloo"]).values["rloo"]
    assert estimator(trained, batches, rloo / 2).against(trained.gradient)["bias"] < 1e-5
    monkeypatch.setattr("lab.probes.enumerated.MOST_STEPS", 3)
    with pytest.raises(UserError, match=r"after 3 steps .*, and not 0.6: take another --seed"):
        make_enumerated(seed=3, length=2, success=0.6)


def test_advantages_with_exact_values_by_definition(world, pairs, advantages):
    """critic: R - V before; one-step: V after - V before; vine: the same of two tokens."""
    mask, V = world.rollouts.mask[pairs.which], world.worth[pairs.which]
    reward = world.rollouts.reward.double()[pairs.which][..., None]
    whole = torch.stack([V[..., 2] - V[..., 0]] * 2, -1)
    expected = {"critic": reward - V[..., :-1], "one-step": V[..., 1:] - V[..., :-1], "vine": whole}
    for name, credit in expected.items():
        torch.testing.assert_close(advantages[name], credit * mask, rtol=0, atol=1e-6)


def test_bias_cosine_and_noise_by_hand():
    """Mean (3, 4) against (2, 0): off by (1, 4), cosine 3/5, and only the 3 is signal."""
    true = torch.tensor([2.0, 0.0])
    numbers = Estimator(torch.tensor([3.0, 4.0]), 18.0).against(true)
    assert numbers == pytest.approx({"bias": 17 ** 0.5 / 2, "cosine": 0.6, "noise": 2.0})
    assert Estimator(torch.tensor([-3.0, 4.0]), 18.0).against(true)["noise"] == math.inf


def test_the_last_bit_of_an_entropy_does_not_decide_what_is_kept():
    """Prefixes share a distribution: computed with other rounding, entropy_masking is the same."""
    world = make_enumerated(0, 3)
    bit = torch.randint(-1, 2, world.node.shape, generator=torch.Generator().manual_seed(0))
    entropy = world.rollouts.entropy + 6e-8 * bit * world.rollouts.mask
    levelled = without_rounding(entropy)
    torch.testing.assert_close(levelled, world.rollouts.entropy, rtol=0, atol=2e-7)
    weigh = MITIGATIONS["entropy_masking"]
    for group in itertools.combinations(range(len(entropy)), 2):
        rows = rows_of(world.rollouts, torch.tensor(group))
        kept = weigh(replace(rows, entropy=levelled[list(group)]))
        assert torch.equal(kept, weigh(rows))


IDEAS = {
    "none": MITIGATIONS["none"],
    "state_idea": StateIdea,
    "sign_idea": lambda rollouts: torch.where(rollouts.advantage > 0, 2.0, 1.0),
    "noise_idea": lambda rollouts: torch.rand(rollouts.mask.shape, generator=rollouts.generator),
    "problem_idea": lambda rollouts: torch.tensor([len(rollouts.problems[0].numbers)]),
}
ADVANTAGE_IDEAS = {
    **{name: ADVANTAGES[name] for name in ("grpo", "dr_grpo", "rloo")},
    "state_advantage": StateIdea,
    "half_advantage": lambda rollouts: grpo.rloo(rollouts) / 2,
    "undefined_advantage": lambda rollouts: torch.full_like(rollouts.log_prob, math.nan),
}


def test_any_idea_is_listed_or_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("lab.probes.enumerated_methods.MITIGATIONS", IDEAS)
    monkeypatch.setattr("lab.probes.enumerated_methods.ADVANTAGES", ADVANTAGE_IDEAS)
    run_probe("exact", exact.__doc__, exact.FLAGS, exact.measure, argv=[
        "--length", "2", "--answers", "2", "--threads", "1", "--out", str(tmp_path / "x")])
    numbers = json.loads((tmp_path / "x/numbers.json").read_text())
    tables = {table["name"]: table for table in numbers["tables"]}
    cosine = {row["mitigation"]: row["cosine"] for row in tables["weightings"]["rows"]}
    assert cosine.keys() == IDEAS.keys() | {"oracle"}
    note = tables["weightings"]["notes"][1]
    for name, reason in (("state_idea", "a class"), ("noise_idea", "draws random numbers"),
                         ("problem_idea", "no attribute 'numbers'")):
        assert cosine[name] == "n/a" and reason in note.partition(f"{name} (")[2].partition("; ")[0]
    assert cosine["none"] == pytest.approx(1, abs=1e-6)
    assert 0 < cosine["sign_idea"] <= 1
    bias = {row["advantage"]: row["bias"] for row in tables["advantages"]["rows"]}
    assert bias["half_advantage"] == pytest.approx(0.5, abs=1e-5)
    assert bias["state_advantage"] == bias["undefined_advantage"] == "n/a"
    assert re.search(r"undefined_advantage \(.*? is not finite", tables["advantages"]["notes"][1])


def test_the_median_of_policies_lies_between_two_of_them_in_95_of_100_cases():
    """Of twenty the sixth and the fifteenth: fewer than 6 heads of 20 coins have a chance of 2.1%,
    fewer than 7 one of 5.8%. Of five coins none is a head in 3.1%."""
    assert median_of(range(1, 21)) == Estimate(10.5, 6, 15)
    assert median_of([3, 1, 2, 6, 5, 4]) == Estimate(3.5, 1, 6)
    assert median_of(range(5)).value == 2 and math.isnan(median_of(range(5)).low)


def test_a_method_that_is_named_wrongly_is_an_error(tmp_path):
    """The names may have spaces around them."""
    assert named_methods("span, by_kind") == ["span", "by_kind"]
    with pytest.raises(UserError, match="no advantage 'entropy_maskin', did you mean entropy_"):
        run_probe("exact", exact.__doc__, exact.FLAGS, exact.measure,
                  ["--only", "span,entropy_maskin", "--out", str(tmp_path / "x")])


def test_the_rows_that_were_asked_for_are_printed_and_weights_of_1_are_told(tmp_path, capsys):
    """An advantage stands in the second table. by_kind is 1 everywhere, because no token of this
    task is in a think section."""
    for number, (only, has_advantages) in enumerate([("span, by_kind", True), ("by_kind", False)]):
        run_probe("exact", exact.__doc__, exact.FLAGS, exact.measure, argv=[
            *"--length 2 --answers 2 --threads 1 --only".split(), only,
            "--out", str(tmp_path / str(number))])
        said = capsys.readouterr().out
        assert "\n| by_kind " in said and ("\n| span " in said) == has_advantages
        words = " ".join(said.split())
        assert "these keep the direction of the true gradient: none." in words
        assert "the weight 1, so it says nothing about them: by_kind." in words


def test_several_policies_are_those_of_several_seeds(tmp_path, capsys):
    found = {}
    for name, flags in {"3": "--seed 3", "4": "--seed 4", "both": "--seed 3 --policies 2"}.items():
        run_probe("exact", exact.__doc__, exact.FLAGS, exact.measure, argv=[
            *"--length 2 --answers 2 --threads 1 --only entropy_masking".split(), *flags.split(),
            "--out", str(tmp_path / name)])
        tables = json.loads((tmp_path / name / "numbers.json").read_text())["tables"]
        found[name] = {row["mitigation"]: row for row in tables[0]["rows"]}
    of_3, of_4, both = (rows["entropy_masking"]["noise"] for rows in found.values())
    assert both["value"] == pytest.approx((of_3 + of_4) / 2) and of_3 != of_4
    assert found["both"].keys() == {"none", "entropy_masking"}
    times = [found[seed]["entropy_masking"]["noise"] / found[seed]["none"]["noise"]
             for seed in "34"]
    assert found["both"]["entropy_masking"]["times"]["value"] == pytest.approx(sum(times) / 2)
