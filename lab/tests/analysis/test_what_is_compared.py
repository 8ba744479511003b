"""Which runs are one arm, which arm is the baseline, and what is not compared."""
import functools

import pytest

import logs
from conftest import evaluation, refusal, write_log
from known_runs import arms_in, rows_in, write_run

from lab.analysis.comparison import (AT_THE_END, arm_table, arms_of, comparable,
                                     gain_table, refuse_holes)
from lab.analysis.run_folders import Run
from lab.tools import compare


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / name, 0.5, seed, mitigation=weighting, placebo=placebo)
            for name, seed, weighting, placebo in (
                ("a", 0, "random", "none"), ("b", 0, "none", "weights"), ("c", 0, "none", "none"),
                ("d", 1, "none", "none"))]


def test_the_baseline_is_plain_grpo_or_the_one_that_is_named(folders):
    """A placebo is not plain."""
    arms = arms_in(folders)
    plain, random = "mitigation none", "mitigation random"
    assert [*arms] == [plain, random, "placebo weights"]
    assert [run.folder.name for run in arms[plain].values()] == ["c", "d"]
    assert [*arms_in(folders, random)][0] == random
    assert refusal(arms_in, folders, "nobody").startswith(
        f"--baseline nobody is none of the arms: {random}, ")


def test_one_arm_with_one_seed_twice_is_refused(folders, tmp_path):
    """Also if one of them has more steps: its first ones are those of the other."""
    twin = write_run(tmp_path / "twin", 0.5, 1, steps=12, mitigation="none", placebo="none")
    assert refusal(arms_in, [*folders, twin]) == (
        f"{folders[3]} and {twin} are one arm with one seed: name one")


written = functools.partial(logs.written, kind=Run)


def test_runs_of_an_arm_are_compared_up_to_the_newest_step_that_all_have(tmp_path):
    """One run has a third step, which does not count, nor does its third evaluation. In training
    the pairs differ by 0.1 and 0.3, held out by 0.5 and 0; t of one is 12.706. Seed 7 has no pair.
    """
    plain = [written(tmp_path / f"p{seed}", seed, [[0, 0], [1, 0], [1, 1]][:2 + seed], steps,
                     steps=len(steps))
             for seed, steps in ((0, [0.1, 0.3]), (1, [0.2, 0.2, 0.9]))]
    other = [written(tmp_path / f"o{seed}", seed, [[0, 0], end], steps, mitigation="random")
             for seed, end, steps in ((0, [1, 1], [0.2, 0.4]), (1, [1, 0], [0.4, 0.6]),
                                      (7, [0, 0], [0.9, 0.9]))]
    parts, said = comparable(arms_of([*other, *plain]))
    assert said == ["5 runs are compared, each arm up to the newest step that all of its runs have"
                    f"; mitigation none up to step 2, the last one of {tmp_path / 'p0'}",
                    "Held-out success is compared after step 2"]
    assert {line["step"] for arm in parts.values() for run in arm.values()
            for line in run.evaluations} == {0, 2}
    none, mine = rows_in(arm_table(parts))
    assert (none["arm"], none["in training"]) == ("mitigation none", pytest.approx(0.2))
    assert (mine["runs"], mine["steps"], mine["end, sampled"]) == (3, 2, pytest.approx(0.5))
    training, held_out = rows_in(gain_table(parts, AT_THE_END))
    assert (held_out["pairs"], held_out["verdict"]) == (2, "no difference seen")
    for row, mean, spread in ((training, 0.2, 0.2), (held_out, 0.25, 0.5)):
        low, high = mean - 12.706 * spread / 2, mean + 12.706 * spread / 2
        assert [row["gain"][name] for name in ("value", "low", "high")
                ] == pytest.approx([mean, low, high], rel=1e-4)
    plain[0].evaluations = []
    parts, said = comparable(arms_of([plain[0], other[0]]))
    assert "because there is no evaluation after a step that all of them have" in said[1]
    assert rows_in(arm_table(parts))[1]["end, sampled"] is None


