"""The task that --task names, and the checks of what its methods return."""
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lab.engine.errors import (ARGUMENTS, LARGEST_SCORE, PROJECT, UserError, are_rewards, is_list,
                               is_score_of_part, location_of, refuse_other_arguments, result_of,
                               say, wrong_result)
from lab.engine.rollouts import OF_TURNS, Problem, Rollouts, Task
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.flags import flags_of
from lab.harness.record import Json

if TYPE_CHECKING:
    from lab.engine.turns import Environment

PARTS = {"reward", "format", "answer", "reasoning"}  # the numbers that every score has


@cache
def load_task(name: str) -> type:
    """The class Task of the module that --task names, whose fields are flags; or one made of its
    `reward` and its `problems` (lab/harness/short_task.py, docs/reference/your_own_task.md)."""
    if not file_of_task(name).is_file():
        raise no_such_task(name)
    # the book's task has more flags here
    module: Any = importlib.import_module("lab.countdown" if name == "countdown_task" else name)
    task: Any = getattr(module, "Task", None)
    if (inspect.isclass(task) and dataclasses.is_dataclass(task)
            and task.__module__ == module.__name__):
        if inspect.isfunction(getattr(module, "reward", None)):
            raise UserError(f"--task {name}: this module has both a class Task and a function "
                            "`reward`, and only one of them can be the task: rename the other")
        return task
    reward = getattr(module, "reward", None)
    if not is_reward(reward):
        raise UserError(f"--task {name}: this module should have a function "
                        "`reward(problem, text)`, or TRL's `reward(completions, **columns)`, and "
                        "`problems` if they are not those of Countdown; or else a dataclass Task "
                        "of its own (docs/reference/your_own_task.md)")
    from lab.harness.short_task import countdown_with_reward, is_of_trl, short_task
    if hasattr(module, "problems"):
        return short_task(module)
    if is_of_trl(reward) or hasattr(module, "dataset"):
        raise UserError(f"--task {name}: this module has no `problems`. A data set of TRL becomes "
                        "them by the line `problems = dataset`")
    return countdown_with_reward(module, load_task("countdown_task"))


def no_such_task(name: str) -> UserError:
    if Path(name.removesuffix(".py") + ".py").is_file():
        return UserError(f"--task {name}: this file lies outside of {PROJECT}, from where tasks "
                         "are imported: copy it there")
    known = (f"examples.{path.stem}" for path in sorted(PROJECT.glob("examples/*.py"))
             if re.search("^(class Task|def reward)\\b", path.read_text("utf-8"), re.M))
    return UserError(f"--task {name}: there is no such file in the project's folder. A task is a "
                     "file, examples/my_task.py, or a module, examples.my_task. With the project "
                     f"come {', '.join(known)}; without --task it is Countdown")


def file_of_task(name: str) -> Path:
    return PROJECT.joinpath(*name.split(".")).with_suffix(".py")


def is_reward(reward: Any) -> bool:
    """Whether it is a function that takes (problem, text), or TRL's completions."""
    try:
        if "completions" in inspect.signature(reward).parameters:
            return True
        inspect.signature(reward).bind(None, "")
    except TypeError:
        return False
    return True


def with_module_name(given: Json) -> Json:
    """What was typed, with the task examples/my_task.py, or without .py, named as its module,
    examples.my_task."""
    task = str(given.get("task", ""))
    path = Path(task.removesuffix(".py") + ".py").resolve()
    is_path = task.endswith(".py") or "/" in task
    if not (is_path and path.is_file() and path.is_relative_to(PROJECT)):
        return given
    return {**given, "task": ".".join(path.relative_to(PROJECT).with_suffix("").parts)}


def make_task(name: str, flags: Json, folder: Path | None = None) -> "CheckedTask":
    """The task that --task names; `flags` has the flags of all methods of a run. A task may have a
    method `of_model`, which is told the folder of the model: its prompts may depend on it."""
    owner = load_task(name)
    task = owner(**{flag: flags[flag] for flag in flags_of(owner)})
    missing = [method for method in ARGUMENTS if method not in ("reply", "redraw")
               and not callable(getattr(task, method, None))]
    if missing:
        raise UserError(f"--task {name}: its class Task has no method {missing[0]} "
                        "(docs/reference/your_own_task.md). A task that changes Countdown inherits "
                        "from lab.countdown.Task, which has all of them")
    if folder is not None and hasattr(task, "of_model"):
        task.of_model(folder)
    return CheckedTask(task)


