"""Baselines, by hand."""
import pytest
import torch
from small import hand_made

from lab.credit.baselines import gdpo, maxrl, opo, optimal_token_baseline, paid_parts

HALF = torch.tensor(0.5).log().item()


def batch(lengths, reward, group=None, log_prob=None, **scores):
    longest = max(lengths)
    mask = torch.tensor([[t < n for t in range(longest)] for n in lengths])
    log_prob = torch.full(mask.shape, HALF) if log_prob is None else log_prob
    group = torch.zeros(len(lengths), dtype=torch.long) if group is None else torch.tensor(group)
    # of two tokens: sum p^2 = p^2 + (1 - p)^2, so s^2 = 1 - 2p + sum p^2 = 2 (1 - p)^2
    p = log_prob.exp()
    return hand_made(mask, log_prob=log_prob, collision=p.square() + (1 - p).square(), group=group,
                     scores={name: torch.tensor(value) for name, value in
                             {"reward": reward, **scores}.items()})


def test_the_baseline_counts_each_answer_by_the_gradients_it_has_had():
    """s^2 is 0.5 at p = 1/2, and 2 (1 - 3/4)^2 = 1/8 at p = 3/4. W at token 0: 0.5 and 0.125; at
    token 1: 1 and 0.25. The rewards are 1 and 0, so the baseline is 0.5 / 0.625 = 0.8 at both. The
    first answer's third token is its own alone."""
    sure = torch.tensor([[0.5, 0.5, 0.5], [0.75, 0.75, 0.5]]).log()
    rollouts = batch([3, 2], [1.0, 0.0], log_prob=sure)
    expected = torch.tensor([[0.2, 0.2, 1.0], [-0.8, -0.8, 0.0]])
    torch.testing.assert_close(optimal_token_baseline(rollouts), expected)
    without = optimal_token_baseline(rollouts, zero_tail=False)
    torch.testing.assert_close(without, torch.tensor([[0.2, 0.2, 0.0], [-0.8, -0.8, 0.0]]))


def test_opo_counts_each_answer_with_its_length():
    """Rewards 1 and 0, lengths 3 and 1: the baseline is 3 / 4. Equal rewards give exactly 0."""
    rollouts = batch([3, 1, 2, 7], [1.0, 0.0, 0.3, 0.3], group=[0, 0, 1, 1])
    assert opo(rollouts)[:, 0].tolist() == [0.25, -0.75, 0.0, 0.0]
    assert opo(rollouts)[1, 1:].tolist() == [0.0] * 6  # beyond the answer


def test_maxrl_says_once_that_rewards_are_not_0_and_1(capsys):
    scores = {"reward": torch.tensor([1.0, 0.0, 0.25])}
    for step, count in ((1, 1), (2, 0)):
        maxrl(hand_made([[True]] * 3, scores=scores, step=step))
        assert capsys.readouterr().out.count("Some are others, such as 0.25, ") == count
    maxrl(hand_made([[True]] * 3, scores={"reward": torch.tensor([1.0, 0.0, 1.0])}))
    assert capsys.readouterr().out == ""


def test_maxrl_divides_by_the_mean_and_gives_an_unsolved_group_nothing():
    rollouts = batch([1] * 6, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], group=[0, 0, 0, 0, 1, 1])
    assert maxrl(rollouts)[:, 0].tolist() == pytest.approx([3, -1, -1, -1, 0, 0])


def test_each_paid_part_is_standardised_by_itself():
    """One answer is right, two are well formed. Alone each part has a z-score; reasoning is not
    paid, so it has none. The sum is standardised again over the batch."""
    parts = dict(answer=[1.0, 0.0, 0.0, 0.0], format=[1.0, 1.0, 0.0, 0.0],
                 reasoning=[0.3, 0.9, 0.1, 0.2])
    rollouts = batch([1] * 4, [1.1, 0.1, 0.0, 0.0], **parts)
    assert paid_parts(rollouts) == pytest.approx({"answer": 1.0, "format": 0.1})
    found = gdpo(rollouts)[:, 0]
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std(correction=0).item() == pytest.approx(1, abs=1e-3)
    assert found[0] > found[1] > found[2]


def test_parts_count_as_much_as_they_are_paid_if_asked():
    """z-scores: of the answer 1.7321 and three times -0.5774, of the format 1.5076, 0.3015 and
    twice -0.9045, which count a tenth: the sums are 1.8828, -0.5472 and twice -0.6678, and their
    mean is 0."""
    parts = dict(answer=[1.0, 0.0, 0.0, 0.0], format=[1.0, 0.5, 0.0, 0.0], reasoning=[0.0] * 4)
    rollouts = batch([1] * 4, [1.1, 0.05, 0.0, 0.0], **parts)
    found = gdpo(rollouts, parts_as_paid=True)[:, 0]
    assert (found * 1.8828 / found[0]).tolist() == pytest.approx([1.8828, -0.5472, -0.6678,
                                                                  -0.6678], rel=2e-3)
