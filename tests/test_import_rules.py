"""The import rules: which files are at the top level, which package may import which, how many
files a program loads, and what no line may contain.

They are read from the source with `ast`, including imports inside functions. Only the counts of
loaded files run a program.
"""
import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest
from conftest import LISTED, REMOVABLE, ROOT, project_files

SIX = {"countdown_task", "qwen2_model", "grpo", "mitigations", "train", "analyze"}
OWN_PACKAGES = ("engine", "harness", "credit", "analysis", "tools", "examples",
                *(name for name in REMOVABLE if (ROOT / name).exists()))
UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "joblib"}
INSTALLED = {"torch", "safetensors", "tokenizers", "numpy", "matplotlib"}
DOORS = {  # files that talk to other tools, and what only they may import
    "engine.kernels": {"triton"},
    "lab.trl.trl_trainer": {"trl", "transformers", "accelerate"},
    "lab.trl.adapters": {"trl"}, "lab.formula.adapters": {"trl"},
    "harness.chat_template": {"jinja2"},  # torch requires it
    "harness.track": {"trackio", "wandb"}}

# Package or file -> what it may import; a name means itself and everything within it.
LAB = ["engine", "harness", "credit", "analysis"]
MAY_IMPORT = {
    "engine": ["qwen2_model", "engine"],
    "harness": ["qwen2_model", "engine", "harness"],
    "credit": ["engine", "harness", "qwen2_model", "grpo", "credit"],
    "analysis": ["engine", "harness", "grpo", "analysis"],
    "countdown_task": ["engine.errors", "engine.tokens", "harness.flags",
                       "harness.record.read_given",
                       "harness.solved_problems.solved_turns"],  # only with --examples
    "qwen2_model": [],
    "grpo": ["engine", "qwen2_model"],
    "mitigations": ["engine", "harness", "grpo"],
    "train": [*SIX, *LAB],
    "analyze": ["analysis", "engine", "harness", "grpo", "mitigations",
                "tools.helpers.diagnosis", "tools.helpers.log"],  # for its line about mistakes
    "lab": [*SIX, *LAB, "lab", "tools.helpers.runs"],  # a table of arms by seeds
    "tools": [*SIX, *LAB, "tools", "examples.guess"],  # tools.guesser makes the game's model
    "examples": [*SIX, "engine", "harness.flags", "harness.record.read_given",
                 "harness.chat_template",  # for question_answer.py
                 "examples.one_step", "examples.sampler", "lab.formula.exercise",
                 # for dpo.py, which leaves a run
                 "analysis.statistics.student_quantile", "examples.histories",
                 "examples.guess.Task",
                 "examples.loop", "harness.build", "harness.step_lines", "harness.record",
                 "harness.screen.python_command", "harness.settings"],
}


def sources():
    """Every .py of the program, the tests aside."""
    paths = [ROOT / f"{name}.py" for name in SIX]
    for package in OWN_PACKAGES:
        paths += [path for path in project_files(f"{package}/**/*.py")
                  if (ROOT / package / "tests") not in path.parents]
    return sorted(paths)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources()}
NAMES = sorted(MODULES)


ADDED = "# a user's"  # in the place of each line that a user has added
PARTS = {"tokens_until", "rescaled_weight", "shuffled"}  # beside methods


@cache
def lines_in(name):
    """The lines of a file, the project's own: a user's break no rule."""
    text = MODULES[name].read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body if name in SIX else ():
        if is_added(node, anywhere=name == "mitigations"):
            first = min([node.lineno, *(mark.lineno for mark in marks_of(node))])
            lines[first - 1:node.end_lineno] = [ADDED] * (node.end_lineno - first + 1)
    return lines


def marks_of(node):
    return getattr(node, "decorator_list", [])


