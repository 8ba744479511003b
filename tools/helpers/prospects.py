"""What sampled answers say about a training that has not begun: is there something to learn from,
and what would be learned?

A group is *living* if its answers have different rewards. Only such a group has a gradient, because
an advantage is the reward minus the mean of the group.

The chance that G answers to a problem get equal rewards is estimated without a model of how hard
problems are. If c of the n sampled answers have a certain reward, then C(c, G) / C(n, G) of all
choices of G answers have only this reward; the sum over the rewards is the chance, and it is
unbiased.
"""
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.statistics import Estimate, mean_over, within

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


def chance_of_equal(values: Sequence[float], size: int) -> float:
    """The chance that `size` of these values, drawn without putting any back, are all equal."""
    ways = sum(math.comb(count, size) for count in Counter(values).values())
    return ways / math.comb(len(values), size)


def living_share(values: Sequence[Sequence[float]], size: int) -> Estimate:
    """The share of groups of `size` answers whose values differ; the values of each problem are one
    of the sequences. Its interval is over the problems."""
    return within(mean_over([1 - chance_of_equal(one, size) for one in values]), 0, 1)


def share_of_form(problems: Sequence[Answers]) -> float | None:
    """How much of the rewards' variance within groups lies between answers that are equally right.
    This part teaches the form and not the task. None if no group's rewards differ."""
    total = of_form = 0.0
    for one in problems:
        reward, right = np.array(one.reward), np.array(one.right)
        total += float(np.square(reward - reward.mean()).sum())
        for value in np.unique(right):
            equally_right = reward[right == value]
            of_form += float(np.square(equally_right - equally_right.mean()).sum())
    return of_form / total if total > 0 else None


def disagreement(problems: Sequence[Answers]) -> float | None:
    """The correlation, within groups, of being right with the rest of the reward. A negative one
    says that what is paid beside success is paid for being wrong. None if one of them never varies.
    """
    right_parts, other_parts = [], []
    for one in problems:
        right, other = np.array(one.right), np.array(one.reward) - np.array(one.right)
        right_parts.append(right - right.mean())
        other_parts.append(other - other.mean())
    right, other = np.concatenate(right_parts), np.concatenate(other_parts)
    size = math.sqrt(float((right ** 2).sum() * (other ** 2).sum()))
    return float((right * other).sum()) / size if size > 1e-9 else None


def pays_success(problems: Sequence[Answers]) -> bool:
    """Whether within groups right answers earn more than wrong ones, on average."""
    product = 0.0
    for one in problems:
        reward, right = np.array(one.reward), np.array(one.right)
        product += float(((reward - reward.mean()) * (right - right.mean())).sum())
    return product > 0


def rule_of(text: str, problem: str) -> str:
    """The answer as a rule: each number that the problem has stands there by its place in it.

        to 10 8 2 make 60 the answer 10 * 8    the first number * the second

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
