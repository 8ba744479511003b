"""Flags: how they are declared, read and checked; where a setting's value comes from; what a task
or a method of one's own brings along; the name of a run's folder."""
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import typing

import pytest

from conftest import ROOT, refusal
from small import assert_bounded
import grpo
import run as book
from lab.__main__ import MODULES
from lab.countdown import Task
from examples import guess
from lab.engine.methods import ADVANTAGES, MITIGATIONS, Choices, mitigation
from lab.harness.flags_elsewhere import ELSEWHERE, INSTEAD
from lab.harness import flags
from lab.harness.build import unpaid_parts
from lab.engine.declared import Positive, Range
from lab.harness.flags import Flag, check_value, flags_of, option, settle, words_of
from lab.harness.settings import OPTIONS, LabSettings, make_settings, read_flags
from lab.tools import try_task

GUESS = "examples.guess"
COUNTDOWN = {"max_number": 15, "steps": 7, "questions": 5}  # a recipe
AS_PUBLISHED = {"mitigation": "inverse_logprob_as_published", "epsilon": 3.0, "rescale": "none"}
ABSENT = object()


@pytest.mark.parametrize("flag, value, words", [
    (Flag(8), 1.5, "--n 1.5: should be a whole number"),
    (Flag(8), "7" * 9999, f"--n '{'7' * 79}: should be a whole number"),
    (Flag(0.5), float("nan"), "--n nan: should be a finite number"),
    (Flag(0.5), 10 ** 400, f"--n 1{'0' * 79}: should be a finite number"),
    (Flag(False), 1, "--n 1: should be yes or no"), (Flag(8), True, "--n needs a value"),
    (Flag("a"), " ", "--n needs a value"),
    (Flag(None), "", "--n needs a value"),
    (Flag(8, least=2), 1, "--n 1: should be at least 2"), (Flag(8), -1, "should be at least 0"),
    (Flag(8), 10 ** 9 + 1, "--n 1000000001: should be at least 0 and at most 1e+09"),
    (Flag(0.5, above=0), 0, "--n 0.0: should be above 0"),
    (Flag(0.5, most=1), 1.25, "--n 1.25: should be at least 0 and at most 1"),
    (Flag("a", choices=("mean", "gradient", "none")), "non",
     "--n 'non': choose from mean, gradient, none. Did you mean none?")])
def test_a_value_that_does_not_fit_is_refused(flag, value, words):
    assert words in refusal(check_value, "n", value, flag)


FLAGS = {"new_tokens": Flag(8, "how many"), "fast": Flag(False), "out": Flag(None),
         "rate": Flag(0.5)}


def read(argv: str, places={}):
    return flags.read(shlex.split(argv), "it", None, FLAGS, places)


@pytest.mark.parametrize("argv, given", [
    # in a name a hyphen is an underscore, in a value it stays
    ("--new-tokens=3 --out a-b", {"new_tokens": 3, "out": "a-b"}), ("--out=--a", {"out": "--a"}),
    ("--out '--a-b 1 --c-d 2'", {"out": "--a-b 1 --c-d 2"}),  # flags for another program
    # a yes-or-no flag alone means yes
    ("--fast", {"fast": True}), ("--fast TRUE", {"fast": True}), ("--fast yes", {"fast": True}),
    ("--fast no", {"fast": False}), ("--rate 1e-3", {"rate": 0.001}), ("", {}),
    ("--fast --rate 2", {"fast": True, "rate": 2.0}),
    ("--rate -1 --rate 3", {"rate": 3.0})])  # the last one counts
def test_what_was_typed(argv, given):
    found = read(argv)
    assert found.typed == given
    usual = {name: flag.default for name, flag in FLAGS.items()}
    assert vars(found) == {**usual, **given, "typed": given}


def test_words_stand_between_flags():
    """A word after a flag is its value, also where the flag needs none."""
    found = read("a --fast --rate 1 b c", {"RUN": "", "PROBLEM ...": ""})
    assert (found.run, found.problem, found.fast) == ("a", ["b", "c"], True)
    assert words_of(["-b", "--fast", "a", "--x=", "-h"]) == (
        ["-b"], {"fast": "a", "x": "", "help": True})
    found = read("", {"[RUN]": "", "[MORE ...]": ""})
    assert (found.run, found.more) == (None, [])
    said = refusal(read, "--fast", {"[FIRST]": "", "RUN": "", "PROBLEM ...": ""})
    assert said == "the following arguments are required: RUN, PROBLEM (--help lists the flags)"


