"""The task of a module that has no more than `problems` and a function `reward`. All else follows
from these two, unless the module has a function with the name of a method, which takes its place.
"""
import dataclasses
import hashlib
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

from engine.errors import UserError, is_list, wrong_result
from engine.rollouts import Problem
from engine.tokens import END_OF_TURN

METHODS = ("training_problems", "held_out_problems", "extreme_problems", "prompt_for", "show",
           "read", "score", "label", "right_steps")
USER_TEXT = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)


def short_task(module: Any) -> type:
    return type("Task", (ShortTask,), {"module": module, "__module__": module.__name__})


def as_number(reward: Callable[[Any, str], Any], problem: Any, text: str) -> float:
    """What a user's reward returns for an answer, if it is a number."""
    found = reward(problem, text)
    try:
        if not isinstance(found, str):  # float("1") would take it
            return float(found)
    except (TypeError, ValueError):
        pass
    raise wrong_result(reward, "a number", found)


@dataclasses.dataclass
class ShortTask:
    solved = "its reward is 1 or more"
    module: ClassVar[Any]

    def __post_init__(self) -> None:
        for name in METHODS:
            if callable(getattr(self.module, name, None)):
                setattr(self, name, getattr(self.module, name))
        self.reward = f"reward of {self.module.__name__}"
        if not is_list(self.module.problems):
            raise UserError(f"{self.module.__name__}: `problems` should be a list of prompts, or "
                            f"of dicts with a \"prompt\", not {self.module.problems!r:.80}")
        # the fifth with the lowest hashes of the prompt is held out: the same in every run
        by_hash = {}
        for problem in self.module.problems:
            by_hash[hashlib.sha256(self.prompt_for(problem).encode()).hexdigest()] = problem
        every = [by_hash[key] for key in sorted(by_hash)]
        if len(every) < 2:
            raise UserError(f"{self.module.__name__}: `problems` has {len(every)} different "
                            "prompts: training needs one and the evaluation another")
        count = -(-len(every) // 5)  # rounded up
        self.to_train, self.to_test = every[count:], every[:count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        return random.Random(f"train {seed} {step}").choices(self.to_train, k=count)

    def held_out_problems(self, count: int) -> list[Problem]:
        return self.to_test[:count]

    def extreme_problems(self) -> list[Problem]:
        every = self.to_train + self.to_test
        return sorted(every, key=lambda problem: -len(self.prompt_for(problem)))[:1000]

    def prompt_for(self, problem: Any) -> str:
        prompt = problem.get("prompt") if isinstance(problem, dict) else problem
        if not isinstance(prompt, str):
            raise UserError(f"{self.module.__name__}: the prompt of each of `problems` should be a "
                            f"text. One is {problem!r:.80}")
        return prompt

    def show(self, problem: Problem) -> str:
        prompt = self.prompt_for(problem)
        return " ".join((USER_TEXT.findall(prompt) or [prompt])[-1].split())

    def read(self, words: list[str]) -> Problem:
        for problem in self.to_test + self.to_train:
            if self.show(problem) == " ".join(words):
                return problem
        raise UserError(f"{' '.join(words)} is none of the problems of {self.module.__name__}; "
                        f"{self.show(self.to_test[0])} is one")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """The parts of the reward. Success is a reward of 1 or more; format and reasoning are not
        scored."""
        end = next((end for end in END_OF_TURN if text.endswith(end)), "")
        reward = as_number(self.module.reward, problem, text.removesuffix(end))
        return {"reward": reward, "format": 0.0, "answer": float(reward >= 1), "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)
