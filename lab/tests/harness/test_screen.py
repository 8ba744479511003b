"""What people see, and how a program ends: one line, and nothing that steers a terminal."""
import contextlib
import importlib
import io
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import ROOT, hand_made
from lab.engine.errors import UserError
from lab.harness import screen
from lab.harness.step_lines import batch_metrics, print_evaluation, print_outcome
from lab.harness.screen import StopRequest, Visible, run_as_program, visible

python = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)


def test_what_a_model_wrote_cannot_steer_the_terminal():
    stream = io.StringIO()
    print("\x1b[31mred\x07\x9b2J\u202eleft\ttab\nline", file=Visible(stream))
    assert stream.getvalue() == "\\x1b[31mred\\x07\\x9b2J\\u202eleft\ttab\nline\n"
    assert visible("a\rb\x00é漢") == "a\\rb\\x00é漢"
    latin = io.TextIOWrapper(io.BytesIO(), "latin-1")
    print("é漢", file=Visible(latin), flush=True)  # a terminal that has not all characters
    assert latin.buffer.getvalue() == b"\xe9\\u6f22\n"


@pytest.mark.parametrize("error, words", [
    (FileNotFoundError(2, "No such file or directory", "/none/x"), "name: .*/none/x"),
    (OSError(28, "No space left on device"), "name: .*No space left on device"),
    (torch.OutOfMemoryError("CUDA out of memory"), "name: there is not enough memory"),
    (MemoryError(), "name: there is not enough memory"),
    (UserError("bad \x1b[2J name"), r"name: bad \\x1b\[2J name"),
    (KeyboardInterrupt(), "name: stopped")])