@pytest.mark.parametrize("argv, words", [
    ("--fast perhaps", "--fast 'perhaps': should be yes or no"),
    # not taken as short for --new_tokens; half of the letters of --fast are not near
    ("--new-token=3", "unknown argument --new_token. Did you mean new_tokens? (--help lists the "
     "flags)"),
    ("--fuss", "unknown argument --fuss (--help lists the flags)"),
    ("--halp", "unknown argument --halp. Did you mean help? (--help lists the flags)"),
    ("a", "unknown argument a (--help lists the flags)"), ("--out", "--out needs a value")])
def test_what_was_typed_wrong_is_told(argv, words):
    assert refusal(read, argv) == words


Whole = typing.Annotated[float, Flag(9.0, "with a text", most=1)]


@dataclasses.dataclass
class Fields:
    count: int = option(3, "how many", least=2)
    data: str | None = option(None, "a file")
    rate: float = option(1.0, "a number")
    hidden: int = 5


def one(rollouts, *, strength: Positive = 2, part: Whole = 0.5, plain=3,
        low: typing.Annotated[int, Range(least=1)] = 4):
    pass


def test_fields_and_keyword_only_parameters_are_flags():
    assert flags_of(Fields) == {
        "count": Flag(3, "how many", least=2), "data": Flag(None, "a file"),
        "rate": Flag(1.0, "a number")}
    assert flags_of(one) == {
        "strength": Flag(2, "of one", kind=float, above=0),
        "part": Flag(0.5, "with a text", kind=float, most=1),  # its own default counts
        "plain": Flag(3, "of one", kind=int, least=-1e12, most=1e12),  # as in the book
        "low": Flag(4, "of one", kind=int, least=1)}


def with_a_text(rollouts, *, power: typing.Annotated[float, "how much"] = 1.0):
    """Annotated with a text instead of limits."""


@pytest.mark.parametrize("function", [
    lambda rollouts, *, power: 0, lambda rollouts, *, power=[3]: 0,
    lambda rollouts, *, power=None: 0, with_a_text])
def test_a_parameter_that_cannot_be_a_flag_is_refused(function):
    place = f"(lab/tests/harness/test_settings.py:{function.__code__.co_firstlineno})"
    said = refusal(flags_of, function)
    assert said.startswith(f"power of {function.__name__} {place} becomes a flag, so it "
                           "needs a default, ")


def test_every_number_has_bounds_and_its_defaults_lie_within():
    methods = [choices[name] for choices in (MITIGATIONS, ADVANTAGES) for name in choices]
    # examples/dpo.py adds one, if it is loaded, and limits nothing
    of_project = [one for one in methods if not one.__module__.endswith("dpo")]
    owners = [flags_of(owner) for owner in (Task, guess.Task, *of_project)]
    commands = [vars(importlib.import_module(file)).get("FLAGS", {}) for file in MODULES.values()]
    flags = {f"{n} {name}": flag for n, found in enumerate([OPTIONS, *commands, *owners])
             for name, flag in found.items()}
    assert_bounded(flags)


def test_what_a_large_run_would_use_is_allowed():
    """A 7B model, thousand-token answers, an unbounded ratio, an evaluation of thousands."""
    make_settings({
        "model": str(ROOT / "models/tiny"), "questions": 1024, "answers": 64, "epochs": 4,
        "max_new_tokens": 32_768, "learning_rate": 1e-7, "kl": 0.04, "clip_high": 100.0,
        "max_grad_norm": 1e6, "weight_decay": 0.1, "eval_tasks": 50_000, "steps": 10_000,
        "seed": 20_261_121, "micro_batch": 512})


def test_settled_in_the_order_of_the_flags():
    """Without the first the second has no effect, and so the third has none. A whole number becomes
    one with a point where that is the type."""
    chain = {"first": Flag(0), "second": Flag(0, requires=(lambda s: s.first > 0, "--first")),
             "third": Flag(0, requires=(lambda s: s.second > 0, "--second")), "rate": Flag(0.5)}
    usual = {"second": 3, "third": 7, "rate": 1}
    assert settle({}, chain, usual) == {"first": 0, "second": 0, "third": 0, "rate": 1}
    assert settle({"first": "1"}, chain, usual) == {"first": 1, **usual}
    assert type(settle({}, chain, usual)["rate"]) is float


def write(path, values: dict):
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def own_choices(monkeypatch):
    """Whoever registers choices in a test leaves none behind."""
    for choices in (MITIGATIONS, ADVANTAGES):
        assert all(choices[name] for name in choices)  # a module says its methods once: imported
        monkeypatch.setattr(choices, "data", dict(choices.data))
        monkeypatch.setattr(choices, "clashes", [])


def settings_of(argv: list[str]):
    return make_settings(read_flags(argv))


