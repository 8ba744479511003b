"""Parts of the adapters: to take a function from a checkout, and to lay a batch out for it."""
import ast
import importlib.util
import sys
import tempfile
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from engine.errors import UserError
from tools.formula.batches import Batch

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


class Replay(torch.nn.Module):
    """A stand-in for the model: it finds the row that begins with the given tokens, and returns the
    logits of the batch for it."""
    device = torch.device("cpu")

    def __init__(self, logits: Tensor, ids: Tensor):
        super().__init__()
        self.all_logits, self.all_ids = logits, ids
        self.unused = torch.nn.Parameter(torch.zeros(1))  # codes ask for the parameters' device

    def forward(self, input_ids: Tensor, *_: object, **__: object) -> SimpleNamespace:
        rows = []
        for row in input_ids:
            same = (self.all_ids[:, :len(row)] == row).all(1).nonzero()
            rows.append(self.all_logits[same[0, 0], :len(row)])
        return SimpleNamespace(logits=torch.stack(rows), aux_loss=torch.zeros(()))


def gradient_of_backward(logits: Tensor, run: Callable[[Tensor], object]) -> Tensor:
    """A loss with the gradient that a code leaves at the logits when it calls backward itself."""
    leaf = logits.detach().clone().requires_grad_(True)
    run(leaf)
    if leaf.grad is None:
        return (logits * 0).sum()
    return (logits * leaf.grad.detach()).sum()


def groups_of(batch: Batch) -> list[Tensor]:
    """The rows of each group."""
    return [(batch.group == number).nonzero().flatten() for number in batch.group.unique()]


def log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """(B, L - 1): column j is for token j + 1, as most codes lay log-probs out. It stands in where
    a code has its log-probs computed by a model."""
    log_p = logits.log_softmax(-1)[:, :-1]
    return log_p.gather(2, batch.ids[:, 1:, None]).squeeze(2)


def padded_at_the_left(batch: Batch) -> tuple[Tensor, int]:
    """(B, P + T) the place in a row of each column, where all prompts end at column P - 1, as in
    codes that pad prompts at the left; and P. Places before the row are its first token's."""
    P = int(batch.prompt_length.max())
    T = int((batch.mask > 0).sum(1).max())
    column = torch.arange(P + T)[None] - (P - batch.prompt_length[:, None])
    return column.clamp(0, batch.ids.shape[1] - 1), P


def by_column(value: Tensor, place: Tensor) -> Tensor:
    """What stands at these places: (B, L) or (B, L, V) -> (B, P + T) or (B, P + T, V)."""
    if value.dim() == 3:
        return value.gather(1, place[:, :, None].expand(-1, -1, value.shape[2]))
    return value.gather(1, place)
