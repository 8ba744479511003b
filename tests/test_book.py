"""The files at the root are the whole program: what a reader reads is what runs."""
import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import run as book
import train
from conftest import ANY, BOOK, COMMON, ROOT, copy_of_the_book, hand_made, refusal
from grpo import add_choice
from mitigations import MITIGATIONS
from qwen2_model import UserError
from run import default_folder, read_settings
from runs import arrays, config_of, everything, lines, typed

ONE_STEP = ["--threads", "1", "--questions", "2", "--answers", "2", "--max_new_tokens", "24",
            "--seed", "3", "--steps", "1", "--eval_every", "0"]
# run programs one after the other as __main__, then print which of the project's modules are loaded
LOADED = """
import json, runpy, sys
from pathlib import Path
sys.modules |= dict.fromkeys(["fcntl", "resource"])  # which Windows does not have
for sys.argv[:] in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
own = [file.stem for m in list(sys.modules.values()) if getattr(m, "__file__", None)
       and (file := Path(m.__file__)).is_relative_to(Path.cwd())
       and not file.is_relative_to(sys.prefix)]  # an environment may lie in the project's folder
print("LOADED", *sorted({*own, "torch._dynamo"} if "torch._dynamo" in sys.modules else own))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return copy_of_the_book(tmp_path_factory.mktemp("alone"))


def test_alone_it_trains_and_analyses(alone):
    """And loads nothing but the book: no compiler of torch's, which takes seconds."""
    commands = (["train.py", "--mitigation", "none", *ONE_STEP, "--out", "a"], ["analyze.py", "a"])
    ended = subprocess.run([sys.executable, "-c", LOADED, json.dumps(commands)], cwd=alone,
                           capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert ended.returncode == 0, ended.stderr
    assert "done" in ended.stdout and "Where the gradient went" in ended.stdout
    assert set(ended.stdout.splitlines()[-1].split()[1:]) <= {*BOOK}
    assert (alone / "a/analysis/report.html").exists()


@pytest.fixture
def shown(tmp_path):
    """A function that says what a file of the book shows of its concept when it is run as a
    program. It makes nothing, works from any folder, and beside folders of any names."""
    book = copy_of_the_book(tmp_path / "book")
    for name in (*BOOK, "models/tiny", "runs", "lab", "torch", "book/grpo", "book/numpy"):
        (tmp_path / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))

    def show(name):
        code, said = typed(tmp_path, book / name)
        found = [line for line in said.splitlines() if line.strip()]
        assert code == 0 and 1 < len(found) <= 10, said
        assert [path for path in sorted(tmp_path.rglob("*")) if "__pyc" not in str(path)] == before
        return found

    return show


@pytest.mark.parametrize("name, words", [
    ("countdown_task.py", "3 5 7 make 22.*'reward': 1.1,.*'reward': 0.1,"),
    ("run.py", "metrics.jsonl.*python train.py --help"),
    ("analyze.py", "python analyze.py runs/none-grpo-s0.*gradient .*push .*change ")])
def test_what_the_task_a_run_and_an_analysis_are_is_shown(shown, name, words):
    assert re.search(words, " ".join(shown(name)))


def test_the_model_shows_an_answer_token_by_token_with_its_probability(shown):
    prompt, *tokens = shown("qwen2_model.py")
    assert "3 5 7 make 22" in prompt
    found = re.findall(r"('[^']*') (\d\.\d{3})", "".join(tokens))
    assert "answer" in "".join(ast.literal_eval(text) for text, _ in found)
    assert len(found) > 20 and all(0 < float(p) <= 1 for _, p in found)


def test_grpo_shows_four_rewards_their_advantages_and_what_an_update_does(shown):
    """The advantages are worked out again from the rewards that it prints."""
    _, *answers = shown("grpo.py")
    reward, advantage, before, after = np.array([line.split()[:4] for line in answers], float).T
    expected = (reward - reward.mean()) / (reward.std() + 1e-4)
    assert len(answers) == 4 and np.abs(advantage - expected).max() < 0.01
    assert (before < 0).all() and (before != after).all()


def test_the_weightings_show_their_weights_on_one_answer_with_a_mean_of_1(shown):
    tokens, _, *rows = shown("mitigations.py")
    assert "<answer>" in tokens and rows[0].startswith("outcome_conditional")
    weights = np.array([row.split()[1:] for row in rows], float)
    assert np.abs(weights.mean(1) - 1).max() < 0.01


