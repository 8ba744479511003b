"""How a program ends: one line for what the machine refused, nothing that steers a terminal."""
import io
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from conftest import ROOT
from engine.errors import UserError
from harness.screen import Visible, run_as_program, visible

PROGRAM = """
def main(argv):
    {body}
run_as_program("name", main)
"""
python = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)


def ends(body, shell=""):
    """How a program ends that does this: exit status and what it printed."""
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    if shell:
        command = ["sh", "-c", f'"$0" "$@" {shell}', *command]
    result = python(command)
    return result.returncode, result.stdout, result.stderr


def test_what_a_model_wrote_cannot_steer_the_terminal():
    stream = io.StringIO()
    print("\x1b[31mred\x07\x9b2J\u202eleft\ttab\nline", file=Visible(stream))
    assert stream.getvalue() == "\\x1b[31mred\\x07\\x9b2J\\u202eleft\ttab\nline\n"
    assert visible("a\rb\x00é漢") == "a\\rb\\x00é漢"


@pytest.mark.parametrize("error, words", [
    (FileNotFoundError(2, "No such file or directory", "/none/x"),
     "name: /none/x: No such file or directory"),
    (OSError(28, "No space left on device"), "name: No space left on device"),
    (MemoryError(), "name: there is not enough memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), "name: there is not enough memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
     "name: there is not enough memory"),
    (UserError("bad \x1b[2J name"), "name: bad \\x1b[2J name"),
    (KeyboardInterrupt(), "name: stopped")])
def test_what_ends_a_program_is_one_line(monkeypatch, error, words):
    def main(argv):
        raise error

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        run_as_program("name", main, interrupted="stopped")
    assert ended.value.code.startswith(words) and "\n" not in ended.value.code


@pytest.mark.parametrize("error, status, words", [
    ("KeyboardInterrupt", -signal.SIGINT, ""), ("ValueError('mine')", 1, "ValueError: mine\n")])
def test_ctrl_c_before_a_program_begins_is_no_traceback(error, status, words):
    """While torch is imported, say: all programs import `engine` first."""
    result = python([sys.executable, "-c", f"import engine\nraise {error}"])
    assert result.returncode == status
    assert result.stderr.endswith(words) and bool(result.stderr) == bool(words)


SLOW = """
import sys
import train
train.main(sys.argv[1:])
print([name for name in ("torch._dynamo", "sympy", "matplotlib") if name in sys.modules])
from engine.choices import ADVANTAGES, MITIGATIONS
waiting = {name for choices in (MITIGATIONS, ADVANTAGES)
           for name in choices.keys() - choices.loaded()}
print(sorted(set("gae oracle vine measured".split()) - waiting))
print([name for choices in (MITIGATIONS, ADVANTAGES) for name in choices
       if choices[name].__name__ != name])
"""


def test_no_run_waits_for_imports_that_it_does_not_need(learner, tmp_path):
    """The compiler of torch, and what draws pictures: two seconds and 100 MB a start. Of methods in
    files of their own, the chosen one; the files that are named hold the others."""
    flags = ["--model", str(learner), "--steps", "1", "--eval_every", "0", "--advantage", "gae",
             "--out", str(tmp_path / "run")]
    result = python([sys.executable, "-c", SLOW, *flags])
    assert result.stdout.endswith("\n[]\n['gae']\n[]\n"), result.stdout + result.stderr


BEFORE_TORCH = """
import os, sys
sys.modules["torch"] = None  # to import it is an error
try:
    import train
except ImportError:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


def test_threads_are_told_how_to_wait_before_torch_is_imported(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert python([sys.executable, "-c", BEFORE_TORCH]).stdout == "1000\n"


WITH_A_FILE = """import os; from engine.errors import UserError
    print("seen")
    raise UserError("mine" if os.open(os.devnull, os.O_RDONLY) > 2 else "among the streams")"""
HAS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")


@pytest.mark.parametrize("body, shell, expected", [
    # a reader that goes away is no error; a full disk is one, since a report is what it prints
    ("print('x' * 10 ** 6)", "| head -c 5", (0, "xxxxx", "")),
    pytest.param("print('lost')", "> /dev/full", (1, "", "name: No space left on device\n"),
                 marks=HAS_FULL),
    # a mistake in code is told by Python, and cannot steer the terminal
    ("raise RuntimeError('mine ' + chr(27))", "2>&1 | tail -n 1",
     (0, "RuntimeError: mine \\x1b\n", "")),
    # a closed stream leads nowhere, and no file gets its number
    (WITH_A_FILE, ">&-", (1, "", "name: mine\n")),
    ("import os; print(os.open(os.devnull, os.O_RDONLY) > 2)", "<&- 2>&-", (0, "True\n", ""))])
def test_what_becomes_of_output_that_nobody_takes(body, shell, expected):
    assert ends(body, shell) == expected
