"""What sampled answers say about a training that has not begun, in numbers (lab preflight).

A group is *living* if its answers have different rewards. Only such a group has a gradient, because
an advantage is the reward minus the mean of the group. The chance that G answers to a problem get
equal rewards needs no model of how hard problems are: if c of the n sampled answers have a certain
reward, then C(c, G) / C(n, G) of all choices of G answers have only this reward. The sum over the
rewards is the chance, and it is unbiased.

The best answer that ignores the problem is a rule, in which the numbers of the problem stand by
their places:

    to 10 8 2 make 60 the answer 10 * 8    the first number * the second
"""
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lab.analysis.statistics import Estimate, mean_over, within

NUMBER = re.compile("[0-9]+")
SPLIT = "\0"          # stands for a number of the problem in a rule; no answer has this character
MOST_RULES = 300      # that are tried, those with the largest reward first
EARNED_BLINDLY = 0.8  # of what the best sampled answers earn beyond the average
WORTH_LEARNING = 0.3  # of the whole range of sampled rewards: an answer that earns less is no hole
FEWEST_FORMED = 20    # well formed answers of which the success is told
RISE_BY_FORM = 0.1    # of success, if every answer were well formed: so much is worth the word
TOO_EASY = 0.95       # of the answers are right
FEWEST_WITH_MORE = 50  # different answers that were scored again with a blank or a word more
LEARNS, FORM, HOLE, CANNOT, EASY, CHANCE = (
    "learns", "learns the form only", "has a hole that one answer can use", "cannot",
    "is too easy", "pays by chance")


