"""What goes to a terminal: colours of ours, where it has them, and nothing that a model wrote can
steer it."""
import os
import shlex
import sys

BOLD, GREEN, RED = "1", "1;32", "1;31"


def has_colour() -> bool:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return sys.stdout.isatty() and wanted


def styled(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if style and has_colour() else text


def right_or_wrong(is_right: bool) -> str:
    return styled("right", GREEN) if is_right else styled("wrong", RED)


def put(line: str) -> None:
    """Print a line whose escape sequences are ours. stdout itself spells them out (Visible): all
    that a model wrote goes through `visible` first."""
    print(line, file=getattr(sys.stdout, "stream", sys.stdout), flush=True)


def visible(text: str) -> str:
    """The text with control characters written out, as \\x1b; new lines and tabs stay."""
    return "".join(character if character.isprintable() or character in "\n\t"
                   else character.encode("unicode_escape").decode() for character in text)


class Visible:
    """A text stream for people. Our own escape sequences, which shade text in a terminal, go to
    `.stream` itself."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):  # there are characters that no terminal can show
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        return self.stream.write(visible(text))

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def python_command(*words) -> str:
    """A command to paste: python_command("train.py", "--resume", folder)."""
    return shlex.join(["python", *map(str, words)])
