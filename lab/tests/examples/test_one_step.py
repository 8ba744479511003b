"""The page that is one step of GRPO: what it computes is what train.py computes."""
import re

import numpy as np
import pytest

import lab.run as train
from conftest import ROOT
from examples.one_step import SHOWN_TOKENS, one_step
from lab.analysis.run_folders import read_columns
from lab_runs import gradients_of_steps, program, program_here

FILE, TINY = ROOT / "examples/one_step.py", ROOT / "models" / "tiny"
NUMBERS = re.compile(r"[-+]?\d+(?:\.\d+)?")


def table_of(printed):
    """The numbers of each line below the table's head."""
    return [[float(number) for number in NUMBERS.findall(line)]
            for line in printed.partition("change\n")[2].partition("\n\n")[0].splitlines()]


def test_a_step_is_the_first_one_of_training_gradient_for_gradient(tmp_path, monkeypatch, capsys):
    """Before it is limited. So are the log-probs of the answers before the step and after it."""
    seen = gradients_of_steps(monkeypatch)
    train.train_beyond(["--questions", "1", "--answers", "16", "--steps", "1", "--eval_every", "0",
                "--change_every", "1", "--out", str(tmp_path / "run")])
    capsys.readouterr()
    one_step(TINY)
    wanted, found = seen
    assert (wanted - found).norm() <= 1e-4 * wanted.norm()
    columns = read_columns(tmp_path / "run", 1)
    starts = columns["episode_start"]
    before, change = (np.add.reduceat(columns[name], starts) for name in ("log_prob", "change"))
    length = np.diff([*starts, len(columns["token_id"])])
    expected = np.stack([np.arange(16), length, columns["reward"], columns["advantage"][starts],
                         before, before + change, change], axis=1)
    printed = capsys.readouterr().out
    rose = np.flatnonzero((expected[:, 3] < 0) & (expected[:, 6] > 0)).tolist()
    assert rose and f"negative advantage: {', '.join(map(str, rose))}.\n" in printed
    np.testing.assert_allclose(table_of(printed), expected, rtol=0, atol=0.006)  # a reward's digits
    # the least likely tokens of the answer with the highest reward
    best = int(columns["reward"].argmax())
    of_best = slice(starts[best], starts[best] + length[best])
    log_prob, change, advantage = (columns[name][of_best]
                                   for name in ("log_prob", "change", "advantage"))
    positions = sorted(np.argsort(log_prob)[:SHOWN_TOKENS])
    N = len(columns["token_id"])
    expected = [[t, log_prob[t], advantage[t], 1, -advantage[t] * log_prob[t] / N,
                 log_prob[t] + change[t], change[t]] for t in positions]
    lines = printed.rpartition("change\n")[2].splitlines()
    shown = [[float(word) for word in (line.split()[0], *line.split()[-6:])] for line in lines]
    np.testing.assert_allclose(shown, expected, rtol=0, atol=0.001)


@pytest.mark.slow
def test_any_model_can_be_asked_from_any_folder(bare_model, tmp_path):
    """One that knows nothing solves nothing, and is told so: nothing changes."""
    printed = program(tmp_path, FILE, bare_model, 2)
    table = table_of(printed)
    assert len(table) == 16 and all(row[2:4] == [0, 0] and row[6] == 0 for row in table)
    assert f"python examples/one_step.py {bare_model} 3" in printed


def test_no_folder_is_the_model_that_ships_and_one_that_is_none_is_one_sentence(tmp_path,
                                                                               monkeypatch):
    """The log-probs of the page are those of the sampler."""
    monkeypatch.chdir(tmp_path)
    [gap] = re.findall(r"from those of the sampler by at most (\S+)", program_here(FILE))
    assert float(gap) < 1e-3
    assert "steps are counted from 1" in program_here(FILE, TINY, 0, expect=2)
    said = program_here(FILE, tmp_path / "none", expect=1)
    assert said.startswith("one_step.py: ") and said.count("\n") == 1
