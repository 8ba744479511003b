"""What sampled answers say about a training that has not begun: is there something to learn from,
and what would be learned? The findings of lab preflight, in numbers and in sentences.

A group is *living* if its answers have different rewards. Only such a group has a gradient, because
an advantage is the reward minus the mean of the group.

The chance that G answers to a problem get equal rewards is estimated without a model of how hard
problems are. If c of the n sampled answers have a certain reward, then C(c, G) / C(n, G) of all
choices of G answers have only this reward; the sum over the rewards is the chance, and it is
unbiased.
"""
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lab.analysis.statistics import Estimate, mean_over, within
from lab.tools.helpers.blind import SPLIT, Answers, Blind, best_blind, shown_rule

SIZES = (2, 4, 8, 16, 32)  # of groups
FEWEST_LIVING = 0.5  # groups a step: with fewer, most steps make no update
FEWEST_OTHERS = 20  # problems that were not asked
EARNED_BLINDLY = 0.8  # of what the best sampled answers earn beyond the average
WORTH_LEARNING = 0.3  # of the whole range of sampled rewards: an answer that earns less is no hole
FEWEST_FORMED = 20  # well formed answers of which the success is told
RISE_BY_FORM = 0.1  # of success, if every answer were well formed: so much is worth the word
AGAINST = -0.1  # a correlation of success and the rest of the reward that forbids *learns*
LEARNS, FORM, HOLE, CANNOT = (
    "learns", "learns the form only", "has a hole that one answer can use", "cannot")


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


def within_groups(problems: Sequence[Answers], name: str) -> np.ndarray:
    """A number of each answer, such as its reward, minus the mean of its group."""
    parts = []
    for one in problems:
        values = np.array(getattr(one, name))
        parts.append(values - values.mean())
    return np.concatenate(parts)


def disagreement(problems: Sequence[Answers]) -> float | None:
    """The correlation, within groups, of being right with the rest of the reward. A negative one
    says that what is paid beside success is paid for being wrong. None if one of them never varies.
    """
    right = within_groups(problems, "right")
    other = within_groups(problems, "reward") - right
    size = math.sqrt(float((right ** 2).sum() * (other ** 2).sum()))
    return float((right * other).sum()) / size if size > 1e-9 else None


def pays_success(problems: Sequence[Answers]) -> bool:
    """Whether within groups right answers earn more than wrong ones, on average."""
    products = within_groups(problems, "reward") * within_groups(problems, "right")
    return float(products.sum()) > 0


@dataclass(frozen=True)
class Plan:
    """The training that is planned."""
    questions: int       # problems a step
    group: int           # answers to each
    max_new_tokens: int
    has_examples: bool   # whether the task has the flag --examples, and the model's tokenizer
                         # can spell them


class Replies(NamedTuple):
    """Tokens of the answers: all, those that an environment wrote, and those of these that are
    trained on."""
    written: int
    foreign: int
    trained: int


