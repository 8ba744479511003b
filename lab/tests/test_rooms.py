"""Which room of the lab may import which."""
from graphlib import TopologicalSorter

import pytest

from test_import_rules import MODULES, imports, is_own, wrong_imports


def module_of(what):
    """The module that is imported: of `grpo.update` it is grpo."""
    parts = what.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def test_the_lab_imports_no_example():
    found = wrong_imports(lambda name, what: name.startswith("lab.") and
                          what.startswith("examples."))
    assert found == []


# rooms of the lab, and those that lie above them
ABOVE = {"engine": ("credit", "harness", "analysis", "tools", "probes"),
         "credit": ("harness", "analysis", "tools", "probes"),
         "harness": ("credit", "analysis", "tools", "probes"),
         "analysis": ("tools", "probes")}


@pytest.mark.parametrize("room", ABOVE)
def test_no_room_of_the_lab_imports_one_that_lies_above_it(room):
    """What a method declares, and how a step uses its values, lies in engine. There harness finds
    methods by name (lab/engine/methods.py)."""
    found = [(name, what, line) for name in MODULES if name.startswith(f"lab.{room}.")
             for what, line in imports(name)
             if what.startswith(tuple(f"lab.{above}." for above in ABOVE[room]))]
    assert found == []


def test_no_imports_go_in_a_circle():
    graph = {name: {module_of(what) for what, _ in imports(name) if is_own(what)} - {"", name}
             for name in MODULES}
    for part in ("lab.formula.credit", "lab.formula.curves"):  # opened where a search comes to it
        graph.get("lab.formula.search", set()).discard(part)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them
