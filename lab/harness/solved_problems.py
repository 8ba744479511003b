"""Solved problems of Countdown for its prompt (--examples): earlier turns of the conversation.

    <|im_start|>user
    Make 22 from 3 and 5 and 7.<|im_end|>
    <|im_start|>assistant
    ( 3 * 5 ) + 7<|im_end|>

To find one, all ways to combine the numbers of a problem are tried.
"""
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from countdown_task import content_of
from lab.engine.errors import UserError

# A solved example has at most 4 numbers, because 5 can form too many expressions to try them all.
MAX_SOLVED = 4
Step = tuple[int, str, int, int]  # x, operator, y and the result
LegalSteps = Callable[[int, int], list[Step]]  # those that a problem may use, from two numbers


def solved_turns(task: Any) -> str:
    """The turns. If the wording has a think section, the first example and every second one after
    it show a wrong attempt first."""
    rng = random.Random("examples")
    turns: list[str] = []
    for number in range(task.examples):
        found = solved_problem(task, rng, last_sign="+*-/"[number % 4])
        if found is None:  # the problems of a file may have no quotient, for example
            continue
        problem, solution = found
        task.shown.add(content_of(problem))
        answer = solution.expression
        if task.thinks:
            wrong = [one for one in solutions_of(problem.numbers, task.legal_steps)
                     if one.value != problem.target]
            is_shown = number % 2 == 0 and wrong
            answer = answer_with_thinking(solution, rng.choice(wrong) if is_shown else None)
        question = task.question(problem, is_first=not turns)
        turns.append(f"{question}{answer}<|im_end|>\n")
    if not turns:
        raise UserError(f"--examples {task.examples}: none of 1,000 problems has a solution of at "
                        f"most {MAX_SOLVED} numbers; --examples 0 asks without examples")
    return "".join(turns)


def solved_problem(task: Any, rng: random.Random,
                   last_sign: str) -> tuple[Any, "Solution"] | None:
    """A problem to train on, with a solution whose last step has this operator. For - and / the
    solution has the numbers in another order than the problem, because a model that saw no such
    example did not try other orders (docs/reference/how_a_run_fails.md)."""
    for _ in range(1000):
        problem = task.make_problem(rng, held_out=False)
        if len(problem.numbers) > MAX_SOLVED:
            continue
        order = [str(number) for number in problem.numbers]
        for solution in solutions_of(problem.numbers, task.legal_steps):
            is_right = solution.value == problem.target
            ends_with_sign = solution.steps[-1][1] == last_sign
            is_reordered = re.findall("[0-9]+", solution.expression) != order
            if is_right and ends_with_sign and (is_reordered or last_sign in "+*"):
                return problem, solution
    return None


def answer_with_thinking(solution: "Solution", wrong: "Solution | None") -> str:
    """The solution, after a wrong attempt if there is one:

        3*7=21, 21-5=16 no, 3*5=15, 15+7=22 yes</think>
        <answer>(3*5)+7</answer>
    """
    attempts = [f"{written_out(solution)} yes"]
    if wrong:
        attempts.insert(0, f"{written_out(wrong)} no")
    # without spaces, because to a Qwen2.5 each space before a number is one more token
    expression = solution.expression.replace(" ", "")
    return f"{', '.join(attempts)}</think>\n<answer>{expression}</answer>"


class Solution(NamedTuple):
    """A way to make one value from all numbers, and the steps that compute it."""
    value: int
    expression: str  # "( 3 * 5 ) + 7"
    steps: tuple[Step, ...]


def solutions_of(numbers: Iterable[int], legal_steps: LegalSteps) -> Iterator[Solution]:
    """Every way to combine all of these numbers by legal steps, whatever its value is."""
    yield from combined([(number, str(number)) for number in numbers], (), legal_steps)


def combined(items: list[tuple[int, str]], steps: tuple[Step, ...],
             legal_steps: LegalSteps) -> Iterator[Solution]:
    """Every solution that these items lead to. An item is a value and its expression. A step
    replaces two items by its result, and steps are made until one item is left. `steps` are the
    steps that have led to these items."""
    if len(items) == 1:
        yield Solution(*items[0], steps)
        return
    for i, j in itertools.permutations(range(len(items)), 2):
        (x, left), (y, right) = items[i], items[j]
        others = [item for k, item in enumerate(items) if k not in (i, j)]
        for step in legal_steps(x, y):
            _, sign, _, result = step
            expression = f"{in_parentheses(left)} {sign} {in_parentheses(right)}"
            yield from combined([*others, (result, expression)], (*steps, step), legal_steps)


def in_parentheses(expression: str) -> str:
    return f"( {expression} )" if " " in expression else expression


def written_out(solution: Solution) -> str:
    """The steps of a solution: 3*5=15, 15+7=22"""
    return ", ".join(f"{x}{sign}{y}={result}" for x, sign, y, result in solution.steps)
