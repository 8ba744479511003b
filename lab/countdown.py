"""The Countdown task: reach a target from a few numbers, each used exactly once, with + - * /
and parentheses.

    numbers 3 5 7, target 22     the prompt ends with an opened <think>, and the answer may be
    " 3 * 5 = 15, 15 + 7 = 22 yes</think>\\n<answer> ( 3 * 5 ) + 7 </answer><|im_end|>"
    -> {"reward": 1.1, "format": 1.0, "answer": 1.0, "reasoning": 1.0}

With --prompt expression there is no thinking: the answer is "3 * 5 + 7<|im_end|>". With
--examples 4 the prompt begins with four solved problems, as earlier turns of the conversation.

This file holds the problems, the prompt, the reward and its parts, and two labels of every
generated token: the section of the answer that it is in, and its category (`kind`: word, number,
...). Training uses only the class `Task`. A task of your own is another file with another `Task`
(docs/your_own_task.md).

What a model wrote is never executed. `value_of` reads its syntax tree, accepts numbers, four
operators and a minus sign, and computes with exact fractions. Text that is too long is refused
before it is parsed.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --mitigation none")
import ast
import hashlib
import itertools
import json
import operator
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from lab.engine.errors import UserError
from lab.engine.tokens import (ANSWER, BRACKET, END, END_OF_TURN, NUMBER, OPERATOR, OTHER, SPACE,
                               TAG, THINK, USER_TURN, WORD, without_end_of_turn)
from lab.harness.record import read_given
from lab.harness.flags import option

MAX_NUMBER = 999_999_999  # the score of the reasoning reads numbers of at most nine digits
MAX_NUMBERS = 30  # the most numbers in a problem of a file
TAGS = (b"<think>", b"</think>", b"<answer>", b"</answer>")
ANSWER_BEGINS = "</think>\n<answer>"
FORMAT_WEIGHT = 0.1
REWARDS = {"graded": f"answer + {FORMAT_WEIGHT} format", "right": "answer",
           "signed": "2 answer - 1"}
MAX_THINK = 20_000  # the score of the reasoning reads only this many characters of the thinking
MOST_KNOWN = 100_000  # `held_out_problems` gives up after so many draws without a new problem

SHORT = "<|im_start|>user\n{numbers} make {target}<|im_end|>\n<|im_start|>assistant\n<think>"
FULL = """<|im_start|>system
You solve number puzzles. You reason first and then give one expression.<|im_end|>
<|im_start|>user
Reach {target} with the numbers {numbers}. You may add (+), subtract (-), multiply (*) and \
divide (/), and group with parentheses. Every number must be used exactly once. Put your \
reasoning between <think> and </think>. On the next line put the expression alone between \
<answer> and </answer>, for example <answer> (1 + 2) * 3 </answer>.<|im_end|>
<|im_start|>assistant
Let me work this out.
<think>"""
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


PROMPTS = {
    "short": Wording(SHORT, lambda words: " " + " ".join(words)),
    "full": Wording(FULL, ", ".join),
    "original": Wording(ORIGINAL, as_numpy_prints),
    "brief": Wording(BRIEF + "<think>", " and ".join),
    "expression": Wording(BRIEF, " and ".join, thinks=False)}
# What the flags below that describe generated problems require. The function tests whether problems
# are generated. The text ends the error message if they are not: "--numbers has no effect without
# generated problems, which --data replaces".
GENERATED: tuple[Callable[["Task"], bool], str] = (
    lambda task: task.data is None, "generated problems, which --data replaces")


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]
    target: int


Content = tuple[tuple[int, ...], int]  # sorted numbers and target: the same for any order


@dataclass
class Task:
    """The Countdown task, with the methods that training calls. Its fields are flags of `train.py`.
    """
    data: str | None = option(
        None, 'file of problems, a line of JSON for each: {"nums": [3, 5, 7], "target": 22}. '
        "Without it problems are generated")
    prompt: str = option("full", "wording of the prompt. original is that of GRPO-Zero. expression "
                         "asks for the expression alone, without any thinking", choices=PROMPTS)
    examples: int = option(0, "number of solved problems that stand in the prompt as earlier turns "
                           "of the conversation. Their solutions show + * - / in turn. None of "
                           "them is a held-out problem", most=100)
    numbers: str = option("3,4", "how many numbers a generated problem has",
                          choices=("2", "3", "4", "3,4"), requires=GENERATED)
    min_number: int = option(1, "smallest number of a generated problem",
                             least=1, most=MAX_NUMBER, requires=GENERATED)
    max_number: int = option(99, "largest number of a generated problem", least=1, most=MAX_NUMBER,
                             requires=GENERATED)
    max_target: int = option(99, "largest target of a generated problem", least=1, most=MAX_NUMBER,
                             requires=GENERATED)
    max_result: int = option(10_000, "a generated problem has a solution whose "
                             "intermediate results are at most this", least=1, most=MAX_NUMBER,
                             requires=GENERATED)
    reward_form: str = option(
        "graded", "the reward of an answer. graded: 1 if it is right, plus "
        f"{FORMAT_WEIGHT} for the right format. right: 1 if it is right, and otherwise 0. signed: "
        "1 if it is right, and otherwise -1",
        choices=REWARDS)
    reasoning_weight: float = option(
        0.0, "the share of right steps in the thinking, times this number, is added to the reward",
        least=0, most=1000)

    def __post_init__(self) -> None:
        if self.min_number > self.max_number:
            raise UserError(
                f"--min_number {self.min_number} is above --max_number {self.max_number}")
        problems = []
        if self.data:
            problems = read_problems(self.data)
        self.to_train = [problem for problem in problems if not held_out(problem)]
        tested: dict[Content, Problem] = {}  # without repetitions, so each counts once
        for problem in filter(held_out, problems):
            tested.setdefault(content_of(problem), problem)
        self.to_test = list(tested.values())
        if self.data and not (self.to_train and self.to_test):
            raise UserError(
                f"{self.data} is too small. About a fifth of the problems, chosen by their hash, "
                "are held out, and some of both kinds are needed. Here "
                f"{len(self.to_train)} are left to train on, and {len(self.to_test)} are held out")
        self.wording = PROMPTS[self.prompt]
        self.shown: set[Content] = set()  # the solved problems in every prompt
        self.head = ""                    # the text that every prompt begins with
        if self.examples:
            from lab.harness.solved_problems import solved_turns
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

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems of a step. They depend on seed and step alone, so a resumed run gets the
        same ones."""
        rng = random.Random(f"train {seed} {step}")
        return [self.training_problem(rng) for _ in range(count)]

    def training_problem(self, rng: random.Random) -> Problem:
        def is_new(problem: Problem) -> bool:
            return not held_out(problem) and content_of(problem) not in self.shown

        if self.to_train:
            return rng.choice(self.to_train)
        return self.make_problem(rng, is_new)

    def held_out_problems(self, count: int) -> list[Problem]:
        """Distinct problems, the same in every run; fewer than `count` if no more are found."""
        rng = random.Random("held out")
        if self.to_test:
            return rng.sample(self.to_test, min(count, len(self.to_test)))
        problems: dict[Content, Problem] = {}
        known = 0  # draws since the last new problem, all of which were known
        for _ in range(20 * count):
            problem = self.make_problem(rng, held_out)
            known = known + 1 if content_of(problem) in problems else 0
            problems.setdefault(content_of(problem), problem)
            if len(problems) == count or known == MOST_KNOWN:
                break
        return list(problems.values())

    def make_problem(self, rng: random.Random, wanted: Callable[[Problem], bool]) -> Problem:
        """A random problem that has a solution, and for which `wanted` is true."""
        for _ in range(10_000):
            count = rng.choice(self.counts)
            numbers = [rng.randint(self.min_number, self.max_number) for _ in range(count)]
            values = reachable(tuple(sorted(numbers)), self.max_result)
            targets = sorted(value for value in values if value <= self.max_target)
            if targets:
                problem = Problem(tuple(numbers), rng.choice(targets))
                if wanted(problem):
                    return problem
        raise UserError(
            f"found no problem with a solution: numbers {self.counts}, min_number "
            f"{self.min_number}, max_number {self.max_number}, max_target {self.max_target}, "
            f"max_result {self.max_result}")

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
        numbers = self.wording.write_numbers([str(number) for number in problem.numbers])
        text = self.wording.text.format(numbers=numbers, target=problem.target)
        if is_first or USER_TURN not in text:
            return text
        return text[text.index(USER_TURN):]

    def set_aside(self, problem: Problem) -> None:
        """Do not train on a problem, because every prompt shows its solution."""
        self.shown.add(content_of(problem))

    def legal_steps(self, x: int, y: int) -> list["Step"]:
        return legal_steps(x, y, self.max_result)

    def show(self, problem: Problem) -> str:
        return f"{' '.join(map(str, problem.numbers))} make {problem.target}"

    def read(self, words: list[str]) -> Problem:
        """The problem that a person typed: 4 12 10 18, or 4 12 10 make 18 as `show` writes it."""
        if words[-2:-1] == ["make"]:
            words = words[:-2] + words[-1:]
        *numbers, target = read_numbers(words, 3, "numbers and then the target, such as 4 12 10 18")
        return Problem(tuple(numbers), target)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """The reward of an answer and the parts it is made of."""
        if self.wording.thinks:
            prompt_has_tag = self.wording.text.endswith("<think>")
            well_formed = format_score(text, "<think>" if prompt_has_tag else "")
            expression = between(text, "<answer>", "</answer>")
        else:
            expression = without_end_of_turn(text)
            well_formed = float(read_expression(expression) is not None)
        right = float(evaluates_to(expression, problem.numbers, problem.target))
        verdicts = [verdict for _, verdict in steps_of(text, problem.numbers)]
        reasoning = sum(verdicts) / len(verdicts) if verdicts else 0.0
        reward = {"graded": FORMAT_WEIGHT * well_formed + right, "right": right,
                  "signed": 2 * right - 1}[self.reward_form]
        return {"reward": reward + self.reasoning_weight * reasoning, "format": well_formed,
                "answer": right, "reasoning": reasoning}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        """The section and the kind of each token, as codes (lab/engine/tokens.py)."""
        return annotate(pieces) if self.wording.thinks else annotate_expression(pieces)

    def right_steps(self, problem: Problem, pieces: list[bytes]) -> list[int]:
        """The index of the token in which each right step of the reasoning ends. In the tokens
        " 3", " *", " 5", " =", " 1", "5", "," it is [5], the second digit of 15."""
        # latin-1 makes one character of each byte, so an index of a character is that of a byte
        text = b"".join(pieces).decode("latin-1")
        token_ends = list(itertools.accumulate(map(len, pieces)))
        right_ends = [end for end, is_right in steps_of(text, problem.numbers) if is_right]
        return [bisect_left(token_ends, end) for end in right_ends]


