"""Run folders as analysis reads them, which tells what is damaged."""
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import credit_columns, cut, evaluation, refusal, write_lines, write_log
from known_runs import write_run
from lab.analysis.run_folders import Run, existing, read_columns
from lab.analysis.token_table import (TokenTable, joined_tables, read_step,
                                      table_of_frames)
from lab.engine.optimizer import AdamW
from lab.harness.build import Parts
from runs import edit_config, lines

LINE, END = {"step": 1, "success": 0.5}, evaluation(2, [1, 0])


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 0.5)


def test_a_metric_that_a_line_lacks_is_none(run):
    write_lines(run / "metrics.jsonl", [{"step": 1, "success": 0.5}])
    [line] = Run(run).metrics
    assert line["success"] == 0.5 and line["gradient_norm"] is None and line["seconds"] is None


def test_a_run_is_done_with_its_last_step_and_its_last_evaluations(run):
    edit_config(run, eval_every=5)
    assert Run(run).is_done
    kept = lines(run / "evaluations.jsonl")
    cut(run / "evaluations.jsonl", len(kept) - 1)
    assert not Run(run).is_done
    cut(run / "metrics.jsonl", 9)
    assert not Run(run).is_done


def test_a_run_that_was_typed_wrongly_is_named(tmp_path, monkeypatch):
    (tmp_path / "runs/one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert refusal(existing, "one") == "one does not exist; did you mean runs/one?"
    (tmp_path / "random-grpo-s0").mkdir()
    said = refusal(existing, str(tmp_path / "random-grpo-s1"))
    assert said.endswith(f"did you mean {tmp_path / 'random-grpo-s0'}?")
    assert "is not a run folder" in refusal(Run, tmp_path / "random-grpo-s0")


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
    ("changed", "grpo.py", "changed is 'grpo.py', and should be another thing")])
def test_a_config_that_was_edited_wrongly_is_named(run, name, value, words):
    edit_config(run, **{name: value})
    assert refusal(Run, run) == f"{run / 'config.json'}: {words}"


def test_a_methods_own_flag_may_have_another_type_since(run):
    edit_config(run, mitigation="outcome_conditional", think_discount="half")
    assert Run(run).config["think_discount"] == "half"


LINES = [
    ([LINE | {"gradient_norm": "large"}], [], "metrics.jsonl, line 1 is damaged: gradient_norm is"),
    ([LINE], [END | {"format_mean": None}], "evaluations.jsonl, line 1 is damaged: format_mean is"),
    ([LINE], [END | {"shown": 5}], "evaluations.jsonl, line 1 is damaged: shown is 5")]


@pytest.mark.parametrize("metrics, evaluations, said", LINES)
def test_a_damaged_line_is_told(tmp_path, metrics, evaluations, said):
    assert said in refusal(Run, write_log(tmp_path / "x", {}, {}, metrics, evaluations))


@pytest.mark.parametrize("name", ["steps", "seed"])
def test_a_config_that_lacks_a_number_is_told(tmp_path, name):
    folder = write_log(tmp_path / "x", {}, {name: None}, [LINE])
    assert f"config.json is damaged: {name} is None" in refusal(Run, folder)


COLUMNS = [
    ({"weight": None}, "it has no column weight"),
    ({"entropy": np.zeros(1)}, "its column entropy is float64 (1,) instead of 2"),
    ({"reward_format": np.ones(3)}, "its column reward_format is float64 (3,) instead of 1"),
    ({"paid": np.ones(3)}, "its column paid is float64 (3,) instead of 2"),
    ({"own": np.zeros(2, bool)}, "its column own says that the model wrote no token"),
    ({"prompt_ids": None}, "it has no column prompt_ids"),
    ({"prompt_ids": np.zeros(2)}, "its column prompt_ids is float64 (2,)"),
    ({"prompt_start": np.array([5])}, "its prompts do not begin one after the other"),
    ({"group": np.array([3])}, "its column group names problems beyond its 1 prompts")]


@pytest.mark.parametrize("changed, said", COLUMNS)
def test_a_damaged_credit_file_is_told(tmp_path, changed, said):
    columns = {name: values for name, values in (credit_columns([2], [0]) | changed).items()
               if values is not None}
    folder = write_log(tmp_path / "x", {1: columns}, metrics=[{"step": 1}])
    assert said in refusal(read_columns, folder, 1)


