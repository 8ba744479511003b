"""A large model on a CPU: what is told before anything begins, and the settings that a laptop can
live with."""
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refusal

import train
from harness import forecast, load, memory
from harness.load import load_policy
from harness.laptop import LAPTOP, LAPTOP_BY_PROMPT
from harness.run import Run
from harness.screen import MESSAGE
from harness.settings import LARGE, Settings, make_settings, read_flags
from qwen2_model import ModelConfig

SETTINGS = {"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2, "answers": 4,
            "max_new_tokens": 10, "steps": 30, "eval_every": 15, "eval_tasks": 8}


def weights_are_read(*_):
    pytest.fail("the weights were read first, which of a large model takes long")


@pytest.mark.parametrize("flags, words", [
    ({"questions": 10 ** 9}, "--questions 1000000000 with --answers 4 and --max_new_tokens 10 "
                             "takes at least 56,996 GB of memory, and this machine has 16 GB"),
    ({"answers": 10 ** 9}, "takes at least 28,248 GB"),
    ({"questions": 300_000}, "takes at least 17 GB"),
    ({"questions": 600_000, "dtype": "bfloat16"}, "takes at least 18 GB"),
    ({"questions": 40_000, "max_new_tokens": 1000}, "takes at least 21 GB"),
    ({"eval_tasks": 10 ** 9}, "--eval_tasks 1000000000 with --eval_answers 1 and"),
    ({"eval_answers": 10 ** 9}, "--eval_tasks 8 with --eval_answers 1000000000 and"),
    ({"eval_answers": 10 ** 7, "eval_tasks": 400}, "takes at least 1,130 GB")])
def test_a_batch_that_no_machine_can_hold_is_refused(monkeypatch, flags, words):
    """A problem takes 500 bytes, and each token of its answers 30. The cache of models/tiny has 2 x
    3 layers x 2 heads x 32 numbers a token, in float32 1536 bytes, for all tokens but the last, and
    at first for 64 of them: an answer of 10 tokens takes 300 + 9 * 1536 bytes. Of an evaluation
    only as many problems are answered at a time as a step has answers: here eight."""
    monkeypatch.setattr(load, "bytes_of_machine", lambda: 16 * 10 ** 9)
    load_policy(make_settings(SETTINGS))
    monkeypatch.setattr(load, "load_model", weights_are_read)
    assert words in refusal(load_policy, make_settings(SETTINGS | flags))


def test_a_prompt_that_is_too_long_is_told_before_the_weights_are_read(monkeypatch):
    monkeypatch.setattr(load, "load_model", weights_are_read)
    settings = make_settings(SETTINGS | {"max_new_tokens": 5000})
    assert "are longer than the 1024 tokens" in refusal(load_policy, settings)


@pytest.mark.parametrize("flags, gigabytes", [
    ({}, 18), ({"kl": 0.1}, 22), ({"loss": "dpo"}, 22), ({"advantage": "gae"}, 18),
    ({"advantage": "gae", "critic": "trunk", "kl": 0.1}, 38), ({"dtype": "bfloat16"}, 23)])
def test_all_models_in_memory_are_counted(monkeypatch, flags, gigabytes):
    """18, 16, 4, 4 and 5 bytes a parameter, of a billion."""
    monkeypatch.setattr(forecast, "should_keep_memory", lambda model: "dtype" in flags)
    settings = make_settings(SETTINGS | flags)
    policy = load_policy(settings)
    monkeypatch.setattr(policy.model, "parameters", lambda: [torch.empty(10 ** 9, device="meta")])
    assert f"about {gigabytes} GB of memory" in forecast.forecast(settings, policy.model)


@pytest.mark.parametrize("flags, expected", [
    ({}, 64 * 12 * 24 * (8 * 896 + 4 * 4864) * 4),
    ({"dtype": "bfloat16"}, 64 * 12 * 24 * 26624 * 2),
    ({"questions": 1}, 8 * 12 * 24 * 26624 * 4), ({"micro_batch": 2}, 2 * 12 * 24 * 26624 * 4),
    ({"checkpointing": True}, 64 * 12 * (24 * 896 + 26624) * 4)])