@dataclass
class Findings:
    """What the sampled answers say, in numbers, in a word and in sentences."""
    problems: Sequence[Answers]
    plan: Plan
    task: Any
    others: Sequence[Any]   # problems that were not asked
    replies: Replies
    unequal: int = 0        # answers that earned something else when they were scored once more

    def mean(self, name: str) -> Estimate:
        """The mean over all answers of a number of each, with an interval over the problems."""
        return mean_over([float(np.mean(getattr(one, name))) for one in self.problems])

    def living_share(self, name: str, size: int) -> Estimate:
        """The share of groups of `size` answers in which this number of an answer differs. Its
        interval is over the problems."""
        shares = [1 - chance_of_equal(getattr(one, name), size) for one in self.problems]
        return within(mean_over(shares), 0, 1)

    @cached_property
    def sampled(self) -> int:
        return len(self.problems[0].reward)

    @cached_property
    def success(self) -> float:
        return self.mean("right").value

    @property
    def cut_off(self) -> float:
        return 1 - self.mean("finished").value

    @property
    def more_tokens(self) -> int:
        return 2 * self.plan.max_new_tokens

    def living_groups(self, name: str) -> float:
        """The groups of the planned step in which this number of an answer differs."""
        size = min(self.plan.group, self.sampled)
        return self.plan.questions * self.living_share(name, size).value

    @cached_property
    def living(self) -> float:
        """The groups of the planned step whose rewards differ, which teach something."""
        return self.living_groups("reward")

    @cached_property
    def living_if_paid(self) -> float:
        """The groups of a step that would teach to be right if only that were rewarded."""
        return self.living_groups("right")

    @cached_property
    def living_by_success(self) -> float:
        """The groups of the planned step in which right answers earn more than wrong ones: some are
        right and some wrong, and the reward differs by more than the form. Where being right is not
        rewarded it is 0."""
        form = share_of_form(self.problems)
        if form is None or not pays_success(self.problems):
            return 0.0
        return min(self.living_if_paid, self.living * (1 - form))

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
        return self.right_if_formed - self.success >= RISE_BY_FORM

    @cached_property
    def blind(self) -> Blind | None:
        """None if the task has too few other problems to try such an answer on."""
        if len(self.others) < FEWEST_OTHERS:
            return None
        return best_blind(self.problems, self.others, self.task.show, self.task.score)

    @cached_property
    def earned_blindly(self) -> float:
        """How much of what the best answer to each problem earns beyond the average is earned by
        the best answer that ignores the problem."""
        average = float(np.mean([np.mean(one.reward) for one in self.problems]))
        best = float(np.mean([max(one.reward) for one in self.problems]))
        if self.blind is None or best <= average:
            return 0.0
        return (self.blind.reward - average) / (best - average)

    @cached_property
    def is_worth_learning(self) -> bool:
        """Whether the best answer that ignores the problem earns much beyond the average, measured
        by the range of the sampled rewards."""
        rewards = [reward for one in self.problems for reward in one.reward]
        span = max(rewards) - min(rewards)
        if self.blind is None or span <= 0:
            return False
        return self.blind.reward - float(np.mean(rewards)) >= WORTH_LEARNING * span

    @cached_property
    def only_reward(self) -> float | None:
        """The reward of all answers to all problems, if it is one."""
        different = {reward for one in self.problems for reward in one.reward}
        return different.pop() if len(different) == 1 else None

    @property
    def pulls_apart(self) -> bool:
        """Whether what is paid beside success is paid for being wrong."""
        against = disagreement(self.problems)
        return against is not None and against < AGAINST

    @property
    def word(self) -> str:
        if self.living < FEWEST_LIVING:
            return CANNOT
        if self.living_by_success < FEWEST_LIVING and not self.form_raises_success:
            return FORM
        if self.earned_blindly >= EARNED_BLINDLY and self.is_worth_learning:
            return HOLE
        return FORM if self.pulls_apart else LEARNS

    def in_words(self) -> str:
        parts = [self.about_success(), self.about_groups(), self.about_form(), self.about_blind(),
                 self.about_scoring(), self.about_replies(), self.conclusion()]
        return "\n\n".join(wrapped(part) for part in parts if part)

    def about_success(self) -> str:
        right = within(self.mean("right"), 0, 1)
        return (f"Success: {percent(right)} of the answers are right, {self.sampled} answers to "
                f"each of {len(self.problems)} problems.")

    def about_groups(self) -> str:
        """A table: for each size of a group, how many are living."""
        lines = ["A group teaches only if the rewards of its answers differ:",
                 "    answers   groups that teach    of these by",
                 "    in a group  (95% interval)     being right"]
        for size in SIZES:
            if size > self.sampled:
                continue
            every = self.living_share("reward", size)
            by_success = self.living_share("right", size)
            lines.append(f"    {size:6d}     {percent(every):20s}  {by_success.value:8.0%}")
        plan = self.plan
        lines.append(f"The planned step has {plan.questions} groups of {plan.group}: "
                     f"{self.living:.1f} of them teach, {self.living_by_success:.1f} to be right.")
        return "\n".join(lines)

    def about_form(self) -> str:
        form = share_of_form(self.problems)
        if form is None:
            return "No answer's reward differs from that of another answer to the same problem."
        text = (f"Form: {form:.0%} of the rewards' variance within groups lies between answers "
                "that are equally right. That part teaches the form, and the rest the task.")
        if self.right_if_formed is not None:
            text += f" Of the well formed answers {self.right_if_formed:.0%} are right."
        if self.pulls_apart:
            text += (" What is paid beside success is paid for being wrong: within groups their "
                     f"correlation is {disagreement(self.problems):+.2f}. The two rewards pull "
                     "against each other.")
        return text

    def about_blind(self) -> str:
        if self.problems[0].turns:
            return ("Without the task: not computed. An environment replies to the answers, so "
                    "none of them can be tried on another problem.")
        if self.blind is None:
            return (f"Without the task: there are only {len(self.others)} problems beside those "
                    "that were asked, too few to try an answer on that ignores the problem.")
        mean = self.mean("reward").value
        return (f"Without the task: a sampled answer earns {mean:.2f} on average. Of answers that "
                f"are the same for every problem the best is {self.one_answer}. It earns "
                f"{self.blind.reward:.2f} and is right {self.blind.right:.1%} of the time.")

    @property
    def one_answer(self) -> str:
        """The best answer that ignores the problem: a constant text, or a rule over its numbers."""
        if self.blind is None:
            return ""
        shown = " ".join(shown_rule(self.blind.rule).split())
        if not shown:
            return "the empty text"
        if SPLIT not in self.blind.rule:
            return f"the constant text `{shown}`"
        return f"the rule `{shown}`, where a, b, ... are the numbers of the problem"

    def about_scoring(self) -> str:
        """Whether an answer that is scored twice earns the same."""
        count = sum(len(one.texts) for one in self.problems)
        if not self.unequal:
            return f"Scored once more, all {count} answers earn the same."
        return (f"Scored once more, {self.unequal} of {count} answers earn something else: the "
                "reward is random, or it remembers earlier calls. All that is said here of rewards "
                "is about this chance, too.")

    def about_replies(self) -> str:
        """Whether the replies of an environment are trained on."""
        written, foreign, trained = self.replies
        if not foreign:
            return ""
        text = f"Replies: an environment wrote {foreign / written:.0%} of the tokens."
        if not trained:
            return f"{text} The loss has no gradient at any of them."
        return (f"{text} THE LOSS HAS A GRADIENT AT THEM, which is a mistake: the model never "
                "writes them, so they are its most improbable tokens, and most of each step is "
                "about them. The loss should go by the mask, which is 0 there.")

    def conclusion(self) -> str:
        """The word, the reason for it, and what would help."""
        reason = next(one for one in REASONS if one.word == self.word and one.holds(self))
        said = f"{self.word.upper()}: {reason.sentence.format(found=self)}"
        return said if self.word == CANNOT else f"{said} {NOT_ASKED}"

    @property
    def what_helps(self) -> str:
        ways = ["easier problems"]
        if self.plan.has_examples:
            ways.append("solved examples in the prompt (--examples 4)")
        ways.append("a cold start on right answers (python -m lab warmup)")
        if self.success > 0:
            ways.append(f"larger groups (--answers {4 * self.plan.group})")
        return f"What helps: {', '.join(ways[:-1])}, or {ways[-1]}."


