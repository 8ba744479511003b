"""What a run is made of, as texts: each definition that it can reach. Comments and docstrings are
left out. A run of the book keeps its files in code/, and one of the lab digests in config.json."""
import ast
import hashlib
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from lab.engine.errors import PROJECT


def digest_of(what: object) -> str:
    return hashlib.sha256(repr(what).encode(errors="surrogatepass")).hexdigest()[:12]


# the names from which all that a run can reach is found: train.py's, the lab's, those of a task
START = {"train", "carry_out", "LabRun", "Task", "reward", "problems"}


def texts_of(files: Iterable[Path], start: Collection[str], root: Path = PROJECT) -> dict[str, str]:
    """The text of each definition that a run can reach, as "policy_loss (grpo.py)": what `start`
    names, what these texts name, and so on. Comments and docstrings are left out."""
    known, found = {"", *start}, dict[str, str]()
    waiting = [(name, f"{label} ({where})", node)
               for path in files for where in [shown(path, root)]
               for name, label, node in definitions(path.read_text(encoding="utf-8"))]
    while reached := [one for one in waiting if one[0] in known]:
        waiting = [one for one in waiting if one[0] not in known]
        for _, label, node in reached:
            text, names = text_and_names(node)
            found[label] = found.get(label, "") + text + "\n"
            known |= names
    return found


def shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


@lru_cache(1000)
def definitions(file: str) -> list[tuple[str, str, ast.stmt]]:
    """The statements of a file's text, each with the name by which it is reached and a label. A
    method is reached with its class. What has no name runs whenever the file is imported."""
    found: list[tuple[str, str, ast.stmt]] = []
    for one in ast.parse(file).body:
        if isinstance(one, ast.ClassDef):
            methods = [part for part in one.body if isinstance(part, ast.FunctionDef)]
            found += [(one.name, f"{one.name}.{part.name}", part) for part in methods]
            one.body = [part for part in one.body if part not in methods] or [ast.Pass()]
        target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", one)
        name = getattr(target, "name", getattr(target, "id", ""))
        is_text = isinstance(getattr(one, "value", None), ast.Constant)
        if name or not (is_text or isinstance(one, ast.Import | ast.ImportFrom | ast.If | ast.Try)):
            found.append((name, name or "when imported", one))
    return found


@lru_cache(10_000)
def text_and_names(node: ast.stmt) -> tuple[str, set[str]]:
    """A text without docstrings, and the names that it uses, as f in f(x) and in grpo.f(x), but not
    those of its local variables."""
    for one in ast.walk(node):
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    parts = [*ast.walk(node)]
    names = [part for part in parts if isinstance(part, ast.Name)]
    local = {part.arg for part in parts if isinstance(part, ast.arg)}
    local |= {part.id for part in names if isinstance(part.ctx, ast.Store)}
    of_modules = {part.attr for part in parts if isinstance(part, ast.Attribute)
                  and isinstance(part.value, ast.Name) and part.value.id not in local}
    return ast.unparse(node), of_modules | {part.id for part in names} - local


def in_folder(run: Path, config: dict[str, Any]) -> dict[str, str]:
    """The digest of each definition that a run could reach, from the files in its folder, and of
    each file of data."""
    code = run / "code"
    files = [path for path in sorted(code.rglob("*.py")) if path != code / "run.py"]  # its output
    texts = texts_of(files, START | {config["mitigation"], config["advantage"]}, root=code)
    data: dict[str, str] = config.get("made_of", {})
    return {label: digest_of(text) for label, text in texts.items()} | data


def differing(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """What is another version now, with its digest before; a file also if it is gone. A definition
    that is gone is named no more, so that which named it differs, or the settings do."""
    return {label: digest for label, digest in sorted(before.items())
            if now.get(label, digest if label.endswith(")") else "") != digest}