@dataclass(frozen=True)
class Answers:
    """The answers that were sampled to one problem; each list has one entry for each answer."""
    problem: str  # as people read it
    texts: list[str]
    reward: list[float]
    right: list[float]
    format: list[float]
    finished: list[float]
    paid: list[list[float]] = field(default_factory=list)  # the rewards of its turns, if it has any
    # of different answers the reward, and those of the same answer with a blank or a word more
    with_more: list[tuple[float, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Blind:
    """The best answer that ignores the problem, and what it earns on problems that were not used to
    find it."""
    rule: str
    reward: float
    right: float

    @property
    def is_rule(self) -> bool:
        """Whether it names a number of the problem; else it is a constant text."""
        return SPLIT in self.rule


@dataclass
class Findings:
    """What the answers to `problems` say of a step with so many groups of so many answers."""
    problems: Sequence[Answers]
    questions: int
    group: int
    blind: Blind | None = None  # if answers could be tried on other problems
    fewest: float = 0.5         # living groups a step: with fewer, most steps make no update
    knows_success: bool = True  # if not, the reward may be any number, and is all that counts

    def mean(self, name: str) -> Estimate:
        """The mean over all answers of a number of each, with an interval over the problems."""
        return mean_over([float(np.mean(getattr(one, name))) for one in self.problems])

    def living_share(self, name: str, size: int) -> Estimate:
        """The share of groups of `size` answers in which this number of an answer differs. Its
        interval is over the problems."""
        shares = [1 - chance_of_equal(getattr(one, name), size) for one in self.problems]
        return within(mean_over(shares), 0, 1)

    @property
    def sampled(self) -> int:
        return len(self.problems[0].reward)

    @cached_property
    def living(self) -> float:
        """The groups of the planned step whose rewards differ, which teach something."""
        return self.questions * self.living_share("reward", self.group).value

    @cached_property
    def form(self) -> float | None:
        return share_of_form(self.problems)

    @cached_property
    def living_by_success(self) -> float:
        """The groups of the planned step in which right answers earn more than wrong ones: some are
        right and some wrong, and the reward differs by more than the form. Where being right is not
        rewarded it is 0. Where nobody knows which answers are right, it is all that teach."""
        if not self.knows_success:
            return self.living
        if self.form is None or not pays_success(self.problems):
            return 0.0
        if_only_that_were_paid = self.questions * self.living_share("right", self.group).value
        return min(if_only_that_were_paid, self.living * (1 - self.form))

    @cached_property
    def right_if_formed(self) -> float | None:
        """The success of the well formed answers: that of all, once the form is learned. None if
        too few were sampled."""
        formed = [right for one in self.problems for right, form in zip(one.right, one.format)
                  if form >= 1]
        return float(np.mean(formed)) if len(formed) >= FEWEST_FORMED else None

    @property
    def form_raises_success(self) -> bool:
        """Whether success would rise if all answers had the right form and nothing else changed."""
        if self.right_if_formed is None or not pays_success(self.problems):
            return False
        return self.right_if_formed - self.mean("right").value >= RISE_BY_FORM

    @property
    def has_hole(self) -> bool:
        """Whether the best answer that ignores the problem earns most of what the best answer to
        each problem earns beyond the average, and much of the range of the sampled rewards; or as
        much as the best answer to any problem, which leaves nothing else to learn."""
        if self.blind is None:
            return False
        rewards = np.array([one.reward for one in self.problems])
        best = float(rewards.max(1).mean() - rewards.mean())
        blind = self.blind.reward - float(rewards.mean())
        earns_most = self.blind.reward >= rewards.max() - 1e-9
        return best > 0 and (earns_most or blind >= EARNED_BLINDLY * best
                             and blind >= WORTH_LEARNING * np.ptp(rewards))

    @cached_property
    def follows_text(self) -> float | None:
        """The correlation, within problems, of an answer's reward with that of the same answer with
        a blank or a word more, the lower one. None if too few were scored so. A blank or a word
        that takes half of the differences away breaks the form of an answer, and says nothing."""
        centred = [np.array(one.with_more) - np.mean(one.with_more, 0)
                   for one in self.problems if one.with_more]
        scored = np.concatenate([np.zeros((0, 3)), *centred])
        if len(scored) < FEWEST_WITH_MORE or scored[:, 0].std() < 1e-6:
            return None
        own = scored[:, 0]
        found = [float(np.corrcoef(own, other)[0, 1]) for other in scored.T[1:]
                 if other.std() > own.std() / 2]
        return min(found, default=None)

    @property
    def pays_by_chance(self) -> bool:
        """Whether that correlation is less than three standard errors above 0."""
        count = sum(len(one.with_more) for one in self.problems)
        return self.follows_text is not None and self.follows_text < 3 / math.sqrt(count)

    @property
    def is_too_easy(self) -> bool:
        """Whether nearly all answers are right, and the reward does not differ by the form."""
        return (self.knows_success and self.mean("right").value >= TOO_EASY
                and self.living * (self.form or 0.0) < self.fewest)

    @property
    def word(self) -> str:
        if self.is_too_easy:
            return EASY
        if self.living < self.fewest:
            return CANNOT
        if self.pays_by_chance:
            return CHANCE
        if self.living_by_success < self.fewest and not self.form_raises_success:
            return FORM
        return HOLE if self.has_hole else LEARNS


def chance_of_equal(values: Sequence[float], size: int) -> float:
    """The chance that `size` of these values, drawn without putting any back, are all equal."""
    ways = sum(math.comb(count, size) for count in Counter(values).values())
    return ways / math.comb(len(values), size)


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


def pays_success(problems: Sequence[Answers]) -> bool:
    """Whether within groups right answers earn more than wrong ones, on average."""
    total = 0.0
    for one in problems:
        reward, right = np.array(one.reward), np.array(one.right)
        total += float(((reward - reward.mean()) * (right - right.mean())).sum())
    return total > 0


# ------------------------------------------------------------------- the best blind answer


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
    return with_names(rule, lambda place: numbers[place] if place < len(numbers) else "")


def shown_rule(rule: str) -> str:
    """The rule for people: the numbers of the problem are a, b, c, ..."""
    return with_names(rule, lambda place: chr(ord("a") + place) if place < 26
                      else f"number {place + 1}")


def with_names(rule: str, name_of: Callable[[int], str]) -> str:
    """The rule with a name in each place where a number of the problem stands."""
    return re.sub(f"{SPLIT}([0-9]+){SPLIT}", lambda found: name_of(int(found[1])), rule)


Score = Callable[[object, str], dict[str, float]]


def best_blind(problems: Sequence[Answers], others: Sequence[object],
               show: Callable[[object], str], score: Score) -> Blind:
    """The best rule among the sampled answers. Half of the `others`, problems that were not asked,
    choose it; the other half says what it earns."""
    rewards: dict[str, list[float]] = {}
    for one in problems:
        for text, reward in zip(one.texts, one.reward):
            rewards.setdefault(rule_of(text, one.problem), []).append(reward)
    ranked = sorted(rewards, key=lambda rule: (sum(rewards[rule]), max(rewards[rule])),
                    reverse=True)
    half = len(others) // 2
    shown = [(problem, show(problem)) for problem in others]  # a task may be slow to show it
    chosen, best = "", -math.inf
    for rule in ranked[:MOST_RULES]:
        found = mean_scores(rule, shown[:half], score)
        if found["reward"] > best:
            chosen, best = rule, found["reward"]
    found = mean_scores(chosen, shown[half:], score)
    return Blind(chosen, found["reward"], found["answer"])


def mean_scores(rule: str, problems: Sequence[tuple[object, str]], score: Score
                ) -> dict[str, float]:
    found = [score(problem, apply_rule(rule, shown)) for problem, shown in problems]
    return {name: float(np.mean([one[name] for one in found])) for name in ("reward", "answer")}
