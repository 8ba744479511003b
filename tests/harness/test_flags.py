"""Flags: how they are declared, read, checked and described; the bounds of all that there are."""
import dataclasses
import typing

import pytest

from conftest import ROOT, assert_bounded, refusal
from countdown_task import Task
from harness.settings import (Flag, Parser, Positive, Range, add_flags, check_value, fields_as_flags,
                          option, parameters_as_flags)
from harness.settings import OPTIONS, choice_flags, make_settings
from tools import largest_last, preview, warmup


@pytest.mark.parametrize("flag, value, words", [
    (Flag(8), 1.5, "--n 1.5 should be a whole number"),
    (Flag(8), True, "--n True should be a whole number"),
    (Flag(0.5), float("nan"), "--n nan should be a number"),
    (Flag("line"), "   ", "--n '   ' should be a text"),
    (Flag("line", choices=("a",)), "b" * 9999, f"--n {'b' * 80}... is not one of: a"),
    (Flag(8), "7" * 9999, f"--n '{'7' * 79}... should be a whole number"),
    (Flag(0.5), None, "--n None should be a number"),
    (Flag(False), 1, "--n 1 should be yes or no"),
    (Flag(8, least=2), 1, "--n 1 should be at least 2"),
    (Flag(0.5, above=0), 0, "--n 0 should be above 0"),
    (Flag(0.5, most=1), 1.25, "--n 1.25 should be at most 1"),
    (Flag("a", choices=("mean", "gradient", "none")), "non",
     "--n non is not one of: none, mean, gradient")])
def test_a_value_that_does_not_fit_is_refused(flag, value, words):
    assert refusal(check_value, "n", value, flag) == words


@pytest.mark.parametrize("flag, value", [
    (Flag(8, least=2), 2), (Flag(0.5, most=1), 1), (Flag(0.5, above=0), 1e-9), (Flag(None), None),
    (Flag(""), ""), (Flag("mean", choices=("mean", "none")), "none")])
def test_the_limits_themselves_are_allowed(flag, value):
    check_value("n", value, flag)


LONG = "9" * 99_999


def make_parser() -> Parser:
    return add_flags(Parser("it"), {"new_tokens": Flag(8), "fast": Flag(False), "out": Flag(None)})


@pytest.mark.parametrize("argv, given", [
    # in a name a hyphen is an underscore, in a value it stays
    ("--new-tokens=3 --out a-b", {"new_tokens": 3, "out": "a-b"}), ("--out=--a", {"out": "--a"}),
    # a yes-or-no flag alone means yes
    ("--fast", {"fast": True}), ("--fast TRUE", {"fast": True}), ("--fast yes", {"fast": True}),
    ("--fast no", {"fast": False}), ("", {})])
def test_what_was_typed(argv, given):
    assert make_parser().read(argv.split()) == given


@pytest.mark.parametrize("argv, words", [
    ("--fast perhaps", "'perhaps' is neither yes nor no"),
    # not taken as short for --new_tokens; half of the letters of --fast are not near
    ("--new-token=3", "unknown argument --new_token=3, did you mean --new_tokens"),
    ("--fuss", "unknown argument --fuss"), ("--" + LONG, "unknown argument"),
    ("--new_tokens 9" + LONG, "--new_tokens"), ("--fast " + LONG, "--fast")])
def test_what_was_typed_wrong_is_told_but_not_repeated_at_length(argv, words):
    said = refusal(make_parser().read, argv.split())
    assert words in said and ("did you mean" in said) == ("did you mean" in words)


Whole = typing.Annotated[float, Flag(9.0, "with a text", most=1)]


@dataclasses.dataclass
class Fields:
    count: int = option(3, "how many", least=2)
    data: str | None = option(None, "a file")
    rate: float = option(1, "an int by its default, a float by its type")
    hidden: int = 5


def one(rollouts, *, strength: Positive = 2, part: Whole = 0.5, plain=3,
        low: typing.Annotated[int, Range(least=1)] = 4):
    pass


def test_fields_and_keyword_only_parameters_are_flags():
    assert fields_as_flags(Fields) == {
        "count": Flag(3, "how many", least=2, kind=int), "data": Flag(None, "a file", kind=str),
        "rate": Flag(1, "an int by its default, a float by its type", kind=float)}
    assert parameters_as_flags(one) == {
        "strength": Flag(2, kind=float, above=0, most=1e6),
        "part": Flag(0.5, "with a text", kind=float, most=1),  # its own default counts
        "plain": Flag(3, kind=int), "low": Flag(4, kind=int, least=1)}


@pytest.mark.parametrize("function", [
    lambda rollouts, *, power: 0, lambda rollouts, *, power=[3]: 0,
    lambda rollouts, *, power=None: 0])
def test_a_parameter_that_cannot_be_a_flag_is_refused(function):
    place = f"(tests/harness/test_flags.py:{function.__code__.co_firstlineno})"
    said = refusal(parameters_as_flags, function)
    assert said.startswith(f"power of <lambda> {place} becomes a flag: it needs a default and a ty")


def test_every_number_has_bounds_and_its_defaults_lie_within():
    groups = {"settings": OPTIONS, "task": fields_as_flags(Task), "choices": choice_flags(),
              "largest_last": fields_as_flags(largest_last.Task), "warmup": warmup.FLAGS,
              "preview": preview.FLAGS}
    flags = {f"{group} {name}": flag for group, flags in groups.items()
             for name, flag in flags.items()}
    del flags["preview step"]  # one that the run has
    assert_bounded(flags)


def test_what_a_large_run_would_use_is_allowed():
    """A 7B model, thousand-token answers, an unbounded ratio, an evaluation of thousands."""
    make_settings({
        "model": str(ROOT / "models/tiny"), "questions": 1024, "answers": 64, "epochs": 4,
        "max_new_tokens": 32_768, "learning_rate": 1e-7, "kl": 0.04, "clip_high": 100.0,
        "max_grad_norm": 1e6, "weight_decay": 0.1, "eval_tasks": 50_000, "steps": 10_000,
        "seed": 20_261_121, "micro_batch": 512})