Step = tuple[int, str, int, int]  # x, operator, y and the result


def read_problems(name: str) -> list[Problem]:
    """The problems of a file, JSON lines {"nums": [3, 5, 7], "target": 22}."""
    return read_given(name, "problems", parse_problem)


def parse_problem(line: str, where: str) -> Problem:
    """The problem in a line of a file; `where` names the line in the message."""
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


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], max_result: int) -> frozenset[int]:
    """Every value that can be made from all of the (sorted) numbers, found by trying all ways."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values: set[int] = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for *_, result in legal_steps(a, b, max_result) + legal_steps(b, a, max_result):
            values |= reachable(tuple(sorted([*others, result])), max_result)
    return frozenset(values)


def legal_steps(x: int, y: int, max_result: int) -> list[Step]:
    """The steps `x op y`, in this order, with a positive whole result of at most `max_result`. They
    are used to make solvable problems; a model may take other steps and still be right."""
    steps = [(x, "*", y, x * y), (x, "+", y, x + y), (x, "-", y, x - y)]
    if x % y == 0:
        steps.append((x, "/", y, x // y))
    return [step for step in steps if 0 < step[3] <= max_result]


def content_of(problem: Problem) -> Content:
    return tuple(sorted(problem.numbers)), problem.target


def held_out(problem: Problem) -> bool:
    """Whether a problem is only evaluated and never trained on. A hash chooses a fifth of all
    problems, so the same problems are held out in every run and every program."""
    numbers, target = content_of(problem)
    key = f"{','.join(map(str, numbers))}={target}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 == 0


def between(text: str, opening: str, closing: str) -> str | None:
    """The text between the first opening tag and the first closing tag after it."""
    _, opened, rest = text.partition(opening)
    content, closed, _ = rest.partition(closing)
    return content if opened and closed else None


def format_score(text: str, end_of_prompt: str) -> float:
    """The format part of the reward: 1 for exactly <think>...</think>, a new line and
    <answer>...</answer>, with every tag once. Otherwise 0.1 for a pair of think tags plus 0.5 for a
    pair of answer tags. If the prompt ends with "<think>", the answer need not repeat the tag."""
    if not text.startswith("<think>"):
        text = end_of_prompt + text
    text = without_end_of_turn(text)
    every_tag_once = all(text.count(tag.decode()) == 1 for tag in TAGS)
    if every_tag_once and ANSWER_BEGINS in text and text.endswith("</answer>"):
        return 1.0
    has_think = between(text, "<think>", "</think>") is not None
    has_answer = between(text, "<answer>", "</answer>") is not None
    return 0.1 * has_think + 0.5 * has_answer


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


MAX_CHARACTERS, MAX_PARENTHESES = 400, 30
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv}


def evaluates_to(expression: str | None, numbers: Iterable[int], target: int) -> bool:
    """Whether the expression uses every number exactly once and is exactly equal to the target."""
    if expression is None or len(expression) > MAX_CHARACTERS:
        return False
    if sorted(re.findall("[0-9]+", expression)) != sorted(map(str, numbers)):
        return False
    return read_expression(expression) == target


def read_expression(text: str) -> Fraction | None:
    """The exact value of an expression; None if it has no value, is not an expression, or is too
    long."""
    if (not re.fullmatch(r"[0-9+*/() \t\r\n-]*", text) or len(text) > MAX_CHARACTERS
            or text.count("(") > MAX_PARENTHESES):
        return None
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
        return value_of(tree.body)
    except (SyntaxError, ZeroDivisionError, RecursionError):
        return None


def value_of(node: ast.expr) -> Fraction:
    """The exact value of an arithmetic syntax tree, which is inspected and never executed. "2**3"
    raises SyntaxError, because its operator is not in OPERATORS; so do "7//2" and "+3"."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise SyntaxError("neither a number, nor one of four operators, nor a minus sign")


