"""Success with k tries: has the model learned something new, or does it only say more often what it
could already say?

The success with k tries, pass@k, is the probability that at least one of k sampled answers to a
problem is right, averaged over the problems. One try shows what the model usually does, and many
tries show what it can do at all. If a gain with one try is gone with many tries, training has
mostly made answers likelier which the model could already give (2504.13837).

It needs evaluations with several answers to each problem: --eval_answers 32.
"""
from itertools import groupby

import numpy as np

from analysis.gains import LEVEL, room_left
from analysis.runs import Run, evaluations
from analysis.statistics import FEWEST, Estimate, Floats, holm, paired_difference
from analysis.tables import WITH_INTERVAL, Table
from harness.record import Json

NO_DIFFERENCE = "no difference is seen"
TOO_FEW_PROBLEMS = (
    f"Too few problems for a finding on several tries: it takes at least {FEWEST} of them.")


def success_with_tries(right: Floats, answers: int, tries: int) -> Floats:
    """(problems,) the probability that at least one of so many tries at a problem is right, if of
    its `answers` so many were `right`: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, 2107.03374).

    The quotient is the probability that k of the n answers, drawn without replacement, are all
    wrong. It is the product over the draws of the share of wrong answers among those left, which
    becomes 0 when no wrong answer is left. The factorials of C would be too large for floats.
    """
    all_wrong = np.ones(len(right))
    for drawn in range(tries):
        all_wrong *= (answers - right - drawn) / (answers - drawn)
    return np.asarray(1 - all_wrong)


def numbers_of_tries(answers: int) -> list[int]:
    """1, 2, 4, ... and at last the number of answers itself, which is the largest that is known."""
    numbers = []
    tries = 1
    while tries < answers:
        numbers.append(tries)
        tries *= 2
    return [*numbers, answers]


def tries_table(run: Run) -> Table:
    """The success with 1, 2, 4, ... tries at the start and at the end, paired by problem."""
    answers = run["config"]["eval_answers"]
    lines = evaluations(run, "sampled")
    first, last = lines[0], lines[-1]
    right_at_start, right_at_end = right_answers(first, answers), right_answers(last, answers)
    numbers = numbers_of_tries(answers)
    start, end, differences = [], [], []
    for tries in numbers:
        before = success_with_tries(right_at_start, answers, tries)
        after = success_with_tries(right_at_end, answers, tries)
        start.append(float(before.mean()))
        end.append(float(after.mean()))
        differences.append(paired_difference((after - before)[None]))  # of one seed
    finding = TOO_FEW_PROBLEMS
    if len(right_at_start) >= FEWEST:
        finding = finding_of(numbers, differences, first["step"], last["step"])
    return Table("tries", "Held-out success with several tries at a problem",
                 {"tries": ("d", numbers), "start": (".1%", start), "end": (".1%", end),
                  "difference": ("points", differences)},
                 finding, notes_of(right_at_start, right_at_end, answers),
                 {"tries": "tries, k", "difference": f"difference, points{WITH_INTERVAL}"})


def right_answers(line: Json, answers: int) -> Floats:
    """(problems,) how many of the answers to each problem were right; the line has their share."""
    return np.asarray(np.rint(np.array(line["answer"], float) * answers))


def finding_of(numbers: list[int], differences: list[Estimate], start: int, end: int) -> str:
    """A sentence with a clause for each stretch of rows that have the same verdict."""
    verdicts = []
    for difference, p in zip(differences, holm([one.p for one in differences])):
        if p >= LEVEL:
            verdicts.append(NO_DIFFERENCE)
        else:
            verdicts.append("more" if difference.value > 0 else "fewer")
    clauses: list[str] = []
    compared = f" problems at step {end} than at step {start}"  # said once
    for verdict, rows in stretches(verdicts):
        clause = f"with {tries_in_words([numbers[row] for row in rows])} "
        if verdict == NO_DIFFERENCE:
            clause += f"{NO_DIFFERENCE} ({left_open(numbers, differences, rows)})"
        else:
            clause += f"the model solves {verdict}{compared}"
            compared = ""
        clauses.append(clause)
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


def stretches(verdicts: list[str]) -> list[tuple[str, list[int]]]:
    """Each verdict with the numbers of the rows that have it, one after the other."""
    found = []
    for verdict, rows in groupby(range(len(verdicts)), key=verdicts.__getitem__):
        found.append((verdict, list(rows)))
    return found


def left_open(numbers: list[int], differences: list[Estimate], rows: list[int]) -> str:
    """Which gains and losses the interval of the last of these rows leaves open."""
    last = rows[-1]
    room = room_left(differences[last])
    return room if len(rows) == 1 else f"at {numbers[last]} tries {room}"


def tries_in_words(numbers: list[int]) -> str:
    """1 try, 32 tries, 1 or 2 tries, 1 to 8 tries"""
    if len(numbers) == 1:
        return "1 try" if numbers == [1] else f"{numbers[0]} tries"
    joint = "or" if len(numbers) == 2 else "to"
    return f"{numbers[0]} {joint} {numbers[-1]} tries"


def notes_of(right_at_start: Floats, right_at_end: Floats, answers: int) -> list[str]:
    """How the table is computed, and how many problems no try solved."""
    return [
        f"Success with k tries, pass@k, is estimated from the {answers} answers to each problem. "
        f"If c of these n = {answers} are right, then k of them, drawn without replacement, have a "
        "right one among them with probability 1 - C(n - c, k) / C(n, k). This is averaged over "
        "the problems, and it is an unbiased estimate for every k up to n. The difference is "
        "paired by problem. Its interval is over other problems and other answers to them, not "
        "over other seeds of the training. The finding goes by p-values below 0.05 after Holm's "
        "correction for the rows",
        never_solved(right_at_start, right_at_end, answers)]


def never_solved(right_at_start: Floats, right_at_end: Floats, answers: int) -> str:
    """How many problems no try solved, and how much of the success at the end is to the others."""
    unsolved_at_start, unsolved_at_end = right_at_start == 0, right_at_end == 0
    in_both = int((unsolved_at_start & unsolved_at_end).sum())
    text = (f"Of {len(right_at_start):,} problems, {int(unsolved_at_start.sum()):,} were solved by "
            f"none of the {answers} tries at the start and {int(unsolved_at_end.sum()):,} by none "
            f"at the end; {in_both:,} are in both counts")
    if right_at_end.any():
        share = right_at_end[~unsolved_at_start].sum() / right_at_end.sum()
        text += (f". {share:.1%} of the right answers at the end are to problems that some try "
                 "solved at the start")
    return text
