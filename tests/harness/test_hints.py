"""What a person types who comes from another library, and the commands that messages tell."""
import json
import re
import shlex
import sys

import pytest

import train
from conftest import ROOT
from engine.errors import UserError
from harness import hints
from harness.command_line import read_flags
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
    (["--beta", "0.1"], "--kl "), (["actor_rollout_ref.rollout.n=5"], "--answers"),
    (["+actor_rollout_ref.actor.optim.lr=3"], "--learning_rate"),
    (["-lr", "3"], "--learning_rate")])
def test_a_name_from_another_library_is_told_the_one_here(argv, flag):
    assert f" is called {flag}" in said_of(*argv)


def test_a_name_that_a_mitigation_has_too_is_told_both():
    said = said_of("--epsilon", "0.2")
    assert "--epsilon belongs to inverse_logprob" in said and "--clip_low" in said
    assert "elsewhere" not in said_of("--gamma", "0.5")


def test_the_table_of_names_holds_no_flag_and_tells_only_flags():
    flags = {*OPTIONS, *choice_flags(), "data", "resume"}
    assert flags & set(HINTS) == {"epsilon"}
    for named in HINTS.values():
        assert set(re.findall(r"--(\w+)", named)) <= flags, named


def test_other_unknown_arguments_are_no_names_of_other_libraries():
    assert hint_for("--lerning_rate") == hint_for("stray") == hint_for("--") == hint_for("=") == ""
    assert said_of("n") == "unknown argument n"


def test_a_model_of_the_hub_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hints, "program", lambda name: name)
    line = ("This makes one: hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir "
            "models/Qwen2.5-0.5B-Instruct, and then --model models/Qwen2.5-0.5B-Instruct takes it")
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct",
                 "models/Qwen2.5-0.5B-Instruct"):
        assert said_of("--model", name) == f"there is no model folder {name}. {line}"
    assert said_of("Qwen/Qwen2.5-0.5B-Instruct").endswith(line)
    for name in ("nowhere", "some/where/else", "/nowhere/Qwen2.5-0.5B", "../x", "docs/nothing", "",
                 "models/tiny"):
        assert about_missing_model(name) == ""


def test_a_folder_without_its_flag_is_told_the_flag():
    assert said_of("models/tiny").startswith("models/tiny needs a flag before it: --model")


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


def test_python_is_called_by_its_name_where_that_is_this_one(tmp_path, monkeypatch):
    own, other = tmp_path / "own/bin", tmp_path / "an other/bin"
    for folder in (own, other):  # as in a venv: a link to the python of the system
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.chdir(PROJECT)
    for path, name in ((f"{own}:{other}", "python"), (f"{other}:{own}", own / "python"),
                       ("/nothing", own / "python")):
        monkeypatch.setenv("PATH", path)
        assert python_command("train.py") == f"{name} train.py"
    assert hints.program("hf") == "hf"  # not here either
    (own / "hf").touch(mode=0o755)
    assert hints.program("hf") == str(own / "hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(other / "python"))
    assert shlex.split(python_command("train.py", "--resume", "my run")) == [
        str(other / "python"), str(PROJECT / "train.py"), "--resume", "my run"]


def test_the_pages_fetch_a_model_as_the_hint_does():
    page = (ROOT / "docs/large_models.md").read_text()
    assert "\nhf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct\n" \
        in page
    assert "python train.py --model models/Qwen2.5-0.5B-Instruct " in page
