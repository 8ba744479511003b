"""The flags of arms: names of folders, values that are refused, what --config brings along."""
import json

import pytest

import train
from conftest import ROOT, put_in
from harness.command_line import read_flags
from engine.errors import UserError
from harness.registry import MITIGATIONS
from harness.settings import make_settings
from runs import SHORT


def mitigation_flags(settings):
    return settings.flags_for(MITIGATIONS[settings.mitigation])


@pytest.mark.parametrize(
    "argv, name",
    [([], "none-grpo-s0"), (["--mitigation", "outcome_conditional"], "outcome_conditional-grpo-s0"),
     (["--mitigation", "outcome_conditional", "--think_discount", "0.25", "--seed", "3"
       ], "outcome_conditional-think_discount0.25-grpo-s3"),
     ([
         "--mitigation", "entropy_masking", "--mask_percentile", "70", "--rescale", "none",
         "--placebo", "weights"
     ], "entropy_masking-mask_percentile70.0-placeboweights-rescalenone-grpo-s0"),
     (["--mitigation", "inverse_logprob_as_published"], "inverse_logprob_as_published-grpo-s0"),
     (["--advantage", "gae", "--gae_lambda", "0.95", "--epochs", "4"
       ], "none-gae-gae_lambda0.95-epochs4-s0"),
     (["--loss", "dpo", "--dpo_beta", "0.5"], "none-grpo-lossdpo-dpo_beta0.5-s0"),
     (["--drop_unfinished"], "none-grpo-drop_unfinishedTrue-s0"), ])
def test_the_folder_is_named_by_all_that_makes_the_arm(argv, name):
    assert make_settings(read_flags(["--model", str(ROOT / "models/tiny"),
                                     *argv])).folder.name == name


@pytest.mark.parametrize(
    "argv, said",
    [(["--mitigation", "entropy_maskin"
       ], "--mitigation entropy_maskin is not one of: entropy_masking, "),
     (["--mitigation", "none", "--think_discount", "0.5"
       ], "--think_discount belongs to outcome_conditional, --mitigation is none"),
     (["--mitigation", "none", "--epsilon", "0.5"
       ], "belongs to inverse_logprob and inverse_logprob_as_published and equal_gradient"),
     (["--mitigation", "entropy_weighted", "--entropy_temp", "-1"
       ], "--entropy_temp -1.0 should be above 0"),
     (["--mitigation", "entropy_weighted", "--entropy_temp", "0"
       ], "--entropy_temp 0.0 should be above 0"),
     (["--mitigation", "entropy_masking", "--mask_percentile", "120"
       ], "--mask_percentile 120.0 should be at most 100"),
     (["--mitigation", "entropy_masking", "--mask_percentile", "nan"
       ], "--mask_percentile nan should be a number"),
     (["--mitigation", "outcome_conditional", "--think_discount", "-0.1"], "should be at least 0"),
     (["--mitigation", "inverse_logprob", "--epsilon", "0"], "--epsilon 0.0 should be above 0"),
     (["--mitigation", "inverse_logprob_as_published", "--epsilon", "-1"], "should be above 0"),
     (["--mitigation", "attention_credit", "--credit_scale", "-2"], "should be at least 0"),
     (["--mitigation", "entropy_ratio", "--entropy_beta", "inf"
       ], "--entropy_beta inf should be a number"),
     (["--mitigation", "causal_ablation", "--ablate_every", "0"], "should be at least 1"),
     (["--mitigation", "oracle", "--oracle_k", "2.5"], "invalid int value"),
     (["--mitigation", "random", "--placebo_std", "1e-200"], "should be at least 0.01"),
     (["--mitigation", "attention_credit", "--credit_scale", "1e39"], "at most 1000000.0"),
     (["--mitigation", "lambda_grpo", "--lambda_lr", "0"], "should be above 0"),
     (["--mitigation", "lambda_grpo", "--lambda_init", "nan"], "should be a number"),
     (["--mitigation", "lambda_grpo", "--lambda_init", "1000"], "at most 100"),
     (["--mitigation", "learned_importance", "--importance_warmup", "-1"], "should be at least 0"),
     (["--mitigation", "outcome_conditional", "--think_discont", "1"
       ], "did you mean --think_discount"),
     (["--mitigation", "inverse_logprob_as_published", "--rescale", "mean"], "is never rescaled"),
     (["--placebo", "weights"], "--placebo weights has no effect on --mitigation none"),
     (["--rescale", "gradient"], "--rescale gradient has no effect on"),
     (["--data", "x.jsonl", "--max_number", "9"
       ], "--max_number has no effect without made problems: not with --data"),
     (["--eval_every", "0", "--eval_tasks", "9"
       ], "--eval_tasks has no effect without --eval_every above 0"),
     (["--placebo", "sugar"], "is not one of"),
     (["--rescale", "max"], "--rescale max is not one of: "),
     (["--advantage", "ppo"], "--advantage ppo is not one of"),
     (["--gamma", "0.9"], "--gamma belongs to gae, --advantage is grpo"),
     (["--advantage", "gae", "--gamma", "1.5"], "--gamma 1.5 should be at most 1"),
     (["--advantage", "gae", "--gae_lambda", "-1"], "should be at least 0"),
     (["--advantage", "gae", "--critic_lr", "0"], "should be above 0"),
     (["--advantage", "gae", "--trunk_lr", "1e-3"],
      "--trunk_lr has no effect without --critic trunk"),
     (["--advantage", "gae", "--critic", "trunk", "--critic_lr", "1e-3"],
      "--critic_lr has no effect without --critic head"),
     (["--advantage", "gae", "--critic", "trunk", "--critic_layers", "9"], "the model has 3"),
     (["--values_k", "4"], "--values_k belongs to vine, --advantage is grpo"),
     (["--advantage", "vine", "--values_k", "0"], "should be at least 1"),
     (["--advantage", "vine", "--values_every", "word"
       ], "--values_every word should be line, uncertain or a number of tokens"),
     (["--advantage", "vine", "--values_every", "0"], "--values_every 0 should be line"),
     (["--clip_low", "0.1"], "--clip_low has no effect without --epochs above 1"),
     (["--epochs", "0"], "should be at least 1"),
     (["--epochs", "2", "--clip_low", "1.5"], "should be at most 1"),
     (["--epochs", "2", "--clip_high", "-0.1"], "should be at least 0"),
     (["--kl", "-1"], "should be at least 0"),
     (["--kl_kind", "k2"], "no effect without --kl above 0"),
     (["--kl", "1", "--kl_kind", "k1"], "not one of"),
     (["--loss_norm", "mean"], "--loss_norm mean is not one of"),
     (["--drop_unfinished", "maybe"], "neither yes nor no"), (["--loss", "ppo"], "is not one of"),
     (["--dpo_beta", "0.2"], "no effect without --loss dpo"),
     (["--loss", "dpo", "--dpo_beta", "0"], "should be above 0"),
     (["--loss", "dpo", "--mitigation", "random"], "cannot be combined with --mitigation random"),
     (["--loss", "dpo", "--advantage", "rloo"], "cannot be combined with --advantage rloo"),
     (["--loss", "dpo", "--kl", "0.1"], "--kl has no effect without --loss policy"),
     (["--loss", "dpo", "--rescale", "none"], "--rescale has no effect"), ])
