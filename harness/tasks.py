"""The task that --task names: a module in the project's folder, with a class Task, or with no more
than a list of problems and a reward, as in TRL:

    problems = [...]              prompts; or dicts with "prompt" and whatever the reward looks at
    def reward(problem, text):    a number for an answer; 1 or more counts as success

A prompt is the whole text that ends where the answer begins. Of these two the rest follows; a
function of the module with the name of a method takes its place.
"""
import dataclasses
import hashlib
import importlib
import math
import random
import re
from functools import cache
from typing import Any, ClassVar

from engine.errors import UserError
from engine.rollouts import Problem, Task
from engine.tokens import END_OF_TURN, KINDS, SECTIONS
from harness.own_code import place_of
from harness.record import PROJECT, Json

METHODS = ("training_problems", "held_out_problems", "extreme_problems", "prompt_for", "show",
           "read", "score", "label", "right_steps")
PARTS = {"reward", "format", "answer", "reasoning"}  # that every score has
ASKED = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)


@cache
def load_task(name: str) -> type:
    """The class Task of a module, or the one made for it. Its fields are flags."""
    path = PROJECT.joinpath(*name.split(".")).with_suffix(".py")
    if not path.is_file():
        raise UserError(f"--task {name}: there is no such module in the project's folder (the file "
                        "tools/my_task.py is the module tools.my_task)")
    module: Any = importlib.import_module(name)
    if hasattr(module, "problems") and hasattr(module, "reward"):
        return short_task(module)
    if not dataclasses.is_dataclass(getattr(module, "Task", None)):
        raise UserError(f"--task {name}: this module has neither `problems` and a function "
                        "`reward(problem, text)` nor a dataclass Task (docs/your_own_task.md)")
    task: type = module.Task
    return task


def short_task(module: Any) -> type:
    return type("Task", (ShortTask,), {"module": module, "__module__": module.__name__})


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


@dataclasses.dataclass
class ShortTask:
    solved = "its reward is 1 or more"
    module: ClassVar[Any]

    def __post_init__(self) -> None:
        vars(self).update({name: getattr(self.module, name) for name in METHODS
                           if callable(getattr(self.module, name, None))})
        self.reward = f"reward of {self.module.__name__}"
        # the fifth with the lowest hashes of the prompt is held out: the same in every run
        by_hash = {hashlib.sha256(self.prompt_for(problem).encode()).hexdigest(): problem
                   for problem in self.module.problems}
        every, count = [by_hash[key] for key in sorted(by_hash)], -(-len(by_hash) // 5)
        if len(every) < 2:
            raise UserError(f"{self.module.__name__}: `problems` has {len(every)} different "
                            "prompts: training needs one and the evaluation another")
        self.to_train, self.to_test = every[count:], every[:count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        return random.Random(f"train {seed} {step}").choices(self.to_train, k=count)

    def held_out_problems(self, count: int) -> list[Problem]:
        return self.to_test[:count]

    def extreme_problems(self) -> list[Problem]:
        every = self.to_train + self.to_test
        return sorted(every, key=lambda problem: -len(self.prompt_for(problem)))[:1000]

    def prompt_for(self, problem: Any) -> str:
        return str(problem["prompt"] if isinstance(problem, dict) else problem)

    def show(self, problem: Problem) -> str:
        prompt = self.prompt_for(problem)
        return " ".join((ASKED.findall(prompt) or [prompt])[-1].split())

    def read(self, words: list[str]) -> Problem:
        for problem in self.to_test + self.to_train:
            if self.show(problem) == " ".join(words):
                return problem
        raise UserError(f"{' '.join(words)} is none of the problems of {self.module.__name__}; "
                        f"{self.show(self.to_test[0])} is one")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """Success is a reward of 1 or more. Format and reasoning are not judged."""
        end = next((end for end in END_OF_TURN if text.endswith(end)), "")
        reward = float(self.module.reward(problem, text.removesuffix(end)))
        return {"reward": reward, "format": 0.0, "answer": float(reward >= 1), "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)
