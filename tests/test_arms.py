"""Every arm as a person runs it: named, stopped and resumed, its flags, and a weighting of one's own."""
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import train
from conftest import ROOT
from engine.tokens import load_tokenizer
from grpo import group_z_score
from engine.registry import MITIGATIONS
from engine.errors import UserError
from engine.credit_file import read_credit
from engine.settings import make_settings, read_flags
from test_train import assert_same_run, lines

SHORT = ["--model", str(ROOT / "models/tiny"), "--threads", "1", "--questions", "2", "--answers", "4", "--max_new_tokens", "48", "--steps", "3",
         "--eval_every", "0", "--checkpoint_every", "1", "--sample_every", "0"]
ARMS = {name: ["--mitigation", name] for name in MITIGATIONS} | {
    "oracle": ["--mitigation", "oracle", "--oracle_k", "1", "--answers", "2", "--max_new_tokens", "32"], "learned": ["--mitigation", "learned_importance", "--importance_warmup", "1"],
    **{name: ["--advantage", name] for name in ("dr_grpo", "rloo", "gae", "vine", "span")},
    "values every 8": ["--advantage", "vine", "--values_every", "8", "--values_k", "1"], "short-sighted critic": ["--advantage", "gae", "--gae_lambda", "0.9"],
    "epochs": ["--epochs", "2", "--clip_low", "0.1", "--clip_high", "0.1"], "kl": ["--kl", "0.1", "--kl_kind", "k2"], "dpo": ["--loss", "dpo"],
    "sequence": ["--loss_norm", "sequence"], "constant": ["--loss_norm", "constant", "--advantage", "dr_grpo"], "unfinished": ["--drop_unfinished"],
    "placebo": ["--mitigation", "entropy_weighted", "--placebo", "weights"], "shuffled": ["--placebo", "advantages"],
    "few are left": ["--mitigation", "causal_ablation", "--drop_unfinished", "--questions", "1", "--answers", "2", "--max_new_tokens", "28"],
    "both axes": ["--mitigation", "learned_importance", "--importance_warmup", "0", "--advantage", "gae", "--rescale", "gradient", "--epochs", "2"]}


def mitigation_flags(settings):
    return settings.flags_for(MITIGATIONS[settings.mitigation])


def forget_second_step(folder):
    """What a run leaves that was killed right after its first checkpoint. That a kill leaves this is tested in test_train.py."""
    shutil.rmtree(folder / "checkpoints/step_000002")
    (folder / "credit/step_000002.npz").unlink()
    first, _ = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(first)


