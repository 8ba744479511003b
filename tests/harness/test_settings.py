"""Settings: where a value comes from, and what a task or a choice of one's own brings along."""
import inspect
import json
import re

import pytest

from conftest import refusal
from engine.choices import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, Choices, mitigation
from engine.errors import UserError
from harness.command_line import read_flags
from harness.help import FIRST_DAY
from harness.settings import Positive
from harness.settings import OPTIONS, make_settings

LARGEST_LAST = "tools.largest_last"
COUNTDOWN = {"max_number": 15, "steps": 7, "questions": 5}  # a recipe
AS_PUBLISHED = {"mitigation": "inverse_logprob_as_published", "epsilon": 3.0, "rescale": "none"}
SERVED_PAIRS = {**AS_PUBLISHED, "loss": "dpo", "pairs": "x.jsonl",
                "rollouts": "http://127.0.0.1:1", "rollouts_every": 4}
BEFORE_TASKS = {"max_number": 20, "gamma": 1.0, "values_k": 9, "values_every": "line",
                "advantage": "gae", "mitigation": "none", "gae_lambda": 0.5, "ranks": 1}
ABSENT = object()


def write(path, values: dict):
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def model(tmp_path):
    """A model folder as far as settings look into it: a recipe for Countdown."""
    write(tmp_path / "recipe.json", COUNTDOWN)
    return str(tmp_path)


@pytest.fixture
def own_choices(monkeypatch):
    """Whoever registers choices in a test leaves none behind."""
    for choices in (MITIGATIONS, ADVANTAGES):
        assert all(choices[name] for name in choices)  # a module says its methods once: imported
        monkeypatch.setattr(choices, "data", dict(choices.data))


def settings_of(argv: list[str]):
    return make_settings(read_flags(argv))


@pytest.mark.parametrize("recipe, config, argv, expected", [
    # typed wins over the file, that over the model's recipe, that over the default
    (COUNTDOWN, {"steps": 8, "seed": 4}, "--seed 9",
     dict(seed=9, steps=8, questions=5, answers=8, max_number=15)),
    # on a GPU a large model is computed in bfloat16: one without a recipe
    ({}, {}, "", dict(dtype="float32")), ({}, {}, "--device cuda:1", dict(dtype="bfloat16")),
    ({}, {}, "--device cuda --dtype float32", dict(dtype="float32")),
    (COUNTDOWN, {}, "--device cuda", dict(dtype="float32")),
    # the task is known before the other flags are read: typed, of a file, of the recipe
    (COUNTDOWN, {"task": LARGEST_LAST, "count": 4}, "--largest 9",
     dict(count=4, largest=9, max_number=ABSENT)),
    ({}, {}, f"--count 5 --task={LARGEST_LAST}", dict(count=5)),
    ({"task": LARGEST_LAST, "count": 5}, {}, "--largest 9",
     dict(task=LARGEST_LAST, count=5, largest=9)),
    # of a file, flags of another task, weighting or advantage than the chosen one stay behind
    (COUNTDOWN, {"task": LARGEST_LAST, "count": 4, "steps": 3}, "--task countdown_task",
     dict(count=ABSENT, max_number=15, steps=3)),
    (COUNTDOWN, {}, f"--task {LARGEST_LAST}", dict(max_number=ABSENT, count=3, steps=7)),
    ({}, AS_PUBLISHED, "", dict(epsilon=3.0, rescale="none")),
    ({}, AS_PUBLISHED, "--mitigation equal_gradient", dict(epsilon=0.1, rescale="mean")),
    ({}, {"advantage": "gae", "gamma": 0.5}, "", dict(gamma=0.5)),
    ({}, {"advantage": "gae", "gamma": 0.5}, "--advantage grpo", dict(gamma=ABSENT)),
    ({}, {"gamma": 0.5}, "--advantage gae", dict(gamma=0.5)),  # it names none
    (COUNTDOWN, BEFORE_TASKS, "",
     dict(task="countdown_task", max_number=20, gae_lambda=0.5, values_k=ABSENT)),
    # what has no effect is set back, also where one thing follows from another
    (COUNTDOWN, SERVED_PAIRS, "", dict(mitigation="none", rescale="mean", answers=2,
                                       epsilon=ABSENT, rollouts="own", rollouts_every=1)),
    (COUNTDOWN, SERVED_PAIRS, "--loss policy", dict(pairs=None, answers=8, rollouts_every=4))])
