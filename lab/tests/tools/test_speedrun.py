"""The track on which changes compete: its judge against patches that cheat, and bounds by hand."""
import difflib
import json
import random
import re
import shutil

import numpy as np
import pytest

from conftest import ROOT
from countdown_task import Problem, content_of, is_held_out
from lab.analysis.statistics import mean_over
from lab.analysis.tables import shown
from lab.engine.errors import UserError
from lab.judged_task import Task, is_judged, judged_problems
from lab.probes.claim_rules import stored_results, success_by_seed
from lab.tools import speedrun
from lab.tools.planned_runs import make_runs
from lab.tools.speedrun import Patch, breaches, lower_bound, planned, share_of_time, verdict
from lab_runs import run
from runs import edit_config
from stored import stored_gain

TINY = dict(prompt="short", numbers="3", max_number=15, max_result=150)
HEAD = "Two more steps\nclass: any task\n"

def patch_of(file, before, after):
    """A patch of one line, with two lines of the file around it."""
    text = (ROOT / file).read_text()
    assert text.count(before) == 1
    changed = text.replace(before, after)
    lines = difflib.unified_diff(text.splitlines(True), changed.splitlines(True), f"a/{file}",
                                 f"b/{file}")
    return HEAD + f"diff --git a/{file} b/{file}\n" + "".join(lines)


MORE_STEPS = patch_of(speedrun.RECIPE, '"steps": 50', '"steps": 52').removeprefix(HEAD)


def test_is_judged_for_a_quarter_of_what_may_be_trained_on():
    problems = judged_problems(Task(**TINY))
    assert len({content_of(problem) for problem in problems}) == len(problems) > 1500
    assert not any(map(is_held_out, problems))
    mixed = Problem(problems[0].numbers[::-1], problems[0].target)
    assert is_judged(mixed)  # in any order


def test_no_run_is_given_a_judged_problem_or_its_prompt():
    task, rng = Task(**TINY), random.Random(0)
    drawn = [task.make_problem(rng, held_out=False) for _ in range(300)]
    assert not any(map(is_judged, drawn))
    with pytest.raises(UserError, match="which is one of the judge's problems"):
        task.prompt_for(judged_problems(task)[0])


@pytest.mark.parametrize("change, said", [
    (lambda text: text.replace("class: any task\n", ""), 'needs a line "class: any task"'),
    (lambda text: text + "+x\n" * 60, "adds 61 lines, and 60 are the most"),
    (lambda text: HEAD, "should have changed lines of text"),
    (lambda text: text + "GIT binary patch\n", "should have changed lines of text")])
def test_refuse_breaches_names_what_a_patch_may_not_do(change, said):
    Patch("mine", HEAD + MORE_STEPS).refuse_breaches()
    with pytest.raises(UserError, match=said):
        Patch("mine", change(HEAD + MORE_STEPS)).refuse_breaches()


def test_seeds_follow_from_every_letter_of_a_patch():
    one, other = Patch("a", HEAD + MORE_STEPS).seeds, Patch("a", HEAD + MORE_STEPS + " ").seeds
    assert len({*one, *other}) == 16 and one == Patch("b", HEAD + MORE_STEPS).seeds


def test_copied_has_the_change_and_nothing_else_has(tmp_path):
    code = Patch("mine", HEAD + MORE_STEPS).copied(tmp_path / "x")
    assert json.loads((code / speedrun.RECIPE).read_text())["steps"] == 52
    assert json.loads((ROOT / speedrun.RECIPE).read_text())["steps"] == 50
    cheat = patch_of("lab/judged_task.py", "[0] % 4 == 0", "[0] % 4 == 1")
    otherwise = re.sub("^diff .*\n", "", cheat, flags=re.M).replace("+++ b/", "+++ x/")
    for text in (cheat, otherwise):
        with pytest.raises(UserError, match="mine: it changes lab/judged_task.py, which is the j"):
            Patch("mine", text).copied(tmp_path / "z")
    with pytest.raises(UserError, match="mine does not apply: error"):
        Patch("mine", HEAD + MORE_STEPS.replace("steps", "stops")).copied(tmp_path / "y")