@pytest.mark.parametrize("recipe, config, argv, expected", [
    # typed wins over the file, that over the model's recipe, that over the default
    (COUNTDOWN, {"steps": 8, "seed": 4}, "--seed 9",
     dict(seed=9, steps=8, questions=5, answers=8, max_number=15)),
    # the task is known before the other flags are read: typed, of a file, of the recipe
    (COUNTDOWN, {"task": GUESS, "tries": 4}, "--highest 9",
     dict(tries=4, highest=9, max_number=ABSENT)),
    ({}, {}, f"--tries 2 --task={GUESS}", dict(tries=2)),
    ({"task": GUESS, "tries": 2}, {}, "--highest 9",
     dict(task=GUESS, tries=2, highest=9)),
    # of a file, flags of another task, weighting or advantage than the chosen one stay behind
    (COUNTDOWN, {"task": GUESS, "tries": 4, "steps": 3}, "--task countdown_task",
     dict(tries=ABSENT, max_number=15, steps=3)),
    (COUNTDOWN, {}, f"--task {GUESS}", dict(max_number=ABSENT, tries=3, steps=7)),
    ({}, AS_PUBLISHED, "", dict(epsilon=3.0, rescale="none")),
    ({"rescale": "mean"}, {}, "--mitigation inverse_logprob_as_published", dict(rescale="none")),
    ({}, {"advantage": "gae", "gamma": 0.5}, "", dict(gamma=0.5)),
    ({}, {"kl": 1, "git_commit": None}, "", dict(kl=1.0, git_commit=ABSENT))])
def test_where_a_value_comes_from(tmp_path, recipe, config, argv, expected):
    """Also where the file names the model, whose recipe is then taken."""
    write(tmp_path / "recipe.json", recipe)
    for in_file, typed in (({}, ["--model", str(tmp_path)]), ({"model": str(tmp_path)}, [])):
        file = write(tmp_path / "c.json", config | in_file)
        found = settings_of([*typed, "--config", file, *argv.split()]).to_json()
        assert {name: found.get(name, ABSENT) for name in expected} == expected


class OtherGuess(guess.Task):
    """A task that extends another one."""


def test_a_task_that_extends_another_one_takes_its_flags(monkeypatch, tmp_path):
    """From the file of a run of that task."""
    module = "my_task_that_extends"
    loaded = {GUESS: guess.Task, module: OtherGuess, "countdown_task": Task}
    monkeypatch.setattr("lab.harness.settings.load_task", loaded.get)
    config = write(tmp_path / "c.json", {"task": GUESS, "tries": 4})
    assert settings_of(["--config", config, "--task", module]).keywords["tries"] == 4


def test_a_flag_of_the_files_method_is_not_that_of_another_with_its_name(own_choices, tmp_path):
    """Two methods may have flags of one name, which mean different things."""
    for name in ("mine", "other"):
        MITIGATIONS.data[name] = method_with("power", name)
    config = write(tmp_path / "c.json", {"mitigation": "mine", "power": 5})
    for name, power in (("mine", 5), ("other", 1)):
        found = settings_of(["--config", config, "--mitigation", name])
        assert found.keywords["power"] == power


@pytest.mark.parametrize("recipe, config, typed, words", [
    ({}, {"nonsense": 1}, "", "c.json has the unknown setting nonsense"),
    ({}, {"task": []}, "", "--task []: should be a text"),
    ({}, {"steps": 1.5}, "", "should be a whole number"),
    ({}, {"gamma": 0.9}, "", "c.json has the unknown setting gamma"),
    ({}, {"mitigation": "removed", "its_flag": 3}, "--mitigation none", "removed is neither a"),
    ({}, {"advantage": "dpo", "pairs": ""}, "", "python examples/dpo.py --resume RUN goes on with"),
    # a value is checked before it is used, even if what was typed replaces it
    ({"learning_rate": None}, {}, "--lora 4", "--learning_rate None: should be a finite number"),
    ({"mitigation": ["none"]}, {}, "--mitigation none", "--mitigation ['none']: should be a text")])
def test_what_a_file_may_not_hold(tmp_path, monkeypatch, recipe, config, typed, words):
    # a test of the example may have been imported in this process
    monkeypatch.delitem(grpo.ADVANTAGES, "dpo", raising=False)
    write(tmp_path / "recipe.json", recipe)
    config = write(tmp_path / "c.json", config)
    assert words in refusal(settings_of, ["--model", str(tmp_path), "--config", config,
                                          *typed.split()])


