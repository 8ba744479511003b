"""Silly values of flags, in every program: each is refused in one sentence, soon."""
import importlib
import json
from dataclasses import replace

import pytest

import tools.warmup
import train
from benchmarks import floor, memory, speed
from benchmarks.cases import CASE_FLAGS
from conftest import ROOT
from countdown_task import Task
from engine.errors import UserError
from harness.flags import Flag, check_value, fields_as_flags
from harness.registry import choice_flags
from harness.settings import OPTIONS, make_settings
from tools import descending, preview, warmup

PROBES = ("exact", "length", "rank", "sparsity", "baseline", "phase1", "scoreboard", "noise")
UNBOUNDED = {"step"}  # of the preview: a step that the run has


def flags_of_all() -> dict[str, Flag]:
    """Every flag of every program, by program and name."""
    groups = {"settings": OPTIONS, "task": fields_as_flags(Task), "choices": choice_flags(),
              "descending": fields_as_flags(descending.Task), "warmup": warmup.FLAGS,
              "preview": preview.FLAGS, "floor": floor.FLAGS, "speed": speed.FLAGS,
              "memory": memory.FLAGS, "case": CASE_FLAGS}
    for name in ("common", *PROBES):
        module = importlib.import_module(f"research.probes.{name}")
        groups[name] = getattr(module, "COMMON" if name == "common" else "FLAGS")
    every = {}
    for group, flags in groups.items():
        every |= {f"{group} {name}": flag for name, flag in flags.items()}
    return every


ALL = flags_of_all()
NUMBERS = [name for name, flag in ALL.items() if flag.type in (int, float)
           and name.split()[1] not in UNBOUNDED]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_bounds_and_its_defaults_lie_within(name):
    flag = ALL[name]
    largest = 10 ** 18 if flag.type is int else 1e30
    for value in (largest, -largest, float("inf"), float("nan")):
        with pytest.raises(UserError, match="should be|too large"):
            check_value("n", value, flag)
    for value in (flag.default, flag.quick):
        check_value("n", value, replace(flag, default=None, kind=flag.type))


@pytest.mark.parametrize("name", [name for name, flag in ALL.items() if flag.type is str])
def test_no_text_may_be_empty(name):
    if ALL[name].default != "":
        for text in ("", " "):
            with pytest.raises(UserError, match="should be a text"):
                check_value("n", text, ALL[name])


def test_what_a_large_run_would_use_is_allowed():
    """A 7B model, thousand-token answers, an unbounded ratio, an evaluation of thousands."""
    settings = make_settings({
        "model": str(ROOT / "models/tiny"), "questions": 1024, "answers": 64, "epochs": 4,
        "max_new_tokens": 32_768, "temperature": 0.6, "learning_rate": 1e-7, "kl": 0.04,
        "clip_high": 100.0, "max_grad_norm": 1e6, "weight_decay": 0.1, "eval_tasks": 50_000,
        "steps": 10_000, "seed": 20_261_121, "micro_batch": 512})
    assert settings.temperature == 0.6


@pytest.mark.parametrize("argv, words", [
    (["--temperature", "1e-320"], "--temperature 1e-320 should be at least 0.01"),
    (["--temperature", "1e9"], "should be at most 100"),
    (["--questions", "1000000000"], "--questions 1000000000 should be at most 10000"),
    (["--eval_tasks", "1000000000000000000"], "should be at most 100000"),
    (["--learning_rate", "11"], "--learning_rate 11.0 should be at most 10"),
    (["--config", ""], "argument --config: '' is empty"),
    (["--config", "/dev/zero"], "/dev/zero: it is not a file"),
    (["--resume", ""], "argument --resume: '' is empty"),
    (["--model", ""], "--model '' should be a text"), (["--data", ""], "--data '' should be a tex"),
    (["--out", " "], "--out ' ' should be a text"),
    (["--max_number", "1000000000"], "--max_number 1000000000 should be at most 999999999"),
    (["--mitigation", "lambda_grpo", "--lambda_lr", "11"], "should be at most 10"),
    (["--mitigation", "learned_importance", "--importance_lr", "11"], "should be at most 10"),
    (["--mitigation", "oracle", "--oracle_k", "1000000000"], "should be at most 10000"),
    (["--advantage", "vine", "--values_k", "1000000000"], "should be at most 10000"),
    (["--advantage", "vine", "--values_every", "9" * 5000], "should be line, uncertain or a number"),
    (["--advantage", "gae", "--critic_lr", "11"], "should be at most 10"),
    (["--task", "x" * 5000], "there is no such module"),
    (["--task", "research.probes.__main__"], "there is no such module")])
