"""Run folders as analysis reads them."""
import os

import pytest
from conftest import cut, refusal, write_lines
from known_runs import write_run
from runs import edit_config, lines

from lab.analysis.run_folders import existing, read_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 0.5)


def test_a_metric_that_a_line_lacks_is_none(run):
    write_lines(run / "metrics.jsonl", [{"step": 1, "success": 0.5}])
    [line] = read_run(run).metrics
    assert line["success"] == 0.5 and line["gradient_norm"] is None and line["seconds"] is None


def test_a_run_is_done_with_its_last_step_and_its_last_evaluations(run):
    edit_config(run, eval_every=5)
    assert read_run(run).is_done
    kept = lines(run / "evaluations.jsonl")
    cut(run / "evaluations.jsonl", len(kept) - 1)
    assert not read_run(run).is_done
    cut(run / "metrics.jsonl", 9)
    assert not read_run(run).is_done


def test_a_run_that_was_typed_wrongly_is_named(tmp_path):
    (tmp_path / "random-grpo-s0").mkdir()
    said = refusal(existing, str(tmp_path / "random-grpo-s1"))
    assert said.endswith(f"did you mean {tmp_path / 'random-grpo-s0'}?")
    assert "is not a run folder" in refusal(read_run, tmp_path / "random-grpo-s0")


def test_without_a_name_it_is_the_newest_run_which_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "which run?" in refusal(existing, None)
    for age, name in enumerate(("new", "old")):
        run = write_run(tmp_path / "runs" / name, 0.5, 0)
        os.utime(run / "config.json", (1000 - age, 1000 - age))
    assert str(existing(None)) == "runs/new"
    assert capsys.readouterr().out == "runs/new, the newest run\n"


@pytest.mark.parametrize("name, value, words", [
    ("steps", "many", "--steps 'many': should be a whole number"),
    ("learning_rate", None, "--learning_rate None: should be a finite number"),
    ("task", 7, "--task 7: should be a text"),
    ("made_of", None, "made_of is None, and should be another thing"),
    ("functions", None, "functions is None, and should be another thing"),
    ("changed", "grpo.py", "changed is 'grpo.py', and should be another thing")])
def test_a_config_that_was_edited_wrongly_is_named(run, name, value, words):
    edit_config(run, **{name: value})
    assert refusal(read_run, run) == f"{run / 'config.json'}: {words}"


def test_a_methods_own_flag_may_have_another_type_since(run):
    edit_config(run, mitigation="outcome_conditional", think_discount="half")
    assert read_run(run).config["think_discount"] == "half"
