"""The teacher, its vocabulary, and the weights of the losses."""
import random
import re

import pytest

from countdown_task import Problem
from lab.engine.tokens import encode_prompt
from lab.tools import demonstrations as teacher
from lab.tools.demonstrations import (HIT, TASK, candidates, preference, demonstration, draw,
                                      make_example, make_tokenizer)
from lab.tools.warmup import RECIPE


def demonstrations(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        problem = TASK.make_problem(rng, held_out=False)
        yield problem, "".join(text for text, _ in demonstration(problem, rng))


def claims_success(text):
    return any(hit.split("{")[0] in text for hit in HIT)


def tries_of(text):
    """The words of each try."""
    return re.split(" last", text.split("<answer>")[0].split("</think>")[0])


def expressions_of(words, problem):
    """Those that the steps of a try compute."""
    steps = tuple((int(a), sign, int(b), int(c)) for a, sign, b, c in
                  re.findall("([0-9]+) ([-+*/]) ([0-9]+) = ([0-9]+)", words))
    of_problem = candidates(tuple(sorted(problem.numbers)))
    return [candidate.expression for candidate in of_problem if candidate.steps == steps]


def test_every_mistake_of_the_teacher_comes_as_often_as_it_says():
    """Verdicts are wrong in 15%, in 35% the answer is another expression, in 8% the form lacks a
    part. Arithmetic is never wrong. After a try that is said to hit no other follows."""
    wrong, other, lapses = [], [], []
    for problem, text in demonstrations(3000):
        assert text.count(" first") == 1 and text.count(" last") <= 1
        assert (" last" in text) != claims_success(text.split(" last")[0])
        lapses.append(TASK.score(problem, text)["format"] < 1)
        for words in tries_of(text):
            _, first, between, second = re.split("(?<== )([0-9]+)", words)[:4]
            assert between.startswith(tuple(teacher.JOINERS))
            value = int(second)
            wrong.append(claims_success(words) != (value == problem.target))
        tried = expressions_of(tries_of(text)[-1], problem)
        assert tried
        answer = re.fullmatch(".*<answer> (.*)</answer><.im_end.>", text, re.DOTALL)
        if answer:
            other.append(answer[1] not in tried)
    assert sum(wrong) / len(wrong) == pytest.approx(0.15, abs=0.02)
    assert sum(other) / len(other) == pytest.approx(0.35, abs=0.03)
    assert sum(lapses) / len(lapses) == pytest.approx(0.08, abs=0.02)


def test_one_token_a_word_tags_in_pieces_and_every_demonstration_can_be_spelled():
    tokenizer, longest = make_tokenizer(), 0
    for problem, text in demonstrations(300):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        longest = max(longest, len(encoded.ids))
        numbers = [int(token) for token in encoded.tokens if token.strip().isdigit()]
        assert numbers == [int(digits) for digits in re.findall("[0-9]+", text)]
        assert encode_prompt(tokenizer, TASK.prompt_for(problem), "")
    assert longest <= RECIPE["max_new_tokens"]
    pieces = tokenizer.encode(" no.</think>\n<answer> 3 + 5</answer>").tokens
    assert pieces == [" no", ".", "</", "think", ">\n", "<", "answer", ">", " 3", " +", " 5", "</",
                      "answer", ">"]


def test_the_teacher_does_not_look_at_the_solution():
    """How likely it tries an expression depends on its distance to the target and on its sums,
    not on hitting it. Aimed: 1 / (0.5 + distance)^2. Others: 4 ^ sums / (20 + distance)."""
    problem = Problem((2, 6), 12)  # values 8 (a sum), 12, 4, 3
    aimed = {8: 1 / 4.5 ** 2, 12: 1 / 0.5 ** 2, 4: 1 / 8.5 ** 2, 3: 1 / 9.5 ** 2}
    others = {8: 4 / 24, 12: 1 / 20, 4: 1 / 28, 3: 1 / 29}
    for candidate in candidates((2, 6)):
        assert preference(candidate, problem, True) == pytest.approx(aimed[candidate.value])
        assert preference(candidate, problem, False) == pytest.approx(others[candidate.value])
    rng = random.Random(0)
    drawn = [draw(problem, [], rng).value for _ in range(20_000)]
    for value in aimed:
        chance = (0.4 * aimed[value] / sum(aimed.values())
                  + 0.6 * others[value] / sum(others.values()))
        assert drawn.count(value) / 20_000 == pytest.approx(chance, abs=0.015)


def test_right_demonstrations_alone():
    """Of 46% in 100 all are right and well formed; the weights fall on the demonstration."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    for _ in range(100):
        ids, weights = make_example(tokenizer, rng, right=True)
        start = weights.index(1.0)
        prompt, text = (tokenizer.decode(part, skip_special_tokens=False)
                        for part in (ids[:start], ids[start:]))
        *numbers, target = map(int, re.findall("[0-9]+", prompt))
        scores = TASK.score(Problem(tuple(numbers), target), text)
        assert scores["answer"] == scores["format"] == 1