def test_what_a_backward_pass_needs_is_counted_by_tokens(flags, expected):
    """A 0.5B: 24 layers, 896 wide, with an MLP of 4,864."""
    usual = {"micro_batch": 64, "questions": 8, "answers": 8, "max_new_tokens": 12}
    s = make_settings(usual | flags)
    config = SimpleNamespace(num_hidden_layers=24, hidden_size=896, intermediate_size=4864)
    assert forecast.bytes_of_activations(s, config) == expected


@pytest.mark.parametrize("recipe, dtype, measured", [
    ("expression", "bfloat16", 12.4e9), ("brief", "bfloat16", 14.0e9),
    ("expression", "float32", 11.0e9)])
def test_the_forecast_is_near_what_real_runs_took(monkeypatch, recipe, dtype, measured):
    """The peak of the runs of a Qwen2.5-0.5B on a machine that keeps freed memory, in bytes."""
    monkeypatch.setattr(forecast, "should_keep_memory", lambda model: dtype == "bfloat16")
    config = SimpleNamespace(num_hidden_layers=24, hidden_size=896, intermediate_size=4864)
    parameters = [torch.empty(494_032_768, device="meta")]
    model = SimpleNamespace(config=config, parameters=lambda: parameters)
    known = {name: value for name, value in LAPTOP_BY_PROMPT[recipe].items()
             if name in ("questions", "answers", "micro_batch", "max_new_tokens")}
    s = make_settings({"dtype": dtype, **known})
    assert forecast.memory_of(s, model) == pytest.approx(measured, rel=0.05)


LINE = {"length": 5.0, "rollout_tokens_per_second": 10.0}  # half a second an answer


@pytest.mark.parametrize("flags, step, took, expected", [
    ({"eval_every": 0, "checkpoint_every": 0}, 1, {}, 29 * 3),
    ({"eval_every": 0, "checkpoint_every": 0}, 30, {}, 0),
    # evaluations at steps 15 and 30, sampled and greedy
    ({"checkpoint_every": 0}, 1, {"sampled": 7, "greedy": 2}, 29 * 3 + 2 * 9),
    ({"checkpoint_every": 0}, 15, {"sampled": 7, "greedy": 2}, 15 * 3 + 2 * 9),
    ({"checkpoint_every": 0}, 16, {"sampled": 7, "greedy": 2}, 14 * 3 + 9),
    # none was timed in a resumed run yet: 8 problems, two sampled answers each, and a greedy one
    ({"checkpoint_every": 0, "eval_answers": 2}, 16, {}, 14 * 3 + 8 + 4),
    ({"eval_every": 0, "checkpoint_every": 20}, 20, {"save": 50}, 10 * 3 + 2 * 50),
    ({"eval_every": 0, "checkpoint_every": 20}, 21, {"save": 50}, 9 * 3 + 50),
    # the model of a billion parameters at the end, 4 bytes each; and a checkpoint of 12
    ({"eval_every": 0, "checkpoint_every": 0, "save_model": True}, 30, {}, 40),
    ({"eval_every": 0, "checkpoint_every": 20, "save_model": True}, 21, {}, 9 * 3 + 120)])
def test_the_time_left_counts_what_is_still_to_come(flags, step, took, expected):
    """30 steps of 3 s."""
    run = Run(replace(make_settings(SETTINGS), **flags))
    billion = [torch.empty(10 ** 9, device="meta")]
    run.policy = SimpleNamespace(model=SimpleNamespace(is_large=True, parameters=lambda: billion))
    run.step, run.took = step, took
    run.seconds.extend([2.0, 4.0])
    assert run.seconds_left(LINE) == expected


@pytest.mark.parametrize("flags, said", [
    ({}, "each of the two newest checkpoints takes 12.0 GB"),
    ({"checkpoint_every": 0}, "nothing of the model is written to disk"),
    ({"checkpoint_every": 0, "save_model": True}, "the trained model takes 4.0 GB"),
    ({"checkpoint_every": 0, "save_model": True, "dtype": "bfloat16"},
     "the trained model takes 2.0 GB")])
