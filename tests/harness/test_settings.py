"""Settings: where a value comes from, and what a task or a choice of one's own brings along."""
import argparse
import json
import re

import pytest

from conftest import refusal
from engine.choices import (ADVANTAGES, MITIGATIONS, WHOLE_ANSWERS, Choices, advantage,
                            mitigation)
from engine.errors import UserError
from harness.command_line import read_flags
from harness.help import FIRST_DAY
from harness.flags import Positive
from harness.settings import OPTIONS, make_settings

LARGEST_LAST = "tools.largest_last"


def write(path, values: dict):
    path.write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def model(tmp_path):
    """A model folder as far as settings look into it: a recipe for Countdown."""
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "recipe.json", {"max_number": 15, "steps": 7, "questions": 5})
    return str(tmp_path / "model")


@pytest.fixture
def own_choices():
    """Whoever registers choices in a test leaves none behind."""
    before = dict(MITIGATIONS), dict(ADVANTAGES), set(WHOLE_ANSWERS)
    yield
    for registry, content in zip((MITIGATIONS, ADVANTAGES, WHOLE_ANSWERS), before):
        registry.clear()
        registry.update(content)


def settings_of(argv: list[str]):
    return make_settings(read_flags(argv))


def test_typed_wins_over_config_over_recipe_over_default(tmp_path, model):
    config = write(tmp_path / "c.json", {"steps": 8, "seed": 4})
    settings = settings_of(["--model", model, "--config", config, "--seed", "9"])
    assert (settings.seed, settings.steps, settings.questions, settings.answers) == (9, 8, 5, 8)
    assert settings.method_flags["max_number"] == 15


@pytest.mark.parametrize("flags, dtype", [
    ([], "float32"), (["--device", "cuda:1"], "bfloat16"),
    (["--device", "cuda", "--dtype", "float32"], "float32")])
def test_on_a_gpu_a_large_model_is_computed_in_bfloat16(tmp_path, model, flags, dtype):
    """One without a recipe; where there is one, a model as small as the one that is shipped."""
    assert settings_of(["--model", str(tmp_path), *flags]).dtype == dtype
    assert settings_of(["--model", model, "--device", "cuda"]).dtype == "float32"


def test_the_task_is_known_before_the_other_flags_are_read(tmp_path, model):
    """Of what is typed, of a file, or of the model's recipe."""
    config = write(tmp_path / "c.json", {"task": LARGEST_LAST, "count": 4})
    assert settings_of(["--model", model, "--config", config, "--largest", "9"]).method_flags == {
        "count": 4, "largest": 9}
    assert settings_of(["--count", "5", f"--task={LARGEST_LAST}"]).method_flags["count"] == 5
    write(tmp_path / "model" / "recipe.json", {"task": LARGEST_LAST, "count": 5})
    settings = settings_of(["--model", model, "--largest", "9"])
    assert settings.task == LARGEST_LAST and settings.method_flags == {"count": 5, "largest": 9}
    with pytest.raises(UserError, match="^unknown argument --count"):
        read_flags(["--count", "5"])
    with pytest.raises(UserError, match=f"^--max_number is no flag of --task {LARGEST_LAST}$"):
        make_settings({"task": LARGEST_LAST, "max_number": 5})


@pytest.mark.parametrize("argv, defaults", [
    ([], {"questions": "16", "max_new_tokens": "80", "learning_rate": "0.00025"}),
    (["--model", "MODEL"], {"questions": "5", "steps": "7", "answers": "8"}),
    (["--model", "MODEL", "--config", "FILE"], {"questions": "5", "steps": "8", "answers": "8"})])
