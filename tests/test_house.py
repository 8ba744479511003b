"""The house: what stands at the top level, who imports whom, and what no line may hold.

Read from the source with `ast`, imports inside functions included; nothing is run.
"""
import ast
import sys
from functools import cache

import pytest
from conftest import ROOT

SIX = {"countdown_task", "qwen2_model", "grpo", "mitigations", "train", "analyze"}
ROOMS = ("engine", "credit", "analysis", "truth", "study", "tools", "benchmarks")
PACKAGES = {"torch", "safetensors", "tokenizers", "numpy", "matplotlib"}

# Room or file -> what it may import; a name stands for itself and for all that lies in it.
MAY_IMPORT = {
    "engine": ["qwen2_model", "countdown_task", "engine"],
    "credit": ["engine", "qwen2_model", "countdown_task", "grpo", "credit"],
    "analysis": ["countdown_task", "engine", "grpo.gradient_size", "grpo.group_z_score",
                 "analysis"],
    "countdown_task": ["engine.countdown_solutions", "engine.errors", "engine.flags",
                       "engine.given_problems", "engine.tokens"],
    "qwen2_model": ["engine.errors", "engine.files", "engine.model_folder"],
    "grpo": ["engine", "qwen2_model", "countdown_task"],
    "mitigations": ["engine", "grpo", "credit", "countdown_task"],
    "train": [*SIX, "engine", "credit", "analysis"],
    "analyze": ["analysis", "engine", "countdown_task", "grpo", "mitigations"],
    "truth": [*SIX, "engine", "credit", "analysis", "truth"],
    "study": [*SIX, "engine", "credit", "analysis", "truth", "study"],
    "tools": [*SIX, "engine", "credit", "analysis", "tools"],
    "benchmarks": [*SIX, "engine", "credit", "analysis", "benchmarks"],
}
# An analysis never asks a model.
MAY_NOT_IMPORT = {
    "analysis": ["engine.sampler", "engine.forward", "engine.lab", "engine.rollouts"],
}


def sources():
    """Every .py of the program, the tests aside."""
    paths = list(ROOT.glob("*.py"))
    for room in ROOMS:
        paths += (ROOT / room).rglob("*.py")
    return sorted(paths)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources()}
NAMES = sorted(MODULES)


@cache
def tree_of(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


def is_own(name):
    return name.split(".")[0] in SIX | set(ROOMS)


@cache
def imports(name):
    """(what, line) of every import; a name taken from a module is `module.name`."""
    taken = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            taken += [(alias.name, node.lineno) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = absolute(name, node)
            taken += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return taken


def absolute(name, node):
    """The module of `from ... import`, the dots of a relative one resolved."""
    if not node.level:
        return node.module
    is_package = MODULES[name].name == "__init__.py"
    parts = name.split(".")
    above = parts[:len(parts) - node.level + is_package]
    return ".".join([*above, *filter(None, [node.module])])


def module_of(what):
    """The module that is imported: of `grpo.update` it is grpo."""
    parts = what.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def lies_in(what, places):
    return any(what == place or what.startswith(f"{place}.") for place in places)


def where(name, line):
    return f"{MODULES[name].relative_to(ROOT)}:{line}"


def test_the_top_level_is_six_files():
    assert {path.stem for path in ROOT.glob("*.py")} == SIX


def test_every_package_is_a_known_room():
    """Rooms are packages; a new one needs its line in ROOMS and MAY_IMPORT."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("name", NAMES)
def test_every_module_imports_only_what_its_room_may(name):
    room = name.split(".")[0]
    allowed, forbidden = MAY_IMPORT[room], MAY_NOT_IMPORT.get(room, [])
    wrong = [f"{where(name, line)} imports {what}" for what, line in imports(name)
             if is_own(what) and (not lies_in(what, allowed) or lies_in(what, forbidden))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_named_packages_are_imported(name):
    wrong = []
    for what, line in imports(name):
        package = what.split(".")[0]
        if is_own(what) or package in PACKAGES or package in sys.stdlib_module_names:
            continue
        if package == "transformers" and is_inside_a_function_of_benchmarks(name, line):
            continue
        wrong.append(f"{where(name, line)} imports {what}")
    assert not wrong, "\n".join(wrong)


def is_inside_a_function_of_benchmarks(name, line):
    functions = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.FunctionDef)]
    inside = any(node.lineno < line <= node.end_lineno for node in functions)
    return inside and name.startswith("benchmarks.")


def import_graph():
    graph = {}
    for name in NAMES:
        modules = {module_of(what) for what, _ in imports(name) if is_own(what)}
        graph[name] = modules - {"", name}
    return graph


def circle_in(graph):
    """The modules of a circle, the first one again at its end; an empty list if there is none."""
    done = set()

    def follow(name, path):
        if name in path:
            return [*path[path.index(name):], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            circle = follow(other, [*path, name])
            if circle:
                return circle
        done.add(name)
        return []

    for name in graph:
        circle = follow(name, [])
        if circle:
            return circle
    return []


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_imports_go_in_a_circle():
    assert " -> ".join(circle_in(import_graph())) == ""


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_evaluated_pickled_or_caught_unnamed(name):
    wrong = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            wrong.append(f"{where(name, node.lineno)} has a bare except")
        if isinstance(node, ast.Call):
            problem = forbidden_call(node)
            if problem:
                wrong.append(f"{where(name, node.lineno)} calls {problem}")
    assert not wrong, "\n".join(wrong)


def forbidden_call(call):
    """What the call does that none may do: eval, exec, unpickle. `model.eval()` is fine."""
    function = ast.unparse(call.func)
    if function in ("eval", "exec", "__import__"):
        return function
    if function.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "joblib"):
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
    assert bool(forbidden_call(ast.parse(code).body[0].value)) == wrong


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_asserted(name):
    """`python -O` leaves assertions out: what must hold is checked, and raises."""
    wrong = [where(name, node.lineno) for node in ast.walk(tree_of(name))
             if isinstance(node, ast.Assert)]
    assert not wrong, f"{', '.join(wrong)}: raise an error instead"


LOOKED_AT_OTHERWISE = {
    "engine.files",  # is what all others ask
    "truth.common", "truth.sparsity"}  # results on file name their code as it is


@pytest.mark.parametrize("name", sorted(set(NAMES) - LOOKED_AT_OTHERWISE))
def test_what_may_not_be_looked_at_is_nowhere_taken_for_absent(name):
    """These answer "no" or "nothing" where permission is denied; engine/files.py has others."""
    silent = {"glob", "rglob", "iterdir", "listdir", "scandir", "walk", "exists", "lexists",
              "isfile", "isdir", "is_file", "is_dir"}
    calls = [node.func for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    wrong = [f"{where(name, call.lineno)} calls {ast.unparse(call)}" for call in calls
             if isinstance(call, ast.Attribute) and call.attr in silent
             and ast.unparse(call) != "ast.walk"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_pickle_is_not_imported(name):
    wrong = [where(name, line) for what, line in imports(name)
             if what.split(".")[0] in ("pickle", "marshal", "shelve")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_at_most_100_columns(name):
    lines = MODULES[name].read_text(encoding="utf-8").splitlines()
    wrong = [f"{where(name, number)} has {len(line)} columns"
             for number, line in enumerate(lines, 1) if len(line) > 100]
    assert not wrong, f"{len(wrong)} lines, the first: {wrong[0]}"
