"""The Countdown task: reach a target from a few numbers, each used exactly once, with + - * / and parentheses.

Holds the problems (made from a seed or read from a file), the prompt, the reward and its parts, and the
labels every generated token gets: the section it stands in and the kind of text it is.

    numbers 3 5 7, target 22          prompt ends with an opened <think>, the response is what follows:
    " 3 * 5 = 15, 15 + 7 = 22 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer><|im_end|>"
    -> {"reward": 1.1, "format": 1.0, "answer": 1.0, "reasoning": 1.0}

What a model wrote is never executed: the expression reader below knows numbers, four operators, a minus
sign and parentheses, computes in exact fractions, and gives up early on anything large.
"""
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import UserError
from engine.tokens import END_OF_TURN, token_bytes

TAGS = (b"<think>", b"</think>", b"<answer>", b"</answer>")
OTHER, THINK, ANSWER = 0, 1, 2                                                   # section codes
WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, END = range(7)                      # kind codes
SECTIONS = ("other", "think", "answer")
KINDS = ("word", "space", "number", "operator", "bracket", "tag", "end")
FORMAT_WEIGHT = 0.1
REWARD = f"answer + {FORMAT_WEIGHT} format"  # in config.json: runs with another reward are not comparable


@dataclass(frozen=True)
class Problem:
    numbers: tuple[int, ...]
    target: int


@dataclass(frozen=True)
class Ranges:
    """Which problems are made. Whole positive intermediate results up to `max_result` count as reachable."""
    counts: tuple[int, ...]
    min_number: int
    max_number: int
    max_target: int
    max_result: int


def held_out(problem: Problem) -> bool:
    """The same fifth of all problems for every seed and every program: never trained on, only evaluated."""
    key = f"{','.join(map(str, sorted(problem.numbers)))}={problem.target}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 == 0


def operations(a: int, b: int, max_result: int) -> tuple[tuple[int, str, int, int], ...]:
    """All (left, operator, right, result) of two numbers with a whole positive result."""
    found = []
    for x, y in ((a, b), (b, a)):
        found += [(x, "+", y, x + y), (x, "*", y, x * y), (x, "-", y, x - y)]
        found += [(x, "/", y, x // y)] if x % y == 0 else []
    return tuple(sorted({step for step in found if 0 < step[3] <= max_result}))


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], max_result: int) -> frozenset[int]:
    """Every value that uses all the (sorted) numbers."""
    if len(numbers) == 1:
        return frozenset(numbers)
    values = set()
    for i, j in itertools.combinations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for *_, result in operations(numbers[i], numbers[j], max_result):
            values |= reachable(tuple(sorted([*rest, result])), max_result)
    return frozenset(values)


def make_problem(rng: random.Random, ranges: Ranges, wanted=lambda problem: True) -> Problem:
    """A random problem that has a solution and is wanted."""
    for _ in range(10_000):
        numbers = [rng.randint(ranges.min_number, ranges.max_number) for _ in range(rng.choice(ranges.counts))]
        targets = sorted(v for v in reachable(tuple(sorted(numbers)), ranges.max_result) if v <= ranges.max_target)
        if targets:
            problem = Problem(tuple(numbers), rng.choice(targets))
            if wanted(problem):
                return problem
    raise UserError(f"found no problem with a solution: numbers {ranges.counts}, min_number {ranges.min_number}, max_number "
                    f"{ranges.max_number}, max_target {ranges.max_target}, max_result {ranges.max_result}")


def read_problems(path: str | Path) -> list[Problem]:
    """JSON lines {"nums": [3, 5, 7], "target": 22}."""
    problems = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            problems.append(parse_problem(line, f"{path}, line {number}"))
    if not problems:
        raise UserError(f"{path} holds no problems")
    return problems


def parse_problem(line: str, where: str) -> Problem:
    try:
        raw = json.loads(line)
        numbers, target = raw["nums"], raw["target"]
        whole = isinstance(numbers, list) and numbers and all(type(n) is int and n > 0 for n in [*numbers, target])
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise UserError(f'{where}: expected {{"nums": [3, 5, 7], "target": 22}} with whole positive numbers, '
                        f"got {line[:80]!r}")
    return Problem(tuple(numbers), target)


