"""A run that goes wrong: logs with one fault each, healthy ones, and what cannot be read."""
import json
import os

import numpy as np
import pytest
from conftest import refusal, write_lines

from tools import preflight
from tools.helpers.diagnosis import diagnose, faults_of
from tools.helpers.log import Metric, read_log

STEPS = range(1, 31)


def line(step, **known):
    usual = {"step": step, "reward": 0.3 + 0.01 * step, "success": 0.2 + 0.01 * step,
             "groups_without_spread": 0.2, "entropy": 0.35, "length": 46.0, "finished": 1.0,
             "gradient_norm": 0.2, "sampler_gap": 3e-7}
    return usual | known


FAULTS = {  # the row of the table, and what is different in its run
    "sampler": (1, {"sampler_gap": lambda step: 0.12 if step < 20 else 1e-6}),
    "sampler left behind": (1, {"sampler_gap": lambda step: 1e-6 if step < 20 else 0.2}),
    "hard": (3, {"success": lambda step: 0.0, "reward": lambda step: 0.09}),
    "dead": (3, {"groups_without_spread": lambda step: 0.9, "success": lambda step: 0.1,
                 "reward": lambda step: 0.1}),
    "easy": (4, {"groups_without_spread": lambda step: 0.95, "success": lambda step: 0.97,
                 "reward": lambda step: 1.0}),
    "one answer": (5, {"entropy": lambda step: 0.35 if step < 5 else 0.002,
                       "groups_without_spread": lambda step: 0.2 if step < 5 else 0.95,
                       "success": lambda step: 0.26, "reward": lambda step: 0.26}),
    "destroyed at once": (6, {"success": lambda step: 0.3 if step < 2 else 0.0,
                              "reward": lambda step: 0.3 if step < 2 else 0.0,
                              "groups_without_spread": lambda step: 0.1 if step < 2 else 1.0,
                              "gradient_norm": lambda step: 0.2 if step < 2 else 0.0,
                              "entropy": lambda step: 0.35 if step < 2 else 1.6,
                              "finished": lambda step: 1.0 if step < 3 else 0.1}),
    "cut off": (7, {"finished": lambda step: 0.25}),
    "old": (11, {"ratio_mean": lambda step: 1.0, "clipped_share": lambda step: 0.0}),
    "clipped": (12, {"ratio_mean": lambda step: 1.4, "clipped_share": lambda step: 0.5}),
    "unclipped": (13, {"gradient_norm_last": lambda step: 3.0}),
    "no number": (0, {"reward": lambda step: float("nan") if step == 9 else 0.3}),
    "no gradient": (0, {"gradient_norm": lambda step: 0.0}),
    "no rate": (0, {"learning_rate": lambda step: 0.0}),
    # what a beginner sends because it is broken
    "the reward falls": (10, {"reward": lambda step: 0.46 - 0.0133 * step,
                              "success": lambda step: 0.46 - 0.0133 * step}),
    "answers no longer end": (6, {"finished": lambda step: 1 - step / 30}),
    "longer and longer": (9, {"length": lambda step: 200 + 27 * step}),
    "two tokens at last": (9, {"length": lambda step: 200 - 6.6 * step}),
    "paid for something else": (9, {"reward": lambda step: 0.3 + 0.02 * step,
                                    "success": lambda step: 0.4 - 0.01 * step}),
    "entropy rises": (6, {"entropy": lambda step: 0.4 + 0.19 * step}),
    "kl rises": (6, {"kl": lambda step: 50 * step / 30}),
    "gradients jump": (6, {"gradient_norm": lambda step: 0.1 if step < 24 else 100.0})}


def rows_of(path):
    return [fault.row for fault in faults_of(read_log(path))]


def write(path, changes=()):
    write_lines(path, [line(step) | {name: of_step(step) for name, of_step in dict(changes).items()}
                       for step in STEPS])
    return path


