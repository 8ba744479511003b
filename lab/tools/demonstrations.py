"""A teacher for the tiny model: its vocabulary, and its demonstrations in batches.

A demonstration thinks aloud. It tries an expression, states each result, says whether it hits, and
tries once more if not. Then it answers:

    <think> first 7 + 5 = 12 and 12 + 3 = 15 no. or last 5 * 3 = 15, 15 + 7 = 22 yes!</think>
    <answer> ( 5 * 3 ) + 7</answer><|im_end|>

The teacher sometimes does well and sometimes badly, so that the model does both at the start, and
training can find the better one. Its arithmetic is always right; this is not always:

    aim        four tries in ten are drawn near the target, the others anywhere, mostly sums
    verdict    one in seven says the opposite of what is true; after "yes" no other try follows
    answer     one in three is another expression than the one tried last
    format     one in twelve lacks a part

There are at most two tries, so reinforcement learning gains little by trying longer: it has to
choose. The teacher never looks at a solution; it draws legal expressions and finds out by
computing. (One that knows the solution teaches to write "= target" after wrong arithmetic.)
"""
import random
import re
from collections.abc import Iterator
from functools import cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from countdown_task import Problem
from lab.countdown import Task
from lab.harness.solved_problems import Solution, solutions_of

TASK = Task(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPENERS = ["", " okay.", " let us see.", " hmm.", " the goal is {target}.", " we need {target}."]
COUNTS = [" first", " last"]
STARTERS = ["", "", " try", " maybe", " take", " what about"]
CONTINUE = [" wait,", " next,", " again,", " or", " then", " now", " but"]
JOINERS = [",", ",", " and", " so"]
MISS = [" no.", " not {target}.", " too {size}.", " wrong."]
HIT = [" yes!", " good, that is {target}.", " hit.", " exactly."]

AIMED = 0.4            # share of the tries that aim at the target
AIM, HABIT = 0.5, 4.0  # how well those aim, and how much the others like sums: see preference
WRONG_VERDICT, OTHER_ANSWER, LAPSE = 0.15, 0.35, 0.08  # shares of verdicts, and of demonstrations

# the weight of a token's loss; all other words weigh 1, the prompt 0
RESULT_WEIGHT, VERDICT_WEIGHT, ANSWER_WEIGHT = 4.0, 4.0, 2.0

ENDING = "</think>\n<answer> {expression}</answer><|im_end|>"
LAPSES = ["</think><answer> {expression}</answer><|im_end|>",   # no new line
          "\n<answer> {expression}</answer><|im_end|>",         # thinking does not end
          "</think>\n {expression}</answer><|im_end|>",         # the answer does not begin
          "</think>\n<answer> {expression}<|im_end|>"]          # or does not end

Pieces = list[tuple[str, float]]  # texts of a demonstration, each with the weight of its loss


@cache
def candidates(numbers: tuple[int, ...]) -> tuple[Solution, ...]:
    """Every legal expression of the (sorted) numbers. Sums and products name the larger first."""
    found = {}
    for candidate in solutions_of(numbers, TASK.legal_steps):
        larger_first = all(x >= y for x, sign, y, _ in candidate.steps if sign in "+*")
        if larger_first:
            found[candidate.expression] = candidate
    return tuple(found.values())


def draw(problem: Problem, tried: list[Solution], rng: random.Random) -> Solution:
    """An expression that was not tried yet, if there is one."""
    every = candidates(tuple(sorted(problem.numbers)))
    left = [candidate for candidate in every if candidate not in tried] or list(every)
    is_aimed = rng.random() < AIMED
    weights = [preference(candidate, problem, is_aimed) for candidate in left]
    return rng.choices(left, weights)[0]


def preference(candidate: Solution, problem: Problem, is_aimed: bool) -> float:
    """The weight with which the teacher draws a candidate: its nearness to the target, squared; or,
    if it does not aim, its nearness and a liking for sums."""
    distance = abs(candidate.value - problem.target)
    if is_aimed:
        return 1 / (AIM + distance) ** 2
    return HABIT ** candidate.expression.count("+") / (20 + distance)


def demonstration(problem: Problem, rng: random.Random) -> Pieces:
    """An answer to the problem."""
    pieces = [(rng.choice(OPENERS).format(target=problem.target), 1.0)]
    tried = []
    for count in COUNTS:
        if tried:
            pieces.append((rng.choice(CONTINUE), 1.0))
        tried.append(draw(problem, tried, rng))
        is_hit = tried[-1].value == problem.target
        says_hit = not is_hit if rng.random() < WRONG_VERDICT else is_hit
        pieces += one_try(count, tried[-1], says_hit, problem.target, rng)
        if says_hit:
            break
    answer = draw(problem, tried, rng) if rng.random() < OTHER_ANSWER else tried[-1]
    ending = rng.choice(LAPSES) if rng.random() < LAPSE else ENDING
    ending = ending.format(expression=answer.expression)
    return [*pieces, (ending, ANSWER_WEIGHT)]


def one_try(count: str, candidate: Solution, says_hit: bool, target: int,
            rng: random.Random) -> Pieces:
    """Pieces such as " last try 5 * 3 = 15, 15 + 7 = 22 yes!"."""
    pieces = [(count, 1.0), (rng.choice(STARTERS), 1.0)]
    for index, (a, operator, b, result) in enumerate(candidate.steps):
        pieces.append((rng.choice(JOINERS) if index else "", 1.0))
        pieces.append((f" {a} {operator} {b} =", 1.0))
        pieces.append((f" {result}", RESULT_WEIGHT))
    verdict = rng.choice(HIT if says_hit else MISS)
    size = "big" if candidate.value > target else "small"
    return [*pieces, (verdict.format(target=target, size=size), VERDICT_WEIGHT)]


def make_tokenizer() -> Tokenizer:
    """The teacher's tokenizer: one token for each word or number, its leading space included. Tags
    are cut in pieces, as Qwen's own tokenizer cuts them: "</", "think", ">" and a new line in one.

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
    """Pieces of tags, the words of the prompt and of all phrases, numbers and signs."""
    tags = ["<", "</", ">", ">\n", "think", "answer", "\n", "user", "assistant"]
    spoken = OPENERS + COUNTS + STARTERS + CONTINUE + JOINERS + MISS + HIT
    phrases = "".join([*spoken, " make", " big", " small"])
    phrases = phrases.replace(" {target}", "").replace(" {size}", "")
    words = re.findall(r" ?[a-z]+|[.,!]", phrases)
    numbers = [f" {number}" for number in range(TASK.max_result + 1)]
    signs = [f" {sign}" for sign in "+-*/=()"]
    return list(dict.fromkeys([*tags, *words, *numbers, *signs]))


def is_right(problem: Problem, pieces: Pieces) -> bool:
    scores = TASK.score(problem, "".join(text for text, _ in pieces))
    return scores["answer"] == scores["format"] == 1


def make_example(tokenizer: Tokenizer, rng: random.Random,
                 right: bool = False) -> tuple[list[int], list[float]]:
    """Ids of a prompt and its demonstration, and the loss weight of predicting each of them."""
    problem = TASK.make_problem(rng, held_out=False)
    ids = tokenizer.encode(TASK.prompt_for(problem), add_special_tokens=False).ids
    weights = [0.0] * len(ids)
    pieces = demonstration(problem, rng)
    while right and not is_right(problem, pieces):
        pieces = demonstration(problem, rng)
    for text, weight in pieces:
        piece = tokenizer.encode(text).ids
        ids += piece
        weights += [weight] * len(piece)
    return ids, weights


def batches(tokenizer: Tokenizer, rng: random.Random, rows: int, right: bool = False,
            pool: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and weights, each (rows, L), without an end. The examples of `pool` batches are
    drawn at once and sorted: those of like length share a batch, which needs less padding."""
    while True:
        examples = [make_example(tokenizer, rng, right) for _ in range(pool * rows)]
        examples.sort(key=lambda example: len(example[0]))
        for start in rng.sample(range(0, pool * rows, rows), pool):
            batch = examples[start:start + rows]
            longest = len(batch[-1][0])
            ids = torch.zeros(rows, longest, dtype=torch.long)
            weights = torch.zeros(rows, longest)
            for row, (row_ids, row_weights) in enumerate(batch):
                ids[row, :len(row_ids)] = torch.tensor(row_ids)
                weights[row, :len(row_weights)] = torch.tensor(row_weights)
            yield ids, weights
