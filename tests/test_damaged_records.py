"""A damaged record is told in one sentence, and is in nobody's way."""
from pathlib import Path

import numpy as np
import pytest

import analyze
import run as book
from conftest import credit_columns, evaluation, refusal, write_log
from qwen2_model import UserError

LINE, END = {"step": 1, "success": 0.5}, evaluation(2, [1, 0])
GREEDY = evaluation(2, [1, 0], "greedy")
TWICE = "a step stands there twice, or after a later one"
# metrics, evaluations, and what is said of them
LINES = [
    ([LINE, LINE], [], f"metrics.jsonl cannot be read: ValueError('{TWICE}')"),
    ([LINE | {"step": 3}, LINE], [], TWICE),
    ([LINE | {"success": "half"}], [], "metrics.jsonl cannot be read: ValueError("),
    ([LINE | {"success": 10 ** 400}], [], "metrics.jsonl cannot be read: OverflowError("),
    ([LINE], [END, END], f"evaluations.jsonl cannot be read: ValueError('{TWICE}')"),
    ([LINE], [END, GREEDY, evaluation(0, [1, 0])], TWICE),
    ([LINE], [END | {"mode": "x"}], "evaluations.jsonl cannot be read: KeyError('x')"),
    ([LINE], [END | {"success": 1}], "a mean is not that of its problems"),
    *(([LINE], [END | {name: value}], "a number is missing, or a mean is not that of its problems")
      for name in ("success_low", "success_high", "length_mean", "answer")
      for value in (None, float("nan"))),
    ([LINE], [END | {"success": None}], "a number is missing"),  # then a reward is needed
    *(([LINE], [END, evaluation(3, [1, 0]) | {"answer": answer}], "jsonl cannot be read")
      for answer in ([1], "ab", ["a", "b"], [None, 1], {}, []))]


@pytest.mark.parametrize("metrics, evaluations, said", LINES)
def test_a_damaged_line_is_told(tmp_path, metrics, evaluations, said):
    assert said in refusal(analyze.Run, write_log(tmp_path / "x", {}, {}, metrics, evaluations))


def test_a_line_of_deeply_nested_json_and_a_config_that_is_no_runs_are_told(tmp_path):
    folder = write_log(tmp_path / "x", {}, metrics=[LINE])
    (folder / "metrics.jsonl").write_text("[" * 9000 + "\n")
    assert "metrics.jsonl, line 1 is damaged: [[[" in refusal(analyze.Run, folder)
    folder = write_log(tmp_path / "y", {}, {"mitigation": None}, metrics=[LINE])
    assert "y is not the folder of a run" in refusal(analyze.Run, folder)


@pytest.fixture
def folder(tmp_path):
    """A run of one step with two tokens."""
    return write_log(tmp_path / "x", {1: credit_columns([2], [0])}, metrics=[{"step": 1}])


# changed columns of a file of two tokens, where None is one that is missing
COLUMNS = [
    ({"step": np.array([2])}, "ValueError('it is of step [2], and was copied or renamed')"),
    ({"step": np.array([], int)}, "step_000001.npz cannot be read: ValueError("),
    ({"weight": None}, "cannot be read: KeyError('weight')"),
    *(({"entropy": wrong}, "npz cannot be read: ") for wrong in (
        np.zeros(1), np.zeros((2, 1)), np.array(0.5), np.array(["a", "b"]), np.array([1j, 0]))),
    *(({name: np.array([0, np.inf])}, "its columns do not fit together")
      for name in ("log_prob", "change")),
    *(({name: np.array([0, wrong])}, "npz cannot be read: ")
      for name in ("kind", "section") for wrong in (0.5, -1, 7)),
    *((dict(zip(("episode_start", "reward"), found)), "its columns do not fit together")
      for found in (([1], [1]), ([0, 2], [1, 1]), ([0, 1], [1])))]


@pytest.mark.parametrize("changed, said", COLUMNS)
def test_a_damaged_credit_file_is_told(folder, changed, said):
    columns = credit_columns([2], [0]) | changed
    np.savez(folder / "credit/step_000001.npz",
             **{name: values for name, values in columns.items() if values is not None})
    assert said in refusal(analyze.Tally, analyze.Run(folder))


def test_a_bit_that_turned_is_told_or_changes_a_number(folder):
    """Wherever it stands: in the archive's directory, in a header, in what is compressed."""
    path = folder / "credit/step_000001.npz"
    whole, told = path.read_bytes(), 0
    for place in np.random.default_rng(0).integers(0, len(whole), 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1:])
        try:
            analyze.Tally(analyze.Run(folder))
        except UserError:
            told += 1
    assert told > 20


def test_a_file_that_is_no_credit_file_is_told_without_a_word_of_pickles(folder):
    path = folder / "credit/step_000001.npz"
    path.write_bytes(b"no numbers")
    said = refusal(analyze.columns_in, path)
    assert "step_000001.npz cannot be read: BadZipFile(" in said and "pickle" not in said
    path.unlink()
    path.mkdir()
    assert "cannot be read: IsADirectoryError(" in refusal(analyze.columns_in, path)


def test_a_checkpoint_that_has_lost_a_file_is_not_in_the_way(tmp_path):
    """It is made again."""
    for step, files in ((2, "config.json trainer/state.safetensors"),
                        (4, "trainer/state.safetensors"), (6, "config.json")):
        for file in map(Path, files.split()):
            path = tmp_path / f"checkpoints/step_{step:06d}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (tmp_path / "checkpoints/step_best").mkdir()
    assert [*book.checkpoints(tmp_path)] == [2]
    book.forget_after(tmp_path, 2)
    assert {path.name for path in tmp_path.glob("checkpoints/*")} == {"step_000002", "step_best"}
