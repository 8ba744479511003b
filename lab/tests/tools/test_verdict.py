"""What is said of paired runs, by hand."""
import pytest
from conftest import refusal
from known_runs import recorded

import mitigations  # noqa: F401  fills the lists of choices
from lab.analysis.verdict import Tries, Try, Verdict


def runs_with(gains, start=0, base=0.3, ends=None, of_kind=None):
    """A look: plain GRPO at `base`, the placebo 0.01 above, the idea so far ahead of plain GRPO;
    the placebo within kinds is so far ahead, too, if it is there. `ends` says which of the held-out
    problems each arm solves; the idea solves problems 0 and 2 only with the first seed."""
    def run(arm, number, success):
        answer = list(ends[arm]) if ends else []
        if arm == "idea" and number and answer:
            answer[0] = answer[2] = 0
        end = {"step": 2, "mode": "sampled", "success": 0, "answer": answer}
        lines = [{"success": success}, {"success": success}]
        return recorded(lines, [end] if ends else [],
                        {"steps": 2, "learning_rate": 0.001, "held_out_problems": "abc"})
    arms = {"plain": [base] * len(gains), "any": [base + 0.01] * len(gains),
            "idea": [base + gain for gain in gains]}
    if of_kind:
        arms["kind"] = [base + gain for gain in of_kind]
    return {arm: {start + number: run(arm, number, value) for number, value in enumerate(values)}
            for arm, values in arms.items()}


def verdict_of(*looks):
    verdict = Verdict("my_idea", runs_with(looks[0]))
    for gains in looks[1:]:
        verdict.add(runs_with(gains, 10))
    return verdict


def test_the_first_sentence_is_the_verdict():
    """0.03 and 0.05: mean 0.04, standard error 0.01, t with one degree of freedom 12.706."""
    nothing = verdict_of([0.03, 0.05])
    assert nothing.answer() == [
        "No difference seen between my_idea and plain GRPO: +4.0 (-8.7 to +16.7) points of success "
        "in training, 2 pairs: too few."]
    four = verdict_of([0.01, -0.02] * 2).answer()
    assert four[0].endswith(", 4 pairs.")
    assert four[1] == "Gains above +2.3 points are excluded (95%)."  # -0.5 + 3.182 * 0.866
    details = " ".join(nothing.details())
    choice = ("its choice of tokens is not seen to differ from a random one: +3.0 (-9.7 to +15.7) "
              "points. A placebo is the random choice: it has the same numbers at other tokens.")
    assert choice in details
    of_answers = " ".join(Verdict("rloo", runs_with([0.03, 0.05])).details())
    assert "its choice of answers" in of_answers and of_answers.endswith("other answers.")
    behind = verdict_of([-0.05, -0.051, -0.049, -0.05])
    assert behind.verdict() == ("my_idea is behind plain GRPO: -5.0 (-5.1 to -4.9) points of "
                                "success in training, 4 pairs.")
    assert "tokens is worse than a random one (-6.0 (-6.1 to -5.9) points)" in " ".join(
        behind.details())
    of_three = " ".join(verdict_of([-0.05, -0.051, -0.049]).details())
    assert "its choice of tokens is not seen to differ from a random one: -6.0 (" in of_three


HALF, ALL = [1, 0] * 100, [1] * 200  # which of 200 held-out problems are solved


def ended(gains, plain, idea, placebo, look=0):
    """A verdict on runs that ended with these held-out problems solved."""
    ends = {"plain": plain, "idea": idea, "any": placebo}
    return Verdict("my_idea", runs_with(gains, look, ends=ends))


OPEN = [0.03, 0.05, -0.03, -0.05]


class Others(Tries):
    """So many other tries, whose p is this."""

    def __init__(self, count, p=0.9):
        self.count, self.p = count, p

    def add(self, seeds, p):
        return [Try(f"other{number}", list(seeds), self.p) for number in range(self.count)]