def method_with(keyword, name="mine"):
    """A weighting with this keyword."""
    def mine(rollouts, **_):
        """Weights."""
    parameter = inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=1)
    mine.__signature__, mine.__name__ = inspect.Signature([parameter]), name
    return mine


@pytest.mark.parametrize("name", ["seed", "max_number", "reward", "help", "step", "gamma"])
def test_a_flag_has_one_meaning(own_choices, name):
    """Settings, flags of the task or the other method, entries of config.json: a keyword may be
    none of them. To be there without being chosen does no harm."""
    MITIGATIONS.data["mine"] = method_with(name)
    said = refusal(settings_of, ["--mitigation", "mine", "--advantage", "gae"])
    owner = "gae" if name == "gamma" else "mine"
    assert said.startswith(f"the keyword {name} of {owner} (") and ".py:" in said
    assert f"another name, for example {owner}_{name}" in said
    assert settings_of(["--seed", "3"]).seed == 3


def test_a_flag_belongs_to_its_method(own_choices):
    MITIGATIONS.data["mine"] = method_with("power")
    assert settings_of(["--mitigation", "mine", "--power", "2"]).keywords["power"] == 2
    said = refusal(settings_of, ["--power", "2"])
    assert said == "--power is a flag of --mitigation mine (--help all lists the flags)"


def seed(rollouts, *, seed: int = 1):
    """Weights."""


@pytest.mark.parametrize("name, module", [
    ("causal_ablation", "lab.credit.causal_ablation"), ("grpo", "grpo"), ("grpo", __name__)])
def test_a_method_takes_no_other_methods_name(name, module):
    """Whichever comes first; until it is chosen, its module stands for a method."""
    first = seed if module == __name__ else module
    for one, other in ((first, seed), (seed, first)):
        choices = Choices({name: one})
        choices[name] = other
        assert choices.data[name] is one and choices.clashes == [(name, one, other)]


def test_two_methods_of_one_name_are_told_by_their_lines(own_choices, tmp_path, monkeypatch):
    """When the flags are read, whichever they are. Where a file is imported it would be a
    traceback."""
    text = "from lab.engine.methods import advantage\n" + 2 * (
        "\n\n@advantage\ndef my_idea(rollouts):\n    return rollouts.log_prob\n")
    file = tmp_path / "made_twice.py"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("made_twice")
    assert refusal(settings_of, ["--advantage", "rloo"]) == (
        f"there are two my_idea, {file}:4 and {file}:9: one needs another name")


def test_help_has_every_flag_and_every_method_with_its_flags(capsys, own_choices, tmp_path):
    @mitigation
    def late(rollouts, *, power: Positive = 2.0):
        """
        Words below, 100%.

        More of them.
        """

    def help_of(*topic):
        with pytest.raises(SystemExit):
            read_flags(["--model", str(tmp_path), "--config", config, "--help", *topic])
        return capsys.readouterr().out

    write(tmp_path / "recipe.json", COUNTDOWN)
    config = write(tmp_path / "c.json", {"steps": 8})
    printed = help_of("all")
    assert help_of() == printed
    assert all(f"\n  --{name} " in printed for name in flags_of(LabSettings) | flags_of(Task))
    for name in (*MITIGATIONS, *ADVANTAGES):
        assert re.search(f"[ \n]{name}(,|\n)", printed), name
    text = " ".join(printed.split())
    for name, value in (("questions", 5), ("steps", 8), ("answers", 8)):  # recipe, file, default
        assert re.search(rf"--{name} \w+ [^()]*\(default {value}[;)]", text), name
    assert help_of("late") == (
        "usage: python -m lab train --mitigation late [flags]\n\nWords below, 100%.\n\nMore of "
        "them.\n\noptions:\n  --power float  of late (default 2.0)\n")
    assert help_of("lora").startswith("--lora: LoRA: train an addition of this rank")
    assert "--help latex: there is no method" in refusal(read_flags, ["--help", "latex"])


