"""A data set of your own: questions with answers that a program can check.

    {"question": "Tom has 14 eggs and buys 28. How many has he?", "answer": "14 + 28 = 42 #### 42"}
    {"prompt": "What is half of 84? End with #### and the number.", "answer": 42}

A file has a line of JSON for each, or is a .parquet file with these columns. The answer is what
stands after ####, as in GSM8K (2110.14168), or within \\boxed{}, or else the whole text; what
stands before it is a solution, which --examples shows. To a `question` or a `problem` a sentence is
added that says how the answer should end. A `prompt` is asked as it is; it is a text or a list of
messages. A real model is needed, because models/tiny knows hardly any words:

    python -m lab train --task examples.question_answer \\
        --model models/Qwen2.5-Coder-0.5B-Instruct --data train.jsonl \\
        --config lab/recipes/laptop.json --lora 1 --max_new_tokens 256

--match says when two answers are the same:

    number   #### 42, #### $42.00 and #### 42 eggs. are the same number
    exact    the same text, whatever its case and spaces are
    boxed    \\boxed{\\frac{1}{2}}: the same formula without its spaces, or the same number

The chat template of the model's folder makes the prompt.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab train --task examples.question_answer --model "
                     "FOLDER --data FILE")
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any

from countdown_task import kind_of
from lab.engine.declared import Range
from lab.engine.errors import UserError
from lab.engine.tokens import ANSWER, END, NUMBER, OTHER, SPACE, THINK, WORD, without_end_of_turn
from lab.harness.chat_template import Message, is_messages
from lab.harness.record import find_folder, read_given
from lab.harness.short_task import hash_of

MARK, BOX = "####", "\\boxed{"
EXPECTED = ('{"question": "...", "answer": "..."}, or "problem" or "prompt" in the place of '
            '"question" and "solution" in that of "answer"')
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

Data = Annotated[str, Range(text="file of questions: .parquet, or a line of JSON with question "
                            "and answer each")]
Match = Annotated[str, Range(choices=tuple(ASKS), text="when an answer is right. number: its "
                             "number is that of the file. exact: it is the same text. boxed: it is "
                             "the same formula, within \\boxed{}")]
Shown = Annotated[int, Range(text="number of solved questions of the file that stand in the prompt "
                             "as earlier turns. They are not trained on", most=20)]
Row = dict[str, Any]  # messages, solution, answer, and `match`, which says when one is right


def problems(*, data: Data = "", match: Match = "number", examples: Shown = 0) -> list[Row]:
    """The questions of a file. Those that differ by white space alone are one."""
    if not data:
        raise UserError("--task examples.question_answer needs --data FILE, with a line of "
                        f"JSON for each question: {EXPECTED}")
    by_question: dict[str, Row] = {}
    for row in rows_of(data, match):
        known = by_question.setdefault(show(row), row)
        if known["answer"] != row["answer"]:
            raise UserError(f"{data} has two answers to {show(row)[:80]!r}: "
                            f"{known['answer'][:40]!r} and {row['answer'][:40]!r}")
    # the first fifth is held out, so the last ones are shown
    rows = sorted(by_question.values(), key=lambda row: hash_of(show(row)))
    count = len(rows) - examples
    if count < 2:
        raise UserError(f"{data} has {len(rows)} different questions, of which --examples "
                        f"{examples} are shown. One is needed to train on, another to evaluate")
    turns: list[Message] = []
    for row in rows[count:]:
        turns += [*row["messages"], {"role": "assistant", "content": written_out(row)}]
    return [{**row, "prompt": [*turns, *row["messages"]]} for row in rows[:count]]


def rows_of(data: str, match: str) -> list[Row]:
    if data.endswith((".csv", ".tsv", ".xlsx")):
        raise UserError(f"--data {data}: only lines of JSON and .parquet are read. Python's csv "
                        "and json make lines of JSON of a table")
    if not data.endswith(".parquet"):
        return read_given(data, "questions", lambda line, where: parsed(line, where, match))
    try:
        from pyarrow.parquet import read_table
    except ModuleNotFoundError:
        raise UserError("a .parquet file needs a package: pip install pyarrow") from None
    try:
        rows = read_table(find_folder(data)).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors are such
        raise UserError(f"cannot read {data}: {error}") from None
    return [parsed(row, f"{data}, row {n}", match) for n, row in enumerate(rows, 1)]


def parsed(line: Any, where: str, match: str) -> Row:
    """The problem in a line of the file, or in a row; `where` names it in the message."""
    name, question, answer = "", None, None
    try:
        raw = json.loads(line) if isinstance(line, str) else line
        name = next(known for known in ("question", "problem", "prompt") if known in raw)
        question, answer = raw[name], raw.get("answer", raw.get("solution"))
        if "reward_model" in raw:  # as in the files of verl
            answer = raw["reward_model"]["ground_truth"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StopIteration):
        question = None
    if isinstance(question, str) and question.strip():
        asked = question if name == "prompt" else f"{question.strip()} {ASKS[match]}"
        question = [{"role": "user", "content": asked}]
    is_answer = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    if not is_messages(question) or not is_answer:
        raise UserError(f"{where}: expected {EXPECTED}, got {str(line)[:80]!r}")
    text = str(answer)
    final = final_answer(text)
    solution = text.partition(MARK)[0] if final is not None else ""
    final = text.strip() if final is None else final
    if MATCHES[match](final) is None:
        raise UserError(f"{where}: --match {match} finds no answer at the start of {final[:80]!r}; "
                        "--match exact compares any text")
    solution = re.sub("<<[^>]*>>", "", solution)  # GSM8K's notes for a calculator
    return {"messages": question, "solution": " ".join(solution.split()), "answer": final,
            "match": match}


def written_out(row: Row) -> str:
    """A solved question as the model should answer it."""
    last = f"{BOX}{row['answer']}}}" if row["match"] == "boxed" else f"{MARK} {row['answer']}"
    return f"{row['solution']} {last}".lstrip()


def show(problem: Row) -> str:
    question = str(problem["messages"][-1]["content"])
    return " ".join(question.removesuffix(ASKS[problem["match"]]).split())


def score(problem: Row, text: str) -> dict[str, float]:
    """1 for the right answer. The format is right if there is an answer that can be read, after
    one mark or in one box."""
    value_of, text = MATCHES[problem["match"]], without_end_of_turn(text)
    final = final_answer(text, is_boxed=problem["match"] == "boxed")
    value = None if final is None else value_of(final)
    is_right = value is not None and value == value_of(problem["answer"])
    is_formed = value is not None and text.count(MARK) + text.count(BOX) == 1
    return {"reward": float(is_right), "format": float(is_formed), "answer": float(is_right),
            "reasoning": 0.0}


def reward(problem: Row, text: str) -> float:
    return score(problem, text)["reward"]


def label(pieces: list[str]) -> tuple[list[int], list[int]]:
    """The steps are the thinking, and what follows the mark or the box is the answer."""
    sections, kinds, so_far = [], [], ""
    for piece in pieces:
        kind = kind_of(piece)
        kinds.append(kind)
        after = MARK in so_far or BOX in so_far
        section = ANSWER if after and kind in (NUMBER, SPACE, WORD) else THINK
        is_mark = "#" in piece or "boxed" in piece
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
