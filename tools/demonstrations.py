"""What the tiny model learned from: a teacher, its vocabulary, its demonstrations in batches.

A demonstration thinks aloud. It tries one expression after the other, states each result and
whether it hits, goes on or gives up, and answers with the last expression it tried:

    <think> first 7 + 5 = 12 and 12 + 3 = 15 no. or second 5 * 3 = 15, 15 + 7 = 22 yes!</think>
    <answer> ( 5 * 3 ) + 7</answer><|im_end|>

The teacher never looks at a solution. It draws legal expressions, those near the target more often,
and finds out by computing whether they hit. (A teacher that knows the solution teaches to write
"= target" after wrong arithmetic.) It often gives up early. That leaves reinforcement learning
something to find: trying longer pays.
"""
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from countdown_task import Problem, Task, held_out, operations

TASK = Task(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPENERS = ["", " okay.", " let us see.", " hmm.", " the goal is {target}.", " we need {target}."]
ORDINALS = [" first", " second", " third", " fourth", " fifth", " sixth", " seventh", " last"]
STARTERS = ["", "", " try", " maybe", " take", " what about"]
CONTINUE = [" wait,", " next,", " again,", " or", " then", " now", " but"]
JOINERS = [",", ",", " and", " so"]
MISS = [" no.", " not {target}.", " too {size}.", " wrong."]
HIT = [" yes!", " good, that is {target}.", " hit.", " exactly."]
GIVE_UP = [" enough.", " stop here.", " cannot find it."]

MOST_TRIES = len(ORDINALS)  # counting aloud keeps answers within the limit of tokens
PATIENT_SHARE = 0.2         # of the demonstrations go on to the last try
GIVE_UP_RATE = 0.4          # chance of the others to stop after each miss
NEARNESS = 10.0             # a candidate's weight is 1 / (NEARNESS + distance to the target)

# the weight of a token's loss; all other words weigh 1, the prompt 0
RESULT_WEIGHT, VERDICT_WEIGHT, ANSWER_WEIGHT, COUNT_WEIGHT = 4.0, 6.0, 2.0, 2.0

Pieces = list[tuple[str, float]]  # texts of a demonstration, each with the weight of its loss


@dataclass(frozen=True)
class Candidate:
    """An expression, its value, and the steps (a, operator, b, result) that compute it."""
    steps: tuple[tuple[int, str, int, int], ...]
    expression: str
    value: int


@lru_cache(maxsize=None)
def candidates(numbers: tuple[int, ...]) -> tuple[Candidate, ...]:
    """Every legal expression of the (sorted) numbers. Sums and products name the larger first."""
    by_expression = {}

    def combine(items, steps):
        """Join two of the items, which are (value, expression), in every way; until one is left."""
        if len(items) == 1:
            value, expression = items[0]
            by_expression[expression] = Candidate(tuple(steps), expression, value)
            return
        for i, j in ordered_pairs(len(items)):
            (x, left), (y, right) = items[i], items[j]
            rest = [item for k, item in enumerate(items) if k not in (i, j)]
            for step in steps_from(x, y):
                _, operator, _, result = step
                joined = f"{parenthesised(left)} {operator} {parenthesised(right)}"
                combine([*rest, (result, joined)], [*steps, step])

    combine([(number, str(number)) for number in numbers], [])
    return tuple(by_expression.values())


def ordered_pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(count) if i != j]


def steps_from(x: int, y: int) -> list[tuple[int, str, int, int]]:
    """The legal steps x op y = result; sums and products only if x is not the smaller."""
    steps = []
    for step in operations(x, y, TASK.max_result):
        a, operator, b, _ = step
        smaller_first = operator in "+*" and a < b
        if (a, b) == (x, y) and not smaller_first:
            steps.append(step)
    return steps


def parenthesised(expression: str) -> str:
    return f"( {expression} )" if " " in expression else expression


def order_of_tries(problem: Problem, rng: random.Random) -> list[Candidate]:
    """All candidates, those near the target earlier more often: a weighted shuffle without
    repetition, in which each arrives after an exponential waiting time."""
    def arrival(candidate):
        return rng.expovariate(1.0) * (NEARNESS + abs(candidate.value - problem.target))
    return sorted(candidates(tuple(sorted(problem.numbers))), key=arrival)


