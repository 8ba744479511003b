"""The name of a run's folder: what is not at its default is in it, and nothing else."""
import shutil

import pytest

from conftest import ROOT
from harness.command_line import read_flags
from harness.record import PROJECT
from harness.settings import OPTIONS, make_settings

TINY = str(ROOT / "models/tiny")


def name_of(*argv):
    return make_settings(read_flags(list(argv))).folder.name


@pytest.mark.parametrize("argv, name", [
    # numbers are short and lose no digit
    ("--learning_rate 0.00015", "none-grpo-lr1.5e-4-s0"),
    ("--task tools.largest_last --largest 9", "largest_last-none-grpo-largest9-s0"),
    ("--max_number 9 --steps 30 --kl 0.1 --seed 2", "none-grpo-kl0.1-max_number9-steps30-s2"),
    ("--data own.jsonl --temperature 2 --max_grad_norm 1e9",
     "none-grpo-own.jsonl-temperature2-max_grad_norm1e9-s0"),
    ("--mitigation inverse_logprob_as_published --rescale none",
     "inverse_logprob_as_published-grpo-s0"),
    ("--mitigation entropy_masking --mask_percentile 70 --rescale none --placebo weights",
     "entropy_masking-mask_percentile70-placeboweights-rescalenone-grpo-s0"),
    # models/tiny learns at 0.00025; without a recipe 5e-06 is the default
    ("--learning_rate 0.00025 --questions 16", "none-grpo-s0"),
    ("--learning_rate 5e-6", "none-grpo-lr5e-6-s0"),
    ("--model models/Bare-0.5B --learning_rate 5e-6", "Bare-0.5B-none-grpo-s0"),
    # a checkpoint is named by its run, too
    ("--model runs/mine/checkpoints/step_000025", "mine-step_000025-none-grpo-s0")])
def test_what_is_not_at_its_default_is_in_the_name(argv, name, monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert name_of(*argv.split()) == name


def test_whatever_changes_a_result_names_another_folder():
    """Two runs that differ in it do not meet; other flags are not in the name."""
    besides = {"clip_low": ["--epochs", "2"], "clip_high": ["--epochs", "2"],
               "kl_kind": ["--kl", "0.1"], "dpo_beta": ["--loss", "dpo"],
               "pairs": ["--loss", "dpo"], "rescale": ["--mitigation", "random"],
               "rollouts_every": ["--rollouts", "http://127.0.0.1:8000"],
               "rollouts_timeout": ["--rollouts", "http://127.0.0.1:8000"]}
    special = {"task": "tools.largest_last", "device": "cuda", "placebo": "advantages"}
    values = {bool: "yes", int: "3", float: "0.625", str: "anything"}
    for name, flag in OPTIONS.items():
        value = special.get(name, values[flag.type])
        if flag.choices and name not in special:
            value = [choice for choice in flag.choices if choice != flag.default][-1]
        beside = besides.get(name, [])
        differs = name_of(*beside, f"--{name}", value) != name_of(*beside)
        assert differs == flag.changes_result or name == "out", name


def test_the_shipped_model_has_no_name_wherever_it_is_named_from(tmp_path, monkeypatch):
    shutil.copytree(TINY, tmp_path / "tiny")
    assert name_of("--model", str(tmp_path / "tiny")) == "tiny-none-grpo-s0"
    monkeypatch.chdir(PROJECT / "models")
    for path in ("tiny", "../models/tiny/", TINY, "models/tiny"):
        assert name_of("--model", path) == "none-grpo-s0"
