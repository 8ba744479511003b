"""What a person types who comes from another library, and the commands that messages tell."""
import json
import re

import pytest

import analyze
import train
from conftest import ROOT
from engine.errors import UserError
from harness.command_line import read_flags
from harness.files import did_you_mean
from harness.other_names import HINTS, about_missing_model, about_unknown
from harness.settings import OPTIONS, choice_flags, make_settings


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


def test_the_table_of_names_holds_no_flag_and_tells_only_flags():
    flags = {*OPTIONS, *choice_flags(), "data", "resume"}
    assert flags & set(HINTS) == {"epsilon"}
    for named in HINTS.values():
        assert set(re.findall(r"--(\w+)", named)) <= flags, named


def test_other_unknown_arguments_are_no_names_of_other_libraries():
    assert [about_unknown(typed) for typed in ("--lerning_rate", "stray", "--", "=")] == [""] * 4
    assert said_of("n") == "unknown argument n"


def test_a_model_of_the_hub_is_told_how_to_get_it():
    line = ("This makes one: hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir "
            "models/Qwen2.5-0.5B-Instruct, and then --model models/Qwen2.5-0.5B-Instruct takes it")
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "models/Qwen2.5-0.5B-Instruct"):
        assert said_of("--model", name) == f"there is no model folder {name}. {line}"
    for name in ("nowhere", "some/where/else", "/nowhere/Qwen2.5-0.5B", "../x", "docs/nothing", "",
                 "models/tiny"):
        assert about_missing_model(name) == ""


def test_a_folder_that_is_not_there_is_told_the_one_beside_it(tmp_path):
    """By its beginning, up to a hyphen, or by likeness; no other name."""
    for name in ("none-grpo-s0", "nonesuch", "tiny"):
        (tmp_path / name).mkdir()
    meant = {"none": "none-grpo-s0", "tinny": "tiny", "x": "", "tiny": ""}
    for name, found in meant.items():
        expected = f", did you mean {tmp_path / found}?" if found else ""
        assert did_you_mean(tmp_path / name) == expected, name
    for command in (lambda: train.main(["--resume", str(tmp_path / "none")]),
                    lambda: analyze.main([str(tmp_path / "none")]),
                    lambda: make_settings({"model": str(tmp_path / "tinny")})):
        with pytest.raises(UserError, match="did you mean .*/(none-grpo-s0|tiny)[?]$"):
            command()


def test_a_folder_without_its_flag_is_told_the_flag():
    assert said_of("models/tiny").startswith("models/tiny needs a flag before it: --model")


def test_a_flag_of_the_runs_own_task_is_known_and_cannot_be_changed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": "tools.largest_last"}))
    with pytest.raises(UserError, match="^--largest cannot be changed in a resumed run"):
        train.main(["--resume", str(tmp_path), "--largest", "9"])
    with pytest.raises(UserError, match="^unknown argument --max_number"):
        train.main(["--resume", str(tmp_path), "--max_number", "9"])


def test_the_pages_fetch_a_model_as_the_hint_does():
    page = (ROOT / "docs/large_models.md").read_text()
    assert "\nhf download Qwen/Qwen2.5-0.5B-Instruct --local-dir models/Qwen2.5-0.5B-Instruct\n" \
        in page
    assert "python train.py --model models/Qwen2.5-0.5B-Instruct " in page
