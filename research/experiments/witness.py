"""What the lab does today, in a few numbers: two short steps of an arm, and the source of a probe.

A result outlives changes of names, comments and speed, and does not outlive a change of a formula.
So it is not the source of an arm that is compared but what the arm does: reward, loss and gradient
of two steps, on a few answers of the shipped model. A probe has formulas of its own, and of it the
source is compared, without docstrings, comments and imports.
"""
import ast
import contextlib
import hashlib
import io
import math
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import train
from engine.errors import UserError
from harness.files import PROJECT, read_lines
from harness.registry import ADVANTAGES, MITIGATIONS

SHORT = ("--threads 1 --questions 4 --answers 4 --steps 2 --eval_every 0 --checkpoint_every 0 "
         "--sample_every 0 --seed 0")
ONE_STEP = ("--threads 1 --steps 1 --eval_every 0 --checkpoint_every 0 --sample_every 0 "
            "--seed 0")
WITHOUT_EFFECT = {"--eval_tasks"}  # beside SHORT, where train.py would refuse it
WATCHED = ("reward", "tokens", "loss", "gradient_norm")
NEAR = 1e-3  # relative: another kind of CPU rounds differently


def every_arm() -> dict[str, str]:
    arms = {name: f"--mitigation {name}" for name in MITIGATIONS}
    return arms | {name: f"--advantage {name}" for name in ADVANTAGES}


def witness_of(arms: dict[str, str]) -> dict[str, dict]:
    """Of each arm its flags, and what it did."""
    return {arm: {"flags": flags, "did": what_it_does(without_short(flags))}
            for arm, flags in arms.items()}


def without_short(flags: str, short: str = SHORT) -> str:
    """Without the flags that `short` has its own values for, and those that are nothing without
    them: so results share most of their arms."""
    taken = WITHOUT_EFFECT | {word for word in short.split() if word.startswith("--")}
    words, kept = iter(flags.split()), []
    for word in words:
        if word in taken:
            next(words)  # its value
        else:
            kept.append(word)
    return " ".join(kept)


@cache
def what_it_does(flags: str, short: str = SHORT) -> list[list]:
    """WATCHED of each step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with contextlib.redirect_stdout(io.StringIO()):
            train.main([*flags.split(), *short.split(), "--out", str(run)])
        return [watched(line) for line in read_lines(run / "metrics.jsonl")]


def watched(metrics: dict) -> list:
    return [metrics.get(name) for name in WATCHED]


def made_by_other_code(arms: dict[str, str], first_steps: dict[str, list]) -> list[str]:
    """The arms whose runs began otherwise than the same command begins today. `first_steps` has
    WATCHED of the first step of each one's run with seed 0."""
    others = []
    for arm, before in first_steps.items():
        [now] = what_it_does(without_short(arms[arm], ONE_STEP), ONE_STEP)
        if not all(map(is_near, before, now)):
            others.append(arm)
    return others


def sources_of(module: str | None, commit: str | None = None) -> dict[str, str]:
    """Of a probe and of what it takes from its room: sha256 of what is computed, by module. Of
    today's files, or of those of a commit."""
    found, to_read = {}, [module] if module else []
    while to_read:
        name = to_read.pop()
        if name in found:
            continue
        tree = ast.parse(source_of(f"{name.replace('.', '/')}.py", commit))
        to_read += imports_from_truth(tree)
        found[name] = hashlib.sha256(ast.unparse(what_computes(tree)).encode()).hexdigest()
    return dict(sorted(found.items()))


def source_of(path: str, commit: str | None) -> str:
    if commit is None:
        return (PROJECT / path).read_text(encoding="utf-8")
    shown = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=PROJECT, capture_output=True,
                           text=True)
    if shown.returncode:
        raise UserError(f"{path} of commit {commit[:7]}, which measured this, is not known here: "
                        f"{shown.stderr.strip()}")
    return shown.stdout


def imports_from_truth(tree: ast.Module) -> list[str]:
    return [node.module for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("research.probes.")]


def what_computes(tree: ast.Module) -> ast.Module:
    """The same without docstrings, and without imports: a function may move to another file."""
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if may_have_one and ast.get_docstring(node):
            node.body[0].value.value = ""
    return tree


def what_differs(before: dict, now: dict) -> list[str]:
    """A sentence for each thing that is no longer as it was when a result was made."""
    reasons = []
    for name in ("model", "recipe"):
        if before[name] != now[name]:
            reasons.append(f"the {name} is another one")
    for arm in before["arms"]:
        if not does_the_same(before["arms"].get(arm), now["arms"].get(arm)):
            reasons.append(f"{arm} does something else")
    for module in before["source"] | now["source"]:
        if before["source"].get(module) != now["source"].get(module):
            reasons.append(f"{module} computes something else")
    return reasons


def does_the_same(before: dict, now: dict | None) -> bool:
    """The same flags, and about the same numbers. `now` is None of an arm that is gone."""
    if now is None or before["flags"] != now["flags"]:
        return False
    pairs = [pair for steps in zip(before["did"], now["did"], strict=True)
             for pair in zip(*steps, strict=True)]
    return all(is_near(*pair) for pair in pairs)


def is_near(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is now
    return math.isclose(before, now, rel_tol=NEAR, abs_tol=1e-6)
