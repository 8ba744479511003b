"""A run that goes wrong: logs with one fault each, healthy ones, and what cannot be read."""
import json
import os

import pytest
from conftest import refusal, write_lines

from tools import preflight
from tools.helpers.diagnosis import diagnose, faults_of, read_log

STEPS = range(1, 31)


def line(step, **known):
    usual = {"step": step, "reward": 0.3 + 0.01 * step, "success": 0.2 + 0.01 * step,
             "groups_without_spread": 0.2, "entropy": 0.35, "length": 46.0, "finished": 1.0,
             "gradient_norm": 0.2, "sampler_gap": 3e-7}
    return usual | known


FAULTS = {  # the row of the table, and what is different in its run
    "sampler": (1, {"sampler_gap": lambda step: 0.12}),
    "sampler left behind": (1, {"sampler_gap": lambda step: 1e-6 if step < 20 else 0.2}),
    "hard": (3, {"success": lambda step: 0.0, "reward": lambda step: 0.09}),
    "dead": (3, {"groups_without_spread": lambda step: 0.9, "success": lambda step: 0.1,
                 "reward": lambda step: 0.1}),
    "easy": (4, {"groups_without_spread": lambda step: 0.95, "success": lambda step: 0.97,
                 "reward": lambda step: 1.0}),
    "one answer": (5, {"entropy": lambda step: 0.35 if step < 5 else 0.002,
                       "groups_without_spread": lambda step: 0.2 if step < 5 else 0.95,
                       "success": lambda step: 0.26, "reward": lambda step: 0.26}),
    "destroyed": (6, {"success": lambda step: 0.2 if step < 3 else 0.0,
                      "reward": lambda step: 0.3 if step < 3 else 0.05,
                      "gradient_norm": lambda step: 0.17 if step < 3 else 0.9}),
    "destroyed at once": (6, {"success": lambda step: 0.3 if step < 2 else 0.0,
                              "reward": lambda step: 0.3 if step < 2 else 0.0,
                              "groups_without_spread": lambda step: 0.1 if step < 2 else 1.0,
                              "gradient_norm": lambda step: 0.2 if step < 2 else 0.0,
                              "entropy": lambda step: 0.35 if step < 2 else 1.6,
                              "finished": lambda step: 1.0 if step < 3 else 0.1}),
    "destroyed, with equal rewards": (6, {
        "success": lambda step: 0.2 if step < 3 else 0.0,
        "reward": lambda step: 0.2 if step < 3 else 0.0,
        "groups_without_spread": lambda step: 0.2 if step < 3 else 1.0}),
    "not finite": (6, {"gradient_norm": lambda step: float("nan") if step > 9 else 0.2}),
    "cut off": (7, {"finished": lambda step: 0.25}),
    "format": (9, {"success": lambda step: 0.2 + 0.001 * (-1) ** step}),
    "old": (11, {"ratio_mean": lambda step: 1.0, "clipped_share": lambda step: 0.0}),
    "clipped": (12, {"ratio_mean": lambda step: 1.4, "clipped_share": lambda step: 0.5}),
    "unclipped": (13, {"gradient_norm_last": lambda step: 3.0}),
    "no number": (0, {"reward": lambda step: float("nan") if step == 9 else 0.3}),
    "no gradient": (0, {"gradient_norm": lambda step: 0.0}),
    "no rate": (0, {"learning_rate": lambda step: 0.0}),
    # what a beginner sends because it is broken
    "the reward falls": (10, {"reward": lambda step: 0.46 - 0.0133 * step,
                              "success": lambda step: 0.46 - 0.0133 * step}),
    "a reward below 0 falls": (10, {"reward": lambda step: -0.26 - 0.02 * step,
                                    "success": lambda step: 0.3 - 0.005 * step}),
    "answers no longer end": (6, {"finished": lambda step: 1 - step / 30}),
    "longer and longer": (9, {"length": lambda step: 200 + 27 * step}),
    "two tokens at last": (9, {"length": lambda step: 200 - 6.6 * step}),
    "paid for something else": (9, {"reward": lambda step: 0.3 + 0.02 * step,
                                    "success": lambda step: 0.4 - 0.01 * step}),
    "short and never right": (6, {"length": lambda step: 100 - 3.3 * step,
                                  "reward": lambda step: 0.5 - 0.016 * step,
                                  "success": lambda step: 0.5 - 0.016 * step}),
    "entropy rises": (6, {"entropy": lambda step: 0.4 + 0.19 * step}),
    "kl rises": (6, {"kl": lambda step: 50 * step / 30}),
    "gradients jump": (6, {"gradient_norm": lambda step: 0.1 if step < 24 else 100.0}),
    "the loss is no number": (6, {"loss": lambda step: float("nan")}),
    "no template": (7, {"finished": lambda step: 0.0, "reward": lambda step: -0.1})}


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


def test_a_healthy_run_has_none_and_a_short_one_is_not_judged(tmp_path):
    said = diagnose(write(tmp_path / "log.jsonl"))
    assert "rows. The reward rises" in said and "Nothing of" in said and "Looked at: reward" in said
    write_lines(tmp_path / "short.jsonl", [line(1)])
    assert "nothing can be said" in " ".join(diagnose(tmp_path / "short.jsonl").split())


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
    """Both rise. From step to step the reward alternates; or the length does, as well."""
    for together, rows in ((False, []), (True, [9])):
        write_lines(tmp_path / "log.jsonl", [
            {"reward": 0.3 + 0.01 * step + 0.02 * (step % 2),
             "completions/mean_length": 300 + 2 * step + 20 * together * (step % 2)}
            for step in STEPS])
        assert rows_of(tmp_path / "log.jsonl") == rows


def test_held_out_rewards_of_trl_show_what_is_learned_by_heart(tmp_path):
    lines = [{"reward": 0.3 + 0.02 * step} for step in STEPS]
    write_lines(tmp_path / "log.jsonl", [{"eval_reward": 0.3}, *lines, {"eval_reward": 0.31}])
    assert rows_of(tmp_path / "log.jsonl") == [8]
    write_lines(tmp_path / "log.jsonl", [{"eval_reward": 0.3}, *lines, {"eval_reward": 0.8}])
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


@pytest.mark.parametrize("text, said", [
    ("", "no line with a reward"), ("{'__import__': 1}\n", "no line with a reward"),
    ("{" * 3000, "no line with a reward")])
def test_a_log_that_cannot_be_read_ends_in_a_sentence(text, said, tmp_path):
    (tmp_path / "log.txt").write_text(text)
    assert said in refusal(diagnose, tmp_path / "log.txt")


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
