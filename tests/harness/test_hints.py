"""What a person types who comes from another library, and the commands that messages tell."""
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import train
from conftest import ROOT
from harness import hints
from harness.command_line import read_flags
from engine.errors import UserError
from harness.files import PROJECT
from harness.hints import HINTS, about_missing_model, hint_for, python_command
from harness.registry import choice_flags
from harness.settings import OPTIONS, make_settings


def said_of(*argv):
    """The sentence that a wrong command line gets."""
    with pytest.raises(UserError) as error:
        make_settings(read_flags(list(argv)))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("argv, flag", [
    (["--lr", "1e-3"], "--learning_rate here"), (["--num-generations=8"], "--answers"),
    (["--beta", "0.1"], "--kl "), (["--max_completion_length", "9"], "--max_new_tokens"),
    (["--per_device_train_batch_size", "9"], "--micro_batch"), (["--bf16"], "--dtype"),
    (["--gradient_accumulation_steps", "9"], "--micro_batch"), (["--num_iterations", "2"],
                                                               "--epochs"),
    (["--epsilon_high", "0.3"], "--clip_high here"), (["--loss_type", "dapo"], "--loss_norm"),
    (["--scale_rewards"], "--advantage"), (["--max_steps", "9"], "--steps"),
    (["--eval_steps", "9"], "--eval_every"), (["--save_steps", "9"], "--checkpoint_every"),
    (["--output_dir", "x"], "--out"), (["--model_name_or_path", "x"], "--model"),
    (["actor_rollout_ref.rollout.n=5"], "--answers"), (["-lr", "3"], "--learning_rate"),
    (["+actor_rollout_ref.actor.optim.lr=3"], "--learning_rate"), (["+lr=3"], "--learning_rate")])
def test_a_name_from_another_library_is_told_the_one_here(argv, flag):
    said = said_of(*argv)
    assert f" is called {flag}" in said


def test_a_name_that_a_mitigation_has_too_is_told_both():
    said = said_of("--epsilon", "0.2")
    assert "--epsilon belongs to inverse_logprob" in said and "--clip_low" in said
    assert make_settings({"mitigation": "inverse_logprob", "epsilon": 0.2}).own["epsilon"] == 0.2
    assert "elsewhere" not in said_of("--gamma", "0.5")


def test_the_table_of_names_holds_no_flag_and_tells_only_flags():
    flags = {*OPTIONS, *choice_flags(), "data", "resume"}
    assert flags & set(HINTS) == {"epsilon"}
    for named in HINTS.values():
        assert set(re.findall(r"--(\w+)", named)) <= flags, named


def test_other_unknown_arguments_are_no_names_of_other_libraries():
    assert hint_for("--lerning_rate") == hint_for("stray") == hint_for("--") == hint_for("=") == ""
    assert said_of("n") == "unknown argument n"


def test_a_model_of_the_hub_is_told_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(hints, "program", lambda name: name)
    line = ("This makes one: hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir "
            "models/Qwen2.5-0.5B-Instruct, and then --model models/Qwen2.5-0.5B-Instruct takes it")
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct",
                 "models/Qwen2.5-0.5B-Instruct"):
        assert said_of("--model", name) == f"there is no model folder {name}. {line}"
    assert said_of("Qwen/Qwen2.5-0.5B-Instruct").endswith(line)
    assert "hf download someone/theirs --local-dir models/theirs" in said_of("--model",
                                                                             "someone/theirs")
    for name in ("nowhere", "some/where/else", "/nowhere/Qwen2.5-0.5B", "../x", "docs/nothing", ""):
        assert about_missing_model(name) == ""


def test_a_model_that_was_fetched_is_told_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "models/Qwen2.5-0.5B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert said_of("--model", "Qwen/Qwen2.5-0.5B") == (
        "there is no model folder Qwen/Qwen2.5-0.5B, but there is --model models/Qwen2.5-0.5B")
    assert make_settings({"model": "models/Qwen2.5-0.5B"}).model.endswith("models/Qwen2.5-0.5B")


def test_a_folder_without_its_flag_is_told_the_flag(tmp_path):
    assert said_of("models/tiny") == "models/tiny needs its flag: --model models/tiny"
    (tmp_path / "config.json").write_text("{}")
    assert said_of(str(tmp_path)).endswith(f"needs its flag: --resume {tmp_path}")


def test_a_flag_of_another_task_is_told_whose_it_is(tmp_path):
    said = said_of("--task", "tools.descending", "--max_number", "9")
    assert said == ("--max_number is no flag of --task tools.descending, it belongs to --task "
                    "countdown_task")
    assert said_of("--largest", "9").endswith("it belongs to --task tools.descending")


