"""The files at the root are the whole program: what a reader reads is what runs."""
import ast
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import train
from conftest import ANY, COMMON, ROOT, refusal
from mitigations import MITIGATIONS
from run import Run, Settings, Unknown, lock, read_settings
from runs import arrays, ended_here, lines

BOOK = ("countdown_task", "qwen2_model", "grpo", "mitigations", "train", "run", "analyze")
TINY = ["--threads", "1", "--questions", "2", "--answers", "4", "--max_new_tokens", "24",
        "--eval_tasks", "8", "--eval_every", "2", "--checkpoint_every", "2"]
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


def python(*words, cwd, code=0):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def typed(folder, *words):
    """The status and the text of this command, which is typed in this folder, with modules of its
    own."""
    others = {name: sys.modules.pop(name) for name in BOOK if name in sys.modules}
    with contextlib.chdir(folder), patch.object(sys, "path", [str(folder), *sys.path]):
        found = ended_here(*words)
    for name in BOOK:
        sys.modules.pop(name, None)
    sys.modules.update(others)
    return found


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
    evaluated = [line["step"] for line in lines(alone / "b/evaluations.jsonl")]
    assert evaluated == [0, 0, 2, 2, 3, 3, 4, 4]  # at the end of each of the two, too


def shown(alone, name):
    """What a file of the book shows of its concept when it is run as a program."""
    code, said = typed(alone, name)
    assert code == 0 and 1 < len(said.splitlines()) <= 10, said
    return said.splitlines()


def test_the_task_shows_a_problem_and_the_rewards_of_a_right_and_a_wrong_answer(alone):
    problem, right, wrong, _ = shown(alone, "countdown_task.py")
    assert problem.startswith("3 5 7 make 22")
    assert "'reward': 1.1," in right and "'reward': 0.1," in wrong


def test_the_model_shows_an_answer_token_by_token_with_its_probability(alone):
    prompt, *tokens = shown(alone, "qwen2_model.py")
    assert "3 5 7 make 22" in prompt
    found = re.findall(r"('[^']*') (\d\.\d{3})", "".join(tokens))
    assert "answer" in "".join(ast.literal_eval(text) for text, _ in found)
    assert len(found) > 20 and all(0 < float(p) <= 1 for _, p in found)


def test_grpo_shows_four_rewards_their_advantages_and_what_an_update_does(alone):
    """The advantages are worked out again from the rewards that it prints."""
    _, *answers = shown(alone, "grpo.py")
    reward, advantage, before, after = np.array([line.split()[:4] for line in answers], float).T
    assert len(answers) == 4
    expected = (reward - reward.mean()) / (reward.std() + 1e-4)
    assert np.abs(advantage - expected).max() < 0.01
    assert (before < 0).all() and (before != after).all()


def test_the_weightings_show_their_weights_on_one_answer_with_a_mean_of_1(alone):
    tokens, _, *rows = shown(alone, "mitigations.py")
    assert "<answer>" in tokens and [row.split()[0] for row in rows][0] == "outcome_conditional"
    weights = np.array([row.split()[1:] for row in rows], float)
    assert np.abs(weights.mean(1) - 1).max() < 0.01


def test_run_shows_what_a_run_leaves_behind_and_where_its_flags_are(alone):
    said = "\n".join(shown(alone, "run.py"))
    assert "metrics.jsonl" in said and "python train.py --help" in said


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
    run = SimpleNamespace(stopping=False, step=1)
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", Mock(side_effect=BrokenPipeError))
        Run.interrupt(run)
    assert run.stopping


def test_ctrl_c_before_the_first_step_ends_at_once():
    """There is nothing to save, and the first evaluation may be long."""
    with pytest.raises(KeyboardInterrupt):
        Run.interrupt(SimpleNamespace(stopping=False, step=0))


