"""A data set of your own: questions with answers that a program can check.

    {"question": "Tom has 14 eggs and buys 28. How many has he?", "answer": "14 + 28 = 42 #### 42"}
    {"prompt": "What is half of 84? End with #### and the number.", "answer": 42}

A file has a line of JSON for each. The answer is what stands after ####, as in GSM8K (2110.14168),
or within \\boxed{}, or else the whole text; what stands before it is a solution, which --examples
shows. To a `question` a sentence is added that says how the answer should end. A `prompt` is asked
as it is. A real model is needed, because models/tiny knows hardly any words:

    python train.py --model models/Qwen2.5-0.5B-Instruct --task examples.question_answer \\
        --data train.jsonl --max_new_tokens 256

--match says when two answers are the same:

    number   #### 42, #### $42.00 and #### 42 eggs. are the same number
    exact    the same text, whatever its case and spaces are
    boxed    \\boxed{\\frac{1}{2}}: the same formula without its spaces, or the same number

The prompt is what the chat template of the model's folder makes of the messages. A folder without
one gets Qwen's format, without a message of the system.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --task examples.question_answer --model "
                     "FOLDER --data FILE")
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from countdown_task import kind_of
from lab.engine.errors import UserError
from lab.engine.tokens import ANSWER, END, NUMBER, OTHER, SPACE, THINK, WORD, without_end_of_turn
from lab.harness.chat_template import Message, chat_template, prompt_of
from lab.harness.flags import option
from lab.harness.record import read_given

MARK, BOX = "####", "\\boxed{"
EXPECTED = '{"question": "...", "answer": "..."}, or "prompt" in the place of "question"'
ASKS = {  # added to a question
    "number": "Give the steps in one line, then #### and the number.",
    "exact": "Give the steps in one line, then #### and the answer.",
    "boxed": "Reason step by step, and put the final answer within \\boxed{}."}
# 42, -1,250, +.5 and $7.50, alone or before a unit, % or the end of a sentence; neither 3,4 nor
# 1/2, 12:30, 5^2, 3 1/2 and 7 or 8, which are read as no number instead of as a wrong one
NUMBER_FIRST = re.compile(
    r"([-+\u2212]?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,15})(?:\.[0-9]{1,9})?|\.[0-9]{1,9}))"
    r"(?:\s*\\?%)?((?:[.,]?|[.,]?\s+[^\W\d_].*|(?:\\text\{\s*)?[^\W\d_].*))")


@dataclass(frozen=True)
class Problem:
    prompt: str    # what the user says
    solution: str  # in one line, without the answer; empty if the file has none
    answer: str


@dataclass
class Task:
    """The questions of a file; its fields are flags of train.py."""
    data: str | None = option(None, "file of questions, a line of JSON with question and answer "
                              "each")
    match: str = option("number", "when an answer is right. number: its number is that of the "
                        "file. exact: it is the same text. boxed: it is the same formula, within "
                        "\\boxed{}", choices=ASKS)
    examples: int = option(0, "number of solved questions of the file that stand in the prompt as "
                           "earlier turns. They are not trained on", most=20)

    solved = "the answer is that of the file"

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("--task examples.question_answer needs --data FILE, with a line of "
                            f"JSON for each question: {EXPECTED}")
        self.folder: Path | None = None  # of the model, if it has a chat template
        self.rewarded = f"right answer ({self.match})"
        # the fifth with the lowest hashes is held out: the same in every run
        by_hash: dict[str, Problem] = {}
        for problem in read_given(self.data, "questions", self.parse):
            # of what is shown, so that twins with other white space are on one side
            key = hashlib.sha256(self.show(problem).encode(errors="surrogatepass")).hexdigest()
            if by_hash.setdefault(key, problem).answer != problem.answer:
                raise UserError(f"{self.data} has two answers to {problem.prompt[:80]!r}: "
                                f"{by_hash[key].answer[:40]!r} and {problem.answer[:40]!r}")
        every = [by_hash[key] for key in sorted(by_hash)]
        count = -(-len(every) // 5)  # rounded up
        self.to_test, others = every[:count], every[count:]
        self.shown = random.Random("examples").sample(others, min(self.examples, len(others)))
        self.to_train = [problem for problem in others if problem not in self.shown]
        if not self.to_train:
            raise UserError(f"{self.data} has {len(every)} different questions, of which {count} "
                            f"are held out and --examples {self.examples} are shown: none is left "
                            "to train on")

    def parse(self, line: str, where: str) -> Problem:
        """The problem in a line of the file; `where` names the line in the message."""
        try:
            raw = json.loads(line)
            question = raw.get("question", raw.get("prompt"))
            answer = raw["answer"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            question = answer = None
        is_answer = isinstance(answer, str | int | float) and not isinstance(answer, bool)
        if not isinstance(question, str) or not question.strip() or not is_answer:
            raise UserError(f"{where}: expected {EXPECTED}, got {line[:80]!r}")
        text = str(answer)
        final = final_answer(text)
        solution = text.partition(MARK)[0] if final is not None else ""
        final = text.strip() if final is None else final
        if self.value_of(final) is None:
            raise UserError(f"{where}: --match {self.match} finds no answer in {text[:80]!r}; "
                            "--match exact compares any text")
        solution = re.sub("<<[^>]*>>", "", solution)  # GSM8K's notes for a calculator
        if "question" in raw:
            question = f"{question.strip()} {ASKS[self.match]}"
        return Problem(question, " ".join(solution.split()), final)

    def of_model(self, folder: Path) -> None:
        """Called once, with the folder of the model."""
        self.folder = folder if chat_template(folder) else None

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        """The problems of a step, which follow from seed and step alone."""
        return random.Random(f"train {seed} {step}").choices(self.to_train, k=count)

    def held_out_problems(self, count: int) -> list[Problem]:
        return self.to_test[:count]

    def extreme_problems(self) -> list[Problem]:
        """Problems with the longest prompts."""
        every = self.to_train + self.to_test
        return sorted(every, key=lambda problem: -len(problem.prompt))[:20]

    def prompt_for(self, problem: Problem) -> str:
        messages: list[Message] = []
        for shown in self.shown:
            messages += [{"role": "user", "content": shown.prompt},
                         {"role": "assistant", "content": self.written_out(shown)}]
        messages.append({"role": "user", "content": problem.prompt})
        if self.folder:
            return prompt_of(messages, self.folder)
        turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
        return f"{''.join(turns)}<|im_start|>assistant\n"

    def written_out(self, problem: Problem) -> str:
        """A solved question as the model should answer it."""
        if self.match == "boxed":
            return f"{problem.solution} {BOX}{problem.answer}}}".lstrip()
        return f"{problem.solution} {MARK} {problem.answer}".lstrip()

    def show(self, problem: Problem) -> str:
        return " ".join(problem.prompt.removesuffix(ASKS[self.match]).split())

    def read(self, words: list[str]) -> Problem:
        """The question of the file that somebody has typed for lab sample."""
        for problem in self.to_test + self.to_train:
            if self.show(problem) == " ".join(words):
                return problem
        raise UserError(f"{' '.join(words)!r:.80} is no question of {self.data}; "
                        f"{self.show(self.to_test[0])!r} is one")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """1 for the right answer. The format is right if there is an answer that can be read, after
        one mark or in one box."""
        text = without_end_of_turn(text)
        final = final_answer(text, is_boxed=self.match == "boxed")
        value = None if final is None else self.value_of(final)
        is_right = value is not None and value == self.value_of(problem.answer)
        is_formed = value is not None and text.count(MARK) + text.count(BOX) == 1
        return {"reward": float(is_right), "format": float(is_formed), "answer": float(is_right),
                "reasoning": 0.0}

    def value_of(self, final: str) -> str | Fraction | None:
        """What two answers are compared by; None if there is none."""
        return MATCHES[self.match](final)

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        """The steps are the thinking, and what follows the mark or the box is the answer."""
        sections, kinds, so_far = [], [], b""
        for piece in pieces:
            kind = kind_of(piece.decode(errors="replace"))
            kinds.append(kind)
            after = MARK.encode() in so_far or BOX.encode() in so_far
            section = ANSWER if after and kind in (NUMBER, SPACE, WORD) else THINK
            is_mark = b"#" in piece or b"boxed" in piece
            sections.append(OTHER if kind == END or is_mark else section)
            so_far += piece
        return sections, kinds


def final_answer(text: str, is_boxed: bool = False) -> str | None:
    """The answer that a text ends with: the rest of the line after the first mark, or if there is
    none the content of the last box. `is_boxed` looks for the box first."""
    after = text.partition(MARK)[2].strip().split("\n")[0] if MARK in text else None
    boxed = in_box(text)
    first, second = (boxed, after) if is_boxed else (after, boxed)
    return second if first is None else first


def in_box(text: str) -> str | None:
    """The content of the last \\boxed{}; None if there is none that is closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    inside = text[start + len(BOX):]
    for place, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return inside[:place].strip()
    return None


def number_of(final: str) -> Fraction | None:
    """The number that an answer begins with, whatever unit follows; None if it has none. The marks
    of bold text and of formulas may stand around it."""
    text = final.partition(MARK)[0].replace("\\$", "$").lstrip("*$\\( ").rstrip("*$\\)} ")
    found = NUMBER_FIRST.fullmatch(text)
    if not found or any(character.isnumeric() for character in found[2]):
        return None
    return Fraction(found[1].replace(",", "").replace("$", "").replace("\u2212", "-"))


def plain_text(final: str) -> str | None:
    """The text in small letters, with single spaces, without quotes, bold type or a full stop."""
    return " ".join(final.lower().split()).strip("*\"'`. ") or None


def formula_of(final: str) -> str | Fraction | None:
    """A formula without its spaces, or its number if it is nothing else."""
    text = re.sub(r"\\left|\\right|\\[,!; ]|\s|\$", "", final)
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").rstrip(".")
    is_number = re.fullmatch(r"[-+\u2212]?[0-9,]*\.?[0-9]+", text)
    return (number_of(text) if is_number else None) or text or None


MATCHES: dict[str, Callable[[str], str | Fraction | None]] = {
    "number": number_of, "exact": plain_text, "boxed": formula_of}
