"""The files at the root are the whole program: what a reader reads is what runs."""
import contextlib
import hashlib
import io
import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import train
from conftest import ROOT, refusal
from golden import ANY, COMMON
from lab.harness.settings import make_settings
from run import Run, Settings, read_settings, recipe_in
from runs import arrays, lines, program_here

BOOK = ("countdown_task", "qwen2_model", "grpo", "mitigations", "train", "run", "analyze")
TINY = ["--threads", "1", "--questions", "2", "--answers", "4", "--max_new_tokens", "24",
        "--eval_tasks", "8", "--eval_every", "2", "--checkpoint_every", "2"]
# run programs one after the other as __main__, then print which of the project's modules are loaded
LOADED = """
import json, runpy, sys
from pathlib import Path
for sys.argv[:] in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
own = [file.stem for m in list(sys.modules.values()) if getattr(m, "__file__", None)
       and (file := Path(m.__file__)).is_relative_to(Path.cwd())
       and not file.is_relative_to(sys.prefix)]  # an environment may lie in the project's folder
print("LOADED", *sorted({*own, "torch._dynamo"} if "torch._dynamo" in sys.modules else own))
"""


def python(*words, cwd, code=0):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def typed(folder, *words):
    """The status and the text of this command, which is typed in this folder: with modules of its
    own, and in this process, which has imported PyTorch."""
    said, code, words = io.StringIO(), 0, [*map(str, words)]
    others = {name: sys.modules.pop(name) for name in BOOK if name in sys.modules}
    with (contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
          contextlib.chdir(folder), patch.object(sys, "argv", words),
          patch.object(sys, "path", [str(folder), *sys.path])):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code)
                code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
    for name in BOOK:
        sys.modules.pop(name, None)
    sys.modules.update(others)
    return code, said.getvalue()


def assert_one_sentence(found, sentence):
    code, said = found
    assert code == 1 and said.startswith("train.py: ") and said.count("\n") == 1
    assert sentence in said


