"""What people see, and how a program ends: one line, and nothing that steers a terminal."""
import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from conftest import ROOT, evaluation
from lab.engine.errors import UserError
from lab.harness import screen
from lab.harness.run import LabRun
from lab.harness.screen import StopRequest, Visible, run_as_program

python = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)


def test_what_a_model_wrote_cannot_steer_the_terminal():
    stream = io.StringIO()
    print("\x1b[31mred\x07\x9b2J\u202eleft\ttab\nline", file=Visible(stream))
    assert stream.getvalue() == "?[31mred??2J?left?tab\nline\n"
    latin = io.TextIOWrapper(io.BytesIO(), "latin-1")
    print("é漢", file=Visible(latin), flush=True)  # a terminal that has not all characters
    assert latin.buffer.getvalue() == b"\xe9\\u6f22\n"


OWN = """
import sys
def helper():
    return [].entropy
def my_idea():
    return helper()
def leaves():
    sys.exit(0)
def breaks_a_pipe():
    raise BrokenPipeError(32, "Broken pipe")
def fills_the_disk():
    raise OSError(28, "No space left on device")
def closes():
    sys.stdout.close()
def leaves_with_a_word():
    sys.exit("two functions of one name")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The functions of a user's file, which stands at the top of the project."""
    (tmp_path / "own_idea.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(screen, "PROJECT", tmp_path)
    yield importlib.import_module("own_idea")
    del sys.modules["own_idea"]


def ended_by(function):
    with (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()),
          pytest.raises(SystemExit) as ended):
        run_as_program("name", lambda argv: function(), interrupted="stopped")
    return ended.value.code


@pytest.mark.parametrize("error, words", [
    (FileNotFoundError(2, "No such file or directory", "/none/x"), "/none/x"),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (OSError(36, "File name too long", "x" * 5000), f"{'x' * 200}: File name too long"),
    (SafetensorError("I/O error: No space left"), "I/O error: No space left"),
    (torch.OutOfMemoryError("CUDA out of memory"), "there is not enough memory"),
    (MemoryError(), "there is not enough memory"),
    (UserError("bad \x1b[2J\nname"), "bad ?[2J name"), (KeyboardInterrupt(), "stopped")])
def test_what_ends_a_program_is_one_line(error, words):
    def main():
        raise error

    said = ended_by(main)
    assert said.startswith(f"name: {words}") and "\n" not in said


@pytest.mark.parametrize("name, words", [
    ("my_idea", "AttributeError in helper (own_idea.py:4): 'list' object has no attribute 'entr"),
    ("breaks_a_pipe", "BrokenPipeError in breaks_a_pipe (own_idea.py:10): [Errno 32] Broken pipe"),
    ("fills_the_disk", "OSError in fills_the_disk (own_idea.py:12): [Errno 28] No space left"),
    ("closes", "RuntimeError in closes (own_idea.py:14): the output of the program cannot be"),
    # it would end the run as if it had succeeded
    ("leaves", "leaves (own_idea.py:8) calls sys.exit, which would end the run without a word")])
def test_an_error_in_a_users_file_is_his_line_and_one_sentence(own, name, words):
    said = ended_by(getattr(own, name))
    assert said.startswith(f"name: {words}") and "\n" not in said
    assert ("PYTHONDEVMODE=1" in said) == ("Error" in said)


def test_an_end_with_a_word_or_a_mistake_of_this_program_is_no_users(own):
    assert ended_by(own.leaves_with_a_word) == "two functions of one name"
    def stop():
        raise SystemExit(130)  # its own way to end
    assert ended_by(stop) == 130
    with pytest.raises(AttributeError):  # with its traceback
        run_as_program("name", lambda argv: [].entropy)


def test_the_whole_traceback_is_there_for_who_asks(own, monkeypatch):
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=True))
    with pytest.raises(AttributeError, match="no attribute 'entropy'"):
        run_as_program("it", lambda argv: own.my_idea())


def test_a_users_file_that_python_cannot_read_is_one_line(monkeypatch, tmp_path):
    """The traceback has no line of the file itself. A file of the program keeps its traceback."""
    monkeypatch.setattr(screen, "PROJECT", tmp_path)
    for name, said in (("my_task.py", "SyntaxError in my_task.py:2: expected ':'"),
                       ("lab/engine/x.py", "")):
        with pytest.raises(SyntaxError) as caught:
            compile("x = 1\ndef f()\n", str(tmp_path / name), "exec")
        assert screen.sentence_about(caught.value) == said


def test_ctrl_c_asks_once_and_ends_twice_also_when_nobody_reads(capfd, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    stop = StopRequest()
    with screen.ctrl_c_calls(stop.handle):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and "stopping after this step" in capfd.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) == before
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", Mock(side_effect=BrokenPipeError))
        stop = StopRequest()
        stop.handle()
    assert stop.requested


BEFORE_TORCH = """
import os, sys
sys.modules["torch"] = None  # to import it is an error
try:
    import lab.run as train
except ImportError:
    print(*map(os.environ.get, sys.argv[1:]))
"""


def test_threads_and_memory_are_set_before_torch_is_imported(monkeypatch):
    names = ["GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert python([sys.executable, "-c", BEFORE_TORCH, *names]).stdout == "1000 1 128\n"


def test_what_a_model_wrote_to_a_task_of_rewards_alone_steers_nothing(capsys):
    run = LabRun.__new__(LabRun)
    run.success = []
    shown = [{"problem": "3 5", "text": "\x1b[2J", "reward": 0.25, "answer": 0},
             {"problem": "4 6", "text": "x " * 500, "reward": 2.0, "answer": 1}]
    line = evaluation(0, [0, 1]) | {"shown": shown, "reward_mean": 1.0}
    run.say_rewards(line | {"reward_low": 0.5, "reward_high": 1.5})
    first, *answers = capsys.readouterr().out.splitlines()
    assert first == ("  held-out, sampled reward 1.000 (95% interval 0.500 to 1.500)  (2 problems, "
                     "length 12)")
    assert answers[0] == "  reward 0.250  3 5: [2J" and len(answers[1]) < 400
    assert answers[1].startswith("  reward 2.000  4 6: x x")


def print_late(interrupted, written, complaint):
    os.dup2(written, 1)
    sys.stdout, sys.stderr = open(1, "w"), open(complaint, "w")
    run_as_program("it", lambda argv: screen.say("late"), interrupted)


@pytest.mark.parametrize("interrupted, said", [
    ("", ""), ("--resume continues",
               "it: nothing reads its output any more; --resume continues\n")])
def test_a_closed_pipe_is_no_error(tmp_path, interrupted, said):
    """As in `python -m lab follow RUN | head`: the reader has gone before the program prints."""
    read, write = os.pipe()
    os.close(read)
    ended = multiprocessing.get_context("fork").Process(
        target=print_late, args=(interrupted, write, tmp_path / "complaint"))
    ended.start()
    ended.join()
    os.close(write)
    assert (ended.exitcode, (tmp_path / "complaint").read_text()) == (1, said)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_status_cannot_steer_the_terminal(monkeypatch):
    """It names folders, and problems of a task."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen.show_status("a\x1b[2J: step 3")
    assert sys.stderr.getvalue() == "\r\033[K  a?[2J: step 3\r"
