"""KTAE: the statistics of one table by hand and by enumeration, and what becomes of them."""
import itertools
import math

import pytest
import torch

from conftest import hand_made
from credit.ktae import fisher, information, ktae, value_of_table
from grpo import grpo


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_one_table_by_hand():
    """3 of 4 right answers have it and 1 of 4 wrong ones. Of C(8, 4) = 70 ways to draw the four
    answers that have it, 1, 16, 36, 16, 1 give 0 to 4 right ones: p = 34/70. Behind either answer
    to "does it occur?" 3 of 4 are alike, so 1 bit becomes H(1/4). E = 60 degrees minus 30."""
    p, gain = 34 / 70, 1 - (0.25 * 2 + 0.75 * math.log2(4 / 3))
    assert fisher(double(3), double(1), 4, 4).item() == pytest.approx(p)
    assert information(double(3), double(1), 4, 4).item() == pytest.approx(gain)
    expected = math.tanh((math.exp(-2 * p) + gain) / 4 * math.pi / 6)
    values = value_of_table(double(3, 1), double(1, 3), 4, 4)  # words of wrong answers are as bad
    assert values.tolist() == pytest.approx([expected, -expected])


def test_fishers_p_is_that_of_every_way_to_draw():
    for right, wrong in ((1, 3), (2, 2), (5, 3)):
        n = right + wrong
        for having in range(n + 1):
            ways = list(itertools.combinations(range(n), having))
            counts = [sum(i < right for i in way) for way in ways]
            for a in set(counts):
                likely = [c for c in counts if counts.count(c) <= counts.count(a)]
                p = fisher(double(a), double(having - a), right, wrong).item()
                assert p == pytest.approx(len(likely) / len(ways)), (right, wrong, having, a)


def test_a_table_that_says_nothing_is_worth_nothing():
    """All have it; none has it; as many right as wrong. And p = 1 is no evidence, whatever the
    effect: of 2 right answers 1 has it, of 1 wrong answer none (F = 0, only I counts)."""
    table = double(4, 0, 2), double(4, 0, 2)
    assert value_of_table(*table, 4, 4).abs().max() < 1e-12
    assert fisher(double(1), double(0), 2, 1).item() == pytest.approx(1)
    gain = math.log2(3) - 2 / 3 - 2 / 3  # H(1/3), then with 2 of 3 answers without it H(1/2)
    assert value_of_table(double(1), double(0), 2, 1).item() == \
        pytest.approx(math.tanh(gain / 4 * math.pi / 4))


ALL, GOOD, BAD = 5, 6, 7
IDS = torch.tensor([[ALL, GOOD, GOOD], [ALL, GOOD, 0], [ALL, BAD, BAD], [ALL, BAD, GOOD],
                    [ALL, GOOD, 0], [ALL, BAD, 0]])
MASK = IDS > 0
GROUP = torch.tensor([0, 0, 0, 0, 1, 1])


def batch(reward, ids=IDS):
    return hand_made(MASK, ids=ids, group=GROUP, scores={"reward": torch.tensor(reward)})


def test_a_token_gets_its_ids_value_beside_grpo():
    """Both right answers have GOOD and one of two wrong ones; BAD only the wrong ones. How often an
    answer has it does not matter, nor does what the other group has."""
    rollouts = batch([1.1, 1.1, 0.1, 0.0, 0.5, 0.5])
    good = value_of_table(double(2), double(1), 2, 2).item()
    bad = value_of_table(double(0), double(2), 2, 2).item()
    assert bad < 0 < good
    beside = ktae(rollouts) - grpo(rollouts)
    expected = torch.tensor([[0, good, good], [0, good, 0], [0, bad, bad], [0, bad, good],
                             [0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(beside, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(ktae(rollouts, ktae_scale=3.0) - grpo(rollouts), 3 * expected,
                               atol=1e-6, rtol=0)
    assert torch.equal(ktae(rollouts, ktae_scale=0.0), grpo(rollouts))
