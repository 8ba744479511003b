"""Every file of a run says which run, and which step, it is of: an exchange is noticed."""
import hashlib
import os
import shutil
import sys

import pytest

import train
from analysis.arms import effective_settings
from analysis.runs import is_done, read_run
from conftest import cut, refusal
from harness import files, identity
from harness.record import read_columns
from engine.errors import UserError
from harness.settings import make_settings
from runs import WHOLE, config_of, edit_config, everything, lines, older, run
from tools import follow, preview, sample


@pytest.fixture(scope="module")
def other_run(learner, tmp_path_factory):
    """A run of the shape of `whole`: only its seed differs."""
    folder = tmp_path_factory.mktemp("identity") / "1"
    run("--model", learner, "--out", folder, *WHOLE, "--seed", 1)
    return folder


@pytest.fixture
def pair(whole, other_run, tmp_path):
    return [shutil.copytree(whole, tmp_path / "a run"), shutil.copytree(other_run, tmp_path / "1")]


def exchange(name):
    def damage(mine, other):
        target = mine / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        (shutil.copytree if (other / name).is_dir() else shutil.copy)(other / name, target)
    return damage


def swap_steps(mine, other):
    first, second = (mine / f"credit/step_00000{step}.npz" for step in (2, 3))
    first.rename(mine / "aside")
    second.rename(first)
    (mine / "aside").rename(second)


def exchange_a_line(name):
    def damage(mine, other):
        texts, others = ((run / name).read_text().splitlines(True) for run in (mine, other))
        (mine / name).write_text("".join([*texts[:1], others[1], *texts[2:]]))
    return damage


def lose_the_last_line(name):
    return lambda mine, other: cut(mine / name, -1)


def edit(name, value):
    return lambda mine, other: edit_config(mine, **{name: value})


def look(folder):
    seen = read_run(folder)
    for step in seen["steps"]:
        read_columns(folder, step)


def go_on(folder):
    train.main(["--resume", str(folder), "--steps", "7"])


BOTH, LOOK, GO_ON = (look, go_on), (look,), (go_on,)
NEWEST = "checkpoints/step_000006"
STATE = f"{NEWEST}/trainer/state.safetensors"
EDITED = "config.json was changed .* --config '.*/a run/config.json' --out NAME$"  # to paste
DAMAGE = {
    **{f"{name} edited": (edit(name, value), EDITED, BOTH) for name, value in (
        ("seed", 5), ("advantage", "rloo"), ("reward", "another"), ("run_id", "0" * 16),
        ("run_id", None), ("made_of", 3))},
    "config.json": (exchange("config.json"), "does not belong there: its run_id", BOTH),
    "a credit file": (exchange("credit/step_000003.npz"),
                      "credit/step_000003.npz does not belong there: its run_id", LOOK),
    "two steps": (swap_steps, "step_000002.npz does not belong there: its step is 3, not 2", LOOK),
    "all metrics": (exchange("metrics.jsonl"), "metrics.jsonl, line 1 does not belong", BOTH),
    "all evaluations": (exchange("evaluations.jsonl"), "evaluations.jsonl, line 1 does not belong",
                        BOTH),
    "a line": (exchange_a_line("metrics.jsonl"), "metrics.jsonl, line 2 does not belong", BOTH),
    "a sample": (exchange_a_line("samples.jsonl"), "samples.jsonl, line 2 does not belong", GO_ON),
    "a checkpoint": (exchange(NEWEST), "step_000006 does not belong there", GO_ON),
    "its model": (exchange(f"{NEWEST}/model.safetensors"),
                  "model.safetensors was changed after it was written", GO_ON),
    "its state": (exchange(STATE), "state.safetensors was changed", GO_ON),
    "no state": (lambda mine, other: (mine / STATE).unlink(), "cannot read .*state.safetensors",
                 GO_ON),
    "its step": (lambda mine, other: (mine / NEWEST).rename(mine / "checkpoints/step_000005"),
                 "its step is 6, not 5", GO_ON),
    "the last evaluation": (lose_the_last_line("evaluations.jsonl"), "evaluations.jsonl", BOTH),
    "the last step": (lose_the_last_line("metrics.jsonl"), "metrics.jsonl", BOTH)}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_of_another_run_or_step_is_named_and_nothing_is_touched(pair, name):
    damage, words, readers = DAMAGE[name]
    mine, other = pair
    look(mine)
    damage(mine, other)
    before = everything(mine)
    for reader in readers:
        with pytest.raises(UserError, match=words):
            reader(mine)
    assert everything(mine) == before


