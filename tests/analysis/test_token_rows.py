"""One row a token, read back."""
import csv
import json

import numpy as np
import pytest
from conftest import credit_columns, write_log
from logs import random_log

import analyze
from engine.errors import UserError
from engine.tokens import KINDS, SECTIONS, load_tokenizer


def written(folder):
    """The rows of tokens.csv, which analyze.py made."""
    analyze.main([str(folder), "--csv"])
    with open(folder / "analysis/tokens.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("undrawn")
def test_every_token_of_the_run_has_its_row(tmp_path, capsys):
    """Numbers with all their digits, codes as words, what is known of an answer beside each of its
    tokens."""
    folder, files = random_log(tmp_path / "run", steps=2)
    rows = written(folder)
    assert "tokens.csv" in capsys.readouterr().out
    assert len(rows) == sum(len(columns["token_id"]) for columns in files.values())
    assert list(rows[0])[:5] == ["step", "episode", "position", "text", "token_id"]
    assert not {"prompt_ids", "prompt_start", "episode_start"} & set(rows[0])
    tokenizer = load_tokenizer(folder)
    for step, columns in files.items():
        own = [row for row in rows if row["step"] == str(step)]
        ids, starts = columns["token_id"].tolist(), columns["episode_start"]
        episode = np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
        expected = {"episode": episode, "position": np.arange(len(ids)) - starts[episode]}
        for name in ("log_prob", "entropy", "collision", "weight", "advantage", "token_id"):
            expected[name] = columns[name]
        for name in ("reward", "reward_format", "reward_answer", "group", "finished"):
            expected[name] = columns[name][episode]
        for name, values in expected.items():
            assert np.array_equal(np.float32([row[name] for row in own]), np.float32(values)), name
        for name, words in (("kind", KINDS), ("section", SECTIONS)):
            assert [row[name] for row in own] == [words[code] for code in columns[name]]
        assert [json.loads(row["text"]) for row in own] == [
            tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@pytest.mark.usefixtures("undrawn")
def test_the_columns_of_an_earlier_experiment_and_of_a_probe(tmp_path):
    """A log p, and the z-score of the reward, whatever the advantage is: rewards 1 and 0 and 0 have
    mean 1/3 and standard deviation sqrt(2) / 3; the second group agrees. A probe measured the true
    credit."""
    credit = [0.5, 0, -0.25, 0, 0]
    columns = credit_columns([2, 1, 1, 1], [0, 0, 0, 1], reward=np.array([1.0, 0, 0, 1]),
                             advantage=np.array([2.0, -1, 1, 0, 1]), true_credit=credit)
    rows = written(write_log(tmp_path / "run", {1: columns}))
    contribution, z, measured = ([float(row[name]) for row in rows] for name in (
        "contribution", "normalised_reward", "true_credit"))
    assert contribution == pytest.approx(np.log(0.5) * np.array([2, -1, 1, 0, 1]))
    root = 2 ** 0.5
    assert z == pytest.approx([root, root, -1 / root, -1 / root, 0], rel=1e-3)
    assert measured == credit


def test_no_rows_without_tokens(tmp_path):
    empty = write_log(tmp_path / "empty", {}, metrics=[{"step": 1, "success": 0.5, "entropy": 0.1}])
    with pytest.raises(UserError, match="has no credit files yet"):
        written(empty)
