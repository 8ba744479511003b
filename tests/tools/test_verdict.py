"""What is said of paired runs, by hand."""
import re

import pytest

import mitigations  # noqa: F401  fills the lists of choices
from tools.helpers.verdict import Verdict


def runs_with(gains, start=0, base=0.3, ends=None):
    """A look: plain GRPO at `base`, the placebo 0.01 above, the idea so far ahead of plain GRPO.
    `ends` says which of the held-out problems each arm solves."""
    def run(arm, success):
        end = {"step": 2, "mode": "sampled", "success": 0, "answer": ends and ends[arm]}
        return {"metrics": [{"success": success}] * 2, "evaluations": [end] if ends else [],
                "steps": [], "config": {"steps": 2}}
    arms = {"plain": [base] * len(gains), "placebo": [base + 0.01] * len(gains),
            "idea": [base + gain for gain in gains]}
    return {arm: {start + number: run(arm, success) for number, success in enumerate(values)}
            for arm, values in arms.items()}


def verdict_of(*looks):
    verdict = Verdict("my_idea", runs_with(looks[0]))
    verdict.looks += [runs_with(gains, 10) for gains in looks[1:]]
    return " ".join(verdict.sentences())


def test_the_sentences_by_hand():
    """0.03 and 0.05: mean 0.04, standard error 0.01, t with one degree of freedom 12.706."""
    nothing = verdict_of([0.03, 0.05])
    assert nothing.startswith("No difference seen: +4.0 (-8.7 to +16.7) points, 2 pairs.")
    room = "the interval leaves room for a gain of up to 16.7 points or a loss of up to 8.7."
    assert f"In this setting {room}" in nothing
    choice = ("its choice of tokens is not seen to differ from a random one: +3.0 (-9.7 to +15.7) "
              "points. Here the interval leaves room for a gain of up to 15.7 points or a loss of "
              "up to 9.7. The placebo is the random choice: it has the same numbers at other "
              "tokens.")
    assert choice in nothing
    *_, of_answers = Verdict("rloo", runs_with([0.03, 0.05])).sentences()
    assert "its choice of answers" in of_answers and of_answers.endswith("other answers.")
    behind = verdict_of([-0.05, -0.051, -0.049])
    assert behind.startswith("my_idea is behind plain GRPO: -5.0 (-5.2 to -4.8) points, 3 pairs.")
    assert "worse than a random one (-6.0 (-6.2 to -5.8) points)" in behind


HALF, ALL = [1, 0] * 100, [1] * 200  # which of 200 held-out problems are solved


def ended(gains, plain, idea, placebo, look=0):
    """A verdict on runs that ended with these held-out problems solved."""
    ends = {"plain": plain, "idea": idea, "placebo": placebo}
    return Verdict("my_idea", runs_with(gains, look, ends=ends))


OPEN, BEHIND, AHEAD = [0.03, 0.05], [-0.05, -0.051, -0.049], [0.05, 0.051, 0.049]


def test_the_last_paragraph_says_what_was_found_how_sure_and_what_next():
    open_one = Verdict("my_idea", runs_with(OPEN))
    assert open_one.in_short(is_quick=True) == (
        "In short: no difference between my_idea and plain GRPO was seen. Its choice of tokens was "
        "not seen to differ from a random one. How sure is that? By its 95% interval, the "
        "difference in success in training lies between -8.7 and +16.7 points (2 pairs). What "
        "next? The same command without --quick has more seeds and steps. It sees smaller "
        "differences.")
    assert open_one.in_short(is_quick=False).endswith(
        "What next? If a gain within the interval would be worth it, --seeds 4 sees smaller "
        "differences; finished runs are used again.")
    behind = Verdict("my_idea", runs_with(BEHIND))
    assert behind.in_short(is_quick=False) == (
        "In short: my_idea is behind plain GRPO. Its choice of tokens is worse than a random one. "
        "How sure is that? By its 95% interval, the difference in success in training lies between "
        "-5.2 and -4.8 points (3 pairs). What next? More seeds will hardly change this, so try "
        "another idea.")
    assert behind.is_behind() and not open_one.is_behind()
    ahead = Verdict("my_idea", runs_with(AHEAD))
    ahead.looks.append(runs_with(AHEAD, 10))
    said = ahead.in_short(is_quick=False)
    assert said.startswith("In short: my_idea is ahead of plain GRPO. Its choice of tokens is bet")
    assert "another --model" in said
    same = Verdict("my_idea", runs_with([0.0, 0.0])).in_short(is_quick=False)
    assert same.startswith("In short: my_idea and plain GRPO had the same success in training")
    assert "more --steps" in same and "How sure" not in same
    no_interval = Verdict("my_idea", runs_with([0.25, 0.25])).in_short(is_quick=False)
    assert "How sure is that? These 2 pairs give no interval." in no_interval


