"""Before training: the chances by enumeration, a rule on another problem, the words of a task that
can be learned, one that cannot, and one whose reward has a hole."""
import itertools
from types import SimpleNamespace

import pytest
from conftest import refusal

import lab.countdown as countdown_task
from lab.countdown import Problem
from lab.tools import preflight
from lab.tools.prospects import (CANNOT, CHANCE, EASY, FORM, HOLE, LEARNS, Answers, Blind, Findings,
                                 apply_rule, best_blind, chance_of_equal, pays_success, rule_of,
                                 share_of_form, shown_rule)


@pytest.mark.parametrize("values, size", [
    ([1, 1, 0, 0, 0], 2), ([1, 1, 0, 0, 0], 3), ([0.1, 1.1, 0.1, 1.1], 2), ([0, 0, 0], 2)])
def test_the_chance_of_equal_rewards_is_that_of_all_choices(values, size):
    choices = list(itertools.combinations(values, size))
    equal = sum(len(set(choice)) == 1 for choice in choices)
    assert chance_of_equal(values, size) == pytest.approx(equal / len(choices))


def test_a_rule_answers_another_problem_without_looking_at_it():
    rule = rule_of("<answer> 10 * ( 8 - 2 )</answer>", "10 8 2 make 60")
    assert apply_rule(rule, "4 5 6 make 9") == "<answer> 4 * ( 5 - 6 )</answer>"
    assert shown_rule(rule) == "<answer> a * ( b - c )</answer>"
    assert apply_rule(rule_of("7", "1 2 make 3"), "4 5 make 9") == "7"  # of no problem: it stays
    assert apply_rule(rule, "4 5") == "<answer> 4 * ( 5 -  )</answer>"  # it has no third number


def answers(problem, texts, reward, right=None, form=None):
    count = len(texts)
    return Answers(problem, texts, reward, right or reward, form or [1.0] * count, [1.0] * count)


def test_what_the_form_takes_of_the_rewards_variance():
    """Rewards 1, 0, 0, 0.5, of which the first alone is right. The mean is 0.375 and the sum of
    squares 1.25 - 4 * 0.140625 = 0.6875. Among the three wrong ones, mean 1/6: 0.25 - 3/36 =
    0.1667."""
    one = answers("p", list("abcd"), [1, 0, 0, 0.5], [1, 0, 0, 0])
    assert share_of_form([one]) == pytest.approx((0.25 - 3 / 36) / 0.6875)
    assert share_of_form([answers("p", ["a", "b"], [1.0, 1.0])]) is None
    assert pays_success([one])
    paid_for_being_wrong = answers("p", ["a", "b"], [0.0, 1.0], [1.0, 0.0])
    assert not pays_success([paid_for_being_wrong])


class Sums:
    """Problems such as 3 4; right is what names both numbers."""
    show = staticmethod(str)

    def prompt_for(self, problem):
        return f"add {problem}"

    def score(self, problem, text):
        first, second = problem.split()
        right = float(text == str(int(first) + int(second)))
        return {"reward": right + 0.5 * (text == f"{first} {second}"), "answer": right,
                "format": 1.0, "reasoning": 0.0}


PROBLEMS = [f"{a} {b}" for a in range(2, 10) for b in range(2, 10)]


def test_the_best_blind_answer_is_chosen_on_one_half_and_measured_on_the_other():
    """What was seen to earn most, 7, earns something on one problem only."""
    asked = [answers("3 4", ["7", "3 4"], [1.0, 0.5], [1, 0])]
    found = best_blind(asked, PROBLEMS, str, Sums().score)
    assert shown_rule(found.rule) == "a b" and found.reward == 0.5 and found.right == 0.0
    # nothing of the second half decides what is chosen
    turned = [*PROBLEMS[:32], *["1 6"] * 32]

    def paid_elsewhere(problem, text):
        return Sums().score(problem, text) | ({"reward": 0.0} if problem == "1 6" else {})

    other = best_blind(asked, turned, str, paid_elsewhere)
    assert other.rule == found.rule and other.reward == 0.0


def findings(problems, questions=8, group=4, task=None):
    """As `find` has them, with 64 problems that were not asked."""
    task = task or Sums()
    found = Findings(problems, questions, group)
    found.blind = best_blind(problems, PROBLEMS, task.show, task.score)
    return found


def said_of(found):
    return preflight.in_words(found, SimpleNamespace(questions=found.questions,
                                                     answers=found.group))


def some(reward, right=None, texts=None, count=6):
    return [answers(f"{i + 2} 3", texts or [f"answer {j}" for j in range(len(reward))], reward,
                    right) for i in range(count)]


class Hole(Sums):
    """The answer "cheat" earns as much as a right one."""
    def score(self, problem, text):
        honest = super().score(problem, text)
        return honest | {"reward": max(honest["reward"], float("cheat" in text))}


