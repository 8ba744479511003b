"""Settings: where a value comes from, and what a task or a choice of one's own brings along."""
import json
import sys

import pytest
import torch

import train
from harness.command_line import asked_task, read_flags
from engine.errors import UserError
from harness.files import PROJECT, find_folder
from harness.flags import Positive, parameters_as_flags
from harness.registry import ADVANTAGES, MITIGATIONS, WHOLE_ANSWERS, advantage, mitigation
from harness.resume import what_differs
from harness.settings import make_settings
from harness.tasks import make_task

DESCENDING = "tools.descending"


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
    assert settings.own["max_number"] == 15


def test_the_task_is_known_before_the_other_flags_are_read(tmp_path, model):
    config = write(tmp_path / "c.json", {"task": DESCENDING, "count": 4})
    assert asked_task(["--count", "5", f"--task={DESCENDING}"]) == DESCENDING
    assert asked_task(["--config", config]) == DESCENDING
    assert asked_task(["--config", config, "--task", "countdown_task"]) == "countdown_task"
    assert asked_task(["--seed", "1"]) == "countdown_task"
    assert settings_of(["--model", model, "--config", config, "--largest", "9"]).own == {
        "count": 4, "largest": 9}
    with pytest.raises(UserError, match=f"--count is no flag .* belongs to --task {DESCENDING}$"):
        read_flags(["--count", "5"])
    with pytest.raises(UserError, match=f"--max_number is no flag of --task {DESCENDING}"):
        make_settings({"task": DESCENDING, "max_number": 5})