def test_no_tool_asks_a_model_that_is_not_what_the_run_wrote(recorded, tmp_path, capsys):
    """The checkpoint of step 1 has no seal any more, so there is nothing to compare."""
    folder = shutil.copytree(recorded, tmp_path / "run")
    first, *sealed = sorted(folder.glob("checkpoints/step_00*"))
    for checkpoint in sealed:
        shutil.copy(first / "model.safetensors", checkpoint)
    said = "model.safetensors was changed after it was written"
    for tool, typed in ((preview, "--mitigation attention_credit --step 3"), (sample, "3 5 7 22")):
        assert refusal(tool.main, [str(folder), *typed.split()]).endswith(said)
    follow.main([str(folder), *"--step 3 --answer 0 --token 0".split()])
    assert said in " ".join(capsys.readouterr().out.split())
    preview.main([str(folder), *"--mitigation attention_credit --step 2".split()])


def test_a_run_by_the_regex_that_is_gone_is_read_and_nothing_else(pair):
    older(pair[0])
    config = {"config": pair[0] / "config.json"}
    edit_config(pair[0], mitigation="by_kind", kinds="regex")
    look(pair[0])
    make_settings({**config, "mitigation": "none"})
    for again in (go_on, lambda folder: make_settings(config)):
        with pytest.raises(UserError, match="--kinds regex of by_kind is gone"):
            again(pair[0])
    edit_config(pair[0], kinds="token")
    assert make_settings(config).mitigation == "by_kind"
    settings = effective_settings({**config_of(pair[0]), "kinds": "regex"})
    assert settings != effective_settings(config_of(pair[0]))


def test_the_same_command_has_the_same_run_id_and_its_files_can_be_exchanged(
        whole, other_run, pair, learner, tmp_path):
    """Where the model lies does not matter; what it is does."""
    run("--model", learner, "--out", tmp_path / "again", *WHOLE, "--micro_batch", 4)
    config = config_of(whole)
    assert config_of(tmp_path / "again")["run_id"] == config["run_id"]
    assert config_of(other_run)["run_id"] != config["run_id"]
    moved = {**config, "model": "elsewhere", "steps": 9, "device": "cuda"}
    assert run_id_of(moved) == config["run_id"] != run_id_of({**config, "made_of": {"model": "0"}})
    for name in ("config.json", "metrics.jsonl", "credit/step_000003.npz"):
        exchange(name)(pair[0], tmp_path / "again")
    look(pair[0])


def test_a_run_of_an_older_version_is_read_and_goes_on_as_it_was(pair):
    older(pair[0])
    look(pair[0])
    go_on(pair[0])
    look(pair[0])
    assert "run_id" not in config_of(pair[0])
    assert all("run_id" not in line for line in lines(pair[0] / "metrics.jsonl"))


def test_a_run_that_lost_its_last_evaluation_before_any_checkpoint_is_not_finished(pair):
    assert is_done(read_run(pair[0]))
    shutil.rmtree(pair[0] / "checkpoints")
    lose_the_last_line("evaluations.jsonl")(*pair)
    assert not is_done(read_run(pair[0]))


def forbid(monkeypatch, place):
    """Root may look everywhere, so what the system would say to others is said for it."""
    def refusing(ask):
        def asked(path, *arguments, **more):
            if str(path) == str(place) or place in getattr(path, "parents", ()):
                raise PermissionError(13, "Permission denied")
            return ask(path, *arguments, **more)
        return asked
    for name in ("listdir", "stat"):
        monkeypatch.setattr(files.os, name, refusing(getattr(os, name)))
    monkeypatch.setattr("builtins.open", refusing(open))


@pytest.mark.parametrize("name, reader", [
    ("checkpoints", go_on), ("credit", look), ("config.json", look), ("metrics.jsonl", go_on)])
def test_what_may_not_be_read_is_not_taken_for_lost(pair, monkeypatch, name, reader):
    forbid(monkeypatch, pair[0] / name)
    with pytest.raises(UserError, match=f"cannot read .*/{name}.*: Permission denied"):
        reader(pair[0])


def test_code_is_of_the_files_of_the_project_that_are_loaded(monkeypatch, tmp_path):
    """train.py is __main__, where it is the program."""
    monkeypatch.setattr(identity, "PROJECT", tmp_path)
    (tmp_path / "room").mkdir()
    for name in ("train.py", "mine.py", "other.py", "room/__init__.py", "room/part.py",
                 "room/other.py"):
        (tmp_path / name).write_text(name)
    for name in ("mine", "room", "room.part", "elsewhere"):
        monkeypatch.setitem(sys.modules, name, None)
    code = identity.code_in_use()
    assert list(code) == ["mine.py", "room/__init__.py", "room/part.py", "train.py"]
    assert code["mine.py"] == hashlib.sha256(b"mine.py").hexdigest()