def test_help_shows_what_the_command_would_use(tmp_path, model, capsys, argv, defaults):
    named = {"MODEL": model, "FILE": write(tmp_path / "c.json", {"steps": 8})}
    with pytest.raises(SystemExit):
        read_flags([*(named.get(word, word) for word in argv), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, value in defaults.items():
        assert re.search(rf"--{name} \w+ [^()]*\(default {value}\)", shown), name


def test_flags_of_the_task_of_a_file_stay_with_it(tmp_path, model):
    config = write(tmp_path / "c.json", {"task": LARGEST_LAST, "count": 4, "steps": 3})
    other = settings_of(["--model", model, "--config", config, "--task", "countdown_task"])
    assert "count" not in other.method_flags
    assert (other.method_flags["max_number"], other.steps) == (15, 3)
    other = settings_of(["--model", model, "--task", LARGEST_LAST])
    assert other.method_flags == {"count": 3, "largest": 15} and other.steps == 7


def test_a_flag_of_a_file_that_names_no_method_says_whose_it_is(tmp_path, model):
    config = write(tmp_path / "c.json", {"gamma": 0.9})
    with pytest.raises(UserError, match="--gamma belongs to gae, --advantage is grpo"):
        settings_of(["--model", model, "--config", config])
    chosen = settings_of(["--model", model, "--config", config, "--advantage", "gae"])
    assert chosen.method_flags["gamma"] == 0.9


def test_a_config_from_before_there_were_tasks_is_one_of_countdown(tmp_path, model):
    config = write(tmp_path / "c.json", {"max_number": 20, "gamma": 1.0, "values_k": 9,
                                         "values_every": "line", "advantage": "gae",
                                         "mitigation": "none", "gae_lambda": 0.5, "ranks": 1})
    settings = settings_of(["--model", model, "--config", config])
    assert settings.task == "countdown_task" and settings.method_flags["max_number"] == 20
    assert settings.method_flags["gae_lambda"] == 0.5 and "values_k" not in settings.method_flags


def test_a_file_may_not_hold_what_is_no_setting(tmp_path, model):
    for values, words in (({"nonsense": 1}, "c.json has the unknown setting nonsense"),
                          ({"count": 4}, "c.json has the unknown setting count"),
                          ({"task": []}, r"--task \[\]: there is no such module"),
                          ({"steps": 1.5}, "--steps 1.5 should be a whole number")):
        with pytest.raises(UserError, match=words):
            settings_of(["--model", model, "--config", write(tmp_path / "c.json", values)])


def test_flags_of_another_advantage_stay_with_it(tmp_path, model, own_choices):
    @advantage
    class mine:
        def __init__(self, policy, *, gamma: Positive = 0.25):
            pass

    config = write(tmp_path / "c.json", {"advantage": "gae", "gamma": 0.5})
    assert settings_of(["--model", model, "--config", config]).method_flags["gamma"] == 0.5
    other = settings_of(["--model", model, "--config", config, "--advantage", "mine"])
    assert other.method_flags["gamma"] == 0.25
    unnamed = write(tmp_path / "d.json", {"gamma": 0.5})
    settings = settings_of(["--model", model, "--config", unnamed, "--advantage", "gae"])
    assert settings.method_flags["gamma"] == 0.5


def seed(rollouts, *, seed: int = 1):
    """Weights."""


def epsilon(rollouts, *, epsilon: float = 1.0):
    """Credit."""


def test_a_flag_has_one_meaning(own_choices):
    MITIGATIONS["mine"], ADVANTAGES["mine"] = seed, epsilon
    for chosen in ["--mitigation", "mine"], ["--advantage", "mine", "--mitigation", "inverse_logprob"]:
        with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
            read_flags(chosen)


@pytest.mark.parametrize("choices, name, module", [
    (MITIGATIONS, "oracle", "credit.measured"), (ADVANTAGES, "measured", "credit.measured"),
    (ADVANTAGES, "grpo", "grpo")])
def test_a_method_takes_no_other_methods_name(choices, name, module):
    """Whichever comes first; until it is chosen, its module stands for a method."""
    words = f"{name} of {' and '.join(sorted((module, __name__)))}: one needs another name"
    assert refusal(choices.update, {name: seed}) == words
    assert refusal(Choices({name: seed}).update, {name: module}) == words
    assert choices[name].__module__ == module


def test_a_notebooks_cell_may_define_its_method_again(own_choices):
    for strength in 1, 2:
        @mitigation
        def idea(rollouts, strength=strength):
            """Weights."""
    assert MITIGATIONS["idea"] is idea


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
    (["--mitigation", "entropy_maskin"],
     "--mitigation entropy_maskin is not one of: entropy_masking, "),
    (["--mitigation", "my_idea", "--strength", "2"], "--mitigation my_idea is not one of: "),
    (["--think_discount", "0.5"],
     "--think_discount belongs to outcome_conditional, --mitigation is none"),
    (["--gamma=0.9"], "--gamma belongs to gae, --advantage is grpo"),
    (["--mitigation", "entropy_masking", "--mask_percentile", "120"],
     "--mask_percentile 120.0 should be at most 100"),
    (["--mitigation", "inverse_logprob_as_published", "--rescale", "mean"],
     "--rescale mean has no effect on inverse_logprob_as_published: it is never rescaled"),
    (["--placebo", "weights"], "--placebo weights has no effect on --mitigation none"),
    (["--rescale", "gradient"], "--rescale gradient has no effect on --mitigation none"),
    (["--data", "x.jsonl", "--max_number", "9"],
     "--max_number has no effect without made problems: not with --data"),
    (["--eval_every", "0", "--eval_tasks", "9"],
     "--eval_tasks has no effect without --eval_every above 0"),
    (["--advantage", "gae", "--trunk_lr", "1e-3"],
     "--trunk_lr has no effect without --critic trunk"),
    (["--clip_low", "0.2"], "--clip_low has no effect without --epochs above 1"),
    (["--kl_kind", "k2"], "no effect without --kl above 0"),
    (["--loss", "dpo", "--mitigation", "random"], "--mitigation random has no effect on --loss d"),
    (["--loss", "dpo", "--advantage", "rloo"], "--advantage rloo has no effect on --loss dpo"),
    (["--loss", "dpo", "--kl", "0.1"], "--kl has no effect without --loss policy"),
    (["--loss", "dpo", "--rescale", "none"], "--rescale has no effect without --loss policy"),
    (["--loss", "dpo", "--epochs", "2"], "--epochs 2: --loss dpo has one update a batch"),
    (["--pairs", "x.jsonl"], "--pairs has no effect without --loss dpo"),
    (["--loss", "dpo", "--pairs", "x.jsonl", "--answers", "4"], "has no effect on --pairs")])
