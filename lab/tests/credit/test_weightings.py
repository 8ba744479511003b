"""Each weighting by hand, on a few tokens, and baselines."""
import math

import pytest
import torch

from lab.credit.baselines import batch_mean
from lab.engine.credited import rescaled_weight
from small import hand_made, looking, make_weighting, one_row

HALF, LOG_2, LOG_3 = math.log(0.5), math.log(2), math.log(3)


def raw(name, rollouts, **own):
    return rescaled_weight(make_weighting(name, own, None), name, rollouts, rescale_to="none")[0]


@pytest.mark.parametrize("name, own, known, weight", [
    # the numbers of the published form: 8.3 at -0.01 and 0.010 at -3
    ("inverse_logprob_as_published", {"epsilon": 0.1}, {"log_prob": [-0.01, -3.0, 0.0]},
     [0.1 / 0.11 ** 2, 0.1 / 3.1 ** 2, 10]),
    ("entropy_ratio", {"entropy_beta": 1.0}, {"entropy": [0.0, 1, 5]}, [0, 0.5, 2.5]),
    ("entropy_ratio", {"entropy_beta": 2.0}, {"entropy": [0.0, 0.25, 1.25]}, [0, 0, 4]),
    ("entropy_ratio", {"entropy_beta": 1.0}, {"entropy": [0.0, 0]}, [1, 1])])
def test_weights_by_hand(name, own, known, weight):
    rollouts = one_row(**{key: [float(x) for x in values] for key, values in known.items()})
    assert raw(name, rollouts, **own)[0].tolist() == pytest.approx(weight, rel=1e-5, abs=1e-7)


def test_attention_credit_by_hand():
    """Five tokens, the last two the answer. Token 0 receives 0.2 and 0.4, token 1 nothing, 2 gets
    0.6 and 0, 3 gets 0.3 from the last."""
    attention = torch.zeros(2, 5, 5)
    attention[0, 3, :3] = torch.tensor([0.2, 0.0, 0.6])
    attention[0, 4, :4] = torch.tensor([0.4, 0.0, 0.0, 0.3])
    section = torch.tensor([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], dtype=torch.uint8)
    rollouts = hand_made([[True] * 5, [True, True, False, False, False]], section=section)
    received = torch.tensor([0.3, 0.0, 0.3, 0.3, 0.0])
    expected = (0.5 + 2 * received / received.mean()).clamp(0.1, 6.5)
    weight = raw("attention_credit", looking(rollouts, attention=attention), credit_scale=2.0)
    torch.testing.assert_close(weight[0], expected)
    torch.testing.assert_close(weight[1, :2], expected.mean().expand(2))  # no answer section
    high = raw("attention_credit", looking(rollouts, attention=attention * 0 + torch.eye(5)[0]),
               credit_scale=0.5)
    assert high.max() <= 0.5 + 3 * 0.5 and high[rollouts.mask].min() >= 0.1


def test_random_has_mean_one_and_standard_deviation_one():
    weight = raw("random", hand_made(torch.ones(100, 1000, dtype=torch.bool)))
    assert weight.mean().item() == pytest.approx(1, abs=0.02)
    assert weight.std().item() == pytest.approx(1, abs=0.02)


def batch(lengths, reward, group):
    mask = torch.tensor([[t < n for t in range(max(lengths))] for n in lengths])
    return hand_made(mask, group=torch.tensor(group), scores={"reward": torch.tensor(reward)})


def test_the_mean_of_a_batch_is_that_of_all_groups():
    """Rewards of 1 0 3 0 3 have the mean 7 / 5. Of equal ones nothing is left."""
    group = [0, 1, 0, 1, 1]
    found = batch_mean(batch([1] * 5, [1.0, 0.0, 3.0, 0.0, 3.0], group))[:, 0].tolist()
    assert found == pytest.approx([-0.4, -1.4, 1.6, -1.4, 1.6])
    assert not batch_mean(batch([1] * 5, [0.06] * 5, group)).any()
