"""The task that --task names: a module in the project's folder, with a class Task, or with no more
than a list of problems and a reward (harness/short_task.py).

It may be somebody's own, and may be wrong: what its methods return is checked (EXPECTED).
"""
import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TypeGuard, TypeVar

from engine.errors import UserError
from engine.rollouts import Problem, Task
from engine.tokens import KINDS, SECTIONS
from harness.files import LARGEST, PROJECT, Json, is_file
from harness.flags import fields_as_flags, shortened
from harness.own_code import described, expect, place_of, told_as

Answer = TypeVar("Answer")
PARTS = ("reward", "format", "answer", "reasoning")  # that every score has


def load_task(name: object) -> type:
    """The class Task of a module, or the one made for it. Its fields are flags."""
    if not is_module(name):
        raise UserError(f"--task {shortened(str(name))}: there is no such module in the project's "
                        "folder (the file tools/my_task.py is the module tools.my_task)")
    with told_as(f"--task {name}", path_of(name)):
        module = importlib.import_module(name)
    task = getattr(module, "Task", None)
    is_own = isinstance(task, type) and task.__module__ == name  # one it imports is another's
    if isinstance(task, type) and is_own and dataclasses.is_dataclass(task):
        return task
    if hasattr(module, "problems") and callable(getattr(module, "reward", None)):
        from harness.short_task import short_task
        return short_task(module)
    raise UserError(f"--task {name}: this module has neither `problems` and a function "
                    "`reward(problem, text)` nor a class Task of its own that is a dataclass "
                    "(docs/your_own_task.md)")


def make_task(name: str, flags: Json) -> "CheckedTask":
    """`flags` are those of all methods of a run."""
    task = load_task(name)
    values = {name: flags[name] for name in fields_as_flags(task)}
    with told_as(f"--task {name}", task):
        made = task(**values)
    for name in {"reward", *EXPECTED} - {"read", "right_steps"}:  # without these it can do
        if not hasattr(made, name):
            raise UserError(f"{task.__name__} ({place_of(task)}) has no {name}: "
                            "docs/your_own_task.md says what it is asked for")
    return CheckedTask(made)


def is_module(name: object) -> TypeGuard[str]:
    parts = name.split(".") if isinstance(name, str) else [""]
    is_name = all(part.isidentifier() and not part.startswith("__") for part in parts)
    return is_name and is_file(path_of(".".join(parts)))


def path_of(module: str) -> Path:
    return PROJECT.joinpath(*module.split(".")).with_suffix(".py")


class CheckedTask:
    """Somebody's Task. What its methods return is checked, and training may not meet the
    problems that were handed out as held out. Everything else is as they wrote it."""
    reward: str  # this and the five methods are found by __getattr__
    extreme_problems: Callable[[], list[Problem]]
    prompt_for: Callable[[Problem], str]
    show: Callable[[Problem], str]
    score: Callable[[Problem, str], dict[str, float]]
    label: Callable[[list[bytes]], tuple[list[int], list[int]]]

    def __init__(self, task: Task[Problem]):
        self.task = task
        self.held_out: dict[int, list[Problem]] = {}  # by how many were asked for
        self.held_out_prompts: set[str] = set()

    def __getattr__(self, name: str) -> object:
        """Of the task; it may have `read` and `right_steps`, too."""
        value = getattr(self.task, name)
        return partial(self.ask, name, value) if callable(value) else value

    def ask(self, name: str, method: Callable[..., Answer], *asked: object, **more: object
            ) -> Answer:
        with told_as(f"the task's {name}", self.task):
            value = method(*asked, **more)
        if name in EXPECTED:
            expected, test = EXPECTED[name]
            expect(lambda: test(value, *asked), f"{name}({', '.join(map(described, asked))})",
                   expected, value)
        return value

    def held_out_problems(self, count: int) -> list[Problem]:
        if count not in self.held_out:
            problems = self.ask("held_out_problems", self.task.held_out_problems, count)
            self.held_out[count] = problems
            self.held_out_prompts |= set(map(self.prompt_for, problems))
        return self.held_out[count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        problems = self.ask("training_problems", self.task.training_problems, seed, step, count)
        for problem in problems:
            if self.prompt_for(problem) in self.held_out_prompts:
                raise UserError(f"training_problems gives {self.show(problem)} in step {step}, "
                                "which is among the held_out_problems, too: what is evaluated may "
                                "not be trained on")
        return problems


def are_labels(labels: tuple[list[int], list[int]], pieces: list[bytes]) -> bool:
    sections, kinds = labels
    return all(len(codes) == len(pieces) and all(code in range(len(names)) for code in codes)
               for codes, names in ((sections, SECTIONS), (kinds, KINDS)))


def is_score(score: dict[str, float], problem: Problem, text: str) -> bool:
    """With numbers that float32 can hold; yes and no are numbers."""
    are_numbers = all(isinstance(name, str) and isinstance(value, Real)
                      and abs(float(value)) <= LARGEST for name, value in score.items())
    return are_numbers and set(PARTS) <= set(score) and score["answer"] in (0, 1)


def is_text(given: str, problem: Problem) -> bool:
    return isinstance(given, str)


# of a method: in words, and a test of what it returned, with what it was asked
EXPECTED: dict[str, tuple[str, Callable[..., bool]]] = {
    "training_problems": ("a list of as many problems as it is asked for", lambda given, *asked:
                          len(given) == asked[-1]),
    "held_out_problems": ("a list of problems, at least one and not more than it is asked for",
                          lambda given, count: 1 <= len(given) <= count),
    "extreme_problems": ("a list of problems, at least one", lambda given: len(given) >= 1),
    "prompt_for": ("a text", is_text), "show": ("a text", is_text),
    "read": ("a problem", lambda given, words: given is not None),
    "score": (f"finite numbers by name, {', '.join(PARTS)} among them; answer counts as success: "
              "1 or 0", is_score),
    "label": (f"two lists with a code for each token: sections, 0 to {len(SECTIONS) - 1}, and "
              f"kinds, 0 to {len(KINDS) - 1} (docs/your_own_task.md)", are_labels),
    "right_steps": ("a list of tokens, counted from 0", lambda places, problem, pieces:
                    all(place in range(len(pieces)) for place in places)),
}
