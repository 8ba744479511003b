"""Credit files that are damaged, incomplete or of another run are refused with one sentence."""
import random

import numpy as np
import pytest
import torch
from conftest import credit_columns, hand_made, refusal

from engine import processes
from harness.record import credit_path, credit_steps, read_columns, write_credit
from engine.errors import UserError


def write(run, **changed):
    """Two questions with two answers each, 2 + 3 + 2 + 1 tokens; prompts of two tokens."""
    path = credit_path(run, 1)
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **credit_columns([2, 3, 2, 1], [0, 0, 1, 1]) | changed)
    return path


def write_as_process(monkeypatch, path, rank, count):
    batch = hand_made([[True, True], [True, False]])
    monkeypatch.setattr(processes, "rank", lambda: rank)
    monkeypatch.setattr(processes, "count", lambda: count)
    write_credit(path, batch, torch.ones(2, 2))


@pytest.fixture
def of_three(tmp_path, monkeypatch):
    """Two steps of a run of three processes."""
    for step in (1, 2):
        for rank in range(3):
            write_as_process(monkeypatch, credit_path(tmp_path, step, rank), rank, 3)
    return tmp_path


def test_a_file_names_its_process_and_the_batch_does_not(of_three):
    with np.load(credit_path(of_three, 1, 2)) as file:
        assert file["process"].tolist() == [2, 3]
    whole = read_columns(of_three, 1)
    assert "process" not in whole and whole["group"].tolist() == [0, 0, 1, 1, 2, 2]
    assert whole["episode_start"].tolist() == [0, 2, 3, 5, 6, 8]


@pytest.mark.parametrize("rank, instead, said", [
    (0, (), "step_000001.npz: No such file"), (1, (), "step_000001_rank1.npz: No such file"),
    (2, (), "step_000001.npz does not belong there: its process is [0, 3], not [0, 2]"),
    (3, (3, 4), "step_000001.npz does not belong there: its process is [0, 3], not [0, 4]"),
    (1, (2, 3), "step_000001_rank1.npz does not belong there: its process is [2, 3]")])
def test_a_file_that_is_missing_or_too_many_or_of_another_process_is_noticed(
        of_three, monkeypatch, rank, instead, said):
    path = credit_path(of_three, 1, rank)
    path.unlink(missing_ok=True)
    if instead:
        write_as_process(monkeypatch, path, *instead)
    assert said in refusal(read_columns, of_three, 1)
    read_columns(of_three, 2)


def test_without_rank_0_a_step_is_being_written(of_three):
    credit_path(of_three, 2).unlink()
    assert credit_steps(of_three) == [1]


def test_names_that_people_gave_do_not_count(tmp_path):
    for name in ("step_000002.npz.bak", "step_000002 (copy).npz", "step_000001_rank1_old.npz"):
        write(tmp_path).with_name(name).touch()
    assert credit_steps(tmp_path) == [1] and len(read_columns(tmp_path, 1)["group"]) == 4
    assert credit_steps(tmp_path / "no run") == []


@pytest.mark.parametrize("name, values, said", [
    ("reward_format", [0, 0, np.nan, 0.0], "has the value nan"),
    ("advantage", np.full(8, 1e300), r"has the value 1e+300"),
    ("log_prob", [-1.0] * 7 + [0.5], "has the value 0.5"),
    ("token_id", [5] * 7 + [-1], "has the value -1"),
    *((name, values, "does not fit the other columns") for name, values in (
        ("prompt_start", [0, 4]), ("prompt_start", [0, 0]), ("prompt_start", [1, 2]),
        ("episode_start", [0, 2, 5, 8]), ("group", [0, 0, 0, 0]), ("group", [0, 0, 2, 2]),
        ("true_credit", [0.1] * 7), ("my_own", [0.1] * 4))),
    ("token_id", [5.0] * 8, "should hold whole numbers, and holds float64"),
    ("weight", [1] * 8, "should hold floating point numbers, and holds int64"),
    ("entropy", ["1"] * 8, "should hold floating point numbers, and holds <U1")])
def test_columns_that_are_not_as_they_should_be(tmp_path, name, values, said):
    path = write(tmp_path, **{name: np.asarray(values)})
    sentence = refusal(read_columns, tmp_path, 1)
    assert sentence.startswith(f"{path} is broken: its {name} {said}")


def test_other_sizes_of_numbers_are_read_as_the_usual_ones(tmp_path):
    write(tmp_path)
    usual = read_columns(tmp_path, 1)
    other = {name: usual[name].astype(size) for name, size in (
        ("token_id", np.uint16), ("group", np.int64), ("prompt_start", np.uint64),
        ("weight", np.float64), ("log_prob", ">f4"))}
    write(tmp_path, **other, true_credit=np.arange(8.0), my_own=np.ones(8))
    again = read_columns(tmp_path, 1)
    for name, values in usual.items():
        assert again[name].dtype == values.dtype and again[name].dtype.isnative, name
        np.testing.assert_allclose(again[name], values, rtol=1e-2)
    assert again["true_credit"].tolist() == list(range(8)) and again["my_own"].tolist() == [1] * 8


def test_flipped_bits_and_cut_off_files_are_noticed(tmp_path):
    """Whatever is damaged: the values are what they were, or there is a sentence. Of all kinds of
    error that zipfile and numpy have, none comes through."""
    path, chance = write(tmp_path), random.Random(0)
    usual, whole, refused = read_columns(tmp_path, 1), path.read_bytes(), 0
    for turn in range(80):
        place = chance.randrange(len(whole))
        flipped = bytes([whole[place] ^ 1 << chance.randrange(8)])
        path.write_bytes(whole[:place] + (flipped + whole[place + 1:] if turn < 60 else b""))
        try:
            values = read_columns(tmp_path, 1)
        except UserError as error:
            assert str(error).startswith(f"{path} ") and "\n" not in str(error)
            refused += 1
        else:
            assert list(values) == list(usual)
            assert all(np.array_equal(values[name], usual[name]) for name in usual)
    assert 60 < refused < 80
