"""Files: whole or not at all, and one sentence for what is wrong with them."""
import math
import os

import pytest

from engine.errors import UserError
from harness.credit_reading import read_file
from harness.files import (PROJECT, append_line, find_folder, read_json, read_lines, replace_text,
                           sha256_of, whole_folder, writing)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with whole_folder(tmp_path / "a" / "b") as unfinished:
        (unfinished / "x").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b" / "x").read_text() == "1"


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_a_folder_that_was_not_finished_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        with whole_folder(tmp_path / "b") as unfinished:
            (unfinished / "x").write_text("1")
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    with pytest.raises(UserError, match="b exists already"):
        with whole_folder(tmp_path / "b"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["b"] and (tmp_path / "b/mine").exists()


@pytest.mark.parametrize("text, lines", [
    ('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]), ('{"a": 1}\n{"a": ', [{"a": 1}]), ("", [])])
def test_a_last_line_that_is_cut_off_is_left_out(tmp_path, text, lines):
    (tmp_path / "x.jsonl").write_text(text)
    assert read_lines(tmp_path / "x.jsonl") == lines


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(UserError, match="x.jsonl, line 2 is not JSON"):
        read_lines(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="x.jsonl is not text"):
        read_lines(tmp_path / "x.jsonl")
    assert read_lines(tmp_path / "none") == []


def test_an_undefined_number_becomes_null(tmp_path):
    append_line(tmp_path / "x.jsonl", {"a": math.nan, "b": -math.inf, "c": 0.5})
    append_line(tmp_path / "x.jsonl", {"a": 1})
    lines = (tmp_path / "x.jsonl").read_text()
    assert lines == '{"a": null, "b": null, "c": 0.5}\n{"a": 1}\n'
    with pytest.raises(ValueError):
        append_line(tmp_path / "y.jsonl", {"a": [math.nan]})
    assert not (tmp_path / "y.jsonl").exists()


def test_a_shipped_folder_is_found_from_anywhere_and_a_folder_of_ones_own_comes_first(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder("models/tiny") == PROJECT / "models/tiny"
    assert str(find_folder("models/none")) == "models/none"
    assert str(find_folder("x" * 300)) == "x" * 300
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert str(find_folder("models/tiny")) == "models/tiny"


@pytest.mark.parametrize("text, words", [
    ("[1]", "should hold a JSON object"), ("{", "is not JSON"),
    ("[" * 10 ** 5, "is not JSON")])
def test_a_file_that_is_no_json_object_is_named(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=f"x.json {words}"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("use, words", [
    (read_json, "read"), (read_lines, "read"), (sha256_of, "read"), (read_file, "read"),
    (lambda path: replace_text(path, "a"), "write")])
def test_a_device_is_neither_read_nor_replaced(tmp_path, use, words):
    """Reading one might never end, as of a pipe; and a file that is made whole is renamed."""
    (tmp_path / "x").symlink_to(os.devnull)
    with pytest.raises(UserError, match=f"cannot {words} .*x: Not a regular file"):
        use(tmp_path / "x")
    assert (tmp_path / "x").is_symlink()


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read .*none.json: No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot read .*: Is a directory"):
        read_json(tmp_path)
    with pytest.raises(UserError, match="cannot write .*: No such file or directory"):
        with writing(tmp_path / "x"):
            open(tmp_path / "none" / "x", "w")