def test_a_flag_without_effect_is_refused_if_it_was_typed(argv, said):
    assert said in refusal(settings_of, argv)


def test_in_a_file_what_has_no_effect_is_set_back(tmp_path, model):
    """Also where one thing follows from another: --pairs goes with dpo, and the server with it."""
    config = write(tmp_path / "c.json", {
        "mitigation": "inverse_logprob_as_published", "epsilon": 3.0, "rescale": "none",
        "loss": "dpo", "pairs": "x.jsonl", "rollouts": "http://127.0.0.1:1", "rollouts_every": 4})
    s = settings_of(["--model", model, "--config", config])
    assert (s.mitigation, s.rescale, s.answers) == ("none", "mean", 2)
    assert "epsilon" not in s.method_flags
    assert (s.rollouts, s.rollouts_every) == ("own", 1)
    s = settings_of(["--model", model, "--config", config, "--loss", "policy"])
    assert (s.pairs, s.answers, s.rollouts_every) == (None, 8, 4)


def test_flags_of_a_run_stay_with_its_mitigation(tmp_path):
    first = make_settings({"mitigation": "inverse_logprob_as_published", "epsilon": 3.0})
    config = write(tmp_path / "a.json", first.to_json())
    again = make_settings({"config": config})
    assert again.method_flags["epsilon"] == 3.0 and again.rescale == "none"
    other = make_settings({"config": config, "mitigation": "equal_gradient"})
    assert other.method_flags["epsilon"] == 0.1 and other.rescale == "mean"