def test_silly_values_get_one_clear_line(tmp_path, argv, said):
    with pytest.raises(UserError) as error:
        train.main(["--model", str(ROOT / "models/tiny"), "--out", str(tmp_path / "x"), *argv])
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_a_run_repeats_with_its_flags_and_another_mitigation_leaves_them_behind(tmp_path):
    train.main([
        *SHORT, "--mitigation", "outcome_conditional", "--think_discount", "0.25", "--steps", "1",
        "--out",
        str(tmp_path / "x")
    ])
    config = str(tmp_path / "x/config.json")
    assert json.loads((tmp_path / "x/config.json").read_text())["think_discount"] == 0.25
    again = make_settings({"config": config})
    assert mitigation_flags(again) == {"think_discount": 0.25}
    assert again.mitigation == "outcome_conditional"
    assert mitigation_flags(make_settings({"config": config,
                                           "mitigation": "inverse_logprob"})) == {"epsilon": 0.1}
    gae = make_settings({"config": config, "advantage": "gae", "gamma": 0.5})
    (tmp_path / "gae.json").write_text(json.dumps(gae.to_json()))
    assert gae.own["gamma"] == 0.5
    assert "gamma" not in make_settings({"config": tmp_path / "gae.json", "advantage": "grpo"}).own


def test_flags_of_a_run_stay_with_its_mitigation(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps(
            make_settings({"mitigation": "inverse_logprob_as_published",
                           "epsilon": 3.0}).to_json()))
    again = make_settings({"config": tmp_path / "a.json"})
    assert mitigation_flags(again) == {"epsilon": 3.0} and again.rescale == "none"
    other = make_settings({"config": tmp_path / "a.json", "mitigation": "equal_gradient"})
    assert mitigation_flags(other) == {"epsilon": 0.1} and other.rescale == "mean"


def test_functions_that_cannot_become_flags_say_why(monkeypatch):
    def positional(tokens, power=2.0):
        return tokens.entropy ** power

    def one(tokens, *, power: int = 2, mode: str = ""):
        return tokens.entropy

    def two(tokens, *, power: float = 2.0):
        return tokens.entropy
    put_in(monkeypatch, positional, "positional")
    with pytest.raises(UserError, match="power of positional .* write a [*] before it"):
        read_flags([])
    monkeypatch.undo()
    put_in(monkeypatch, one, "one")
    assert mitigation_flags(make_settings(read_flags(["--mitigation",
                                                      "one"]))) == {"power": 2, "mode": ""}
    assert make_settings(read_flags(["--mitigation", "one", "--mode",
                                     "../a b"])).folder.name == "one-mode.._a_b-grpo-s0"
    put_in(monkeypatch, two, "two")
    with pytest.raises(UserError, match="power of one and two .* the same type"):
        read_flags([])


def test_a_parameter_named_like_a_flag_of_the_program_is_refused(monkeypatch):
    def taken(tokens, *, seed: float = 1.0):
        return tokens.entropy

    def without_default(tokens, *, strength):
        return tokens.entropy

    for function in (taken, without_default):
        (name,) = function.__kwdefaults__ or ["strength"]
        with monkeypatch.context() as patch, pytest.raises(
                UserError, match=f"the parameter {name} of my_idea"):
            put_in(patch, function, "my_idea")
            read_flags([])


def test_help_shows_every_mitigation_with_its_own_flags(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for name in MITIGATIONS:
        assert f"\n  {name} " in text
    assert "--mask_percentile (default 80.0, at least 0, at most 100)" in text
    assert text.count("--epsilon") == 3
    part = text.split("\n  outcome_conditional")[1].split("\n  inverse_logprob")[0]
    assert "--think_discount (default 0.5, at least 0, at most 1)" in part
    assert "--epsilon" not in part