def test_lower_bound_by_hand():
    """Student's quantile of 99% for seven degrees of freedom is 2.998."""
    values = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    assert lower_bound(values, 0.01) == pytest.approx(4.5 - 2.998 * 6 ** 0.5 / 8 ** 0.5, abs=1e-3)


@pytest.mark.parametrize("gain, share, attempt, said", [
    (4, 0.9, 1, r"record: \+4.0 points over fast, at least \+1.1 with 99% certainty"),
    (4, 0.9, 50, r"no record: \+4.0 points over fast, at least -2"),
    (0, 0.9, 1, r"no record: \+0.0"), (4, 1.1, 1, "void: its steps take 1.10 of the time")])
def test_verdict(gain, share, attempt, said):
    spread = 2.6 * np.array([-1, 1, -1, 1, -1, 1, -1, 1]) + gain
    line = {"share": share, "record": "fast", "of_record": [0.4] * 8,
            "success": (0.4 + spread / 100).tolist()}
    assert re.match(said, verdict(line, [], attempt))


def test_table_has_gains_in_points():
    line = {"patch": "mine", "idea": "x", "class": "any task", "share": 0.9, "verdict": "record: y",
            "of_record": [0.40, 0.42], "success": [0.43, 0.44]}
    text = speedrun.table([line]).to_text()
    assert "+2.5 (-3.9 to +8.9)" in text and "43.5%" in text
    void = speedrun.table([line | {"success": [], "of_record": [], "verdict": "void: y"}]).to_text()
    assert "void" in void and "%" not in void.splitlines()[-1]


def test_a_row_of_the_page_follows_from_its_attempt():
    """Attempts that somebody adds need no row."""
    attempts = {line["patch"]: line for line in speedrun.attempts()}
    page = (ROOT / "docs/reference/speedrun.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(.*\) \| .* \| (.*) \| (.*) \| .* \| (.*) \|$", page, re.M)
    assert len(rows) >= 8
    for name, success, gain, share in rows:
        line = attempts[name]
        if line["success"]:
            gains = mean_over((np.array(line["success"]) - line["of_record"]).tolist())
            assert success == f"{np.mean(line['success']):.1%}", name
            assert (gain, share) == (shown(gains, "points"), f"{line['share']:.2f}"), name
        else:
            assert (success, gain, share) == ("void", "-", "-"), name


ARMS = {"default run 100": "default", "recipe 50": "fast at 4e-4", "at 5e-4 50": "fast",
        "recipe 70": "fast at 4e-4 for 70 steps", "recipe 100": "fast at 4e-4 for 100 steps",
        "at 5e-4 100": "fast for 100 steps"}