def test_a_methods_state_that_lacks_a_tensor_is_told():
    method = SimpleNamespace(load_state_dict=lambda tensors: tensors["mean"], state_dict=dict)
    policy = SimpleNamespace(settings=SimpleNamespace(advantage="mine", lora=0))
    parts = Parts(policy, AdamW([], 0.1), None, method, None, None)
    assert "does not fit --advantage mine: KeyError: 'mean'" in refusal(parts.put_back, {})


def table_of(answer, **columns):
    return TokenTable({"problem": np.array(answer), "answer": np.array(answer),
                       **{name: np.array(values) for name, values in columns.items()}})


def test_a_token_belongs_to_the_part_of_its_answer_in_which_its_middle_stands():
    """Of two tokens the middles are 1/4 and 3/4, of three 1/6, 1/2 and 5/6."""
    tokens = table_of([0, 0, 1, 1, 1], position=[0, 1, 0, 1, 2], length=[2, 2, 3, 3, 3])
    assert tokens.part_of_answer(2).tolist() == [0, 1, 0, 1, 1]
    assert tokens.part_of_answer(5).tolist() == [1, 3, 0, 2, 4]
    assert tokens.part_of_answer(10).tolist() == [2, 7, 1, 5, 8]


def test_frames_become_columns_and_whole_numbers_stay_whole():
    mask = torch.tensor([[True, True], [True, False]])
    tokens = table_of_frames(mask, torch.tensor([4, 7]), {
        "kind": torch.tensor([[1, 2], [3, 9]], dtype=torch.uint8),
        "weight": torch.tensor([[0.5, 1.5], [2.5, 9.0]])})
    assert {name: values.tolist() for name, values in tokens.columns.items()} == {
        "problem": [4, 4, 7], "answer": [0, 0, 1], "position": [0, 1, 0], "length": [2, 2, 1],
        "kind": [1, 2, 3], "weight": [0.5, 1.5, 2.5]}
    assert tokens["kind"].dtype == np.int64 and tokens["weight"].dtype == np.float64


def test_problems_and_answers_of_joined_tables_are_numbered_on():
    """Numbers that a table does not use leave no gap."""
    first, second = table_of([0, 2, 2], x=[1, 2, 3]), table_of([1, 0], x=[4, 5])
    both = joined_tables([first, second])
    assert both["problem"].tolist() == both["answer"].tolist() == [0, 1, 1, 3, 2]
    assert both["x"].tolist() == [1, 2, 3, 4, 5]
    assert first["problem"].tolist() == [0, 2, 2]  # as it was


def test_a_record_is_sorted_by_what_its_columns_are_of(tmp_path):
    """p = 1/2 of two: s = sqrt(1/2). An answer can have one token, so lengths tell nothing."""
    columns = credit_columns([1, 1], [0, 1], advantage=[2, -4], weight=[1, 3], reward=[0.5, 1])
    folder = write_log(tmp_path / "run", {1: columns})
    record = read_step(folder, 1)
    assert record.answers["reward"].tolist() == [0.5, 1] and "reward" not in record.tokens
    assert [prompt.tolist() for prompt in record.prompts] == [[0, 0], [0, 0]]
    assert np.allclose(record.tokens["gradient"], np.array([2, -12]) * 0.5 ** 0.5)
    assert np.allclose(record.tokens["push"], [1, -6])
    assert record.tokens_of(1)["advantage"].tolist() == [-4]
    assert record.tokens["problem"].tolist() == [0, 1]


def test_positions_count_what_the_model_wrote(tmp_path):
    """The environment wrote the third of four tokens, and the second of two."""
    columns = credit_columns([4, 2], [0, 0], own=[1, 1, 0, 1, 1, 0])
    record = read_step(write_log(tmp_path / "run", {1: columns}), 1)
    assert record.written["answer"].tolist() == [0, 0, 0, 0, 1, 1]
    assert record.written["position"].tolist() == [0, 1, 2, 2, 0, 1]
    assert record.written["length"].tolist() == [3, 3, 3, 3, 1, 1]
    assert record.tokens["position"].tolist() == [0, 1, 2, 0]
