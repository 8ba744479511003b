"""A run that goes wrong: logs with one fault each, healthy ones, and what cannot be read."""
import json
import math
import os

import numpy as np
import pytest
from conftest import refusal, write_lines

from lab.tools import diagnose
from lab.tools.helpers.diagnosis import faults_of, filled, in_short, in_words
from lab.tools.helpers.log import Metric, read_log

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
    "longer and longer": (9, {"length": lambda step: 200 + 27 * step,
                              "success": lambda step: 0.3, "reward": lambda step: 0.3}),
    "two tokens at last": (9, {"length": lambda step: 200 - 6.6 * step,
                               "success": lambda step: 0.3, "reward": lambda step: 0.3}),
    # success is lost while the reward rises: that is no model that was destroyed
    "paid for being wrong": (9, {"reward": lambda step: -0.3 + 0.008 * step,
                                 "success": lambda step: max(0.0, 0.2 - 0.007 * step),
                                 "gradient_norm": lambda step: 0.1 + 0.01 * step}),
    # the rate destroys the model in the last 12 of 30 steps
    "destroyed late": (6, {"gradient_norm": lambda step: 0.3 if step < 19 else 80.0,
                           "entropy": lambda step: 0.4 if step < 19 else 5.0,
                           "success": lambda step: 0.4 if step < 19 else 0.1,
                           "reward": lambda step: 0.4 if step < 19 else 0.1}),
    "paid for something else": (9, {"reward": lambda step: 0.3 + 0.02 * step,
                                    "success": lambda step: 0.4 - 0.01 * step}),
    "entropy rises": (6, {"entropy": lambda step: 0.4 + 0.19 * step}),
    "kl rises": (6, {"kl": lambda step: 50 * step / 30}),
    "the tool is no longer used": (18, {"turns": lambda step: 6 - 0.15 * step}),
    "blind": (17, {"groups_without_spread": lambda step: 0.2 if step < 8 else 0.9,
                   "entropy": lambda step: 0.5 if step < 8 else 0.03,
                   "success": lambda step: 0.15 + 0.001 * step if step < 8 else 0.3 * (step % 3),
                   "reward": lambda step: 0.15 + 0.001 * step if step < 8 else 0.3 * (step % 3)}),
    "gradients jump": (6, {"gradient_norm": lambda step: 0.1 if step < 24 else 100.0})}


def rows_of(path):
    return [fault.row for fault in faults_of(read_log(path))]


def said_of(path):
    log = read_log(path)
    return filled(in_words(log, faults_of(log)))


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
    ("gradient_norm", 0.2, 0.41, True), ("entropy", 0.35, 0.53, True), ("kl", 0.0, 1.1, True),
    ("finished", 0.6, 0.4, True), ("groups_without_spread", 0.2, 1.0, True),
    ("length", 46.0, 9.0, True), ("gradient_norm", 0.2, 0.39, False)])
def test_a_model_is_destroyed_if_a_second_sign_says_so(name, before, after, is_destroyed, tmp_path):
    """The success is lost after two steps. A gradient that did not double is no sign."""
    path = write(tmp_path / "log.jsonl", {
        "success": lambda step: 0.2 if step < 3 else 0.0,
        "reward": lambda step: 0.2 if step < 3 else 0.0,
        name: lambda step: before if step < 3 else after})
    assert ("the model is destroyed" in said_of(path)) == is_destroyed


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "kl"])
def test_what_is_not_finite_is_counted(name, tmp_path):
    path = write(tmp_path / "log.jsonl", {name: lambda step: 0.2 if step < 10 else float("nan")})
    assert rows_of(path) == [6]
    assert f"Seen: {name} is not finite in 21 of 30 steps." in " ".join(said_of(path).split())


