"""The findings of tools.preflight as sentences, and the word that they end in."""
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from analysis.statistics import Estimate, detectable, mean_over
from tools.helpers.first_step import FirstStep
from tools.helpers.prospects import (Answers, Blind, as_share, best_blind, disagreement, fit_beta,
                                     living_share, mean_scores, pays_success, repeats,
                                     share_of_form, shown_rule)
from tools.helpers.seen import (IN_RANGE, KNOWN_RATES, MOST_ANSWERS, SEEN_OF_RUNS, Forecast, Speed,
                                forecast, visible_gain)

SIZES = (2, 4, 8, 16, 32)  # of groups
FEWEST_LIVING = 0.5  # groups a step: with fewer, most steps make no update
FEWEST_OTHERS = 20  # problems that were not asked
EARNED_BLINDLY = 0.8  # of what the best sampled answers earn beyond the average
FEWEST_FORMED = 20  # well formed answers of which the success is told
RISE_BY_FORM = 0.1  # of success, if every answer were well formed: so much is worth the word
SPREAD_OF_PAIRS = (1.4, 6.0)  # points: the standard deviation of the difference of two runs
LEARNS, FORM, ONE_ANSWER, CANNOT = (
    "learns", "learns the form only", "learns one answer for all", "cannot")


@dataclass(frozen=True)
class Plan:
    """The training that is planned."""
    questions: int       # problems a step
    group: int           # answers to each
    max_new_tokens: int
    steps: int
    held_out: int        # problems
    has_examples: bool   # whether the task has the flag --examples
    speed: Speed         # how fast success rose in runs of such a model
    learning_rate: float
    is_evaluated_alike: bool = True  # training and evaluation sample at the same temperature


