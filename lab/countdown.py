"""The Countdown task with all that a run beyond the book may ask for: problems of a file, solved
problems in the prompt, other wordings, other forms of the reward, and a score of the reasoning.

    " 3 * 5 = 15, 15 + 7 = 22 yes</think>\\n<answer> ( 3 * 5 ) + 7 </answer><|im_end|>"
    -> {"reward": 1.1, "format": 1.0, "answer": 1.0, "reasoning": 1.0}

With --prompt expression there is no thinking: the answer is "3 * 5 + 7<|im_end|>". With
--examples 4 the prompt begins with four solved problems, as earlier turns of the conversation.

The problems, the two parts of the reward, the safe reader of expressions and the labels of tokens
are those of countdown_task.py. A task of your own is another file with another `Task`
(docs/reference/your_own_task.md).
"""
import itertools
import json
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import countdown_task
from countdown_task import (ANSWER, END, FORMAT_WEIGHT, OTHER, Problem, content_of, is_held_out,
                            kind_of, read_expression, without_end_of_turn)
from lab.engine.errors import UserError
from lab.engine.tokens import USER_TURN
from lab.harness.record import read_given
from lab.harness.flags import OF_BOOK, option
from lab.harness.solved_problems import Step, solved_turns

MAX_NUMBER = 999_999_999  # the score of the reasoning reads numbers of at most nine digits
MAX_NUMBERS = 30  # the most numbers in a problem of a file
REWARDS = {"graded": f"answer + {FORMAT_WEIGHT} format", "right": "answer",
           "signed": "2 answer - 1"}
MAX_THINK = 20_000  # the score of the reasoning reads only this many characters of the thinking

ORIGINAL = """<|im_start|>system
You are a helpful assistant. You first think about the reasoning process in your mind and then \
provide the user with the answer.<|im_end|>
<|im_start|>user
Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic \
operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> \
tags. And return the final answer in <answer> </answer> tags, for example \
<answer> (1 + 2) / 3 </answer>.<|im_end|>
<|im_start|>assistant
Let me solve this step by step.
<think>"""  # word for word the prompt of github.com/policy-gradient/GRPO-Zero, to repeat its runs
BRIEF = """<|im_start|>user
Make {target} from {numbers}.<|im_end|>
<|im_start|>assistant
"""


def as_numpy_prints(words: list[str]) -> str:
    """The numbers padded to equal width, as numpy prints an array: [ 3 15  7]"""
    width = max(map(len, words))
    return f"[{' '.join(word.rjust(width) for word in words)}]"


class Wording(NamedTuple):
    """A choice of --prompt."""
    text: str
    write_numbers: Callable[[list[str]], str]
    thinks: bool = True  # otherwise the answer is an expression, and nothing else


WORDINGS = {  # beside those of the book
    "original": Wording(ORIGINAL, as_numpy_prints),
    "brief": Wording(BRIEF + "<think>", " and ".join),
    "expression": Wording(BRIEF, " and ".join, thinks=False)}
PROMPTS = (*countdown_task.PROMPTS, *WORDINGS)
# What the flags below that describe generated problems require. The function tests whether problems
# are generated. The text ends the error message if they are not: "--numbers has no effect without
# generated problems, which --data replaces".
GENERATED: tuple[Callable[["Task"], bool], str] = (
    lambda task: task.data is None, "generated problems, which --data replaces")


def of_book(name: str, **more: Any) -> Any:
    """A flag of the book's task; `more` is what this task says of it in addition."""
    flag = OF_BOOK[name]
    return option(flag.default, **{"text": flag.text, "least": flag.least,
                                   "choices": flag.choices, **more})


Content = tuple[tuple[int, ...], int]  # sorted numbers and target: the same for any order


