"""The task that --task names: the class Task of a module in the project's folder.

It may be somebody's own, and what it says of an answer may be wrong: scores and labels are checked.
"""
import dataclasses
import importlib
import inspect
import traceback
from collections.abc import Mapping
from numbers import Real
from reprlib import repr as brief
from types import ModuleType

import torch

from countdown_task import KINDS, SECTIONS
from engine.errors import UserError
from engine.files import PROJECT, is_file
from engine.flags import fields_as_flags, shortened

SHIPPED_TASKS = ("countdown_task", "tools.descending")
SHIPPED = f"{' and '.join(SHIPPED_TASKS)} ship with it"
PARTS = ("reward", "format", "answer", "reasoning")  # that every score has


def load_task(name: str) -> type:
    """The class Task of a module of the project's folder. Its fields are flags."""
    if not isinstance(name, str):
        raise UserError(f"--task {name!r} should be a text")
    if not is_module(name):
        raise UserError(f"--task {shortened(name)}: there is no such module in the project's "
                        "folder (the file tools/my_task.py is the module tools.my_task); "
                        f"{SHIPPED}")
    module = import_task(name)
    task = getattr(module, "Task", None)
    if not inspect.isclass(task) or task.__module__ != name:  # a Task that it imports is another's
        raise UserError(f"--task {name}: this module has no class Task of its own; {SHIPPED}")
    if not dataclasses.is_dataclass(task):
        raise UserError(f"--task {name}: its class Task should be a dataclass of flags")
    return task


def import_task(name: str) -> ModuleType:
    """Import the module; what goes wrong in it is said with its place."""
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"--task {name} cannot be imported: {error}") from None
    except SyntaxError as error:
        raise UserError(f"--task {name} cannot be imported: {error.filename}, line {error.lineno}: "
                        f"{error.msg}") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"--task {name} cannot be imported: {place.filename}, line {place.lineno}: "
                        f"{type(error).__name__}: {error}") from None


def about_flag_of_another(name: str, task: str) -> str:
    """A sentence about a flag that this task lacks, and a task that ships with it has; else an
    empty one."""
    for other in SHIPPED_TASKS:
        if other != task and is_module(other) and name in fields_as_flags(load_task(other)):
            return f"--{name} is no flag of --task {task}, it belongs to --task {other}"
    return ""


def make_task(settings):
    task = load_task(settings.task)
    return task(**{name: settings.own[name] for name in fields_as_flags(task)})


def is_module(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        return False
    return is_file(PROJECT.joinpath(*parts).with_suffix(".py"))


def columns_of(scores: list[dict], task, device) -> dict[str, torch.Tensor]:
    """(B,) of each part. A task may give more parts than the lab needs, but all of them always."""
    columns = {}
    for score in scores:
        if set(score) != set(scores[0]):
            raise UserError(f"{type(task).__module__}: score should give every answer the same "
                            f"parts, not {', '.join(scores[0])} and {', '.join(score)}")
    for part in scores[0]:
        values = [score[part] for score in scores]
        columns[part] = torch.tensor(values, dtype=torch.float32, device=device)
    return columns


def checked_labels(task, problem, pieces: list[bytes]) -> tuple[list[int], list[int]]:
    """What the task calls each token; somebody's own task may be wrong."""
    labels = task.label(pieces)
    is_pair = isinstance(labels, (tuple, list)) and len(labels) == 2
    if not is_pair or not all(isinstance(codes, (tuple, list)) for codes in labels):
        raise UserError(f"{label_of(task, problem)} should be two lists, sections and kinds")
    for codes, names in zip(labels, (SECTIONS, KINDS)):
        if len(codes) != len(pieces):
            raise UserError(f"{label_of(task, problem)} has {len(codes)} codes for {len(pieces)} "
                            "tokens")
        known = range(len(names))
        for code in codes:
            if code not in known:
                raise UserError(f"{label_of(task, problem)} has the code {brief(code)}, known "
                                f"are 0 to {len(names) - 1}: {', '.join(names)}")
    return labels


def checked_right_steps(task, problem, pieces: list[bytes]) -> list[int]:
    """The tokens with which right steps of an answer end; somebody's own task may be wrong."""
    places = task.right_steps(problem, pieces)
    known = range(len(pieces))
    if not isinstance(places, (tuple, list)) or not all(place in known for place in places):
        raise UserError(f"{type(task).__module__}, the problem {task.show(problem)}: right_steps "
                        f"should list tokens, 0 to {len(pieces) - 1}, got {brief(places)}")
    return list(places)


def label_of(task, problem) -> str:
    return f"{type(task).__module__}, the problem {task.show(problem)}: label"


def checked_score(task, problem, response: str) -> dict[str, float]:
    """The parts of a score, as the lab needs them; somebody's own task may be wrong."""
    score = task.score(problem, response)
    whose = f"{type(task).__module__}, the problem {task.show(problem)}: score"
    if not isinstance(score, Mapping) or not set(PARTS) <= set(score):
        raise UserError(f"{whose} should give {', '.join(PARTS)}, got {brief(score)}")
    for part, value in score.items():
        if not is_finite_number(value):
            raise UserError(f"{whose} gives {part} {brief(value)}, which is not a finite "
                            "number")
    if score["answer"] not in (0, 1):  # evaluations count it
        raise UserError(f"{whose} gives answer {score['answer']}: it counts as success, and should "
                        "be 1 or 0. Half a success can be part of the reward")
    return score


def checked_right_answers(task, problem) -> tuple[str, list[str]]:
    """What ends the thinking, and the right answers after it; somebody's own task may be wrong."""
    answers = task.right_answers(problem)
    is_pair = isinstance(answers, (tuple, list)) and len(answers) == 2
    if not is_pair or not isinstance(answers[0], str) or not is_list_of_texts(answers[1]):
        raise UserError(f"{type(task).__module__}, the problem {task.show(problem)}: right_answers "
                        "should give a text that ends the thinking and a list of right answers to "
                        f"follow it, got {brief(answers)}")
    return answers


def is_list_of_texts(texts) -> bool:
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


def is_finite_number(value) -> bool:
    """Whether float32 can hold it; yes and no are numbers."""
    return isinstance(value, Real) and abs(value) <= torch.finfo(torch.float32).max
