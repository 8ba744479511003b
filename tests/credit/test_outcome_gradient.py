"""Weights by attribution: the reshaping by hand, the gradient against finite differences."""
import pytest
import torch

from conftest import make_mitigation, spoken
from engine.labels import ANSWER, THINK
from credit.outcome_gradient import importance, reshaped


def test_weights_by_hand():
    """z = 0 0.25 0.5 0.75 1, the quantile of 25% is 0.25: the least is damped to 0.1, the others
    get 1 1.33 1.67 2, and the mean of all, 1.22, becomes 1."""
    size = torch.tensor([0, 0.25, 0.5, 0.75, 1]).expm1()
    expected = torch.tensor([0.1, 1, 4 / 3, 5 / 3, 2]) / 1.22
    torch.testing.assert_close(reshaped(size, 0.25, boost=1.0), expected)
    expected = torch.tensor([0.1, 0.5, 1, 1.5, 2])  # border 0.5, boost 2
    expected = expected.where(expected < 1, 1 + 2 * torch.tensor([0, 0, 0, 0.5, 1]))
    torch.testing.assert_close(reshaped(size, 0.5, boost=2.0), expected / expected.mean())
    assert reshaped(torch.full((3,), 2.0), 0.25, 1.0).tolist() == [1, 1, 1]


def divergence(lab, tokens, noise, b, t, stretched):
    """KL(p, q) of answer b by plain causal rows; q with noise, and the embedding of its token t
    longer by a share."""
    prompt, length = tokens.prompt_ids[tokens.group[b]], int(tokens.length[b])
    ids = torch.tensor([prompt + tokens.ids[b, :length].tolist()])
    e = lab.model.model.embed_tokens(ids).detach()
    changed = e.clone()
    thought = len(prompt) + (tokens.section[b] == THINK).nonzero().flatten()
    changed[0, thought] += noise
    changed[0, len(prompt) + t] += stretched * e[0, len(prompt) + t]
    answer = len(prompt) + (tokens.section[b] == ANSWER).nonzero().flatten() - 1
    log_probs = []
    for embedding in (e, changed):
        with torch.no_grad(), lab.model.model.embed_tokens.register_forward_hook(
                lambda *_: embedding):
            log_probs.append(lab.model(ids)[0, answer].double().mean(0).log_softmax(-1))
    p, q = log_probs
    return (p.exp() * (p - q)).sum().item()


def test_importance_is_the_slope_along_the_embedding(lab):
    """Of the first answer, with noise of the size of the embeddings, at three of its tokens."""
    tokens = spoken(lab)
    thought = (tokens.section == THINK) & tokens.mask
    seed = int(torch.randint(2 ** 62, (1,), generator=torch.Generator().manual_seed(3)))
    generator = torch.Generator().manual_seed(seed)  # of row 0
    width = lab.model.config.hidden_size
    noise = 0.2 * torch.randn(int(thought[0].sum()), width, generator=generator)
    size = importance(lab, tokens, noise_std=0.2)
    for t in (0, 4, 7):
        slope = (divergence(lab, tokens, noise, 0, t, 0.01)
                 - divergence(lab, tokens, noise, 0, t, -0.01)) / 0.02
        assert size[0, t].item() == pytest.approx(abs(slope), rel=0.02, abs=1e-4)
    assert not size[~thought].any()


def test_only_thoughts_that_lead_to_an_answer_are_weighed(lab):
    """Answers 2, 3 and 4 have no answer section; tags and the answer itself weigh 1."""
    tokens = spoken(lab)
    lab.model.zero_grad()
    weight = make_mitigation("outcome_gradient", {}, lab)(tokens, lab)
    assert (weight[2:5] == 1).all() and (weight[tokens.section != THINK] == 1).all()
    for b in (0, 1, 5):
        own = weight[b, (tokens.section[b] == THINK) & tokens.mask[b]]
        assert own.mean().item() == pytest.approx(1, abs=1e-5) and own.min() < 0.2 < 1.2 < own.max()
    assert all(parameter.grad is None for parameter in lab.model.parameters())