def is_added(node, anywhere):
    """Whether a user has added it: a method, and in mitigations.py all else that is no part of it,
    an import of a file or a package of theirs among it."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        package = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
        return anywhere and not (is_own(package) or package in INSTALLED | sys.stdlib_module_names)
    is_method = any(ast.unparse(mark).partition("(")[0] in ("mitigation", "advantage")
                    for mark in marks_of(node))
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    named = getattr(node, "name", target and ast.unparse(target))
    return bool(named and (is_method or anywhere) and named not in LISTED | PARTS)


@cache
def tree_of(name):
    return ast.parse("\n".join(lines_in(name)), str(MODULES[name]))


@pytest.mark.parametrize("code, elsewhere, in_mitigations", [
    ("def helper(): pass", False, True), ("WORDS = {1}", False, True),
    ("from my_helpers import f", False, True), ("import numpy", False, False),
    ("def shuffled(): pass", False, False), ("@mitigation\ndef none(): pass", False, False),
    ("@advantage(whole_answers=True)\ndef mine(): pass", True, True)])
def test_what_a_user_adds_is_told_apart(code, elsewhere, in_mitigations):
    [node] = ast.parse(code).body
    assert [is_added(node, anywhere) for anywhere in (False, True)] == [elsewhere, in_mitigations]


def is_own(name):
    return name.split(".")[0] in SIX | {*OWN_PACKAGES, *REMOVABLE}


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


# The files of the project that are loaded: by an import, and at the end of the card's command.
CEILINGS = {"grpo": 15, "analyze": 36}
AT_THE_END = 28
LOADED = """
import json, sys
own, steps = map(json.loads, sys.argv[1:])

def show():
    print(json.dumps(list(sys.modules)))

def forget():  # the next one begins without them
    for name in sys.modules.keys() & set(own):
        del sys.modules[name]

import grpo
show()
forget()
import train
for flags in steps:
    train.main(flags)
    show()
forget()
import analyze
show()
"""
STEP = ["--steps", "1", "--questions", "2", "--answers", "2", "--max_new_tokens", "8",
        "--eval_tasks", "2"]


def loaded_by(steps):
    """The modules that a child process has loaded: after import grpo, each step, import analyze."""
    printed = subprocess.run([sys.executable, "-c", LOADED, json.dumps(NAMES), json.dumps(steps)],
                             cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [set(json.loads(line)) for line in printed.splitlines() if line.startswith("[")]


def test_what_is_loaded_does_not_grow(tmp_path):
    """A step has its evaluations, its credit file and its checkpoint. It does not wait for the
    compiler of torch, nor for what draws pictures: two seconds and 100 MB a start. Of methods in
    files of their own the chosen one is loaded."""
    steps = [[*STEP, "--out", str(tmp_path / name), *more]
             for name, more in (("run", []), ("gae", ["--advantage", "gae"]))]
    of_grpo, at_the_end, with_gae, of_analyze = loaded_by(steps)
    assert (tmp_path / "run/checkpoints/step_000001/model.safetensors").exists()
    assert {"train", "harness.record", "engine.optimizer"} <= at_the_end
    assert not {"torch._dynamo", "sympy", "matplotlib"} & with_gae
    assert [name for name in with_gae if name.startswith("credit.")] == ["credit.critic"]
    for loaded, most in ((at_the_end, AT_THE_END), (of_grpo, CEILINGS["grpo"]),
                         (of_analyze, CEILINGS["analyze"])):
        assert len(MODULES.keys() & loaded) <= most, sorted(MODULES.keys() & loaded)


def test_the_top_level_is_six_files():
    """Beside them lies what a user has, tasks say: the project does without."""
    others = {path.stem for path in project_files("*.py")} - SIX
    wrong = [f"{where(name, line)} imports {what}" for name in NAMES for what, line in imports(name)
             if what.split(".")[0] in others]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_known():
    """A new package needs its line in OWN_PACKAGES and MAY_IMPORT."""
    assert {path.parent.name for path in project_files("*/__init__.py")} == set(OWN_PACKAGES)


def test_every_module_imports_only_what_its_package_may():
    wrong = []
    for name in NAMES:
        allowed = MAY_IMPORT[name.split(".")[0]]
        wrong += [f"{where(name, line)} imports {what}" for what, line in imports(name)
                  if is_own(what) and not lies_in(what, allowed)]
    assert not wrong, "\n".join(wrong)


def test_only_the_named_packages_are_imported():
    wrong = []
    for name in NAMES:
        for what, line in imports(name):
            package = what.split(".")[0]
            is_known = is_own(what) or package in INSTALLED or package in sys.stdlib_module_names
            is_door = package in DOORS.get(name, ())
            if package in UNPICKLERS or not (is_known or is_door):
                wrong.append(f"{where(name, line)} imports {what}")
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_a_circle():
    graph = {}
    for name in NAMES:
        graph[name] = {module_of(what) for what, _ in imports(name) if is_own(what)} - {"", name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def nodes(kind):
    """(module, node) of every node of this kind."""
    return [(name, node) for name in NAMES for node in ast.walk(tree_of(name))
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
    assert bool(forbidden_call(ast.parse(code).body[0].value)) == wrong
