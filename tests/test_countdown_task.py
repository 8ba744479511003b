"""Problems, reward and labels. Nothing a model writes is executed, and every string gets a
score."""
import re
from fractions import Fraction

import pytest

from countdown_task import (SECTIONS, Problem, Task, evaluates_to, is_held_out, read_expression)
from properties import (AFTER, PARTS_OF_AN_ANSWER, TAGS, answers_in_parts, any_strings, cuts, draw,
                        given, in_words)

TINY = dict(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)

GOOD = " 3 * 5 = 15, 15 + 7 = 22 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer>"

PROBLEM = Problem((3, 5, 7), 22)


def score(text):
    return Task().score(PROBLEM, text)


@pytest.mark.parametrize("text, form, right", [
    (GOOD, 1.0, 1), ("<think>" + GOOD, 1.0, 1), ("", 0.0, 0), ("hm</think>", 0.1, 0),
    (GOOD + "<|im_end|>", 1.0, 1), (GOOD + "<|endoftext|>", 1.0, 1), (GOOD + "\n", 0.6, 1),
    (GOOD + "<|im_end|><|im_end|>", 0.6, 1), (GOOD.replace("</think>\n", "</think>"), 0.6, 1),
    ("<answer>3*5+7</answer>", 0.5, 1), ("</answer><answer>3*5+7</answer></think>", 0.6, 1),
    ("hm</think>\n<answer>3*5+7", 0.1, 0),  # never closed
    ("x</think>\n<answer>1</answer><answer>3*5+7</answer>", 0.6, 0),  # the first one counts
    ("hm</think>\n<answer>3*5+7</answer><answer>1</answer>", 0.6, 1)])
def test_format_and_answer(text, form, right):
    result = score(text)
    assert (result["format"], result["answer"]) == (form, right)
    assert result["reward"] == pytest.approx(0.1 * form + right)

WRONG_USE = [("35", (3, 5), 35), ("3_0", (30,), 30), ("03", (3,), 3)]

NO_EXPRESSION = [
    "3+5=8", "3+5;", "3.0+5", "3e0+5", "0x3+5", "int(3)+5", "__import__('os')", "a+3", "\u0663+5",
    "\uff13+5", "3\u00d75", "3\u00a0+5", "3\x00+5", "\ud800", "(" * 5000 + "3" + ")" * 5000,
    "-" * 5000 + "3", "(" * 201 + "3" + ")" * 201, "9" * 10_000, "1+" * 5000 + "1"]

NUMBERS = ["0", "1", "2", "3", "7", "8", "12", "100", "00", "03"]

PARTS = [*NUMBERS, "+", "-", "*", "/", "**", "//", "(", ")", "()", " ", "\t\n"]


class Reader:
    """An expression read from left to right, one function for each rule of the grammar:

    sum = product, then + or - and a product, any number of times
    product = factor, then * or / and a factor, any number of times
    factor = - factor, or a number, or ( sum )
    """

    def __init__(self, text):
        self.words = re.findall("[0-9]+|[^ \t\r\n]", text)

    def value(self):
        """A fraction, or None of what is no expression, or divides by zero."""
        try:
            value = self.sum()
        except (LookupError, ValueError, ZeroDivisionError):
            return None
        return None if self.words else value

    def is_next(self, words):
        return bool(self.words) and self.words[0] in words

    def sum(self):
        value = self.product()
        while self.is_next("+-"):
            sign = {"+": 1, "-": -1}[self.words.pop(0)]
            value += sign * self.product()
        return value

    def product(self):
        value = self.factor()
        while self.is_next("*/"):
            is_product = self.words.pop(0) == "*"
            factor = self.factor()
            value = value * factor if is_product else value / factor
        return value

    def factor(self):
        word = self.words.pop(0)
        if word == "-":
            return -self.factor()
        if word == "(":
            value = self.sum()
            if self.words.pop(0) != ")":
                raise ValueError("not closed")
            return value
        if word[0] == "0" and int(word):
            raise ValueError("03 is no number, though 0 and 00 are")
        return Fraction(word)


@draw.composite
def expressions(choose, depth=4):
    """Right ones, as a list of parts."""
    if depth == 0 or choose(draw.integers(0, 3)) == 0:
        return [choose(draw.sampled_from(NUMBERS[:-1]))]
    inner = expressions(depth - 1)
    if choose(draw.integers(0, 4)) == 0:
        return ["-", *choose(inner)]
    parts = [*choose(inner), choose(draw.sampled_from("+-*/")), *choose(inner)]
    return ["(", *parts, ")"] if choose(draw.booleans()) else parts

SPACES = draw.sampled_from(["", " ", "\n", "\r\n \t"])


