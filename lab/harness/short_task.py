"""The task of a module that has no more than a function `reward`, and `problems` if it has any. All
else follows from these two, unless the module has a function with the name of a method, which takes
its place. Without `problems` the task is Countdown with another reward.
"""
import dataclasses
import hashlib
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

from lab.engine.errors import (LARGEST_SCORE, UserError, are_rewards, is_list, is_score_of_part,
                               refuse_other_arguments, result_of)
from lab.engine.rollouts import Problem
from lab.engine.tokens import without_end_of_turn

METHODS = ("training_problems", "held_out_problems", "extreme_problems", "prompt_for", "show",
           "read", "score", "label", "right_steps", "reply", "redraw", "of_model", "true_credit")
USER_TEXT = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)


def short_task(module: Any) -> type:
    """The class of a task that a module with `reward` and `problems` stands for."""
    return type("Task", (ShortTask,), {"module": module, "__module__": module.__name__})


def countdown_with_reward(module: Any, countdown: Any) -> type:
    """The class of Countdown, with the reward of a module in the place of its own."""
    @dataclasses.dataclass
    class Task(countdown):  # type: ignore[misc]
        # the flags of Countdown's reward, which would do nothing here
        reward_form: ClassVar[str] = "graded"
        reasoning_weight: ClassVar[float] = 0.0
        solved, has_format, says_success = ShortTask.solved, False, False
        rewarded = f"reward of {module.__name__}"

        def __post_init__(self) -> None:
            super().__post_init__()
            take_functions(self, module)

        def score(self, problem: Problem, text: str) -> dict[str, float]:
            return score_by(module.reward, problem, text)

    Task.__module__ = module.__name__
    return Task


def take_functions(task: Any, module: Any) -> None:
    """Put the functions of a module in the place of the task's methods with the same names."""
    for name in METHODS:
        if callable(getattr(module, name, None)):
            setattr(task, name, getattr(module, name))
    task.says_success = hasattr(module, "score")
    refuse_other_arguments(task)


def score_by(reward: Callable[[Any, Any], Any], problem: Any, text: str | list[str]
             ) -> dict[str, Any]:
    """The parts of a score, from a user's reward of an answer without its end of turn, or of the
    turns of one, of which each may have a reward. Success is a reward of 1 or more, of the answer
    or of one of its turns; format and reasoning are not scored."""
    wanted = f"a number from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}"
    if isinstance(text, str):
        text = without_end_of_turn(text)
        value = float(result_of(reward, wanted, is_score_of_part, problem, text))
        return score_of(value, value)
    found = result_of(reward, f"{wanted}, or a list with one for each turn",
                      lambda found: is_score_of_part(found) or are_rewards(found), problem, text)
    if is_score_of_part(found):
        return score_of(float(found), float(found))
    of_turns = list(map(float, found))
    return score_of(of_turns, max([sum(of_turns), *of_turns]))


def score_of(reward: float | list[float], largest: float) -> dict[str, Any]:
    return {"reward": reward, "format": 0.0, "answer": float(largest >= 1), "reasoning": 0.0}


def rest_of(problem: Any) -> str:
    """What a problem has beside its prompt."""
    if isinstance(problem, dict):
        return repr({**problem, "prompt": ""})
    return "" if isinstance(problem, str) else repr(problem)


@dataclasses.dataclass
class ShortTask:
    solved = "its reward, or that of one of its turns, is 1 or more"
    has_format = False     # so no table has a column for it
    says_success = False   # known is a reward alone, which may be any number
    module: ClassVar[Any]

    def __post_init__(self) -> None:
        take_functions(self, self.module)
        self.rewarded = f"reward of {self.module.__name__}"
        if not is_list(self.module.problems):
            raise UserError(f"{self.module.__name__}: `problems` should be a list of prompts, or "
                            f"of dicts with a \"prompt\", not {self.module.problems!r:.80}")
        # the fifth with the lowest hashes of the prompt is held out: the same in every run
        by_hash: dict[str, Any] = {}
        for problem in self.module.problems:
            # a game may have a secret, which is not in its prompt
            what = " ".join((repr(problem) if self.is_game else self.prompt_for(problem)).split())
            # half of a character, as in "\ud800", is told when the prompt is encoded
            key = hashlib.sha256(what.encode(errors="surrogatepass")).hexdigest()
            if rest_of(by_hash.setdefault(key, problem)) != rest_of(problem):
                raise UserError(f"{self.module.__name__}: two of `problems` have the same prompt, "
                                f"{self.show(problem)!r:.60}, and differ in the rest. So it is "
                                "not known what an answer to it is worth")
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

    @property
    def is_game(self) -> bool:
        return hasattr(self.module, "reply")

    def show(self, problem: Problem) -> str:
        prompt = self.prompt_for(problem)
        shown = " ".join((USER_TEXT.findall(prompt) or [prompt])[-1].split())
        if self.is_game and isinstance(problem, dict):
            rest = {name: value for name, value in problem.items() if name != "prompt"}
            shown += f" {rest}"
        return shown

    def read(self, words: list[str]) -> Problem:
        for problem in self.to_test + self.to_train:
            if self.show(problem) == " ".join(words):
                return problem
        raise UserError(f"{' '.join(words)} is none of the problems of {self.module.__name__}; "
                        f"{self.show(self.to_test[0])} is one")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return score_by(self.module.reward, problem, text)

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)
