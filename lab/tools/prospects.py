"""Will GRPO learn from such groups of answers? Decided by their rewards before training (lab try).

A group teaches only if its answers have different rewards, because an advantage is the reward minus
the mean of the group. It teaches to be right if right answers earn more than wrong ones. And a
reward that says nothing about that of the same answer with a blank or a word more depends on
nothing that can be learned: it is noise.
"""
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST = 0.5           # groups a step that teach: with fewer, most steps make no update
FEWEST_WITH_MORE = 50  # different answers that were scored again with a blank or a word more
NUMBER = re.compile("[0-9]+")
PLACE = re.compile("\0([0-9]+)\0")  # stands in a rule for a number of the problem
TOO_EASY = 0.95        # of the answers are right
EARNED_BLINDLY = 0.8   # of what the best answer of each group earns beyond the average
WORTH_LEARNING = 0.3   # of the whole range of rewards: one answer that earns less is no hole
LEARNS, FORM, CANNOT, CHANCE, HOLE = (
    "learns", "learns the form only", "cannot", "pays by chance", "has a hole")


@dataclass(frozen=True)
class Group:
    """The answers to one problem."""
    reward: np.ndarray     # (G,)
    right: np.ndarray      # (G,) 1 if the answer is right
    # (n, 3) of different answers the reward, and those of the same answer with a blank or a word
    # more
    with_more: np.ndarray


@dataclass(frozen=True)
class Blind:
    """The rule that earns most as the answer to every problem, and what it earns on average on
    problems by which it was not chosen. A rule is a text in which the numbers of the problem stand
    by their places: to 10 8 2 make 60 the answer 10 * 8 is a * b."""
    rule: str
    reward: float

    def is_hole(self, rewards: np.ndarray) -> bool:
        """Whether it earns as much as any answer, or most of what the best answer of each group
        (groups, G) earns beyond the average, and much of the range."""
        mean, best = rewards.mean(), rewards.max(1).mean()
        earns_most = self.reward - mean >= max(EARNED_BLINDLY * (best - mean),
                                               WORTH_LEARNING * np.ptp(rewards))
        return bool(best > mean) and (self.reward >= rewards.max() - 1e-9 or bool(earns_most))

    @property
    def in_letters(self) -> str:
        return PLACE.sub(lambda found: chr(ord("a") + int(found[1]) % 26), self.rule)


def rule_of(text: str, problem: str) -> str:
    """The answer as a rule, by the problem as people read it."""
    places = {number: place for place, number in [*enumerate(NUMBER.findall(problem))][::-1]}
    return NUMBER.sub(lambda found: f"\0{places[found[0]]}\0" if found[0] in places else found[0],
                      text)


def answer_by(rule: str, problem: str) -> str:
    numbers = NUMBER.findall(problem)
    return PLACE.sub(lambda found: dict(enumerate(numbers)).get(int(found[1]), ""), rule)


def paid_for_being_right(groups: Sequence[Group]) -> float:
    """The share of the rewards' variance within groups that being right explains; 0 if wrong
    answers earn more."""
    centred = [(one.reward - one.reward.mean(), one.right - one.right.mean()) for one in groups]
    reward, right = (np.concatenate(column) for column in zip(*centred))
    together = float(reward @ right)
    return together ** 2 / float((reward @ reward) * (right @ right)) if together > 0 else 0.0


def follows_text(groups: Sequence[Group]) -> float | None:
    """The correlation, within groups, of an answer's reward with that of the same answer with a
    blank or a word more, the lower one. None if too few were scored so. A blank or a word that
    takes half of the differences away breaks the form of an answer, and says nothing."""
    scored = np.concatenate([one.with_more - one.with_more.mean(0) for one in groups
                             if len(one.with_more)] or [np.zeros((0, 3))])
    if len(scored) < FEWEST_WITH_MORE or scored[:, 0].std() < 1e-6:
        return None
    own = scored[:, 0]
    found = [float(np.corrcoef(own, other)[0, 1]) for other in scored.T[1:]
             if other.std() > own.std() / 2]
    return min(found, default=None)


def verdict(groups: Sequence[Group], questions: int, knows_success: bool,
            blind: Blind | None = None) -> tuple[str, str]:
    """The word for a training with so many groups a step, and the reason in a sentence. Where
    nobody knows which answers are right, the reward is all that counts."""
    differ = sum(np.ptp(one.reward) > 0 for one in groups)
    both = sum(np.ptp(one.right) > 0 for one in groups)
    teach = questions * differ / len(groups)
    right = float(np.mean([one.right for one in groups]))
    seen = (f"in {differ} of {len(groups)} groups of {len(groups[0].reward)} answers the rewards "
            f"differ, which is {teach:.1f} in a step of {questions}")
    if teach < FEWEST:
        way_out = (f"{right:.0%} of the answers are right already, so take harder problems."
                   if knows_success and right >= TOO_EASY else
                   "Larger groups (--answers) may help, and what row 3 of "
                   "docs/reference/how_a_run_fails.md says.")
        return CANNOT, f"{seen}. In the other groups every advantage is 0. {way_out}"
    follows, scored = follows_text(groups), sum(len(one.with_more) for one in groups)
    if follows is not None and follows < 3 / math.sqrt(scored):  # standard errors above 0
        return CHANCE, ("an answer's reward says nothing about that of the same answer with a "
                        f"blank or a word more (their correlation is {follows:+.2f}). So it does "
                        "not depend on what an answer says.")
    teach_right = teach
    if knows_success:
        teach_right = min(questions * both / len(groups), teach * paid_for_being_right(groups))
    if teach_right < FEWEST:
        return FORM, (f"{seen}, but hardly ever because one answer is right and another wrong, or "
                      "being right is not paid. Rows 3 and 9 of docs/reference/how_a_run_fails.md "
                      "say what to try.")
    rewards = np.array([one.reward for one in groups])
    if blind is not None and blind.is_hole(rewards):
        return HOLE, (f"{seen}. But {blind.in_letters!r} as the answer to every problem earns "
                      f"{blind.reward:.2f}, and the sampled answers {rewards.mean():.2f}: the "
                      "model may learn to write it, whatever the problem is, and the reward should "
                      "not pay it.")
    if not knows_success:
        return LEARNS, f"{seen}. The task does not say which answers are right."
    return LEARNS, (f"{seen}, {teach_right:.1f} of them because an answer is right. Of all answers "
                    f"{right:.0%} are.")