def test_what_ends_a_program_is_one_line(monkeypatch, error, words):
    def main(argv):
        raise error

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit, match=words) as ended:
        run_as_program("name", main, interrupted="stopped")
    assert "\n" not in ended.value.code


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
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The functions of a user's file, which stands at the top of the project."""
    (tmp_path / "own_idea.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(screen, "PROJECT", tmp_path)
    yield importlib.import_module("own_idea")
    del sys.modules["own_idea"]


def ended_by(monkeypatch, function):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        run_as_program("name", lambda argv: function())
    return ended.value.code


def test_an_error_in_a_users_file_is_his_line_and_one_sentence(own, monkeypatch):
    said = ended_by(monkeypatch, own.my_idea)
    assert said.startswith("name: AttributeError in helper (own_idea.py:4): 'list' object has no "
                           "attribute 'entropy'") and "PYTHONDEVMODE=1" in said


@pytest.mark.parametrize("name, words", [
    ("breaks_a_pipe", "BrokenPipeError in breaks_a_pipe (own_idea.py:10): [Errno 32] Broken pipe"),
    ("fills_the_disk", "OSError in fills_the_disk (own_idea.py:12): [Errno 28] No space left"),
    ("closes", "RuntimeError in closes (own_idea.py:14): the output of the program cannot be")])
def test_an_error_of_the_system_in_a_users_file_is_his_line_too(own, monkeypatch, name, words):
    assert ended_by(monkeypatch, getattr(own, name)).startswith(f"name: {words}")


def test_gradients_that_a_user_has_switched_off_are_told():
    error = RuntimeError("element 0 of tensors does not require grad")
    with torch.no_grad():
        assert screen.sentence_about(error).startswith("gradients are switched off: ")
        assert screen.sentence_about(RuntimeError("something else")) == ""
    assert screen.sentence_about(error) == ""  # a mistake of this program


def test_a_users_file_cannot_end_a_run_as_if_it_had_succeeded(own, monkeypatch):
    said = ended_by(monkeypatch, own.leaves)
    assert said == ("name: leaves (own_idea.py:8) calls sys.exit, which would end the run without "
                    "a word")

    def stop():
        raise SystemExit(130)  # this program's own way to end
    assert ended_by(monkeypatch, stop) == 130


def test_a_mistake_of_this_program_has_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(AttributeError):
        run_as_program("name", lambda argv: [].entropy)


DEVELOPING = """
import sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from lab.harness import screen
import own_idea
screen.PROJECT = Path(sys.argv[1])
screen.run_as_program("it", lambda argv: own_idea.my_idea())
"""


@pytest.mark.parametrize("mode", ["", "1"])
def test_the_whole_traceback_is_there_for_who_asks(own, tmp_path, mode):
    said = python([sys.executable, "-c", DEVELOPING, str(tmp_path)], env={
        **os.environ, "PYTHONDEVMODE": mode, "PYTHONPATH": str(ROOT)})
    assert said.returncode == 1 and "no attribute 'entropy'" in said.stderr
    assert ("run_as_program" in said.stderr) == bool(mode)


@pytest.mark.parametrize("name, is_told", [
    ("lab", True), ("lab.trl.none", True), ("numpy.none", False)])
def test_a_package_that_is_not_here_is_named(monkeypatch, tmp_path, name, is_told):
    """A folder without code, as git leaves one behind, is none."""
    (tmp_path / "lab").mkdir()
    monkeypatch.setattr(screen, "PROJECT", tmp_path)
    said = screen.sentence_about(ModuleNotFoundError(name=name))
    assert said == "this needs the folder lab/ of this project, which is not here" * is_told


def test_a_users_file_that_python_cannot_read_is_one_line(monkeypatch, tmp_path):
    """The traceback has no line of the file itself. A file of the program keeps its traceback."""
    monkeypatch.setattr(screen, "PROJECT", tmp_path)
    for name, said in (("my_task.py", "SyntaxError in my_task.py:2: expected ':'"),
                       ("lab/engine/x.py", "")):
        with pytest.raises(SyntaxError) as caught:
            compile("x = 1\ndef f()\n", str(tmp_path / name), "exec")
        assert screen.sentence_about(caught.value) == said


def test_a_long_name_is_shortened_in_an_error_of_the_system():
    error = OSError(36, "File name too long", "x" * 5000)
    assert screen.sentence_about(error) == f"{'x' * 200}: File name too long"
    assert screen.sentence_about(OSError("no words")) == "no words"


def test_ctrl_c_asks_once_and_ends_twice(capfd):
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and "stopping after this step" in capfd.readouterr().out
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_is_answered_where_stdout_has_no_descriptor():
    """In a notebook, or under `redirect_stdout`."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, StopRequest("stopping"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    assert printed.getvalue() == "\nstopping\n"


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


def evaluation(mode, success, answer):
    return {"mode": mode, "success": success, "success_low": success - 0.1,
            "success_high": success + 0.1, "answer": answer}


def test_an_answer_is_marked_and_cannot_colour_itself(monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdout", Visible(printed))
    monkeypatch.setattr(screen, "has_colour", lambda: True)
    line = {**evaluation("sampled", 0.5, [1, 0]), "format_mean": 1.0, "length_mean": 9.0,
            "finished_mean": 1.0, "shown": [{"problem": "3 5", "text": "\x1b[2J", "answer": 1},
                                            {"problem": "4 6", "text": "x " * 500, "answer": 0}]}
    print_evaluation(line, 1.0, with_format=True)
    _, right, wrong = printed.getvalue().splitlines()
    assert right == "  \033[1;32mright\033[0m  3 5: \\x1b[2J"
    assert wrong.startswith("  \033[1;31mwrong\033[0m  4 6: x") and wrong.endswith("x ...")
    assert len(wrong) < 400


@pytest.mark.parametrize("answers, success", [([1.0, 0.0], 0.5), ([1.7, 0.0], math.nan)])
def test_success_is_known_where_answers_are_right_or_wrong(answers, success):
    """TRL's reward functions have any name, `answer` among them, and any value."""
    scores = {"reward": torch.zeros(2), "answer": torch.tensor(answers)}
    known = batch_metrics(hand_made([[True], [True]], scores=scores))
    assert known["success"] == pytest.approx(success, nan_ok=True)


def test_groups_without_spread_are_those_with_equal_rewards():
    """Three groups: one answer, two that differ, three that are equal, not in order."""
    scores = {"reward": torch.tensor([2.0, 1.0, 5.0, 1.0, 3.0, 1.0])}
    batch = hand_made([[True]] * 6, group=torch.tensor([1, 2, 0, 2, 1, 2]),
                      scores=scores)
    assert batch_metrics(batch)["groups_without_spread"] == pytest.approx(2 / 3)


BEFORE = [evaluation("sampled", 0.2, [0, 0, 0])]
AFTER = [evaluation("sampled", 0.5, [0, 1, 0])]
CHANGED = ("20.0% (95% interval 10.0% to 30.0%) -> 50.0% (40.0% to 60.0%) of 3 held-out problems, "
           "3 min 52 s")


@pytest.mark.parametrize("sampled, said", [
    # without two evaluations, the time alone
    (BEFORE, "3 min 52 s\npython -m lab page  makes tables"),
    (BEFORE + AFTER, f"{CHANGED}\npython -m lab page  makes tables")])
def test_the_end_says_what_changed(capsys, sampled, said):
    print_outcome(Path("runs/x"), sampled, 232.0, 0)
    printed = capsys.readouterr().out
    assert printed.startswith(f"  {said}")
    assert printed.endswith("\npython -m lab follow  follows a token through a step\n")
    print_outcome(Path("elsewhere/x"), sampled, 232.0, 0)
    assert "\npython -m lab page elsewhere/x  makes" in capsys.readouterr().out


def test_without_a_step_there_is_no_token_to_follow(capsys):
    print_outcome(Path("runs/x"), BEFORE, 2.0, 0, has_steps=False)
    printed = capsys.readouterr().out
    assert "python -m lab page  makes" in printed and "follow" not in printed


def what_a_closed_pipe_does(*command):
    """(exit status, complaint) of a program whose output nobody reads."""
    read, write = os.pipe()
    started = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=write,
                               stderr=subprocess.PIPE, text=True)
    os.close(read)
    os.close(write)
    _, complaint = started.communicate("")
    return started.returncode, complaint


@pytest.mark.parametrize("interrupted, code, said", [
    ("", 1, ""), ("--resume continues", 1,
                  "it: nothing reads its output any more; --resume continues\n")])
def test_a_closed_pipe_is_no_error(interrupted, code, said):
    """As in `python -m lab follow RUN | head`: the reader has gone before the program prints."""
    program = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
               "from lab.harness.screen import run_as_program, say\n"
               "def main(argv):\n    sys.stdin.read()\n    say('late')\n"
               f"run_as_program('it', main, {interrupted!r})\n")
    assert what_a_closed_pipe_does("-c", program) == (code, said)


def test_a_help_that_is_read_in_part_says_nothing_of_resuming():
    assert what_a_closed_pipe_does(ROOT / "train.py", "--help") == (0, "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_status_cannot_steer_the_terminal(monkeypatch):
    """It names folders, and problems of a task."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen.show_status("a\x1b[2J: step 3")
    assert sys.stderr.getvalue() == "\r\033[K  a\\x1b[2J: step 3\r"