class CheckedTask:
    """A user's Task with four checks: its methods take what they are given and return what they
    should, no problem that it returned as held out is trained on, it returns the same problems when
    it is asked twice, and it changes no problem. Its methods get copies of turns."""

    def __init__(self, task: Task[Any]):
        self.task = task
        refuse_other_arguments(task)
        for name in ("reply", "redraw"):
            if hasattr(task, name):
                setattr(self, name, self.checked(name))
        self.held_out: dict[int, list[Problem]] = {}  # by their number
        self.held_out_facts: set[tuple[str, str]] = set()
        self.asked_twice: set[str] = set()  # names of methods
        self.pays_turns: bool | None = None  # None until an answer was scored
        self.parts: set[str] = set()         # of a score, known once an answer was scored
        self.knows_success = True            # which answers are right

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def held_out_problems(self, count: int) -> list[Problem]:
        if count not in self.held_out:
            problems = list(result_of(self.task.held_out_problems, "a list of problems", is_list,
                                      count))
            if not problems:
                raise wrong_result(self.task.held_out_problems, "at least one problem", problems)
            self.held_out_facts |= set(map(self.facts_of, problems))
            self.held_out[count] = problems
            self.ask_again(self.task.held_out_problems, problems, count)
        return self.held_out[count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        problems = list(result_of(self.task.training_problems, "a list of problems", is_list,
                                  seed, step, count))
        if len(problems) != count:
            raise wrong_result(self.task.training_problems, f"{count} problems", problems)
        for problem in problems:
            if self.facts_of(problem) in self.held_out_facts:
                raise UserError(f"training_problems returns {self.show(problem)} in step "
                                f"{step}, but held_out_problems has it, too: what is evaluated "
                                "may not be trained on")
        self.ask_again(self.task.training_problems, problems, seed, step, count)
        return problems

    def facts_of(self, problem: Problem) -> tuple[str, str]:
        """What tells a problem from others: its prompt, and what `show` says of it, because a game
        may have a secret that is not in its prompt. Differences in
        white space do not count."""
        prompt, shown = self.prompt_for(problem), self.show(problem)
        return " ".join(prompt.split()), " ".join(shown.split())

    def ask_again(self, method: Callable[..., Any], problems: list[Problem], *given: int) -> None:
        """Once in a run, call the method again with the same arguments, and print a line if it
        returns other problems."""
        name = method.__name__
        if name in self.asked_twice:
            return
        self.asked_twice.add(name)
        again = list(method(*given))
        if list(map(self.facts_of, again)) != list(map(self.facts_of, problems)):
            say(f"{name} ({location_of(method)}) was asked twice for the same problems, and "
                "returned others: they should follow from its arguments alone. So the same command "
                "gives other numbers another time, and so does a run that is resumed")

    def checked(self, name: str) -> Callable[..., Any]:
        function = getattr(self.task, name)
        return with_copies(function, f"{name} ({location_of(function)})")

    def prompt_for(self, problem: Problem) -> str:
        return str(result_of(self.checked("prompt_for"), "a text", is_text, problem))

    def show(self, problem: Problem) -> str:
        return str(result_of(self.checked("show"), "a text", is_text, problem))

    def score(self, problem: Problem, text: Any) -> dict[str, Any]:
        """The parts of a score, which are numbers. If the task pays turns, the reward is their sum,
        and the list of them is a part, too."""
        wanted = (f"a dict of numbers from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}. Among them "
                  f"should be {', '.join(sorted(PARTS))}, and answer should be 0 or 1")
        whose = f"the reward of --task {type(self.task).__module__}"
        score: dict[str, Any] = result_of(with_copies(self.task.score, whose), wanted, is_score,
                                          problem, text)
        pays_turns = are_rewards(score["reward"])
        if self.pays_turns not in (None, pays_turns):
            raise UserError(f"the reward of --task {type(self.task).__module__} is a list for some "
                            "answers, and a number for others. It should be one of them for all")
        self.pays_turns = pays_turns
        # a task may return more parts than are needed, but the same ones for every answer
        if score.keys() != (self.parts or score.keys()):
            raise UserError("score should return the same names of parts for every answer")
        self.parts = set(score)
        # The score of a file with no more than a `reward` is a method of ours. An error names the
        # user's own function: that `reward`, or a `score` that the file has, too.
        own = self.task.score
        reward = getattr(sys.modules.get(type(self.task).__module__), "reward", None)
        if inspect.ismethod(own) and inspect.isfunction(reward):
            own = reward
        score = with_sum(score, text, own) if pays_turns else score
        says_success = getattr(self.task, "says_success", True)
        self.knows_success &= says_success or score["reward"] in (0, 1)
        return score

    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        labels: tuple[list[int], list[int]] = result_of(
            self.task.label, f"two lists with a number for each of {len(pieces)} tokens: its "
            f"section, from 0 to {len(SECTIONS) - 1}, and its kind, from 0 to "
            f"{len(KINDS) - 1} (docs/reference/your_own_task.md)",
            lambda labels: are_labels(labels, len(pieces)), pieces)
        return labels


def with_copies(function: Callable[..., Any], whose: str) -> Callable[..., Any]:
    """A function of a problem, which may not change it, and of an answer, of whose turns it gets a
    copy."""
    @wraps(function)
    def call(problem: Problem, *given: Any) -> Any:
        before = repr(problem)
        found = function(problem, *(list(one) if isinstance(one, list) else one for one in given))
        if repr(problem) != before:
            raise UserError(f"{whose} changes the problem that it is given, so what an answer "
                            "earns depends on what was asked before it")
        return found
    return call


def is_text(found: object) -> bool:
    return isinstance(found, str)


def is_score(score: Any) -> bool:
    """Whether it has a number for each part; the reward may be a list, with one for each turn."""
    if not isinstance(score, dict) or not PARTS <= score.keys():
        return False
    numbers = [value for part, value in score.items()
               if part != "reward" or not are_rewards(value)]
    return all(map(is_score_of_part, numbers)) and score["answer"] in (0, 1)


def with_sum(score: dict[str, Any], turns: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """A score with rewards of turns, with their sum as the reward."""
    of_turns = list(map(float, score["reward"]))
    if is_text(turns):
        raise wrong_result(function, "one reward, because no environment replies in this task",
                           of_turns)
    if len(of_turns) != len(turns):
        raise wrong_result(function, f"a reward for each turn of {turns!r:.200}", of_turns)
    if abs(sum(of_turns)) > LARGEST_SCORE:
        raise wrong_result(function, f"rewards whose sum is at most {LARGEST_SCORE:g}", of_turns)
    return {**score, "reward": sum(of_turns), OF_TURNS: of_turns}


def are_labels(labels: Any, tokens: int) -> bool:
    """Whether it is two lists with a code for each token: of its section, and of its kind."""
    try:
        lists = [list(codes) for codes in labels]
    except TypeError:  # one is nothing that can be listed
        return False
    if [len(codes) for codes in lists] != [tokens, tokens]:
        return False
    sections, kinds = lists
    return {*sections} <= {*range(len(SECTIONS))} and {*kinds} <= {*range(len(KINDS))}


def score_again(rollouts: Rollouts, task: Task[Problem], name: str,
                environment: "Environment | None" = None, all_rows: bool = True) -> bool:
    """Score answers once more, and say it if a reward differs: it depends on more than the problem
    and the answer. Ask for the replies once more, too, and refuse others than those that stand in
    the answers (`drawn_in`). Of a later step these are two answers. Returns whether none differs.
    """
    if all_rows and environment and not rollouts.finished.any():
        say(f"--task {name}: every answer of this step was cut off at --max_new_tokens. Does its "
            "reply never return None? (docs/reference/turns.md)")
    groups, ids = rollouts.groups_and_ids
    for row in range(len(groups)) if all_rows else {0, rollouts.step % len(groups)}:
        problem = rollouts.problems[groups[row]]
        if environment:
            environment.drawn_in(problem, ids[row])
        score = task.score(problem, rollouts.scored(row))
        refuse_later_causes(task, name, problem, rollouts.scored(row), score.get(OF_TURNS, []))
        again = torch.tensor(score["reward"])  # to float32
        if again != rollouts.reward[row].cpu():
            say(f"--task {name}: the same answer was scored twice and earned "
                f"{rollouts.reward[row]:g} and {again:g}. So the same command gives other numbers "
                "another time, and so may a run that is resumed")
            return False
    return True


def refuse_later_causes(task: Task[Problem], name: str, problem: Problem, turns: str | list[str],
                        of_turns: Sequence[float]) -> None:
    """Refuse rewards of turns that depend on a later turn: then a turn could earn nothing of its
    own. The beginning of an answer should have the same rewards as in the whole answer."""
    for d in range(1, len(of_turns)):
        beginning = task.score(problem, turns[:d]).get(OF_TURNS)
        if beginning != of_turns[:d]:
            raise UserError(f"--task {name}: the turns {turns!r:.200} have the rewards {of_turns}, "
                            f"and the first {d} of them alone have {beginning}. What a turn earns "
                            "should follow from it and the turns before it")
