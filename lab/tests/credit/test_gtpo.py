"""GTPO: rewards spread by entropy, by hand."""
import pytest
import torch

from small import hand_made
from lab.credit.gtpo import gtpo

REWARD = torch.tensor([1.1, 1.1, 0.1, 0.1])
SQUARE = torch.ones(4, 2, dtype=torch.bool)


def batch(mask=SQUARE, entropy=None, reward=REWARD, group=torch.zeros(4, dtype=torch.long)):
    entropy = torch.ones(mask.shape) if entropy is None else entropy
    return hand_made(mask, entropy=entropy, scores={"reward": reward}, group=group[:len(mask)])


def standardised(values):
    """Over these tokens; the program adds 1e-4 to the standard deviation, like grpo."""
    values = torch.tensor(values)
    return (values - values.mean()) / (values.std(correction=0) + 1e-4)


def test_alike_entropies_give_grpo_of_right_and_wrong():
    """Every token gets 1.1: half of the group's tokens are right, so +1 and -1. All are certain
    here, and nothing is divided by 0."""
    right, wrong = gtpo(batch(entropy=torch.zeros(4, 2))).split(2)
    torch.testing.assert_close(right, torch.full((2, 2), 1.0), atol=1e-3, rtol=0)
    torch.testing.assert_close(wrong, -right)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.0])
def test_the_unsure_are_praised_and_the_sure_are_blamed(part):
    """At token 0 the right answers have entropies 3 and 1: 1 + part * 3/4 * 2, and 1/4 * 2. The
    wrong ones have 4 and 1: 1/4 and 1 make shares of 0.2 and 0.8."""
    entropy = torch.tensor([[3.0, 1.0], [1.0, 1.0], [4.0, 1.0], [1.0, 1.0]])
    right, wrong = ([1 + part * share for share in shares]
                    for shares in ([1.5, 1, 0.5, 1], [0.4, 1, 1.6, 1]))
    expected = torch.cat([standardised([*right, 0, 0, 0, 0])[:4],
                          -standardised([0, 0, 0, 0, *wrong])[4:]]).view(4, 2)
    torch.testing.assert_close(gtpo(batch(entropy=entropy), entropy_part=part), expected)


def test_only_answers_that_still_run_share_a_position():
    """The first right answer is alone at token 1: it gets 1 + 0.1 * 1 * 1, whatever its entropy."""
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    entropy = torch.tensor([[3.0, 9.0], [1.0, 50.0], [1.0, 50.0]])
    found = gtpo(batch(mask, entropy, REWARD[[0, 1, 2]]))
    right = standardised([1.15, 1.1, 1.05, 0])
    torch.testing.assert_close(found[0], right[:2])
    torch.testing.assert_close(found[1], torch.tensor([right[2], 0.0]))
    assert found[2, 0] == pytest.approx(-standardised([0, 0, 0, 1.1])[3].item(), rel=1e-5)


def test_groups_do_not_mix_and_one_without_a_difference_gets_nothing():
    mask, entropy = torch.ones(6, 2, dtype=torch.bool), torch.ones(6, 2)
    entropy[4:] = torch.tensor([[7.0], [3.0]])
    group, reward = torch.tensor([0, 0, 0, 0, 1, 1]), torch.cat([REWARD, torch.ones(2)])
    found = gtpo(batch(mask, entropy, reward, group))
    torch.testing.assert_close(found[:4], gtpo(batch()))
    assert not found[4:].any()