@pytest.mark.parametrize("changes", [
    {"kl": lambda step: 1.1 if step > 3 else 0.0},  # a sign beside a lost success alone
    {"groups_without_spread": lambda step: 0.9 if step < 8 else 0.2},  # easier after a fifth
    # solved after two steps: the means of the first six are 0.76 and 0.8
    {"success": lambda step: 0.3 if step < 3 else 0.99,
     "groups_without_spread": lambda step: 0.4 if step < 3 else 1.0},
    # success gains 0.096, which its noise hides, of the reward's 0.24
    {"success": lambda step: 0.3 + 0.2 * (step % 2) + 0.004 * step},
    {"turns": lambda step: 6 - 0.05 * step},  # a third of the turns after the first are lost
    {"gradient_norm": lambda step: math.inf if step == 7 else 0.2},  # float16 tries another scale
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
    said = " ".join(said_of(tmp_path / "log.jsonl").split())
    assert "Seen: length went from 1.5 to 17.5." in said


@pytest.mark.parametrize("slope, held_out, rows", [
    (0.027, None, [10]), (0.019, None, []), (0.019, 0.5, []), (0.019, 0.3, [10])])
def test_a_reward_that_falls_is_a_fault_if_harder_problems_would_not_explain_it(
        slope, held_out, rows, tmp_path):
    """The means of the first and of the last fifth, steps 3.5 and 27.5 of 1 - slope * step: 0.9055
    and 0.2575, of which less than a third is left; or 0.9335 and 0.4775, which harder problems may
    explain, unless held-out problems fall by a fifth, too: from 0.5 to 0.3."""
    lines = [{"reward": 1 - slope * step} for step in STEPS]
    evaluations = [] if held_out is None else [{"eval_reward": 0.5}, {"eval_reward": held_out}]
    write_lines(tmp_path / "log.jsonl", [*lines, *evaluations])
    assert rows_of(tmp_path / "log.jsonl") == rows
    said = " ".join(said_of(tmp_path / "log.jsonl").split())
    assert ("first the same run with a tenth of the learning rate, and then python -m lab.formula"
            in said)
    assert ("If the problems have not become harder" in said) == (not rows)


def test_a_fall_is_told_only_if_nothing_else_is(tmp_path):
    fall = {"reward": lambda step: 1 - 0.03 * step, "success": lambda step: 1 - 0.03 * step}
    assert rows_of(write(tmp_path / "log.jsonl", fall)) == [10]
    assert rows_of(write(tmp_path / "log.jsonl", fall | FAULTS["clipped"][1])) == [12]


def test_a_single_step_with_a_large_gradient_is_no_fault(tmp_path):
    write(tmp_path / "log.jsonl", {"gradient_norm": lambda step: 900.0 if step == 29 else 0.2})
    assert rows_of(tmp_path / "log.jsonl") == []


def test_another_engine_may_differ_by_more_than_our_sampler(tmp_path):
    for gap, rows in ((0.013, []), (0.03, [1])):
        write_lines(tmp_path / "log.jsonl", [
            {"reward": 0.3, "sampling/sampling_logp_difference/mean": gap, "loss": 0.1 * step}
            | {"reward": 0.3 + 0.001 * step} for step in STEPS])
        assert rows_of(tmp_path / "log.jsonl") == rows


def test_longer_answers_that_are_better_are_no_fault(tmp_path):
    write(tmp_path / "log.jsonl", {"length": lambda step: 200 + 27 * step})
    assert rows_of(tmp_path / "log.jsonl") == []
    # a reward that gains less than a quarter of a spread, beside a success that stays
    small = [{"reward": 0.3 + 0.001 * step, "success": 0.3, "reward_std": 0.2} for step in STEPS]
    write_lines(tmp_path / "log.jsonl", small)
    assert rows_of(tmp_path / "log.jsonl") == []


def test_a_healthy_run_has_none_and_a_short_one_is_not_judged(tmp_path):
    said = said_of(write(tmp_path / "log.jsonl"))
    assert "None of 21 signs of a mistake" in said and "The reward rises" in said
    assert "Looked at: reward" in said
    write_lines(tmp_path / "five.jsonl", [line(step) for step in range(1, 6)])
    assert "The reward rises" in said_of(tmp_path / "five.jsonl")
    write_lines(tmp_path / "four.jsonl", [line(step) for step in range(1, 5)])
    assert "nothing can be said" in " ".join(said_of(tmp_path / "four.jsonl").split())


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
    said = said_of(tmp_path / "verl.jsonl")
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


def test_a_log_without_success_may_be_solved_after_two_steps(tmp_path):
    """The rise lies within the first third, whose mean is 0.78 with an error of 0.08, and the last
    one has 0.9. But the end lies 0.6 above the first two steps, and the spread begins at 0.15."""
    def log(last):
        write_lines(tmp_path / "log.jsonl", [
            {"reward": 0.3 if step < 3 else last, "entropy": 0.4 if step < 7 else 0.1,
             "frac_reward_zero_std": 0.2 if step < 3 else 1.0,
             "reward_std": 0.4 if step < 3 else 0.03} for step in STEPS])
        return rows_of(tmp_path / "log.jsonl")

    assert log(0.9) == []
    assert log(0.3) == [5]


@pytest.mark.parametrize("text", ["", "[" * 100_000])
def test_a_log_that_cannot_be_read_ends_in_a_sentence(text, tmp_path):
    """Nothing, and more lists within lists than Python reads."""
    (tmp_path / "log.txt").write_text(text)
    assert "no line with a reward" in refusal(said_of, tmp_path / "log.txt")


def test_a_state_that_was_cut_is_told_from_one_without_a_reward(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"reward": 0.5}, {"rew')
    assert "is not JSON: perhaps it was cut" in refusal(said_of, tmp_path)


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "np.float64(nan)", "Infinity"])
def test_what_is_no_number_is_seen_however_it_is_printed(tmp_path, text):
    """By verl's console, in CSV, and as a text in JSON. A cell that is empty says nothing."""
    def norm(step):
        return text if step % 2 else "0.5"

    printed = [f"step:{step} - actor/grad_norm:{norm(step)} - critic/rewards/mean:0.5"
               for step in STEPS]
    (tmp_path / "verl.log").write_text("\n".join(printed))
    plain = text.removeprefix("np.float64(").removesuffix(")")
    rows = [f"{step},0.5,{plain if step % 2 else 0.5}" for step in STEPS]
    (tmp_path / "log.csv").write_text("\n".join(["step,reward,grad_norm", *rows]))
    write_lines(tmp_path / "log.jsonl", [{"reward": 0.5, "grad_norm": plain if step % 2 else 0.5}
                                         for step in STEPS])
    for name in ("verl.log", "log.csv", "log.jsonl"):
        assert rows_of(tmp_path / name)[0] == 6, name
    (tmp_path / "log.csv").write_text("\n".join(
        ["step,reward,grad_norm", *(row.replace(plain, "") for row in rows)]))
    assert 6 not in rows_of(tmp_path / "log.csv")


def test_a_small_gain_beside_a_lost_entropy_is_no_solution(tmp_path):
    """The entropy is gone, and nearly all groups have equal rewards, at a reward of 0.14."""
    def of_step(step):
        share = step / len(STEPS)
        return {"reward": 0.08 + 0.06 * share, "reward_std": 0.27, "entropy": 0.5 * 0.01 ** share,
                "frac_reward_zero_std": 0.3 + 0.67 * share}

    write_lines(tmp_path / "log.jsonl", [of_step(step) for step in STEPS])
    assert rows_of(tmp_path / "log.jsonl") == [5]


def test_a_file_without_a_reward_names_what_it_has(tmp_path):
    (tmp_path / "log.csv").write_text("step,mean_reward\n1,0.5\n")
    said = refusal(said_of, tmp_path / "log.csv")
    assert "critic/rewards/mean" in said and said.endswith("this file has step, mean_reward")


def test_a_gain_within_the_noise_is_not_called_a_fall(tmp_path):
    write_lines(tmp_path / "log.jsonl", [{"reward": 0.3 + 0.2 * (step % 2) + 0.001 * step}
                                         for step in STEPS])
    said = " ".join(said_of(tmp_path / "log.jsonl").split())
    assert "does not rise by more than its noise, from 0.4" in said


def test_a_run_folder_or_log_that_is_none(tmp_path):
    """A pipe would never end."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert "it has no config.json of a run" in refusal(said_of, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(said_of, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refusal(said_of, tmp_path / "pipe")


def test_an_evaluation_without_a_success_is_left_out(tmp_path):
    write(tmp_path / "metrics.jsonl")
    write_lines(tmp_path / "evaluations.jsonl", [{"step": 0, "mode": "sampled"}] * 2)
    (tmp_path / "config.json").write_text('{"mitigation": "none"}')
    assert "None of" in said_of(tmp_path)


OTHERS = {  # a name of the reward, of the length and of the gradient norm as others write them
    "W&B": ("train/reward", "train/completions/mean_length", "train/grad_norm"),
    "OpenRLHF": ("train/reward", "train/response_length", "train/actor_grad_norm"),
    "slime": ("rollout/raw_reward", "rollout/response_len/mean", "train/grad_norm"),
    "prime-rl": ("train/agg/all/agent/reward/mean", "train/agg/all/agent/num_output_tokens/mean",
                 "optim/grad_norm"),
    "verl": ("critic/score/mean", "response_length/mean", "actor/grad_norm")}


@pytest.mark.parametrize("trainer", OTHERS)
def test_the_names_of_other_trainers(trainer, tmp_path):
    """slime and prime-rl write the metrics of one step in several lines."""
    names = OTHERS[trainer]
    lines = [{name: 0.1 * place + 0.01 * step} for step in STEPS
             for place, name in enumerate(names, 1)]
    write_lines(tmp_path / "log.jsonl", lines)
    log = read_log(tmp_path / "log.jsonl")
    assert log.steps == 30
    ends = [log[name].values[-1] for name in ("reward", "length", "gradient_norm")]
    assert ends == pytest.approx([0.4, 0.5, 0.6])


def test_what_verl_prints_and_a_table_of_wandb(tmp_path):
    printed = [f"(TaskRunner pid=7) step:{step} - actor/entropy:0.4 - critic/score/mean:"
               f"np.float64({0.3 + 0.01 * step}) - val-core/math/acc/mean@4:{0.5 - 0.01 * step}"
               for step in STEPS]
    (tmp_path / "console.txt").write_text("loading\n" + "\n".join(printed))
    log = read_log(tmp_path / "console.txt")
    assert log.steps == 30 and log["entropy"].always(0.4)
    assert log["reward"].values[-1] == pytest.approx(0.6)
    assert rows_of(tmp_path / "console.txt") == [8]  # the reward rises, and held out it falls
    rows = [f'{step},{0.3 + 0.01 * step},"{0.2}"' for step in STEPS]
    (tmp_path / "log.csv").write_text("\n".join(
        ["Step,my run - train/reward,my run - train/grad_norm", *rows]))
    log = read_log(tmp_path)
    assert log["reward"].values[0] == pytest.approx(0.31) and log["gradient_norm"].always(0.2)


LINES = [line(step, reward=0.3 + 0.02 * step) for step in STEPS]
PASTED = {  # what people paste, of the same run
    "TRL's lines.txt": "loading\n" + "\n".join(f" 3%|#  | {one}" for one in LINES),
    "TRL's texts.txt": "\n".join(str({name: str(value) for name, value in one.items()})
                                 for one in LINES),
    "numpy.txt": "\n".join(str(one).replace("'reward': ", "'reward': np.float64(").replace(
        ", 'success'", "), 'success'") for one in LINES),
    "array.json": json.dumps(LINES, indent=1),
    "table.md": "| Step | reward |\n|---|---|\n" + "\n".join(
        f"| {one['step']} | {one['reward']} |" for one in LINES),
    "notebook.txt": "Step\tTraining Loss\treward\n" + "\n".join(
        f"{one['step']}\t0.1\t{one['reward']}" for one in LINES),
    "nanochat.txt": "\n".join(f"Step {one['step']}/467 | Average reward: {one['reward']} | Average "
                              "sequence length: 46" for one in LINES),
    "backwards.csv": "step,reward\n" + "\n".join(
        f"{one['step']},{one['reward']}" for one in reversed(LINES)),
    "restarted.csv": "step,reward\n" + "\n".join(
        f"{one['step']},{one['reward']}" for one in LINES[:20] + LINES[10:]),
    "missing.csv": "step,reward,grad_norm\n" + "\n".join(
        f"{one['step']},{one['reward']},NaN\n{one['step']},NaN,0.2" for one in LINES),
    "apart.csv": "reward,grad_norm\n" + "\n".join(
        f"{one['reward']},NaN\nNaN,0.2" for one in LINES),
    "long.csv": "step,reward,text\n" + "\n".join(
        f"{one['step']},{one['reward']},{'a' * 140_000}" for one in LINES)}


@pytest.mark.parametrize("name", PASTED)
def test_what_people_paste_is_read(name, tmp_path):
    """It has thirty steps, in their order, and no fault."""
    (tmp_path / name).write_text(PASTED[name])
    log = read_log(tmp_path / name)
    assert log["reward"].values.tolist() == pytest.approx([one["reward"] for one in LINES])
    assert faults_of(log) == [] and log["reward"].broken == log["gradient_norm"].broken == 0


def test_a_number_that_is_none_is_seen_in_what_trl_prints(tmp_path):
    """A cell that is nan in every step is no missing one."""
    (tmp_path / "log.txt").write_text("\n".join(
        str(one | {"grad_norm": math.nan, "loss": -math.inf}) for one in LINES))
    assert rows_of(tmp_path / "log.txt") == [6]
    (tmp_path / "log.txt").write_text("\n".join(str({"reward": math.nan}) for _ in STEPS))
    assert "Looked at: reward" in said_of(tmp_path / "log.txt")


def test_a_table_of_several_runs_is_told(tmp_path):
    (tmp_path / "log.csv").write_text("Step,good - train/reward,dead - train/reward\n1,0.5,0\n")
    assert "several runs: dead, good" in refusal(said_of, tmp_path / "log.csv")


@pytest.mark.parametrize("row, metrics, last", [
    (7, {"rollout/truncated_rate": 0.72}, {}), (1, {"rollout_corr/kl": 0.09}, {}),
    (8, {}, {"eval/eval_math_pass1": 0.2}), (9, {"rewards/right": 0.5}, {}),
    (18, {"num_turns/mean": 1.2}, {}), (18, {"tools/call_frequency": 0.1}, {})])
def test_names_of_today(row, metrics, last, tmp_path):
    """OpenRLHF's, verl's, and those of TRL, also up to 0.16."""
    def of_step(step):
        more = {"rewards/format": 0.02 * step} if row == 9 else {}
        first = {name: 6.0 for name in metrics} if row == 18 and step < 15 else {}
        return {"reward": 0.1 + 0.02 * step} | metrics | more | first | (
            last if step % 10 == 0 else {})

    write_lines(tmp_path / "log.jsonl", [of_step(step) for step in STEPS])
    assert rows_of(tmp_path / "log.jsonl") == [row]


def status_of(*typed):
    return diagnose.main(list(map(str, typed)))


def test_the_command_has_a_status_and_json(recorded, tmp_path, capsys):
    assert status_of(recorded) == 2  # it has three steps
    assert "nothing can be said" in " ".join(capsys.readouterr().out.split())
    assert status_of(tmp_path / "none") == 2
    assert "no run or log" in capsys.readouterr().err
    assert status_of(write(tmp_path / "log.jsonl")) == 0
    capsys.readouterr()
    write(tmp_path / "log.jsonl", FAULTS["cut off"][1])
    assert status_of(tmp_path / "log.jsonl", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    [fault] = found["faults"]
    assert fault["row"] == 7 and fault["seen"] == "finished is 0.25 in every step"
    assert found["metrics"]["length"] == {"start": 46.0, "end": 46.0}


def test_the_verdict_in_a_line(tmp_path):
    write(tmp_path / "log.jsonl", FAULTS["cut off"][1])
    assert in_short(read_log(tmp_path / "log.jsonl")).startswith(
        "Mistakes in the training: The limit of new tokens is too small")
    assert "none seen" in in_short(read_log(write(tmp_path / "log.jsonl")))
    write_lines(tmp_path / "log.jsonl", [line(step) for step in range(1, 4)])
    assert in_short(read_log(tmp_path / "log.jsonl")) == ""
