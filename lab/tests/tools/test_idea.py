"""Was my idea better: what it does to the gradient, by hand; which runs are made, which are used
again, what is refused."""
import re
import shlex
import shutil
from dataclasses import replace
from glob import glob
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import ROOT, refusal
import mitigations
from lab.engine.tokens import NUMBER, WORD
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.settings import make_settings
from lab.tools import idea
from lab.tools.arms import Arm, is_of_book
from lab.tools.idea import arms_of, credited, first_look, look, main, sample, share_gains
from lab_runs import make_here
from runs import lines
from small import large_folder

SMALL = ["--questions", "2", "--answers", "4", "--steps", "2", "--eval_tasks", "4",
         "--max_new_tokens", "32", "--seeds", "2", "--processes", "2"]


@pytest.fixture(autouse=True)
def first_step_of(monkeypatch):
    """What the first step of an idea is asked with; test_first_step.py has its numbers."""
    asked = []
    monkeypatch.setattr("lab.tools.first_step.report", lambda *given: asked.append(given))
    return asked


def test_a_screen_trains_nothing(tmp_path, monkeypatch, first_step_of):
    """It begins at the untrained model, and at what plain GRPO has trained already."""
    monkeypatch.setattr(idea, "decide", None)
    argv = ["by_kind", "--screen", "--word_weight", "0.2", *SMALL, "--runs", str(tmp_path)]
    main(argv)
    [(name, plain, mine, checkpoints)] = first_step_of
    assert (name, plain.mitigation, mine.mitigation, mine.typed["word_weight"], checkpoints) == (
        "by_kind", "none", "by_kind", 0.2, [])
    arms = arms_of("by_kind", {flag: value for flag, value in plain.typed.items()})[1]
    trained = Arm("plain", arms["plain"], tmp_path).folder / "s0/checkpoints/step_000002"
    trained.mkdir(parents=True)
    main(argv)
    assert first_step_of[1][3] == [trained]
    main(["my.py:mine", "--screen"])
    assert first_step_of[2][0] == "my.py:mine"


def test_the_arms_of_a_weighting_and_of_an_advantage():
    axis, of_kind = arms_of("by_kind", {"word_weight": "0.1", "steps": "20", "rescale": "none"})
    plain, own = of_kind["plain"], {"mitigation": "by_kind", "word_weight": 0.1, "rescale": "none"}
    assert axis == "mitigation" and plain == {
        "questions": 8, "answers": 8, "steps": 20, "threads": 1, "eval_every": 20,
        "checkpoint_every": 20}
    assert of_kind == {"plain": plain, "idea": plain | own,
                       "any": plain | own | {"placebo": "weights"},
                       "kind": plain | own | {"placebo": "weights_by_kind"}}
    axis, of_span = arms_of("span", {"eval_every": "9", "mitigation": "random"}, "any")
    assert axis == "advantage" and of_span["plain"]["eval_every"] == 9
    assert of_span["plain"]["mitigation"] == "random" and "advantage" not in of_span["plain"]
    assert of_span["any"]["placebo"] == "advantages" and of_span["idea"]["advantage"] == "span"
    assert "kind" not in of_span
    for name in ("rloo", "batch_mean"):  # answers have no kind
        assert [*arms_of(name, {})[1]] == ["plain", "idea", "any"]
        assert [*arms_of(name, {}, "none")[1]] == ["plain", "idea"]


def test_settings_can_be_the_idea(tmp_path, monkeypatch, capsys):
    """They are of the idea's arm alone, which has no placebo; mistakes are told in a sentence."""
    found = []
    monkeypatch.setattr(idea, "decide", lambda *given: found.append(given))
    argv = ["--steps", "20", "--runs", str(tmp_path)]
    main(["--set", "epochs=2 learning_rate=1e-4", *argv])
    assert " ".join(capsys.readouterr().out.split()) == (
        "epochs=2 learning_rate=1e-4 compared with plain GRPO: epochs is 2, and not 1; "
        "learning_rate is 0.0001, and not 0.00025")
    [(arms, name, _, tried, *_)] = found
    assert name == tried == "epochs=2 learning_rate=1e-4"
    assert arms["idea"].label == "epochs=2-learning_rate=1e-4" and [*arms] == ["plain", "idea"]
    assert [(arm.settings.epochs, arm.settings.steps) for arm in arms.values()] == [
        (1, 20), (2, 20)]
    for typed, said in (("epocs=2", "unknown argument --epocs. Did you mean epochs?"),
                        ("epochs 2", "unknown argument --2"), ("epochs", "--epochs needs a value"),
                        ("epochs=1", "plain GRPO has these settings, so nothing differs"),
                        ("seed=3", "--set seed: all arms have the same task, seeds and folders"),
                        ("max_number=9", "--set max_number: all arms have the same task")):
        assert said in refusal(main, ["--set", typed, *argv])
    assert "give one of these" in refusal(main, ["span", "--set", "epochs=2", *argv])
    assert "--screen measures" in refusal(main, ["--set", "epochs=2", "--screen", *argv])


