"""Adapters for other people's GRPO: that they call the code, and what the page says of it."""
import re

import pytest
import torch
from conftest import ROOT, refusal
from lab.tests.formula_losses import LOSSES

from lab.trl.adapters import ADAPTERS, take_statement
from lab.trl.codes import main
from engine.errors import UserError
from lab.formula import find_formula, judge
from lab.formula.report import codes, remarks

PAGE = (ROOT / "lab/trl/codes.md").read_text(encoding="utf-8")
MISTAKES = {"mlx-lm-lora 55": "nothing", "ms-swift 10117": "divided twice",
            "TRL 3021": "micro-batch", "TRL 5815": "sum for mean and k3",
            "Search-R1 88": "groups mixed", "Liger 1088": "hundred times"}
CODE = '''
import torch

def step(rewards):
    for _ in range(2):
        centred = rewards - rewards.mean()
    return centred
'''


@pytest.mark.parametrize("report, name", MISTAKES.items())
def test_the_page_shows_what_the_tool_says_of_a_mistake(report, name):
    row = next(line for line in PAGE.splitlines() if f"({report})" in line)
    found = find_formula(LOSSES[name][0])
    said = [remark.sentence for remark in remarks(found)] + judge(found).in_words()
    assert row.split("|")[2].strip() in said


@pytest.mark.parametrize("kind, words", [
    ("dapo", {"z n-1 0.0001", "token", "clip 0.2 0.2", "no kl", "understood"}),
    ("dr_grpo", {"z n-1 0.0001", "constant 512", "understood"}),
    ("cispo", {"cispo none -0.8", "token", "understood"}),
    ("vespo", {"vespo 2 3 3 2", "token"}),
    ("luspo, ratio of the answer", {"gspo clip 0.2 0.2", "constant 1", "understood"}),
    ("dapo, beta 0.04", {"kl k3 0.04 with ratio", "understood"}),
    ("dapo, scale_rewards none", {"mean", "understood"})])
def test_the_rows_of_trl(kind, words):
    trl = pytest.importorskip("trl", reason="pip install -r lab/trl/requirements.txt")
    found = set(codes(find_formula(ADAPTERS["trl"]()[f"TRL {trl.__version__} {kind}"])))
    assert words <= found, found


def test_a_statement_is_taken_out_of_a_long_function():
    centred = take_statement(CODE, "rewards.mean()", ["rewards"], "centred")
    assert centred(torch.tensor([1.0, 3.0])).tolist() == [-1.0, 1.0]
    with pytest.raises(UserError, match="another version"):
        take_statement(CODE, "absent()", [], "x")


def test_every_adapter_has_its_row(capsys):
    main([])
    listed = capsys.readouterr().out
    for name in ADAPTERS:
        assert name in listed
        assert re.search(rf"^\| {re.escape(name)}\b", PAGE, re.M | re.I), name
    assert "there is no adapter" in refusal(main, ["absent"])