@pytest.mark.parametrize("gains, plain, idea, found", [
    (OPEN, ALL, HALF, "in training no difference between my_idea and plain GRPO was seen, but "
                      "my_idea is worse on held-out problems at the end."),
    (OPEN, HALF, ALL, "in training no difference between my_idea and plain GRPO was seen, but "
                      "my_idea is better on held-out problems at the end."),
    (OPEN, ALL, ALL, "no difference between my_idea and plain GRPO was seen."),
    (BEHIND, ALL, HALF, "my_idea is behind plain GRPO in training, and worse on held-out problems "
                        "at the end."),
    (BEHIND, HALF, ALL, "my_idea is behind plain GRPO in training, but better on held-out problems "
                        "at the end."),
    (BEHIND, ALL, ALL, "my_idea is behind plain GRPO.")])
def test_the_last_paragraph_joins_both_measures(gains, plain, idea, found):
    said = ended(gains, plain, idea, ALL).in_short(is_quick=False)
    assert said.startswith(f"In short: {found} Its choice")
    is_open_in_both = gains is OPEN and plain is not idea
    assert ("shows whether the difference on held-out problems is seen again" in said
            ) == is_open_in_both


def test_few_pairs_say_what_they_can_see():
    """0, 1, 2 and 3 points: their mean has the standard error 1.29 / 2. With 3 degrees of freedom
    4.27 of them are found in 80 of 100 experiments: 2.8 points."""
    said = Verdict("my_idea", runs_with([0.0, 0.01, 0.02, 0.03])).sentences()
    few = said[1]  # beside the verdict of which it speaks
    assert few.startswith("4 pairs can see only large differences.") and "of 2.8 points" in few
    three = " ".join(Verdict("my_idea", runs_with([0.01, 0.02, 0.03])).sentences())
    assert "3 pairs are too few to say how much pairs differ" in three and "80 of" not in three
    assert "80 of 100" not in verdict_of([0.01, 0.02] * 4)
    assert "7 pairs can see only large" in verdict_of([0.01, 0.02] * 3 + [0.03])
    assert "80 of 100" not in verdict_of([0.0, 0.0, 0.0])  # there is no spread to go by


def test_runs_that_sampled_the_same_have_no_verdict():
    """As after a single step, which is sampled before the first update."""
    said = verdict_of([0.0, 0.0])
    assert said.startswith("my_idea and plain GRPO had the same success in training in every pair")
    assert "behind" not in said


def test_ahead_is_said_after_a_second_look_alone():
    some, none = [0.05, 0.051, 0.049], [0.02, -0.03, 0.04]
    assert Verdict("my_idea", runs_with(some)).is_ahead()
    assert not Verdict("my_idea", runs_with(none)).is_ahead()
    twice = verdict_of(some, [0.03, 0.031, 0.029])
    first = "On the first 3 seeds it was better: +5.0 (+4.8 to +5.2) points."
    assert twice.startswith("my_idea is ahead of plain GRPO: +3.0 (+2.8 to +3.2) points on 3 "
                            f"new seeds. {first}")
    assert "better than a random one (+2.0" in twice
    once = verdict_of(some, none)
    assert once.startswith("No difference seen: +1.0 (") and f"3 pairs. {first} In this" in once
    turned = verdict_of(some, [-0.05, -0.051, -0.049])
    assert turned.startswith("my_idea is behind plain GRPO: -5.0 (") and first in turned


