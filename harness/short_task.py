"""A task in its smallest form, as in TRL: a module with a list of problems and a reward.

    problems = [...]              prompts; or dicts with "prompt" and whatever the reward looks at
    def reward(problem, text):    a number for an answer; 1 or more counts as success

A prompt is the whole text that ends where the answer begins. The rest of what the lab asks of a
task follows from these two; a function of the module with one of the names in METHODS takes the
place of what is made here.
"""
import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache
from reprlib import repr as brief
from types import ModuleType
from typing import ClassVar

from engine.errors import UserError
from engine.rollouts import Problem
from engine.tokens import END_OF_TURN
from harness.own_code import expect

METHODS = ("training_problems", "held_out_problems", "extreme_problems", "prompt_for", "show",
           "read", "score", "label", "right_steps")
MOST_EXTREME = 1000  # prompts that are tried before a run begins
ASKED = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)


@cache
def short_task(module: ModuleType) -> type:
    return type("Task", (ShortTask,), {"module": module, "__module__": module.__name__})


@dataclass
class ShortTask:
    solved = "its reward is 1 or more"
    module: ClassVar[ModuleType]

    def __post_init__(self) -> None:
        module = self.module
        vars(self).update({name: getattr(module, name) for name in METHODS
                           if callable(getattr(module, name, None))})
        self.reward = f"reward of {module.__name__}"
        self.to_train, self.to_test = self.split(module.__name__, module.problems)

    def split(self, name: str, problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
        """The fifth with the lowest hashes of the prompt is held out: the same in every run."""
        by_prompt = {self.prompt_for(problem): problem for problem in problems}
        if len(by_prompt) < 2:
            raise UserError(f"{name}: `problems` has {len(by_prompt)} different prompts: training "
                            "needs one and the evaluation another")
        hashes = {hashlib.sha256(prompt.encode()).hexdigest(): prompt for prompt in by_prompt}
        every = [by_prompt[hashes[key]] for key in sorted(hashes)]
        count = -(-len(every) // 5)
        return every[count:], every[:count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        return random.Random(f"train {seed} {step}").choices(self.to_train, k=count)

    def held_out_problems(self, count: int) -> list[Problem]:
        return self.to_test[:count]

    def extreme_problems(self) -> list[Problem]:
        every = self.to_train + self.to_test
        return sorted(every, key=lambda problem: -len(self.prompt_for(problem)))[:MOST_EXTREME]

    def prompt_for(self, problem: Problem) -> str:
        return str(problem["prompt"] if isinstance(problem, dict) else problem)

    def show(self, problem: Problem) -> str:
        prompt = self.prompt_for(problem)
        return " ".join((ASKED.findall(prompt) or [prompt])[-1].split())

    def read(self, words: list[str]) -> Problem:
        typed, every = " ".join(words), self.to_test + self.to_train
        for problem in every:
            if " ".join(self.show(problem).split()) == typed:
                return problem
        raise UserError(f"{brief(typed)} is none of the {len(every)} problems of "
                        f"{self.module.__name__}; {self.show(every[0])} is one")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """Success is a reward of 1 or more. Format and reasoning are not judged."""
        end = next((end for end in END_OF_TURN if text.endswith(end)), "")
        reward = self.module.reward(problem, text.removesuffix(end))
        expect(lambda: reward >= 1 or reward < 1, "reward(problem, text)", "a number", reward)
        answer = float(reward >= 1)
        return {"reward": float(reward), "format": 0.0, "answer": answer, "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)
