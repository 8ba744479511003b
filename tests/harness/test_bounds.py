"""Silly values of flags, in every program: each is refused in one sentence, soon."""
import importlib
from dataclasses import replace

import pytest

import train
from benchmarks import cost, memory, speed
from conftest import ROOT
from countdown_task import Task
from engine.errors import UserError
from harness.flags import Flag, check_value, fields_as_flags
from harness.settings import OPTIONS, choice_flags, make_settings
from tools import largest_last, preview, warmup

PROBES = ("exact", "length", "rank", "sparsity", "baseline", "phase1", "scoreboard", "noise")
UNBOUNDED = {"step"}  # of the preview: a step that the run has


def flags_of_all() -> dict[str, Flag]:
    """Every flag of every program, by program and name."""
    groups = {"settings": OPTIONS, "task": fields_as_flags(Task), "choices": choice_flags(),
              "largest_last": fields_as_flags(largest_last.Task), "warmup": warmup.FLAGS,
              "preview": preview.FLAGS, "speed": speed.FLAGS, "memory": memory.FLAGS,
              "cost": cost.FLAGS}
    for name in ("common", *PROBES):
        module = importlib.import_module(f"research.probes.{name}")
        groups[name] = getattr(module, "COMMON" if name == "common" else "FLAGS")
    return {f"{group} {name}": flag for group, flags in groups.items()
            for name, flag in flags.items()}


def test_every_number_has_bounds_and_its_defaults_lie_within():
    for name, flag in flags_of_all().items():
        if flag.type not in (int, float) or name.split()[1] in UNBOUNDED:
            continue
        largest = 10 ** 18 if flag.type is int else 1e30
        for value in (largest, -largest, float("inf"), float("nan")):
            with pytest.raises(UserError, match="should be"):
                check_value(name, value, flag)
        for value in (flag.default, flag.quick):
            check_value(name, value, replace(flag, default=None, kind=flag.type))


def test_what_a_large_run_would_use_is_allowed():
    """A 7B model, thousand-token answers, an unbounded ratio, an evaluation of thousands."""
    make_settings({
        "model": str(ROOT / "models/tiny"), "questions": 1024, "answers": 64, "epochs": 4,
        "max_new_tokens": 32_768, "temperature": 0.6, "learning_rate": 1e-7, "kl": 0.04,
        "clip_high": 100.0, "max_grad_norm": 1e6, "weight_decay": 0.1, "eval_tasks": 50_000,
        "steps": 10_000, "seed": 20_261_121, "micro_batch": 512})


@pytest.mark.parametrize("argv, words", [
    (["--temperature", "1e-320"], "--temperature 1e-320 should be at least 0.01"),
    (["--config", ""], "argument --config: '' is empty"),
    (["--config", "/dev/zero"], "cannot read /dev/zero: Not a regular file"),
    (["--resume", ""], "argument --resume: '' is empty"),
    (["--model", ""], "argument --model: '' is empty"),
    (["--out", "a\x1b[1m"], "characters that cannot be shown"),
    (["--mitigation", "lambda_grpo", "--lambda_lr", "11"], "should be at most 10"),
    (["--advantage", "vine", "--values_every", "9" * 5000], "should be line, uncertain or"),
    (["--task", "x" * 5000], "there is no such module"),
    (["--task", "research.probes.__main__"], "there is no such module")])
def test_train_says_so_in_one_sentence(tmp_path, argv, words):
    with pytest.raises(UserError) as error:
        train.main(["--model", str(ROOT / "models/tiny"), "--steps", "0", "--eval_every", "0",
                    "--out", str(tmp_path / "x"), *argv])
    assert words in str(error.value) and len(str(error.value)) < 500
    assert list(tmp_path.iterdir()) == []


def test_a_world_with_too_many_groups_is_not_listed(tmp_path, monkeypatch):
    from research import __main__ as overview
    from research.probes import exact
    monkeypatch.setattr(exact, "make_world", lambda *_: pytest.fail("it was made"))
    exact.refuse_groups(4, 3)
    for length, answers in ((10, 2), (4, 6), (10, 10)):
        with pytest.raises(UserError, match="groups, 100,000 are the most that are listed here"):
            exact.refuse_groups(length, answers)
    with pytest.raises(UserError, match="--length 10 and --answers 10 make"):
        overview.main(["exact", "--length", "10", "--answers", "10",
                       "--out", str(tmp_path / "x")])


@pytest.mark.parametrize("text", ["8", "8,8", "6,5", "8," + "9" * 5000, "8,100001", "8,x"])
def test_lengths_are_read_with_their_bounds(text):
    from research.probes.length import read_lengths
    with pytest.raises(UserError, match="two different numbers of tokens, 6 to 100000") as error:
        read_lengths(text)
    assert len(str(error.value)) < 300