def test_paths_that_were_typed_hold_from_another_directory(tmp_path, model, monkeypatch):
    """A run started here by relative paths finds the same files when it is resumed elsewhere."""
    problems = [{"nums": [2, 3, number], "target": 5 + number} for number in range(1, 60)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    started = settings_of(["--model", "model/", "--data", "./problems.jsonl"])
    assert (started.steps, started.model) == (7, model)  # 7 is in the recipe of that folder
    config = write(tmp_path / "c.json", started.to_json())
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = settings_of(["--config", config])
    assert resumed == started and find_folder(resumed.model).samefile(tmp_path / "model")
    task = make_task(resumed)
    assert len(task.to_train) + len(task.to_test) == 59


@pytest.mark.parametrize("place, typed, kept", [
    (PROJECT, "models/tiny", "models/tiny"), (PROJECT, "models/tiny/", "models/tiny"),
    (PROJECT / "models", "tiny", "models/tiny"), (PROJECT / "models", "../models/tiny",
                                                  "models/tiny"),
    (PROJECT, str(PROJECT / "models/tiny"), str(PROJECT / "models/tiny")),
    (PROJECT / "models" / "tiny", "../..", str(PROJECT)), ("/", "models/tiny", "models/tiny"),
    ("/", "nowhere/at/all", "nowhere/at/all")])
def test_a_typed_path_is_kept_relative_to_the_project_or_absolute(monkeypatch, place, typed, kept):
    monkeypatch.chdir(place)
    assert make_settings({"model": typed}).model == kept
    assert find_folder(kept).absolute() == (find_folder(typed) / ".").resolve()


def test_a_path_of_a_file_stays_as_it_stands(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path / "c.json", {"model": "model"})
    assert settings_of(["--config", config]).model == "model"


def test_data_that_ships_is_found_from_any_directory(tmp_path, monkeypatch):
    """Looked up like a model: as it was typed, or else in the project's folder."""
    (tmp_path / "project").mkdir()
    lines = [json.dumps({"nums": [2, 3, n], "target": 5 + n}) for n in range(1, 60)]
    (tmp_path / "project" / "problems.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("harness.files.PROJECT", tmp_path / "project")
    monkeypatch.chdir(tmp_path)
    settings = make_settings({"data": "problems.jsonl"})
    assert settings.own["data"] == "problems.jsonl"
    assert len(make_task(settings).to_train) > 30


def test_a_recipe_can_name_the_task(tmp_path, model):
    write(tmp_path / "model" / "recipe.json", {"task": DESCENDING, "count": 5})
    settings = settings_of(["--model", model, "--largest", "9"])
    assert settings.task == DESCENDING and settings.own == {"count": 5, "largest": 9}


def test_flags_of_the_task_of_a_file_stay_with_it(tmp_path, model):
    config = write(tmp_path / "c.json", {"task": DESCENDING, "count": 4, "steps": 3})
    other = settings_of(["--model", model, "--config", config, "--task", "countdown_task"])
    assert "count" not in other.own and (other.own["max_number"], other.steps) == (15, 3)
    other = settings_of(["--model", model, "--task", DESCENDING])
    assert other.own == {"count": 3, "largest": 15} and other.steps == 7


def test_a_flag_that_two_tasks_have_is_not_passed_on(tmp_path, model, monkeypatch):
    (tmp_path / "other_task.py").write_text(
        "from dataclasses import dataclass\nfrom harness.flags import option\n\n\n"
        "@dataclass\nclass Task:\n    max_number: int = option(3, '')\n")
    (tmp_path / "countdown_task.py").touch()  # imported already
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = write(tmp_path / "c.json", {"max_number": 20})
    settings = settings_of(["--model", model, "--config", config, "--task", "other_task"])
    assert settings.own == {"max_number": 3}  # neither 20 nor the recipe's 15
    sys.modules.pop("other_task")


def test_a_config_from_before_there_were_tasks_is_one_of_countdown(tmp_path, model):
    config = write(tmp_path / "c.json", {"max_number": 20, "gamma": 1.0, "values_k": 9,
                                         "values_every": "line", "advantage": "gae",
                                         "mitigation": "none", "gae_lambda": 0.5, "ranks": 1})
    settings = settings_of(["--model", model, "--config", config])
    assert settings.task == "countdown_task" and settings.own["max_number"] == 20
    assert settings.own["gae_lambda"] == 0.5 and "values_k" not in settings.own


@pytest.mark.parametrize("name, words", [
    ("nope", "no such module"), ("tools/descending", "is the module tools.my_task"),
    ("/", "no such module"), ("", "no such module"), ("tools.warmup", "no class Task of its own")])
def test_a_task_that_is_none_is_refused(name, words):
    with pytest.raises(UserError, match=f"^--task {name}: .*{words}"):
        read_flags(["--task", name])


def test_a_file_may_not_hold_what_is_no_setting(tmp_path, model):
    for values, words in (({"nonsense": 1}, "c.json has the unknown setting nonsense"),
                          ({"count": 4}, "c.json has the unknown setting count"),
                          ({"task": []}, r"--task \[\] should be a text"),
                          ({"steps": 1.5}, "--steps 1.5 should be a whole number")):
        with pytest.raises(UserError, match=words):
            settings_of(["--model", model, "--config", write(tmp_path / "c.json", values)])


def test_flags_of_another_advantage_stay_with_it(tmp_path, model, own_choices):
    @advantage
    class mine:
        def __init__(self, policy, *, gamma: Positive = 0.25):
            pass

    config = write(tmp_path / "c.json", {"advantage": "gae", "gamma": 0.5})
    assert settings_of(["--model", model, "--config", config]).own["gamma"] == 0.5
    other = settings_of(["--model", model, "--config", config, "--advantage", "mine"])
    assert other.own["gamma"] == 0.25
    unnamed = write(tmp_path / "d.json", {"gamma": 0.5})
    settings = settings_of(["--model", model, "--config", unnamed, "--advantage", "gae"])
    assert settings.own["gamma"] == 0.5


def test_a_flag_has_one_meaning(own_choices):
    @mitigation
    def heavy(tokens, *, power: int = 1):
        """Weights."""

    @advantage
    def signed(tokens, *, power: int = 1):
        """Credit."""

    with pytest.raises(UserError, match="power of heavy needs another name: --power is taken"):
        read_flags([])
    del ADVANTAGES["signed"]
    read_flags([])

    @advantage
    def sized(tokens, *, count: int = 1):
        """Credit."""

    read_flags([])
    with pytest.raises(UserError, match="count of sized needs another name: --count is taken"):
        read_flags(["--task", DESCENDING])


def test_a_field_of_a_task_cannot_take_the_name_of_a_setting(tmp_path, monkeypatch):
    (tmp_path / "taken_task.py").write_text(
        "from dataclasses import dataclass\nfrom harness.flags import option\n\n\n"
        "@dataclass\nclass Task:\n    seed: int = option(3, '')\n")
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "countdown_task.py").touch()  # the default task, imported already
    with pytest.raises(UserError, match="field seed of the Task in taken_task .*--seed is taken"):
        read_flags(["--task", "taken_task"])
    sys.modules.pop("taken_task")


def test_help_shows_a_choice_without_words_and_one_with_an_empty_first_line(capsys, own_choices):
    @mitigation
    def silent(tokens):
        "   "

    @mitigation
    def late(tokens, *, power: Positive = 2.0):
        """
        Words below.
        """

    with pytest.raises(SystemExit):
        read_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "silent (no docstring)" in text and "late Words below." in text
    assert "--power (default 2.0, above 0, at most 1e+06)" in text


def test_an_advantage_of_ones_own_is_a_choice_with_flags_from_the_command_to_the_record(
        learner, tmp_path, monkeypatch, own_choices):
    strengths = []

    @advantage
    def mine(tokens, *, strength: Positive = 1.0):
        """Only the first token."""
        strengths.append(strength)
        credit = torch.zeros_like(tokens.log_prob)
        credit[:, 0] = strength * (tokens.reward - tokens.reward.mean())
        return credit

    monkeypatch.chdir(tmp_path)
    argv = ["--model", str(learner), "--advantage", "mine", "--strength", "2", "--steps", "1",
            "--eval_every", "0", "--checkpoint_every", "0"]
    train.main(argv)
    assert strengths == [2.0]
    [folder] = tmp_path.glob("runs/learner*-none-mine-strength2.0-steps1-eval_every0-s0")
    config = json.loads((folder / "config.json").read_text())
    assert (config["advantage"], config["strength"]) == ("mine", 2.0) and "gamma" not in config
    assert what_differs(settings_of(argv)) == ""
    with pytest.raises(UserError, match="--strength belongs to mine, --advantage is grpo"):
        settings_of(["--strength", "2"])
    assert list(parameters_as_flags(ADVANTAGES["mine"])) == ["strength"]


def test_a_run_from_before_a_setting_existed_had_its_default(learner, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    settings = settings_of(["--model", str(learner), "--advantage", "gae", "--out", str(folder)])
    config = settings.to_json()
    for name in ("task", "weight_decay", "gae_lambda"):
        del config[name]
    write(folder / "config.json", config)
    assert what_differs(settings) == ""
    settings.weight_decay = 0.5
    assert what_differs(settings) == ", with weight_decay 0.0 instead of 0.5:"
    settings.weight_decay, settings.own["gae_lambda"] = 0.0, 0.5
    assert what_differs(settings) == ", with gae_lambda 1.0 instead of 0.5:"
