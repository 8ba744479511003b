"""Where the success of a Countdown run comes from, before and after training.

    first 3 + 5 = 8, 8 + 7 = 15 no. last 3 * 5 = 15, 15 + 7 = 22 yes!</think>
    <answer> ( 3 * 5 ) + 7</answer>

A try is right steps in a row that use every number once; here are two. It hits if its last result
is the target. The first hit is said if the next word is one of YES, and then copied if the answer
takes the same steps. Right are (first + (1 - first) * again * later) * said * copied + others.
"""
import ast
import re
from collections import Counter

import numpy as np

from analyze import Table
from countdown_task import OPERATORS, Problem, between, evaluates_to, value_of
from lab.analysis.run_folders import Run, read_credit, read_tokenizer, task_named
from lab.analysis.statistics import over_problems, within
from lab.analysis.tables import shown
from lab.countdown import STEP, steps_of

YES = ("yes", "good", "hit", "exactly")  # of the tiny model's teacher, and of --examples
STEPS = 10  # at the beginning and at the end of a run
SIGNS = dict(zip(OPERATORS, "+-*/", strict=True))
SHARES = ["first: the first try hits", "again: if not, there is another try",
          "later: then one of these hits", "said: after a hit the next word is yes",
          "copied: then the answer is this try", "others: of all answers, right in another way",
          "success"]


def successes(run: Run) -> Table:
    """A row for each share; none where the answers are not Countdown's thinking."""
    table, columns = Table("Where the success comes from", ["share (95% interval)"], []), [SHARES]
    is_countdown = task_named(run.config) == "countdown_task"
    half = max(1, len(run.steps) // 2)
    for steps in (run.steps[:half][:STEPS], run.steps[-half:][-STEPS:]):
        if not is_countdown or not steps:
            return table
        problem, first, again, later, said, copied, right = facts_in(run, steps).T
        if not said.any():
            return table
        every = np.ones_like(right)
        parts = ((first, every), (again, every - first), (later, again), (said, first + later),
                 (copied, said), (right - copied, every), (right, every))
        shares = [within(over_problems(problem, part, np.divide), 0, 1) for part in parts]
        columns.append([shown(share, ".1%") for share in shares])
        table.headings.append(f"steps {steps[0]} to {steps[-1]}")
    return table._replace(rows=[list(row) for row in zip(*columns)])


def facts_in(run: Run, steps: list[int]) -> np.ndarray:
    """(answers, 7): the number of each answer's problem, and the facts of the answer."""
    found, tokenizer, before = [], read_tokenizer(run.folder), 0
    for step in steps:
        batch = read_credit(run.folder, step, tokenizer)
        problems = [problem_of(tokenizer.decode(ids, skip_special_tokens=False))
                    for ids in batch.prompt_ids]
        for group, text in zip(batch.group.tolist(), batch.answers):
            found.append([before + group, *facts_of(problems[group], text)])
        before += len(problems)
    return np.array(found, int)


def problem_of(prompt: str) -> Problem:
    """The problem in the last question of a prompt, in any wording."""
    question = re.split(r"\.|<\|im_end", prompt.rpartition("<|im_start|>user")[2])[0]
    numbers = [int(number) for number in re.findall("[0-9]{1,9}", question)] or [0, 0]
    is_last = re.search("(make|equals) [0-9]+$", question)
    target = numbers.pop(-1 if is_last else 0)
    return Problem(tuple(numbers), target)


def facts_of(problem: Problem, text: str) -> list[bool]:
    """Whether the first try hits; if not, whether there is another, and one of these hits; whether
    the hit is said, and then copied; whether the answer is right."""
    tries, answer = tries_in(problem, text), between(text, "<answer>", "</answer>")
    hits = [number for number, (result, _, _) in enumerate(tries) if result == problem.target]
    _, steps, word = tries[hits[0]] if hits else (0, [], "")
    first, said = hits[:1] == [0], word in YES
    right = evaluates_to(answer, problem.numbers, problem.target)
    copied = said and right and steps == steps_in(str(answer))
    return [first, not first and len(tries) > 1, not first and bool(hits), said, copied, right]


def tries_in(problem: Problem, text: str) -> list[tuple[int, list[str], str]]:
    """The result of each try, its steps, and the next word."""
    row: list[re.Match[str]] = []
    found = []
    for step, (end, is_right) in zip(STEP.finditer(text), steps_of(text, problem.numbers)):
        row = [*row, step][1 - len(problem.numbers):] if is_right else []
        used = Counter(int(one[place]) for one in row for place in (1, 3))
        if used == Counter(problem.numbers) + Counter(int(one[4]) for one in row[:-1]):
            word, *_ = re.findall("[a-z]+", text[end:].lower())  # at least think
            found.append((int(step[4]), sorted(f"{one[1]} {one[2]} {one[3]}" for one in row), word))
            row = []
    return found


def steps_in(expression: str) -> list[str]:
    """3 * 5 and 15 + 7 of ( 3 * 5 ) + 7"""
    tree = ast.parse(" ".join(expression.split()), mode="eval")
    return sorted(f"{value_of(node.left)} {SIGNS[type(node.op)]} {value_of(node.right)}"
                  for node in ast.walk(tree) if isinstance(node, ast.BinOp))