def test_p_is_corrected_for_all_tries_on_the_same_runs_of_plain_grpo():
    """0.5, 1.5, 2.5 and 1.5 points have t = 3.67 and p = 0.035: twice that is above 0.05. Beside a
    try with a smaller p no other is left, and p stays."""
    gains = [0.005, 0.015, 0.025, 0.015]
    alone = Verdict("my_idea", runs_with(gains))
    assert alone.needs_second_look() and not alone.about_tries()
    verdict = Verdict("my_idea", runs_with(gains), Others(1))
    p = alone.primary[0].p
    assert p == pytest.approx(0.035, abs=5e-4)
    assert verdict.primary[0].p == pytest.approx(2 * p)
    assert not verdict.needs_second_look() and verdict.word == "no difference seen"
    [said] = verdict.about_tries()
    assert said == (f"On seeds 0 to 3 plain GRPO was compared 2 times: with my_idea here, and with "
                    f"other0 (4 seeds). So p = {p:.3f} becomes {2 * p:.3f} by Holm's correction.")
    assert said in verdict.answer()
    after = Verdict("my_idea", runs_with(gains), Others(1, p=0.001))
    assert after.primary[0].p == pytest.approx(p) and after.needs_second_look()


def test_tries_are_kept_beside_the_runs_of_plain_grpo(tmp_path):
    """The same command is the same try; other strengths and other seeds are others, and a try on
    seeds of its own has no run of plain GRPO in common."""
    path = tmp_path / "tries.json"
    one, two = Tries("a --strength 1", "a-1", path), Tries("a --strength 2", "a-2", path)
    assert one.add((0, 1, 2), 0.5) == [] == one.add((0, 1, 2), 0.5)
    [other] = two.add((0, 1, 2), float("nan"))
    assert str(other) == "a --strength 1 (3 seeds)"
    assert [other.p for other in one.add((0, 1, 2), 0.5)] == [None]
    assert len(one.add((0, 1), 0.4)) == 2 and one.add((3, 4, 5), 0.1) == []
    path.write_text('{"x": {"p": 1}}')
    assert "x is no try, which has an idea, seeds and a p" in refusal(one.add, (0,), 0.1)


def test_runs_that_sampled_the_same_have_no_verdict():
    """As after a single step, which is sampled before the first update."""
    same = verdict_of([0.0, 0.0])
    assert same.verdict() == ("No verdict: my_idea and plain GRPO had the same success in training "
                              "in every pair of runs.")
    said = " ".join(same.details())
    assert "before any update" in said and "its choice of" not in said
    same.doubt = "a reason"  # of held-out answers at the end it would not be true
    assert "before any update" not in " ".join(same.details())


def test_ahead_is_said_after_a_second_look_alone():
    some, none = [0.05, 0.051, 0.049, 0.05], [0.02, -0.03, 0.04, 0.0]
    assert verdict_of(some).needs_second_look() and not verdict_of(none).needs_second_look()
    twice = verdict_of(some, [0.03, 0.031, 0.029, 0.03])
    assert twice.word == "ahead" and not twice.needs_second_look()
    assert twice.verdict() == (
        "my_idea is ahead of plain GRPO: +3.0 (+2.9 to +3.1) points of success in training on 4 "
        "new seeds, after +5.0 (+4.9 to +5.1) points on the first 4.")
    assert "better than a random one (+2.0" in " ".join(twice.details())
    first = ("my_idea is not called ahead of plain GRPO: it gained +5.0 (+4.9 to +5.1) points on "
             "the first 4 seeds, but ")
    once, turned = verdict_of(some, none), verdict_of(some, [-0.05, -0.051, -0.049, -0.05])
    assert once.verdict().startswith(f"{first}+0.8 (") and "on 4 new ones." in once.verdict()
    assert turned.verdict().startswith(f"{first}-5.0 (") and turned.word != "behind"


def test_where_held_out_success_is_the_primary_metric_it_is_said_once(monkeypatch):
    monkeypatch.setattr("lab.analysis.verdict.doubt_about_training", lambda runs: "a reason")
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    [said] = verdict.answer()
    assert said.startswith("my_idea is behind plain GRPO: -50.8 (")
    assert said.endswith(" points of held-out success at the end, 4 pairs.")
    assert verdict.details()[0] == ("The primary metric is here the held-out success at the end, "
                                    "because a reason.")


