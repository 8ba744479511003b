"""A method of 2026 by hand: how steep the answer section is at a token.
The gradient at the embeddings is tested in test_claims_of_phase1.py."""
import pytest
import torch
from small import spoken

from lab.credit.of_2026 import oar_g
from lab.engine.tokens import THINK


def test_weights_of_oar_by_hand(policy):
    """Stretched to 0, 1/4, 1/2 and 1. The median is 3/8, so the weights are 0.1, 2/3, 1 + 1/5 and
    2, over their mean 0.99167."""
    found = oar_g(policy).reshaped(torch.tensor([1.0, 2.0, 3.0, 5.0]))
    assert (found * 0.991667).tolist() == pytest.approx([0.1, 2 / 3, 1.2, 2], rel=1e-4)
    batch = spoken(policy)
    weight, think = oar_g(policy)(batch, policy), (batch.section == THINK) & batch.mask
    assert (weight[~think] == 1).all() and weight[think].std() > 0.1
    assert weight[0, think[0]].mean().item() == pytest.approx(1)