class Problems:
    """Training problems for any step, and a fixed list of held-out ones; both follow from the seed alone."""

    def __init__(self, ranges: Ranges, data: str | None = None):
        self.ranges, self.held_out = ranges, {}
        file = read_problems(data) if data else []
        self.train = [p for p in file if not held_out(p)]
        self.test = list(dict.fromkeys(p for p in file if held_out(p)))
        if data and not (self.train and self.test):
            raise UserError(f"{data}: {len(self.train)} problems to train on and {len(self.test)} held out by their "
                            "hash (about a fifth): both are needed, the file is too small")

    def training(self, seed: int, step: int, count: int) -> list[Problem]:
        rng = random.Random(f"train {seed} {step}")
        if self.train:
            return [rng.choice(self.train) for _ in range(count)]
        return [make_problem(rng, self.ranges, lambda p: not held_out(p)) for _ in range(count)]

    def evaluation(self, count: int) -> list[Problem]:
        """The same distinct held-out problems in every run, fewer where no more are found."""
        rng = random.Random("held out")
        if self.test:
            return rng.sample(self.test, min(count, len(self.test)))
        if count not in self.held_out:
            found = {}
            for _ in range(20 * count):
                problem = make_problem(rng, self.ranges, held_out)
                found.setdefault((tuple(sorted(problem.numbers)), problem.target), problem)
                if len(found) == count:
                    break
            self.held_out[count] = list(found.values())
        return self.held_out[count]


SHORT = "<|im_start|>user\n{numbers} make {target}<|im_end|>\n<|im_start|>assistant\n<think>"
FULL = """<|im_start|>system
You solve number puzzles. You reason first and then give one expression.<|im_end|>
<|im_start|>user
Reach {target} with the numbers {numbers}. You may add (+), subtract (-), multiply (*) and divide (/), and group with \
parentheses. Every number must be used exactly once. Put your reasoning between <think> and </think>. On the next \
line put the expression alone between <answer> and </answer>, for example <answer> (1 + 2) * 3 </answer>.<|im_end|>
<|im_start|>assistant
Let me work this out.
<think>"""
PROMPTS = {"short": SHORT, "full": FULL}


def encode_prompt(tokenizer: Tokenizer, problem: Problem, form: str) -> list[int]:
    numbers = " " + " ".join(map(str, problem.numbers)) if form == "short" else ", ".join(map(str, problem.numbers))
    text = PROMPTS[form].format(numbers=numbers, target=problem.target)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if b"".join(token_bytes(tokenizer, ids)).decode() != text:
        raise UserError(f"the tokenizer cannot spell the {form} prompt for numbers {problem.numbers} and target "
                        f"{problem.target}: the tiny model knows only the words and numbers it was made with")
    return ids


def score(response: str, numbers, target: int) -> dict[str, float]:
    """reward = 0.1 * format + answer; `reasoning` is on record beside it. Any string gets a score."""
    text = response
    for end in END_OF_TURN:
        if text.endswith(end):
            text = text[:-len(end)]
            break
    if not text.startswith("<think>"):
        text = "<think>" + text
    well_formed = format_score(text)
    answer = float(evaluates_to(between(text, "<answer>", "</answer>"), numbers, target))
    return {"reward": FORMAT_WEIGHT * well_formed + answer, "format": well_formed, "answer": answer,
            "reasoning": reasoning_score(text, numbers)}


def between(text: str, opening: str, closing: str) -> str | None:
    """What stands between the first opening tag and the first closing tag after it."""
    _, found, rest = text.partition(opening)
    content, closed, _ = rest.partition(closing)
    return content if found and closed else None


def format_score(text: str) -> float:
    """Of a text that begins with <think>: 1 for exactly <think>...</think>\\n<answer>...</answer>, every tag once; else 0.1 and 0.5 for the pairs."""
    once = all(text.count(tag.decode()) == 1 for tag in TAGS)
    middle = text.find("</think>\n<answer>")
    if once and middle >= 0 and text.endswith("</answer>"):
        return 1.0
    pairs = [between(text, f"<{name}>", f"</{name}>") is not None for name in ("think", "answer")]
    return 0.1 * pairs[0] + 0.5 * pairs[1]


# a op b = c. The look-ahead lets the c of one step be the a of the next: "3 * 5 = 15 + 7 = 22" is two steps.
STEP = re.compile(r"(?<![0-9])(?=([0-9]{1,9}) {0,2}([-+*/]) {0,2}([0-9]{1,9})"
                  r" {0,2}= {0,2}(-?[0-9]{1,9})(?![0-9]))")


