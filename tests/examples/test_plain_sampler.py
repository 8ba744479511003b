"""The plain sampler draws the tokens that the fast one draws."""
import pytest
import torch

from conftest import ROOT
from engine.model_folder import read_model_folder
from engine.sampler import generate
from examples.sampler import KVCache, sample

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


def test_it_does_so_with_the_model_that_ships_with_the_project():
    model = read_model_folder(ROOT / "models/tiny")
    prompt = list(range(20, 60))
    tokens, mask, _ = sample(model, prompt, 8, 30, model.config.stop_ids, 1)
    fast = generate(model, [prompt], answers=8, max_new_tokens=30, seed=1)
    assert torch.equal(fast.tokens[:, :tokens.shape[1]], tokens)
    assert torch.equal(fast.mask[:, :mask.shape[1]], mask)


def test_what_the_cache_keeps_is_what_the_model_computes_at_once(small_model):
    """The last of seven tokens, fed after the six before it, or together with them."""
    ids, cache = torch.tensor([[5, 6, 7, 9, 8, 3, 11]]), KVCache()
    with torch.no_grad():
        whole = small_model.model(ids)
        small_model.model(ids[:, :6], torch.arange(6), cache.attend)
        last = small_model.model(ids[:, 6:], torch.tensor([6]), cache.attend)
    torch.testing.assert_close(last[:, -1], whole[:, -1], atol=1e-5, rtol=1e-4)
    assert cache.keys[0].shape[2] == 7
