"""Identities of theory, and what the format is worth to a z-score, where all answers are listed."""
import itertools
import math
import re
from unittest import mock

import pytest
import torch
from conftest import ROOT
from small import one_of

import grpo
import mitigations
from lab.engine.methods import ADVANTAGES
from lab.exact import gradients
from lab.worlds import TWO, WORLDS, Kind, World

# all texts of one or two of three letters
TEXTS = " ".join("".join(letters) + "." for length in (1, 2)
                 for letters in itertools.product("7xA", repeat=length))


def world_of(G, seed):
    """A world of one problem, with groups of G answers and rewards of 0 and 1."""
    with mock.patch.dict(WORLDS, here=Kind(TEXTS, TWO, sizes=(G,), problems=1)):
        return World("here", {}, seed)


@pytest.mark.parametrize("seed, G", one_of(2, [(3, 2), (4, 3)]))
def test_identities_of_the_page_on_policy_gradient(seed, G):
    """The true credit has the true gradient, its squares add up to the variance of the reward,
    dr_grpo is (G - 1) / G of the gradient, and GRPO's z-score c(p, G) times it."""
    world = world_of(G, seed)
    chance, rollouts = world.chance.detach(), world.rollouts
    J, credit = world.value(0, ()), credit_of(world)
    [found] = torch.autograd.grad(chance @ (credit * world.log_prob).sum(1), world.logits,
                                  retain_graph=True)
    torch.testing.assert_close(found.flatten(), world.truth, rtol=1e-5, atol=1e-8)
    assert 0.1 < J < 0.9
    assert (chance @ credit.square().sum(1)).item() == pytest.approx(J * (1 - J), rel=1e-5)
    for name, factor in (("rloo", 1.0), ("dr_grpo", (G - 1) / G), ("grpo", z_score_factor(J, G))):
        batches = world.batches()
        found = gradients(world, ADVANTAGES[name], {}, batches)
        mean = torch.tensor([*batches.values()]).double() @ found
        torch.testing.assert_close(mean, factor * world.truth, rtol=1e-4, atol=1e-7)
    collision = rollouts.collision.double()
    s = mitigations.gradient_size(rollouts.log_prob.double(), collision)
    left = chance @ (s.square() * rollouts.mask).sum(1)
    right = chance @ ((1 - collision) * rollouts.mask).sum(1)
    assert left.item() == pytest.approx(right.item(), rel=1e-5)


def credit_of(world):
    """(n, T): V after each token minus V before it."""
    credit = torch.zeros(world.rollouts.mask.shape, dtype=torch.double)
    for row, answer in enumerate(world.answers):
        for t in range(len(answer.ids)):
            credit[row, t] = world.value(0, answer.ids[:t + 1]) - world.value(0, answer.ids[:t])
    return credit


def z_score_factor(p, G, epsilon=1e-4):
    """The mean advantage of a right answer minus that of a wrong one, where K of the others are
    right. Without epsilon it is E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K))."""
    total = 0.0
    for K in range(G):
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G
        up = (1 - if_right) / (math.sqrt(if_right * (1 - if_right)) + epsilon)
        down = if_wrong / (math.sqrt(if_wrong * (1 - if_wrong)) + epsilon)
        total += chance * (up + down)
    return total


def test_what_the_format_is_worth_to_a_z_score():
    """The table of lab/reports/noise.md: mean z-scores over all groups."""
    page = (ROOT / "lab/reports/noise.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) ([\d.]+) ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 3
    for size, *numbers, worth in rows:
        of = mean_z_scores(int(size), list(map(float, numbers)), [0.0, 0.1, 1.1])
        assert (of[1] - of[0]) / (of[2] - of[1]) == pytest.approx(float(worth), abs=0.005)


def mean_z_scores(G, chances, rewards):
    """Of an answer with each of the rewards, whose G - 1 others have them with these chances."""
    total = torch.zeros(len(rewards)).double()
    for counts in itertools.product(range(G), repeat=len(rewards)):
        if sum(counts) != G - 1:
            continue
        ways = math.factorial(G - 1) / math.prod(map(math.factorial, counts))
        chance = ways * math.prod(p ** count for p, count in zip(chances, counts))
        for kind, reward in enumerate(rewards):
            group = [reward] + [r for r, count in zip(rewards, counts) for _ in range(count)]
            z = grpo.group_z_score(torch.tensor(group), torch.zeros(G, dtype=torch.long))
            total[kind] += chance * z[0]
    return total.tolist()
