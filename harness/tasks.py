"""The task that --task names: a module in the project's folder, with a class Task, or with no more
than a list of problems and a reward, as in TRL:

    problems = [...]              prompts; or dicts with "prompt" and whatever the reward looks at
    def reward(problem, text):    a number for an answer; 1 or more counts as success

A prompt is the whole text that ends where the answer begins. Of these two the rest follows
(harness/short_task.py).
"""
import dataclasses
import importlib
import math
from functools import cache
from typing import Any

from engine.errors import UserError
from engine.rollouts import Problem, Task
from engine.tokens import KINDS, SECTIONS
from harness.own_code import place_of
from harness.record import PROJECT, Json

PARTS = {"reward", "format", "answer", "reasoning"}  # that every score has


@cache
def load_task(name: str) -> type:
    """The class Task of a module, or the one made for it. Its fields are flags."""
    path = PROJECT.joinpath(*name.split(".")).with_suffix(".py")
    if not path.is_file():
        raise UserError(f"--task {name}: there is no such module in the project's folder (the file "
                        "examples/my_task.py is the module examples.my_task)")
    module: Any = importlib.import_module(name)
    if hasattr(module, "problems") and hasattr(module, "reward"):
        from harness.short_task import short_task
        return short_task(module)
    if not dataclasses.is_dataclass(getattr(module, "Task", None)):
        raise UserError(f"--task {name}: this module has neither `problems` and a function "
                        "`reward(problem, text)` nor a dataclass Task (docs/your_own_task.md)")
    task: type = module.Task
    return task


def make_task(name: str, flags: Json) -> "CheckedTask":
    """`flags` are those of all methods of a run."""
    task = load_task(name)
    own = [field.name for field in dataclasses.fields(task) if "flag" in field.metadata]
    return CheckedTask(task(**{name: flags[name] for name in own}))


class CheckedTask:
    """Somebody's Task. Training may not meet the problems that were handed out as held out, and
    what `score` and `label` return is checked. Everything else is as they wrote it."""

    def __init__(self, task: Task[Any]):
        self.task = task
        self.held_out: dict[int, list[Problem]] = {}  # by how many were asked for
        self.held_out_prompts: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def held_out_problems(self, count: int) -> list[Problem]:
        if count not in self.held_out:
            self.held_out[count] = problems = list(self.task.held_out_problems(count))
            self.held_out_prompts |= set(map(self.task.prompt_for, problems))
        return self.held_out[count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        problems = list(self.task.training_problems(seed, step, count))
        for problem in problems:
            if self.task.prompt_for(problem) in self.held_out_prompts:
                raise UserError(f"training_problems gives {self.task.show(problem)} in step "
                                f"{step}, which is among the held_out_problems, too: what is "
                                "evaluated may not be trained on")
        return problems

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        score = self.task.score(problem, text)
        if not (PARTS <= score.keys() and all(map(math.isfinite, score.values()))
                and score["answer"] in (0, 1)):
            raise UserError(f"score ({place_of(type(self.task))}) should return finite numbers, "
                            f"{', '.join(sorted(PARTS))} among them, answer 0 or 1: got {score}")
        return score

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        for codes, names in zip(labels := self.task.label(pieces), (SECTIONS, KINDS)):
            if len(codes) != len(pieces) or not {*codes} <= {*range(len(names))}:
                raise UserError(f"label ({place_of(type(self.task))}) should return two lists with "
                                f"a code for each token: sections, 0 to {len(SECTIONS) - 1}, and "
                                f"kinds, 0 to {len(KINDS) - 1} (docs/your_own_task.md)")
        return labels
