"""The index and the progress of a method, by hand and against the book's forward pass."""
import pytest
import torch
from small import hand_made, spoken

import grpo
from lab.probes.common import gradient
from lab.probes.nearness import coefficient, index_of, nearness_table, ranks_of


def test_ranks_and_the_index_by_hand():
    """Credit 0.5, 0.3 and 0.2 at the ranks 1, -1 and 0: 0.2. A token alone has the rank 0."""
    assert ranks_of(torch.tensor([3.0, 1, 2, 2])).tolist() == pytest.approx([1, -1, 0, 0])
    assert ranks_of(torch.tensor([7.0])).tolist() == [0]
    batch = hand_made([[True, True, True, False]] * 2)
    sizes, squared = torch.tensor([[3.0, 1, 2, 9]] * 2), torch.tensor([[0.5, 0.3, 0.2, 9]] * 2)
    found = index_of([sizes] * 2, [batch] * 2, [squared] * 2)
    assert found.value == pytest.approx(0.2) and found.interval == pytest.approx((0.2, 0.2))


def test_the_gradient_is_that_of_the_book_and_a_weighting_is_in_it(policy):
    batch = spoken(policy)
    plain, weighted = (coefficient(policy, name, batch) for name in ("none", "entropy_ratio"))
    assert torch.equal(plain, batch.advantage) and not torch.equal(weighted, plain)
    log_prob = grpo.log_probs(policy.model, batch, batch.rows)
    of_book = torch.autograd.grad((weighted * log_prob).sum(), policy.model.parameters())
    torch.testing.assert_close(gradient(policy, batch, weighted),
                               torch.cat([g.flatten() for g in of_book]), atol=1e-3, rtol=1e-3)


def test_plain_grpo_goes_as_far_as_plain_grpo(policy):
    batch = spoken(policy)
    table = nearness_table(policy, "none", [batch] * 2, [batch.advantage] * 2,
                           [batch.advantage.square()] * 2, 2)
    [(name, index, progress, cosine)] = table.rows
    assert name == "none" and progress.value == progress.low == 1 and -1 < cosine < 1
    assert index.value == 0  # all tokens of an answer have one weight