def reasoning_score(text: str, numbers) -> float:
    """Share of the think section's steps `a op b = c` that are right and whose a and b were available:
    given numbers (each as often as given) or results of steps before."""
    think = (between(text, "<think>", "</think>") or "")[:20_000]
    given, results, right, total = Counter(map(int, numbers)), set(), 0, 0
    for match in STEP.finditer(think):
        a, b, c = int(match[1]), int(match[3]), int(match[4])
        available = all(n in results or given[n] >= need for n, need in Counter((a, b)).items())
        true = {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b != 0 and a == b * c}[match[2]]
        right, total = right + (available and true), total + 1
        results.add(c)
    return right / total if total else 0.0


LEXEME = re.compile(r"[ \t\r\n]*([0-9]+|[-+*/()])")
MAX_CHARACTERS, MAX_DEPTH = 400, 30


def evaluates_to(expression: str | None, numbers, target: int) -> bool:
    """Whether the expression uses every number exactly once and equals the target, exactly."""
    if expression is None or len(expression) > MAX_CHARACTERS:
        return False
    expression, lexemes, end = expression.rstrip(" \t\r\n"), [], 0
    while end < len(expression):
        match = LEXEME.match(expression, end)
        if not match:
            return False
        lexemes.append(match[1])
        end = match.end()
    used = [lexeme for lexeme in lexemes if lexeme[0].isdigit()]
    if sorted(used) != sorted(str(int(n)) for n in numbers):
        return False
    try:
        reader = Reader(lexemes)
        return reader.sum(0) == target and not reader.left
    except (SyntaxError, ZeroDivisionError):
        return False


class Reader:
    """Recursive descent: sum = product (+- product)*, product = factor (*/ factor)*, factor = -factor | (sum) | number.

    "2**3" fails because a factor cannot begin with "*", "7//2" likewise.
    """

    def __init__(self, lexemes: list[str]):
        self.left = lexemes[::-1]  # the next one is at the end

    def take(self, *choices: str) -> str | None:
        return self.left.pop() if self.left and self.left[-1] in choices else None

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while operator := self.take("+", "-"):
            other = self.product(depth)
            value = value + other if operator == "+" else value - other
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while operator := self.take("*", "/"):
            other = self.factor(depth)
            value = value * other if operator == "*" else value / other
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH or not self.left:
            raise SyntaxError("nested too deep, or cut off")
        if self.take("-"):
            return -self.factor(depth + 1)
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise SyntaxError("a parenthesis is not closed")
            return value
        if not self.left[-1][0].isdigit():
            raise SyntaxError(f"{self.left[-1]} where a number should be")
        return Fraction(int(self.left.pop()))


def annotate(pieces: list[bytes]) -> tuple[list[int], list[int]]:
    """Section and kind of each token of a response, from one pass over the tokens' bytes.

    think runs to the token before </think> (or before <answer>, if that comes first), answer from the
    first token after the <answer> tag to the token before </answer>. A token that touches a tag is a tag:
    tokenizers cut "<think>" into "<", "think", ">" and glue ">" to a newline.
    """
    text = b"".join(pieces)
    tags = sorted(((m.start(), m.end()) for tag in TAGS for m in re.finditer(re.escape(tag), text)), reverse=True)
    opening = text.find(b"<answer>")
    answer_from = opening + len(b"<answer>") if opening >= 0 else len(text) + 1
    closing = text.find(b"</answer>", answer_from)
    answer_to = closing if closing >= 0 else len(text)
    think_to = min(position for position in (text.find(b"</think>"), opening, len(text)) if position >= 0)
    section, kind, start = [], [], 0
    for piece in pieces:
        end = start + len(piece)
        while tags and tags[-1][1] <= start:  # the next tag is at the end of the list
            tags.pop()
        kind.append(kind_of(piece, bool(tags) and tags[-1][0] < end))
        inside = THINK if start < think_to else ANSWER if answer_from <= start < answer_to else OTHER
        section.append(OTHER if kind[-1] in (TAG, END) else inside)
        start = end
    return section, kind


def kind_of(piece: bytes, touches_tag: bool) -> int:
    if touches_tag:
        return TAG
    text = piece.decode(errors="replace")
    if text in END_OF_TURN:
        return END
    first = text.strip()[:1]
    if not first:
        return SPACE
    if first in "0123456789":
        return NUMBER
    return OPERATOR if first in "+-*/" else BRACKET if first in "()=" else WORD