def test_a_flag_of_the_runs_own_task_is_known_and_cannot_be_changed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": "tools.descending"}))
    with pytest.raises(UserError, match="^--largest cannot be changed in a resumed run"):
        train.main(["--resume", str(tmp_path), "--largest", "9"])
    with pytest.raises(UserError, match="^--max_number is no flag of --task tools.descending"):
        train.main(["--resume", str(tmp_path), "--max_number", "9"])


def help_of(capsys, *argv):
    with pytest.raises(SystemExit):
        read_flags([*argv, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_the_defaults_that_hold(capsys, tmp_path, monkeypatch):
    """Those of the recipe of models/tiny, of the model that is typed, of --config."""
    monkeypatch.setenv("COLUMNS", "400")  # no name is broken
    text = help_of(capsys)
    assert "of AdamW (default 0.00025, from models/tiny/recipe.json; else 5e-06)" in text
    assert "largest number (default 15, from models/tiny/recipe.json; else 99)" in text
    assert "batches; 0 evaluates and stops (default 100)" in text  # the recipe says the same
    recipe = {"steps": 7, "checkpointing": True, "gamma": 0.5, "max_number": 12}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "config.json").write_text(json.dumps({"seed": 3, "model": str(tmp_path)}))
    text = help_of(capsys, "--config", str(tmp_path / "config.json"))
    assert "of AdamW (default 5e-06) " in text
    assert f"(default 7, from {tmp_path}/recipe.json; else 100)" in text
    assert f"(default True, from {tmp_path}/recipe.json; else False)" in text
    assert f"(default 0.5, from {tmp_path}/recipe.json; else 1.0, at least 0, at most 1)" in text
    assert f"(default 3, from {tmp_path}/config.json; else 0)" in text
    assert "models/tiny/recipe.json" not in help_of(capsys, "--model", str(tmp_path))


def test_help_leaves_out_what_a_recipe_says_of_another_task(capsys, tmp_path, monkeypatch):
    (tmp_path / "like_it.py").write_text(
        "from dataclasses import dataclass\nfrom harness.flags import option\n\n\n"
        "@dataclass\nclass Task:\n    max_number: int = option(3, 'largest of mine')\n")
    (tmp_path / "countdown_task.py").touch()  # imported already
    monkeypatch.setattr("harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert "largest of mine (default 3)" in help_of(capsys, "--task", "like_it")
    sys.modules.pop("like_it")


def test_a_command_works_as_it_stands(tmp_path, monkeypatch):
    """Pasted into a shell without an environment, from another directory, for a folder with a
    space in its name."""
    folder = tmp_path / "my run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command = python_command("train.py", "--resume", folder)
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.stderr == f"train.py: {folder} is not a run folder: it has no config.json\n"


def environment(folder):
    """A folder of programs as a venv has it: its python is a link to that of the system."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(os.path.realpath(sys.executable))
    return folder / "bin"


def test_python_is_called_by_its_name_where_that_is_this_one(tmp_path, monkeypatch):
    own, other = environment(tmp_path / "own"), environment(tmp_path / "an other")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.chdir(PROJECT)
    for path, name in ((f"{own}:{other}", "python"), (f"{other}:{own}", own / "python"),
                       ("/nothing", own / "python")):
        monkeypatch.setenv("PATH", path)
        assert python_command("train.py") == f"{name} train.py"
    monkeypatch.setenv("PATH", str(own))
    (own / "python3").touch(mode=0o755)  # another version in the same folder
    monkeypatch.setattr(sys, "executable", str(own / "python3"))
    assert python_command("train.py") == f"{own / 'python3'} train.py"
    monkeypatch.setattr(sys, "executable", str(other / "python"))
    monkeypatch.setenv("PATH", str(own))
    assert shlex.split(python_command("-m", "tools.preview")) == [
        str(other / "python"), "-m", "tools.preview"]


def test_another_program_of_this_environment_is_found(tmp_path, monkeypatch):
    own = environment(tmp_path / "own")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", "/nothing")
    assert hints.program("hf") == "hf"  # not here either
    (own / "hf").touch(mode=0o755)
    assert hints.program("hf") == str(own / "hf")
    monkeypatch.setenv("PATH", str(own))
    assert hints.program("hf") == "hf"


def test_the_pages_fetch_a_model_as_the_hint_does():
    page = (ROOT / "docs/large_models.md").read_text()
    assert "\nhf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct\n" \
        in page
    assert "python train.py --model models/Qwen2.5-0.5B-Instruct " in page
