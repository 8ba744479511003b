"""The terminal: what people see of a program, and how it ends.

A mistake of the user is one line, and so is an error in a file of his own: it names his line. A
mistake in this program is a traceback. What a model wrote cannot steer the terminal. Ctrl-C once
stops after the current step, twice at once.
"""
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError

from lab.engine.errors import PROJECT, UserError

BOLD, GREEN, RED = "1", "1;32", "1;31"
MESSAGE = b"\nstopping after this step (Ctrl-C again stops at once, at the last checkpoint)\n"
# the files at the top of the project that a user does not write his own code into
PROGRAMS = ("train.py", "run.py", "analyze.py", "grpo.py", "qwen2_model.py")


def run_as_program(name: str, main: Callable[[list[str]], object], interrupted: str = "",
                   status: int = 1) -> None:
    """Run main(argv). An error of the user or of the system is printed as one line, and `status` is
    the program's exit status then; `interrupted` is printed after Ctrl-C."""
    sys.stdout, sys.stderr = Visible(sys.stdout), Visible(sys.stderr)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(f"{name}: {interrupted}" if interrupted else 130)
    except BrokenPipeError as error:  # as in `python -m lab follow RUN | head`
        if place_in_users_code(error.__traceback__):
            sys.exit(f"{name}: {printable(sentence_about(error))}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to print goes nowhere
        sys.exit(f"{name}: nothing reads its output any more; {interrupted}" if interrupted else 1)
    except (Exception, SystemExit) as error:
        sentence = sentence_about(error)
        if not sentence or (sys.flags.dev_mode and not isinstance(error, UserError)):
            raise
        if status == 1:
            sys.exit(f"{name}: {printable(sentence)}")
        print(f"{name}: {printable(sentence)}", file=sys.stderr)
        sys.exit(status)


def place_in_users_code(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that stands in a user's file, as my_idea
    (mitigations.py:57). A user's files are those at the top of the project, but for PROGRAMS, and
    those in examples/."""
    found = ""
    for frame, line in traceback.walk_tb(trace):
        if name := name_of_users_file(frame.f_code.co_filename):
            found = f"{frame.f_code.co_qualname} ({name}:{line})"
    return found


def name_of_users_file(path: str) -> str:
    """The name of a user's file from the project's folder; of another file an empty text."""
    file = Path(path)
    parts = file.relative_to(PROJECT).parts if PROJECT in file.parents else ()
    is_users = parts and (parts[0] == "examples" or len(parts) == 1 and parts[0] not in PROGRAMS)
    return "/".join(parts) if is_users else ""


def sentence_about(error: BaseException) -> str:
    """The line about an error; an empty one about a mistake in this program, and about its own way
    to end."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    users = place_in_users_code(error.__traceback__)
    if isinstance(error, SyntaxError) and (name := name_of_users_file(error.filename or "")):
        return f"{type(error).__name__} in {name}:{error.lineno}: {error.msg}"
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):  # Python prints it
            return ""
        return f"{users} calls sys.exit, which would end the run without a word" if users else ""
    if isinstance(error, SafetensorError):  # a full disk
        return str(error)
    if isinstance(error, OSError) and not users:
        if error.filename is None or not error.strerror:
            return str(error)
        return f"{str(error.filename)[:200]}: {error.strerror}"
    if way_out := way_out_of(error):
        return way_out
    if users:
        said = " ".join(str(error).split())
        return (f"{type(error).__name__} in {users}: {said} (with PYTHONDEVMODE=1 before the "
                "command you see all that led there)")
    return ""


def way_out_of(error: BaseException) -> str:
    """A sentence about an error whose own words hide what can be done; an empty one about any
    other."""
    is_memory_full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_memory_full or "can't allocate memory" in str(error):
        return "there is not enough memory: a smaller --micro_batch or --questions needs less"
    return ""


def printable(text: str) -> str:
    """A text without characters that could steer a terminal: a model may have written it."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


@contextmanager
def ctrl_c_calls(handle: Callable[..., None]) -> Iterator[None]:
    """Inside `with`, Ctrl-C and SIGTERM call this function instead of ending the process."""
    before = {name: signal.signal(name, handle) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class StopRequest:
    """A request to stop after this step: a program looks at it now and then."""
    requested = False

    def handle(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with suppress(OSError):  # Ctrl-C also ends a program that reads
            os.write(1, MESSAGE)  # past Python's buffer, because a print may have been interrupted


class Visible:
    """A text stream for people. Our own escape sequences go to `.stream` itself."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no character ends a run

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))

    def close(self) -> None:
        raise RuntimeError("the output of the program cannot be closed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def put(line: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print a line with our own escape sequences. What a model wrote has to go through `printable`
    before."""
    stream = stream or sys.stdout
    print(line, file=getattr(stream, "stream", stream), end=end, flush=True)


def say(text: str) -> None:
    """Print a line at once."""
    show_status("")
    put(printable(text))


def show_status(text: str) -> None:
    """Show a line that the next one overwrites, at a terminal only. An empty text clears it."""
    if sys.stderr.isatty():
        clear = "\r\033[K"
        put(f"{clear}  {printable(text[:90])}\r" if text else clear, sys.stderr, end="")


def has_colour() -> bool:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return sys.stdout.isatty() and wanted


def styled(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if style and has_colour() else text


def right_or_wrong(is_right: float) -> str:
    return styled("right", GREEN) if is_right else styled("wrong", RED)


def python_command(*words: object) -> str:
    """A command to paste: python_command("train.py", "--resume", folder)."""
    return shlex.join(["python", *map(str, words)])