def test_a_checkpoint_is_a_whole_model_also_when_the_first_one_is_gone(tmp_path):
    """It has every small file of the first one, but none of its weights or the list of them."""
    small = {name: f"{name} of mine".encode() for name in
             ("chat_template.jinja", "vocab.json", "LICENSE")}
    small["generation_config.json"] = b'{"eos_token_id": 1}'
    shutil.copytree(ROOT / "models/tiny", tmp_path / "mine")
    for name, content in small.items():
        (tmp_path / "mine" / name).write_bytes(content)
    for name in ("model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / "mine" / name).write_text("{}")
    folder = str(tmp_path / "moved")
    train.main(["--model", str(tmp_path / "mine"), *TINY, "--eval_every", "0", "--steps", "2",
                "--out", folder])
    shutil.rmtree(tmp_path / "mine")
    for steps in "34":
        train.main(["--resume", folder, "--steps", steps])
    assert len(lines(tmp_path / "moved/metrics.jsonl")) == 4
    last = tmp_path / "moved/checkpoints/step_000004"
    assert {name: (last / name).read_bytes() for name in small} == small
    assert not {*last.glob("*.index.json"), *last.glob("*.bin")}


def test_a_resumed_run_says_what_is_another_version_and_keeps_the_digest_before(tmp_path, capsys):
    """What a run cannot reach has no digest: a method that is not chosen, main, analyze.py."""
    folder = tmp_path / "run"
    train.main([*TINY, "--eval_every", "0", "--steps", "2", "--out", str(folder)])
    config = json.loads((folder / "config.json").read_text())
    digests = config["made_of"]
    assert {"policy_loss (grpo.py)", "AdamW.step (grpo.py)", "Task.score (countdown_task.py)",
            "none (mitigations.py)", "FORMAT_WEIGHT (countdown_task.py)"} <= digests.keys()
    assert not {"entropy_weighted (mitigations.py)", "rloo (grpo.py)", "main (train.py)",
                "show (grpo.py)", "Run (analyze.py)"} & digests.keys()
    every = dict.fromkeys(digests, "0")
    for steps, before, said in (("3", {"policy_loss (grpo.py)": "0"}, "policy_loss (grpo.py)"),
                                ("4", {}, ""), ("5", every, f" and {len(every) - 5} more")):
        config["made_of"] = digests | before
        (folder / "config.json").write_text(json.dumps(config))
        train.main(["--resume", str(folder), "--steps", steps])
        printed = capsys.readouterr().out
        assert ("changed since the " in printed) == bool(said) and (
            f"{said}. So what follows" in printed) == bool(said)
        config = json.loads((folder / "config.json").read_text())
        assert config["made_of"] == digests
        first = {"after_step": 2, "files": {"policy_loss (grpo.py)": "0"}}
        assert config["changed"] == [first, *[{"after_step": 4, "files": every}] * (steps == "5")]


def test_what_people_have_laid_into_a_run_is_no_part_of_it_and_stays(tmp_path):
    folder = tmp_path / "run"
    train.main([*TINY, "--eval_every", "0", "--steps", "2", "--out", str(folder)])
    made = folder / "checkpoints/step_000002"
    for name in ("step_000002.best", "step_000009.keep", "step_000001.npz", "step_9_best"):
        shutil.copytree(made, made.with_name(name))
    notes = [folder / "credit" / name for name in (
        "step_notes.txt", "step_000009.txt", "step_000009_old.npz", "step_000009 (copy).npz")]
    for path in notes:
        path.write_text("mine")
    train.main(["--resume", str(folder), "--steps", "6", "--checkpoint_every", "1"])
    kept = {path.parent.name for path in folder.glob("checkpoints/*/trainer")}
    assert {"step_000002.best", "step_000009.keep", "step_9_best", "step_000005",
            "step_000006"} <= kept and all(path.exists() for path in notes)
    assert "step_000002" not in kept


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    """Also if its last step is on record, and only the checkpoint of this step is not there."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"checkpoint_every": 2}')
    run = SimpleNamespace(folder=tmp_path, settings=SimpleNamespace(steps=9))
    for made in (1, 2, 3):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * made)
        if made < 3:
            Run.where_to_go_on(run)
            assert run.done == 0 and not run.is_finished
    assert "has 3 steps on record, and no checkpoint" in refusal(Run.where_to_go_on, run)


def test_with_a_kl_term_a_run_keeps_its_first_model(tmp_path):
    run = Run(*read_settings([*TINY, "--kl", "0.1", "--out", str(tmp_path / "run")]))
    first = [*run.reference.parameters()]
    assert not any(one.requires_grad or one is own for one, own in zip(first, run.trained.values()))


def test_a_model_that_is_not_finite_any_more_is_not_saved(tmp_path):
    run = Run(*read_settings([*TINY, "--out", str(tmp_path / "run")]))
    run.begin()
    run.model.model.embed_tokens.weight.data[-1] = float("nan")
    said = refusal(run.save, 1)
    run.close(failed=False)
    assert "numbers that are not finite" in said and "no checkpoint before it" in said
    assert not [*tmp_path.glob("run/checkpoints/*")]


def lock_and_wait(folder, locked):
    kept = lock(folder)
    locked.set()
    time.sleep(60)
    kept.close()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    """kill -9 leaves nothing behind that would have to be removed."""
    fork = multiprocessing.get_context("fork")
    for _ in range(2):
        locked = fork.Event()
        process = fork.Process(target=lock_and_wait, args=(tmp_path, locked))
        process.start()
        assert locked.wait(60)
        assert "another process writes to" in refusal(lock, tmp_path)
        process.kill()
        process.join()
    opened = lock(tmp_path)
    assert "another process writes to" in refusal(lock, tmp_path)  # also of one process
    opened.close()
    lock(tmp_path).close()
    (tmp_path / "lock").write_text("no lock of ours, and long enough to be read" * 30)
    assert "the lock cannot be opened" in refusal(lock, tmp_path)
    assert "the lock cannot be opened" in refusal(lock, tmp_path / "not there")  # or not writable


DAMAGES = {  # what is written over a file of a run, and what the one line says
    ("config.json", b'{"mitigation": null}'): "argument --mitigation: invalid choice: 'None'",
    ("config.json", b'{"mitigation": ["none"]}'): "argument --mitigation: invalid choice",
    ("metrics.jsonl", b'{"step": 1}\n{"st\n'): "metrics.jsonl, line 2 is damaged",
    ("checkpoints/step_000002/model.safetensors", b"cut"): "model.safetensors cannot be read",
    ("checkpoints/step_000002/trainer/state.safetensors", b""): "state.safetensors cannot be read",
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
    folder = copy_of_the_book(tmp_path)
    text = (folder / "countdown_task.py").read_text()
    for number, (returned, sentence) in enumerate(SCORES.items()):
        (folder / "countdown_task.py").write_text(
            text.replace("return {\"reward\"", f"return {returned}\n#"))
        code, said = typed(folder, "train.py", *TINY, "--steps", "1", "--eval_every", "0", "--out",
                           f"run_{number}")
        assert code == bool(sentence) and "Traceback" not in said
        assert (sentence or "") in said.splitlines()[-1]


def test_without_torch_the_way_out_is_told():
    said = python("-c", "import runpy, sys; sys.modules['torch'] = None\n"
                  "runpy.run_path('train.py', run_name='__main__')", cwd=ROOT, code=1)
    assert said.count("\n") == 1 and said.startswith("train.py: ")
    assert "pip install -r requirements.txt" in said


def test_a_run_lies_in_the_project_from_wherever_the_command_is_typed(tmp_path, monkeypatch):
    for folder in (ROOT, ROOT / "docs", tmp_path):
        monkeypatch.chdir(folder)
        assert Settings().folder.resolve() == ROOT / "runs/none-grpo-s0"
    monkeypatch.chdir(ROOT / "docs")
    assert Settings().folder == Path("../runs/none-grpo-s0")


def test_a_hyphen_in_the_name_of_a_flag_is_an_underscore():
    """So no run becomes the lab's by its spelling: that would not call an own `update`."""
    found, _ = read_settings(["--learning-rate", "0.001", "--max-new-tokens=9", "--out", "a-b"])
    assert found.typed == {"max_new_tokens": 9, "learning_rate": 0.001, "out": "a-b"}


WRONG = {  # what is typed, and what the one line says
    "--mitigation": "argument --mitigation: expected one argument",
    "--mitigation nne": "invalid choice: 'nne' (choose from 'none', 'outcome_conditional'",
    "--mitigation rloo": "invalid choice: 'rloo'",
    "--advantage none": "invalid choice: 'none' (choose from 'grpo'",
    "--lroa 3": "unrecognized arguments: --lroa 3",
    "--lr 1e-4": "unrecognized arguments: --lr",
    "--steps 2.5": "argument --steps: invalid int value",
    "--learning_rate nan": "should be from 0 to 10",
    "--learning_rate -1": "should be from 0 to 10",
    "--epochs 2 --clip_low 1.5": "should be from 0 to 1",
    "--rescale max": "(choose from 'mean', 'none')",
    "--min_number 9 --max_number 3": "(countdown_task.py:",
    "--max_number 5000": "cannot spell the prompt",
    "--max_new_tokens 5000": "the model takes 1024 tokens",
    "--model nowhere": "nowhere is no model folder",
    "--model models": "models is no model folder",
    "--model gpt2": "hf download Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "--resume models/tiny": "is not the folder of a run",
    "--resume nowhere": "cannot read nowhere/config.json: No such file",
    "--mitigation none --think_discount 0.3": "unrecognized arguments: --think_discount 0.3",
    "--threads 5000": "should be from 0 to 1024",
    "--seed -1": "should be from 0 to 1e+12",
    "--resume=": "--resume needs a value",
    "--resume": "argument --resume: expected one argument",
    "--out=": "--out needs a value",
    "--steps " + "9" * 400: "should be from 0 to 1e+12",
}


def test_a_wrong_command_ends_in_one_sentence_and_leaves_nothing(tmp_path):
    folder = copy_of_the_book(tmp_path)
    before = {path.name for path in folder.iterdir()}
    for words, sentence in WRONG.items():
        assert_one_sentence(typed(folder, "train.py", *words.split()), sentence)
    code, said = typed(folder, "analyze.py", "nowhere")
    assert code == 1 and said.startswith("analyze.py: nowhere is not") and said.count("\n") == 1
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
    "raise ValueError(chr(27) + '[31m')": "ValueError: [31m",
    "exit()": "SystemExit",
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
    "@mitigation\ndef mine(rollouts, *, kl: float = 1.0):\n    return 1": "a keyword kl, but",
    "@mitigation\ndef mine(rollouts, *, help=1.0):\n    return 1": "a keyword help, but",
    "@mitigation\ndef mine(rollouts, *, versions=1):\n    return 1": "a keyword versions, but",
    "@mitigation\ndef mine(rollouts, *, power):\n    return 1": "argument: 'power'"}


