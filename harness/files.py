"""Reading and writing files: a full disk or a damaged file ends in one clear sentence, and what is
written appears whole or not at all."""
import hashlib
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from engine.errors import UserError, refuse_special
from engine.errors import is_file as is_file, is_folder as is_folder, is_there as is_there

Json = dict[str, object]  # an object in a JSON file
Parsed = TypeVar("Parsed")
PROJECT = Path(__file__).resolve().parent.parent  # the folder of the six files
LARGEST = 3.4028234663852886e38  # of float32


def find_folder(name: str) -> Path:
    """A folder as it was typed, or the one of that name that ships with the project."""
    return Path(name) if is_there(name) or not is_there(PROJECT / name) else PROJECT / name


def is_taken_away(room: str) -> bool:
    """Whether it is one that all others work without, and not here. A folder alone is none."""
    return (room in ("research", "bridges", "benchmarks")
            and not is_there(PROJECT / room / "__init__.py"))


def paths_in(folder: str | Path) -> list[Path]:
    """All that lies in a folder, in the order of the names; nothing if there is no folder."""
    try:
        return [Path(folder, name) for name in sorted(os.listdir(folder))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from None


def read_json(path: Path) -> Json:
    with reading(path) as file:
        return parse_object(file.read().decode(), path)


def read_lines(path: Path) -> list[Json]:
    """A JSONL file of objects, without a last line that was cut off by a kill."""
    objects = []
    for number, line in enumerate(lines_in(path), 1):
        try:
            objects.append(parse_object(line, f"{path}, line {number}"))
        except UserError:
            if line.endswith("\n"):
                raise
    return objects


def lines_in(path: Path) -> Iterator[str]:
    if is_there(path):
        with reading(path) as file:
            yield from TextIOWrapper(file, "utf-8")


def parse_object(text: str, where: str | Path) -> Json:
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where} should hold a JSON object")
    return content


def parse_json(text: str) -> object:
    """Whatever is wrong is a ValueError, also a NaN, a number that floats cannot hold, or half of a
    character (\\ud800), which no file could keep."""
    try:
        content: object = json.loads(text, parse_constant=finite, parse_float=finite)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError:
        raise ValueError("nested too deeply") from None


def finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a file; why it cannot be read becomes one sentence."""
    refuse_special(path, "read")
    try:
        with open(path, "rb") as file:
            yield file
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_given(name: str, what: str, parse: Callable[[str, str], Parsed]) -> list[Parsed]:
    """What `parse(line, where)` makes of each line of a file that a person brings."""
    with reading(find_folder(name)) as file:
        found = [parse(line.strip(), f"{name}, line {number}")
                 for number, line in enumerate(TextIOWrapper(file, "utf-8-sig"), 1) if line.strip()]
    if not found:
        raise UserError(f"{name} holds no {what}")
    return found


def sha256_of(path: Path) -> str:
    with reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Append one JSON line; a number that is undefined, or beyond float32, becomes null."""
    undefined = [name for name, value in line.items()
                 if isinstance(value, (int, float)) and not abs(value) <= LARGEST]
    text = json.dumps({**line, **dict.fromkeys(undefined)}, allow_nan=False) + "\n"
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


def replace_text(path: Path, text: str) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Make a file whole or not at all: write the one that `with` names, which is then renamed."""
    unfinished = unfinished_name(path)
    refuse_special(path, "write")
    with writing(path):
        try:
            yield unfinished
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """The same for a folder. An empty one in its place is replaced, any other is refused."""
    unfinished = unfinished_name(path)
    with writing(path):
        refuse_full_folder(path)
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        with writing(path):
            refuse_full_folder(path)
            unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def unfinished_name(path: Path) -> Path:
    """A hidden name beside the path that no other process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def refuse_full_folder(path: Path) -> None:
    if os.path.lexists(path) and not (is_folder(path) and not paths_in(path)):
        raise UserError(f"{path} exists already")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for this process, also when it is renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform != "win32":  # there two processes on one folder are not told apart
            import fcntl
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{path} is being written by another process") from None
        yield
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Whatever stands there: a file, a folder with all in it; of a link the link alone."""
    shutil.rmtree(path) if not path.is_symlink() and is_folder(path) else path.unlink()


def make_folder(path: Path) -> None:
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one sentence that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', 0) or error}") from None
