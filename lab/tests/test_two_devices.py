"""Sampling, updates and every method on a device that is only called cuda (devices.py)."""
from itertools import zip_longest

import pytest
import torch

import mitigations  # noqa: F401  fills the lists of choices
from lab.tests.devices import OnGPU, second_device
from conftest import ROOT
from small import copied
from lab.engine import log_probs, sampler
from lab.engine.methods import ADVANTAGES, MITIGATIONS
from lab.engine.sampler import Start, generate
from lab.gpu import sampler as gpu_sampler
from lab.gpu.forms import FORMS
from lab.harness.flags import words_of
from lab.harness.settings import make_settings
from lab.__main__ import main as research
from runs import lines
from lab.tools.idea import arms_of, look
from lab.run import train_beyond as main

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [5, 9]]
OF_TURNS = {"turn_credit", "without_luck"}


@pytest.fixture(autouse=True)
def both_round_alike(monkeypatch):
    """A GPU widens no product, so this CPU does not either. What a run on the second device puts in
    the place of the engine's functions is taken back after the test."""
    for module, name in ((sampler, "sample"), (log_probs, "token_log_probs")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("lab.engine.model.has_bfloat16", lambda: True)


@pytest.mark.parametrize("request_", [
    dict(answers=5, max_new_tokens=70, temperature=0.7, stop_ids=(2, 4, 9, 17)),
    dict(answers=20, max_new_tokens=40, stop_ids=(2, 4, 9, 17, 30)),
    dict(answers=2, max_new_tokens=150, greedy=True, stop_ids=()),
    dict(max_new_tokens=[9, 40, 2], starts=[Start(0, 3), Start(0, 2, 7), Start(1, 2)]),
    dict(answers=5, max_new_tokens=70, stop_ids=(2, 4, 9, 17, 30, 31, 32),
         reply=lambda row, ids, drawn: [row, 5, 6] if len(ids) < 30 + row else None)])
@pytest.mark.parametrize("room", ["lab/gpu", "the engine's alone"])
@pytest.mark.parametrize("dtype, vocabulary", [(torch.float32, "short"), (torch.bfloat16, "long")])
def test_what_is_sampled_is_that_of_the_cpu(small_model, monkeypatch, request_, dtype, vocabulary,
                                            room):
    if vocabulary == "long":
        monkeypatch.setattr(gpu_sampler, "LONG_VOCABULARY", 0)
        monkeypatch.setattr(gpu_sampler, "PART", 8)
    own = copied(small_model)
    for module in own.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = value if value is None else value.data.as_subclass(OnGPU)
    own.compute_in(dtype)
    if room == "lab/gpu":
        monkeypatch.setattr(sampler, "sample", gpu_sampler.sample_on_gpu)
    expected = generate(copied(small_model).compute_in(dtype), PROMPTS, seed=3, **request_)
    with second_device(monkeypatch):
        found = generate(own, PROMPTS, seed=3, **request_)
    for name, values in vars(expected).items():
        assert isinstance(vars(found)[name], OnGPU), name
        assert torch.equal(vars(found)[name].as_subclass(torch.Tensor), values), name


@pytest.mark.parametrize("flags, wanted", [([], False), (["--deterministic"], True)])
def test_a_gpu_computes_the_same_every_time_if_that_is_wanted(learner, tmp_path, monkeypatch,
                                                              flags, wanted):
    calls, environment = [], {}
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr("lab.harness.build.os.environ", environment)
    with second_device(monkeypatch):
        run(learner, tmp_path / "run", "--device", "cuda", *flags)
    assert set(calls) == {wanted}
    assert environment == ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if wanted else {})


def run(learner, out, *flags):
    main(["--model", str(learner), "--out", str(out), "--steps", "1", "--eval_every", "0",
          "--max_new_tokens", "24", "--questions", "2", "--answers", "4", "--micro_batch", "3",
          *flags])
    return lines(out / "metrics.jsonl")[0]


@pytest.mark.parametrize("room", ["open", "closed"])
@pytest.mark.parametrize("flags", [
    ["--dtype", "bfloat16"], ["--epochs", "2", "--kl", "0.1"],
    ["--eval_every", "1", "--eval_tasks", "4", "--placebo", "advantages"],
    ["--rescale", "gradient", "--mitigation", "random", "--placebo", "weights"],
    ["--lora", "1", "--temperature", "0.8", "--drop_unfinished"]], ids=" ".join)
def test_a_step_is_that_of_the_cpu(learner, tmp_path, monkeypatch, flags, room):
    """If both sample as a GPU does, or if lab/gpu is closed after an edit of the book."""
    if room == "open":
        monkeypatch.setattr(sampler, "sample", gpu_sampler.sample_on_gpu)
    else:
        monkeypatch.setitem(FORMS, "draw", "of another code")
    flags = ["--task", "lab.tests.pays_any_number", *flags]
    expected = run(learner, tmp_path / "cpu", *flags)
    assert expected["gradient_norm"] > 0
    with second_device(monkeypatch):
        found = run(learner, tmp_path / "cuda", "--device", "cuda", *flags)
    for name in ("loss", "gradient_norm", "reward", "length", "sampler_gap"):
        assert found[name] == expected[name], name


@pytest.mark.parametrize("weighting, advantage", [
    (weighting or "none", advantage or "grpo") for weighting, advantage in zip_longest(
        sorted(MITIGATIONS), sorted({*ADVANTAGES} - OF_TURNS - {"dpo"}))])  # of examples/dpo.py
def test_every_method_stays_on_its_device(learner, tmp_path, monkeypatch, weighting, advantage):
    """A weighting and an advantage in one step."""
    with second_device(monkeypatch):
        assert run(learner, tmp_path / "run", "--device", "cuda", "--mitigation", weighting,
                   "--advantage", advantage)


@pytest.mark.parametrize("name", ["turn_credit", "without_luck"])
def test_several_turns_stay_on_their_device(tmp_path, monkeypatch, name):
    """What an environment wrote is read, and turns get their credit; a step is that of the CPU."""
    monkeypatch.setattr(sampler, "sample", gpu_sampler.sample_on_gpu)
    player, flags = ROOT / "models/guesser", ["--advantage", name]
    expected = run(player, tmp_path / "cpu", *flags)
    with second_device(monkeypatch):
        found = run(player, tmp_path / "cuda", "--device", "cuda", *flags)
    for name in ("loss", "gradient_norm", "tokens", "sampler_gap"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


SMALL = ["--max_new_tokens", "40", "--device", "cuda"]


def test_an_idea_is_looked_at_there(learner, monkeypatch, capsys):
    _, typed = words_of(["--model", str(learner), "--questions", "2", "--answers", "4",
                         "--eval_tasks", "4", *SMALL])
    _, arms = arms_of("entropy_weighted", typed)
    plain, idea = make_settings(arms["plain"]), make_settings(arms["idea"])
    with second_device(monkeypatch):
        look("entropy_weighted", plain, idea)
    assert "each kind's share" in capsys.readouterr().out


def test_probes_are_made_there(learner, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with second_device(monkeypatch):
        research(["decided", "--model", str(learner), "--answers", "8", *SMALL,
                  "--continuations", "2", "--problems", "2"])
        research(["claims", str(whole), "--device", "cuda", "--problems", "3",
                  "--only", "phase,rank_2,mean_is_best,value_is_hard,sparser"])
    assert (tmp_path / "results" / "decided-s0" / "numbers.json").exists()
    assert "rank_2" in capsys.readouterr().out
