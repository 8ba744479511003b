"""What is said of paired runs, by hand."""
import re

import numpy as np
import pytest

import mitigations  # noqa: F401  fills the lists of choices
from tools.helpers.verdict import Verdict


def runs_with(gains, start=0, base=0.3, ends=None):
    """A look: plain GRPO at `base`, the placebo 0.01 above, the idea so far ahead of plain GRPO.
    `ends` says which of the held-out problems each arm solves; the idea solves problems 0 and 2
    only with the first seed."""
    def run(arm, number, success):
        answer = list(ends[arm]) if ends else []
        if arm == "idea" and number and answer:
            answer[0] = answer[2] = 0
        end = {"step": 2, "mode": "sampled", "success": 0, "answer": answer}
        return {"metrics": [{"success": success}] * 2, "evaluations": [end] if ends else [],
                "steps": [], "config": {"steps": 2}}
    arms = {"plain": [base] * len(gains), "placebo": [base + 0.01] * len(gains),
            "idea": [base + gain for gain in gains]}
    return {arm: {start + number: run(arm, number, value) for number, value in enumerate(values)}
            for arm, values in arms.items()}


def verdict_of(*looks):
    verdict = Verdict("my_idea", runs_with(looks[0]))
    verdict.looks += [runs_with(gains, 10) for gains in looks[1:]]
    return verdict


def test_the_first_sentence_is_the_verdict():
    """0.03 and 0.05: mean 0.04, standard error 0.01, t with one degree of freedom 12.706."""
    nothing = verdict_of([0.03, 0.05])
    assert nothing.answer() == [
        "No difference seen between my_idea and plain GRPO: +4.0 (-8.7 to +16.7) points of success "
        "in training, 2 pairs: too few."]
    assert verdict_of([0.01, -0.02] * 2).verdict().endswith(", 4 pairs.")
    details = " ".join(nothing.details())
    assert ("In this setting the interval leaves room for a gain of up to 16.7 points or a loss of "
            "up to 8.7.") in details
    choice = ("its choice of tokens is not seen to differ from a random one: +3.0 (-9.7 to +15.7) "
              "points. Here the interval leaves room for a gain of up to 15.7 points or a loss of "
              "up to 9.7. The placebo is the random choice: it has the same numbers at other "
              "tokens.")
    assert choice in details
    *_, of_answers = Verdict("rloo", runs_with([0.03, 0.05])).details()
    assert "its choice of answers" in of_answers and of_answers.endswith("other answers.")
    assert "The pairs gain +3.0 (seed 0), +5.0 (seed 1) points over plain GRPO." in details
    behind = verdict_of([-0.05, -0.051, -0.049, -0.05])
    assert behind.verdict() == ("my_idea is behind plain GRPO: -5.0 (-5.1 to -4.9) points of "
                                "success in training, 4 pairs.")
    assert "worse than a random one (-6.0 (-6.1 to -5.9) points)" in " ".join(behind.details())
    of_three = " ".join(verdict_of([-0.05, -0.051, -0.049]).details())
    assert "its choice of tokens is not seen to differ from a random one: -6.0 (" in of_three
    assert "leaves room" not in " ".join(behind.details())


def test_the_answer_is_printed_before_the_table(capsys):
    verdict_of([0.03, 0.05]).print_findings()
    printed = capsys.readouterr().out
    assert printed.lstrip().startswith("No difference seen between my_idea and plain GRPO: ")
    table = printed.index("| my_idea minus")
    assert printed.index("too few.") < table < printed.index("In this setting")


HALF, ALL = [1, 0] * 100, [1] * 200  # which of 200 held-out problems are solved


def ended(gains, plain, idea, placebo, look=0):
    """A verdict on runs that ended with these held-out problems solved."""
    ends = {"plain": plain, "idea": idea, "placebo": placebo}
    return Verdict("my_idea", runs_with(gains, look, ends=ends))


OPEN = [0.03, 0.05, -0.03, -0.05]


def test_what_the_pairs_could_have_seen():
    """0, 1, 2 and 3 points differ by a standard deviation of 1.29. Such experiments are simulated;
    Student's t of 3 degrees of freedom has to be above 3.182, and twice to be called ahead."""
    said = " ".join(verdict_of([0.0, 0.01, 0.02, 0.03]).details())
    assert "The 4 pairs differ by a standard deviation of 1.3 points" in said
    [once] = re.findall(r"in one look in (.*?) of 100 such experiments", said)
    [twice] = re.findall(r"which takes a second look, in (.*?)\.", said)
    once, twice = ([int(number) for number in re.findall(r"\d+", words)] for words in (once, twice))
    generator = np.random.default_rng(1)
    for in_one, in_two, points in zip(once, twice, (1, 2, 4), strict=True):
        pairs = generator.normal(points, 1.291, (2, 20_000, 4))
        is_seen = pairs.mean(2) / (pairs.std(2, ddof=1) / 2) > 3.182  # (looks, experiments)
        assert in_one == pytest.approx(100 * is_seen.mean(), abs=2.5)
        assert in_two == pytest.approx(100 * is_seen.all(0).mean(), abs=3.5)
    three = " ".join(verdict_of([0.01, 0.02, 0.03]).details())
    assert "3 pairs are too few to say how much pairs differ" in three and "of 100" not in three
    assert "of 100" not in " ".join(verdict_of([0.0] * 4).details())  # there is no spread to go by


