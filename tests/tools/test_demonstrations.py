"""The teacher, its vocabulary, and the weights of the losses."""
import random
import re

import pytest

from countdown_task import Problem, held_out, score
from engine.tokens import encode_prompt
from tools.demonstrations import (HIT, ORDINALS, TASK, candidates, demonstration, make_tokenizer,
                                  order_of_tries)
from tools.warmup import RECIPE


def demonstrations(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        problem = TASK.make_problem(rng, lambda p: not held_out(p))
        yield problem, "".join(text for text, _ in demonstration(problem, rng))


def test_demonstrations_are_well_formed_right_and_honest():
    claims = solved = 0
    for problem, text in demonstrations(300):
        result = score(text, problem.numbers, problem.target)
        claim = any(hit.split("{")[0] in text for hit in HIT)
        assert result["format"] == 1 and result["reasoning"] == 1 and result["answer"] == claim
        claims, solved = claims + claim, solved + result["answer"]
    assert 0.3 < solved / 300 < 0.6 and claims == solved


def test_one_token_a_word_and_every_demonstration_can_be_spelled():
    tokenizer, longest = make_tokenizer(), 0
    for problem, text in demonstrations(300):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
        longest = max(longest, len(encoded.ids))
        numbers = [int(token) for token in encoded.tokens if token.strip().isdigit()]
        assert numbers == [int(digits) for digits in re.findall("[0-9]+", text)]
        assert encode_prompt(tokenizer, TASK.prompt_for(problem), "")
    assert longest <= RECIPE["max_new_tokens"]


def test_the_loss_weights_fall_on_results_verdicts_and_answers():
    """Weight 4 on two results a try, 6 on its verdict, 2 on its count and on the answer."""
    pieces = demonstration(Problem((3, 5, 7), 22), random.Random(1))
    by_weight = {weight: [text for text, w in pieces if w == weight] for weight in (4, 6, 2)}
    tries = len(by_weight[6])
    assert tries >= 1
    assert len(by_weight[4]) == 2 * tries
    assert all(text.strip().isdigit() for text in by_weight[4])
    assert by_weight[2][:-1] == ORDINALS[:tries]
    assert by_weight[2][-1].endswith("</answer><|im_end|>")


def test_candidates_of_two_numbers_by_hand():
    values = {c.expression: c.value for c in candidates((2, 6))}
    assert values == {"6 + 2": 8, "6 * 2": 12, "6 - 2": 4, "6 / 2": 3}


def test_the_teacher_does_not_look_at_the_solution():
    """How likely it tries an expression first depends on the distance to the target alone, not on
    hitting it: at 10 + distance, a hit is twice as likely as a miss by 10."""
    rng, first = random.Random(0), []
    problem = Problem((2, 6), 12)  # values 8, 12, 4, 3: weights 1/14, 1/10, 1/18, 1/19
    for _ in range(20_000):
        first.append(order_of_tries(problem, rng)[0].value)
    weights = {8: 1 / 14, 12: 1 / 10, 4: 1 / 18, 3: 1 / 19}
    for value, weight in weights.items():
        assert first.count(value) / 20_000 == pytest.approx(weight / sum(weights.values()),
                                                            abs=0.015)
