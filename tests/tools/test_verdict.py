"""What is said of paired runs, by hand."""
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
    of_answers = Verdict("rloo", runs_with([0.03, 0.05])).sentences()[-1]
    assert "its choice of answers" in of_answers and of_answers.endswith("other answers.")
    behind = verdict_of([-0.05, -0.051, -0.049])
    assert behind.startswith("my_idea is behind plain GRPO: -5.0 (-5.2 to -4.8) points, 3 pairs.")
    assert "worse than a random one (-6.0 (-6.2 to -5.8) points)" in behind


def test_what_to_do_next_follows_from_the_verdict():
    open_one = Verdict("my_idea", runs_with([0.03, 0.05]))
    assert "without --quick" in open_one.next_step(is_quick=True)
    assert "--seeds 4 sees smaller" in open_one.next_step(is_quick=False)
    behind = Verdict("my_idea", runs_with([-0.05, -0.051, -0.049]))
    assert "research signal measures whether my_idea" in behind.next_step(is_quick=False)
    ahead = Verdict("my_idea", runs_with([0.05, 0.051, 0.049]))
    assert "another --model" in ahead.next_step(is_quick=False)
    same = Verdict("my_idea", runs_with([0.0, 0.0]))
    assert "more --steps" in same.next_step(is_quick=False)


def test_few_pairs_say_what_they_can_see():
    """0, 1, 2 and 3 points: their mean has the standard error 1.29 / 2. With 3 degrees of freedom
    4.27 of them are found in 80 of 100 experiments: 2.8 points."""
    said = Verdict("my_idea", runs_with([0.0, 0.01, 0.02, 0.03])).sentences()
    [few] = [sentence for sentence in said if "80 of 100" in sentence]
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


def test_what_the_evaluation_sees_stands_beside():
    """Plain GRPO solves all of 200 problems, the idea half of them, with every seed."""
    ends = {"plain": [1] * 200, "idea": [1, 0] * 100, "placebo": [1] * 200}
    said = " ".join(Verdict("my_idea", runs_with([0.03, 0.05], ends=ends)).sentences())
    assert said.startswith("No difference seen")
    assert "held-out problems at the end, the difference is -50" in said
    swapped = {"plain": ends["idea"], "idea": ends["plain"], "placebo": ends["plain"]}
    said = " ".join(Verdict("my_idea", runs_with([0.03, 0.05], ends=swapped)).sentences())
    assert "ahead" not in said and "held-out problems at the end, the difference is +50" in said
    assert "held-out" not in verdict_of([0.03, 0.05])


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