def test_runs_that_sampled_the_same_have_no_verdict():
    """As after a single step, which is sampled before the first update."""
    same = verdict_of([0.0, 0.0])
    assert same.verdict() == ("No verdict: my_idea and plain GRPO had the same success in training "
                              "in every pair of runs.")
    said = " ".join(same.details())
    assert "before any update" in said and "its choice of" not in said


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
    assert "interval leaves room" in " ".join(once.details())


def test_no_difference_in_training_does_not_hide_one_on_held_out_problems():
    """The idea solves half of 200 problems, and plain GRPO and the placebo all of them, with every
    seed. The first sentence says of which measure it speaks, and the next one speaks of the second.
    """
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    assert verdict.answer()[1:] == verdict.held_out()
    [held_out] = verdict.held_out()
    low_and_high = re.findall(r"\(-50\.8 \((-\d+\.\d) to (-\d+\.\d)\) points\)", held_out)
    assert len(low_and_high) == 2 and all(float(high) < 0 for _, high in low_and_high)
    assert held_out.startswith("On held-out problems at the end my_idea is worse than plain GRPO (")
    assert " and worse than its placebo (" in held_out
    assert held_out.endswith(
        "This is the second measure: the verdict goes by the first, success in training. The "
        "intervals of the second are not corrected for there being two.")


def test_what_three_pairs_see_at_the_end_is_not_said():
    """Four say it; of three not even the spread is known."""
    assert ended(OPEN, plain=ALL, idea=HALF, placebo=ALL).held_out()
    assert not ended(OPEN[:3], plain=ALL, idea=HALF, placebo=ALL).held_out()


@pytest.mark.parametrize("gains, far", [
    # the median of the distances is 0.01, so 0.08 is not far
    ([0.0, 0.01, 0.02, -0.01, -0.08], []), ([0.0, 0.01, 0.02, -0.01, -0.081], ["4 (-8.1)"]),
    ([0.0, 0.0, 0.0, 0.019], []), ([0.0, 0.0, 0.0, 0.021], ["3 (+2.1)"]),  # at least two points
    ([0.3, 0.01, 0.02, 0.0, -0.01, 0.01, -0.2], ["0 (+30.0)", "6 (-20.0)"]),
    ([0.0, 0.01, -0.5], [])])  # three pairs say nothing of it
def test_a_pair_that_lies_far_from_the_others_is_told(gains, far):
    said = " ".join(verdict_of(gains).answer())
    assert re.findall(r"seed (\d \(.*?\))", said) == far
    assert ("as if one of its runs had collapsed" in said) == bool(far)


@pytest.mark.parametrize("plain, placebo, seen", [
    (HALF, HALF, "better than plain GRPO (+49.2 (… and better than its placebo (+49.2 (…"),
    (HALF, ALL, "better than plain GRPO (+49.2 (…"),
    (ALL, HALF, "better than its placebo (+49.2 (…"), (ALL, ALL, "")])
def test_what_the_evaluation_sees_of_each_arm(plain, placebo, seen):
    """Here the idea solves all problems, but for two. Better at the end is not called ahead."""
    verdict = ended(OPEN, plain, ALL, placebo)
    said = " ".join(verdict.held_out())
    shortened = re.sub(r"\(\+49\.2 \(.*?\) points\)", "(+49.2 (…", said)
    assert shortened.partition(". This")[0] == (
        f"On held-out problems at the end my_idea is {seen}" if seen else "")
    assert "ahead" not in said


def test_where_held_out_success_is_the_primary_metric_it_is_said_once(monkeypatch):
    monkeypatch.setattr("tools.helpers.verdict.doubt_about_training", lambda runs: "a reason")
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    [said] = verdict.answer()
    assert said.startswith("my_idea is behind plain GRPO: -50.8 (")
    assert said.endswith(" points of held-out success at the end, 4 pairs.")
    assert verdict.details()[0] == ("The primary metric is here the held-out success at the end, "
                                    "because a reason.")


def test_the_table_and_the_picture(tmp_path):
    verdict = Verdict("my_idea", runs_with([0.05, 0.051, 0.049]))
    verdict.looks.append(runs_with([0.03, 0.031, 0.029], 10))
    rows = verdict.table().to_json()["rows"]
    assert [(row["minus"], row["pairs"], round(row["training"]["value"], 4)) for row in rows] == [
        ("plain GRPO", 3, 0.05), ("its placebo", 3, 0.04),
        ("plain GRPO, new seeds", 3, 0.03), ("its placebo, new seeds", 3, 0.02)]
    assert all(row["end"]["value"] is None for row in rows)  # none was evaluated
    assert verdict.draw(tmp_path).stat().st_size > 10_000
