"""Which file may import which, and what no line may contain, read from the source with `ast`,
including imports inside functions. What the program loads when it runs is counted in test_book.py.
"""
import ast
import re
import sys
from functools import cache

from conftest import BOOK, ROOT

UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib"}
INSTALLED = {"torch", "safetensors", "tokenizers", "numpy", "matplotlib"}
FILES = [ROOT / f"{name}.py" for name in BOOK]


@cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))]


def imports(path):
    """(what, line) of every import; a name taken from a module is `module.name`. A relative one
    begins with its dots."""
    found = [(alias.name, node.lineno) for node in nodes(path) if isinstance(node, ast.Import)
             for alias in node.names]
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            found += [(module + alias.name, node.lineno) for alias in node.names]
    return found


def wrong_imports(paths, is_wrong):
    """As a text, a line each; `is_wrong` takes the path and what is imported."""
    return "\n".join(f"{path}:{line} imports {what}" for path in paths
                     for what, line in imports(path) if is_wrong(path, what))


def test_each_file_of_the_book_imports_only_those_before_it():
    """Also where it shows its concept. `analyze` reads what the others wrote."""
    known = INSTALLED | {*sys.stdlib_module_names} - UNPICKLERS

    def is_wrong(path, what):
        return what.split(".")[0] not in known | {*BOOK[:BOOK.index(path.stem)]}

    assert not wrong_imports(FILES, is_wrong)


def test_no_function_of_the_book_knows_of_the_lab():
    """But for the messages that name it as the other door."""
    functions = [(path, part) for path in FILES for node in nodes(path)
                 if isinstance(node, ast.FunctionDef) for part in ast.walk(node)]
    wrong = [f"{path}:{part.lineno}" for path, part in functions
             for value in vars(part).values() if isinstance(value, str)
             and re.search(r"\blab\b", value.replace("`python -m lab ", ""))]
    assert not wrong


def test_the_tests_of_the_book_need_no_lab():
    """They pass with lab/ and examples/ deleted."""
    beside = {path.stem for path in ROOT.glob("lab/tests/*.py")} - {"conftest"}
    assert not wrong_imports(ROOT.glob("tests/*.py"), lambda path, what: what.split(".")[0] in {
        "lab", "examples", *beside})


def test_nothing_is_evaluated_unpickled_asserted_or_caught_unnamed():
    assert not forbidden(FILES)


def forbidden(paths):
    """As a text. `python -O` leaves assertions out: what must hold is checked, and raises."""
    found = []
    for path in paths:
        for node in nodes(path):
            what = "a bare except" * (isinstance(node, ast.ExceptHandler) and node.type is None)
            what += "an assertion" * isinstance(node, ast.Assert)
            what += forbidden_call(node) if isinstance(node, ast.Call) else ""
            found += [f"{path}:{node.lineno} has {what}"] if what else []
    return "\n".join(found)


def forbidden_call(call):
    """What the call does that none may do: eval, exec, unpickle. `model.eval()` is fine."""
    function = ast.unparse(call.func)
    if function in ("eval", "exec", "__import__"):
        return function
    if function.split(".")[0] in UNPICKLERS:
        return function
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if function == "torch.load" and arguments.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if arguments.get("allow_pickle", "False") != "False":
        return f"{function} with allow_pickle"
    return ""