@dataclass
class Findings:
    problems: Sequence[Answers]
    plan: Plan
    task: Any
    others: Sequence[Any]   # problems that were not asked
    with_examples: str = ""
    first_step: FirstStep | None = None

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

    @property
    def teaching(self) -> float:
        """The answers of a step whose group teaches to be right. If the form comes first, every
        group whose rewards differ does."""
        share = self.living if self.form_raises_success else self.living_by_success
        return self.plan.questions * self.plan.group * share

    @cached_property
    def variance(self) -> float:
        """The mean over the problems of p (1 - p), unbiased, where p is the success at one."""
        of_each = []
        for one in self.problems:
            n, right = len(one.right), sum(one.right)
            of_each.append(right * (n - right) / (n * (n - 1)))
        return float(np.mean(of_each))

    @cached_property
    def forecast(self) -> Forecast | None:
        """Whether the gain will be seen; None if nothing is evaluated, or at another temperature
        than that of training."""
        plan = self.plan
        if plan.held_out == 0 or not plan.is_evaluated_alike:
            return None
        return forecast(plan.speed, plan.learning_rate, self.teaching, self.variance, plan.steps,
                        self.mean("right").value, plan.held_out)

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
    def word(self) -> str:
        if self.plan.questions * self.living < FEWEST_LIVING:
            return CANNOT
        by_success = self.plan.questions * self.living_by_success
        if by_success < FEWEST_LIVING and not self.form_raises_success:
            return FORM
        if self.earned_blindly >= EARNED_BLINDLY:
            return ONE_ANSWER
        return LEARNS

    def in_words(self) -> str:
        parts = [self.about_success(), self.about_groups(), self.about_form(), self.about_blind(),
                 self.about_answers(), self.with_examples, self.about_first_step(),
                 self.about_seeing(), self.conclusion()]
        return "\n\n".join(wrapped(part) for part in parts if part)

    def about_success(self) -> str:
        solved = [float(np.mean(one.right)) for one in self.problems]
        counts = {"never": sum(share == 0 for share in solved),
                  "up to 10%": sum(0 < share <= 0.1 for share in solved),
                  "10 to 50%": sum(0.1 < share <= 0.5 for share in solved),
                  "50 to 90%": sum(0.5 < share < 0.9 for share in solved),
                  "90% or more": sum(0.9 <= share < 1 for share in solved),
                  "always": sum(share == 1 for share in solved)}
        listed = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        return (f"Success: {percent(as_share(self.mean('right')))} of the answers are right, "
                f"{self.sampled} answers to each of {len(self.problems)} problems. So often each "
                f"problem is solved: {listed}.")

    def about_groups(self) -> str:
        """A table: for each size of a group, how many are living, and what one of them costs."""
        lines = ["A group teaches only if the rewards of its answers differ:",
                 "    answers   groups that teach    of these by    answers for one",
                 "    in a group  (95% interval)     being right    that teaches"]
        for size in SIZES:
            if size > self.sampled:
                continue
            every = living_share(self.values("reward"), size)
            by_success = living_share(self.values("right"), size)
            cost = f"{size / every.value:.0f}" if every.value > 0 else "none seen"
            lines.append(f"    {size:6d}     {percent(every):20s}  {by_success.value:8.0%}     "
                         f"{cost:>9s}")
        right = [int(sum(one.right)) for one in self.problems]
        beta = fit_beta(right, self.sampled)
        if beta:
            larger = 4 * self.sampled
            lines.append(f"By a beta distribution of the problems' success (a = {beta.a:.2g}, b = "
                         f"{beta.b:.2g}) a group of {larger} has a right answer at "
                         f"{beta.some_right(larger):.0%} of the problems.")
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
        against = disagreement(self.problems)
        if against is not None and against < -0.1:
            text += (f" What is paid beside success is paid for being wrong: within groups their "
                     f"correlation is {against:+.2f}. The two rewards pull against each other.")
        return text

    def about_blind(self) -> str:
        task, show = self.task, self.task.show
        if self.blind is None:
            return (f"Without the task: there are only {len(self.others)} problems beside those "
                    "that were asked, too few to try an answer on that ignores the problem.")
        earned = {
            "an empty answer": mean_scores("", self.others, show, task.score)["reward"],
            "a copy of the problem": float(np.mean(
                [task.score(problem, show(problem))["reward"] for problem in self.others])),
            "a copy of the whole prompt": float(np.mean(
                [task.score(problem, task.prompt_for(problem))["reward"]
                 for problem in self.others]))}
        formed = [reward for one in self.problems
                  for reward, form, right in zip(one.reward, one.format, one.right)
                  if form >= 1 and not right]
        if formed:
            earned["a wrong answer in the right form"] = float(np.mean(formed))
        listed = ", ".join(f"{name} {reward:.2f}" for name, reward in earned.items())
        rule = " ".join(shown_rule(self.blind.rule).split())
        shown = rule if len(rule) <= 60 else f"... {rule[-57:]}"
        mean = self.mean("reward").value
        return (f"Without the task: a sampled answer earns {mean:.2f} on average. The best answer "
                f"that ignores the problem earns {self.blind.reward:.2f} and is right "
                f"{self.blind.right:.1%} of the time: `{shown}` (a, b, ... are the problem's "
                f"numbers). Others earn: {listed}. Of what the best sampled answers earn beyond "
                f"the average, that one answer has {max(0.0, self.earned_blindly):.0%}.")

    def about_answers(self) -> str:
        texts = [text for one in self.problems for text in one.texts]
        different = np.mean([len(set(one.texts)) for one in self.problems])
        cut = 1 - self.mean("finished").value
        repeated = np.mean([repeats(text) for text in texts])
        return (f"Answers: {self.mean('length').value:.0f} tokens on average, {cut:.0%} were cut "
                f"off by the limit of {self.plan.max_new_tokens}; the format score is "
                f"{self.mean('format').value:.2f}; {different:.0f} of {self.sampled} answers to a "
                f"problem are different; {repeated:.0%} repeat themselves; the entropy is "
                f"{self.mean('entropy').value:.2f}.")

    def about_seeing(self) -> str:
        """When a gain is seen, and how many seeds compare two methods."""
        plan = self.plan
        if plan.held_out == 0:
            return "Seeing it: the task has no held-out problems, so no evaluation shows a gain."
        visible = visible_gain(self.mean("right").value, plan.held_out)
        text = (f"Seeing it: with {plan.held_out} held-out problems a gain counts as seen if it is "
                f"more than {visible:.1f} points, two standard errors.")
        if self.word in (LEARNS, ONE_ANSWER):
            text += f" {self.expected_gain()}"
        seeds = []
        for spread in SPREAD_OF_PAIRS:
            seeds.append(next((n for n in range(3, 200)
                               if detectable(n - 1) * spread / np.sqrt(n) <= 3), 200))
        return (f"{text} To see three points between two methods took {seeds[0]} pairs of runs on "
                f"the tiny model and would take {seeds[1]} on a real one, whose pairs differ more.")

    def expected_gain(self) -> str:
        """Sentences: the gain of the planned steps, and when it is seen."""
        plan, expected = self.plan, self.forecast
        if expected is None:
            return ("The evaluation samples at another temperature than the training, so its gain "
                    "is not forecast.")
        if expected.gain <= 0:
            return "No problem is solved now and then, so no gain is expected."
        room = 100 * (1 - self.mean("right").value)  # what there is to gain
        low, high = (min(end, room) for end in expected.gain_between())
        gain = f"{expected.gain:.1f}"
        if expected.gain >= room:
            gain = f"all that there is to gain, {room:.1f}"
        early, half, late = (expected.steps_for(chance) for chance in (0.1, 0.5, 0.9))
        seen, of = SEEN_OF_RUNS[expected.word]
        text = (f"By {plan.speed.runs}, the planned {plan.steps} steps raise success by {gain} "
                f"points ({low:.1f} to {high:.1f}; of {IN_RANGE[1]} other settings, all of the "
                f"tiny model, {IN_RANGE[0]} lay in such a range). So the gain {expected.word}. "
                f"(When this was said of runs of the tiny model, {seen} of {of} were seen to "
                f"rise.) About {half} steps show it ({early} to {late}).")
        if self.teaching > MOST_ANSWERS:
            text += (f" (Of the {self.teaching:.0f} answers of a step whose group teaches "
                     f"{MOST_ANSWERS} are counted, because those runs had no more.)")
        times = plan.learning_rate / plan.speed.learning_rate
        if not KNOWN_RATES[0] <= times <= KNOWN_RATES[1]:
            text += (f" But the learning rate is {times:.3g} times that of those runs, and nothing "
                     "is known of such a rate; three times as much was too high.")
        return text

    def about_first_step(self) -> str:
        """How noisy the gradient of a batch is, and whether it raises success."""
        step = self.first_step
        if step is None:
            return ""
        signal, success = step.signal(), step.raises_success()
        text = f"The first step, by the gradients of {step.groups} groups of {self.plan.group}: "
        if not step.reward.any():
            return text + "all of them are 0."
        if signal.low > 0:
            text += (f"a batch of {step.groups_worth():.0f} groups has as much noise as squared "
                     f"signal, and the planned one has {self.plan.questions}.")
        else:
            text += (f"they show no common direction yet. A batch needs at least "
                     f"{step.fewest_groups_worth():.0f} groups until it has as much signal as "
                     f"noise, and the planned one has {self.plan.questions}. (--gradients "
                     f"{4 * step.groups} sees more.)")
        if success.low > 0:
            return text + " A step raises success at other problems."
        if success.high < 0:
            return text + " A step lowers success at other problems."
        return text + " Whether a step raises success at other problems cannot be told from them."

    def conclusion(self) -> str:
        return f"{self.word.upper()}{self.whether_seen()}: {self.reason()}"

    def whether_seen(self) -> str:
        """What follows the word *learns*: whether the gain is seen, and after how many steps."""
        if self.word != LEARNS or self.forecast is None or self.forecast.gain <= 0:
            return ""
        joined = ", but it" if self.forecast.word == "will not be seen" else ", and it"
        return (f"{joined} {self.forecast.word} in {self.plan.steps} steps (about "
                f"{self.forecast.steps_for(0.5)} show it)")

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
        if self.word == FORM and success > 0.9:
            return ("nearly every answer counts as right, and what differs between the rewards of "
                    "a group is something else. What helps: a reward, or harder problems, by which "
                    "some answers are wrong.")
        if self.word == FORM and self.living_if_paid >= FEWEST_LIVING:
            return (f"in a step {self.living_if_paid:.1f} groups have right and wrong answers, but "
                    "the reward hardly pays for being right, or pays for being wrong. What helps: "
                    "another reward.")
        if self.word == FORM:
            return ("the rewards of a group differ, but hardly ever because one answer is right "
                    f"and another wrong. {self.what_helps()}")
        if self.plan.questions * self.living_by_success < FEWEST_LIVING:
            return ("the form first: hardly a group has right and wrong answers, but "
                    f"{self.right_if_formed:.0%} of the well formed ones are right, and "
                    f"{success:.1%} of all. {self.what_helps()}")
        return (f"in a step {self.plan.questions * self.living_by_success:.1f} groups have right "
                "and wrong answers. Begin with a short run, and with the same run under --placebo "
                "advantages: if the reward is what teaches, that one does not learn.")

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
