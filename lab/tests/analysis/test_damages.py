"""The lab's reader tells the damages that the book's reader tells, and those of what it alone
reads."""
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import credit_columns, refusal, write_log
from lab.analysis.run_folders import read_columns, read_run
from lab.engine.optimizer import AdamW
from lab.harness.build import Parts
from test_damaged_records import COLUMNS, END, LINE, LINES

OWN_LINES = [
    ([LINE | {"gradient_norm": "large"}], [], "metrics.jsonl, line 1 is damaged: gradient_norm is"),
    ([LINE], [END | {"format_mean": None}], "evaluations.jsonl, line 1 is damaged: format_mean is"),
    ([LINE], [END | {"shown": 5}], "evaluations.jsonl, line 1 is damaged: shown is 5")]


@pytest.mark.parametrize("metrics, evaluations, said", [*LINES, *OWN_LINES])
def test_a_damaged_line_is_told(tmp_path, metrics, evaluations, said):
    assert said in refusal(read_run, write_log(tmp_path / "x", {}, {}, metrics, evaluations))


@pytest.mark.parametrize("name", ["steps", "seed"])
def test_a_config_that_lacks_a_number_is_told(tmp_path, name):
    folder = write_log(tmp_path / "x", {}, {name: None}, [LINE])
    assert f"config.json is damaged: {name} is None" in refusal(read_run, folder)


OWN_COLUMNS = [
    ({"reward_format": np.ones(3)}, "its column reward_format is float64 (3,) instead of 1"),
    ({"paid": np.ones(3)}, "its column paid is float64 (3,) instead of 2"),
    ({"group": None}, "it has no column group"),
    ({"own": np.zeros(2, bool)}, "its column own says that the model wrote no token"),
    ({"prompt_ids": None}, "it has no column prompt_ids"),
    ({"prompt_ids": np.zeros(2)}, "its column prompt_ids is float64 (2,)"),
    ({"prompt_start": np.array([5])}, "its prompts do not begin one after the other"),
    ({"group": np.array([3])}, "its column group names problems beyond its 1 prompts")]


@pytest.mark.parametrize("changed, said", [*COLUMNS, *OWN_COLUMNS])
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
