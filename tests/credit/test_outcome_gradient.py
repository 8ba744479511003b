"""Weights by attribution: the reshaping by hand, the gradient against finite differences."""
import pytest
import torch

from conftest import copied, make_weighting, spoken
from engine.tokens import ANSWER, THINK
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


def divergence(model, rollouts, noise, b, t, stretched):
    """KL(p, q) of answer b by plain causal rows; q with noise, and the embedding of its token t
    longer by a share."""
    prompt, length = rollouts.prompt_ids[rollouts.group[b]], int(rollouts.length[b])
    ids = torch.tensor([prompt + rollouts.ids[b, :length].tolist()])
    e = model.model.embed_tokens(ids).detach()
    changed = e.clone()
    thought = len(prompt) + (rollouts.section[b] == THINK).nonzero().flatten()
    changed[0, thought] += noise
    changed[0, len(prompt) + t] += stretched * e[0, len(prompt) + t]
    answer = len(prompt) + (rollouts.section[b] == ANSWER).nonzero().flatten() - 1
    log_probs = []
    for embedding in (e, changed):
        with torch.no_grad(), model.model.embed_tokens.register_forward_hook(
                lambda *_: embedding):
            log_probs.append(model(ids)[0, answer].mean(0).log_softmax(-1))
    p, q = log_probs
    return (p.exp() * (p - q)).sum().item()


@pytest.mark.numerics
@pytest.mark.parametrize("noise_std", [1e-3, 0.2])
def test_importance_is_the_slope_along_the_embedding(policy, noise_std):
    """Of the first answer, at three of its tokens, with little noise and with noise of the size of
    the embeddings. float64 knows log-probs of up to 30 to 30 2^-53, which 2e-4 divides."""
    rollouts, model = spoken(policy), copied(policy.model).double().compute_in(torch.float64)
    thought = (rollouts.section == THINK) & rollouts.mask
    seed = int(torch.randint(2 ** 62, (1,), generator=torch.Generator().manual_seed(3)))
    generator = torch.Generator().manual_seed(seed)  # of row 0
    noise = noise_std * torch.randn(int(thought[0].sum()), policy.model.config.hidden_size,
                                    generator=generator, dtype=torch.float64)
    size = importance(policy, rollouts, noise_std)
    for t in (0, 4, 7):
        slope = (divergence(model, rollouts, noise, 0, t, 1e-4)
                 - divergence(model, rollouts, noise, 0, t, -1e-4)) / 2e-4
        assert size[0, t].item() == pytest.approx(abs(slope), rel=1e-5, abs=2e-11)
    assert not size[~thought].any()


def test_only_thoughts_that_lead_to_an_answer_are_weighed(policy):
    """Answers 2, 3 and 4 have no answer section; tags and the answer itself weigh 1."""
    rollouts = spoken(policy)
    weight = make_weighting("outcome_gradient", {}, policy)(rollouts, policy)
    assert (weight[2:5] == 1).all() and (weight[rollouts.section != THINK] == 1).all()
    for b in (0, 1, 5):
        own = weight[b, (rollouts.section[b] == THINK) & rollouts.mask[b]]
        assert own.mean().item() == pytest.approx(1, abs=1e-5) and own.min() < 0.2 < 1.2 < own.max()
