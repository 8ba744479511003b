"""What makes another version of the code: each kind of statement, wherever it stands."""
import ast
import textwrap

import pytest

from lab.harness.versions import changes_of_run, differing, version_of, versions_of

MINE = '''
"""About the file."""
import grpo  # why
TABLE = {"strength": 2.0}
def used(x):
    """Of used."""
    return x * TABLE["strength"]

@mitigation
def mine(rollouts):
    return used(rollouts)

@mitigation
def other(rollouts):
    return of_other(rollouts)

def of_other(x):
    return x + 3

@mitigation
class kept:
    def __call__(self, rollouts, policy):
        return of_other(rollouts)

def looked_up(x):
    return METHODS["other"](x)

def named_elsewhere(x):
    from mine import imported
    return mine.of_module(x)

def imported():
    return 4

def of_module():
    return 5

class Plain:
    def value(self):
        return 6

def __getattr__(name):
    return 7
'''


@pytest.fixture
def version(tmp_path):
    def of(text, *chosen, file="mine.py"):
        path = tmp_path / file
        path.write_text(text)
        return version_of({file: path}, chosen)
    return of


# a statement of each kind that Python has, which does something; a number in it is changed, too
STATEMENTS = {
    "FunctionDef": "@print\ndef f(x):\n    return 1", "ClassDef": "class A:\n    x = 1",
    "AsyncFunctionDef": "async def f():\n    1", "Return": "@print\ndef f():\n    return 1",
    "Delete": "del x[1]", "Assign": "x[1] = y", "AugAssign": "x += 1", "AnnAssign": "x: int = 1",
    "For": "for x in [1]:\n    y = x", "AsyncFor": "async def f():\n    async for x in y: 1",
    "While": "while x < 1:\n    x = 2", "If": "if x:\n    y = 1", "With": "with x as y:\n    z = 1",
    "AsyncWith": "async def f():\n    async with x: 1", "Match": "match x:\n    case 1: y = 2",
    "Raise": "raise ValueError(1)", "Try": "try:\n    x = 1\nexcept ValueError:\n    pass",
    "TryStar": "try:\n    x = 1\nexcept* ValueError:\n    pass", "Assert": "assert x == 1",
    "Import": "import x1", "ImportFrom": "from x1 import y as z", "Expr": "x.append(1)",
    "Global": "@print\ndef f():\n    global x1", "Pass": "class A1:\n    pass",
    "Nonlocal": "@print\ndef f(x1):\n    @print\n    def g():\n        nonlocal x1",
    "Break": "for x in [1]:\n    break", "Continue": "for x in [1]:\n    continue",
    "TypeAlias": "type X = list[1]"}


def test_every_kind_of_statement_counts(version):
    """Added, changed or removed; at the top of a file, within a class, and within a block."""
    kinds = {kind.__name__ for kind in ast.stmt.__subclasses__()}
    assert kinds <= STATEMENTS.keys()
    for kind in sorted(kinds):
        text = STATEMENTS[kind]
        assert kind in {type(node).__name__ for node in ast.walk(ast.parse(text))}
        for frame in ("{}", "class A:\n    y = 0\n{}", "if a:\n    y = 0\n{}"):
            indent = "    " * (frame != "{}")
            before, first, second = (f"{MINE}\n{frame.format(textwrap.indent(one, indent))}"
                                     for one in ("", text, text.replace("1", "4")))
            found = [version(one, "none") for one in (before, first, second)]
            assert len({*found}) == 3, (kind, frame)
            assert differing(found[0], found[1]) and differing(found[1], found[2])


@pytest.mark.parametrize("part, changed, chosen, label", [
    ("strength\": 2", "strength\": 3", "none", "TABLE"), ("import grpo", "", "none", "import grpo"),
    ("x * TABLE", "x + TABLE", "mine", "used"), ("x * TABLE", "x + TABLE", "none", ""),
    ("return used", "return -used", "mine", "mine"), ("return used", "return -used", "other", ""),
    ("x + 3", "x + 4", "other", "of_other"), ("x + 3", "x + 4", "kept", "of_other"),
    ("x + 3", "x + 4", "mine", ""), ("x + 3", "x + 4", "looked_up", "of_other"),
    ("(self, rollouts", "(self, x", "kept", "kept"), ("(self, rollouts", "(self, x", "mine", ""),
    ("return 4", "return 0", "named_elsewhere", "imported"), ("return 4", "return 0", "mine", ""),
    ("return 5", "return 0", "named_elsewhere", "of_module"), ("return 6", "0", "mine", "Plain"),
    ("return 7", "return 0", "mine", "__getattr__"), ("import grpo", "away = (", "none", "text"),
    ("def used(x)", "def used(x=f(1))", "none", "used"),  # a call when it is defined
    ("@mitigation\nclass", "@print\nclass", "mine", "kept"),
    ("class kept:", "class kept:\n    print()", "mine", "kept"),
    ("About", "Of", "mine", ""), ("Of used", "On used", "mine", ""), ("  # why", "", "mine", "")])
def test_a_function_that_nothing_names_does_not_count(version, part, changed, chosen, label):
    """Nor does a comment or a docstring."""
    assert MINE.count(part) == 1
    found = differing(version(MINE, chosen), version(MINE.replace(part, changed), chosen))
    assert label in " ".join(found) if label else not found


def test_the_versions_of_a_run_are_those_that_differ_in_what_counts(tmp_path):
    """A run without files has none. One that was resumed with another comment has one."""
    texts = {"code": "x = 1\n", "code_after_000002": "x = 1  # one\n",
             "code_after_000010": "x = 2\n", "code_after_1000000": "x = 2\ny = 1\n"}
    assert versions_of(tmp_path, ["none"]) == changes_of_run(tmp_path, {}) == {}
    for name, text in texts.items():
        (tmp_path / name / "lab").mkdir(parents=True)
        (tmp_path / name / "lab/mine.py").write_text(text)
    assert [*versions_of(tmp_path, ["none"])] == [0, 10, 1000000]
    of_data = {"changed": [{"after_step": 10, "files": {"x.jsonl": "0"}}]}
    assert changes_of_run(tmp_path, of_data) == {10: ["x (lab/mine.py)", "x.jsonl"],
                                                 1000000: ["y (lab/mine.py)"]}