# ---------------------------------------------------------------------------------------- the flags
WRONG = {  # what is typed, and what the one line says
    "--mitigation": "argument --mitigation: expected one argument",
    "--mitigation nne": "invalid choice: 'nne' (choose from 'none', 'outcome_conditional'",
    "--lora 1": "unrecognized arguments: --lora 1 (--help lists the flags; `python -m lab train`",
    "--learning_rate nan": "--learning_rate nan: should be 0 or more",
    "--kl=-1": "should be 0 or more",
    "--epochs 0": "--epochs 0: should be 1 or more",
    "--answers 1": "--answers 1: should be 2 or more",
    "--min_number 16": "--min_number is above --max_number",
    "--kl inf": "should be 0 or more",
    "--resume models/tiny": "unrecognized arguments: --architectures=",
    "--resume nowhere": "cannot read nowhere/config.json: No such file",
    "--out=": "a flag has no value",
    "--resume ": "a flag has no value",
    "--mitigation none --think_discount 0.3": "unrecognized arguments: --think_discount 0.3"}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_flag_is_told(words, monkeypatch):
    """An empty value may come from a variable, as in --resume "$RUN"."""
    monkeypatch.chdir(ROOT)
    assert WRONG[words] in refusal(read_settings, words.split(" "))


def test_a_wrong_command_ends_in_one_sentence_and_leaves_nothing(alone):
    before = everything(alone)
    for program, words, sentence in (
            ("train.py", "--out train.py/run", "File exists: 'train.py'"),
            ("train.py", "--model gpt2", "hf download Qwen/Qwen2.5-Coder-0.5B-Instruct"),
            ("analyze.py", "nowhere", "nowhere is not the folder of a run")):
        code, said = typed(alone, program, *words.split())
        assert code == 1 and said.startswith(f"{program}: ") and said.count("\n") == 1
        assert sentence in said and everything(alone) == before


def recipe(folder, **values):
    shutil.copytree(ROOT / "models/tiny", folder)
    (folder / "recipe.json").write_text(json.dumps(values))
    return ["--model", str(folder)]


def test_a_recipe_replaces_the_defaults_and_what_is_typed_replaces_both(tmp_path):
    """A hyphen in the name of a flag is an underscore."""
    flags = recipe(tmp_path / "a", steps=7, kl=0.5, max_number=9, mask_percentile=50.0,
                   mitigation="entropy_masking")
    s = read_settings([*flags, "--steps", "8", "--mask-percentile=-1"])
    assert (s.steps, s.kl, s.seed, s.mitigation) == (8, 0.5, 0, "entropy_masking")
    assert s.keywords["max_number"] == 9 and s.keywords["mask_percentile"] == -1
    for number, (name, value, sentence) in enumerate((
            ("lora", 1, "unrecognized arguments: --lora=1 (--help lists the flags; `python -m lab"),
            ("steps", 2.5, "invalid int value: '2.5'"), ("steps", None, "invalid int value: 'None"),
            ("mitigation", ["none"], "invalid choice"), ("kl", -1, "should be 0 or more"))):
        assert sentence in refusal(read_settings, recipe(tmp_path / str(number), **{name: value}))


def test_a_run_lies_in_the_project_from_wherever_the_command_is_typed(tmp_path, monkeypatch):
    """So does models/tiny. A run's name has what was typed, but for what changes no number."""
    for folder in (ROOT, ROOT / "models", tmp_path):
        monkeypatch.chdir(folder)
        s = read_settings([])
        assert Path(s.out).resolve() == ROOT / "runs/none-grpo-s0" and s.questions == 16
    s = read_settings(["--kl", "0.5", "--threads", "1", "--mitigation", "by_kind"])
    assert Path(s.out).name == "by_kind-grpo-kl0.5-s0"
    assert default_folder(vars(s), {"model": "a/b"}).endswith("by_kind-grpo-b-s0")


def test_what_is_typed_is_on_record_and_cannot_be_changed_in_a_resumed_run(tmp_path):
    """Flags that change no number so far can be."""
    out = str(tmp_path / "run")
    flags = ["--mitigation", "entropy_weighted", "--entropy_temp", "0.5", "--seed", "3"]
    book.Run(read_settings([*flags, "--out", out])).begin()
    saved = config_of(tmp_path / "run")
    assert saved["entropy_temp"] == 0.5 and saved["torch"] == torch.__version__
    assert not {"think_discount", "out", "resume"} & saved.keys()
    s = read_settings(["--resume", out, "--steps", "9", "--threads", "2", "--seed", "3"])
    assert (s.steps, s.threads, s.keywords["entropy_temp"]) == (9, 2, 0.5)
    others = dict(mitigation="none", advantage="rloo", rescale="none", prompt="full", numbers="2")
    for name in saved.keys() - {"steps", "threads", "checkpoint_every", "torch", "device"}:
        assert f"--{name} cannot be changed in a resumed run" in refusal(
            read_settings, ["--resume", out, f"--{name}", others.get(name, "7")])


# -------------------------------------------------------------------------- functions of one's own
MINE = '''

@mitigation
def mine(rollouts, *, strength=1.0, power=2) -> Tensor:
    """100% my own."""
    return rollouts.entropy ** power - strength
'''