def test_no_difference_in_training_does_not_hide_one_on_held_out_problems():
    """The idea solves half of 200 problems, and plain GRPO and the placebo all of them, with every
    seed. The first sentence says of which measure it speaks, and another one speaks of the second.
    """
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    said = " ".join(verdict.sentences())
    assert said.startswith("No difference seen in training: +4.0 (-8.7 to +16.7) points")
    [held_out] = verdict.held_out()
    low_and_high = re.findall(r"\(-50\.0 \((-\d+\.\d) to (-\d+\.\d)\) points\)", held_out)
    assert len(low_and_high) == 2 and all(float(high) < 0 for _, high in low_and_high)
    assert held_out.startswith("On held-out problems at the end my_idea is worse than plain GRPO (")
    assert " and worse than its placebo (" in held_out
    assert held_out.endswith(
        "This is the second measure: the verdict goes by the first, success in training. The "
        "intervals of the second are not corrected for there being two.")


@pytest.mark.parametrize("plain, placebo, seen", [
    (HALF, HALF, "better than plain GRPO (+50.0 (… and better than its placebo (+50.0 (…"),
    (HALF, ALL, "better than plain GRPO (+50.0 (…"),
    (ALL, HALF, "better than its placebo (+50.0 (…"), (ALL, ALL, "")])
def test_what_the_evaluation_sees_of_each_arm(plain, placebo, seen):
    """Here the idea solves all problems. Better at the end is not called ahead."""
    verdict = ended(OPEN, plain, ALL, placebo)
    said = " ".join(verdict.held_out())
    shortened = re.sub(r"\(\+50\.0 \(.*?\) points\)", "(+50.0 (…", said)
    assert shortened.partition(". This")[0] == (
        f"On held-out problems at the end my_idea is {seen}" if seen else "")
    assert "ahead" not in said
    is_named = verdict.sentences()[0].startswith("No difference seen in training: ")
    assert is_named == (plain is HALF)


def test_where_held_out_success_is_the_primary_metric_it_is_said_once(monkeypatch):
    monkeypatch.setattr("tools.helpers.verdict.doubt_about_training", lambda runs: "a reason")
    verdict = ended(OPEN, plain=ALL, idea=HALF, placebo=ALL)
    assert verdict.sentences()[0].startswith("my_idea is behind plain GRPO: -50.0 (")
    assert verdict.held_out() == []
    said = verdict.in_short(is_quick=False)
    assert said.startswith("In short: my_idea is behind plain GRPO. Its choice")
    assert "the difference in held-out success at the end lies between -" in said


def test_the_levels_before_and_after_are_said():
    """Before training 0.2 and 0.4; afterwards plain GRPO 0.5 and 0.7, the idea 0.6 and 0.6."""
    look = runs_with([0.03, 0.05])
    for arm, ends in {"plain": (0.5, 0.7), "idea": (0.6, 0.61)}.items():
        for run, before, after in zip(look[arm].values(), (0.2, 0.4), ends):
            run["evaluations"] = [{"step": step, "mode": "sampled", "success": success,
                                   "answer": None} for step, success in ((0, before), (2, after))]
    [said] = Verdict("my_idea", look).levels()
    assert said == ("Before training the model solves 30.0% of the held-out problems. After it "
                    "plain GRPO solves 60.0% of them, and my_idea 60.5%.")
    assert Verdict("my_idea", runs_with([0.03, 0.05])).levels() == []  # none was evaluated


def test_the_table_and_the_picture(tmp_path):
    verdict = Verdict("my_idea", runs_with([0.05, 0.051, 0.049]))
    verdict.looks.append(runs_with([0.03, 0.031, 0.029], 10))
    rows = verdict.table().to_json()["rows"]
    assert [(row["minus"], row["pairs"], round(row["training"]["value"], 4)) for row in rows] == [
        ("plain GRPO", 3, 0.05), ("its placebo", 3, 0.04),
        ("plain GRPO, new seeds", 3, 0.03), ("its placebo, new seeds", 3, 0.02)]
    assert all(row["end"]["value"] is None for row in rows)  # none was evaluated
    assert verdict.draw(tmp_path).stat().st_size > 10_000
