"""Weights that change places."""
import numpy as np
import torch

from conftest import hand_made, make_weighting
from mitigations import rescaled_weight


def test_the_placebo_of_the_weights_permutes_them_over_the_tokens():
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.7
    rollouts = hand_made(mask, entropy=torch.rand(20, 30))
    weighting = make_weighting("entropy_ratio", {"entropy_beta": 1.0}, None)
    plain = rescaled_weight(weighting, "", rollouts)[0]
    permuted = rescaled_weight(weighting, "", rollouts, placebo="weights")[0]
    assert not permuted[~mask].any() and not torch.equal(plain, permuted)
    torch.testing.assert_close(permuted[mask].sort().values, plain[mask].sort().values)
    assert abs(np.corrcoef(permuted[mask], rollouts.entropy[mask])[0, 1]) < 0.15