def number_of_tries(rng: random.Random) -> int:
    """How many misses it takes until this demonstration gives up."""
    if rng.random() < PATIENT_SHARE:
        return MOST_TRIES
    tries = 1
    while tries < MOST_TRIES and rng.random() > GIVE_UP_RATE:
        tries += 1
    return tries


def demonstration(problem: Problem, rng: random.Random) -> Pieces:
    """An answer to the problem."""
    pieces = [(rng.choice(OPENERS).format(target=problem.target), 1.0)]
    order = order_of_tries(problem, rng)
    tries = order[:number_of_tries(rng)]
    for number, candidate in enumerate(tries, 1):
        pieces += one_try(number, candidate, problem.target, rng)
        if candidate.value == problem.target:
            break
        if number < MOST_TRIES:  # after that nothing is left to decide
            phrases = GIVE_UP if number == len(tries) else CONTINUE
            pieces.append((rng.choice(phrases), 1.0))
    ending = f"</think>\n<answer> {candidate.expression}</answer><|im_end|>"
    return [*pieces, (ending, ANSWER_WEIGHT)]


def one_try(number: int, candidate: Candidate, target: int, rng: random.Random) -> Pieces:
    """Pieces such as " second try 5 * 3 = 15, 15 + 7 = 22 yes!"."""
    pieces = [(ORDINALS[number - 1], COUNT_WEIGHT), (rng.choice(STARTERS), 1.0)]
    for index, (a, operator, b, result) in enumerate(candidate.steps):
        joiner = rng.choice(JOINERS) if index else ""
        pieces += [(joiner, 1.0), (f" {a} {operator} {b} =", 1.0), (f" {result}", RESULT_WEIGHT)]
    verdict = rng.choice(HIT if candidate.value == target else MISS)
    size = "big" if candidate.value > target else "small"
    return [*pieces, (verdict.format(target=target, size=size), VERDICT_WEIGHT)]


def make_tokenizer() -> Tokenizer:
    """One token for each word or number, its leading space included.

    The words are added tokens over an empty byte-level vocabulary. In this form they stay whole
    when `transformers` rebuilds a Qwen tokenizer, which splits all other numbers into digits.
    """
    tokenizer = Tokenizer(models.BPE({}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in vocabulary()])
    return tokenizer


def vocabulary() -> list[str]:
    """Tags, the words of the prompt and of all phrases, numbers and signs."""
    tags = ["<think>", "</think>", "<answer>", "</answer>", "\n", "user", "assistant"]
    phrases = "".join([*OPENERS, *ORDINALS, *STARTERS, *CONTINUE, *JOINERS, *MISS, *HIT, *GIVE_UP,
                       " make", " big", " small"])
    phrases = phrases.replace(" {target}", "").replace(" {size}", "")
    words = re.findall(r" ?[a-z]+|[.,!]", phrases)
    numbers = [f" {number}" for number in range(TASK.max_result + 1)]
    signs = [f" {sign}" for sign in "+-*/=()"]
    return list(dict.fromkeys([*tags, *words, *numbers, *signs]))


def make_example(tokenizer: Tokenizer, rng: random.Random) -> tuple[list[int], list[float]]:
    """Ids of a prompt and its demonstration, and the loss weight of predicting each of them."""
    problem = TASK.make_problem(rng, lambda problem: not held_out(problem))
    ids = tokenizer.encode(TASK.prompt_for(problem), add_special_tokens=False).ids
    weights = [0.0] * len(ids)
    for text, weight in demonstration(problem, rng):
        piece = tokenizer.encode(text).ids
        ids += piece
        weights += [weight] * len(piece)
    return ids, weights


def batches(tokenizer: Tokenizer, rng: random.Random, rows: int,
            pool: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless ids and weights, each (rows, L). The examples of `pool` batches are drawn at once and
    sorted: those of like length share a batch, which needs less padding."""
    while True:
        examples = [make_example(tokenizer, rng) for _ in range(pool * rows)]
        examples.sort(key=lambda example: len(example[0]))
        for start in rng.sample(range(0, pool * rows, rows), pool):
            batch = examples[start:start + rows]
            longest = len(batch[-1][0])
            ids = [padded(ids, longest, 0) for ids, _ in batch]
            weights = [padded(weights, longest, 0.0) for _, weights in batch]
            yield torch.tensor(ids), torch.tensor(weights)


def padded(values: list, length: int, padding) -> list:
    return values + [padding] * (length - len(values))
