"""The Countdown task: reach a target from a few numbers, each used exactly once, with + - * /
and parentheses.

    numbers 3 5 7, target 22     the prompt ends with an opened <think>, and the answer may be
    " 3 * 5 = 15, 15 + 7 = 22 yes</think>\\n<answer> ( 3 * 5 ) + 7 </answer><|im_end|>"
    -> {"reward": 1.1, "format": 1.0, "answer": 1.0}

`Task` is all that training uses: problems, the prompt, the reward (`score`), and two labels of
every generated token (`label`). `python countdown_task.py` shows three rewards.

Text from a model is never executed: `value_of` reads the text's syntax tree, accepts numbers, four
operators and a minus sign, and computes with exact fractions.
"""
import ast
import hashlib
import itertools
import operator
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# Codes of the two labels of a token, as credit files store them.
OTHER, THINK, ANSWER = range(3)
WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, END = range(7)
SECTIONS = ("other", "think", "answer")
KINDS = ("word", "space", "number", "operator", "bracket", "tag", "end")

END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT_WEIGHT = 0.1
PROMPTS = {  # " 3" with its space is one token, and "3" another; a problem's numbers have it
    "short": """<|im_start|>user
 {spaced} make {target}<|im_end|>
<|im_start|>assistant
<think>""",
    "full": """<|im_start|>system
You solve number puzzles. You reason first and then give one expression.<|im_end|>
<|im_start|>user
Reach {target} with the numbers {commas}. You may add (+), subtract (-), multiply (*) and \
divide (/), and group with parentheses. Every number must be used exactly once. Put your \
reasoning between <think> and </think>. On the next line put the expression alone between \
<answer> and </answer>, for example <answer> (1 + 2) * 3 </answer>.<|im_end|>
<|im_start|>assistant
Let me work this out.
<think>"""}


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]
    target: int


@dataclass
class Task:
    """The problems, and the reward of an answer. The fields are flags of train.py, and their
    comments are the help."""
    prompt: str = "full"      # wording of the prompt
    numbers: str = "3,4"      # how many numbers a problem has
    min_number: int = 1       # smallest number of a problem
    max_number: int = 99      # largest number of a problem
    max_target: int = 99      # largest target
    max_result: int = 10_000  # a problem has a solution without intermediate results above this

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems of a step depend on seed and step alone: a resumed run has the same ones."""
        rng = random.Random(f"train {seed} {step}")
        return [self.make_problem(rng, held_out=False) for _ in range(count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Distinct problems, the same in every run; fewer than `count` if no more are found."""
        rng = random.Random("held out")
        problems: dict[object, Problem] = {}
        for _ in range(20 * count):
            problem = self.make_problem(rng, held_out=True)
            problems.setdefault(content_of(problem), problem)
            if len(problems) == count:
                break
        return list(problems.values())

    def make_problem(self, rng: random.Random, held_out: bool) -> Problem:
        """A random problem that has a solution, held out or not."""
        counts = [int(count) for count in self.numbers.split(",")]
        for _ in range(10_000):
            count = rng.choice(counts)
            numbers = [rng.randint(self.min_number, self.max_number) for _ in range(count)]
            values = reachable(tuple(sorted(numbers)), self.max_result)
            targets = sorted(value for value in values if value <= self.max_target)
            if targets:
                problem = Problem(tuple(numbers), rng.choice(targets))
                if is_held_out(problem) == held_out:
                    return problem
        raise ValueError(f"found no problem with a solution: {self}")

    def prompt_for(self, problem: Problem) -> str:
        """The text up to the point where the model's answer begins."""
        words = [str(number) for number in problem.numbers]
        return PROMPTS[self.prompt].format(target=problem.target, spaced=" ".join(words),
                                           commas=", ".join(words))

    def show(self, problem: Problem) -> str:
        return f"{' '.join(map(str, problem.numbers))} make {problem.target}"

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """The reward of an answer and the parts it is made of."""
        text = without_end_of_turn(text)
        form = format_score(text)
        expression = between(text, "<answer>", "</answer>")
        right = evaluates_to(expression, problem.numbers, problem.target)
        return {"reward": FORMAT_WEIGHT * form + right, "format": form, "answer": float(right)}

    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        """The section and the kind of each token of an answer, as codes:

            tokens     3    +    5    =    8    </    think  >\\n   <answer>  3+5     </answer>  end
            section    think . . . . . .   .    other . . . . . . . . . . .   answer  other . . . .
            kind       num  op   num  br.  num  tag . . . . . . . . . . . .   num     tag       end

        The thinking ends at the first </think> or <answer>. A token that touches a tag is of kind
        tag: tokenizers cut "<think>" into "<", "think" and ">", and may join ">" with a newline.
        """
        text = "".join(pieces)
        section_of = [OTHER] * (len(text) + 1)  # of each character, and of the end
        think = re.split("</think>|<answer>", text, maxsplit=1)[0]
        section_of[:len(think)] = [THINK] * len(think)
        if found := re.search(r"<answer>(.*?)(</answer>|\Z)", text, re.DOTALL):
            section_of[found.start(1):found.end(1)] = [ANSWER] * len(found[1])
        is_tag = [False] * len(text)
        for match in re.finditer("</?(think|answer)>", text):
            is_tag[match.start():match.end()] = [True] * len(match[0])
        sections, kinds, end = [], [], 0
        for piece in pieces:
            start, end = end, end + len(piece)
            kind = TAG if any(is_tag[start:end]) else kind_of(piece)
            sections.append(OTHER if kind in (TAG, END) else section_of[start])
            kinds.append(kind)
        return sections, kinds


