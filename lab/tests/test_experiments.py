"""An experiment from a plan: its table by hand, published gains again, and what is refused."""
import json
from dataclasses import replace

import pytest

from lab.engine.errors import UserError
from lab import experiments
from lab.__main__ import main
from lab.experiments import (Arm, Plan, from_short_form, gains_of, published_runs, read_plan,
                                  short_form, tables_of)
from lab.publish.results import table_rows
from runs import train_here

BATCH = "--questions 2 --answers 4 --max_new_tokens 24 --eval_every 0 --checkpoint_every 0"
GIVEN = {"question": "Is it better?", "common": f"{BATCH} --threads 1", "steps": 1,
         "seeds": [0, 2], "arms": {"none": {}, "rloo": {"flags": "--advantage rloo",
                                                        "beside": "none", "predicted": 0.5}}}
CODES = {"git_commit": "a" * 40, "versions": {"torch": "2.13.0"}}


def run_of(*right, seconds=1.0):
    """A run of 10 answers in a step, so many of them right."""
    return from_short_form([10, seconds, " ".join(map(str, right))], CODES)


def plan_of(**arms):
    return Plan("small", "Is it better?", 2, (0, 3), arms)


# ------------------------------------------------------------------- what the tables say


def test_a_gain_is_the_mean_over_pairs_by_hand():
    """Pairs differ by 0.1, 0.2 and 0.3: the mean is 0.2, its error 0.1 / sqrt(3), t(2) at 97.5%
    4.3027. Seed 3 has no partner."""
    none = {0: run_of(1, 3), 1: run_of(2, 2), 2: run_of(0, 4)}
    mine = {0: run_of(2, 4), 1: run_of(4, 4), 2: run_of(2, 8), 3: run_of(9, 9)}
    found = gains_of(plan_of(none=Arm(), mine=Arm(beside="none")), {"none": none, "mine": mine})
    estimate = found["mine"].estimate
    assert found["mine"].pairs == 3
    assert estimate.value == pytest.approx(0.2)
    assert estimate.high - estimate.value == pytest.approx(4.30265 * 0.1 / 3 ** 0.5, rel=1e-5)


def test_a_planned_arm_without_runs_counts_as_a_test_and_a_control_does_not():
    none = {0: run_of(1), 1: run_of(2), 2: run_of(3)}
    mine = {0: run_of(2), 1: run_of(4), 2: run_of(6)}
    arms = {"none": none, "mine": mine, "control": mine}
    alone = plan_of(none=Arm(), mine=Arm(beside="none"))
    planned = plan_of(none=Arm(), mine=Arm(beside="none"), other=Arm(beside="none"),
                      control=Arm(beside="none", control=True))
    one = gains_of(alone, arms)["mine"]
    found = gains_of(planned, arms)
    assert found["mine"].p == pytest.approx(2 * one.p)
    assert found["control"].p == pytest.approx(one.p)
    # with two tests a gain has to be larger to be seen
    assert found["mine"].could_see > 1.1 * one.could_see
    assert found["control"].could_see == pytest.approx(one.could_see)
    assert set(found) == {"mine", "control"}


def test_tables_have_pairs_quarters_and_the_cost_of_a_step():
    none = {0: run_of(1, 1, 2, 2, 3, 3, 4, 4), 1: run_of(*[2] * 8)}
    mine = {0: run_of(*[3] * 8, seconds=3.0), 1: run_of(*[5] * 8, seconds=3.0)}
    plan = plan_of(none=Arm(), mine=Arm(beside="none", predicted="1 to 2"))
    gains, pairs, curve = tables_of(plan, {"none": none, "mine": mine})
    [row] = gains.rows
    assert dict(zip(gains.columns, row))["cost"] == pytest.approx(3.0)
    assert dict(zip(gains.columns, row))["predicted"] == "1 to 2"
    assert pairs.rows == [("mine", pytest.approx(0.05), pytest.approx(0.3))]
    assert curve.rows[0][2:] == pytest.approx((0.225, 0.15, 0.2, 0.25, 0.3))


def test_the_short_form_of_a_run_gives_the_run_again():
    run = run_of(3, 10, 0, seconds=0.25)
    assert short_form(run) == [10, 0.25, "3 10 0"]
    assert from_short_form(short_form(run), CODES)["metrics"] == run["metrics"]


