"""Reading and writing files: a full disk or a cut-off line ends in one clear sentence."""
import json
import math
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from engine.errors import UserError

PROJECT = Path(__file__).resolve().parent.parent  # the folder of the six files


def find_folder(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    is_shipped = not os.path.exists(name) and os.path.exists(PROJECT / name)
    return PROJECT / name if is_shipped else Path(name)


def read_json(path: Path) -> dict:
    """Read a JSON object; an error names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object")
    return content


def read_lines(path: Path) -> list[dict]:
    """Read a JSONL file; no file is no lines. The last line may be cut off by a kill, and is left
    out then. Any other broken line is an error."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            objects.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is not JSON") from None
    return objects


def append_line(path: Path, line: dict) -> None:
    """Append one JSON line. JSON has no NaN: an undefined number becomes null."""
    defined = {key: null_if_undefined(value) for key, value in line.items()}
    text = json.dumps(defined, allow_nan=False) + "\n"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


def null_if_undefined(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: under another name first, then renamed."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with writing(path):
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)


def make_folder(path: Path) -> None:
    """Make the folder and those above it, where they are not there yet."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def whole_folder(path: Path):
    """Make a folder whole or not at all: `with` gives one to fill, and renames it to `path` at the
    end. If something goes wrong, it is removed."""
    unfinished = path.with_name(f".{path.name}.tmp")
    with writing(path):
        shutil.rmtree(unfinished, ignore_errors=True)  # left by one that was killed
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        with writing(path):
            unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def writing(path: Path):
    """Turn a full disk or a folder that cannot be written into one sentence that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write {path}: {reason}") from None
