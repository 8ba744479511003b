"""Whole runs of the lab in tests: short ones, stopped ones, copies of the project."""
import ast
import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import torch

import lab.run as train
from conftest import ROOT, project_files
from lab.engine.errors import UserError
from lab.harness import run as harness_run
from runs import assert_same_run, status_of
from small import OWN

SHORT = ["--model", str(ROOT / "models/tiny"), "--threads", "1", "--questions", "2",
         "--answers", "4", "--max_new_tokens", "48", "--steps", "3", "--eval_every", "0",
         "--checkpoint_every", "1"]
WHOLE = ["--steps", "6", "--eval_every", "4", "--eval_tasks", "8", "--seed", "4"]


def run(*argv, expect=0):
    """What train.py prints and how it ends, without the seconds that a new process needs to import
    PyTorch."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            train.train_beyond(list(map(str, argv)))
        except (UserError, OSError) as error:
            code = 1
            errors.write(f"train.py: {error}")
    assert code == expect, out.getvalue() + errors.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=errors.getvalue())


def program(folder: Path, *argv, expect=0) -> str:
    """What a command prints that is typed in this folder."""
    result = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


def keep_lines(path, *numbers):
    """Leave these lines of a file, which are counted from 1, in this order."""
    texts = path.read_text().splitlines(keepends=True)
    path.write_text("".join(texts[number - 1] for number in numbers))


def program_here(path, *argv, expect=0):
    """What a file prints that is started as a program, in this process."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = status_of(path, *argv)
    assert code == expect, said.getvalue()
    return said.getvalue()


def make_here(monkeypatch):
    """Planned runs are made in this process, which has imported PyTorch, one after the other."""
    def start(run, threads):
        if run.is_book:
            program(run.project, *run.command)
        else:
            train.train_beyond(run.command[3:])
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr("lab.tools.planned_runs.PlannedRun.start", start)
    monkeypatch.setattr("lab.tools.planned_runs.PAUSE", 0)


def after_credit_of(step, monkeypatch, deed):
    """Do this at once after the credit file of this step is written."""
    write_credit = harness_run.write_credit

    def write_and_do(path, *args, **columns):
        write_credit(path, *args, **columns)
        if path.stem == f"step_{step:06d}":
            deed()
    monkeypatch.setattr(harness_run, "write_credit", write_and_do)


def gradients_of_steps(monkeypatch):
    """A list that gets the gradient of each step before it is clipped, as one vector."""
    gradients, clip = [], torch.nn.utils.clip_grad_norm_

    def noted_clip(parameters, limit):
        parameters = [p for p in parameters if p.grad is not None]
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
        return clip(parameters, limit)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted_clip)
    return gradients


def assert_goes_on_the_same(whole: Path, stopped: Path):
    """As if it had been stopped while its newest checkpoint was written."""
    shutil.copytree(whole, stopped)
    shutil.rmtree(max((stopped / "checkpoints").iterdir()))
    run("--resume", stopped)
    assert_same_run(whole, stopped)


def without_own_methods(source: str) -> str:
    """A file without the methods that a user has added: a page's may have the same names."""
    own, lines = {name for _, name, _ in OWN}, source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if getattr(node, "name", "") in own:
            del lines[min(mark.lineno for mark in node.decorator_list) - 1:node.end_lineno]
    return "".join(lines)


def copy_project(folder: Path, *more: str) -> Path:
    """The program without its tests and models, to be changed; `more` are other packages of it."""
    for path in project_files("*.py"):
        shutil.copy(path, folder)
    methods = folder / "mitigations.py"
    methods.write_text(without_own_methods(methods.read_text()))
    left_out = shutil.ignore_patterns("__pycache__", "tests", "results", "reports")
    for package in ("lab", *more):
        shutil.copytree(ROOT / package, folder / package, ignore=left_out)
    return folder


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def block(page: str, words: str) -> str:
    """The page's one Python block with these words."""
    [found] = [block for block in blocks(page) if words in block]
    return found


EACH = """
import json, sys
for name, code in json.loads(sys.argv[1]).items():
    print("PASTED", name)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
"""


def printed_by_each(project: Path, codes: dict[str, str]) -> dict[str, str]:
    """What each code prints that is pasted into a file of a copy, by its name; all in one
    process."""
    printed = program(project, "-c", EACH, json.dumps(codes))
    return dict(re.findall(r"^PASTED (.*?)\n(.*?)(?=^PASTED|\Z)", printed, flags=re.M | re.S))
