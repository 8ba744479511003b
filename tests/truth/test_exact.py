"""The enumerated world against plain loops: every ordered group, autograd of the real loss, every permutation."""
import itertools
import json
import math

import numpy as np
import pytest
import torch

from truth import exact
from conftest import gradients
from engine.registry import ADVANTAGES
from grpo import policy_loss
from engine.registry import MITIGATIONS
from mitigations import token_weight
from engine.errors import UserError
from engine.forward import response_log_probs
from truth.world import END, ONE, OPENING, PROMPT, Batches, Estimator, advantages, all_answers, all_weights, estimator, make_world, placebo, rows_of


@pytest.fixture(scope="module")
def world():
    return make_world(seed=3, length=2)


@pytest.fixture(scope="module")
def pairs(world):
    return Batches.all(world, 2)


def test_answers_are_all_that_can_be_written():
    assert set(all_answers(2)) == {(END,), (ONE, END), (OPENING, END), (ONE, ONE), (ONE, OPENING), (OPENING, ONE), (OPENING, OPENING)}
    assert len(all_answers(4)) == 31 == len(set(all_answers(4)))


def test_right_is_a_one_after_the_first_tag():
    world = make_world(0, 3)
    right = {text: reward for text, reward in zip(world.rollouts.responses, world.rollouts.reward.tolist())}
    assert right["<answer>1<|im_end|>"] == right["1<answer>1"] == right["<answer>11"] == right["<answer>1<answer>"] == 1
    assert right["1<|im_end|>"] == right["<answer><answer>1"] == right["<answer><|im_end|>"] == right["1<answer><answer>"] == 0


def test_probabilities_and_values_follow_from_the_model_alone(world):
    """Each answer's probability by its own forward pass, each V as a sum over the answers that begin so."""
    for i, answer in enumerate(all_answers(2)):
        log_probs = world.model(torch.tensor([PROMPT + list(answer)]))[0, :-1].double().log_softmax(-1)
        assert math.log(world.probability[i].item()) == pytest.approx(sum(log_probs[t, v].item() for t, v in enumerate(answer)), abs=1e-5)
        for t in range(len(answer) + 1):
            begins = [j for j, other in enumerate(all_answers(2)) if other[:t] == answer[:t]]
            chance = world.probability[begins].sum()
            assert world.worth[i, t].item() == pytest.approx((world.probability[begins] @ world.rollouts.reward[begins].double() / chance).item(), abs=1e-6)


def brute(world, weigh, advantage: str, G: int = 2):
    """Mean and variance of the estimate over all ordered groups, by autograd of the loss that trains."""
    first, second, n = 0.0, 0.0, len(world.probability)
    for group in itertools.product(range(n), repeat=G):
        rows = rows_of(world.rollouts, torch.tensor(group), torch.zeros(G, dtype=torch.long))
        chance = world.probability[list(group)].prod()
        weight = torch.ones_like(rows.log_prob) if weigh is None else token_weight(weigh, "entropy_ratio", rows)[0]
        world.model.zero_grad()
        policy_loss(response_log_probs(world.model, rows, torch.arange(G)), ADVANTAGES[advantage](rows), weight, rows.mask, -float(G)).backward()
        estimate = gradients(world.model).double()
        first, second = first + chance * estimate, second + chance * estimate.square().sum()
    return first, (second - first.square().sum()).item()


@pytest.mark.parametrize("advantage, name", [("rloo", None), ("grpo", "entropy_ratio"), ("dr_grpo", "inverse_logprob"), ("span", "attention_credit")])
def test_mean_and_variance_are_those_of_a_plain_loop(world, pairs, advantage, name):
    weigh = None if name is None else lambda tokens, lab: MITIGATIONS[name](tokens)
    weight = 1.0 if name is None else all_weights(world, pairs)[name]
    found = estimator(world, pairs, weight * advantages(world, pairs, 0)[advantage] / 2)
    mean, variance = brute(world, weigh, advantage)
    torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-6)
    assert found.variance == pytest.approx(variance, rel=1e-4)


def test_the_true_gradient_is_that_of_j(world):
    """By finite differences of the probability to be right."""
    parameter, step = world.model.model.layers[0].mlp.gate_proj.weight, 1e-2
    at = sum(p.numel() for name, p in itertools.takewhile(lambda item: item[1] is not parameter, world.model.named_parameters()))

    def J():
        log_prob = response_log_probs(world.model, world.rollouts, torch.arange(len(world.probability)))
        return (log_prob.double().sum(1).exp() @ world.rollouts.reward.double()).item()

    with torch.no_grad():
        for i in (0, 7):
            parameter.view(-1)[i] += step
            above = J()
            parameter.view(-1)[i] -= 2 * step
            below = J()
            parameter.view(-1)[i] += step
            assert world.gradient[at + i].item() == pytest.approx((above - below) / (2 * step), abs=2e-4)


def test_shuffled_weights_are_every_permutation(world, pairs):
    """The placebo's moments against all orders of each batch's weights."""
    weight, advantage = all_weights(world, pairs)["inverse_logprob"], advantages(world, pairs, 0)["rloo"]
    first, second = 0.0, 0.0
    for m, chance in enumerate(pairs.probability):
        mask = world.rollouts.mask[pairs.which[m]]
        vectors = (advantage[m] / 2)[mask][:, None] * world.score[world.node[pairs.which[m]][mask]]
        orders = [torch.tensor(order, dtype=torch.float64) @ vectors for order in itertools.permutations(weight[m][mask].tolist())]
        first = first + chance * torch.stack(orders).mean(0)
        second = second + chance * torch.stack(orders).square().sum(1).mean()
    found = placebo(world, pairs, advantage, weight)
    torch.testing.assert_close(found.mean, first, rtol=1e-6, atol=1e-9)
    assert found.variance == pytest.approx((second - first.square().sum()).item(), rel=1e-6)


