"""A task file that cannot be trained on ends in one sentence, before a model is read."""
import importlib

import pytest
import torch
from conftest import refusal

from engine.model_folder import read_config
from harness import settings
from pathlib import Path


@pytest.mark.parametrize("text, said", [
    ("def reward(text):\n    return 1.0\n", "should take (problem, text), and it takes (text)"),
    ("import torch\ntorch.set_default_dtype(torch.float64)\n",
     "bad_task.py:2 calls torch.set_default_dtype(torch.float64)"),
    ("import torch\n\ntorch.set_grad_enabled(False)\n",
     "bad_task.py:3 calls torch.set_grad_enabled(False)")])
def test_what_a_task_does_to_the_program_is_named_by_its_line(text, said, tmp_path, monkeypatch):
    (tmp_path / "bad_task.py").write_text(text)
    monkeypatch.setattr(settings, "PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(importlib.sys.modules, "bad_task", raising=False)
    assert said in refusal(settings.load_task, "bad_task")
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    importlib.sys.modules.pop("bad_task", None)


def test_the_name_of_a_model_on_a_hub_gets_its_download_line():
    said = refusal(read_config, Path("Somebody/Some-Model"))
    assert "hf download Somebody/Some-Model --local-dir models/Some-Model" in said
