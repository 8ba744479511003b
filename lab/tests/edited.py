"""A function of the book as it would be if somebody had changed it. The change is made in its
source, before anything is imported that takes the function from there:

    return x                becomes  return changed(x), where numbers are larger by a fiftieth
    what returns nothing    is left out
    an argument `: bool`    is turned round
"""
import ast
import dataclasses
import importlib.util
import json
import sys
from fractions import Fraction
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------ the source
def definitions(node, before=""):
    """(name, node) of every function, also of those within others, as Cache.read.attend."""
    for part in ast.iter_child_nodes(node):
        name = before
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            name = f"{before}{part.name}."
        if isinstance(part, ast.FunctionDef):
            yield name[:-1], part
        yield from definitions(part, name)


def returns_of(node):
    """The statements by which a function returns a value, without those of functions in it."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Return) and part.value:
            yield part
        if not isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield from returns_of(part)


def bool_arguments(node):
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one.arg for one in given if one.annotation and ast.unparse(one.annotation) == "bool"]


def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def reached(tree, *names):
    """The functions of a file that these functions use, and those that these use, by their last
    names. What a file shows when it is run as a program is left out."""
    known = {name.split(".")[-1]: node for name, node in definitions(tree) if name != "show"}
    found, new = set(), {*names}
    while new:
        found |= new
        new = {name for one in new for name in names_in(known[one])} & known.keys() - found
    return found


def edit(tree, name, argument):
    """Change a function, or turn one of its arguments round."""
    node = dict(definitions(tree))[name]
    if argument:
        node.body.insert(0, ast.parse(f"{argument} = not {argument}").body[0])
        return
    statements = [*returns_of(node)]
    for statement in statements:
        statement.value = ast.Call(ast.Name("changed", ast.Load()), [statement.value], [])
    if not statements:
        node.body = [ast.Pass()]


class Edited(SourceFileLoader):
    """Imports a file in which a function is changed. Its lines keep their numbers."""
    function = argument = ""

    def get_code(self, name):
        tree = ast.parse(Path(self.path).read_text("utf-8"))
        edit(tree, self.function, self.argument)
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


def import_edited(file, function, argument):
    name, path = file.removesuffix(".py"), ROOT / file
    loader = Edited(name, str(path))
    loader.function, loader.argument = function, argument
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location(name, path, loader=loader))
    module.changed = changed
    sys.modules[name] = module
    loader.exec_module(module)


# ------------------------------------------------------------------------------------- the values
def is_float(x):
    return isinstance(x, float | Fraction | torch.nn.Module) or (
        isinstance(x, torch.Tensor) and x.is_floating_point())


def larger(x):
    if isinstance(x, torch.nn.Module):
        with torch.no_grad():
            for parameter in x.parameters():
                parameter.mul_(1.02)
        return x
    return x * (Fraction(51, 50) if isinstance(x, Fraction) else 1.02)


def is_whole(x):
    return isinstance(x, int | torch.Tensor)


def neighbour(x):
    """Another whole number that is none where this one is: the one before it, or 1. True is not."""
    if isinstance(x, torch.Tensor):
        return ~x if x.dtype == torch.bool else torch.where(x > 0, x - 1, 1).to(x.dtype)
    return not x if isinstance(x, bool) else x - 1 if x > 0 else 1


def is_other(x):
    return isinstance(x, str | bytes | torch.Generator | Tokenizer)


def another(x):
    """A text with its last character twice, another seed, a tokenizer whose words
    have changed places."""
    if isinstance(x, torch.Generator):
        return torch.Generator().manual_seed(x.initial_seed() + 1)
    if isinstance(x, Tokenizer):
        known = json.loads(x.to_str())
        words = {word: number for word, number in known["model"]["vocab"].items()
                 if number not in {token["id"] for token in known["added_tokens"]}}
        first, *others = words.values()
        known["model"]["vocab"] |= dict(zip(words, [*others, first]))
        return Tokenizer.from_str(json.dumps(known))
    return x + x[-1:]


CHANGES = ((is_float, larger), (is_whole, neighbour), (is_other, another))


def with_each(value, change):
    """The value with each of its parts changed, however deep it lies."""
    if isinstance(value, dict):
        return {name: with_each(part, change) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        parts = {name: with_each(getattr(value, name), change) for name in names}
        return dataclasses.replace(value, **parts)
    if isinstance(value, list | tuple | set | frozenset):
        made = getattr(value, "_make", type(value))  # of a NamedTuple
        return made([with_each(part, change) for part in value])
    return change(value)


def changed(value):
    """The value with all its floating-point numbers changed, or, if it has none, with its whole
    numbers, or else with its texts."""
    for is_meant, change in CHANGES:
        met = []

        def change_part(part):
            if not is_meant(part):
                return part
            met.append(part)
            return change(part)

        found = with_each(value, change_part)
        if met:
            return found
    return value