@pytest.mark.parametrize("tokens, ends, where, if_asked", [
    (10, (4, 2), "at the ends", "at the ends"), (11, (4, 2), "at the ends", "at the ends"),
    (12, (4, 2), "after step 2", "at the end of each arm, which have not paid alike"),
    (10, (3, 2), "after step 2", "after step 2")])
def test_arms_of_two_lengths_meet_where_they_have_paid_alike(tmp_path, tokens, ends, where,
                                                             if_asked):
    """Four steps of 5 tokens and two of 10, which may cost a tenth more; both were evaluated after
    step 2, too. A run that is not evaluated at its end is compared there. A plan can ask for the
    ends."""
    arms = {}
    for name, steps, each, end in (("long", 4, 5, ends[0]), ("short", 2, tokens, ends[1])):
        lines = [evaluation(step, [step > 2, 0]) for step in sorted({0, 2, end})]
        metrics = [{"step": step, "success": 0.5, "tokens": each} for step in range(1, steps + 1)]
        arms[name] = {0: Run(write_log(tmp_path / name, {}, {}, metrics, lines))}
    parts, said = comparable(arms)
    assert said[1].startswith(f"Held-out success is compared {where}")
    reached = [row["end, sampled"] for row in rows_in(arm_table(parts))]
    assert reached == [0.5 if where == "at the ends" else 0, 0]
    assert comparable(arms, at_ends=True)[1][1].startswith(
        f"Held-out success is compared {if_asked}")


CHANGED = [{"after_step": 2, "files": {"data.jsonl": "0"}}]
CODE, EDITED, NEW = ({"code/grpo.py": text} for text in ("X = 1", "X = 2", "X = 1\nY = 1"))
IDEA = {"code/grpo.py": "X = 1\n@advantage\ndef mine(rollouts):\n    return 1"}
LATER = {**CODE, "code_after_000002/grpo.py": "X = 2"}
LAB = {**CODE, "code/lab/run.py": ""}
MOVED = {"code/grpo.py": "Y = 1\nX = 1"}


@pytest.mark.parametrize("usual, one, name", [
    ({}, {"lora": 1, "learning_rate": 1e-3}, "learning_rate 0.001 lora 1"),
    ({"lora": 0, "temperature": 1.0, "data": None}, {"temperature": 0.5}, "temperature 0.5"),
    ({}, {"data": "x.jsonl"}, "data x.jsonl"), ({"kl": 0.5}, {"kl": 0.0}, "kl 0.0"),
    ({"mitigation": "mine"}, {"mitigation": "mine", "placebo": "weights"}, "placebo weights"),
    ({"mitigation": "outcome_conditional"}, {"mitigation": "outcome_conditional",
                                             "think_discount": 0.25}, "think_discount 0.25"),
    (CODE, EDITED, "another X (grpo.py)"), (CODE, NEW, "another Y (grpo.py)"),
    (NEW, CODE, "another Y (grpo.py)"), (NEW, MOVED, "another order of statements"),
    (CODE, LATER, "changed after step 2: X (grpo.py)"), (CODE, LAB, "made by the lab"),
    (CODE, {**EDITED, "kl": 0.5}, "kl 0.5 another X (grpo.py)"),
    (CODE, {**IDEA, "advantage": "mine"}, "advantage mine"),
    ({**LAB, "made_of": {"x": "1"}}, {**LAB, "made_of": {"x": "2"}}, "another x"),
    (CODE, {**CODE, "changed": CHANGED}, "changed after step 2: data.jsonl")])
def test_runs_of_other_settings_or_versions_are_no_one_arm(tmp_path, usual, one, name):
    """Three runs are of one arm, and the fourth, with the seed of the first, is not. It is named by
    what the others do not have, also where the others lack the setting and so have its default."""
    both = {"mitigation": "none", "advantage": "grpo", "learning_rate": 2.5e-4}
    arms = arms_of([made(tmp_path / str(number), number % 3, both | entry)
                    for number, entry in enumerate((usual, usual, usual, one))])
    assert sorted(map(len, arms.values())) == [1, 3]
    assert min(arms, key=lambda arm: len(arms[arm])) == name


