"""A large model: the settings that a laptop can live with, and its memory."""
import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refusal

import lab.run as train
from lab.harness import build, memory
from lab.harness.build import load_policy
from lab.harness.large_model import ON_A_LAPTOP, TWO_NUMBERS
from lab.harness.settings import LARGE, LabSettings, make_settings, read_flags

SETTINGS = {"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2, "answers": 4,
            "max_new_tokens": 10, "steps": 30, "eval_every": 15, "eval_tasks": 8}


def weights_are_read(*_):
    pytest.fail("the weights were read first, which of a large model takes long")


def test_a_prompt_that_is_too_long_is_told_before_the_weights_are_read(monkeypatch):
    monkeypatch.setattr(build, "load_model", weights_are_read)
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
    """A file of zeros that takes no room on the disk has the size of the weights."""
    with open(tmp_path / "model.safetensors", "wb") as file:
        os.truncate(file.fileno(), LARGE + 1)
    return tmp_path


def test_a_large_model_has_a_laptops_settings_on_a_cpu_and_flags_win(large_model):
    model = {"model": str(large_model)}
    chosen, usual = make_settings(model), TWO_NUMBERS["expression"]
    found = chosen.to_json()
    assert {name: found[name] for name in usual} == usual
    assert found["prompt"] == "expression"
    assert "questions" not in chosen.folder.name  # they are its defaults
    assert "promptfull" in make_settings(model | {"prompt": "full"}).folder.name
    assert make_settings(model | {"questions": 16}).questions == 16
    os.truncate(large_model / "model.safetensors", LARGE)
    assert make_settings(model).eval_tasks == LabSettings.eval_tasks


@pytest.mark.parametrize("flags, recipe", [
    ({"prompt": "brief"}, TWO_NUMBERS["brief"]), ({"prompt": "full"}, ON_A_LAPTOP),
    ({"prompt": "original"}, ON_A_LAPTOP), ({"task": "examples.largest_last"}, ON_A_LAPTOP)])
def test_another_prompt_or_task_has_its_own_recipe(large_model, flags, recipe):
    chosen = make_settings({"model": str(large_model), **flags}).to_json()
    assert {name: chosen[name] for name in recipe} == recipe


def test_the_file_of_a_run_may_name_the_prompt(large_model, tmp_path):
    config = tmp_path / "c.json"
    config.write_text('{"prompt": "brief"}')
    chosen = make_settings({"model": str(large_model), "config": str(config)}).to_json()
    assert {name: chosen[name] for name in TWO_NUMBERS["brief"]} == TWO_NUMBERS["brief"]


def test_with_lora_the_rate_is_25_times_that_of_the_recipe_and_at_most_5e_5(large_model):
    assert make_settings({"model": str(large_model), "lora": 4}).learning_rate == 5e-5
    other = {"model": str(large_model), "lora": 4, "task": "examples.largest_last"}
    assert make_settings(other).learning_rate == 5e-5  # and not 25 x 5e-6
    os.truncate(large_model / "model.safetensors", LARGE)
    assert make_settings({"model": str(large_model), "lora": 4}).learning_rate == 2e-5


def test_on_a_gpu_a_large_model_learns_the_same_and_other_tasks_have_the_usual_settings(
        large_model, monkeypatch):
    monkeypatch.setattr("lab.harness.large_model.is_fast_in_bfloat16", lambda: False)  # about CPUs
    model = {"model": str(large_model), "device": "cuda"}
    for prompt, recipe in TWO_NUMBERS.items():
        chosen = make_settings(model | {"prompt": prompt}).to_json()
        assert {name: chosen[name] for name in recipe} == recipe
        assert (chosen["dtype"], chosen["learning_rate"]) == ("bfloat16", 2e-6)
    for flags in ({"prompt": "full"}, {"task": "examples.largest_last"}):
        chosen = make_settings(model | flags)
        assert (chosen.questions, chosen.dtype) == (LabSettings.questions, "bfloat16")


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_laptop_computes_in_bfloat16_where_the_cpu_has_instructions(large_model, monkeypatch,
                                                                      is_fast):
    monkeypatch.setattr("lab.harness.large_model.is_fast_in_bfloat16", lambda: is_fast)
    model = {"model": str(large_model)}
    chosen = make_settings(model)
    assert (chosen.dtype, chosen.learning_rate) == (
        ("bfloat16", 2e-6) if is_fast else ("float32", 5e-7))
    typed = make_settings(model | {"dtype": "float32"})
    assert (typed.dtype, typed.learning_rate) == ("float32", 5e-7)
    assert "float32" in typed.folder.name and "float32" not in chosen.folder.name


@pytest.mark.parametrize("flags, tokens", [
    ({}, 12), ({"numbers": "2"}, 12), ({"numbers": "3"}, 36), ({"numbers": "3,4"}, 36),
    ({"prompt": "brief"}, 64), ({"prompt": "brief", "numbers": "3"}, 192),
    ({"numbers": "3", "max_new_tokens": 20}, 20)])
def test_answers_with_more_numbers_may_be_longer(large_model, flags, tokens):
    assert make_settings({"model": str(large_model), **flags}).max_new_tokens == tokens


def test_the_help_of_a_large_model_is_about_the_prompt_that_was_typed(large_model, capsys):
    with pytest.raises(SystemExit):
        read_flags(["--model", str(large_model), "--prompt", "brief", "--help"])
    assert "the most tokens of an answer (default 64)" in " ".join(capsys.readouterr().out.split())


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc alone")
def test_memory_that_is_kept_stays_until_it_is_returned():
    """Of 64 MB that are no longer used: what the process still has, as usual, kept, and returned
    afterwards. What is freed beside a smaller tensor that lives is returned, too."""
    program = """
import resource, torch
from lab.harness.memory import keep_memory, return_memory
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
for begin in (lambda: None, keep_memory):
    begin()
    before = held()
    freed, lives = torch.ones(2 ** 24), torch.ones(2 ** 12)
    del freed
    print(held() - before)
    return_memory()
    print(held() - before)"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, check=True,
                           capture_output=True).stdout.split()
    half = 2 ** 25
    assert [int(number) > half for number in found] == [False, False, True, False]