@pytest.mark.parametrize("argv, said", [
    ("--mitigation entropy_maskin", "Did you mean entropy_masking?"),
    ("--tries 2", "unknown argument --tries"), ("--model=", "--model needs a value"),
    ("--steps 2 stray", "unknown argument stray"),
    ("--config x.yaml", "--config x.yaml: settings are JSON here"),
    ("--confg x", "unknown argument --confg. Did you mean config?"),
    ("--max_completion_length 9", "Did you mean max_new_tokens?"),
    ("--num_epochs 3", "Training is --steps long. --epochs is"), ("--bf16", "--dtype bfloat16"),
    ("--task my_tsk", "there is no such file"), ("--task ../my_task", "there is no such file"),
    ("--task my_tsk.py", "there is no such file"),
    (f"--task {json.__file__}", f"this file lies outside of {ROOT}"),
    ("--task examples.own_reward --reward_form right", "unknown argument --reward_form"),
    ("--mitigation inverse_logprob_as_published --rescale mean",
     "--rescale has no effect without a --mitigation whose weights are rescaled"),
    ("--placebo weights",
     "no effect without a --mitigation other than none, whose weights can be shuffled"),
    ("--data x.jsonl --max_number 9",
     "no effect without generated problems, which --data replaces"),
    ("--clip_low 0.3", "--clip_low has no effect without --epochs above 1"),
    # limits of the book's flags that the book has not
    ("--mitigation outcome_conditional --think_discount -0.5", "at least 0"),
    ("--mitigation inverse_logprob --epsilon -0.5", "at least 0"),
    ("--mitigation entropy_masking --mask_percentile 120", "at most 100"),
    ("--learning_rate 100", "at most 10"),
    ("--mitigation rloo", "rloo is a value of --advantage, and not of --mitigation"),
    ("--advantage none", "none is a value of --mitigation, and not of --advantage")])
def test_a_flag_that_is_wrong_or_without_effect_is_refused(argv, said):
    assert said in refusal(settings_of, argv.split())


@pytest.mark.parametrize("argv", [
    *(f"--{name} {number}" for name, number in [*flags.LEAST.items(), *flags.MOST.items()]),
    "--learning_rate 0", "--seed 1000000000000", "--mitigation equal_gradient --epsilon 0",
    "--mitigation outcome_conditional --think_discount 2",
    "--mitigation entropy_weighted --entropy_temp -1"])
def test_what_the_book_trains_with_the_tools_of_the_lab_can_read(argv, tmp_path):
    settings = book.read_settings(argv.split())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({name: value for name, value in (
        vars(settings) | settings.keywords).items() if name not in book.NO_SETTING}))
    read = make_settings({"config": str(config)}).to_json()
    assert read["learning_rate"] == settings.learning_rate and read["seed"] == settings.seed
    assert read.items() >= settings.keywords.items()


def test_what_is_said_of_the_flags_of_other_programs_names_flags_of_ours():
    ours = {*OPTIONS, *flags_of(Task), *try_task.FLAGS}
    named = {*ELSEWHERE.values(), *re.findall(r"--(\w+)", " ".join(INSTEAD.values()))}
    assert named <= {*ours, *flags_of(MITIGATIONS["entropy_masking"])}
    assert not ours & {*ELSEWHERE, *INSTEAD}


def test_a_value_that_would_hold_anyway_may_be_typed():
    typed = "--clip_low 0.2 --rescale mean --placebo none --kl_kind k3"
    assert settings_of(typed.split()).to_json() == settings_of([]).to_json()


@pytest.mark.parametrize("argv, name", [
    ("--learning_rate 0.00015", "none-grpo-learning_rate0.00015-s0"),
    ("--task examples.guess --highest 9", "none-grpo-examples.guess-highest9-s0"),
    (f"--highest 9 --task {guess.__file__}", "none-grpo-examples.guess-highest9-s0"),
    ("--max_number 9 --steps 30 --kl 0.1 --seed 2", "none-grpo-kl0.1-steps30-max_number9-s2"),
    ("--mitigation entropy_masking --mask_percentile 70 --rescale none --placebo weights",
     "entropy_masking-grpo-rescalenone-placeboweights-mask_percentile70.0-s0"),
    ("--model models/Bare-0.5B --lora 1", "none-grpo-Bare-0.5B-lora1-s0"),
    ("--data x/problems.jsonl", "none-grpo-dataproblems.jsonl-s0"),
    # how a run is made is not what it is
    ("--threads 3 --micro_batch 2 --checkpoint_every 7", "none-grpo-s0")])
def test_what_was_typed_is_in_the_folders_name(argv, name):
    assert settings_of(argv.split()).folder.name == name


@pytest.mark.parametrize("flags, unpaid", [
    ({}, []), ({"reward_form": "graded", "reasoning_weight": 0.5}, []),
    ({"reward_form": "graded", "reasoning_weight": 0.0}, ["the reasoning"]),
    ({"reward_form": "right", "reasoning_weight": 0.0}, ["the format", "the reasoning"])])
def test_the_parts_that_a_reward_leaves_out_are_known(flags, unpaid):
    """`span` pays them all the same, and a run says so."""
    assert unpaid_parts(flags) == unpaid


@pytest.mark.parametrize("task", ["examples/own_reward", "examples/own_reward.py"])
def test_a_task_may_be_named_as_a_file(task, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert settings_of(["--task", task]).task == "examples.own_reward"