@given(expressions(), SPACES, draw.data())
def test_a_right_expression_uses_its_numbers_once_and_has_its_value(parts, space, data):
    text = space.join(parts)
    value = Reader(text).value()
    assert read_expression(text) == value
    digits = [int(part) for part in parts if part.isdigit()]
    if value is None or "00" in parts:  # a division by zero, or no way to write a number
        return
    numbers = data.draw(draw.permutations(digits))
    assert evaluates_to(text, numbers, value) and not evaluates_to(text, numbers, value + 1)
    for others in (numbers[1:], [*numbers, 3], [numbers[0] + 1, *numbers[1:]]):
        assert not evaluates_to(text, others, value)


@given(expressions(), SPACES, draw.lists(draw.sampled_from(PARTS), max_size=8))
def test_what_is_no_expression_has_no_value(parts, space, any_parts):
    """A part is left out, doubled, or another operator, wherever it is; or any parts in a row.
    What is an expression all the same has the value that the reader finds."""
    texts = [any_parts]
    for place, part in enumerate(parts):
        before, behind = parts[:place], parts[place + 1:]
        texts += [[*before, *behind], [*before, part, part, *behind]]
        if part in "+-*/":
            texts += [[*before, other, *behind] for other in ("**", "//", "+", "")]
    for one in texts:
        text = space.join(one)
        assert read_expression(text) == Reader(text).value(), text


def test_the_expression_reader():
    for expression, numbers, target in WRONG_USE:
        assert not evaluates_to(expression, numbers, target), expression
    for expression in NO_EXPRESSION:
        digits = [int(run) for run in re.findall("[0-9]{1,4}", expression)]
        for target in (0, 1, 3, 8, 15, 5001):
            assert not evaluates_to(expression, digits, target), expression[:20]
    deepest = "(" * 199 + "3" + ")" * 199, "-" * 398 + "3"
    assert {*map(read_expression, deepest)} <= {3, None}  # None where Python's parser gives up


def test_any_string_gets_a_score():
    for text in any_strings():
        result = score(text)
        assert 0 <= result["format"] <= 1 and result["answer"] in (0, 1)


def test_problems_follow_from_seed_and_step():
    drawn = [tuple(Task(**TINY).training_problems(seed, step, 8))
             for seed, step in ((0, 1), (0, 1), (1, 1), (1, 2))]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_which_fifth_is_held_out():
    """Another fifth would be problems that models/tiny was made with. README and the
    page of its run show these: four that were evaluated, two that were trained on."""
    kept = [((2, 13, 9), 24), ((6, 8, 14), 34), ((4, 12, 10), 18), ((12, 9, 3), 9)]
    assert all(is_held_out(Problem(*asked)) for asked in kept)
    assert not is_held_out(Problem((12, 12, 11), 12)) and not is_held_out(Problem((11, 3, 9), 96))


def test_nothing_evaluated_was_ever_trained_on():
    problems = Task(**TINY)
    trained = {p for step in range(50) for p in problems.training_problems(0, step, 16)}
    evaluated = problems.held_out_problems(300)
    assert not any(map(is_held_out, trained)) and all(map(is_held_out, evaluated))
    assert len({(tuple(sorted(p.numbers)), p.target) for p in evaluated}) == 300
    assert evaluated == Task(**TINY).held_out_problems(300)


def letter_by_letter(parts):
    """The section that each letter is in, and the kind of text it is part of."""
    place, sections, kinds = "think", [], []
    for part in parts:
        kind = "tag" if part in TAGS else PARTS_OF_AN_ANSWER.get(part, "end")
        for letter in part:
            sections.append(place if place in SECTIONS else "other")
            kinds.append("space" if letter.isspace() else kind)
        place = AFTER.get((place, part), place)
    return sections, kinds


@given(answers_in_parts(), draw.data())
def test_sections_and_kinds_follow_from_the_letters_of_a_token(parts, data):
    """A token that touches a tag is a tag; otherwise its first letter has its section, and its
    first that is no space its kind."""
    text, sections, kinds = "".join(parts), *letter_by_letter(parts)
    ends = [match.span() for match in re.finditer(r"<\|\w+\|>", text)]  # tokens of their own
    pieces = cuts(text, data.draw, whole=ends)
    start, labels = 0, []
    for piece in pieces:
        its_kinds = kinds[start:start + len(piece)]
        others = [kind for kind in its_kinds if kind != "space"]
        kind = "tag" if "tag" in its_kinds else others[0] if others else "space"
        section = "other" if kind in ("tag", "end") else sections[start]
        labels.append(f"{section} {kind}")
        start += len(piece)
    assert in_words(Task().label(pieces)) == labels