def test_where_all_tokens_are_of_one_category_there_is_one_placebo(tmp_path, monkeypatch, capsys):
    for has_kinds, count in ((True, 4), (False, 3)):
        monkeypatch.setattr(idea, "look", lambda *given: has_kinds)
        _, flags = arms_of("by_kind", {})
        arms = {key: Arm(key, of_arm, tmp_path) for key, of_arm in flags.items()}
        first_look("by_kind", arms)
        assert len(arms) == count
        assert ("so there is one placebo" in capsys.readouterr().out) == (not has_kinds)


class close_call:
    def __call__(self, rollouts, policy):
        return rollouts.entropy


def of_states(rollouts):
    return rollouts.hidden[0][:, 0]


@pytest.mark.parametrize("flags, is_book", [
    ({}, True), ({"kl": 0.1, "device": "cpu"}, True), ({"lora": 1}, False),
    ({"mitigation": "by_kind"}, True), ({"mitigation": "random"}, False),
    ({"mitigation": "by_kind", "placebo": "weights"}, False),
    ({"rescale": "gradient"}, False), ({"mitigation": "close_call"}, False),
    ({"mitigation": "of_states"}, False)])
def test_which_program_trains_an_arm(monkeypatch, flags, is_book):
    """train.py, unless it lacks a flag, or the method is a class or reads what only the lab has."""
    for method in (close_call, of_states):
        monkeypatch.setitem(mitigations.MITIGATIONS, method.__name__, method)
    assert is_of_book(flags) == is_book


def test_runs_of_an_arm_are_used_again_with_the_same_settings_and_data(learner, tmp_path):
    model = shutil.copytree(learner, tmp_path / "model")
    usual = {"model": str(model), "steps": 3}
    before = Arm("x", usual, tmp_path).folder
    assert before == Arm("x", usual | {"steps": 9, "seed": 3, "threads": 2}, tmp_path).folder
    assert before != Arm("x", usual | {"answers": 9}, tmp_path).folder
    (model / "generation_config.json").write_text("{}")
    assert before != Arm("x", usual, tmp_path).folder


def test_a_large_model_keeps_its_recipe_and_leaves_no_model(tmp_path, monkeypatch):
    """It is evaluated at the end. If it names no steps, a CPU makes few, and a GPU the usual
    number."""
    monkeypatch.setattr(Arm, "copied", lambda arm: tmp_path)
    typed = {"model": str(large_folder(tmp_path))}
    (tmp_path / "recipe.json").write_text('{"steps": 9}')
    _, of_arm = arms_of("by_kind", typed)
    assert of_arm["plain"] == {"checkpoint_every": 0, "model": str(tmp_path), "steps": 4,
                             "eval_every": 4}
    assert not Arm("x", of_arm["plain"], tmp_path).planned_run(0).keeps_checkpoints
    _, of_arm = arms_of("by_kind", typed | {"steps": "7", "checkpoint_every": "3"})
    assert (of_arm["idea"]["steps"], of_arm["idea"]["eval_every"]) == (7, 7)
    assert of_arm["idea"]["checkpoint_every"] == 3
    assert Arm("x", of_arm["idea"], tmp_path).planned_run(0).keeps_checkpoints
    on_gpu = arms_of("by_kind", typed | {"device": "cuda"})[1]["plain"]
    assert on_gpu == of_arm["plain"] | {"device": "cuda", "steps": 4, "eval_every": 4,
                                      "checkpoint_every": 0}
    (tmp_path / "recipe.json").write_text('{"eval_tasks": 9}')  # its own, which names no steps
    assert arms_of("by_kind", typed)[1]["plain"]["steps"] == 20
    _, of_arm = arms_of("by_kind", typed | {"device": "cuda"})
    assert of_arm["plain"]["steps"] == 60 and of_arm["plain"]["threads"] == 1
    assert of_arm["plain"]["checkpoint_every"] == 0