PUBLISHED = {  # plan -> the table of its result, and how that names an arm and a corrected p
    "board": ("board", "board"), "later": ("later", "gains"),
    "real_board_expression": ("real_board_expression", "board"),
    "real_later": ("real_board_expression", "later"),
    "real_board_brief": ("real_board_brief", "board"),
    "real_board_brief_8_gpu": ("real_board_brief_8_gpu", "board"),
    "real_controls": ("real_controls", "training"),
    "choices": ("choices", "price"), "choices_real": ("choices_real", "price")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_gains_are_computed_again_from_their_runs(name):
    """Gains, both ends of their intervals and p, to 1e-9: programs that are gone computed them."""
    plan = read_plan(name)
    arms = {}
    for (arm, seed), run in published_runs(plan).items():
        arms.setdefault(arm, {})[seed] = run
    found = gains_of(plan, arms)
    rows = table_rows(*PUBLISHED[name])
    by_value = {round(gain.estimate.value, 12): gain for gain in found.values()}
    assert len(rows) == len(found)
    for row in rows:
        value, low, high = row["gain"]["value"], row["gain"]["low"], row["gain"]["high"]
        gain = found[row["arm"]] if "arm" in row else by_value[round(value, 12)]
        estimate = gain.estimate
        assert (estimate.value, estimate.low, estimate.high, gain.p) == pytest.approx(
            (value, low, high, row.get("corrected") or row["p"]), abs=1e-9)


# ------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, **changed):
    path = folder / "mine.json"
    path.write_text(json.dumps(GIVEN | changed))
    return str(path)


@pytest.mark.slow
def test_a_plan_is_trained_once_and_then_used_again(folder, capsys, monkeypatch):
    monkeypatch.setattr("lab.tools.helpers.runs.Runs.start", train_here)
    plan = written(folder)
    main(["experiment", plan, "--dry_run"])
    assert capsys.readouterr().out.count("--advantage rloo") == 2
    main(["experiment", plan, "--processes", "1"])
    said = capsys.readouterr().out
    assert "4 runs of mine are finished, each of 1 steps." in said and "| rloo" in said
    assert (folder / "results/mine/gains.png").exists()
    made = sorted(path.stat().st_mtime_ns for path in folder.glob("runs/mine/*/metrics.jsonl"))
    main(["experiment", plan])
    assert made == sorted(path.stat().st_mtime_ns
                          for path in folder.glob("runs/mine/*/metrics.jsonl"))
    main(["experiment", plan, "--seeds", "3", "--dry_run"])
    assert capsys.readouterr().out.count("--seed 2") == 2


def test_runs_are_made_seed_by_seed():
    plan = replace(plan_of(none=Arm(), mine=Arm(beside="none", seeds=(1, 3))), seeds=(0, 3))
    assert plan.keys(["none", "mine"]) == [
        ("none", 0), ("none", 1), ("mine", 1), ("none", 2), ("mine", 2)]


def arms(**changed):
    return {"arms": GIVEN["arms"] | changed}


@pytest.mark.parametrize("changed, said", [
    (arms(rloo={"flags": "--advantage rlo", "beside": "none"}), "mine, rloo: .*rlo"),
    (arms(rloo={"flags": "--bananas 3", "beside": "none"}), "mine, rloo: unknown argument --ban"),
    (arms(rloo={"flags": "", "beside": "plain"}), "rloo is compared with plain, which is no arm"),
    (arms(rloo={"flags": "", "beside": "none"}), "rloo has the settings of none"),
    (arms(rloo={"flags": "--seed 3", "beside": "none"}), "rloo has --seed, which the plan gives"),
    (arms(rloo={"flag": "--advantage rloo"}), "is no plan: .*flag"),
    (arms(rloo={"flags": "--advantage rloo"}), "no arm is compared with another"),
    ({"seeds": [4, 5]}, "none has one seed, and an interval takes at least two"),
    ({"seeds": 4}, r"the seeds of none are 4. They should be two"),
    ({"steps": 0}, '"steps" is 0'), ({"arm": {}}, "is no plan: .*'arm'"),
    ({"arms": []}, "is no plan"), (arms(rloo=3), "is no plan"),
    (arms(**{"../x": {"beside": "none"}}), "'../x' should be letters, digits, spaces"),
    (arms(rloo={"flags": ["--advantage", "rloo"], "beside": "none"}), "and its flags a text")])
def test_a_plan_with_a_mistake_is_told_so_in_a_sentence(folder, changed, said):
    with pytest.raises(UserError, match=said):
        main(["experiment", written(folder, **changed), "--dry_run"])


def test_a_plan_that_is_nowhere_and_an_arm_that_is_none(folder):
    with pytest.raises(UserError, match="there is no file bord.json.*board, choices"):
        main(["experiment", "bord.json"])
    with pytest.raises(UserError, match="no arm 'gae', only none, rloo"):
        main(["experiment", written(folder), "--arms", "gae"])
    with pytest.raises(UserError, match="not yet two finished seeds"):
        main(["experiment", written(folder), "--report_only"])


def test_an_arm_of_an_earlier_commit_is_compared_and_not_made(folder, capsys):
    """`last` in a plan of ours: its published runs are there, and new seeds are not made."""
    main(["experiment", "choices", "--arms", "per_group", "--seeds", "13", "--dry_run"])
    said = capsys.readouterr()
    assert "per_group cannot be trained here: the last commit that can is f19f84f4" in said.out
    assert "plain-s52" in said.out and "per_group-s52" not in said.out


@pytest.mark.parametrize("name", experiments.names_of_plans())
def test_every_arm_of_our_plans_can_be_trained(name):
    """train.py takes the flags of each arm, and no two are the same. No real model is read."""
    plan = read_plan(name)
    here = [arm for arm in plan.arms if not plan.arms[arm].last]
    common = plan.common.split()
    if "--model" in common:
        del common[common.index("--model"):common.index("--model") + 2]
    plan = replace(plan, common=" ".join(common).replace("--device cuda", ""))
    experiments.refuse_bad_arms(plan, here, "")