class Rule(Sums):
    """To copy the two numbers earns this much."""

    def __init__(self, copied):
        self.copied = copied

    def score(self, problem, text):
        honest = super().score(problem, text)
        copied = self.copied if text == problem else 0.0
        return honest | {"reward": max(honest["answer"], copied)}


def copies(reward, right):
    """Six problems; the first of the answers to each is the problem itself."""
    return [answers(f"{i} 3", [f"{i} 3", *"abcde"[:len(reward) - 1]], reward, right)
            for i in range(20, 26)]


def formed(is_right):
    """1 of 50 answers has the right form, which is right in 4 of 5 problems, or in none."""
    half = [0.05, 0.0] * 24 + [0.05]
    return [answers(f"{i} 3", [f"answer {j}" for j in range(50)],
                    [1.1 if is_right and i < 24 else 0.1 * (not is_right), *half],
                    [float(is_right and i < 24)] + [0.0] * 49, [1.0] + [0.0] * 49)
            for i in range(30)]


NONE, ONE = [0.0] * 6, [1.0] * 6
CHEAT = ["cheat", "5", *"wxyz"]
CASES = [  # sampled answers, the word, words of the reason for it, and what is not usual
    (some(NONE), CANNOT, "in a step 0.00 groups"),
    (some(ONE), EASY, "100% of the answers are right, so at most 0 points can be gained."),
    (some([1.0] * 59 + [0.0]), EASY, "98% of the answers are right, so at most 2 points"),
    # in one problem of 40 one answer of 6 differs, and 4 of 6 groups have it: 8 * 4 / 6 / 40
    (some([0.1, 0, 0, 0, 0, 0], NONE, count=1) + some(NONE, count=39), CANNOT,
     "in a step 0.13 groups have answers with different rewards. Row 3 of docs/reference/how_a_run_"
     "fails.md says what to try."),
    (some([1.0, 2, 3, 4, 5, 6], ONE), FORM, "hardly ever because one answer is right"),
    (some([1.0, 0, 1, 0, 1, 0], [0.0, 1, 0, 1, 0, 1]), FORM, "or being right is not paid"),
    (some([0.1, 0, 0, 0.1, 0, 0.1], NONE), FORM, "hardly ever because one answer is right"),
    (some([1.0, 1, 0, 0, 0, 0], [0.0, 1, 0, 0, 0, 0], CHEAT), HOLE,
     "the constant text `cheat`, which is the same for every problem, earns 1.00, nearly as much "
     "as the best sampled answers or more. What helps is a reward"),
    (some([1.0, 0, 0, 0, 1.0, 0]), LEARNS, "in a step 7.5 groups have right and wrong answers"),
    (copies([1.0, 1, 0, 0, 0, 0], [0.0, 1, 0, 0, 0, 0]), HOLE, "the rule `a b`, where a, b, ... "
     "are the numbers of the problem, which is the same for every problem, earns 1.00", Rule(1.0)),
    # what earns little is a hole only where no answer earns much: 0.2 of 0 to 0.2, or of 0 to 1
    (copies([0.2, 0.2, 0, 0], [0.0, 1, 0, 0]), HOLE, "earns 0.20", Rule(0.2)),
    ([*copies([0.2, 0.2, 0, 0], [0.0, 1, 0, 0]) * 10,
      answers("30 3", list("abcd"), [1.0, 0, 0, 0])], LEARNS, "", Rule(0.2)),
    # hardly a group of 4 has a right answer, but success rises with the form
    (formed(True), LEARNS, "80% of the well formed ones are right", Hole(), 4),
    (formed(False), FORM, "", Hole(), 4)]


@pytest.mark.parametrize("problems, word, reason, task, questions", [
    (*case, *(Hole(), 8)[len(case) - 3:]) for case in CASES])
def test_the_word_of_a_task_and_the_reason_for_it(problems, word, reason, task, questions):
    found = findings(problems, questions, task=task)
    *_, blind, said = said_of(found)
    assert said.startswith(f"{word.upper()}: ") and reason in said
    assert (word == HOLE and isinstance(task, Hole)) == ("`cheat`" in blind)


def test_a_reward_that_a_blank_or_a_word_more_changes_pays_by_chance():
    """60 answers: the other reward follows from the first, whatever it is worth, or it does not. If
    one in sixty is paid beside a word, the word broke the others' form."""
    rewards = [float(n % 3 == 0) for n in range(60)]
    twice, chance = [2 * reward for reward in rewards], [float(n % 2) for n in range(60)]
    for blank, more, word in ((twice, twice, LEARNS), ([0.0] * 60, [0.0] * 60, LEARNS),
                              (twice, [0.0] * 59 + [1.0], LEARNS), (chance, twice, CHANCE),
                              (twice, chance, CHANCE)):
        problems = some(rewards, count=1)
        problems[0].with_more.extend(zip(rewards, blank, more))
        assert (found := findings(problems)).word == word
    assert "(their correlation is +0.00)" in said_of(found)[-1]


