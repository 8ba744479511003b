"""Countdown without the problems by which `python -m lab speedrun` judges.

Of the problems that may be trained on, a quarter is the judge's, chosen by its hash. A run with
this task is never given one, and a prompt for one ends the run, by whatever way it came in.
"""
import hashlib
import itertools
import random
from dataclasses import dataclass

import countdown_task
from countdown_task import Problem, content_of, is_held_out, reachable
from lab.countdown import Task as Countdown
from lab.engine.errors import UserError


def is_judged(problem: Problem) -> bool:
    digest = hashlib.sha256(f"judged {content_of(problem)}".encode()).digest()
    return not is_held_out(problem) and digest[0] % 4 == 0


def judged_problems(task: countdown_task.Task) -> list[Problem]:
    """All of the judge's problems that the task's numbers allow."""
    found = []
    for count in map(int, task.numbers.split(",")):
        numbers = range(task.min_number, task.max_number + 1)
        for chosen in itertools.combinations_with_replacement(numbers, count):
            values = reachable(chosen, task.max_result)
            found += [Problem(chosen, value) for value in sorted(values)
                      if value <= task.max_target]
    return [problem for problem in found if is_judged(problem)]


@dataclass
class Task(Countdown):
    """Countdown without the judge's problems. Its flags are the same."""

    def make_problem(self, rng: random.Random, held_out: bool) -> Problem:
        problem = super().make_problem(rng, held_out)
        while is_judged(problem):
            problem = super().make_problem(rng, held_out)
        return problem

    def prompt_for(self, problem: Problem) -> str:
        if is_judged(problem):
            raise UserError(f"the run asks for a prompt of {self.show(problem)}, which is one of "
                            "the judge's problems: no run may see them")
        return super().prompt_for(problem)