def copy_of_the_book(folder):
    """The book and the models, and nothing else."""
    folder.mkdir(exist_ok=True)
    for name in BOOK:
        shutil.copy(ROOT / f"{name}.py", folder)
    shutil.copytree(ROOT / "models/tiny", folder / "models/tiny")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return copy_of_the_book(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two_steps(alone):
    """A function that makes a copy, of this name, of a run of two steps."""
    typed(alone, "train.py", *TINY, "--steps", "2", "--out", "two_steps")
    return lambda name: shutil.copytree(alone / "two_steps", alone / name)


def test_only_one_place_names_the_lab():
    lines = [line.strip() for name in BOOK
             for line in (ROOT / f"{name}.py").read_text().splitlines()]
    imports = [line for line in lines if line.startswith(("from lab", "import lab"))]
    assert imports == ["from lab.run import main as beyond"]


def test_alone_it_trains_analyses_and_resumes_to_the_bit(alone):
    """And loads nothing but the book: no compiler of torch's, which takes seconds."""
    commands = (["train.py", "--mitigation", "none", *TINY, "--steps", "3", "--out", "b"],
                ["train.py", "--mitigation", "none", *TINY, "--steps", "4", "--out", "a"],
                ["train.py", "--resume", "b", "--steps", "4"], ["train.py", "--resume", "b"],
                ["analyze.py", "a"])
    said = python("-c", LOADED, json.dumps(commands), cwd=alone)
    for words in ("done", "continuing b after step 3", "is finished", "Where the gradient went"):
        assert words in said
    assert set(said.splitlines()[-1].split()[1:]) <= {*BOOK}
    weights = "checkpoints/step_000004/model.safetensors"
    assert (alone / "a" / weights).read_bytes() == (alone / "b" / weights).read_bytes()
    state = "checkpoints/step_000004/trainer/state.safetensors"
    assert (alone / "a" / state).read_bytes() == (alone / "b" / state).read_bytes()
    assert (alone / "a/analysis/report.html").exists()


def test_without_the_lab_one_sentence_says_so(alone):
    for flag, value in (("--lora", "1"), ("--advantage", "gae"), ("--task", "examples.guess"),
                        ("--device", "cuda")):
        assert_one_sentence(typed(alone, "train.py", flag, value), "lab/, which is not here")


def test_a_second_run_that_began_in_the_same_moment_harms_nothing(tmp_path):
    """Both have found no folder of that name, and only one can make it."""
    argv = [*TINY, "--steps", "1", "--out", str(tmp_path / "twice")]
    first, second = Run(*read_settings(argv)), Run(*read_settings(argv))
    first.begin()
    assert "twice exists already" in refusal(train.carry_out, second)
    assert (tmp_path / "twice/config.json").exists()
    first.close(failed=True)  # its own folder
    assert not (tmp_path / "twice").exists()


def test_ctrl_c_is_heard_also_when_it_has_ended_the_program_that_reads(monkeypatch):
    """As in `python train.py | tee log`."""
    run = SimpleNamespace(stopping=False)
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", Mock(side_effect=BrokenPipeError))
        Run.interrupt(run)
    assert run.stopping


def test_a_checkpoint_is_a_whole_model_also_when_the_first_one_is_gone(tmp_path):
    shutil.copytree(ROOT / "models/tiny", tmp_path / "mine")
    folder = str(tmp_path / "moved")
    train.main(["--model", str(tmp_path / "mine"), *TINY, "--eval_every", "0", "--steps", "2",
                "--out", folder])
    shutil.rmtree(tmp_path / "mine")
    for steps in "34":
        train.main(["--resume", folder, "--steps", steps])
    assert len(lines(tmp_path / "moved/metrics.jsonl")) == 4


DAMAGES = {  # what is written over a file of a run, and what the one line says
    ("config.json", b'{"mitigation": null}'): "--mitigation None: should be a text",
    ("config.json", b'{"mitigation": ["none"]}'): "--mitigation \"['none']\": choose from",
    ("metrics.jsonl", b'{"step": 1}\n{"st\n'): "metrics.jsonl, line 2 is damaged",
    ("checkpoints/step_000002/model.safetensors", b"cut"): "model.safetensors cannot be read",
    ("checkpoints/step_000002/trainer/state.safetensors", b""): "its trainer's state has changed",
}


def test_a_damaged_run_ends_in_one_sentence(alone, two_steps):
    for number, ((file, held), sentence) in enumerate(DAMAGES.items()):
        folder = two_steps(f"damaged_{number}")
        (folder / file).write_bytes(held)
        assert_one_sentence(typed(alone, "train.py", "--resume", folder.name, "--steps", "3"),
                            sentence)


def test_a_full_disk_ends_in_one_sentence(alone):
    """No file may be larger than 1 MB here, and a model's is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 ** 20, hard))
    try:
        code, said = typed(alone, "train.py", *TINY, "--steps", "2", "--eval_every", "0", "--out",
                           "large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and said.splitlines()[-1].startswith("train.py: ")
    assert "File too large" in said and "Traceback" not in said


SCORES = {  # what a reward of one's own returns, and what the one line says of it
    "{'reward': int(right), 'format': form, 'answer': right}": None,
    "{'reward': 1.0}": "should return a dict with a finite number for reward",
    "1.0": "should return a dict with a finite number for reward",
    "{'reward': float('nan'), 'format': form, 'answer': right}": "a finite number for reward",
    "{'reward': None, 'format': form, 'answer': right}": "a finite number for reward",
    "{'reward': 1 / 0}": "score (countdown_task.py:",
}


def test_a_reward_of_ones_own(tmp_path):
    for number, (returned, sentence) in enumerate(SCORES.items()):
        folder = copy_of_the_book(tmp_path / str(number))
        file = folder / "countdown_task.py"
        file.write_text(file.read_text().replace("return {\"reward\"", f"return {returned}\n#"))
        code, said = typed(folder, "train.py", *TINY, "--steps", "1", "--eval_every", "0")
        assert code == bool(sentence) and "Traceback" not in said
        assert (sentence or "") in said.splitlines()[-1]


def test_without_torch_the_way_out_is_told():
    said = python("-c", "import runpy, sys; sys.modules['torch'] = None\n"
                  "runpy.run_path('train.py', run_name='__main__')", cwd=ROOT, code=1)
    assert said.count("\n") == 1 and said.startswith("train.py: ")
    assert "pip install -r requirements.txt" in said


def test_a_recipe_names_neither_a_model_nor_a_folder(tmp_path):
    for name in ("model", "out"):
        (tmp_path / "recipe.json").write_text(json.dumps({"steps": 1, name: "elsewhere"}))
        assert f"sets {name}, which the recipe" in refusal(recipe_in, tmp_path / "recipe.json")
        said = refusal(make_settings, {"model": str(tmp_path)})
        assert f"sets {name}, which the recipe" in said
    assert recipe_in(tmp_path / "none.json") == {}


def test_a_run_lies_in_the_project_from_wherever_in_it_the_command_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    assert Settings().folder == make_settings({}).folder == Path("../runs/none-grpo-s0")
    monkeypatch.chdir(ROOT)
    assert Settings().folder == Path("runs/none-grpo-s0")
    monkeypatch.chdir(tmp_path)
    assert Settings().folder == Path("runs/none-grpo-s0")


WRONG = {  # what is typed, and what the one line says
    "--mitigation": "argument --mitigation: expected one argument",
    "--mitigation nne": "Did you mean none?",
    "--mitigation rloo": "which is an --advantage",
    "--advantage none": "which is an --mitigation",
    "--lroa 3": "unknown flag --lroa",
    "--stpes 3": "Did you mean steps?",
    "--steps 2.5": "argument --steps: invalid int value: '2.5'",
    "--learning_rate nan": "should be a finite number",
    "--learning-rate 0": "should be above 0",
    "--rescale max": "choose from mean, none",
    "--clip_low 0.1": "need --epochs above 1",
    "--min_number 9 --max_number 3": "--min_number 9 is above --max_number 3",
    "--max_number 5000": "cannot spell the prompt",
    "--max_new_tokens 5000": "the model takes 1024 tokens",
    "--model nowhere": "there is no model folder nowhere",
    "--model models": "Model folders in it: models/tiny",
    "--resume models/tiny": "is not the folder of a run",
    "--resume nowhere": "cannot read nowhere/config.json: No such file",
    "--mitigation none --think_discount 0.3": "unknown flag --think_discount",
    "--seed -1": "should be at least 0",
}


def test_a_wrong_command_ends_in_one_sentence_and_leaves_nothing(tmp_path):
    folder = copy_of_the_book(tmp_path)
    before = {path.name for path in folder.iterdir()}
    for words, sentence in WRONG.items():
        assert_one_sentence(typed(folder, "train.py", *words.split()), sentence)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


MISTAKES = {  # the body of a weighting of one's own, and what the one line says of it
    "return rollouts.log_prob.exp()": None,
    "return strength * rollouts.entropy + 1": None,
    "return torch.ones(3)": "should return a tensor (B, T) =",
    "return rollouts.reward": "should return a tensor (B, T) =",
    "return -torch.ones_like(rollouts.log_prob)": "is negative at",
    "return rollouts.entropy / 0": "token",
    "return torch.arange(7)[None] / rollouts.length": "RuntimeError",
    "pass": "got None",
    "return rollouts.log_prob + 1j": "should return a tensor (B, T) =",
    "raise ValueError(chr(27) + '[31m')": "ValueError: ?[31m",
}


def test_a_weighting_of_ones_own(tmp_path):
    """It becomes a choice with its flag, also without a type; a mistake is told with its place."""
    folder = copy_of_the_book(tmp_path)
    with open(folder / "mitigations.py", "a") as file:
        for number, body in enumerate(MISTAKES):
            file.write(f"\n\n@mitigation\ndef mine_{number}(rollouts, *, strength=1.0) -> Tensor:\n"
                       f'    """My own."""\n    {body}\n')
    assert "--strength" in typed(folder, "train.py", "--help", "mine_0")[1]
    for number, sentence in enumerate(MISTAKES.values()):
        name = f"mine_{number}"
        code, said = typed(folder, "train.py", "--mitigation", name, "--strength", "2", *TINY,
                           "--steps", "1", "--eval_every", "0", "--out", name)
        assert code == bool(sentence) and (folder / name).exists() == (not sentence), said
        if sentence:
            assert sentence in said and said.splitlines()[-1].startswith(f"train.py: {name} (mitig")
            assert "Traceback" not in said


CLASHES = {
    "@mitigation\ndef none(rollouts):\n    return 1": "two functions none",
    "@mitigation\ndef mine(rollouts, *, kl: float = 1.0):\n    return 1": "a keyword kl",
    "@mitigation\ndef mine(rollouts, *, help=1.0):\n    return 1": "a keyword help",
    "@mitigation\ndef mine(rollouts, *, versions='a'):\n    return 1": "a keyword versions",
    "@mitigation\ndef mine(rollouts, *, x: float | None = None):\n    return 1": "a default",
    "@mitigation\ndef mine(rollouts, *, x: Annotated[int, ''] = 1):\n    return 1": "a dict",
    "@mitigation\ndef mine(rollouts, *, strength):\n    return 1": "with a default"}


def test_names_that_clash(tmp_path):
    """One that is not asked for is in nobody's way, unless it has the name of another."""
    for number, (clash, sentence) in enumerate(CLASHES.items()):
        folder = copy_of_the_book(tmp_path / str(number))
        with open(folder / "mitigations.py", "a") as file:
            file.write(f"\n\n{clash}\n")
        name = "none" if "none" in clash else "mine"
        code, said = typed(folder, "train.py", "--mitigation", name)
        assert code == 1 and sentence in said and "Traceback" not in said
        assert typed(folder, "train.py", "--steps", "0", "--eval_every", "0")[0] == (
            name == "none")


def test_the_first_step_has_the_digits_that_hold_on_any_machine(tmp_path):
    """The same sampled tokens, rewards and labels as the lab's engine, and metrics to rounding."""
    train.main([*map(str, COMMON), "--steps", "1", "--out", str(tmp_path / "digits")])
    known = json.loads(ANY.read_text())["default"]
    credit = arrays(tmp_path / "digits/credit/step_000001.npz")
    for name in known["columns"]:
        data = np.ascontiguousarray(credit[name]).tobytes()
        assert hashlib.sha256(data).hexdigest()[:12] == known["columns"][name], name
    [line] = lines(tmp_path / "digits/metrics.jsonl")
    for name in ("reward", "success", "loss", "gradient_norm", "entropy", "collision", "length"):
        assert line[name] == pytest.approx(known["metrics"][name], rel=2e-3), name


def test_a_model_whose_probabilities_are_not_finite_is_not_trained(tmp_path):
    broken = shutil.copytree(ROOT / "models/tiny", tmp_path / "broken") / "model.safetensors"
    tensors = load_file(broken)
    tensors["model.norm.weight"][:] = 3e38
    save_file(tensors, broken)
    assert "probabilities are not finite" in refusal(train.main, [
        "--model", str(broken.parent), *TINY, "--eval_every", "0", "--steps", "1", "--out",
        str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_step_in_which_no_answer_ended_says_so(tmp_path, capsys):
    train.main([*TINY, "--max_new_tokens", "5", "--steps", "1", "--eval_every", "0", "--out",
                str(tmp_path / "cut_off")])
    said = capsys.readouterr().out
    assert "equal rewards, and none was finished within --max_new_tokens" in said


def test_the_lab_takes_over_what_is_not_in_the_book(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "train", train)  # a program that runs puts itself there
    said = program_here(ROOT / "train.py", *TINY[:6], "--steps", "1", "--eval_every", "0", "--lora",
                        "2", "--out", tmp_path / "x")
    assert "LoRA of rank 2" in said
    # a misspelt flag finds the right one of the larger list
    assert "lora" in program_here(ROOT / "train.py", "--lroa", "2", expect=1)


def test_the_time_that_is_left_has_minutes_and_seconds(monkeypatch, tmp_path, capsys):
    """After 46 seconds two of six steps are done, so 92 seconds are left."""
    run = SimpleNamespace(settings=SimpleNamespace(steps=6), step=2, done=0, start=0.0,
                          has_format=True, folder=tmp_path, optimizer=SimpleNamespace(
                              learning_rate=0.1))
    numbers = {name: 0.5 for name in ("reward", "reward_format", "success", "length", "finished",
                                      "entropy", "gradient_norm", "seconds")}
    monkeypatch.setattr("run.time.monotonic", lambda: 46.2)
    Run.log(run, {"step": 2, "tokens": 8, "skipped": None, "weight_note": None, **numbers})
    assert capsys.readouterr().out.endswith(" 1:32\n")