@pytest.mark.parametrize("arm", ARMS)
def test_stopped_and_resumed_is_as_if_never_stopped(arm, tmp_path):
    """Every arm goes on from its first checkpoint to the same second step: states of critics and weightings included."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main([*SHORT, "--steps", "2", *ARMS[arm], "--out", str(whole)])
    shutil.copytree(whole, stopped)
    forget_second_step(stopped)
    train.main(["--resume", str(stopped)])
    assert_same_run(whole, stopped)
    metrics = lines(tmp_path / "whole/metrics.jsonl")
    assert len(metrics) == 2 and (any(m["trained_tokens"] for m in metrics) or arm == "few are left")
    expected = {"gae": "explained_variance", "epochs": "clipped_share", "kl": "kl", "dpo": "pairs_in_order", "lambda_grpo": "lambda",
                "learned": "importance_loss"}.get(arm)
    assert expected is None or any(m.get(expected) is not None for m in metrics)
    assert (metrics[0]["extra_tokens"] > 0) == (arm in ("oracle", "causal_ablation", "vine", "values every 8")) or arm == "few are left"


def test_unfinished_answers_are_on_record_with_weight_0(tmp_path):
    train.main([*SHORT, "--drop_unfinished", "--max_new_tokens", "30", "--steps", "1", "--out", str(tmp_path / "x")])
    with np.load(tmp_path / "x/credit/step_000001.npz") as file:
        credit = dict(file)
    ends = np.append(credit["episode_start"][1:], len(credit["token_id"]))
    assert 0 < credit["finished"].sum() < 8
    for done, start, end in zip(credit["finished"], credit["episode_start"], ends):
        assert (credit["weight"][start:end] == float(done)).all()
    assert credit["advantage"][credit["weight"] == 0].any()  # the group's statistics knew them


def test_the_published_weights_are_on_record_as_they_are(tmp_path):
    train.main([*SHORT, "--mitigation", "inverse_logprob_as_published", "--steps", "1", "--out", str(tmp_path / "x")])
    with np.load(tmp_path / "x/credit/step_000001.npz") as credit:
        np.testing.assert_allclose(credit["weight"], 0.1 / (np.abs(credit["log_prob"]) + 0.1) ** 2, rtol=1e-5)


def test_shuffled_advantages_are_on_record_beside_the_true_rewards(tmp_path):
    train.main([*SHORT, "--placebo", "advantages", "--questions", "6", "--steps", "1", "--out", str(tmp_path / "x")])
    credit = read_credit(tmp_path / "x", 1, load_tokenizer(ROOT / "models/tiny"))
    true = group_z_score(credit.reward, credit.group)
    found = credit.advantage[:, 0]
    assert not torch.equal(found, true)
    for g in range(6):
        assert torch.equal(found[credit.group == g].sort().values, true[credit.group == g].sort().values)


def test_what_dpo_did_is_on_record_as_an_advantage(tmp_path):
    train.main([*SHORT, "--loss", "dpo", "--steps", "1", "--questions", "4", "--out", str(tmp_path / "x")])
    pairs = lines(tmp_path / "x/metrics.jsonl")[0]["pairs"]
    credit = read_credit(tmp_path / "x", 1, load_tokenizer(ROOT / "models/tiny"))
    signs = credit.advantage[:, 0].sign()
    assert pairs > 0 and (signs == 1).sum() == pairs == (signs == -1).sum()
    assert all(credit.reward[(signs == 1) & (credit.group == g)] >= credit.reward[credit.group == g].max() for g in range(4) if signs[credit.group == g].any())


@pytest.mark.parametrize("argv, name", [
    ([], "none-grpo-s0"), (["--mitigation", "outcome_conditional"], "outcome_conditional-grpo-s0"),
    (["--mitigation", "outcome_conditional", "--think_discount", "0.25", "--seed", "3"], "outcome_conditional-think_discount0.25-grpo-s3"),
    (["--mitigation", "entropy_masking", "--mask_percentile", "70", "--rescale", "none", "--placebo", "weights"],
     "entropy_masking-mask_percentile70.0-placeboweights-rescalenone-grpo-s0"),
    (["--mitigation", "inverse_logprob_as_published"], "inverse_logprob_as_published-grpo-s0"),
    (["--advantage", "gae", "--gae_lambda", "0.95", "--epochs", "4"], "none-gae-gae_lambda0.95-epochs4-s0"),
    (["--loss", "dpo", "--dpo_beta", "0.5"], "none-grpo-lossdpo-dpo_beta0.5-s0"), (["--drop_unfinished"], "none-grpo-drop_unfinishedTrue-s0"),
])
def test_the_folder_is_named_by_all_that_makes_the_arm(argv, name):
    assert make_settings(read_flags(["--model", str(ROOT / "models/tiny"), *argv])).folder.name == name


@pytest.mark.parametrize("argv, said", [
    (["--mitigation", "entropy_maskin"], "--mitigation entropy_maskin is not one of: entropy_masking, "),
    (["--mitigation", "none", "--think_discount", "0.5"], "--think_discount belongs to outcome_conditional, --mitigation is none"),
    (["--mitigation", "none", "--epsilon", "0.5"], "belongs to inverse_logprob and inverse_logprob_as_published and equal_gradient"),
    (["--mitigation", "entropy_weighted", "--entropy_temp", "-1"], "--entropy_temp -1.0 should be above 0"),
    (["--mitigation", "entropy_weighted", "--entropy_temp", "0"], "--entropy_temp 0.0 should be above 0"),
    (["--mitigation", "entropy_masking", "--mask_percentile", "120"], "--mask_percentile 120.0 should be at most 100"),
    (["--mitigation", "entropy_masking", "--mask_percentile", "nan"], "--mask_percentile nan should be a number"),
    (["--mitigation", "outcome_conditional", "--think_discount", "-0.1"], "should be at least 0"),
    (["--mitigation", "inverse_logprob", "--epsilon", "0"], "--epsilon 0.0 should be above 0"),
    (["--mitigation", "inverse_logprob_as_published", "--epsilon", "-1"], "should be above 0"),
    (["--mitigation", "attention_credit", "--credit_scale", "-2"], "should be at least 0"),
    (["--mitigation", "entropy_ratio", "--entropy_beta", "inf"], "--entropy_beta inf should be a number"),
    (["--mitigation", "causal_ablation", "--ablate_every", "0"], "should be at least 1"),
    (["--mitigation", "oracle", "--oracle_k", "2.5"], "invalid int value"),
    (["--mitigation", "random", "--placebo_std", "1e-200"], "should be at least 0.01"), (["--mitigation", "attention_credit", "--credit_scale", "1e39"], "at most 1000000.0"),
    (["--mitigation", "lambda_grpo", "--lambda_lr", "0"], "should be above 0"), (["--mitigation", "lambda_grpo", "--lambda_init", "nan"], "should be a number"), (["--mitigation", "lambda_grpo", "--lambda_init", "1000"], "at most 100"),
    (["--mitigation", "learned_importance", "--importance_warmup", "-1"], "should be at least 0"),
    (["--mitigation", "outcome_conditional", "--think_discont", "1"], "did you mean --think_discount"),
    (["--mitigation", "inverse_logprob_as_published", "--rescale", "mean"], "is never rescaled"),
    (["--placebo", "weights"], "--placebo weights has no effect on --mitigation none"), (["--rescale", "gradient"], "--rescale gradient has no effect on"),
    (["--data", "x.jsonl", "--max_number", "9"], "--max_number has no effect without made problems: not with --data"),
    (["--eval_every", "0", "--eval_tasks", "9"], "--eval_tasks has no effect without --eval_every above 0"), (["--placebo", "sugar"], "is not one of"),
    (["--rescale", "max"], "--rescale max is not one of: "), (["--advantage", "ppo"], "--advantage ppo is not one of"),
    (["--gamma", "0.9"], "--gamma belongs to gae, --advantage is grpo"), (["--advantage", "gae", "--gamma", "1.5"], "--gamma 1.5 should be at most 1"),
    (["--advantage", "gae", "--gae_lambda", "-1"], "should be at least 0"), (["--advantage", "gae", "--critic_lr", "0"], "should be above 0"),
    (["--values_k", "4"], "--values_k belongs to vine, --advantage is grpo"), (["--advantage", "vine", "--values_k", "0"], "should be at least 1"),
    (["--advantage", "vine", "--values_every", "word"], "--values_every word should be line or a number of tokens"),
    (["--advantage", "vine", "--values_every", "0"], "--values_every 0 should be line"),
    (["--clip_low", "0.1"], "--clip_low has no effect without --epochs above 1"), (["--epochs", "0"], "should be at least 1"),
    (["--epochs", "2", "--clip_low", "1.5"], "should be at most 1"), (["--epochs", "2", "--clip_high", "-0.1"], "should be at least 0"),
    (["--kl", "-1"], "should be at least 0"), (["--kl_kind", "k2"], "no effect without --kl above 0"), (["--kl", "1", "--kl_kind", "k1"], "not one of"),
    (["--loss_norm", "mean"], "--loss_norm mean is not one of"), (["--drop_unfinished", "maybe"], "neither yes nor no"),
    (["--loss", "ppo"], "is not one of"), (["--dpo_beta", "0.2"], "no effect without --loss dpo"), (["--loss", "dpo", "--dpo_beta", "0"], "should be above 0"),
    (["--loss", "dpo", "--mitigation", "random"], "cannot be combined with --mitigation random"),
    (["--loss", "dpo", "--advantage", "rloo"], "cannot be combined with --advantage rloo"),
    (["--loss", "dpo", "--kl", "0.1"], "--kl has no effect without --loss policy"), (["--loss", "dpo", "--rescale", "none"], "--rescale has no effect"),
])
def test_silly_values_get_one_clear_line(tmp_path, argv, said):
    with pytest.raises(UserError) as error:
        train.main(["--model", str(ROOT / "models/tiny"), "--out", str(tmp_path / "x"), *argv])
    assert said in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "x").exists()


def test_a_run_repeats_with_its_flags_and_another_mitigation_leaves_them_behind(tmp_path):
    train.main([*SHORT, "--mitigation", "outcome_conditional", "--think_discount", "0.25", "--steps", "1", "--out", str(tmp_path / "x")])
    config = str(tmp_path / "x/config.json")
    assert json.loads((tmp_path / "x/config.json").read_text())["think_discount"] == 0.25
    again = make_settings({"config": config})
    assert mitigation_flags(again) == {"think_discount": 0.25} and again.mitigation == "outcome_conditional"
    assert mitigation_flags(make_settings({"config": config, "mitigation": "inverse_logprob"})) == {"epsilon": 0.1}
    gae = make_settings({"config": config, "advantage": "gae", "gamma": 0.5})
    (tmp_path / "gae.json").write_text(json.dumps(gae.to_json()))
    assert gae.own["gamma"] == 0.5 and "gamma" not in make_settings({"config": tmp_path / "gae.json", "advantage": "grpo"}).own


def test_flags_of_a_run_stay_with_its_mitigation(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(make_settings({"mitigation": "inverse_logprob_as_published", "epsilon": 3.0}).to_json()))
    again = make_settings({"config": tmp_path / "a.json"})
    assert mitigation_flags(again) == {"epsilon": 3.0} and again.rescale == "none"
    other = make_settings({"config": tmp_path / "a.json", "mitigation": "equal_gradient"})
    assert mitigation_flags(other) == {"epsilon": 0.1} and other.rescale == "mean"


def test_what_a_folder_is_decides_how_to_go_on(tmp_path):
    out = ["--out", str(tmp_path / "x")]
    train.main([*SHORT, *out, "--steps", "1"])
    for argv, said in ((["--steps", "1"], "go on with --resume"), (["--steps", "1", "--learning_rate", "1e-3"], "with learning_rate 0.0005 instead of 0.001")):
        with pytest.raises(UserError, match=said):
            train.main([*SHORT, *out, *argv])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists already and is not a run folder"):
        train.main([*SHORT, "--out", str(tmp_path / "file")])
    with pytest.raises(UserError, match="says nothing of a mitigation"):
        train.main(["--resume", str(ROOT / "models/tiny")])


def test_a_model_that_broke_ends_the_run_with_a_word_and_a_first_step_that_failed_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not finite any more after step 1: is --learning_rate 1e[+]30"):
        train.main([*SHORT, "--learning_rate", "1e30", "--out", str(tmp_path / "x")])
    assert len(lines(tmp_path / "x/metrics.jsonl")) == 1  # what was done stays
    monkeypatch.setitem(MITIGATIONS, "wrong", lambda tokens: -tokens.entropy - 1)
    with pytest.raises(UserError, match="negative"):
        train.main([*SHORT, "--mitigation", "wrong", "--out", str(tmp_path / "y")])
    assert not (tmp_path / "y").exists()


def put_in(monkeypatch, thing, name):
    thing.__name__ = name
    monkeypatch.setitem(MITIGATIONS, name, thing)


def test_a_class_without_a_way_back_is_refused_and_odd_states_get_one_line(tmp_path, monkeypatch):
    class Forgets:
        def __init__(self, lab, *, speed: bool = False):
            self.metrics = {"told": torch.tensor(2.5), "reward": -7.0}

        def __call__(self, tokens, lab):
            return tokens.entropy + 1

        def state_dict(self):
            return {"mean": 0.5}
    put_in(monkeypatch, Forgets, "forgets")
    with pytest.raises(UserError, match="needs both state_dict and load_state_dict"):
        train.main([*SHORT, "--mitigation", "forgets", "--out", str(tmp_path / "x")])
    Forgets.load_state_dict = lambda self, tensors: None
    with pytest.raises(UserError, match="should hold tensors only, mean is none"):
        train.main([*SHORT, "--mitigation", "forgets", "--out", str(tmp_path / "x")])
    Forgets.state_dict = lambda self: {"mean": torch.tensor(0.5)}
    train.main([*SHORT, "--mitigation", "forgets", "--speed", "--out", str(tmp_path / "y")])
    line = lines(tmp_path / "y/metrics.jsonl")[0]
    assert line["told"] == 2.5 and line["reward"] >= 0 and json.loads((tmp_path / "y/config.json").read_text())["speed"] is True
    Forgets.load_state_dict = lambda self, tensors: tensors["spread"]
    with pytest.raises(UserError, match="spread"):
        train.main(["--resume", str(tmp_path / "y"), "--steps", "4"])


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
    assert mitigation_flags(make_settings(read_flags(["--mitigation", "one"]))) == {"power": 2, "mode": ""}
    assert make_settings(read_flags(["--mitigation", "one", "--mode", "../a b"])).folder.name == "one-mode.._a_b-grpo-s0"
    put_in(monkeypatch, two, "two")
    with pytest.raises(UserError, match="power of one and two .* the same type"):
        read_flags([])


def test_help_shows_every_mitigation_with_its_own_flags(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for name in MITIGATIONS:
        assert f"\n  {name} " in text
    assert "--mask_percentile (default 80.0, at least 0, at most 100)" in text and text.count("--epsilon") == 3
    part = text.split("\n  outcome_conditional")[1].split("\n  inverse_logprob")[0]
    assert "--think_discount (default 0.5, at least 0, at most 1)" in part and "--epsilon" not in part


IDEA = '''

@mitigation
def my_idea(tokens, *, strength: float = 1.0):
    """One line that becomes the help text."""
    return 1 + strength * tokens.entropy          # (B, T)
'''


@pytest.fixture(scope="module")
def with_idea(tmp_path_factory):
    """A copy of the program with one function more at the end of mitigations.py."""
    folder = tmp_path_factory.mktemp("copy")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in ("engine", "credit", "analysis", "tools"):
        shutil.copytree(ROOT / room, folder / room)
    with open(folder / "mitigations.py", "a") as file:
        file.write(IDEA)
    return folder


def program(folder, *argv, expect=0):
    result = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, capture_output=True, text=True)
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


SEVERAL_COMMANDS = """
import json, sys
import train
from engine.errors import UserError
for argv in json.loads(sys.argv[1]):
    try:
        train.main(argv)
    except SystemExit:  # after --help
        pass
    except UserError as error:
        print("refused:", error)
