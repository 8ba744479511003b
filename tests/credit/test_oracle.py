"""Weights from measured credit, on a table of values."""
from types import SimpleNamespace

import torch

from conftest import hand_made, make_mitigation, one_row


def test_oracle_by_hand(lab, monkeypatch):
    """Values 0.5, 0.75, then the reward 1; the middle token of the second answer was certain."""
    table = {(): 0.5, (4,): 0.75, (4, 5): 0.25}
    monkeypatch.setattr(
        "credit.monte_carlo.continuation_rewards", lambda lab, tokens, prefixes, k:
        (torch.tensor([[table[ids]] * k for _, ids in prefixes]), 5))
    tokens = hand_made([[True, True, False], [True, True, True]], ids=torch.tensor([[4, 6, 0],
                                                                                    [4, 5, 6]]),
                       log_prob=torch.tensor([[-1.0, -1, 0], [-1.0, -1e-4, -1]]),
                       scores={"reward": torch.tensor([1.0, 0.0])})
    mitigation = make_mitigation("oracle", {"oracle_k": 3}, lab)
    torch.testing.assert_close(mitigation(tokens, lab),
                               torch.tensor([[0.25, 0.25, 0], [0.25, 0, 0.25]]))
    assert mitigation.metrics == {"extra_tokens": 5}


def test_hotter_sampling_leaves_the_oracle_no_token_for_sure(lab, monkeypatch):
    monkeypatch.setattr(
        "credit.monte_carlo.continuation_rewards", lambda lab, tokens, prefixes, k:
        (torch.arange(1.0 * len(prefixes))[:, None].expand(-1, k), 5))
    tokens, hot = one_row(log_prob=[-1e-4, -1e-4]), SimpleNamespace(settings=SimpleNamespace(
        temperature=1.5))
    assert make_mitigation("oracle", {}, hot)(tokens, hot).tolist() == [[1, 1]]
    assert make_mitigation("oracle", {}, lab)(tokens, lab).tolist() == [[0, 0]]