def test_a_function_of_ones_own_is_a_choice_with_its_flags(tmp_path):
    """Also without types, and with a negative number; a mistake is told with its place."""
    folder = copy_of_the_book(tmp_path)
    text = (folder / "mitigations.py").read_text()
    (folder / "mitigations.py").write_text(text + MINE)
    flags = ["train.py", *ONE_STEP, "--mitigation", "mine", "--rescale", "none", "--out", "run"]
    code, said = typed(folder, *flags, "--strength", "1e3")
    line = len(text.splitlines()) + 3
    assert code == 1 and "Traceback" not in said and said.splitlines()[-1].startswith(
        f"train.py: mine (mitigations.py:{line}) is negative at")
    shutil.rmtree(folder / "run")
    code, said = typed(folder, *flags, "--strength", "-1.5", "--power", "3")
    assert code == 0, said
    credit = arrays(folder / "run/credit/step_000001.npz")
    assert credit["weight"] == pytest.approx(credit["entropy"] ** 3 + 1.5)
    code, said = typed(folder, "train.py", "--help")
    assert code == 0 and "\nmine --strength 1.0 --power 2\n" in said and "100% my own." in said


def test_a_second_function_of_one_name_is_refused():
    """But not in a notebook, whose cells are run again."""
    choices, (first, second) = {}, (lambda rollouts: 1,
                                    lambda rollouts: 2)
    assert add_choice(choices, first) is add_choice(choices, first) is first
    with pytest.raises(SystemExit, match=r"two functions <lambda> \(test_book.py:\d+\) and <lamb"):
        add_choice(choices, second)
    cell = type(second)(second.__code__, {}, "<lambda>")
    assert add_choice(choices, cell) is cell and choices == {"<lambda>": cell}


@pytest.mark.parametrize("mine, said", [
    (lambda rollouts, *, kl=1.0: 1, "conflicting option string: --kl"),
    (type("Mine", (), {}), "Mine is no function")])  # perhaps a method of the lab
def test_what_cannot_be_a_weighting_is_refused_when_it_is_chosen(monkeypatch, mine, said):
    monkeypatch.setitem(MITIGATIONS, "mine", mine)
    with pytest.raises((UserError, argparse.ArgumentError), match=said):
        read_settings(["--mitigation", "mine"])
    assert read_settings([]).mitigation == "none"


# -------------------------------------------------------------------------------------- the numbers
@pytest.mark.numerics
def test_the_first_step_has_the_digits_that_hold_on_any_machine(tmp_path):
    """The same sampled tokens, rewards and labels as the lab's engine, and metrics to rounding."""
    train.main([*map(str, COMMON), "--steps", "1", "--out", str(tmp_path / "digits")])
    known = json.loads(ANY.read_text())
    credit = arrays(tmp_path / "digits/credit/step_000001.npz")
    for name in known["columns"]:
        data = np.ascontiguousarray(credit[name]).tobytes()
        assert hashlib.sha256(data).hexdigest()[:12] == known["columns"][name], name
    [line] = lines(tmp_path / "digits/metrics.jsonl")
    for name in ("reward", "success", "loss", "gradient_norm", "entropy", "collision", "length"):
        assert line[name] == pytest.approx(known["metrics"][name], rel=2e-3), name


def test_what_a_model_wrote_steers_no_terminal():
    assert book.printable("\x1b[31mred\x07\x9b2J\n \u202eleft\ttab\r") == "[31mred2J left tab"


def test_the_means_of_a_step_by_hand():
    """Two problems with two answers each, of 2, 1, 1 and 2 tokens."""
    scores = {"reward": torch.tensor([1.1, 0.1, 0.0, 0.0]), "answer": torch.tensor([1.0, 0, 0, 0])}
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    found = train.means_of(hand_made(
        mask, group=torch.tensor([0, 0, 1, 1]), scores=scores,
        finished=torch.tensor([True, True, True, False]), entropy=mask * 1.5, collision=mask * 0.5))
    assert found == pytest.approx({
        "reward": 0.3, "reward_answer": 0.25, "success": 0.25, "tokens": 6, "length": 1.5,
        "finished": 0.75, "groups_without_spread": 0.5, "entropy": 1.5, "collision": 0.5})
    # no part of the reward says which answer is right
    assert np.isnan(train.means_of(hand_made(mask, scores={"reward": torch.ones(4)}))["success"])


def test_the_interval_of_a_proportion_by_hand():
    """With z = 1.96: 1 of 4, (0.25 + z^2 / 8 -+ z sqrt(0.1875 / 4 + z^2 / 64)) / (1 + z^2 / 4)."""
    assert train.wilson_interval(1, 4) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert train.wilson_interval(4, 4) == pytest.approx((4 / (4 + 1.96 ** 2), 1), abs=1e-4)
