"""The findings of tools.preflight as sentences, and the word that they end in."""
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analysis.statistics import Estimate, mean_over, within
from tools.helpers.prospects import (Answers, Blind, best_blind, disagreement, living_share,
                                     pays_success, share_of_form, shown_rule)

SIZES = (2, 4, 8, 16, 32)  # of groups
FEWEST_LIVING = 0.5  # groups a step: with fewer, most steps make no update
FEWEST_OTHERS = 20  # problems that were not asked
EARNED_BLINDLY = 0.8  # of what the best sampled answers earn beyond the average
FEWEST_FORMED = 20  # well formed answers of which the success is told
RISE_BY_FORM = 0.1  # of success, if every answer were well formed: so much is worth the word
AGAINST = -0.1  # a correlation of success and the rest of the reward that forbids *learns*
LEARNS, FORM, ONE_ANSWER, CANNOT = (
    "learns", "learns the form only", "learns one answer for all", "cannot")


@dataclass(frozen=True)
class Plan:
    """The training that is planned."""
    questions: int       # problems a step
    group: int           # answers to each
    max_new_tokens: int
    has_examples: bool   # whether the task has the flag --examples, and the model's tokenizer
                         # can spell them


@dataclass
class Findings:
    problems: Sequence[Answers]
    plan: Plan
    task: Any
    others: Sequence[Any]   # problems that were not asked
    unequal: int = 0        # answers that earned something else when they were scored once more

    def mean(self, name: str) -> Estimate:
        """The mean over all answers of a number of each, with an interval over the problems."""
        return mean_over([float(np.mean(getattr(one, name))) for one in self.problems])

    def values(self, name: str) -> list[list[float]]:
        return [getattr(one, name) for one in self.problems]

    @cached_property
    def sampled(self) -> int:
        return len(self.problems[0].reward)

    @cached_property
    def living(self) -> float:
        """The share of the planned groups whose rewards differ."""
        return living_share(self.values("reward"), min(self.plan.group, self.sampled)).value

    @cached_property
    def living_by_success(self) -> float:
        """The share of the planned groups in which right answers earn more than wrong ones: some
        are right and some wrong, and the reward differs by more than the form. Where being right
        is not rewarded it is 0."""
        size = min(self.plan.group, self.sampled)
        by_success = living_share(self.values("right"), size).value
        form = share_of_form(self.problems)
        if form is None or not pays_success(self.problems):
            return 0.0
        return min(by_success, self.living * (1 - form))

    @property
    def living_if_paid(self) -> float:
        """The groups of a step that would teach to be right if only that were rewarded."""
        size = min(self.plan.group, self.sampled)
        return self.plan.questions * living_share(self.values("right"), size).value

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
        if self.plan.questions * self.living < FEWEST_LIVING:
            return CANNOT
        by_success = self.plan.questions * self.living_by_success
        if by_success < FEWEST_LIVING and not self.form_raises_success:
            return FORM
        if self.earned_blindly >= EARNED_BLINDLY:
            return ONE_ANSWER
        return FORM if self.pulls_apart else LEARNS

    def in_words(self) -> str:
        parts = [self.about_success(), self.about_groups(), self.about_form(), self.about_blind(),
                 self.about_scoring(), self.conclusion()]
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
            every = living_share(self.values("reward"), size)
            by_success = living_share(self.values("right"), size)
            lines.append(f"    {size:6d}     {percent(every):20s}  {by_success.value:8.0%}")
        plan = self.plan
        lines.append(f"The planned step has {plan.questions} groups of {plan.group}: "
                     f"{plan.questions * self.living:.1f} of them teach, "
                     f"{plan.questions * self.living_by_success:.1f} to be right.")
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
        if self.blind is None:
            return (f"Without the task: there are only {len(self.others)} problems beside those "
                    "that were asked, too few to try an answer on that ignores the problem.")
        shown = " ".join(shown_rule(self.blind.rule).split())
        mean = self.mean("reward").value
        return (f"Without the task: a sampled answer earns {mean:.2f} on average. The best answer "
                f"that ignores the problem earns {self.blind.reward:.2f} and is right "
                f"{self.blind.right:.1%} of the time: `{shown}` (a, b, ... are the problem's "
                "numbers; it may be empty). Of what the best sampled answers earn beyond the "
                f"average, that one answer has {max(0.0, self.earned_blindly):.0%}.")

    def about_scoring(self) -> str:
        """Whether an answer that is scored twice earns the same."""
        count = sum(len(one.texts) for one in self.problems)
        if not self.unequal:
            return f"Scored once more, all {count} answers earn the same."
        return (f"Scored once more, {self.unequal} of {count} answers earn something else: the "
                "reward is random, or it remembers earlier calls. All that is said here of rewards "
                "is about this chance, too.")

    def conclusion(self) -> str:
        return f"{self.word.upper()}: {self.reason()}"

    def reason(self) -> str:
        success = self.mean("right").value
        cut = 1 - self.mean("finished").value
        if self.word == CANNOT:
            if cut > 0.5:
                return (f"{cut:.0%} of the answers are cut off before they end, so nearly all get "
                        f"the same reward. What helps: --max_new_tokens "
                        f"{2 * self.plan.max_new_tokens}, or a prompt that asks for less.")
            if success > 0.5:
                return ("nearly all answers are right already, so there is nothing to compare. "
                        "What helps: harder problems.")
            if self.only_reward is not None:
                return (f"every sampled answer earned exactly {self.only_reward:.3g}. Score an "
                        "answer by hand that you know to be right: if it earns the same, the "
                        "reward has a mistake. Else the problems are too hard. "
                        f"{self.what_helps()}")
            return (f"in a step {self.plan.questions * self.living:.2f} groups have answers with "
                    f"different rewards. {self.what_helps()}")
        if self.word == ONE_ANSWER:
            first = (" Right answers are rewarded too, so success may rise before that."
                     if self.plan.questions * self.living_by_success >= 2 * FEWEST_LIVING else "")
            return ("an answer that ignores the problem earns nearly all that the best sampled "
                    f"answers earn, and it is easier to learn.{first} What helps: another reward, "
                    "under which this answer earns less, or problems that no one answer solves.")
        if self.word == FORM:
            return self.why_form(success)
        if self.plan.questions * self.living_by_success < FEWEST_LIVING:
            return ("the form first: hardly a group has right and wrong answers, but "
                    f"{self.right_if_formed:.0%} of the well formed ones are right, and "
                    f"{success:.1%} of all. {self.what_helps()}")
        return (f"in a step {self.plan.questions * self.living_by_success:.1f} groups have right "
                "and wrong answers. Begin with a short run, and with the same run under --placebo "
                "advantages: if the reward is what teaches, that one does not learn.")

    def why_form(self, success: float) -> str:
        if self.pulls_apart and pays_success(self.problems):
            return ("right answers are rewarded, and what is paid beside that is paid for being "
                    "wrong, so the two pull against each other. What helps: a reward for being "
                    "right alone, or one whose parts agree.")
        if success > 0.9:
            return ("nearly every answer counts as right, and what differs between the rewards of "
                    "a group is something else. What helps: a reward, or harder problems, by which "
                    "some answers are wrong.")
        if self.living_if_paid >= FEWEST_LIVING:
            return (f"in a step {self.living_if_paid:.1f} groups have right and wrong answers, but "
                    "the reward hardly pays for being right, or pays for being wrong. What helps: "
                    "another reward.")
        return ("the rewards of a group differ, but hardly ever because one answer is right "
                f"and another wrong. {self.what_helps()}")

    def what_helps(self) -> str:
        ways = ["easier problems"]
        if self.plan.has_examples:
            ways.append("solved examples in the prompt (--examples 4)")
        ways += ["a cold start on right answers (python -m tools.warmup)"]
        if self.mean("right").value > 0:
            ways.append(f"larger groups (--answers {4 * self.plan.group})")
        return f"What helps: {', '.join(ways[:-1])}, or {ways[-1]}."


def percent(found: Estimate) -> str:
    if np.isnan(found.low):
        return f"{found.value:.0%}"
    return f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"


def wrapped(text: str) -> str:
    """Filled to 100 columns; lines that are indented, as those of a table, stay as they are."""
    return "\n".join(line if line.startswith("    ") else textwrap.fill(line, 100)
                     for line in text.split("\n"))
