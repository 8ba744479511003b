"""Other tokens in the place of some, by hand and in proportion to the policy."""
import numpy as np
import torch

from conftest import hand_made, looking, make_mitigation


def test_causal_ablation_by_hand(lab, monkeypatch):
    """Every second of five tokens: the reward changes by 1, 0 and 0.5, linear in between."""
    asked = []

    def rewards(lab, tokens, prefixes, k):
        asked.extend(prefixes)
        return torch.tensor([[0.0], [1.0], [0.5]] + [[1.0]])[:len(prefixes)], 17
    monkeypatch.setattr("credit.causal_ablation.continuation_rewards", rewards)
    hidden = torch.randn(2, 5, lab.model.config.hidden_size)
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    tokens = looking(
        hand_made(mask, ids=torch.tensor([[4, 5, 6, 7, 8], [9, 0, 0, 0, 0]]), group=torch.tensor(
            [0, 1]), scores={"reward": torch.tensor([1.0, 0.25])}), hidden=hidden)
    mitigation = make_mitigation("causal_ablation", {"ablate_every": 2}, lab)
    weight = mitigation(tokens, lab)
    torch.testing.assert_close(weight, torch.tensor([[1, 0.5, 0, 0.25, 0.5], [0.75, 0, 0, 0, 0]]))
    assert [(g, ids[:-1]) for g, ids in asked] == [(0, ()), (0, (4, 5)), (0, (4, 5, 6, 7)), (1, ())]
    assert all(ids[-1] != own for (_, ids), own in zip(asked, (4, 6, 8, 9)))
    assert mitigation.metrics == {"extra_tokens": 17}


def test_the_replacement_comes_from_the_policy_without_the_token(lab, monkeypatch):
    """A thousand times the same token: the others are drawn in proportion to their
    probabilities."""
    asked = []
    monkeypatch.setattr(
        "credit.causal_ablation.continuation_rewards",
        lambda lab, tokens, prefixes, k: asked.extend(prefixes) or
        (torch.zeros(len(prefixes), 1), 0))
    hidden = torch.randn(1, 1, lab.model.config.hidden_size,
                         generator=torch.Generator().manual_seed(0)).expand(4000, 1, -1) * 0.5
    probs = lab.model.logits(hidden[0, 0]).softmax(-1).detach()
    taken = int(probs.argmax())
    tokens = looking(
        hand_made(torch.ones(4000, 1, dtype=torch.bool), ids=torch.full((4000, 1), taken)),
        hidden=hidden)
    make_mitigation("causal_ablation", {"ablate_every": 1}, lab)(tokens, lab)
    drawn = np.bincount([ids[-1] for _, ids in asked], minlength=len(probs)) / 4000
    expected = probs.clone().index_fill(0, torch.tensor([taken]), 0) / (1 - probs[taken])
    assert drawn[taken] == 0
    assert np.abs(drawn - expected.numpy()).sum() < 0.35
    assert np.corrcoef(drawn, expected.numpy())[0, 1] > 0.95