def test_names_that_clash(tmp_path):
    """One that is not asked for is in nobody's way, unless it has the name of another."""
    for number, (clash, sentence) in enumerate(CLASHES.items()):
        folder = copy_of_the_book(tmp_path / str(number))
        with open(folder / "mitigations.py", "a") as file:
            file.write(f"\n\n{clash}\n")
        name = "none" if "none" in clash else "mine"
        code, said = typed(folder, "train.py", *TINY, "--eval_every", "0", "--mitigation", name)
        assert code == 1 and sentence in said.splitlines()[-1]
        if number > 1:  # a name and a keyword are enough: each program takes a second
            continue
        for program in ("analyze.py", "mitigations.py"):
            code, said = typed(folder, program)
            assert code == (name == "none") and "Traceback" not in said
        assert typed(folder, "train.py", "--steps", "0", "--eval_every", "0")[0] == (
            name == "none")


WRONG_TASKS = {  # a line of countdown_task.py, what it becomes, and the function that is named
    "        return sections, kinds": ("        return sections[1:], kinds", "label"),
    "        return sections, kinds ": ("        return", "label"),
    "        return sections, kinds  ": ("        return sections, [300, 9]", "label"),
    "    def prompt_for(": ("    def prompt_for(self, problem):\n        return ''\n\n    def f(",
                           "prompt_for"),
    "    def training_problems(": ("    def training_problems(self, *_):\n        return iter(())"
                                  "\n\n    def f(", "training_problems"),
    "    def held_out_problems(": ("    def held_out_problems(self, *_):\n        return []\n\n    "
                                  "def f(", "held_out_problems"),
    "    prompt: str = ": ("    steps: int = 1\n    prompt: str = ", "has a field steps")}


