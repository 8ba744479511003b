"""The task of a module that has no more than a function `reward`, and `problems` if it has any. All
else follows from these two, unless the module has a function with the name of a method, which takes
its place. Without `problems` the task is Countdown with another reward.

`problems` may be a function that returns them: its keyword-only parameters are flags. A reward that
takes `completions` is called as TRL calls it, with lists of one.
"""
import dataclasses
import hashlib
import inspect
import random
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from lab.engine.errors import (LARGEST_SCORE, UserError, are_rewards, is_list, is_score_of_part,
                               refuse_call, refuse_other_arguments, result_of, wrong_result)
from lab.engine.rollouts import Problem
from lab.engine.tokens import without_end_of_turn
from lab.harness.chat_template import Message, is_messages, prompt_of
from lab.harness.flags import field_of, flags_of

METHODS = ("training_problems", "held_out_problems", "extreme_problems", "prompt_for", "show",
           "read", "score", "label", "right_steps", "reply", "redraw", "true_credit")
USER_TEXT = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)


def short_task(module: Any) -> type:
    """The class of a task that a module with `reward` and `problems` stands for. If `problems` is a
    function, the class has its flags."""
    fields = []
    if inspect.isfunction(module.problems):
        refuse_call(module.problems, module.problems, "(*, name=default, ...)")
        fields = [(name, flag.type, field_of(flag))
                  for name, flag in flags_of(module.problems).items()]
    if is_of_trl(module.reward) and hasattr(module, "reply"):
        raise UserError(f"{module.__name__} has a `reply`, and a reward that takes `completions`: "
                        "in a game of several turns it should be reward(problem, turns)")
    return dataclasses.make_dataclass("Task", fields, bases=(ShortTask,), namespace={
        "module": module, "__module__": module.__name__, "__doc__": module.__doc__})


def countdown_with_reward(module: Any, countdown: Any) -> type:
    """The class of Countdown, with the reward of a module in the place of its own."""
    @dataclasses.dataclass
    class Task(countdown):  # type: ignore[misc]
        # the flags of Countdown's reward, which would do nothing here
        reward_form: ClassVar[str] = "graded"
        reasoning_weight: ClassVar[float] = 0.0
        solved, says_success = ShortTask.solved, False
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


def is_of_trl(reward: Any) -> bool:
    return "completions" in inspect.signature(reward).parameters


def called_as_in_trl(reward: Any) -> Callable[[Any, str], Any]:
    """TRL's reward as one of a problem and an answer. It is given lists of one completion and of
    one row, whose columns are the entries of the problem."""
    @wraps(reward)
    def of_one(problem: Any, text: str) -> Any:
        row = dict(problem) if isinstance(problem, dict) else {"prompt": problem}
        prompt = row.pop("prompt")
        said = [{"role": "assistant", "content": text}] if is_messages(prompt) else text
        columns = {name: [value] for name, value in row.items()}
        given = {"prompts": [prompt], "completions": [said], **columns}
        known, takes = ", ".join(given), inspect.signature(reward).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            given = {name: value for name, value in given.items() if name in takes}
        refuse_call(reward, reward, f"that a problem has ({known})", **given)
        found = reward(**given)
        if not is_list(found) or len(found) != 1:
            raise wrong_result(reward, "a list with a number for each of 1 completions", found)
        return found[0]

    return of_one


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


def hash_of(text: str) -> str:
    """Of a text, whatever its white space is."""
    # half of a character, as in "\ud800", is told when the prompt is encoded
    return hashlib.sha256(" ".join(text.split()).encode(errors="surrogatepass")).hexdigest()


def messages_of(problem: Any) -> list[Message]:
    """The messages that a problem's prompt is; none if it is a text."""
    prompt = problem.get("prompt") if isinstance(problem, dict) else problem
    return prompt if is_messages(prompt) else []


def rest_of(problem: Any) -> str:
    """What a problem has beside its prompt."""
    if isinstance(problem, dict):
        return repr({**problem, "prompt": ""})
    return "" if isinstance(problem, str) else repr(problem)


@dataclasses.dataclass
class ShortTask:
    solved = "its reward, or that of one of its turns, is 1 or more"
    says_success = False  # known is a reward alone, which may be any number
    module: ClassVar[Any]

    def __post_init__(self) -> None:
        self.folder: Path | None = None  # of the model
        take_functions(self, self.module)
        self.rewarded, self.reward = f"reward of {self.module.__name__}", self.module.reward
        if is_of_trl(self.reward):
            self.reward = called_as_in_trl(self.reward)
        problems = self.module.problems
        if inspect.isfunction(problems):
            problems = problems(**{name: getattr(self, name) for name in flags_of(problems)})
        if not is_list(problems):
            raise UserError(f"{self.module.__name__}: `problems` should be a list of prompts, or "
                            f"of dicts with a \"prompt\", not {problems!r:.80}")
        # the fifth with the lowest hashes is held out: the same in every run
        by_key: dict[tuple[str, str], Any] = {}
        for problem in problems:
            # a game may have a secret, which is not in its prompt
            prompt = repr(problem) if self.is_game else self.prompt_for(problem)
            # a question is on one side, whatever solved ones stand before it
            question = self.show(problem) if messages_of(problem) else prompt
            key = hash_of(question), hash_of(prompt)
            if rest_of(by_key.setdefault(key, problem)) != rest_of(problem):
                raise UserError(f"{self.module.__name__}: two of `problems` have the same prompt, "
                                f"{self.show(problem)!r:.60}, and differ in the rest. So it is "
                                "not known what an answer to it is worth")
        every = [by_key[key] for key in sorted(by_key)]
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
        if messages := messages_of(problem):
            return prompt_of(messages, self.folder)
        prompt = problem.get("prompt") if isinstance(problem, dict) else problem
        if not isinstance(prompt, str):
            raise UserError(f"{self.module.__name__}: the prompt of each of `problems` should be a "
                            f"text, or a list of messages. One is {problem!r:.80}")
        return prompt

    def of_model(self, folder: Path) -> None:
        """Called once, with the folder of the model, whose chat template messages need."""
        self.folder = folder
        if hasattr(self.module, "of_model"):
            self.module.of_model(folder)

    @property
    def is_game(self) -> bool:
        return hasattr(self.module, "reply")

    def show(self, problem: Problem) -> str:
        if messages := messages_of(problem):
            asked = [one for one in messages if one["role"] == "user"] or messages
            shown = str(asked[-1]["content"])
        else:
            prompt = self.prompt_for(problem)
            shown = (USER_TEXT.findall(prompt) or [prompt])[-1]
        shown = " ".join(shown.split())
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
        return score_by(self.reward, problem, text)

    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)
