"""The one error that people see as a sentence instead of a traceback, and looking at files."""
import errno
import os
import stat
from pathlib import Path

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # all other errors say nothing of that


class UserError(ValueError):
    """Something about a file, a flag or a folder that the user can put right."""


class LostProcess(UserError):
    """Whoever notices says so: it may be rank 0 that is gone."""
    WAY_OUT = ("What was saved is whole: the same torchrun with train.py --resume RUN goes on from "
               "the last checkpoint")


class NotFinite(UserError):
    """The run stops at the first such number: it would spread to every parameter."""


class BadCredit(NotFinite):
    """It is a weight or an advantage."""


def mode_of(path: str | Path) -> int:
    """What there is at a path, as os.stat says it; 0 for nothing. What may not be looked at is not
    taken for nothing: that is an error."""
    try:
        return os.stat(path).st_mode
    except ValueError:  # no name has a null byte
        return 0
    except OSError as error:
        if error.errno in ABSENT:
            return 0
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def is_there(path: str | Path) -> bool:
    return mode_of(path) != 0


def is_file(path: str | Path) -> bool:
    return stat.S_ISREG(mode_of(path))


def is_folder(path: str | Path) -> bool:
    return stat.S_ISDIR(mode_of(path))


def refuse_special(path: str | Path, what_for: str) -> None:
    """Stop at a pipe or a device: to read one might never end, and a file that is made whole would
    take its place."""
    if is_there(path) and not is_file(path):
        reason = "Is a directory" if is_folder(path) else "Not a regular file"
        raise UserError(f"cannot {what_for} {path}: {reason}")
