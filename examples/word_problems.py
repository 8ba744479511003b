"""A task with words: small problems told in sentences. The answer is a number after ####.

    Mia has 14 apples. Tom has twice as many. How many apples do they have together?
    "Tom has 2 * 14 = 28. Together 14 + 28 = 42. #### 42<|im_end|>"
    -> {"reward": 1.0, "format": 1.0, "answer": 1.0, "reasoning": 0.0}

This is the form of GSM8K (2110.14168), whose file it reads, too: lines with `question`, and with
`answer` ending in "#### 42". A real model is needed, because models/tiny knows no such words:

    python train.py --model models/Qwen2.5-0.5B-Instruct --task examples.word_problems
    python train.py --model models/Qwen2.5-0.5B-Instruct --task examples.word_problems \\
        --file train.jsonl --max_new_tokens 256
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --task examples.word_problems --model FOLDER")
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import UserError
from engine.tokens import ANSWER, END, NUMBER, OTHER, SPACE, THINK, WORD, without_end_of_turn
from countdown_task import kind_of
from harness.flags import option
from harness.record import read_given

NAMES = ("Mia", "Tom", "Ada", "Ben", "Lea", "Sam", "Eva", "Max")
THINGS = ("apples", "books", "coins", "eggs", "stamps", "pens", "shells", "cards")
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PROMPT = ("<|im_start|>user\n{question} Give the steps in one line, then #### and the number."
          "<|im_end|>\n<|im_start|>assistant\n")
MARK = "####"
# 42, 1,250 and 7.00, also at the end of a sentence; neither 7.5 nor 3,4
NUMBER_AFTER_MARK = re.compile(
    r"#### *\$?(-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,15}))(?:\.0+)?(?![.,]?[0-9])")
MAX_DRAWS = 100_000  # of held-out problems


@dataclass(frozen=True)
class Problem:
    question: str
    steps: str    # a solution in one line, without the mark
    result: int


def together(rng: random.Random) -> Problem:
    one, two = rng.sample(NAMES, 2)
    thing, count, times = rng.choice(THINGS), rng.randint(3, 20), rng.choice(list(TIMES))
    more = times * count
    return Problem(
        f"{one} has {count} {thing}. {two} has {TIMES[times]} as many. How many {thing} do they "
        "have together?",
        f"{two} has {times} * {count} = {more}. Together {count} + {more} = {count + more}.",
        count + more)


def change(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    price, count = rng.randint(2, 9), rng.randint(2, 9)
    cost = price * count
    paid = cost + rng.randint(1, 20)
    return Problem(
        f"{name} buys {count} {thing} for {price} dollars each and pays with {paid} dollars. How "
        "many dollars does the shop give back?",
        f"They cost {count} * {price} = {cost}. Back come {paid} - {cost} = {paid - cost}.",
        paid - cost)


def shared(rng: random.Random) -> Problem:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    friends, each = rng.randint(2, 9), rng.randint(3, 12)
    given = rng.randint(1, each - 1)
    return Problem(
        f"{name} shares {friends * each} {thing} equally among {friends} friends. One of them "
        f"gives away {given}. How many {thing} does that friend have left?",
        f"Each gets {friends * each} / {friends} = {each}. Left are {each} - {given} = "
        f"{each - given}.", each - given)


def pages(rng: random.Random) -> Problem:
    name, daily, days = rng.choice(NAMES), rng.randint(3, 15), rng.randint(2, 9)
    left = rng.randint(5, 60)
    read = daily * days
    return Problem(
        f"{name} reads {daily} pages a day for {days} days. The book has {read + left} pages. How "
        "many pages are left?",
        f"Read are {daily} * {days} = {read}. Left are {read + left} - {read} = {left}.", left)


STORIES: tuple[Callable[[random.Random], Problem], ...] = (together, change, shared, pages)


@dataclass
class Task:
    """Problems told in sentences; its fields are flags of train.py."""
    file: str | None = option(None, "file of problems in the form of GSM8K, a line of JSON with "
                              "question and answer each. Without it problems are made")
    examples: int = option(4, "number of solved problems in the prompt", most=20)

    solved = "the number after #### is the right one"
    rewarded = "right number after ####"

    def __post_init__(self) -> None:
        found = read_given(self.file, "problems", parse_problem) if self.file else []
        self.to_train = [problem for problem in found if not is_held_out(problem)]
        self.to_test = [problem for problem in found if is_held_out(problem)]
        if self.file and not (self.to_train and self.to_test):
            raise UserError(f"{self.file} is too small: about a fifth of the problems is held out, "
                            "and some of both kinds are needed")
        self.shown: set[str] = set()  # the questions that every prompt solves: not trained on
        self.head = ""                # the text that every prompt begins with
        rng = random.Random("examples")
        for _ in range(self.examples):
            problem = self.draw(rng, wanted_held_out=False)
            self.head += (f"{PROMPT.format(question=problem.question)}{problem.steps} {MARK} "
                          f"{problem.result}<|im_end|>\n")
            self.shown.add(problem.question)
            self.to_train = [other for other in self.to_train if other.question not in self.shown]
            if self.file and not self.to_train:
                raise UserError(f"--examples {self.examples}: {self.file} has no other problems to "
                                "train on than those that the prompt shows as examples")

    def draw(self, rng: random.Random, wanted_held_out: bool) -> Problem:
        if self.file:
            return rng.choice(self.to_test if wanted_held_out else self.to_train)
        while True:
            problem = rng.choice(STORIES)(rng)
            if is_held_out(problem) == wanted_held_out and problem.question not in self.shown:
                return problem

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems of a step, which follow from seed and step alone."""
        rng = random.Random(f"train {seed} {step}")
        return [self.draw(rng, wanted_held_out=False) for _ in range(count)]

    def held_out_problems(self, count: int) -> list[Problem]:
        """Distinct problems, the same in every run; fewer than `count` if no more are found."""
        rng = random.Random("held out")
        problems: dict[str, Problem] = {}
        for _ in range(min(20 * count, MAX_DRAWS)):
            problem = self.draw(rng, wanted_held_out=True)
            problems.setdefault(problem.question, problem)
            if len(problems) == count:
                break
        return list(problems.values())

    def extreme_problems(self) -> list[Problem]:
        """Problems with the longest prompts."""
        known = self.to_train + self.to_test or self.training_problems(0, 0, 100)
        return sorted(known, key=lambda problem: -len(problem.question))[:20]

    def prompt_for(self, problem: Problem) -> str:
        return self.head + PROMPT.format(question=problem.question)

    def show(self, problem: Problem) -> str:
        return problem.question

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """1 for the right number after the mark. The format is right if the mark stands there once
        and a number ends the answer."""
        answer = without_end_of_turn(text)
        found = number_after_mark(answer)
        well_formed = answer.count(MARK) == 1 and bool(
            NUMBER_AFTER_MARK.fullmatch(answer[answer.index(MARK):].rstrip(" .\n")))
        right = float(found == problem.result)
        return {"reward": right, "format": float(well_formed), "answer": right, "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        """The steps are the thinking, and what follows the mark is the answer."""
        sections, kinds, so_far = [], [], b""
        for piece in pieces:
            kind = kind_of(piece)
            kinds.append(kind)
            after = MARK.encode() in so_far
            section = ANSWER if after and kind in (NUMBER, SPACE, WORD) else THINK
            is_mark = b"#" in piece
            sections.append(OTHER if kind == END or is_mark else section)
            so_far += piece
        return sections, kinds


def number_after_mark(text: str) -> int | None:
    """The number after the first mark; None if there is none. Thousands may have commas."""
    found = NUMBER_AFTER_MARK.search(text)
    return int(found[1].replace(",", "")) if found else None


def parse_problem(line: str, where: str) -> Problem:
    """The problem in a line of GSM8K; `where` names the line in the message."""
    try:
        raw = json.loads(line)
        question, answer = raw["question"], raw["answer"]
        result = number_after_mark(answer) if isinstance(answer, str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        question = answer = result = None
    if not isinstance(question, str) or result is None:
        raise UserError(f'{where}: expected {{"question": "...", "answer": "... #### 42"}}, got '
                        f"{line[:80]!r}")
    steps = re.sub("<<[^>]*>>", "", answer.partition(MARK)[0])  # its notes for a calculator
    return Problem(" ".join(question.split()), " ".join(steps.split()), result)


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is only evaluated: a hash of its question chooses a fifth."""
    digest = hashlib.sha256(problem.question.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 5 == 0