def test_a_wrong_task_is_told_with_the_function(tmp_path):
    folder = copy_of_the_book(tmp_path)
    text = (folder / "countdown_task.py").read_text()
    for old, (new, named) in WRONG_TASKS.items():
        assert old.rstrip(" ") in text
        (folder / "countdown_task.py").write_text(text.replace(old.rstrip(" "), new, 1))
        code, said = typed(folder, "train.py", *TINY)
        assert code == 1 and named in said.splitlines()[-1] and "Traceback" not in said
        assert not (folder / "runs").exists()


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


def test_a_class_is_left_to_the_lab(monkeypatch):
    """It is no function of a batch, but may be a method of the lab."""
    monkeypatch.setitem(MITIGATIONS, "as_class", type("as_class", (), {}))
    with pytest.raises(Unknown):
        read_settings(["--mitigation", "as_class"])


def test_the_time_that_is_left_is_that_of_steps_and_of_evaluations(tmp_path, capsys):
    """Two of six steps took 46 seconds, so the others take 92. An evaluation took 14 seconds, and
    two are to come, after the steps 3 and 6. What came before the first step does not count."""
    run = object.__new__(Run)
    run.__dict__ |= {"settings": SimpleNamespace(steps=6, eval_every=3), "step": 2, "done": 0,
                     "start": -999.0, "step_seconds": 23.0, "folder": tmp_path,
                     "evaluation_seconds": {"sampled": 10.0, "greedy": 4.0},
                     "optimizer": SimpleNamespace(learning_rate=0.1)}
    numbers = {name: 0.5 for name in ("reward", "reward_format", "success", "length", "finished",
                                      "entropy", "gradient_norm")}
    line = {"step": 2, "tokens": 8, "skipped": None, "seconds": 23.0, **numbers}
    run.log(line)
    assert capsys.readouterr().out.endswith(" 2:00\n")
    run.settings.eval_every, run.step_seconds = 0, 46.0
    assert run.seconds_left() == 92
    for run.step, done, has_head in ((2, 0, False), (21, 0, True), (3, 2, True)):
        run.done = done  # what a column is stands above the first line, and above every twentieth
        run.log(line)
        assert ("  reward  success" in capsys.readouterr().out) == has_head