def made(folder, seed, given):
    """A run with these settings, and with the files that have a text here."""
    files = {name: text for name, text in given.items() if name.startswith("code")}
    run = written(folder, seed, [], [0.1], **{name: value for name, value in given.items()
                                              if name not in files})
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return run


def test_what_counts_for_no_run_of_an_arm_makes_no_other_arm(tmp_path):
    """A new method, a comment, and a stop with files that differ in these."""
    equal = [CODE, IDEA, {"code/grpo.py": '"""Why."""\nX = 1  # why'},
             {**CODE, "code_after_000002/grpo.py": IDEA["code/grpo.py"]}]
    assert len(arms_of([made(tmp_path / str(seed), seed, one)
                        for seed, one in enumerate(equal)])) == 1


def test_two_arms_that_differ_in_what_has_one_name_are_told_apart(tmp_path):
    versions = [CODE, CODE, EDITED, {"code/grpo.py": "X = 3"}, {**EDITED, "kl": 0.5}]
    arms = arms_of([made(tmp_path / str(seed), seed, one) for seed, one in enumerate(versions)])
    first, second = [name for name in arms if name.startswith("another X (grpo.py)")]
    assert len(arms) == 4 and second.startswith(f"{first} ")
    resumed = [LATER, {**LATER, "code/grpo.py": "X = 3"}]
    assert len(arms_of([made(tmp_path / f"l{seed}", seed, one)
                        for seed, one in enumerate(resumed)])) == 2


def test_a_record_with_a_hole_is_not_compared(tmp_path):
    runs = [written(tmp_path / str(seed), seed, [], [0.1] * 4) for seed in (0, 1)]
    path = runs[1].folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1], *lines[3:]]))
    assert refusal(refuse_holes, runs) == (
        f"the record of {runs[1].folder} is not whole: metrics.jsonl does not have one line for "
        "each of the steps 1 to 4, in order. So it cannot be compared")


@pytest.mark.parametrize("known, is_same", [
    (dict(digests="aa"), True), (dict(digests="ab"), False), (dict(digests="aa", shown="ab"), True),
    ({}, True), (dict(shown="ab"), False), (dict(digests=["a", None]), False)])
def test_runs_with_other_problems_are_not_compared_on_them(tmp_path, known, is_same):
    """By their digest, or by what an evaluation shows, where a run has none."""
    runs = []
    for number in range(2):
        lines = [evaluation(step, [0, step > 0]) | {
            "shown": [{"problem": known.get("shown", "aa")[number]}]} for step in (0, 1)]
        config = {"mitigation": ["none", "random"][number],
                  "held_out_problems": known.get("digests", [None, None])[number]}
        runs.append(Run(write_log(tmp_path / str(number), {}, config, [
            {"step": 1, "success": 0.25}], lines)))
    parts, said = comparable(arms_of(runs))
    assert any("problems are not known to be the same" in note for note in said) is not is_same
    rows = rows_in(gain_table(parts))
    assert len(rows) == 1 + is_same and rows[0]["gain"]["value"] == 0


def test_the_command_leaves_out_what_is_no_run_and_draws_the_arms(tmp_path, capsys):
    (tmp_path / "ideas").mkdir()
    for seed in (0, 1):
        for name, right in (("none", [1, 0]), ("random", [1, 1])):
            written(tmp_path / f"{name}-{seed}", seed, [[0, 0], right], [0.2, 0.4 + 0.1 * seed],
                    mitigation=name)
    compare.main([str(path) for path in sorted(tmp_path.iterdir())])
    printed = capsys.readouterr().out
    assert printed.startswith(f"left out, because it is no run: {tmp_path / 'ideas'}\n4 runs are c")
    assert "Held-out success is compared after step 2." in printed
    assert (tmp_path / "comparison/learning_curve.png").exists()
    assert "at least two runs" in refusal(compare.main, [str(tmp_path / "none-0")])