def test_what_comes_on_disk_is_what_was_asked_for(flags, said):
    """Of a billion parameters."""
    assert said in forecast.disk_of(make_settings(SETTINGS | flags), 10 ** 9)


def test_ctrl_c_on_a_large_model_says_how_large_the_checkpoint_is(monkeypatch):
    run, parameters = Run(make_settings(SETTINGS)), [torch.empty(10 ** 9, device="meta")]
    model = SimpleNamespace(is_large=True, parameters=lambda: parameters)
    run.policy = SimpleNamespace(model=model)
    assert "a checkpoint of 12.0 GB (120 s on a slow disk) is written" in run.stop_message()
    model.is_large = False
    assert run.stop_message() == MESSAGE


def test_available_memory_is_what_linux_says(monkeypatch, tmp_path):
    """In kB there. Elsewhere half of all pages count, here of 4096 bytes."""
    (tmp_path / "meminfo").write_text("MemTotal: 24684092 kB\nMemAvailable:   5000000 kB\n")
    monkeypatch.setattr(forecast, "MEMORY", tmp_path / "meminfo")
    assert forecast.available_memory() == 5.12e9
    monkeypatch.setattr(forecast, "MEMORY", tmp_path / "nothing")
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10 ** 6}
    monkeypatch.setattr(forecast.os, "sysconf", pages.get)
    assert forecast.available_memory() == 2.048e9


@pytest.mark.parametrize("dtype, pages, keeps", [
    (torch.bfloat16, 10 ** 7, True), (torch.bfloat16, 9 * 10 ** 6, False),
    (torch.float32, 10 ** 7, False)])
def test_memory_is_kept_in_bfloat16_where_there_is_room(monkeypatch, dtype, pages, keeps):
    """40 bytes a parameter, of a billion, in pages of 4096 bytes."""
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.get)
    model = SimpleNamespace(compute_dtype=dtype, device=torch.device("cpu"), is_large=True,
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
    chosen, usual = make_settings(model), LAPTOP_BY_PROMPT["expression"]
    found = chosen.to_json()
    assert {name: found[name] for name in usual} == usual
    assert found["prompt"] == "expression"
    assert "questions" not in chosen.folder.name  # they are its defaults
    assert "promptfull" in make_settings(model | {"prompt": "full"}).folder.name
    assert make_settings(model | {"questions": 16}).questions == 16
    os.truncate(large_model / "model.safetensors", LARGE)
    assert make_settings(model).eval_tasks == Settings.eval_tasks


@pytest.mark.parametrize("flags, recipe", [
    ({"prompt": "brief"}, LAPTOP_BY_PROMPT["brief"]), ({"prompt": "full"}, LAPTOP),
    ({"prompt": "original"}, LAPTOP), ({"task": "examples.largest_last"}, LAPTOP)])
def test_another_prompt_or_task_has_its_own_recipe(large_model, flags, recipe):
    chosen = make_settings({"model": str(large_model), **flags}).to_json()
    assert {name: chosen[name] for name in recipe} == recipe


def test_on_a_gpu_a_large_model_learns_the_same_and_other_tasks_have_the_usual_settings(
        large_model, monkeypatch):
    monkeypatch.setattr("harness.laptop.is_fast_in_bfloat16", lambda: False)  # it is about CPUs
    model = {"model": str(large_model), "device": "cuda"}
    for prompt, recipe in LAPTOP_BY_PROMPT.items():
        chosen = make_settings(model | {"prompt": prompt}).to_json()
        assert {name: chosen[name] for name in recipe} == recipe
        assert (chosen["dtype"], chosen["learning_rate"]) == ("bfloat16", 2e-6)
    for flags in ({"prompt": "full"}, {"task": "examples.largest_last"}):
        chosen = make_settings(model | flags)
        assert (chosen.questions, chosen.dtype) == (Settings.questions, "bfloat16")


@pytest.mark.parametrize("gigabytes, flags, answers", [
    # a token takes 24 * (8 * 896 + 4 * 4864) * 2 = 1,277,952 bytes, and so 512 tokens 0.654 GB
    (80, {}, 30), (8, {}, 8), (80, {"max_new_tokens": 100}, 156), (80, {"micro_batch": 4}, 4),
    (80, {"checkpointing": True}, 405), (80, {"prompt": "expression"}, 64)])
def test_micro_batches_fill_a_quarter_of_a_gpu(large_model, monkeypatch, gigabytes, flags, answers):
    config = ModelConfig(151936, 896, 4864, 24, 14, 2, 64)
    (large_model / "config.json").write_text(json.dumps(config.to_json()))
    gpu = SimpleNamespace(total_memory=gigabytes * 1e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    model = {"model": str(large_model), "device": "cuda", "prompt": "full"}
    assert make_settings(model | flags).micro_batch == answers


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_laptop_computes_in_bfloat16_where_the_cpu_has_instructions(large_model, monkeypatch,
                                                                      is_fast):
    monkeypatch.setattr("harness.laptop.is_fast_in_bfloat16", lambda: is_fast)
    model = {"model": str(large_model)}
    chosen = make_settings(model)
    assert (chosen.dtype, chosen.learning_rate) == (
        ("bfloat16", 2e-6) if is_fast else ("float32", 5e-7))
    typed = make_settings(model | {"dtype": "float32"})
    assert (typed.dtype, typed.learning_rate) == ("float32", 5e-7)
    assert ("float32" in typed.folder.name) == is_fast


@pytest.mark.parametrize("flags, tokens", [
    ({}, 12), ({"numbers": "2"}, 12), ({"numbers": "3"}, 32), ({"numbers": "3,4"}, 32),
    ({"prompt": "brief"}, 64), ({"prompt": "brief", "numbers": "3"}, 192),
    ({"numbers": "3", "max_new_tokens": 20}, 20)])
def test_answers_with_more_numbers_may_be_longer(large_model, flags, tokens):
    assert make_settings({"model": str(large_model), **flags}).max_new_tokens == tokens


def test_the_help_of_a_large_model_is_about_the_prompt_that_was_typed(large_model, capsys):
    with pytest.raises(SystemExit):
        read_flags(["--model", str(large_model), "--prompt", "brief", "--help"])
    assert "A longer one is cut off (default 64)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("chosen, seconds, said", [
    ("bfloat16", [4, 5], "faster in float32: a matrix product in bfloat16 takes 2.0 times"),
    ("float32", [1, 5], "faster in bfloat16: a matrix product in float32 takes 2.0 times"),
    ("float32", [2, 2], ""), ("bfloat16", [2, 2], ""), ("float32", [1.4, 3], "")])