def test_where_a_value_comes_from(tmp_path, recipe, config, argv, expected):
    write(tmp_path / "recipe.json", recipe)
    config = write(tmp_path / "c.json", config)
    found = settings_of(["--model", str(tmp_path), "--config", config, *argv.split()]).to_json()
    assert {name: found.get(name, ABSENT) for name in expected} == expected


def test_help_shows_what_the_command_would_use(tmp_path, model, capsys):
    """By the model's recipe, by the file, by default."""
    config = write(tmp_path / "c.json", {"steps": 8})
    with pytest.raises(SystemExit):
        read_flags(["--model", model, "--config", config, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, value in (("questions", 5), ("steps", 8), ("answers", 8)):
        assert re.search(rf"--{name} \w+ [^()]*\(default {value}\)", shown), name


@pytest.mark.parametrize("values, words", [
    ({"nonsense": 1}, "c.json has the unknown setting nonsense"),
    ({"count": 4}, "c.json has the unknown setting count"),
    ({"task": []}, "--task []: there is no such module"),
    ({"gamma": 0.9}, "--gamma belongs to gae, --advantage is grpo"),
    ({"steps": 1.5}, "c.json: --steps 1.5 should be a whole number")])
def test_a_file_may_not_hold_what_is_no_setting(tmp_path, model, values, words):
    config = write(tmp_path / "c.json", values)
    assert words in refusal(settings_of, ["--model", model, "--config", config])


def seed(rollouts, *, seed: int = 1):
    """Weights."""


def method_with(keyword):
    """A weighting with this keyword."""
    def mine(rollouts, **_):
        """Weights."""
    parameter = inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=1)
    mine.__signature__ = inspect.Signature([parameter])
    return mine


def test_a_flag_has_one_meaning(own_choices, tmp_path):
    """Settings, entries of config.json, other words of command lines, flags of the other method:
    a keyword may be none of them. To be there without being chosen does no harm."""
    for name in ("seed", "max_number", "reward", "help", "step", "gamma"):
        choices = {"mine": method_with(name)}
        MITIGATIONS.data |= choices
        said = refusal(settings_of, ["--mitigation", "mine", "--advantage", "gae"])
        where, owner = ("credit/critic.py", "gae") if name == "gamma" else ("", "mine")
        assert said.startswith(f"the keyword {name} of {owner} ({where}") and ".py:" in said
        assert f"another name, {owner}_{name} say" in said
        config = write(tmp_path / "c.json", {"mitigation": "none", "seed": 3})
        assert settings_of(["--config", config, "--mitigation", "equal_gradient"]).seed == 3


def test_a_mistake_in_one_methods_flags_is_told_to_who_chooses_it_alone(own_choices):
    """And a parameter that is no keyword to who types it as a flag."""
    @mitigation
    def wrong(rollouts, *, strength: float):
        """Weights."""

    @mitigation
    def unknown(rollouts, *, strength: "Nowhere" = 1.0):  # noqa: F821
        """Weights."""

    @mitigation
    def positional(rollouts, strength=1.0):
        """Weights."""

    @mitigation
    def right(rollouts, *, strength: float = 1.0):
        """Weights."""
    assert settings_of(["--mitigation", "right", "--strength", "2"]).method_flags["strength"] == 2
    said = refusal(settings_of, ["--mitigation", "wrong", "--strength", "2"])
    assert said.startswith("strength of wrong (tests/harness/test_settings.py:")
    said = refusal(settings_of, ["--mitigation", "positional", "--strength", "2"])
    assert said.startswith("strength of positional (") and "(rollouts, *, strength)" in said
    said = refusal(settings_of, ["--strength", "2"])
    assert said == "--strength belongs to right, --mitigation is none (--help lists the flags)"


@pytest.mark.parametrize("choices, name, module", [
    (MITIGATIONS, "oracle", "credit.measured"), (ADVANTAGES, "measured", "credit.measured"),
    (ADVANTAGES, "grpo", "grpo")])
def test_a_method_takes_no_other_methods_name(choices, name, module):
    """Whichever comes first; until it is chosen, its module stands for a method."""
    words = f"{name} of {' and '.join(sorted((module, __name__)))}: one needs another name"
    assert refusal(choices.update, {name: seed}) == words
    assert refusal(Choices({name: seed}).update, {name: module}) == words
    assert choices[name].__module__ == module


def test_a_notebooks_cell_may_define_its_method_again_and_a_file_not(own_choices):
    """The second `def none` of a file would take the place of plain GRPO in silence."""
    for module in "of a notebook", __name__:
        seed.__module__ = module
        assert mitigation(seed) is MITIGATIONS["seed"]
        if module != __name__:
            assert mitigation(rescaled=False)(seed) is seed and "seed" in NEVER_RESCALED
            assert mitigation(seed) is seed and "seed" not in NEVER_RESCALED
            MITIGATIONS.data.clear()
    assert refusal(mitigation, seed) == f"seed is twice in {__name__}: one needs another name"


def test_help_shows_every_choice_with_its_flags(capsys, own_choices):
    @mitigation
    def silent(rollouts):
        "   "

    @mitigation
    def late(rollouts, *, power: Positive = 2.0):
        """
        Words below.
        """

    def help_of(*topic):
        with pytest.raises(SystemExit):
            read_flags(["--steps", "3", "--help", *topic])
        return capsys.readouterr().out

    printed = help_of("all")
    text = " ".join(printed.split())
    assert all(f"\n  {name} " in printed for name in MITIGATIONS)
    assert all(f"--{name} " in printed for name in OPTIONS)
    assert "silent (no docstring)" in text and "late Words below." in text
    flag = "--power (default 2.0, above 0, at most 1e+06)"
    assert flag in text and flag in help_of("late") and "silent" not in help_of("late")
    first = help_of()
    assert all(f" {name}" in first for name in (*MITIGATIONS, *ADVANTAGES))
    assert {name for name in OPTIONS if f"\n  --{name} " in first} == set(FIRST_DAY)
    assert "--power" not in first and "--max_number" not in first
    with pytest.raises(UserError, match="--help latex: there is no method of this name"):
        read_flags(["--help", "latex"])


@pytest.mark.parametrize("argv, said", [
    ("--mitigation entropy_maskin", "--mitigation entropy_maskin is not one of: entropy_masking, "),
    ("--count 5", "unknown argument --count"), ("--config=", "cannot read .: Is a directory"),
    (f"--task {'x' * 5000}", "there is no such module"),
    ("--task tools.__main__", "there is no such module"),
    ("--think_discount 0.5", "belongs to outcome_conditional, --mitigation is none"),
    ("--gamma=0.9", "--gamma belongs to gae, --advantage is grpo"),
    ("--mitigation entropy_masking --mask_percentile 120", "120.0 should be at most 100"),
    ("--mitigation inverse_logprob_as_published --rescale mean",
     "--rescale has no effect without a --mitigation that is rescaled"),
    ("--placebo weights", "no effect without --loss policy and, for weights, another --mitigation"),
    ("--rescale gradient", "no effect without a --mitigation that is rescaled"),
    ("--data x.jsonl --max_number 9", "no effect without made problems: not with --data"),
    ("--eval_every 0 --eval_tasks 9", "--eval_tasks has no effect without --eval_every above 0"),
    ("--advantage gae --trunk_lr 2e-3", "--trunk_lr has no effect without --critic trunk"),
    ("--clip_low 0.3", "--clip_low has no effect without --epochs above 1"),
    ("--kl_kind k2", "no effect without --kl above 0"),
    ("--shard --offload_optimizer", "--shard has no effect without --offload_optimizer no"),
    ("--loss dpo --mitigation random", "--mitigation has no effect without --loss policy"),
    ("--loss dpo --advantage rloo", "--advantage has no effect without --loss policy"),
    ("--loss dpo --kl 0.1", "--kl has no effect without --loss policy"),
    ("--loss dpo --epochs 2", "--epochs has no effect without --loss policy"),
    ("--pairs x.jsonl", "--pairs has no effect without --loss dpo"),
    ("--loss dpo --pairs x.jsonl --answers 4", "has no effect without sampled answers")])
def test_a_flag_without_effect_is_refused_if_another_value_was_typed(argv, said):
    assert said in refusal(settings_of, argv.split())


def test_a_flag_of_another_task_is_refused():
    said = refusal(make_settings, {"task": LARGEST_LAST, "max_number": 5})
    assert said == f"--max_number is no flag of --task {LARGEST_LAST}"


def test_a_value_that_would_hold_anyway_may_be_typed():
    typed = "--clip_low 0.2 --rescale mean --placebo none --kl_kind k3"
    assert settings_of(typed.split()) == settings_of([])
