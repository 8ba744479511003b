"""Reading and writing files: a full disk or a damaged file ends in one clear sentence, and what is
written appears whole or not at all."""
import glob
import json
import math
import os
import secrets
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder are not told apart there
    fcntl = None

from safetensors import SafetensorError

from engine.errors import UserError

PROJECT = Path(__file__).resolve().parent.parent  # the folder of the six files
LARGEST_JSON = 2 ** 26  # bytes of one object: of a file, or of a line


def find_folder(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    is_shipped = not os.path.exists(name) and os.path.exists(PROJECT / name)
    return PROJECT / name if is_shipped else Path(name)


def read_json(path: Path) -> dict:
    """Read a JSON object; an error names the file and what is wrong with it."""
    try:
        with reading(path) as file:
            content = parse_json(file.read(LARGEST_JSON + 1))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object")
    return content


def read_lines(path: Path) -> list[dict]:
    """Read a JSONL file of objects; no file is no lines. The last line may be cut off by a kill,
    and is left out then. Any other broken line is an error."""
    objects = []
    try:
        with reading(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_JSON + 1), ""), 1):
                try:
                    objects.append(parse_json(line))
                except ValueError:
                    if line.endswith("\n") or len(line) > LARGEST_JSON:
                        raise UserError(f"{path}, line {number} is not JSON") from None
                    break
                if not isinstance(objects[-1], dict):
                    raise UserError(f"{path}, line {number} should hold a JSON object")
    except FileNotFoundError:
        pass
    return objects


def parse_json(text: str):
    """A ValueError for everything that is wrong with it; also for numbers that JSON does not have
    (NaN) or floats cannot hold (1e999)."""
    if len(text) > LARGEST_JSON:
        raise ValueError(f"longer than {LARGEST_JSON // 2 ** 20} MiB")
    try:
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


@contextmanager
def reading(path: Path):
    """Open a text file. What is not there is left to the caller; another reason why it cannot be
    read is said in one sentence. A pipe or a device could go on for ever, and is refused."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            reason = "Is a directory" if os.path.isdir(path) else "Not a regular file"
            raise UserError(f"cannot read {path}: {reason}")
        with open(path, encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def append_line(path: Path, line: dict) -> None:
    """Append one JSON line. JSON has no NaN: an undefined number becomes null."""
    defined = {key: null_if_undefined(value) for key, value in line.items()}
    text = json.dumps(defined, allow_nan=False) + "\n"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


def null_if_undefined(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path):
    """Make a file whole or not at all: `with` gives the name of one to write, and renames it to
    `path` at the end. If something goes wrong, it is removed."""
    unfinished = unfinished_name(path)
    with writing(path):
        try:
            yield unfinished
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path):
    """Make a folder whole or not at all: `with` gives one to fill, and renames it to `path` at the
    end. If something goes wrong, it is removed. What a killed process left of the same folder is
    removed, too; what another process is filling at this moment is left alone."""
    unfinished = unfinished_name(path)
    with writing(path):
        refuse_full_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_what_was_left(path)
        unfinished.mkdir()
        lock = lock_folder(unfinished)
    try:
        yield unfinished
        with writing(path):
            refuse_full_folder(path)
            unfinished.rename(path)  # an empty folder in its place is replaced
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    finally:
        let_go(lock)


def unfinished_name(path: Path) -> Path:
    """Beside the path, hidden, and a name that nobody else has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def refuse_full_folder(path: Path) -> None:
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already")


def remove_what_was_left(path: Path) -> None:
    """Remove the unfinished folders of this name that no living process holds."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        try:
            lock = lock_folder(left)
        except OSError:
            continue
        if lock is not None:  # Windows knows no such lock: there it stays
            shutil.rmtree(left, ignore_errors=True)
        let_go(lock)


def lock_folder(path: Path) -> int | None:
    """Lock a folder for this process, or fail with BlockingIOError. The lock goes with the process,
    and stays with the folder when that is renamed."""
    folder = hold_folder(path)
    if folder is not None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(folder)
            raise
    return folder


def hold_folder(path: Path) -> int | None:
    """Open it, so that it can be told from another that takes its place later."""
    return os.open(path, os.O_RDONLY) if fcntl else None


def let_go(folder: int | None) -> None:
    if folder is not None:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Make the folder and those above it, where they are not there yet."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path):
    """Turn a full disk or a folder that cannot be written into one sentence that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write {path}: {reason}") from None