@pytest.mark.slow
def test_from_the_function_to_the_verdict(learner, tmp_path, monkeypatch, capfd):
    """Four arms of two seeds; the next idea uses plain GRPO's again, and is counted."""
    argv = ["--model", str(learner), *SMALL, "--runs", str(tmp_path / "my ideas")]
    make_here(monkeypatch)
    freed = []
    monkeypatch.setattr(idea, "return_memory", lambda: freed.append(
        [len([*tmp_path.rglob(name)]) for name in ("train.py", "s0")]))
    main(["by_kind", "--word_weight", "0.1", *argv])
    said = capfd.readouterr().out
    for part in ("8 of 8 runs have to be made, 2 at a time", "finished: by_kind-placebo-s1",
                 "finished: by_kind-placebo-kind-s1", "by_kind minus"):
        assert part in said
    *_, pointers = said.rstrip().split("\n\n")  # nothing comes after the last paragraph
    assert pointers.startswith("To repeat all of it: python -m lab idea by_kind")
    assert "greedy" in said
    folders = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "my ideas").iterdir())
    assert folders == ["by_kind", "by_kind-placebo", "by_kind-placebo-kind", "plain"]
    [typed] = re.findall("all runs: python -m lab compare (.*)", said)
    found = [list(map(Path, glob(pattern))) for pattern in shlex.split(typed)]
    assert [[run.name for run in arm] for arm in map(sorted, found)] == 4 * [["s0", "s1"]]
    for folder in (tmp_path / "my ideas").iterdir():
        assert [len(lines(folder / f"s{seed}/metrics.jsonl")) for seed in (0, 1)] == [2, 2]
    assert freed == [[4, 0]]  # the files are copied before the look, whose memory no run needs

    main(["by_kind", "--word_weight", "0.2", "--placebos", "any", *argv])
    said = " ".join(capfd.readouterr().out.split())
    assert "4 of 6 runs have to be made" in said
    assert ("plain GRPO was compared 2 times: with by_kind here, and with by_kind --word_weight "
            "0.1 (2 seeds)") in said


def test_the_shares_of_ten_tokens():
    """Eight words of weight 0.5 and two numbers of weight 3, sizes alike: shares 4/10 and 6/10 of
    8/10 and 2/10."""
    kind, ones = np.array([WORD] * 8 + [NUMBER] * 2), np.ones(10)
    weight = np.where(kind == NUMBER, 3.0, 0.5)
    assert share_gains(kind, weight, ones) == "number 3.00, word 0.50"
    assert share_gains(kind, 0 * ones, ones) == "word 0.00, number 0.00"  # nothing has a gradient


def test_of_a_large_model_one_batch_is_looked_at(monkeypatch, capsys):
    s = make_settings({"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2,
                       "answers": 4, "max_new_tokens": 48})
    monkeypatch.setattr("lab.engine.model.Qwen2.is_large", True)
    look("itself", s, s)
    assert "for 8 answers" in capsys.readouterr().out


def test_it_is_what_training_gives_the_tokens(capsys):
    """The untrained model's answers; weights of plain GRPO change nothing."""
    plain = {"model": str(ROOT / "models/tiny"), "threads": 1, "questions": 2, "answers": 4,
             "max_new_tokens": 48}
    settings = [make_settings(plain | more) for more in ({}, {"mitigation": "by_kind"})]
    look("itself", settings[0], settings[0])
    printed = capsys.readouterr().out
    assert "for 32 answers" in printed
    gradient = printed.partition("in plain GRPO: ")[2]
    assert {part.split()[-1] for part in gradient.split(", ")} == {"1.00"}
    assert look("by_kind", *settings)  # tokens are of several categories
    said = capsys.readouterr().out
    assert "word 0." in said and "operator 1." in said


def test_answers_that_are_dropped_have_no_weight(monkeypatch):
    """Of two answers to a problem one ends: the tokens of that one weigh 1 on average."""
    s = make_settings({"model": str(ROOT / "models/tiny"), "questions": 2, "answers": 2,
                       "max_new_tokens": 40, "drop_unfinished": True, "mitigation": "by_kind"})
    policy = load_policy(s)
    batch = sample(policy, s, 1)
    finished = torch.tensor([True, False, True, False])
    batch = replace(batch, finished=finished)
    rollouts, weight, _ = credited(
        batch, (make_advantage(s, policy), make_weighting(s, policy)), policy, s, 1)
    assert rollouts.mask[finished].any() and not rollouts.mask[~finished].any()
    assert weight[rollouts.mask].mean().item() == pytest.approx(1)
    _, placebo, _ = credited(batch, (make_advantage(s, policy), make_weighting(s, policy)), policy,
                             replace(s, placebo="weights"), 1)
    assert not torch.equal(placebo, weight)  # as examples/guess.py trains
    torch.testing.assert_close(placebo[rollouts.mask].sort()[0], weight[rollouts.mask].sort()[0])