def test_the_table():
    verdict = Verdict("my_idea", runs_with([0.05, 0.051, 0.049]))
    verdict.add(runs_with([0.03, 0.031, 0.029], 10))
    rows = verdict.table().to_json()["rows"]
    assert [(row["minus"], row["pairs"], round(row["training"]["value"], 4)) for row in rows] == [
        ("plain GRPO", 3, 0.05), ("its placebo", 3, 0.04),
        ("plain GRPO, new seeds", 3, 0.03), ("its placebo, new seeds", 3, 0.02)]
    assert all(row["end"]["value"] is None for row in rows)  # none was evaluated


def test_each_placebo_has_its_sentence_and_their_p_are_corrected_together():
    """0.5, 1.5, 2.5 and 1.5 points over the placebo of any tokens have p = 0.035. They are seen if
    it is the only placebo, and not if there are two. Where the placebo within kinds is the idea
    itself, the choice within a kind changes nothing."""
    gains = [0.015, 0.025, 0.035, 0.025]
    said = " ".join(Verdict("my_idea", runs_with(gains)).details())
    assert "its choice of tokens is better than a random one (+1.5 (+0.2" in said
    two = " ".join(Verdict("my_idea", runs_with(gains, of_kind=[0.05, -0.02, 0.06, 0.0])).details())
    assert "its choice of tokens is not seen to differ from a random one: +1.5 (+0.2" in two
    assert "its choice among tokens of the same category is not seen to differ" in two
    same = Verdict("my_idea", runs_with([0.03, 0.031, 0.029, 0.03], of_kind=[0.03, 0.031, 0.029,
                                                                             0.03]))
    said = " ".join(same.details())
    assert "its choice of tokens is better" in said
    assert ("its choice among tokens of the same category changes nothing: the placebo had the "
            "same results in every pair") in said


def test_it_names_the_learning_rate_if_all_arms_had_one():
    look = runs_with(OPEN)
    said = " ".join(Verdict("my_idea", look).details())
    assert "learning rate, 0.001, and another may suit my_idea better" in said
    for run in look["idea"].values():
        run.config["learning_rate"] = 0.002
    assert "learning rate" not in " ".join(Verdict("learning_rate=0.002", look).details())


def test_a_gain_with_greedy_answers_stands_beside_that_with_sampled_ones():
    """Sampled the idea solves half of 200 problems, and greedily all, as plain GRPO does: less
    sure, and not less able."""
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    for arm in verdict.looks[0].values():
        for run in arm.values():
            run.evaluations.append({"step": 2, "mode": "greedy", "success": 1, "answer": ALL})
    row = verdict.table().to_json()["rows"][0]
    assert row["training"]["low"] < 0 < row["training"]["high"]  # which hides nothing
    assert row["end"]["value"] == pytest.approx(-0.5075) and row["end"]["high"] < 0
    assert row["greedy"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def with_cost(look, seconds):
    """The look, in which a step of the idea takes so many seconds, and one of the others 1."""
    for arm, runs in look.items():
        for run in runs.values():
            for line in run.metrics:
                line |= {"tokens": 9, "processor_seconds": seconds if arm == "idea" else 1.0}
    return look


def test_the_verdict_is_of_equal_time_if_a_step_is_dearer():
    """4 points of gain at equal steps. Success does not grow here, so dear steps lose nothing."""
    gains = [0.03, 0.05, 0.04, 0.04]
    cheap, dear = (Verdict("my_idea", with_cost(runs_with(gains), cost)) for cost in (1.1, 1.2))
    assert (cheap.said, dear.said) == ("success in training",
                                       "success in training at equal processor time")
    assert cheap.answer()[1:] == [
        "At equal tokens, where a step costs 1.00 times as much: +4.0 (+2.7 to +5.3) points, ahead "
        "once.",
        "At equal time, where a step costs 1.10 times as much: +4.0 (+2.7 to +5.3) points, ahead "
        "once.",
        "my_idea gains as long as a step costs less than 32.0 (32.0 to 32.0) times as much as one "
        "of plain GRPO."]
    assert dear.answer()[1].startswith("At equal steps: +4.0 (")
    nothing = Verdict("my_idea", with_cost(runs_with(OPEN), 1.0)).answer()
    assert nothing[1] == "Gains above +7.6 points are excluded (95%)."
    assert "no difference seen, above +7.6 excluded." in nothing[2]
