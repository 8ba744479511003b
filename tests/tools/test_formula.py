"""What a loss optimises: each of some sixty losses, right and wrong, is named as what it is."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, refusal
from formula_losses import LOSSES, answer, clip, k3, log_probs, make, z

from engine.errors import UserError
from tools.formula import load_loss, main
from tools.helpers.formula_batches import make_case
from tools.helpers.formula_decode import Examined, LossFailed
from tools.helpers.formula_fit import find_formula
from tools.helpers.formula_flags import about_flags
from tools.helpers.formula_report import codes, unmet

SOME = ["plain", "published grpo", "groups mixed", "gspo", "published mistake", "end untrained",
        "late mask and dr grpo", "mixed and wrong side"]  # the others are in the slow half


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_named_as_what_it_is(name):
    loss, words = LOSSES[name]
    formula = find_formula(loss)
    assert words <= codes(formula), (words - codes(formula), formula.not_understood)
