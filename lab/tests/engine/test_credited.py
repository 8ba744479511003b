"""What is made of the values of a method: the number that rescales the weights of a batch, placebos
whose values are shuffled."""
import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from lab.engine.credited import rescaled_weight, shuffled
import mitigations  # noqa: F401  fills the choices
from small import hand_made


def weighed(weight, rollouts, **how):
    return rescaled_weight(lambda rollouts, policy: weight, "by hand", rollouts, **how)


def test_rescaling_by_hand():
    probability = torch.tensor([[0.8, 0.5], [0.8, 0.1]])
    rollouts = hand_made([[True, True], [True, False]], log_prob=probability.log(),
                         collision=torch.tensor([[0.68, 0.5], [0.68, 0.9]]),
                         advantage=torch.tensor([[1.0, 1.0], [-2.0, 9.0]]))
    s = torch.tensor([[0.08, 0.5], [0.08, 0.0]]).sqrt()
    weight = torch.tensor([[2.0, 0.5], [4.0, 7.0]])
    size = rollouts.advantage.abs() * s * rollouts.mask
    after = (weighed(weight, rollouts, rescale_to="gradient")[0] * size).sum().item()
    assert after == pytest.approx(size.sum().item(), rel=1e-5)


def test_weights_that_cannot_be_rescaled_to_the_gradient_are_left_and_it_is_said():
    advantage = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    rollouts = hand_made([[True, True], [True, True]], advantage=advantage)
    for tiny in (0.0, 1e-42):
        weight = torch.tensor([[tiny, tiny], [2.0, 1.0]])
        weight, said = weighed(weight, rollouts, rescale_to="gradient")
        assert weight[1].tolist() == [2, 1] and "not rescaled" in said["weight_note"]
    weight, said = weighed(torch.zeros(2, 2), rollouts)
    assert not weight.any() and "not rescaled" in said["weight_note"]
    nothing = dataclasses.replace(rollouts, advantage=torch.zeros(2, 2))
    assert weighed(torch.ones(2, 2), nothing, rescale_to="gradient")[1]["weight_note"] is None


def test_the_placebo_of_the_weights_permutes_them_over_the_tokens():
    draw = torch.Generator().manual_seed(0)
    rollouts = hand_made(torch.rand(20, 30, generator=draw) < 0.7)
    weight, mask = torch.rand(20, 30, generator=draw), rollouts.mask
    permuted = weighed(weight, rollouts, rescale_to="none", placebo="weights")[0]
    assert not permuted[~mask].any()
    torch.testing.assert_close(permuted[mask].sort().values, weight[mask].sort().values)
    assert abs(np.corrcoef(permuted[mask], weight[mask])[0, 1]) < 0.15


def test_the_placebo_of_the_advantages_stays_within_the_group():
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.tensor([2, 6, 3, 4, 1, 5])[:, None]
    answers, group = torch.arange(1.0, 7)[:, None] * mask, torch.tensor([0, 1, 0, 1, 0, 1])
    rollouts = hand_made(mask, group=group, generator=generator)
    permuted = shuffled(answers, rollouts, "advantages", whole_answers=True)
    assert torch.equal(permuted, permuted[:, :1] * mask)  # whole answers are shuffled
    assert sorted(permuted[::2, 0].tolist()) == [1, 3, 5]
    assert sorted(permuted[1::2, 0].tolist()) == [2, 4, 6]
    advantage = torch.rand(6, 6, generator=generator) * mask
    permuted = shuffled(advantage, rollouts, "advantages")
    assert not torch.equal(permuted, advantage) and not permuted[~mask].any()
    for number in (0, 1):
        own = mask & (group == number)[:, None]
        assert torch.equal(permuted[own].sort().values, advantage[own].sort().values)


@pytest.mark.parametrize("placebo", ["weights_by_kind", "advantages_by_kind"])
def test_a_placebo_within_kinds_leaves_each_of_them_its_values(placebo):
    """Four answers in two groups. Weights may go to the other group, and advantages may not."""
    draw = torch.Generator().manual_seed(2)
    mask = torch.arange(30) < torch.tensor([30, 20, 25, 28])[:, None]
    rollouts = hand_made(mask, group=torch.tensor([0, 0, 1, 1]), generator=draw,
                         kind=torch.randint(3, (4, 30), generator=draw).to(torch.uint8))
    value = torch.rand(4, 30, generator=draw) * mask
    mixed = shuffled(value, rollouts, placebo)
    is_in_group = [rollouts.group == 0, rollouts.group == 1]
    is_together = is_in_group if placebo.startswith("adv") else [torch.ones(4, dtype=torch.bool)]
    for rows in is_together:
        for kind in range(3):
            own = mask & rows[:, None] & (rollouts.kind == kind)
            assert torch.equal(mixed[own].sort().values, value[own].sort().values)
    has_moved = (mixed != value) & mask
    assert has_moved[:, :20].float().mean() > 0.4 and not mixed[~mask].any()
    goes_to_other_group = torch.isin(mixed[:2][mask[:2]], value[2:][mask[2:]]).any()
    assert goes_to_other_group == placebo.startswith("weights")


@pytest.mark.parametrize("whole_answers", [False, True])
def test_every_order_is_drawn_alike_from_the_batchs_generator(whole_answers):
    """Three values, 600 draws: each of the six orders comes about 100 times, also the one in which
    all stay. torch's own random numbers decide nothing."""
    mask = torch.ones((3, 2) if whole_answers else (1, 3), dtype=torch.bool)
    value = torch.arange(3.0).view(-1, 1).expand(3, 2) if whole_answers else torch.arange(3.0)[None]
    group, seen = torch.zeros(len(mask), dtype=torch.long), []
    for attempt in range(2):
        torch.manual_seed(attempt)
        generator, counts = torch.Generator().manual_seed(0), Counter()
        for _ in range(600):
            rollouts = hand_made(mask, group=group, generator=generator)
            drawn = shuffled(value, rollouts, "advantages", whole_answers)
            counts[tuple((drawn[:, 0] if whole_answers else drawn[0]).tolist())] += 1
        seen.append(counts)
    assert seen[0] == seen[1] and len(seen[0]) == 6
    assert all(60 < count < 140 for count in seen[0].values()), seen[0]
