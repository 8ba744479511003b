"""The table of tokens, by hand: positions, sums, and tables that are joined."""
import numpy as np
import torch
from conftest import credit_columns, write_log

from lab.analysis.token_table import (TokenTable, joined_tables, read_step, read_tokens,
                                      table_of_frames)


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
    assert read_tokens(folder, 1)["problem"].tolist() == [0, 1]


def test_positions_count_what_the_model_wrote(tmp_path):
    """The environment wrote the third of four tokens, and the second of two."""
    columns = credit_columns([4, 2], [0, 0], own=[1, 1, 0, 1, 1, 0])
    record = read_step(write_log(tmp_path / "run", {1: columns}), 1)
    assert record.written["answer"].tolist() == [0, 0, 0, 0, 1, 1]
    assert record.written["position"].tolist() == [0, 1, 2, 2, 0, 1]
    assert record.written["length"].tolist() == [3, 3, 3, 3, 1, 1]
    assert record.tokens["position"].tolist() == [0, 1, 2, 0]
