"""The plain sampler draws the tokens that the fast one draws."""
import pytest
import torch

from lab.engine.sampler import generate
from examples.sampler import sample

PROMPT = [5, 6, 7, 9]
STOPS = (2, 4, 9, 17, 30)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stops", [STOPS, ()])
def test_it_draws_the_tokens_of_the_fast_one(small_model, seed, stops):
    """Answers that end at once, later, and at the limit; without stop tokens all reach it."""
    tokens, mask, log_prob = sample(small_model, PROMPT, 12, 25, stops, seed)
    fast = generate(small_model, [PROMPT], answers=12, max_new_tokens=25, stop_ids=stops, seed=seed)
    T = tokens.shape[1]
    assert torch.equal(fast.tokens[:, :T], tokens) and torch.equal(fast.mask[:, :T], mask)
    assert not fast.mask[:, T:].any() and mask[:, T - 1].any()
    torch.testing.assert_close(fast.log_prob[:, :T], log_prob, atol=1e-4, rtol=0)
    assert len(set(mask.sum(1).tolist())) > 3 or (not stops and mask.all())
