"""Which file may import which, and what no line may contain, read from the source with `ast`,
including imports inside functions. What the program loads when it runs is counted in test_book.py.
"""
import ast
import re
import sys
from functools import cache

import pytest
from conftest import BOOK, ROOT, project_files

ROOTS = {*BOOK}
OWN_PACKAGES = ("lab", "examples")
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib"}
INSTALLED = {"torch", "safetensors", "tokenizers", "numpy", "matplotlib"}
DOORS = {  # files that talk to other tools, and what only they may import
    "lab.gpu.kernels": {"triton"},
    "lab.trl.trl_trainer": {"trl", "transformers", "accelerate"},
    "lab.formula.adapters": {"trl"},
    "examples.reasoning_gym_task": {"reasoning_gym"}, "examples.question_answer": {"pyarrow"},
    "lab.harness.chat_template": {"jinja2"}}  # torch requires it


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name: ROOT / f"{name}.py" for name in ROOTS} | {
    module_name(path): path for package in OWN_PACKAGES
    for path in project_files(f"{package}/**/*.py")
    if (ROOT / package / "tests") not in path.parents}


@cache
def tree_of(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


@cache
def imports(name):
    """(what, line) of every import; a name taken from a module is `module.name`."""
    taken = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            taken += [(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            taken += [(f"{absolute(name, node)}.{alias.name}", node.lineno)
                      for alias in node.names]
    return sorted(taken, key=lambda one: one[1])


def absolute(name, node):
    """The module of `from ... import`, the dots of a relative one resolved."""
    if not node.level:
        return node.module
    parts = name.split(".")
    above = parts[:len(parts) - node.level + (MODULES[name].name == "__init__.py")]
    return ".".join([*above, *filter(None, [node.module])])


def is_own(name):
    return name.split(".")[0] in ROOTS | {*OWN_PACKAGES}


def where(name, line):
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def wrong_imports(is_wrong):
    return [f"{where(name, line)} imports {what}" for name in sorted(MODULES)
            for what, line in imports(name) if is_wrong(name, what)]


def test_each_file_of_the_book_imports_only_those_before_it():
    """Also where it shows its concept. `analyze` reads what the others wrote."""
    def is_wrong(name, what):
        return name in ROOTS and is_own(what) and (
            what.split(".")[0] not in BOOK[:BOOK.index(name)])

    assert not wrong_imports(is_wrong), "\n".join(wrong_imports(is_wrong))


def test_no_function_of_the_book_knows_of_the_lab():
    """But for the messages that name it as the other door."""
    functions = [(name, part) for name, node in nodes(ast.FunctionDef, BOOK)
                 for part in ast.walk(node)]
    wrong = [where(name, part.lineno) for name, part in functions
             for value in vars(part).values() if isinstance(value, str)
             and re.search(r"\blab\b", value.replace("`python -m lab ", ""))]
    assert not wrong, "\n".join(wrong)


def test_the_tests_of_the_book_need_no_lab():
    """They pass with lab/ and examples/ deleted."""
    names = [*OWN_PACKAGES, *(path.stem for path in ROOT.glob("lab/tests/[a-z]*.py"))]
    names.remove("conftest")
    for path in ROOT.glob("tests/*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"^ *(from|import) ({'|'.join(names)})\b", text, re.M), path


def test_only_the_named_packages_are_imported():
    def is_wrong(name, what):
        package = what.split(".")[0]
        is_known = is_own(what) or package in INSTALLED or package in sys.stdlib_module_names
        return package in UNPICKLERS or not (is_known or package in DOORS.get(name, ()))

    assert not wrong_imports(is_wrong), "\n".join(wrong_imports(is_wrong))


def nodes(kind, names=MODULES):
    """(module, node) of every node of this kind."""
    return [(name, node) for name in names for node in ast.walk(tree_of(name))
            if isinstance(node, kind)]


def test_nothing_is_evaluated_unpickled_asserted_or_caught_unnamed():
    """`python -O` leaves assertions out: what must hold is checked, and raises."""
    wrong = [f"{where(name, node.lineno)} has a bare except"
             for name, node in nodes(ast.ExceptHandler) if node.type is None]
    wrong += [f"{where(name, node.lineno)} asserts" for name, node in nodes(ast.Assert)]
    wrong += [f"{where(name, node.lineno)} calls {forbidden_call(node)}"
              for name, node in nodes(ast.Call) if forbidden_call(node)]
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize("code, wrong", [
    ("eval('1')", True), ("exec('1')", True), ("pickle.load(f)", True), ("torch.load(f)", True),
    ("np.load(f, allow_pickle=True)", True), ("model.eval()", False),
    ("torch.load(f, weights_only=True)", False), ("np.load(f, allow_pickle=False)", False)])
def test_forbidden_calls_are_recognised(code, wrong):
    [call] = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert bool(forbidden_call(call)) == wrong