@pytest.mark.parametrize("reward, teach, by_success", [
    ([1.0, 0, 0, 0.5], "6.7", "4.0"), ([0.6, 0.5, 0, 0], "6.7", "3.1")])
def test_the_groups_that_teach_to_be_right(reward, teach, by_success):
    """Of four answers the first is right: half of the pairs have it, and 5 of 6 pairs differ in
    reward. 8 groups * 5/6 = 6.7 teach. In the first case 1 - 0.24 of them would be more than those
    with a right answer. In the second the form has (0.25 - 1/12) / 0.3075 = 0.542 of the variance,
    and 8 * 5/6 * 0.458 = 3.1."""
    found = findings(some(reward, [1.0, 0, 0, 0]), group=2)
    assert (f"The planned step has 8 groups of 2: {teach} of them teach, {by_success} to be right."
            in said_of(found))


def test_it_samples_each_problem_and_says_a_word(capsys, monkeypatch):
    asked, found = [], []
    usual, find = preflight.Policy.ask, preflight.find

    def counted(policy, problems, answers, seed, greedy=False):
        asked.append((len(problems), seed))
        return usual(policy, problems, answers, seed, greedy)

    monkeypatch.setattr(preflight, "NOT_ASKED", 30)
    monkeypatch.setattr(preflight.Policy, "ask", counted)
    monkeypatch.setattr(preflight, "find", lambda policy, s, sampled: (
        found.extend(sampled) or find(policy, s, sampled)))
    typed = ["--problems", "6", "--answers", "8", "--questions", "4", "--group", "4",
             "--threads", "1", "--max_new_tokens", "64"]
    assert preflight.main(typed) == 0
    assert [count for count, _ in asked] == [2, 2, 2]  # 16 answers, as an update has
    assert len({seed for _, seed in asked}) == 3
    assert len({one.problem for one in found}) == 6
    assert all(len(one.texts) == len(one.reward) == 8 for one in found)
    printed = capsys.readouterr().out
    assert "LEARNS" in printed and "Without the task: a sampled answer earns " in printed
    monkeypatch.setattr(preflight.Findings, "word", CANNOT)
    assert preflight.main(typed) == 1


def test_a_hash_of_the_words_pays_another_answer_with_a_word_more():
    """Whatever blanks are between them. A reward of the last word stays as it is."""
    for reward, is_changed in ((lambda words: hash(words) % 7, True), (lambda words: words[-1:]
                                                                       == ("7",), False)):
        task = SimpleNamespace(score=lambda problem, text: {"reward": reward(tuple(text.split()))})
        given = [f"{n} makes {n % 9}" for n in range(40)]
        paid = [task.score("", text)["reward"] for text in given]
        found = preflight.with_more(SimpleNamespace(task=task), "", answers("", given, paid))
        assert all(one == blank for one, blank, _ in found) and len(found) == preflight.WITH_MORE
        assert any(one != word for one, _, word in found) == is_changed


@pytest.mark.parametrize("count, is_tried", [(19, False), (20, True)])
def test_answers_are_tried_only_if_there_are_other_problems(monkeypatch, count, is_tried):
    monkeypatch.setattr(preflight, "has_turns", lambda task: False)
    task = SimpleNamespace(
        knows_success=True, show=lambda n: f"{n} 3 x",
        training_problems=lambda seed, step, asked: range(count),
        score=lambda problem, text: {"reward": 0.0, "answer": 0.0})
    found = preflight.find(SimpleNamespace(task=task),
                           SimpleNamespace(seed=0, questions=8, answers=4),
                           some([1.0, 0, 0, 0, 1.0, 0]))
    assert (found.blind is not None) == is_tried and found.word == LEARNS


def test_a_task_with_one_problem_is_refused(monkeypatch):
    monkeypatch.setattr(countdown_task.Task, "training_problems",
                        lambda task, seed, step, count: [Problem((2, 3, 4), 9)] * count)
    assert "the task has 1 different problems" in refusal(preflight.main, [])


def test_without_success_the_reward_alone_is_judged_and_what_always_earns_the_most_is_a_hole():
    """Three groups of rewards from 0.2 to 0.9. The blind answer earns 0.9, as the best do: nothing
    else is left to learn, although 0.9 lies less than a third of the range above the mean."""
    problems = [answers(f"{n} 3", list("abcd"), [0.9, 0.9, 0.2, 0.9]) for n in range(3)]
    found = Findings(problems, 8, 4, Blind("a", 0.85, 0.0), knows_success=False)
    assert found.living_by_success == found.living == 8 and found.word == "learns"
    said = "\n".join(said_of(found))
    assert "Reward: 0.725" in said and "right" not in said.replace("are right. So it is", "")
    found.blind = Blind("a", 0.9, 0.0)
    assert found.word == "has a hole that one answer can use"