"""


def test_a_weighting_of_ones_own_is_one_function(with_idea):
    """A choice, with its flag, its help and its row; on record; and seen on recorded tokens without training."""
    training = [*SHORT, "--steps", "1", "--mitigation", "my_idea", "--strength", "3", "--out", "run"]
    text = program(with_idea, "-c", SEVERAL_COMMANDS, json.dumps([["--help"], training, ["--strength", "2"]]))
    assert "\n  my_idea                       One line that becomes the help text.\n" in text and "--strength (default 1.0)" in text
    assert "refused: --strength belongs to my_idea" in text
    with np.load(with_idea / "run/credit/step_000001.npz") as credit:
        expected = 1 + 3 * credit["entropy"]
        np.testing.assert_allclose(credit["weight"], expected / expected.mean(), rtol=1e-5)
    assert json.loads((with_idea / "run/config.json").read_text())["strength"] == 3
    seen = program(with_idea, "-m", "tools.preview", "run", "--mitigation", "my_idea", "--strength", "3", "--episode", "2")
    assert "my_idea --strength 3.0, rescale mean" in seen and "episode 2: reward" in seen and "heaviest tokens" in seen


def test_a_parameter_named_like_a_flag_of_the_program_is_refused(with_idea):
    source = (with_idea / "mitigations.py").read_text()
    (with_idea / "mitigations.py").write_text(source.replace("strength", "seed"))
    assert "the parameter seed of my_idea" in program(with_idea, "train.py", "--help", expect=1)
    (with_idea / "mitigations.py").write_text(source.replace("strength: float = 1.0", "strength"))
    assert "the parameter strength of my_idea" in program(with_idea, "train.py", "--help", expect=1)
    (with_idea / "mitigations.py").write_text(source)