class Reason(NamedTuple):
    """A sentence after a word. Of the reasons for a word the first that holds is said."""
    word: str
    holds: Callable[[Findings], bool]
    sentence: str


def always(found: Findings) -> bool:
    return True


NOT_ASKED = "The learning rate is not part of this."
HOLE_OF = ("{found.one_answer}, which is the same for every problem, earns "
           "{found.blind.reward:.2f}, nearly as much as the best sampled answers or more. ")
MAY_BE_THE_TASK = "If this rule is what you want to be learned, it is the task and no hole. Else: "
NO_ONE_ANSWER = ("another reward, under which this answer earns less, or problems that no one "
                 "answer solves.")
REASONS = (
    Reason(CANNOT, lambda found: found.cut_off > 0.5,
           "{found.cut_off:.0%} of the answers are cut off before they end, so nearly all get the "
           "same reward. What helps: --max_new_tokens {found.more_tokens}, or a prompt that asks "
           "for less."),
    Reason(CANNOT, lambda found: found.success > 0.5,
           "nearly all answers are right already, so there is nothing to compare. What helps: "
           "harder problems."),
    Reason(CANNOT, lambda found: found.only_reward is not None,
           "every sampled answer earned exactly {found.only_reward:.3g}. Score an answer by hand "
           "that you know to be right: if it earns the same, the reward has a mistake. Else the "
           "problems are too hard. {found.what_helps}"),
    Reason(CANNOT, always,
           "in a step {found.living:.2f} groups have answers with different rewards. "
           "{found.what_helps}"),
    Reason(FORM, lambda found: found.pulls_apart and pays_success(found.problems),
           "right answers are rewarded, and what is paid beside that is paid for being wrong, so "
           "the two pull against each other. What helps: a reward for being right alone, or one "
           "whose parts agree."),
    Reason(FORM, lambda found: found.success > 0.9,
           "nearly every answer counts as right, and what differs between the rewards of a group "
           "is something else. What helps: a reward, or harder problems, by which some answers are "
           "wrong."),
    Reason(FORM, lambda found: found.living_if_paid >= FEWEST_LIVING,
           "in a step {found.living_if_paid:.1f} groups have right and wrong answers, but the "
           "reward hardly pays for being right, or pays for being wrong. What helps: another "
           "reward."),
    Reason(FORM, always,
           "the rewards of a group differ, but hardly ever because one answer is right and another "
           "wrong. {found.what_helps}"),
    Reason(HOLE, lambda found: found.blind is not None and SPLIT in found.blind.rule,
           f"{HOLE_OF}{MAY_BE_THE_TASK}{NO_ONE_ANSWER}"),
    Reason(HOLE, always, f"{HOLE_OF}What helps: {NO_ONE_ANSWER}"),
    Reason(LEARNS, lambda found: found.living_by_success < FEWEST_LIVING,
           "the form first: hardly a group has right and wrong answers, but "
           "{found.right_if_formed:.0%} of the well formed ones are right, and {found.success:.1%} "
           "of all. {found.what_helps}"),
    Reason(LEARNS, always,
           "in a step {found.living_by_success:.1f} groups have right and wrong answers. Begin "
           "with a short run, and with the same run under --placebo advantages: if the reward is "
           "what teaches, that one does not learn."))


def percent(found: Estimate) -> str:
    if np.isnan(found.low):
        return f"{found.value:.0%}"
    return f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"


def wrapped(text: str) -> str:
    """Filled to 100 columns; lines that are indented, as those of a table, stay as they are."""
    return "\n".join(line if line.startswith("    ") else textwrap.fill(line, 100)
                     for line in text.split("\n"))