def annotate(pieces: list[bytes]) -> tuple[list[int], list[int]]:
    """The section and the kind of each token of an answer, from the bytes of its tokens.

    The think section ends at the token before </think> (or before <answer>, if that comes first).
    The answer section is from the first token after the <answer> tag to the token before </answer>.
    A token that touches a tag is of kind tag, because tokenizers cut "<think>" into "<", "think"
    and ">", and may join the ">" with a newline.
    """
    text = b"".join(pieces)
    is_tag = [False] * len(text)  # for each byte
    for match in re.finditer(b"</?(think|answer)>", text):
        for index in range(*match.span()):
            is_tag[index] = True
    think_to, answer_from, answer_to = borders(text)
    sections, kinds, end = [], [], 0
    for piece in pieces:
        start, end = end, end + len(piece)
        kind = TAG if any(is_tag[start:end]) else kind_of(piece)
        section = OTHER
        if kind not in (TAG, END):
            if start < think_to:
                section = THINK
            elif answer_from <= start < answer_to:
                section = ANSWER
        sections.append(section)
        kinds.append(kind)
    return sections, kinds


def annotate_expression(pieces: list[bytes]) -> tuple[list[int], list[int]]:
    """The section and the kind of each token of an answer that is nothing but an expression: all of
    it is in the answer section, except the end of the turn."""
    kinds = [kind_of(piece) for piece in pieces]
    sections = [OTHER if kind == END else ANSWER for kind in kinds]
    return sections, kinds


def borders(text: bytes) -> tuple[int, int, int]:
    """The indices where the think section ends, and where the answer section begins and ends."""
    end = len(text)

    def index_or_end(tag: bytes, start: int = 0) -> int:
        index = text.find(tag, start)
        return index if index >= 0 else end

    opening = index_or_end(b"<answer>")
    think_to = min(index_or_end(b"</think>"), opening)
    answer_from = min(opening + len(b"<answer>"), end)
    return think_to, answer_from, index_or_end(b"</answer>", answer_from)


def kind_of(piece: bytes) -> int:
    """The kind of a token, by its first character that is not a space. "=" counts as a bracket, and
    everything without a kind of its own, such as punctuation, as a word."""
    text = piece.decode(errors="replace")
    first = text.strip()[:1]
    if text in END_OF_TURN:
        return END
    if not first:
        return SPACE
    if first in "0123456789":
        return NUMBER
    if first in "+-*/":
        return OPERATOR
    return BRACKET if first in "()=" else WORD