def test_a_text_may_have_any_end_of_a_line_and_any_number(tmp_path):
    """A number too large for a float is none."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line(step, note="a\u2028b"), ensure_ascii=False) + "\n"
                            for step in STEPS), encoding="utf-8")
    assert read_log(path).steps == 30
    write_lines(path, [line(step, length=10 ** 400) for step in STEPS])
    assert rows_of(path) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_no_other(name, tmp_path):
    row, changes = FAULTS[name]
    assert rows_of(write(tmp_path / "log.jsonl", changes)) == [row]


@pytest.mark.parametrize("name, before, after, is_destroyed", [
    ("gradient_norm", 0.2, 0.31, True), ("entropy", 0.35, 0.53, True), ("kl", 0.0, 1.6, True),
    ("finished", 0.6, 0.4, True), ("groups_without_spread", 0.2, 1.0, True),
    ("length", 46.0, 9.0, True), ("gradient_norm", 0.2, 0.29, False)])
def test_a_model_is_destroyed_if_a_second_sign_says_so(name, before, after, is_destroyed, tmp_path):
    """The success is lost after two steps. A gradient that grew by less than a half is no sign."""
    path = write(tmp_path / "log.jsonl", {
        "success": lambda step: 0.2 if step < 3 else 0.0,
        "reward": lambda step: 0.2 if step < 3 else 0.0,
        name: lambda step: before if step < 3 else after})
    assert ("the model is destroyed" in diagnose(path)) == is_destroyed


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "kl"])
def test_what_is_not_finite_is_counted(name, tmp_path):
    path = write(tmp_path / "log.jsonl", {name: lambda step: 0.2 if step < 10 else float("nan")})
    assert rows_of(path) == [6]
    assert f"Seen: {name} is not finite in 21 of 30 steps." in " ".join(diagnose(path).split())


@pytest.mark.parametrize("changes", [
    {"ratio_mean": lambda step: 1.0, "clipped_share": lambda step: 0.1},
    {"ratio_mean": lambda step: 1.1, "clipped_share": lambda step: 0.0},
    # a twentieth is lost of what is below 0; and a third, by one lucky step
    {"success": lambda step: 0.2, "reward": lambda step: -10 - 0.02 * step},
    {"success": lambda step: 0.2, "reward": lambda step: 1.5 if step == 3 else 0.3}])
def test_what_looks_like_a_fault_and_is_none(changes, tmp_path):
    assert rows_of(write(tmp_path / "log.jsonl", changes)) == []


def test_evidence_goes_from_the_first_fifth_to_the_last(tmp_path):
    """Of 20 steps four: 0, 1, 2, 3 and 16, 17, 18, 19."""
    metric = Metric(np.arange(20.0))
    assert (metric.first, metric.start, metric.end) == (0.5, 1.5, 17.5)
    write_lines(tmp_path / "log.jsonl", [{"reward": 0.3, "frac_reward_zero_std": 0.2,
                                          "completions/mean_length": step} for step in range(20)])
    said = " ".join(diagnose(tmp_path / "log.jsonl").split())
    assert "Seen: length went from 1.5 to 17.5." in said


@pytest.mark.parametrize("spread, rows", [(0.18, [10]), (0.3, []), (None, [])])
def test_a_reward_falls_if_it_loses_half_a_spread(spread, rows, tmp_path):
    """From a mean of 0.9825 in the first fifth to 0.8625 in the last: 0.12, which is more than half
    of 0.18, less than half of 0.3, and less than a third of 0.9825."""
    known = {} if spread is None else {"reward_std": spread}
    write_lines(tmp_path / "log.jsonl", [{"reward": 1 - 0.005 * step, **known} for step in STEPS])
    assert rows_of(tmp_path / "log.jsonl") == rows


def test_a_healthy_run_has_none_and_a_short_one_is_not_judged(tmp_path):
    said = diagnose(write(tmp_path / "log.jsonl"))
    assert "rows. The reward rises" in said and "Nothing of" in said and "Looked at: reward" in said
    write_lines(tmp_path / "five.jsonl", [line(step) for step in range(1, 6)])
    assert "The reward rises" in diagnose(tmp_path / "five.jsonl")
    write_lines(tmp_path / "four.jsonl", [line(step) for step in range(1, 5)])
    assert "nothing can be said" in " ".join(diagnose(tmp_path / "four.jsonl").split())


def test_trl_and_verl_are_read_under_their_names(tmp_path):
    def trl(step):
        return {"step": step, "reward": 0.1, "frac_reward_zero_std": 0.9, "entropy": 0.4,
                "completions/clipped_ratio": 0.1, "grad_norm": 0.3, "loss": 0.0}

    state = tmp_path / "checkpoint-30/trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": [trl(step) for step in STEPS]}))
    assert rows_of(tmp_path) == [3]
    write_lines(tmp_path / "verl.jsonl", [
        {"critic/rewards/mean": 0.1, "response_length/clip_ratio": 0.8, "actor/grad_norm": 1.0}
        for _ in STEPS])
    assert rows_of(tmp_path / "verl.jsonl") == [7]
    said = diagnose(tmp_path / "verl.jsonl")
    assert "Not in this log: equal_groups, entropy" in " ".join(said.split())


PARTS = {  # the rows, and the parts of a reward that rises
    "the form is learned already": ([], {"first": lambda step: 0.02 * step,
                                         "second": lambda step: 0.97 + 0.01 * (step % 2)}),
    "one is never paid": ([], {"first": lambda step: 0.02 * step, "overlong": lambda step: 0.0}),
    "being right rises alone": ([], {"accuracy": lambda step: 0.02 * step,
                                     "brief": lambda step: 0.4 + 0.1 * (step % 2)}),
    "the form rises alone": ([9], {"right": lambda step: 0.5,
                                   "format": lambda step: 0.02 * step}),
    "nothing is right": ([3], {"accuracy": lambda step: 0.0, "form": lambda step: 0.02 * step})}


@pytest.mark.parametrize("name", PARTS)
def test_what_the_parts_of_a_reward_say(name, tmp_path):
    rows, parts = PARTS[name]
    write_lines(tmp_path / "log.jsonl", [
        {"reward": 0.1 + 0.02 * step, **{f"rewards/{part}/mean": of_step(step)
                                         for part, of_step in parts.items()}} for step in STEPS])
    assert rows_of(tmp_path / "log.jsonl") == rows


def test_length_and_reward_that_both_rise_are_no_fault_unless_they_rise_together(tmp_path):
    """Both rise. From step to step the reward alternates, and the length has every third step or
    every second one above the others."""
    for every, rows in ((3, []), (2, [9])):
        write_lines(tmp_path / "log.jsonl", [
            {"reward": 0.3 + 0.01 * step + 0.02 * (step % 2),
             "completions/mean_length": 300 + 2 * step + 20 * (step % every == 1)}
            for step in STEPS])
        assert rows_of(tmp_path / "log.jsonl") == rows


def test_held_out_rewards_of_trl_show_what_is_learned_by_heart(tmp_path):
    lines = [{"reward": 0.3 + 0.02 * step} for step in STEPS]
    write_lines(tmp_path / "log.jsonl", [{"eval_reward": 0.3}, *lines, {"eval_reward": 0.31}])
    assert rows_of(tmp_path / "log.jsonl") == [8]
    for held_out in ([{"eval_reward": 0.3}, *lines, {"eval_reward": 0.8}],
                     [{"eval_reward": 0.3}, *lines]):  # of one evaluation nothing is known
        write_lines(tmp_path / "log.jsonl", held_out)
        assert rows_of(tmp_path / "log.jsonl") == []


def test_a_log_without_success_that_ends_with_one_answer_has_solved_it_if_its_reward_rose(tmp_path):
    """The entropy falls to a quarter and all groups have equal rewards, as in a run that succeeds.
    """
    def log(reward):
        lines = [{"reward": reward(step), "entropy": 0.4 if step < 9 else 0.1,
                  "frac_reward_zero_std": 0.2 if step < 9 else 1.0} for step in STEPS]
        write_lines(tmp_path / "log.jsonl", lines)
        return rows_of(tmp_path / "log.jsonl")

    assert log(lambda step: 0.3 + 0.02 * step) == []
    assert log(lambda step: 0.3) == [5]


@pytest.mark.parametrize("text", ["", "[" * 100_000])
def test_a_log_that_cannot_be_read_ends_in_a_sentence(text, tmp_path):
    """Nothing, and more lists within lists than Python reads."""
    (tmp_path / "log.txt").write_text(text)
    assert "no line with a reward" in refusal(diagnose, tmp_path / "log.txt")


def test_a_state_that_was_cut_is_told_from_one_without_a_reward(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"reward": 0.5}, {"rew')
    assert "is not JSON: perhaps it was cut" in refusal(diagnose, tmp_path)


def test_a_gain_within_the_noise_is_not_called_a_fall(tmp_path):
    write_lines(tmp_path / "log.jsonl", [{"reward": 0.3 + 0.2 * (step % 2) + 0.001 * step}
                                         for step in STEPS])
    assert "does not rise by more than its noise, from 0.4" in diagnose(tmp_path / "log.jsonl")


def test_a_run_folder_or_log_that_is_none(tmp_path):
    """A pipe would never end."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert "it has no config.json of a run" in refusal(diagnose, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(diagnose, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refusal(diagnose, tmp_path / "pipe")


def test_an_evaluation_without_a_success_is_left_out(tmp_path):
    write(tmp_path / "metrics.jsonl")
    write_lines(tmp_path / "evaluations.jsonl", [{"step": 0, "mode": "sampled"}] * 2)
    (tmp_path / "config.json").write_text('{"mitigation": "none"}')
    assert "Nothing of" in diagnose(tmp_path)


def test_the_command_reads_a_run_and_takes_no_flag_beside_it(recorded, tmp_path, capsys):
    preflight.main(["--run", str(recorded)])
    assert "nothing can be said" in " ".join(capsys.readouterr().out.split())  # it has three steps
    assert "takes no --steps" in refusal(preflight.main, ["--run", str(recorded), "--steps", "3"])
    assert "no run or log" in refusal(preflight.main, ["--run", str(tmp_path / "none")])
