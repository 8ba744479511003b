"""The way of one group through a step: its tables by hand, and which steps it refuses."""
import json

import numpy as np
import pytest
from conftest import credit_columns, write_log

from engine.errors import UserError
from research.__main__ import main


def test_a_group_by_hand(tmp_path, capsys):
    """Two answers of two tokens: one right, one wrong; each change is by hand."""
    columns = credit_columns([2, 2], [0, 0], reward=[1.1, 0.1])
    columns["change"] = np.array([0.25, -0.5, 0.125, 0.125], "float32")
    run = write_log(tmp_path / "run", {1: columns})
    main(["group", "--run", str(run), "--out", str(tmp_path / "out")])
    numbers = json.loads((tmp_path / "out/numbers.json").read_text())
    answers, tokens, kinds = (table["rows"] for table in numbers["tables"])
    assert [row["change"] for row in answers] == [-0.25, 0.25]
    assert [row["reward"] for row in answers] == pytest.approx([1.1, 0.1])
    assert [row["change"] for row in tokens] == [0.25, -0.5]  # of the right answer
    for column in ("tokens", "push", "change"):
        assert sum(row[column] for row in kinds) == pytest.approx(1)
    assert "1 of 2 answers became more likely" in numbers["in_short"][0]

    del columns["change"]
    without = write_log(tmp_path / "without", {1: columns})
    with pytest.raises(UserError, match="did not measure the change of step 1"):
        main(["group", "--run", str(without), "--out", str(tmp_path / "none")])
    with pytest.raises(UserError, match="--group 3: the step has the problems 0 to 0"):
        main(["group", "--run", str(run), "--group", "3", "--out", str(tmp_path / "none")])
