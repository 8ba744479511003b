"""The controls of the real model's leaderboard, from runs made by hand."""
from types import SimpleNamespace

import numpy as np
import pytest

from analysis.gains import gain_over
from harness.settings import make_settings, read_flags
from research.boards.real_controls import (ARMS, COMMON, PLAIN, ROUNDS, STEPS, compared,
                                           held_out_table, later_table, plan, rates_table,
                                           state_table, training_table, values_of)
from research.publish.results import table_rows

ARGS = SimpleNamespace(model="models/tiny", device="cpu", runs="runs/x", afresh=True)


def run_of(success, sampled, greedy, norm=2.0):
    """A run with this success in training, whose first held-out problems of four are solved."""
    lines = [{"success": success, "entropy": 0.5, "reward_format": 1.0, "gradient_norm": norm,
              "processor_seconds": 1.0} for _ in range(STEPS)]
    evaluations = [{"step": STEPS, "mode": mode, "success": solved / 4,
                    "answer": [1.0] * solved + [0.0] * (4 - solved)}
                   for mode, solved in (("sampled", sampled), ("greedy", greedy))]
    config = {"questions": 8, "answers": 8, "steps": STEPS, "max_grad_norm": 1.0,
              "git_commit": None, "versions": {}}
    return {"metrics": lines, "evaluations": evaluations, "config": config}


def test_an_arm_differs_from_the_one_beside_it_in_one_thing():
    """All settings but the one that its name says are those of the arm that it is compared with."""
    settings = {}
    experiment, [(_, keys)] = plan(ARGS)
    for run in (experiment.plan_run(*key) for key in keys):
        s = make_settings(read_flags([*run.flags, "--seed", str(run.seed)])).to_json()
        settings[run.arm] = {name: value for name, value in s.items()
                             if name not in ("seed", "measured_k", "measured_above")}
    assert settings.keys() == ARMS.keys() == {arm for arms, _ in ROUNDS for arm in arms}
    for name, arm in ARMS.items():
        if arm.beside:
            mine, other = settings[name], settings[arm.beside]
            differ = [key for key in mine.keys() & other.keys() if mine[key] != other[key]]
            assert len(differ) == 1, name
    unclipped, slow = settings["random unclipped"], settings["inverse_logprob 5e-7"]
    assert unclipped["max_grad_norm"] == 0 and unclipped["learning_rate"] == 2e-6
    assert slow["learning_rate"] == 5e-7 and slow["max_grad_norm"] == 1
    assert settings["twice"]["questions"] == 16
    assert f"--eval_every {STEPS}" in COMMON  # the last step is evaluated, too


def test_each_half_of_the_seeds_takes_the_rate_of_the_other():
    """Two seeds to each half. The first half of equal_gradient is best at 2e-6, the second at 1e-6,
    so the first gets 1e-6, and the other way round. All others have 0.1 at every rate."""
    by_rate = {"2e-6": [0.9, 0.8, 0.1, 0.2], "1e-6": [0.5, 0.4, 0.7, 0.6], "5e-7": [0.1] * 4}
    arms = {}
    for name in (PLAIN, "equal_gradient", "inverse_logprob"):
        for rate, success in by_rate.items():
            found = success if name == "equal_gradient" else [0.1] * 4
            arms[name if rate == "2e-6" else f"{name} {rate}"] = {
                seed: run_of(share, 0, 0) for seed, share in enumerate(found)}
    rows = {row[0]: row for row in rates_table(arms).rows}
    assert rows["equal_gradient"][3:6] == pytest.approx([0.1, 0.55, 0.5])
    others = [0.1] * 24
    assert rows[PLAIN][2] == pytest.approx(np.mean([*np.ravel(list(by_rate.values())), *others]))
    gain = np.mean([0.5, 0.4, 0.1, 0.2]) - 0.1
    assert rows["equal_gradient"][6].value == pytest.approx(gain) and rows[PLAIN][6] is None
    del arms[f"{PLAIN} 1e-6"][0]  # three seeds have all rates: too few for two halves
    assert [row[6] for row in rates_table(arms).rows] == [None] * 3