def test_train_says_so_in_one_sentence(tmp_path, argv, words):
    with pytest.raises(UserError) as error:
        train.main(["--model", str(ROOT / "models/tiny"), "--out", str(tmp_path / "x"), *argv])
    assert words in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("module, argv, words", [
    (floor, [""], "argument model: '' is empty"), (floor, ["x" * 5000], "there is no model folder"),
    (floor, ["tiny", "--new_tokens", "1000000000"], "should be at most 1000000"),
    (speed, ["--case", "5"], "--case 5 is no JSON object with size and what"),
    (speed, ["--case", "[" * 9000], "is no JSON object with size and what"),
    (speed, ["--case", '{"size": "tiny"}'], "is no JSON object with size and what"),
    (speed, ["--case", '{"size": "tiny", "what": "x"}'], "there is no work 'x' on the size 'tiny'"),
    (speed, ["--case", '{"size": "", "what": "step"}'], "there is no work 'step' on the size ''"),
    (speed, ["--case", '{"size": "tiny", "what": "limits"}'], "no work 'limits' on the size"),
    (speed, ["--case", '{"size": "huge", "what": "step"}'], "--case: size huge is not one of"),
    (speed, ["--case", '{"size": "tiny", "what": "step", "x": 1}'], "--case has x, which is noth"),
    (speed, ["--case", '{"size": "tiny", "what": "step", "threads": "1"}'], "threads '1' should"),
    (memory, ["--case", '{"size": "tiny", "what": "step"}'], "only updates are counted, not 'step'"),
    (preview, [""], "argument RUN: '' is empty"),
    (warmup, ["--batch", "1000000000"], "--batch 1000000000 should be at most 10000"),
    (warmup, ["--threads", "1000000"], "--threads 1000000 should be at most 1024"),
    (warmup, ["--out", "x" * 5000], "File name too long")])
def test_the_other_programs_say_so_too(module, argv, words):
    with pytest.raises(UserError) as error:
        module.main(argv)
    assert words in str(error.value)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
        tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "take_turns", lambda *_: pytest.fail("it measured"))
    for place, words in (("nowhere/x.png", "cannot write"), ("x.docx", "should end in .png"),
                         ("", "should be a text")):
        path = str(tmp_path / place) if place else ""
        with pytest.raises(UserError, match=words):
            speed.main(["--sweep", "--sizes", "none", "--picture", path])
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match="cannot write .*folder.png"):
        speed.main(["--sweep", "--sizes", "none", "--picture", str(tmp_path / "folder.png")])
    speed.check_picture(tmp_path / "new.png")
    assert not (tmp_path / "new.png").exists()


def test_a_world_with_too_many_groups_is_not_listed(tmp_path, monkeypatch):
    from research.probes import exact
    monkeypatch.setattr(exact, "make_world", lambda *_: pytest.fail("it was made"))
    exact.refuse_groups(4, 3)
    for length, answers in ((10, 2), (4, 6), (10, 10)):
        with pytest.raises(UserError, match="groups, 100,000 are the most that are listed here"):
            exact.refuse_groups(length, answers)
    with pytest.raises(UserError, match="--length 10 and --answers 10 make"):
        exact.run_probe("exact", "", exact.FLAGS, exact.measure, common={}, argv=[
            "--length", "10", "--answers", "10", "--out", str(tmp_path / "x")])


@pytest.mark.parametrize("text", ["8", "8,8", "6,5", "8," + "9" * 5000, "8,100001", "8,x"])
def test_lengths_are_read_with_their_bounds(text):
    from research.probes.length import read_lengths
    with pytest.raises(UserError, match="two different numbers of tokens, 6 to 100000") as error:
        read_lengths(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("place", ["file/below", "file", "there"])
def test_warmup_looks_at_its_place_before_it_trains(tmp_path, monkeypatch, place):
    monkeypatch.setattr(tools.warmup, "train", lambda *_: pytest.fail("it trained"))
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="cannot write|exists already"):
        warmup.main(["--out", str(tmp_path / place), "--threads", "1"])


def test_an_error_while_it_trains_leaves_nothing(tmp_path, monkeypatch):
    def train_it(*_):
        [unfinished] = [path.name for path in tmp_path.iterdir()]
        assert unfinished.startswith(".model.") and unfinished.endswith(".tmp")
        raise KeyboardInterrupt

    monkeypatch.setattr(tools.warmup, "train", train_it)
    with pytest.raises(KeyboardInterrupt):
        warmup.main(["--out", str(tmp_path / "model"), "--threads", "1"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content, words", [
    ("1 +", "line 1, .* raises SyntaxError"), ("\n1 / 0", 'line 2, "1 / 0": .* ZeroDivisionError'),
    ("import nothing_of_this_name", "line 1, .* No module named"), ("\0", "SyntaxError"),
    ("class Task: pass", "should be a dataclass of flags")])
def test_a_task_that_cannot_be_imported_is_named_with_the_place(tmp_path, monkeypatch, content,
                                                               words):
    name = f"broken_task_{len(content)}"
    (tmp_path / f"{name}.py").write_text(content)
    (tmp_path / "countdown_task.py").touch()  # the default task, imported already
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"{name}.*{words}"):
        train.main(["--task", name])


def test_a_run_reads_its_limits_from_a_file_too(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"questions": 10 ** 9}))
    with pytest.raises(UserError, match="--questions 1000000000 should be at most 10000"):
        make_settings({"config": str(tmp_path / "c.json")})