def test_a_row_of_the_recipe_follows_from_each_seed():
    seconds = stored_results("fast")["values"]["processor_seconds"]
    page = (ROOT / "docs/reference/speedrun.md").read_text("utf-8")
    row = r"^\| (?:the )?(.*) \| (\d+) \| ([\d.]+) \| (.*)% \| (.*) \| (.*)% \|$"
    rows = re.findall(row, page, re.M)
    assert len(rows) == len(ARMS)
    for name, steps, time, success, gain, worst in rows:
        arm = ARMS[f"{name} {steps}"]
        ends = {seed: 100 * end.mean() for seed, end in success_by_seed("fast", arm).items()}
        shares = [seconds[f"{arm}-s{seed}"] / seconds[f"default-s{seed}"] for seed in ends]
        found = (f"{np.mean([*ends.values()]):.1f}", f"{min(ends.values()):.1f}",
                 f"{np.mean(shares):.2f}")
        assert found == (success, worst, time), arm
        assert arm == "default" or gain[:5] in stored_gain("fast", arm, "default"), arm


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two steps as the track makes them."""
    out = tmp_path_factory.mktemp("track") / "x"
    run(*speedrun.FLAGS_OF_ALL, "--out", out, "--steps", 2, "--questions", 2, "--answers", 4)
    return out


@pytest.mark.parametrize("name, value", [
    ("max_new_tokens", 120), ("temperature", 0.7), ("reasoning_weight", 1.0)])
def test_breaches_finds_another_setting(made, tmp_path, name, value):
    other = shutil.copytree(made, tmp_path / "x")
    assert breaches(made, other) == []
    edit_config(other, **{name: value})
    assert breaches(other, made) == [f"--{name} is {value}"]


def test_breaches_finds_another_reward_and_a_judged_problem(made, monkeypatch):
    monkeypatch.setattr("countdown_task.FORMAT_WEIGHT", 0.3)  # the task's, for the judge
    assert breaches(made, made) == ["the rewards of step 1 are not those of the task",
                                    "the rewards of step 2 are not those of the task"]
    monkeypatch.undo()
    monkeypatch.setattr(speedrun, "is_judged", lambda problem: True)
    assert breaches(made, made)[0] == "step 1 trains on a problem of the judge"


def test_share_of_time_is_that_of_half_the_default_run(tmp_path):
    for name, seconds in (("mine", [2.0] * 10), ("plain", [9.0, 1.0, 1.0])):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": 1, "processor_seconds": one}) for one in seconds]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert share_of_time(tmp_path / "mine", tmp_path / "plain") == 20 / 50


LOOP = "lab/harness/loop.py"
SAMPLED = "        rollouts.step, rollouts.generator = step"
SHORT = patch_of(speedrun.RECIPE, '"steps": 50', '"steps": 1')


@pytest.mark.slow
@pytest.mark.parametrize("file, before, after, said", [
    (LOOP, "run.task.training_problems(s.seed, step, s.questions)",
     "[__import__('countdown_task').Problem((1, 1, 2), 2)] * s.questions",
     "1 1 2 make 2, which is one of the judge's problems"),
    (LOOP, SAMPLED, f"        rollouts.scores['reward'] += 1\n{SAMPLED}",
     "the rewards of step 1 are not those of the task"),
    (speedrun.RECIPE, '"steps": 50', '"max_new_tokens": 120,\n  "steps": 1',
     "--max_new_tokens is 120")])
def test_planned_runs_that_cheat_are_found(made, tmp_path, file, before, after, said):
    text = patch_of(file, before, after)
    if file != speedrun.RECIPE:
        text += SHORT.removeprefix(HEAD)
    run, = planned(Patch("mine", text), "patch", tmp_path, [5])
    failed = make_runs([run], "", 1)
    assert said in (failed.get("patch") or breaches(run.folder, made)[0])


@pytest.mark.slow
def test_main_judges_a_change_once(tmp_path, monkeypatch):
    """With two seeds and a step instead of eight and fifty; the record's are as many."""
    monkeypatch.setattr(speedrun, "SEEDS", 2)
    monkeypatch.setattr(speedrun, "PLAIN_STEPS", 1)
    monkeypatch.setattr(speedrun, "HOME", tmp_path / "home")
    monkeypatch.setattr(speedrun, "judged_problems", lambda task: judged_problems(task)[:64])
    monkeypatch.setattr(speedrun, "standing", lambda of_class: Patch("fast", SHORT))
    (tmp_path / "home").mkdir()
    (tmp_path / "mine.patch").write_text(SHORT)
    speedrun.main([str(tmp_path / "mine.patch"), "--runs", str(tmp_path / "runs")])
    line, = speedrun.attempts()
    assert line["success"] == line["of_record"] and len(line["success"]) == 2
    assert line["verdict"].startswith("no record: +0.0 points over fast")
    with pytest.raises(UserError, match="was judged before"):
        speedrun.main([str(tmp_path / "home/mine.patch")])
