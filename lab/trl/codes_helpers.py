"""Parts of the adapters: to take a function from a checkout, and to lay a batch out for it."""
import ast
import importlib.util
import sys
import tempfile
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType

from torch import Tensor

from engine.errors import UserError
from lab.formula.batches import Batch

NUMBER = count()  # of the modules that were made


def take(path: Path, names: list[str], **given: object) -> ModuleType:
    """A module with these functions and classes of a file, and nothing else of it. `given` are the
    names that they use: modules, settings, and stand-ins for a model or a tokenizer."""
    tree = ast.parse(read(path))
    found = {node.name: node for node in tree.body
             if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names}
    missing = set(names) - found.keys()
    if missing:
        raise UserError(f"{path} has no {', '.join(sorted(missing))}: it is another version")
    return load("\n\n".join(ast.unparse(found[name]) for name in names), given)


def take_statement(source: str, containing: str, inputs: list[str], output: str,
                   **given: object) -> Callable[..., Tensor]:
    """A function of the shortest statement that contains a text: from `inputs` to the variable
    `output`, for what a code does in the middle of a long function."""
    found = [ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(source)))
             if isinstance(node, (ast.Assign, ast.AugAssign, ast.For))]
    found = [text for text in found if containing in text]
    if not found:
        raise UserError(f"no statement contains {containing!r}: it is another version")
    body = textwrap.indent(min(found, key=len), "    ")
    return load(f"def piece({', '.join(inputs)}):\n{body}\n    return {output}\n", given).piece


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def load(text: str, given: dict[str, object]) -> ModuleType:
    """A module of this text, which can use the given names. It is read from a temporary file, so
    that a traceback shows its lines."""
    folder = Path(tempfile.mkdtemp(prefix="adapter-"))
    path = folder / f"taken_{next(NUMBER)}.py"
    path.write_text(f"from __future__ import annotations\n{text}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """(B, L - 1): column j is for token j + 1, as most codes lay log-probs out. It stands in where
    a code has its log-probs computed by a model."""
    log_p = logits.log_softmax(-1)[:, :-1]
    return log_p.gather(2, batch.ids[:, 1:, None]).squeeze(2)
