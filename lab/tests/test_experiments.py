"""An experiment from a plan: what is trained, what compares it, and what is refused."""
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from known_runs import recorded
from lab.engine.errors import UserError
from lab.tools import experiment as experiments
from lab.__main__ import main
from lab.tools.experiment import Plan, read_plan
from lab_runs import make_here

BATCH = "--questions 2 --answers 4 --max_new_tokens 24 --eval_every 0 --checkpoint_every 0"
GIVEN = {"question": "Is it better?", "common": f"{BATCH} --threads 1", "steps": 1,
         "seeds": [0, 2], "arms": {"none": "", "rloo": "--advantage rloo"}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, **changed):
    path = folder / "mine.json"
    path.write_text(json.dumps(GIVEN | changed))
    return str(path)


@pytest.mark.slow
def test_a_plan_is_trained_once_then_used_again_and_compared(folder, capsys, monkeypatch):
    make_here(monkeypatch)
    plan = written(folder, arms=GIVEN["arms"] | {"twice": "--questions 4"})
    main(["experiment", plan, "--processes", "1"])
    said = capsys.readouterr().out
    assert "6 of 6 runs are finished\n" in said
    assert re.search(r"^\| rloo +\| +2 \| ", said, flags=re.M) and "| twice" in said
    made = sorted(path.stat().st_mtime_ns for path in folder.glob("runs/mine/*/metrics.jsonl"))
    main(["experiment", plan])
    assert made == sorted(path.stat().st_mtime_ns
                          for path in folder.glob("runs/mine/*/metrics.jsonl"))


def test_runs_are_made_seed_by_seed():
    """An arm may have steps of its own."""
    plan = Plan("mine", "", 6, [0, 2], {"none": "", "twice": "--questions 16 --steps 3"})
    for seeds, last in ((0, 2), (3, 3)):
        found = plan.runs(SimpleNamespace(seeds=seeds, flags="", runs="runs"))
        assert [(run.arm, run.seed, run.steps) for run in found] == [
            (arm, seed, steps) for seed in range(last)
            for arm, steps in (("none", 6), ("twice", 3))]


def run_of(*right):
    """A run of 10 answers in a step, so many of them right."""
    return recorded([{"success": count / 10} for count in right])


def test_a_gain_is_over_the_first_arm_by_hand(capsys):
    """Pairs differ by 0.1, 0.2 and 0.3: the mean is 0.2, its error 0.1 / sqrt(3), t(2) at 97.5%
    4.3027, so the interval is 0.2 +- 0.2484. Seed 3 has no partner."""
    plan = Plan("mine", "Is it better?", 2, [0, 4], {"none": "", "mine": "", "other": ""})
    none = {0: run_of(1, 3), 1: run_of(2, 2), 2: run_of(0, 4)}
    mine = {0: run_of(2, 4), 1: run_of(4, 4), 2: run_of(2, 8), 3: run_of(9, 9)}
    experiments.compare(plan, {"none": none, "mine": mine}, 8)
    said = capsys.readouterr().out
    assert "7 of 8 runs are finished" in said and "+20.0 (-4.8 to +44.8)" in said
    experiments.compare(plan, {"none": mine, "mine": none}, 8)
    assert "-20.0 (-44.8 to +4.8)" in capsys.readouterr().out
    with pytest.raises(UserError, match="mine has no finished pair of runs yet, of none and"):
        experiments.compare(plan, {"none": {0: none[0]}, "mine": {3: mine[3]}}, 8)


def arms(**changed):
    return {"arms": GIVEN["arms"] | changed}


@pytest.mark.parametrize("changed, said", [
    (arms(rloo="--advantage rlo"), "mine, rloo: .*rlo"),
    (arms(rloo="--bananas 3"), "mine, rloo: unknown argument --ban"),
    (arms(rloo=""), "rloo has the settings of none"),
    (arms(rloo="--seed 3"), "rloo has --seed, which the plan gives"),
    ({"common": "--steps=3"}, "the common flags have --steps, which the plan gives"),
    (arms(rloo="--steps x"), "mine, rloo: --steps 'x'"), (arms(rloo="--steps 0"), "--steps 0, and"),
    ({"measure": "success"}, "the measure is 'success', and should be one of success in training;"),
    ({"arms": {"none": ""}}, "it has no two arms"), ({"arms": []}, "it has no two arms"),
    ({"seeds": 4}, "the seeds are 4. They should be two"), ({"seeds": [5, 5]}, "the seeds are"),
    ({"steps": 0}, '"steps" is 0'), ({"arm": {}}, "is no plan: .*'arm'"),
    ({"common": 3}, "the question and the common flags should be texts"),
    (arms(rloo={"flags": "--advantage rloo"}), "and its flags a text"),
    (arms(**{"../x": ""}), "'../x' should be letters, digits, spaces")])
def test_a_plan_with_a_mistake_is_told_so_in_a_sentence(folder, changed, said):
    with pytest.raises(UserError, match=said):
        main(["experiment", written(folder, **changed)])


def test_flags_that_the_plan_would_overrule_are_refused(folder):
    for flags in ("--steps 2", "--advantage rloo --seed=7"):
        with pytest.raises(UserError, match="the plan notes_1 gives to every run: change it in"):
            main(["experiment", "notes_1", "--flags", flags])


def test_the_experiments_of_the_notes_are_theirs():
    """100 steps of 8 x 8 answers, evaluated at every tenth step on 128 problems."""
    for number in (1, 2, 3):
        plan = read_plan(f"notes_{number}")
        assert plan.steps == 100
        assert "--questions 8 --answers 8 --eval_every 10 --eval_tasks 128 " in plan.common


@pytest.mark.parametrize("name", experiments.names_of_plans())
def test_every_arm_of_our_plans_can_be_trained(name):
    """train.py takes the flags of each arm, and no two are the same. No real model is read."""
    plan = read_plan(name)
    common = plan.common.split()
    if "--model" in common:
        del common[common.index("--model"):common.index("--model") + 2]
    plan = replace(plan, common=" ".join(common).replace("--device cuda", ""))
    experiments.settings_of_arms(plan, "")
