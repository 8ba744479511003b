"""The best answer that ignores the problem, and what it earns. If that is much, the reward has a
hole.

Such an answer is a rule, in which the numbers of the problem stand by their places:

    to 10 8 2 make 60 the answer 10 * 8    the first number * the second
"""
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NUMBER = re.compile("[0-9]+")
SPLIT = "\0"  # stands for a number of the problem in a rule; no answer has this character
MOST_RULES = 300  # that are tried, those with the largest reward first


@dataclass(frozen=True)
class Answers:
    """The answers that were sampled to one problem; each list has one number for each answer."""
    problem: str          # as people read it
    texts: list[str]
    reward: list[float]
    right: list[float]
    format: list[float]
    finished: list[float]
    turns: Sequence[list[str]] = ()  # the texts of each answer's turns, if an environment replies

    @property
    def scored(self) -> Sequence[str | list[str]]:
        """What the task's `score` is given of each answer."""
        return self.turns or self.texts


def rule_of(text: str, problem: str) -> str:
    """The answer as a rule: each number that the problem has stands there by its place in it.
    Applied to another problem, the rule answers without having looked at it."""
    places: dict[str, int] = {}
    for place, number in enumerate(NUMBER.findall(problem)):
        places.setdefault(number, place)

    def name(found: re.Match[str]) -> str:
        place = places.get(found[0])
        return found[0] if place is None else f"{SPLIT}{place}{SPLIT}"

    return NUMBER.sub(name, text)


def apply_rule(rule: str, problem: str) -> str:
    numbers = NUMBER.findall(problem)

    def number(found: re.Match[str]) -> str:
        place = int(found[1])
        return numbers[place] if place < len(numbers) else ""

    return re.sub(f"{SPLIT}([0-9]+){SPLIT}", number, rule)


def shown_rule(rule: str) -> str:
    """The rule for people: the numbers of the problem are a, b, c, ..."""
    def letter(found: re.Match[str]) -> str:
        place = int(found[1])
        return chr(ord("a") + place) if place < 26 else f"number {place + 1}"

    return re.sub(f"{SPLIT}([0-9]+){SPLIT}", letter, rule)


@dataclass(frozen=True)
class Blind:
    """The best answer that ignores the problem, and what it earns on problems that were not used to
    find it."""
    rule: str
    reward: float
    right: float


Score = Callable[[object, str], dict[str, float]]


def best_blind(problems: Sequence[Answers], others: Sequence[object],
               show: Callable[[object], str], score: Score) -> Blind:
    """The best rule among the sampled answers, an empty answer, and bare numbers of the problem.
    Half of the `others`, problems that were not asked, choose it; the other half says what it
    earns."""
    rewards: dict[str, list[float]] = {}
    for one in problems:
        for text, reward in zip(one.texts, one.reward):
            rewards.setdefault(rule_of(text, one.problem), []).append(reward)
    ranked = sorted(rewards, key=lambda rule: (sum(rewards[rule]), max(rewards[rule])),
                    reverse=True)
    half = len(others) // 2
    chosen, best = "", -math.inf
    for rule in [*ranked[:MOST_RULES], "", *bare_numbers(problems[0].problem)]:
        found = mean_scores(rule, others[:half], show, score)
        if found["reward"] > best:
            chosen, best = rule, found["reward"]
    found = mean_scores(chosen, others[half:], show, score)
    return Blind(chosen, found["reward"], found["answer"])


def bare_numbers(problem: str) -> list[str]:
    """Answers that are just a number of the problem, such as its target, bare or in answer tags."""
    places = range(len(NUMBER.findall(problem)))
    return [form.format(f"{SPLIT}{place}{SPLIT}") for place in places
            for form in ("{}", "<answer>{}</answer>")]


def mean_scores(rule: str, problems: Sequence[object], show: Callable[[object], str],
                score: Score) -> dict[str, float]:
    found = [score(problem, apply_rule(rule, show(problem))) for problem in problems]
    return {name: float(np.mean([one[name] for one in found])) for name in ("reward", "answer")}