def test_it_is_told_which_type_is_faster_when_a_product_was(monkeypatch, capsys, chosen, seconds,
                                                            said):
    """Seconds in bfloat16; the product in float32 takes two at best."""
    monkeypatch.setattr(forecast, "repeat", lambda product, repeat, number: (
        seconds if product.args[0].dtype == torch.bfloat16 else [2, 2.5]))
    forecast.compare_types(chosen)
    assert said in (told := capsys.readouterr().err) and bool(told) == bool(said)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_large_model_compares_types(monkeypatch, is_large):
    found = []
    monkeypatch.setattr("qwen2_model.Qwen2.is_large", is_large)
    monkeypatch.setattr(forecast, "compare_types", found.append)
    load_policy(make_settings(SETTINGS))
    assert found == ["float32"] * is_large


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
    monkeypatch.setattr("qwen2_model.Qwen2.is_large", is_large)
    monkeypatch.setattr(memory, "call_glibc", lambda name, *_: found.append(name))
    flags = SETTINGS | {"steps": 2, "dtype": dtype, "out": tmp_path / "run"}
    train.main([word for name, value in flags.items() for word in (f"--{name}", str(value))])
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
from harness.memory import keep_memory, return_memory
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
{}
before = held()
freed, lives = torch.ones(2 ** 24), torch.ones(2 ** 12)
del freed
print(held() - before)
return_memory()
print(held() - before)"""
    usual, kept = (subprocess.run([sys.executable, "-c", program.format(call)], cwd=ROOT, text=True,
                                  check=True, capture_output=True).stdout.split()
                   for call in ("", "keep_memory()"))
    half = 2 ** 25
    assert [int(number) > half for number in usual + kept] == [False, False, True, False]
