"""A large model: its recipe, and its memory."""
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refusal

import lab.run as train
from small import large_folder
from lab.harness import build, memory
from lab.harness.build import load_policy
from lab.engine.model_folder import LARGE
from lab.harness.settings import make_settings

SETTINGS = {"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2, "answers": 4,
            "max_new_tokens": 10, "steps": 30, "eval_every": 15, "eval_tasks": 8}


def test_a_prompt_that_is_too_long_is_told_before_the_weights_are_read(monkeypatch):
    monkeypatch.setattr(build, "load_model", None)  # of a large model it takes long
    settings = make_settings(SETTINGS | {"max_new_tokens": 5000})
    assert "are longer than the 1024 tokens" in refusal(load_policy, settings)


@pytest.mark.parametrize("dtype, kept_in, pages, keeps", [
    (torch.bfloat16, torch.float32, 10 ** 7, True),
    (torch.bfloat16, torch.float32, 9 * 10 ** 6, False),
    (torch.bfloat16, torch.bfloat16, 10 ** 7, False),  # by LoRA
    (torch.float32, torch.float32, 10 ** 7, False)])
def test_memory_is_kept_where_matrices_are_copied_and_there_is_room(monkeypatch, dtype, kept_in,
                                                                    pages, keeps):
    """40 bytes a parameter, of a billion, in pages of 4096 bytes."""
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.get)
    model = SimpleNamespace(compute_dtype=dtype, device=torch.device("cpu"), is_large=True,
                            output_matrix=torch.empty(1, dtype=kept_in),
                            parameters=lambda: [torch.empty(10 ** 9, device="meta")])
    assert memory.should_keep_memory(model) == (keeps and sys.platform == "linux")


@pytest.fixture
def large_model(tmp_path):
    return large_folder(tmp_path)


def test_with_lora_the_rate_is_25_times_that_of_the_recipe_and_at_most_5e_5(large_model):
    given = {"model": str(large_model), "lora": 4}
    assert make_settings(given).learning_rate == 5e-5  # and not 25 x 5e-6
    (large_model / "recipe.json").write_text('{"learning_rate": 1e-6}')
    assert make_settings(given).learning_rate == 25e-6
    file = large_model / "elsewhere.json"
    given["config"] = str(file)  # a recipe is also taken by --config
    file.write_text('{"learning_rate": 4e-7}')
    assert make_settings(given).learning_rate == 1e-5
    file.write_text('{"learning_rate": 4e-7, "lora": 4}')  # that of a run has the rate of its LoRA
    assert make_settings(given).learning_rate == 4e-7
    assert make_settings(given | {"learning_rate": 1e-3}).learning_rate == 1e-3
    del given["config"]
    os.truncate(large_model / "model.safetensors", LARGE)
    assert make_settings(given).learning_rate == 4e-6


@pytest.mark.parametrize("path", sorted((ROOT / "lab/recipes").iterdir()), ids=lambda p: p.stem)
def test_a_recipe_that_is_laid_beside_a_model_is_that_of_its_runs(large_model, path):
    shutil.copy(path, large_model / "recipe.json")
    chosen, recipe = make_settings({"model": str(large_model)}), json.loads(path.read_text())
    assert chosen.to_json() == chosen.to_json() | recipe
    assert path.stem == "fast" or recipe["dtype"] == "bfloat16"  # fast is of models/tiny
    assert "questions" not in chosen.folder.name  # they are its defaults
    assert make_settings({"model": str(large_model), "questions": 16}).questions == 16


@pytest.mark.skipif(sys.platform != "linux", reason="memory is kept on Linux alone")
@pytest.mark.parametrize("dtype, is_large, called", [
    ("bfloat16", True, ["mallopt", "mallopt", "malloc_trim"]),
    ("float32", True, ["malloc_trim"]), ("bfloat16", False, [])])
def test_memory_is_kept_and_goes_back_when_it_has_grown(monkeypatch, tmp_path, dtype, is_large,
                                                        called):
    """Of two steps, in the second of which it grows."""
    found = []
    sizes = [100, 111]
    monkeypatch.setattr(memory, "bytes_held", lambda: sizes.pop(0))
    monkeypatch.setattr("lab.engine.model.Qwen2.is_large", is_large)
    monkeypatch.setattr(memory, "call_glibc", lambda name, *_: found.append(name))
    flags = SETTINGS | {"steps": 2, "dtype": dtype, "out": tmp_path / "run"}
    train.train_beyond([word for name, value in flags.items()
                        for word in (f"--{name}", str(value))])
    assert found == called


def test_memory_goes_back_above_a_tenth_more_than_a_step_needs(monkeypatch):
    """What a step needs is seen after a step that begins without free memory: 100, then 130. A
    system that does not say what is held gets the memory after each step."""
    returned = []
    monkeypatch.setattr(memory, "return_memory", lambda: returned.append(True))
    freed, found = memory.FreedMemory(), []
    for held in (100, 105, 110, 111, 130, 140, 143, 144, 90, 142, 0, 0):
        monkeypatch.setattr(memory, "bytes_held", lambda: held)
        returned.clear()
        freed.after_step()
        found.append(len(returned))
    assert found == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1]
