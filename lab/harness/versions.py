"""Which version of the code made a run, by the files in its folder; and what differs, for people.

A version is the whole of its files, as syntax trees: every statement counts, of whatever kind and
in whatever file, but no comment and no docstring. Only a function that nothing names does not
count, such as a weighting that is not chosen, with what this one alone calls. So a new idea in
mitigations.py makes no other version of plain GRPO. Names for people come last: where one is
missing, the version is still another one.

What a program opens or reads from its environment is data, and is not seen here. Nor is a function
that it finds by a name which it puts together while it runs.
"""
import ast
import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from run import code_folders

# the statements that count, in order: a label, as policy_loss (grpo.py), and a text
Version = tuple[tuple[str, str], ...]
PLAIN = {"mitigation": "none", "advantage": "grpo"}  # plain GRPO, and the decorators of methods


class Part(NamedTuple):
    """A statement of a file."""
    label: str             # the name that it defines, or else its first line
    text: str              # without docstrings
    words: frozenset[str]  # the names that it uses
    waits: bool            # it does nothing until something names it


def digest_of(what: object) -> str:
    return hashlib.sha256(repr(what).encode(errors="surrogatepass")).hexdigest()[:12]


def chosen_in(config: Mapping[str, Any]) -> set[str]:
    return {str(config.get(axis, plain)) for axis, plain in PLAIN.items()}


def versions_of(run: Path, chosen: Collection[str]) -> dict[int, Version]:
    """The versions that made a run which has chosen these methods, by the step after which it went
    on with them. A copy in which nothing differs that counts is no other version."""
    found: dict[int, Version] = {}
    for folder in code_folders(run):
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
        version = version_of(files, chosen)
        if version != next(reversed(found.values()), None):
            found[int(folder.name.removeprefix("code").removeprefix("_after_") or 0)] = version
    return found


def changes_of_run(run: Path, config: Mapping[str, Any]) -> dict[int, list[str]]:
    """What a run went on with that was another version before, by the step after which it did: of
    its code, and of the data that config.json has a digest of."""
    found = {one["after_step"]: [*one["files"]] for one in config.get("changed", [])}
    for (_, before), (step, now) in pairwise(versions_of(run, chosen_in(config)).items()):
        found[step] = differing(before, now) + found.get(step, [])
    return found


def differing(before: Version, now: Version) -> list[str]:
    """The labels of what differs between two versions; those of the book first."""
    labels = {label for label, _ in {*before} ^ {*now}}
    if before != now and not labels:
        return ["order of statements"]
    return sorted(labels, key=lambda label: ("/" in label, label))


def version_of(files: Mapping[str, Path], chosen: Collection[str]) -> Version:
    contents = [(name, path.read_bytes()) for name, path in sorted(files.items())]
    return version_of_contents(tuple(contents), frozenset(chosen))


@lru_cache(500)
def version_of_contents(contents: tuple[tuple[str, bytes], ...], chosen: frozenset[str]) -> Version:
    """What does not wait counts, and then what this names, and what that names, and so on."""
    parts = [(part, file) for file, content in contents for part in parts_of(content)]
    waiting, named = [part for part, _ in parts], chosen
    while reached := [part for part in waiting if not part.waits or part.label in named]:
        waiting = [part for part in waiting if part.waits and part.label not in named]
        named = named.union(*(part.words for part in reached))
    return tuple((f"{part.label} ({file})", part.text) for part, file in parts
                 if not part.waits or part.label in named)


@lru_cache(2000)
def parts_of(content: bytes) -> list[Part]:
    """The statements of a file, in order. One that is not Python is a text."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return [Part("text", repr(content), frozenset(), False)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            has_text = ast.get_docstring(node) is not None
            node.body = node.body[has_text:] or [ast.Pass()]
    return [Part(label_of(one), ast.unparse(one), frozenset(map(word_of, ast.walk(one))),
                 only_defines(one)) for one in tree.body]


def label_of(one: ast.stmt) -> str:
    target = one.targets[0] if isinstance(one, ast.Assign) else one
    target = one.target if isinstance(one, ast.AnnAssign) else target
    name: str = getattr(target, "name", "") or getattr(target, "id", "")
    return name or shorten(ast.unparse(one).split("\n")[0], 60, placeholder="...")


def word_of(node: ast.AST) -> str:
    """What a node names, as f in f(x) and in grpo.f(x), in METHODS["f"] and in an import of f."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return str(getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))))


def only_defines(one: ast.stmt) -> bool:
    """Whether this defines a function, or a class that a run can choose, and does nothing else."""
    if not isinstance(one, ast.FunctionDef | ast.ClassDef) or one.name.startswith("__"):
        return False
    decorators = {ast.unparse(node) for node in one.decorator_list}
    if isinstance(one, ast.ClassDef):
        does_more = not decorators or not all(isinstance(x, ast.FunctionDef) for x in one.body)
    else:
        does_more = any(isinstance(node, ast.Call) for node in ast.walk(one.args))
    return decorators <= PLAIN.keys() and not does_more