@dataclass
class Task(countdown_task.Task):
    """The Countdown task, with the methods that training calls. Its fields are flags of `train.py`.
    """
    prompt: str = of_book("prompt", choices=PROMPTS, text="wording of the prompt. original is "
                          "that of GRPO-Zero. expression asks for the expression alone, without "
                          "any thinking")
    numbers: str = of_book("numbers", requires=GENERATED)
    min_number: int = of_book("min_number", most=MAX_NUMBER, requires=GENERATED)
    max_number: int = of_book("max_number", most=MAX_NUMBER, requires=GENERATED)
    max_target: int = of_book("max_target", most=MAX_NUMBER, requires=GENERATED)
    max_result: int = of_book("max_result", most=MAX_NUMBER, requires=GENERATED)
    data: str | None = option(
        None, 'file of problems, a line of JSON for each: {"nums": [3, 5, 7], "target": 22}. '
        "Without it problems are generated")
    examples: int = option(0, "number of solved problems that stand in the prompt as earlier turns "
                           "of the conversation. Their solutions show + * - / in turn. None of "
                           "them is a held-out problem", most=100)
    reward_form: str = option(
        "graded", "the reward of an answer. graded: 1 if it is right, plus "
        f"{FORMAT_WEIGHT} for the right format. right: 1 if it is right, and otherwise 0. signed: "
        "1 if it is right, and otherwise -1",
        choices=REWARDS)
    reasoning_weight: float = option(
        0.0, "the share of right steps in the thinking, times this number, is added to the reward",
        least=0, most=1000)

    def __post_init__(self) -> None:
        problems = []
        if self.data:
            problems = read_given(self.data, "problems", parse_problem)
        self.to_train = [problem for problem in problems if not is_held_out(problem)]
        tested: dict[Content, Problem] = {}  # without repetitions, so each counts once
        for problem in filter(is_held_out, problems):
            tested.setdefault(content_of(problem), problem)
        self.to_test = list(tested.values())
        if self.data and not (self.to_train and self.to_test):
            raise UserError(
                f"{self.data} is too small. About a fifth of the problems, chosen by their hash, "
                "are held out, and some of both kinds are needed. Here "
                f"{len(self.to_train)} are left to train on, and {len(self.to_test)} are held out")
        self.wording = WORDINGS.get(self.prompt)  # None: that of the book
        self.thinks = not self.wording or self.wording.thinks
        self.shown: set[Content] = set()  # the solved problems in every prompt: not trained on
        self.head = ""                    # the text that every prompt begins with
        if self.examples:
            self.head = solved_turns(self)
        self.to_train = [problem for problem in self.to_train
                         if content_of(problem) not in self.shown]
        if self.data and not self.to_train:
            raise UserError(f"--examples {self.examples}: {self.data} has no other problems to "
                            "train on than those that the prompt shows as examples")

    # what a right answer is, in words, for the page of a run
    solved = ("the expression makes the target from the numbers, each used exactly once, with "
              "+ - * /")

    @property
    def rewarded(self) -> str:
        """The formula of the reward, for config.json: only runs with the same one are compared."""
        steps = f" + {self.reasoning_weight:g} reasoning" if self.reasoning_weight else ""
        return REWARDS[self.reward_form] + steps

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers a generated problem may have."""
        return tuple(int(count) for count in self.numbers.split(","))

    def held_out_problems(self, count: int) -> list[Problem]:
        """Distinct problems, the same in every run; those of a file, if there is one."""
        if self.to_test:
            rng = random.Random("held out")
            return rng.sample(self.to_test, min(count, len(self.to_test)))
        return super().held_out_problems(count)

    def make_problem(self, rng: random.Random, held_out: bool) -> Problem:
        """A random problem that no prompt shows solved; to train on, it is one of the file."""
        if self.to_train and not held_out:
            return rng.choice(self.to_train)
        try:
            for _ in range(10_000):
                problem = super().make_problem(rng, held_out)
                if content_of(problem) not in self.shown:
                    return problem
        except ValueError as error:
            raise UserError(str(error)) from None
        raise UserError(f"--examples {self.examples}: no problem was found but those that the "
                        "prompt shows as examples")

    def extreme_problems(self) -> list[Problem]:
        """Problems with the longest prompts, to check that the tokenizer can write them and that
        they fit into the model. If problems are generated, it is one problem with the largest
        numbers. If they are from a file, there is one problem for each number in the file, because
        the tokenizer has to know every number. Such a problem repeats its number as often as the
        longest problem of the file has numbers."""
        from_file = self.to_train + self.to_test
        if not from_file:
            return [Problem((self.max_number,) * max(self.counts), self.max_target)]
        most = max(len(problem.numbers) for problem in from_file)
        numbers: set[int] = set()
        for problem in from_file:
            numbers.update(problem.numbers, [problem.target])
        return [Problem((number,) * most, number) for number in numbers]

    def prompt_for(self, problem: Problem) -> str:
        """The text up to the point where the model's answer begins."""
        return self.head + self.question(problem, is_first=not self.head)

    def question(self, problem: Problem, is_first: bool) -> str:
        """The turn that asks the problem, and the beginning of the answer. The system turn that
        some wordings have is kept only before the first question."""
        if self.wording:
            numbers = self.wording.write_numbers([str(number) for number in problem.numbers])
            text = self.wording.text.format(numbers=numbers, target=problem.target)
        else:
            text = super().prompt_for(problem)
        if is_first or USER_TURN not in text:
            return text
        return text[text.index(USER_TURN):]

    def legal_steps(self, x: int, y: int) -> list[Step]:
        """The steps `x op y`, in this order, with a positive whole result of at most `max_result`:
        those that `reachable` makes solvable problems of. A model may take others and be right."""
        steps = [(x, "*", y, x * y), (x, "+", y, x + y), (x, "-", y, x - y)]
        if x % y == 0:
            steps.append((x, "/", y, x // y))
        return [step for step in steps if 0 < step[3] <= self.max_result]

    def read(self, words: list[str]) -> Problem:
        """The problem that a person typed: 4 12 10 18, or 4 12 10 make 18 as `show` writes it."""
        if words[-2:-1] == ["make"]:
            words = words[:-2] + words[-1:]
        *numbers, target = read_numbers(words, 3, "numbers and then the target, such as 4 12 10 18")
        return Problem(tuple(numbers), target)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """The reward of an answer by the book, and the parts it is made of."""
        found = super().score(problem, self.after_think(text))
        verdicts = [verdict for _, verdict in steps_of(text, problem.numbers)]
        reasoning = sum(verdicts) / len(verdicts) if verdicts else 0.0
        reward = {"graded": found["reward"], "right": found["answer"],
                  "signed": 2 * found["answer"] - 1}[self.reward_form]
        return found | {"reward": reward + self.reasoning_weight * reasoning,
                        "reasoning": reasoning}

    def after_think(self, text: str) -> str:
        """An answer as it would follow the book's prompts, which end with <think>."""
        text = without_end_of_turn(text)
        if not self.thinks:
            is_formed = read_expression(text) is not None
            return f"</think>\n<answer>{text}</answer>" if is_formed else ""
        if not self.wording or self.wording.text.endswith("<think>"):
            return text
        # the answer opens its thinking, and what stands before that does not count
        _, opening, rest = text.partition("<think>")
        return opening + rest if opening else text.replace("</think>", "?")

    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        """The section and the kind of each token, as codes, from the texts of the tokens."""
        return super().label(pieces) if self.thinks else annotate_expression(pieces)

    def right_steps(self, problem: Problem, pieces: list[str]) -> list[int]:
        """The index of the token in which each right step of the reasoning ends. In the tokens
        " 3", " *", " 5", " =", " 1", "5", "," it is [5], the second digit of 15."""
        token_ends = list(itertools.accumulate(map(len, pieces)))
        steps = steps_of("".join(pieces), problem.numbers)
        right_ends = [end for end, is_right in steps if is_right]
        return [bisect_left(token_ends, end) for end in right_ends]


def parse_problem(line: str, where: str) -> Problem:
    """The problem in a line of a file, {"nums": [3, 5, 7], "target": 22}; `where` names the line in
    the message."""
    try:
        raw = json.loads(line)
        numbers, target = raw["nums"], raw["target"]
        is_valid = isinstance(numbers, list) and 0 < len(numbers) <= MAX_NUMBERS
        for number in [*numbers, target]:
            is_valid = is_valid and type(number) is int and 0 < number <= MAX_NUMBER
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        other = ""
        if '"answer"' in line:
            other = ". --task examples.question_answer reads questions with answers"
        raise UserError(f'{where}: expected {{"nums": [3, 5, 7], "target": 22}} with at most '
                        f"{MAX_NUMBERS} whole numbers from 1 to {MAX_NUMBER}, got "
                        f"{line[:80]!r}{other}")
    return Problem(tuple(numbers), target)


def read_numbers(words: list[str], least: int, expected: str) -> list[int]:
    """The positive whole numbers that a person typed, at least `least` of them."""
    wrong = [f"{word[:20]!r} is not a whole positive number" for word in words
             if not re.fullmatch("[0-9]{1,9}", word) or int(word) == 0]
    if len(words) < least:
        wrong.append(f"{' '.join(words)!r} is too short")
    if wrong:
        raise UserError(f"{wrong[0]}: expected {expected}")
    return [int(word) for word in words]


# A step is a op b = c, with at most two spaces between its parts. The c of one step can be the a of
# the next, as in "3 * 5 = 15 + 7 = 22", which is two steps. Therefore the pattern is a look-ahead,
# (?=...), which consumes no text.
PARTS_OF_STEP = ("([0-9]{1,9})", "([-+*/])", "([0-9]{1,9})", "=", "(-?[0-9]{1,9})")
STEP = re.compile(f"(?<![0-9])(?={' {0,2}'.join(PARTS_OF_STEP)}(?![0-9]))")


def steps_of(text: str, numbers: Iterable[int]) -> list[tuple[int, bool]]:
    """Each step `a op b = c` of the think section: the index of the character after it, and whether
    it is right. A step is right if c is its result, and a and b were available. A number is
    available if it is the result of an earlier step or one of the problem's (3 + 3 needs two threes
    in the problem)."""
    if "</think>" not in text:  # a section that was not closed counts for nothing
        return []
    think = text.partition("</think>")[0]
    of_problem = Counter(map(int, numbers))
    results: set[int] = set()
    steps = []
    for match in STEP.finditer(think[:MAX_THINK]):
        a, sign, b, c = int(match[1]), match[2], int(match[3]), int(match[4])
        are_available = True
        for number, times in Counter((a, b)).items():
            if number not in results and of_problem[number] < times:
                are_available = False
        steps.append((match.end(4), are_available and is_result(a, sign, b, c)))
        results.add(c)
    return steps


def is_result(a: int, sign: str, b: int, c: int) -> bool:
    """Whether a op b = c."""
    if sign == "/":
        return b != 0 and a == b * c
    return c == {"+": a + b, "-": a - b, "*": a * b}[sign]


def annotate(pieces: list[str]) -> tuple[list[int], list[int]]:
    """The section and the kind of each token of an answer with thinking, from the tokens' texts."""
    return countdown_task.Task().label(pieces)


def annotate_expression(pieces: list[str]) -> tuple[list[int], list[int]]:
    """The section and the kind of each token of an answer that is nothing but an expression: all of
    it is in the answer section, except the end of the turn."""
    kinds = [kind_of(text) for text in pieces]
    sections = [OTHER if kind == END else ANSWER for kind in kinds]
    return sections, kinds
