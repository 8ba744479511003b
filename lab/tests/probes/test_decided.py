"""The shares of tokens, by hand; a whole run, small."""
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT
from lab.__main__ import main
from lab.analysis.run_folders import read_columns
from lab.analysis.token_table import TokenTable
from lab.engine.errors import UserError
from lab.probes import decided
from lab.probes.credit import MeasuredCredit
from lab.probes.decided import decided_table, tokens_of
from runs import edit_config
from small import hand_made


def test_the_tokens_of_two_problems(policy):
    """By four equal parts the squared credit is the square."""
    rollouts = hand_made(torch.tensor([[True, False], [True, True]]), advantage=torch.ones(2, 2),
                         log_prob=torch.full((2, 2), -1.0), collision=torch.full((2, 2), 0.5))
    parts = torch.tensor([[[0.1, 0], [0.2, 0.3]]]).expand(4, 2, 2)
    measured = rollouts, MeasuredCredit(parts[0], parts[0], parts, 0)
    tokens = tokens_of(policy, [measured, measured])
    assert np.allclose(tokens["squared credit"], 2 * [0.01, 0.04, 0.09])
    assert tokens["problem"].tolist() == [0, 0, 0, 1, 1, 1]
    assert tokens["answer"].tolist() == [0, 1, 1, 2, 3, 3]


def test_too_little_time_is_told_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="in 1e-09 minutes fewer than two problems were measured"):
        main(["decided", "--minutes", "1e-9", "--answers", "2", "--out", str(tmp_path / "x")])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="exists already"):
        main(["decided", "--out", str(tmp_path)])


def test_two_problems_of_the_model_that_ships(tmp_path, capsys):
    flags = "--problems 2 --answers 2 --continuations 4 --certain 0.3 --threads 1".split()
    main(["decided", *flags, "--model", str(ROOT / "models/tiny"), "--out", str(tmp_path / "one")])
    on_screen = capsys.readouterr().out
    command, commit, _, *lines = (tmp_path / "one/printed.txt").read_text().splitlines()
    assert "\n".join(lines) in on_screen and "## The same by section" in on_screen
    printed = " ".join(on_screen.split())
    assert "Credit was measured for 4 answers of" in printed and " to 2 problems" in printed
    numbers = json.loads((tmp_path / "one/numbers.json").read_text())
    assert command == numbers["command"] and command.startswith("python -m lab decided --problems")
    assert commit.startswith(f"commit {numbers['git_commit']}, torch ")
    assert numbers["settings"].keys() == {*decided.FLAGS} and numbers["settings"]["seed"] == 0
    for table in numbers["tables"]:
        assert sum(row["gradient"]["value"] for row in table["rows"]) == pytest.approx(1)
    for step in (1, 2):
        columns = read_columns(tmp_path / "one/run", step)
        chance = 1 - np.exp(columns["log_prob"].astype(float))
        assert not columns["true_credit"][chance < 0.299].any()
        assert columns["true_credit"].any()


def test_a_checkpoint_is_asked_as_its_run_was_but_at_temperature_1(recorded, tmp_path):
    """And all of its parameters have a gradient, also if the run trained LoRA's additions alone."""
    folder = shutil.copytree(recorded, tmp_path / "run")
    edit_config(folder, temperature=0.7, lora=2)
    model = str(max(folder.glob("checkpoints/step_0*")))
    args = dict(model=model, device="cpu", threads=1, seed=5, max_new_tokens=0, task=None)
    s = decided.policy_of(SimpleNamespace(**args)).settings
    assert (s.max_new_tokens, s.loss_norm, s.seed) == (40, "sequence", 5)
    assert (s.temperature, s.lora) == (1, 0)


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Two problems, an answer each, eight times over: credits 0.4, 0, -0.2 and 0, 0.3, advantages 1
    and -2. Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5."""
    def repeat(values):
        return np.concatenate([np.array(values)] * 8)

    answer = np.concatenate([np.array([0, 0, 0, 1, 1]) + 2 * n for n in range(8)])
    table = decided_table(TokenTable({
        "problem": answer, "answer": answer,
        "squared credit": repeat([0.16, 0, 0.04, 0, 0.09]), "s": repeat([1, 0.5, 0.5, 1, 0.25]),
        "advantage": repeat([1, 1, 1, -2, -2.0]), "class": repeat([0, 1, 1, 0, 0])}), "class")
    row, _ = (dict(zip(table.columns, row)) for row in table.rows)  # no token is of the third class
    assert row["class"] == "filler" and row["tokens"] == 24 and row["of all"] == 0.6
    assert row["decided"].value == pytest.approx(0.25 / 0.29)
    assert row["gradient"].value == pytest.approx(3.5 / 4.5)
    said, _ = table.notes
    assert said.startswith("The filler tokens decide 86% (95% interval ") and "get 78% (" in said
