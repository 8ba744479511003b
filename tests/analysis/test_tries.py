"""Success with k tries: by hand, and by counting every subset of the answers."""
from itertools import combinations

import numpy as np
import pytest
from conftest import evaluation, write_log
from logs import rows_in

import analyze
from analysis.runs import read_run
from analysis.statistics import paired_difference
from analysis.tries import (TOO_FEW_PROBLEMS, finding_of, numbers_of_tries, success_with_tries,
                            tries_table)


@pytest.mark.parametrize("answers", [1, 2, 5, 7])
def test_success_with_tries_is_the_share_of_subsets_with_a_right_answer(answers):
    right = np.arange(answers + 1.0)
    for tries in range(1, answers + 1):
        shares = []
        for count in range(answers + 1):
            is_right = [answer < count for answer in range(answers)]
            found = [any(subset) for subset in combinations(is_right, tries)]
            shares.append(sum(found) / len(found))
        found = success_with_tries(right, answers, tries)
        assert found == pytest.approx(shares, abs=1e-12)


def test_success_with_tries_by_hand():
    """Two tries of four, one of them right: 1 - 3/4 * 2/3 = 1/2. With replacement it would be
    7/16. With 10,000 answers, whose binomial coefficients no float holds, half of them right:
    nearly 1 - 1/2^3."""
    assert success_with_tries(np.array([0.0, 1, 3, 4]), 4, 2) == pytest.approx([0, 1 / 2, 1, 1])
    assert success_with_tries(np.array([5000.0]), 10_000, 3) == pytest.approx([7 / 8], abs=1e-3)
    assert success_with_tries(np.array([1.0]), 10_000, 5000) == pytest.approx([1 / 2])


@pytest.mark.parametrize("answers, numbers", [
    (2, [1, 2]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])])
def test_the_last_number_of_tries_is_that_of_the_answers(answers, numbers):
    assert numbers_of_tries(answers) == numbers


def run_of(folder, start, end, answers=4, **config):
    """A run whose evaluations have these shares of right answers, and other ones between them."""
    lines = [evaluation(0, start), evaluation(5, [1.0] * len(start)), evaluation(10, end),
             evaluation(0, [0] * len(start), "greedy"), evaluation(10, [1] * len(start), "greedy")]
    settings = {"eval_answers": answers, "steps": 10, **config}
    return write_log(folder, {}, settings, evaluations=lines)


def test_more_with_one_try_and_fewer_with_many(tmp_path, capsys):
    """100 problems with four answers each. At the start one of four is right in all of them; at
    the end all four are right in 60 and none in 40. With one try 25% becomes 60%, with two 50%
    becomes 60%, with four 100% becomes 60%. The middle difference is paired: +1/2 in 60 problems
    and -1/2 in 40 have a sample variance of 24/99, so it reaches 1.984 * 0.0492."""
    folder = run_of(tmp_path / "run", [0.25] * 100, [1.0] * 60 + [0.0] * 40)
    table = tries_table(read_run(folder))
    assert [(row["tries"], row["start"], row["end"]) for row in rows_in(table)] == [
        (1, 0.25, 0.6), (2, pytest.approx(0.5), 0.6), (4, 1.0, 0.6)]
    found = rows_in(table)[1]["difference"]
    assert found["value"] == pytest.approx(0.1)
    assert found["high"] - found["value"] == pytest.approx(1.984 * (24 / 99 / 100) ** 0.5, rel=1e-3)
    assert table.notes[1] == (
        "Of 100 problems, 0 were solved by none of the 4 tries at the start and 40 by none at the "
        "end; 0 are in both counts. 100.0% of the right answers at the end are to problems that "
        "some try solved at the start")
    said = ("With 1 or 2 tries the model solves more problems at step 10 than at step 0; with 4 "
            "tries the model solves fewer.")
    assert table.finding == said
    analyze.main([str(folder)])
    printed = capsys.readouterr().out
    assert said in " ".join(printed.split()) and table.title in printed
    assert said in (folder / "analysis/report.html").read_text()


def test_what_is_never_solved_is_counted_at_the_start_and_at_the_end(tmp_path):
    """Of the 1 + 4 right answers at the end, 4 are to a problem that was solved at the start."""
    folder = run_of(tmp_path / "run", [0.0, 0.0, 0.0, 0.5, 1.0], [0.0, 0.25, 0.0, 0.0, 1.0])
    table = tries_table(read_run(folder))
    assert table.notes[1] == (
        "Of 5 problems, 3 were solved by none of the 4 tries at the start and 3 by none at the "
        "end; 2 are in both counts. 80.0% of the right answers at the end are to problems that "
        "some try solved at the start")
    assert table.finding == TOO_FEW_PROBLEMS
    nothing = tries_table(read_run(run_of(tmp_path / "nothing", [0.5] * 5, [0.0] * 5)))
    assert nothing.notes[1].endswith("5 by none at the end; 0 are in both counts")


def found_of(*gains, problems=400):
    """Differences of this mean: in so many problems of 400 a whole one."""
    differences = []
    for gain in gains:
        ones = np.zeros(problems)
        ones[:abs(gain)] = np.sign(gain)
        differences.append(paired_difference(ones[None]))
    return differences


def test_a_finding_is_never_stronger_than_its_interval():
    """Five problems more are not seen: their interval reaches from 0.2 to 2.3 points, which leaves
    out 0, but with three rows the smallest p has to be below 0.05 / 3. Alone they are seen."""
    five = found_of(5)
    assert five[0].low > 0
    assert finding_of([1], five, 0, 9) == ("With 1 try the model solves more problems at step 9 "
                                           "than at step 0.")
    assert finding_of([1, 2, 4], found_of(0, 0, 5), 0, 9) == (
        "With 1 to 4 tries no difference is seen (at 4 tries the interval leaves room for a gain "
        "of up to 2.3 points).")
    assert finding_of([1, 2, 4], found_of(-40, 0, 40), 0, 9) == (
        "With 1 try the model solves fewer problems at step 9 than at step 0; with 2 tries no "
        "difference is seen (the interval leaves room for a gain of up to 0.5 points or a loss of "
        "up to 0.5); with 4 tries the model solves more.")


@pytest.mark.parametrize("config, has_table", [
    ({}, True), ({"eval_answers": 1}, False)])
def test_one_answer_to_each_problem_says_nothing_of_several_tries(tmp_path, config, has_table):
    run = read_run(run_of(tmp_path / "run", [0, 1] * 4, [1, 1] * 4, **config))
    names = [table.name for tables in analyze.run_chapters(run, None).values() for table in tables]
    assert ("tries" in names) == has_table


def test_an_older_run_and_one_evaluation_have_no_such_table(tmp_path):
    """A config without the flag, and a run with one evaluation."""
    lines = [evaluation(step, [0, 1] * 4) for step in (0, 10)]
    older = write_log(tmp_path / "older", {}, evaluations=lines)
    begun = write_log(tmp_path / "begun", {}, {"eval_answers": 4}, evaluations=lines[:1])
    for folder in (older, begun):
        chapters = analyze.run_chapters(read_run(folder), None)
        assert "tries" not in [table.name for tables in chapters.values() for table in tables]
