"""The losses of the installed TRL, read by lab.formula."""
import pytest

from lab.formula import find_formula, of_trl
from lab.formula.report import codes
from lab.tests.with_trl import INSTALL


def advantage(batch):
    """TRL's: the z-score with the std over n - 1, and 1e-4."""
    groups = batch.reward.view(len(batch.group.unique()), -1)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


@pytest.mark.slow
@pytest.mark.parametrize("flags, words", [
    ({"loss_type": "dapo"}, {"z n-1 0.0001", "token", "clip 0.2 0.2", "no kl", "understood"}),
    ({"loss_type": "dr_grpo"}, {"z n-1 0.0001", "constant 512", "understood"}),
    ({"loss_type": "cispo"}, {"cispo none -0.8", "token", "understood"}),
    ({"loss_type": "dapo", "beta": 0.04}, {"kl k3 0.04 with ratio", "understood"})])
def test_what_trl_computes_by_its_own_defaults(flags, words):
    trl = pytest.importorskip("trl", reason=INSTALL)
    found = set(codes(find_formula(of_trl(trl.GRPOTrainer, advantage, **flags))))
    assert words <= found, found