def test_noise_weights_have_the_moments_of_gamma_draws(world, pairs):
    advantage = advantages(world, pairs, 0)["rloo"]
    rng, m = np.random.default_rng(0), int((pairs.probability * advantage.abs().amax((1, 2))).argmax())
    mask = world.rollouts.mask[pairs.which[m]]
    vectors = ((advantage[m] / 2)[mask][:, None] * world.score[world.node[pairs.which[m]][mask]]).numpy()
    draws = rng.gamma(1.0, 1.0, (30_000, int(mask.sum())))
    estimates = draws / draws.mean(1, keepdims=True) @ vectors
    alone = Batches(pairs.which[m:m + 1], torch.ones(1, dtype=torch.float64))
    found = exact.cross(world, alone, advantage[m:m + 1], None, "random")
    assert found.variance == pytest.approx(estimates.var(0).sum(), rel=0.04)
    torch.testing.assert_close(found.mean, torch.tensor(estimates.mean(0)), rtol=0.04, atol=3e-3)


@pytest.mark.parametrize("p, G", [(0.02, 8), (0.5, 8), (0.3, 4)])
def test_z_score_factor_is_that_of_all_reward_patterns(p, G):
    """E[A | right] - E[A | wrong] of the first answer."""
    given = {0: [0.0, 0.0], 1: [0.0, 0.0]}
    for rewards in itertools.product((0, 1), repeat=G):
        chance = math.prod(p if r else 1 - p for r in rewards)
        spread = np.std(rewards)
        given[rewards[0]][0] += chance
        given[rewards[0]][1] += chance * ((rewards[0] - np.mean(rewards)) / (spread + 1e-4) if spread else 0.0)
    assert exact.z_score_factor(p, G) == pytest.approx(given[1][1] / given[1][0] - given[0][1] / given[0][0], rel=1e-9)


def test_known_values_of_the_z_score_factor():
    assert exact.z_score_factor(0.02, 8) == pytest.approx(2.57, abs=5e-3) and exact.z_score_factor(0.5, 8) == pytest.approx(1.86, abs=5e-3)


def test_all_identities_hold_in_another_world(world, pairs):
    advantage = advantages(world, pairs, 0)
    crossed = {(a, "none"): estimator(world, pairs, advantage[a] / 2) for a in exact.CROSSED}
    table = exact.identities(world, pairs, advantage, crossed)
    assert max(row[3] for row in table.rows) < 1e-5 and table.finding.startswith(f"All {len(table.rows)} identities hold")


def test_advantages_with_exact_values_by_definition(world, pairs):
    """critic: R - V before; one-step: V after - V before; vine: of a segment of two tokens, or of the one that is left."""
    found, mask, V = advantages(world, pairs, 0), world.rollouts.mask[pairs.which], world.worth[pairs.which]
    reward = world.rollouts.reward.double()[pairs.which][..., None]
    torch.testing.assert_close(found["critic"], (reward - V[..., :-1]) * mask, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["one-step"], (V[..., 1:] - V[..., :-1]) * mask, rtol=0, atol=1e-6)
    ends = torch.stack([V[..., 2] - V[..., 0]] * 2, -1) * mask
    torch.testing.assert_close(found["vine"], ends, rtol=0, atol=1e-6)


def test_bias_cosine_and_noise_by_hand():
    """Mean (3, 4) against (2, 0): off by (1, 4), cosine 3/5, and only the 3 is signal."""
    found = Estimator(torch.tensor([3.0, 4.0]), 18.0).against(torch.tensor([2.0, 0.0]))
    assert found == pytest.approx({"bias": 17 ** 0.5 / 2, "cosine": 0.6, "noise": 2.0})
    assert Estimator(torch.tensor([-3.0, 4.0]), 18.0).against(torch.tensor([2.0, 0.0]))["noise"] == math.inf


def test_a_wrong_identity_is_told(world, pairs):
    advantage = advantages(world, pairs, 0)
    crossed = {(a, "none"): estimator(world, pairs, advantage[a] / 2) for a in exact.CROSSED}
    crossed["rloo", "none"].mean *= 1.01
    assert "1 of" in exact.identities(world, pairs, advantage, crossed).finding


def test_the_program_writes_what_it_prints(tmp_path, capsys):
    exact.main(["--quick", "--length", "2", "--threads", "1", "--out", str(tmp_path / "found")])
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "found/numbers.json").read_text())
    tables = {table["name"]: table for table in numbers["tables"]}
    assert set(tables) == {"identities", "advantages", "cosine", "bias", "noise", "placebos", "norms", "mix"}
    by_name = {row["mitigation"]: row for row in tables["cosine"]["rows"]}
    assert set(by_name) == set(MITIGATIONS) and by_name["causal_ablation"]["rloo"] == "n/a"
    assert by_name["none"]["rloo"] == pytest.approx(1, abs=1e-6) and by_name["random"]["rloo"] == pytest.approx(1, abs=1e-6)
    assert all(sentence in " ".join(out.split()) for sentence in numbers["in_short"])
    assert (tmp_path / "found/report.html").is_file() and (tmp_path / "found/cosine_and_noise.png").is_file()


@pytest.mark.parametrize("argv, message", [(["--length", "1"], "--length 1 should be at least 2"), (["--answer", "3"], "unrecognized arguments: --answer"),
                                           (["--answers", "x"], "invalid int value")])
def test_wrong_flags_are_one_line(argv, message):
    with pytest.raises(UserError, match=message):
        exact.main(argv)