KIND_OF = {"": SPACE} | dict.fromkeys("0123456789", NUMBER)  # by the first character
KIND_OF |= dict.fromkeys("+-*/", OPERATOR) | dict.fromkeys("()=", BRACKET)


def kind_of(piece: str) -> int:
    """The kind of a token, by its first character that is not a space. "=" counts as a bracket, and
    everything without a kind of its own, such as punctuation, as a word."""
    return END if piece in END_OF_TURN else KIND_OF.get(piece.strip()[:1], WORD)


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], max_result: int) -> frozenset[int]:
    """Every value that can be made from all of the (sorted) numbers, found by trying all ways.
    Intermediate results are positive whole numbers of at most `max_result`. From 2 3 come 1, 5 and
    6. From 2 3 7 come all values from 1 7, 5 7 and 6 7, and likewise for the other two pairs."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values: set[int] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        x, y = numbers[i], numbers[j]
        others = [number for k, number in enumerate(numbers) if k not in (i, j)]
        results = [x * y, x + y, x - y] + ([x // y] if x % y == 0 else [])
        for result in results:
            if 0 < result <= max_result:
                values |= reachable(tuple(sorted([*others, result])), max_result)
    return frozenset(values)


def content_of(problem: Problem) -> tuple[tuple[int, ...], int]:
    """Sorted numbers and target: the same for any order."""
    return tuple(sorted(problem.numbers)), problem.target


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is only evaluated and never trained on. A hash chooses a fifth of all
    problems, so the same problems are held out in every run and every program."""
    numbers, target = content_of(problem)
    key = f"{','.join(map(str, numbers))}={target}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 == 0


def without_end_of_turn(text: str) -> str:
    end = next((end for end in END_OF_TURN if text.endswith(end)), "")
    return text.removesuffix(end)


def between(text: str, opening: str, closing: str) -> str | None:
    """The text between the first opening tag and the first closing tag after it."""
    _, opened, rest = text.partition(opening)
    content, closed, _ = rest.partition(closing)
    return content if opened and closed else None


def format_score(text: str) -> float:
    """The format part of the reward: 1 for exactly <think>...</think>, a new line and
    <answer>...</answer>, with every tag once. Otherwise 0.1 for a pair of think tags plus 0.5 for a
    pair of answer tags. The prompt ends with "<think>", so the answer need not repeat the tag."""
    if not text.startswith("<think>"):
        text = "<think>" + text
    every_tag_once = all(text.count(tag) == 1 for tag in TAGS)
    if every_tag_once and "</think>\n<answer>" in text and text.endswith("</answer>"):
        return 1.0
    has_think = between(text, "<think>", "</think>") is not None
    has_answer = between(text, "<answer>", "</answer>") is not None
    return 0.1 * has_think + 0.5 * has_answer


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv}


def evaluates_to(expression: str | None, numbers: Iterable[int], target: int) -> bool:
    """Whether the expression uses every number exactly once and is exactly equal to the target."""
    return (expression is not None
            and sorted(re.findall("[0-9]+", expression)) == sorted(map(str, numbers))
            and read_expression(expression) == target)


def read_expression(text: str) -> Fraction | None:
    """The exact value of an expression; None if it has none, or has more than 400 characters."""
    if not re.fullmatch(r"[0-9+*/() \t\r\n-]{1,400}", text):
        return None
    try:
        return value_of(ast.parse(" ".join(text.split()), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def value_of(node: ast.expr) -> Fraction:
    """The exact value of an arithmetic syntax tree, which is inspected and never executed."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise SyntaxError("an operator that is none of the four, as in 2**3, 7//2 and +3")


def show() -> None:
    """A problem, three answers, and their rewards."""
    task, problem = Task(), Problem((3, 5, 7), 22)
    print(f"{task.show(problem)}    reward = {FORMAT_WEIGHT} format + answer")
    for text in (" 3 * 5 = 15, 15 + 7 = 22</think>\n<answer>(3 * 5) + 7</answer>",
                 " 3 * 5 = 15, 15 + 7 = 22</think>\n<answer>3 + 5 + 7</answer>",
                 " I do not know"):
        print(f"{task.score(problem, text)}  {text!r}")


if __name__ == "__main__":
    show()
