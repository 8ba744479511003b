"""Other tokens in the place of some, by hand."""
import torch

from conftest import hand_made, make_mitigation


def test_causal_ablation_by_hand(lab, monkeypatch):
    """Every second of five tokens: the reward changes by 1, 0 and 0.5, linear in between."""
    asked = []

    def rewards(lab, tokens, prefixes, k, without):
        asked.extend(zip(prefixes, without))
        return torch.tensor([[0.0], [1.0], [0.5]] + [[1.0]])[:len(prefixes)], 17
    monkeypatch.setattr("credit.causal_ablation.continuation_rewards", rewards)
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    tokens = hand_made(mask, ids=torch.tensor([[4, 5, 6, 7, 8], [9, 0, 0, 0, 0]]), group=torch.tensor(
            [0, 1]), scores={"reward": torch.tensor([1.0, 0.25])})
    mitigation = make_mitigation("causal_ablation", {"ablate_every": 2}, lab)
    weight = mitigation(tokens, lab)
    torch.testing.assert_close(weight, torch.tensor([[1, 0.5, 0, 0.25, 0.5], [0.75, 0, 0, 0, 0]]))
    assert asked == [((0, ()), 4), ((0, (4, 5)), 6), ((0, (4, 5, 6, 7)), 8), ((1, ()), 9)]
    assert mitigation.metrics == {"extra_tokens": 17}
