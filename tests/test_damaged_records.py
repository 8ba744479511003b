"""A damaged record is told in one sentence, in the book and in the lab, and is in nobody's way."""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import analyze
import run as book
from conftest import credit_columns, evaluation, refusal, write_log
from lab.analysis.run_folders import read_evaluations
from lab.engine.optimizer import AdamW
from lab.harness.build import Parts
from lab.harness.read_record import read_columns


@pytest.mark.parametrize("name", ["success_low", "success_high", "length_mean"])
def test_an_evaluation_without_a_number_is_told(tmp_path, name):
    line = evaluation(0, [1, 0])
    folder = write_log(tmp_path / "x", {}, evaluations=[line | {name: None}])
    assert "lacks numbers for success, success_low" in refusal(analyze.Run, folder)
    assert f"line 1: {name} should be a number, and is None" in refusal(read_evaluations, folder)


@pytest.mark.parametrize("config", [{"seed": None}, {"mitigation": None}, {"made_of": 5}])
def test_a_config_that_is_no_runs_is_told(tmp_path, config):
    folder = write_log(tmp_path / "x", {}, config, metrics=[{"step": 1}])
    assert "config.json is not that of a run" in refusal(analyze.Run, folder)


def test_a_file_that_is_no_credit_file_is_told_in_our_own_words(tmp_path):
    folder = write_log(tmp_path / "x", {1: credit_columns([2], [0])}, metrics=[{"step": 1}])
    path = folder / "credit/step_000001.npz"
    path.write_bytes(b"no numbers")
    for said in (refusal(analyze.tokens_of, path), refusal(read_columns, folder, 1)):
        assert "damaged, or no credit file" in said and "pickle" not in said
    columns = credit_columns([2], [0], own=np.zeros(2)) | {"own": np.zeros(2, bool)}
    np.savez(path, **columns)
    assert "own says that the model wrote no token" in refusal(read_columns, folder, 1)


def test_a_methods_state_that_lacks_a_tensor_is_told():
    method = SimpleNamespace(load_state_dict=lambda tensors: tensors["mean"], state_dict=dict)
    policy = SimpleNamespace(settings=SimpleNamespace(advantage="mine", lora=0))
    parts = Parts(policy, AdamW([], 0.1), None, method, None, None)
    assert "does not fit --advantage mine: KeyError: 'mean'" in refusal(parts.put_back, {})


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