def test_a_loss_by_sampling_alone_is_told_from_one_by_greedy_answers_too():
    """Two pairs. equal_gradient solves one problem of four where plain GRPO solves three by
    sampling; greedily both solve three."""
    arms = {PLAIN: {seed: run_of(0.5 + seed / 100, 3, 3) for seed in range(2)},
            "equal_gradient": {seed: run_of(0.3 + seed / 50, 1, 3, norm=0.5) for seed in range(2)},
            "random unclipped": {0: run_of(0.5, 3, 3)}}
    assert compared(arms).keys() == {"equal_gradient"}  # the other has nothing beside it
    [row] = held_out_table(arms).rows
    _, beside, pairs, sampled, greedy, rest, _ = row
    assert (beside, pairs, sampled.value, greedy.value, rest.value) == (PLAIN, 2, -0.5, 0.0, -0.5)
    [row] = training_table(arms).rows
    assert row[3].value == pytest.approx(-0.195)
    state = {row[0]: row for row in state_table(arms).rows}
    assert state[PLAIN][-1] == 1.0 and state["equal_gradient"][-1] == 0.0  # of the steps clipped
    stored = values_of({"none-s0": arms[PLAIN][0]})["runs"]["none-s0"]
    assert stored["sampled"] == "1110" and stored["in_short"][2] == [32] * STEPS
    assert np.isfinite(stored["entropy"]).all()


def test_published_runs_are_used_again_and_what_is_open_comes_first():
    """The tables of the published runs alone are those that were published. --model names them."""
    args = SimpleNamespace(model="models/Qwen2.5-Coder-0.5B-Instruct", device="cuda", runs="runs/x",
                           afresh=False)
    experiment, [(_, keys)] = plan(args)
    arms = experiment.arms(keys)
    assert sum(map(len, arms.values())) == 117
    for table, of_arms in (("training", training_table), ("held_out", held_out_table)):
        published = {row["arm"]: row for row in table_rows("real_controls", table)}
        for name, *_, p, _ in (row if table == "training" else [*row, ""]
                               for row in of_arms(arms).rows):
            assert p == pytest.approx(published[name]["p"], rel=1e-9, abs=1e-12), name
    state = {row["arm"]: row for row in table_rows("real_controls", "state")}
    for name, seeds, success, *_, norm, clipped in state_table(arms).rows:
        assert (seeds, clipped) == (state[name]["seeds"], pytest.approx(state[name]["clipped"]))
        assert norm == pytest.approx(state[name]["norm"], rel=1e-3)
    missing = [run.name for run in experiment.missing(keys)]
    assert missing[0] == "measured 16-s12" and len(missing) == 19 + 40
    first = {name.rpartition("-s")[0] for name in missing[:10]}
    assert first == {"none", "twice", "measured 16"}
    args.afresh = True
    assert len(plan(args)[0].missing(keys)) == 136 + 40


def test_later_methods_are_a_family_of_their_own():
    """One of them does not make the p of the others larger, and is not in their table."""
    arms = {name: {seed: run_of(start + seed * step, 3, 3) for seed in range(3)}
            for name, start, step in ((PLAIN, 0.5, 0.01), ("equal_gradient", 0.4, 0.03),
                                      ("inverse_logprob", 0.3, 0.02), ("rlsd", 0.3, 0.04))}
    rows = [row for table in (training_table(arms), later_table(arms)) for row in table.rows]
    assert [row[0] for row in rows] == ["equal_gradient", "inverse_logprob", "rlsd"]
    alone = {name: gain_over(arms[name], arms[PLAIN]).p for name in arms}
    assert rows[1][4] == pytest.approx(2 * alone["inverse_logprob"])
    assert rows[2][4] == pytest.approx(alone["rlsd"])
