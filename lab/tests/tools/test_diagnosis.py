"""A run that goes wrong: one table of logs with the faults seen in them; how a log is read; what
cannot be read."""
import json
import math
import os

import numpy as np
import pytest
from conftest import refusal, write_lines

from lab.tools import diagnose
from lab.tools.diagnose import faults_of, filled, in_words
from lab.tools.logs import Metric, read_log

STEPS = range(1, 31)
NAN = float("nan")


def log(**columns):
    """Lines of 30 steps: each column a number, or a function of the step."""
    return [{name: of(step) if callable(of) else of for name, of in columns.items()}
            for step in STEPS]


def ours(**changed):
    """A healthy run of this project, but for what is changed."""
    return log(**{"step": lambda step: step, "reward": rising(0.3, 0.01),
                  "success": rising(0.2, 0.01), "groups_without_spread": 0.2, "entropy": 0.35,
                  "length": 46.0, "finished": 1.0, "gradient_norm": 0.2, "sampler_gap": 3e-7,
                  **changed})


def trl(**columns):
    """A log of TRL, by our names."""
    names = {"equal": "frac_reward_zero_std", "length": "completions/mean_length",
             "gap": "sampling/sampling_logp_difference/mean"}
    return log(**{names.get(name, f"rewards/{name[5:]}/mean" if name.startswith("part_") else name):
                  of for name, of in columns.items()})


def rising(start, by):
    return lambda step: start + by * step


def until(last, before, after):
    """Before this step one value, or function of the step, and then another."""
    def of_step(step):
        value = before if step < last else after
        return value(step) if callable(value) else value
    return of_step


def lost(**second):
    """The success is lost after two steps; and a second metric, before and after."""
    both = {"success": until(3, 0.2, 0.0), "reward": until(3, 0.2, 0.0)}
    return ours(**both, **{name: until(3, *values) for name, values in second.items()})


def held_out(*rewards, reward=rising(0.3, 0.02)):
    [first, *last] = [{"eval_reward": each} for each in rewards]
    return [first, *trl(reward=reward), *last]


CLIPPED = dict(ratio_mean=1.4, clipped_share=0.5)
FLAT = dict(reward=0.3, success=0.3)
GAINS = {  # metrics that are a sign in a run that gains nothing, and none in one that gains
    "entropy rises": (6, dict(entropy=rising(0.4, 0.19))),
    "kl rises": (6, dict(kl=rising(0, 50 / 30))),
    "gradients grow ninefold": (6, dict(gradient_norm=until(24, 0.1, 0.9))),
    "answers no longer end": (6, dict(finished=rising(1, -1 / 30))),
    "clipped": (12, CLIPPED),
    "the tool is no longer used": (18, dict(turns=rising(6, -0.15)))}
# the rows of docs/reference/how_a_run_fails.md, and the log
LOGS = {
    "healthy": ([], ours()),
    "sampler": ([1], ours(sampler_gap=until(20, 0.12, 1e-6))),
    "sampler left behind": ([1], ours(sampler_gap=until(20, 1e-6, 0.2))),
    "another engine may differ by more": ([], trl(reward=rising(0.3, 0.001), gap=0.013,
                                                  loss=rising(0, 0.1))),
    "by too much": ([1], trl(reward=rising(0.3, 0.001), gap=0.03, loss=rising(0, 0.1))),
    "hard": ([3], ours(success=0.0, reward=0.09)),
    "dead": ([3], ours(groups_without_spread=0.9, success=0.1, reward=0.1)),
    "easier after a fifth": ([], ours(groups_without_spread=until(8, 0.9, 0.2))),
    "easy": ([4], ours(groups_without_spread=0.95, success=0.97, reward=1.0)),
    "solved after two steps": ([], ours(success=until(3, 0.3, 0.99),
                                        groups_without_spread=until(3, 0.4, 1.0))),
    "one answer": ([5], ours(entropy=until(5, 0.35, 0.002), success=0.26, reward=0.26,
                             groups_without_spread=until(5, 0.2, 0.95))),
    "one answer, which is right": ([], trl(reward=rising(0.3, 0.02), entropy=until(9, 0.4, 0.1),
                                           equal=until(9, 0.2, 1.0))),
    "one answer, which is not": ([5], trl(reward=0.3, entropy=until(9, 0.4, 0.1),
                                          equal=until(9, 0.2, 1.0))),
    # a rise from 0.295 to 0.325, with rewards of 0 and 1, where 97% of the groups are equal
    "one answer, which is seldom right": ([5], trl(
        reward=rising(0.294, 0.001), entropy=until(9, 0.26, 0.002), equal=until(9, 0.4, 0.97))),
    "one answer, which earns 3": ([5], trl(
        reward=rising(2.9, 0.01), entropy=until(9, 0.26, 0.002), equal=until(9, 0.4, 0.97))),
    "most groups are dead, and so is most of the spread": ([3], trl(
        reward=lambda step: 0.1 + 0.02 * (step > 2), reward_std=0.02, equal=0.93)),
    "one answer after two steps": ([], trl(
        reward=until(3, 0.3, 0.9), entropy=until(7, 0.4, 0.1), equal=until(3, 0.2, 1.0),
        reward_std=until(3, 0.4, 0.03))),
    "a small gain beside a lost entropy": ([5], trl(
        reward=rising(0.08, 0.002), reward_std=0.27, equal=rising(0.3, 0.67 / 30),
        entropy=lambda step: 0.5 * 0.01 ** (step / 30))),
    "destroyed at once": ([6], lost(groups_without_spread=(0.1, 1.0), gradient_norm=(0.2, 0.0),
                                    entropy=(0.35, 1.6), finished=(1.0, 0.1))),
    "destroyed late": ([6], ours(gradient_norm=until(19, 0.3, 80.0), entropy=until(19, 0.4, 5.0),
                                 success=until(19, 0.4, 0.1), reward=until(19, 0.4, 0.1))),
    "kl beside no loss": ([], ours(kl=until(4, 0.0, 1.1))),
    "one gradient jumps": ([], ours(gradient_norm=until(29, 0.2, 900.0)) [:29] + ours()[29:]),
    "not finite": ([6], ours(loss=until(10, 0.2, NAN))),
    "cut off": ([7], ours(finished=0.25)),
    "cut off, in verl": ([7], log(**{"critic/rewards/mean": 0.1, "response_length/clip_ratio": 0.8,
                                     "actor/grad_norm": 1.0})),
    "by heart": ([8], held_out(0.3, 0.31)),
    "learned": ([], held_out(0.3, 0.8)), "learned at once": ([], held_out(0.3, 0.79, 0.8)),
    "of one evaluation nothing is known": ([], held_out(0.3)),
    "longer and longer": ([9], ours(length=rising(200, 27), success=0.3, reward=0.3)),
    "longer and better": ([], ours(length=rising(200, 27))),
    "a gain of less than a quarter of a spread": ([], trl(reward=rising(0.3, 0.001), success=0.3,
                                                          reward_std=0.2)),
    "two tokens at last": ([9], ours(length=rising(200, -6.6), success=0.3, reward=0.3)),
    "length and reward rise together": ([9], trl(
        reward=lambda step: 0.3 + 0.01 * step + 0.02 * (step % 2),
        length=lambda step: 300 + 2 * step + 20 * (step % 2 == 1))),
    "both rise, not together": ([], trl(
        reward=lambda step: 0.3 + 0.01 * step + 0.02 * (step % 2),
        length=lambda step: 300 + 2 * step + 20 * (step % 3 == 1))),
    "paid for being wrong": ([9], ours(
        reward=rising(-0.3, 0.008), gradient_norm=rising(0.1, 0.01),
        success=lambda step: max(0.0, 0.2 - 0.007 * step))),
    "paid for something else": ([9], ours(reward=rising(0.3, 0.02), success=rising(0.4, -0.01))),
    "gains that noise hides": ([], ours(
        success=lambda step: 0.3 + 0.2 * (step % 2) + 0.004 * step)),
    "the form is learned already": ([], trl(
        reward=rising(0.1, 0.02), part_first=rising(0, 0.02),
        part_second=lambda step: 0.97 + 0.01 * (step % 2))),
    "one part is never paid": ([], trl(reward=rising(0.1, 0.02), part_first=rising(0, 0.02),
                                       part_overlong=0.0)),
    "the form by Unsloth's names": ([9], trl(
        reward=rising(2.4, 0.1), part_match_format_exactly=rising(0.9, 0.06),
        part_match_format_approximately=rising(1.1, 0.04), part_check_numbers=0.2,
        part_check_answer=lambda step: 1.4 + 0.3 * (step % 2))),
    "right beside the form": ([], trl(
        reward=rising(0.4, 0.06), part_match_format_exactly=rising(0.2, 0.02),
        part_check_answer=rising(0.2, 0.04))),
    "the form rises alone": ([9], trl(reward=rising(0.1, 0.02), part_right=0.5,
                                      part_format=rising(0, 0.02))),
    "nothing is right": ([3], trl(reward=rising(0.1, 0.02), part_accuracy=0.0,
                                  part_form=rising(0, 0.02))),
    "the reward falls": ([10], ours(reward=rising(0.46, -0.0133), success=rising(0.46, -0.0133))),
    "it falls, and is clipped": ([12], ours(reward=rising(1, -0.03), success=rising(1, -0.03),
                                            **CLIPPED)),
    # half is lost, or a third that harder problems may explain, or held out as well
    "half is lost": ([10], trl(reward=rising(1, -0.019))),
    "half is lost, but not by four errors": ([], trl(
        reward=lambda step: 0.1 - 0.003 * step + 0.1 * (step % 2))),
    "a third is lost": ([], trl(reward=rising(1, -0.014))),
    "half is lost, not held out": ([], held_out(0.5, 0.5, reward=rising(1, -0.019))),
    "half is lost, and held out": ([10], held_out(0.5, 0.3, reward=rising(1, -0.019))),
    "a twentieth of what is below 0": ([], ours(success=0.2, reward=rising(-10, -0.02))),
    "one lucky step": ([], ours(success=0.2, reward=lambda step: 1.5 if step == 3 else 0.3)),
    # the KL to the policy that sampled tells a policy that moved from narrow bounds, as of GSPO
    "it moved too far, and gains": ([12], ours(clipped_share=0.2, ppo_kl=0.1)),
    "narrow bounds": ([], ours(clipped_share=0.42, ppo_kl=1e-4)),
    "a few of its ratios are clipped": ([], ours(clipped_share=0.1, ppo_kl=0.1)),
    "old": ([11], ours(ratio_mean=1.0, clipped_share=0.0)),
    "a ratio of 1 that is clipped": ([], ours(ratio_mean=1.0, clipped_share=0.1)),
    "unclipped": ([13], ours(gradient_norm_last=3.0)),
    "no number": ([0], ours(reward=lambda step: NAN if step == 9 else 0.3)),
    "no gradient": ([0], ours(gradient_norm=0.0)),
    "no rate": ([0], ours(learning_rate=0.0)),
    "a number too large for a float": ([], ours(length=10 ** 400)),
    "float16 tries another scale": ([], ours(gradient_norm=until(8, until(7, 0.2, math.inf), 0.2))),
    "a third of the turns is lost": ([], ours(**FLAT, turns=rising(6, -0.05))),
    "blind": ([17], ours(entropy=until(8, 0.5, 0.03), groups_without_spread=until(8, 0.2, 0.9),
                         success=until(8, rising(0.15, 0.001), lambda step: 0.3 * (step % 3)),
                         reward=until(8, rising(0.15, 0.001), lambda step: 0.3 * (step % 3)))),
    # four problems a step, as with a real model that writes a + b whatever the target is
    "blind, with few problems": ([17], ours(
        entropy=until(8, 0.5, 0.03), groups_without_spread=until(8, 0.3, 0.85),
        success=lambda step: (0.16, 0.06, 0.34, 0.47, 0.69, 0.03, 0.5, 0.56)[step % 8],
        reward=lambda step: (0.16, 0.06, 0.34, 0.47, 0.69, 0.03, 0.5, 0.56)[step % 8])),
    "sure, but no answer for all": ([], ours(
        entropy=until(8, 0.5, 0.03), groups_without_spread=until(8, 0.3, 0.65),
        success=lambda step: (0.16, 0.06, 0.34, 0.47, 0.69, 0.03, 0.5, 0.56)[step % 8],
        reward=lambda step: (0.16, 0.06, 0.34, 0.47, 0.69, 0.03, 0.5, 0.56)[step % 8])),
    "alike, and still unsure": ([], ours(
        entropy=0.5, groups_without_spread=until(8, 0.2, 0.9),
        success=until(8, rising(0.15, 0.001), lambda step: 0.3 * (step % 3)),
        reward=until(8, rising(0.15, 0.001), lambda step: 0.3 * (step % 3)))),
    # OpenRLHF's names of today, verl's, and those of TRL, also up to 0.16
    "truncated, in OpenRLHF": ([7], log(reward=rising(0.1, 0.02), **{
        "rollout/truncated_rate": 0.72})),
    "another model, in verl": ([1], log(reward=rising(0.1, 0.02), **{"rollout_corr/kl": 0.09})),
    "turns, in verl": ([18], log(reward=lambda step: 0.1 * (step % 2), **{
        "num_turns/mean": until(15, 6.0, 1.2)})),
    "turns, in TRL": ([18], log(reward=lambda step: 0.1 * (step % 2), **{
        "tools/call_frequency": until(15, 6.0, 0.1)})),
    "parts, in TRL 0.16": ([9], log(reward=rising(0.1, 0.02), **{
        "rewards/right": 0.5, "rewards/format": rising(0, 0.02)})),
    "held out, of one part": ([8], [
        line | ({"eval/rewards/correct/mean": 0.2} if line["step"] % 10 == 0 else {})
        for line in log(step=lambda step: step, reward=rising(0.1, 0.02),
                        **{"rewards/correct/mean": rising(0.1, 0.02)})]),
    "held out, in OpenRLHF": ([8], [
        line | ({"eval/eval_math_pass1": 0.2} if line["step"] % 10 == 0 else {})
        for line in log(step=lambda step: step, reward=rising(0.1, 0.02))]),
}
SECOND = {"gradient_norm": (0.2, 0.41), "entropy": (0.35, 0.53), "kl": (0.0, 1.1),
          "finished": (0.6, 0.4), "groups_without_spread": (0.2, 1.0), "length": (46.0, 9.0)}
LOGS |= {f"destroyed, by {name}": ([6], lost(**{name: ends})) for name, ends in SECOND.items()}
LOGS |= {name: ([row], ours(**FLAT, **metrics)) for name, (row, metrics) in GAINS.items()}
LOGS |= {f"{name}, and it gains": ([], ours(**metrics)) for name, (_, metrics) in GAINS.items()}
LOGS |= {"lost, the gradient did not double": ([], lost(gradient_norm=(0.2, 0.39)))}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def rows_of(path):
    return [fault.check.row for fault in faults_of(read_log(path))]


def said_of(path):
    log = read_log(path)
    return " ".join(filled(in_words(log, faults_of(log))).split())


@pytest.mark.parametrize("name", LOGS)
def test_the_faults_of_a_log(name, path):
    rows, lines = LOGS[name]
    write_lines(path, lines)
    assert rows_of(path) == rows


def test_what_is_said(path):
    """The evidence goes from the first fifth to the last, of 20 steps four; a short run is not
    judged."""
    metric = Metric(np.arange(20.0))
    assert (metric.first, metric.start, metric.end) == (0.5, 1.5, 17.5)
    for lines, words in (
            (trl(reward=0.3, equal=0.2, length=rising(0, 1))[:20], "length went from 2.5 to 18.5"),
            (LOGS["not finite"][1], "Seen: loss is not finite in 21 of 30 steps."),
            (ours(), "15 of 21 signs of a mistake could be looked for, and none is seen. The rew"),
            (ours()[:5], "The reward rises"), (ours()[:4], "nothing can be said"),
            (LOGS["a third is lost"][1], "If the problems have not become harder"),
            (trl(reward=lambda step: 0.3 + 0.2 * (step % 2) + 0.001 * step),
             "does not rise by more than its noise, from 0.4")):
        write_lines(path, lines)
        assert words in said_of(path)


NAMES = {  # a name of the reward, of the length and of the gradient norm as others write them
    "W&B": ("train/reward", "train/completions/mean_length", "train/grad_norm"),
    "OpenRLHF": ("train/reward", "train/response_length", "train/actor_grad_norm"),
    "slime": ("rollout/raw_reward", "rollout/response_len/mean", "train/grad_norm"),
    "prime-rl": ("train/agg/all/agent/reward/mean", "train/agg/all/agent/num_output_tokens/mean",
                 "optim/grad_norm"),
    "verl": ("critic/score/mean", "response_length/mean", "actor/grad_norm")}


@pytest.mark.parametrize("trainer", NAMES)
def test_the_names_of_other_trainers(trainer, path):
    """slime and prime-rl write the metrics of one step in several lines."""
    write_lines(path, [{name: 0.1 * place + 0.01 * step} for step in STEPS
                       for place, name in enumerate(NAMES[trainer], 1)])
    log = read_log(path)
    assert log.steps == 30
    ends = [log[name].values[-1] for name in ("reward", "length", "gradient_norm")]
    assert ends == pytest.approx([0.4, 0.5, 0.6])


def test_where_a_log_may_stand(tmp_path):
    """In a checkpoint of TRL, in what verl prints, in a table of W&B, beside the evaluations of a
    run; the end of a line may be within a text."""
    state = tmp_path / "trl/checkpoint-30/trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"log_history": trl(reward=0.1, equal=0.9, entropy=0.4)}))
    assert rows_of(tmp_path / "trl") == [3]
    printed = [f"(TaskRunner pid=7) step:{step} - actor/entropy:0.4 - critic/score/mean:"
               f"np.float64({0.3 + 0.01 * step}) - val-core/math/acc/mean@4:{0.5 - 0.01 * step}"
               for step in STEPS]
    (tmp_path / "console.txt").write_text("loading\n" + "\n".join(printed))
    log = read_log(tmp_path / "console.txt")
    assert log["reward"].values[-1] == pytest.approx(0.6) and log["entropy"].always(0.4)
    assert rows_of(tmp_path / "console.txt") == [8]  # the reward rises, and held out it falls
    rows = [f'{step},{0.3 + 0.01 * step},"{0.2}"' for step in STEPS]
    (tmp_path / "log.csv").write_text("\n".join(
        ["Step,my run - train/reward,my run - train/grad_norm", *rows]))
    log = read_log(tmp_path / "log.csv")
    assert log["reward"].values[0] == pytest.approx(0.31) and log["gradient_norm"].always(0.2)
    write_lines(tmp_path / "metrics.jsonl", ours())
    (tmp_path / "metrics.jsonl").write_text(
        (tmp_path / "metrics.jsonl").read_text().replace("{", '{"note": "a\u2028b", '), "utf-8")
    write_lines(tmp_path / "evaluations.jsonl", [{"step": 0, "mode": "sampled"}] * 2)
    (tmp_path / "config.json").write_text('{"mitigation": "none"}')
    assert "could be looked for, and none is seen" in said_of(tmp_path)
    write_lines(tmp_path / "evaluations.jsonl", [
        {"step": step, "mode": mode, "success": success}
        for step in (0, 30) for mode, success in (("sampled", 0.2), ("greedy", 0.3 + step / 60))])
    assert rows_of(tmp_path) == [8]  # sampled, nothing is learned of held-out problems


LINES = ours(reward=rising(0.3, 0.02))
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
    "bars.txt": "\n".join(
        f"step {one['step']:04d}/0030 | loss +0.0129 | reward {one['reward']:.4f} | grad_norm 0.2"
        for one in LINES),
    "colours.txt": "\n".join(
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m \x1b[1;32mstep:{one['step']} - actor/grad_norm:0.2 - "
        f"critic/score/mean:{one['reward']}\x1b[0m" for one in LINES),
    "backwards.csv": "step,reward\n" + "\n".join(
        f"{one['step']},{one['reward']}" for one in reversed(LINES)),
    "semicolons.csv": "step;reward;text\n" + "\n".join(
        f"{one['step']};{str(one['reward']).replace('.', ',')};no, not 0,5" for one in LINES),
    "unsloth.txt": " [30/30 05:11, Epoch 0/1]\nStep\tLoss\treward\tcompletions / mean_length\n"
    + "\n".join(f"{one['step']}\t0.1\t{one['reward']}\t46" for one in LINES),
    "blanks.txt": "Step   Training Loss   reward\n" + "\n".join(
        f"{one['step']:4}   0.100000        {one['reward']:.6f}" for one in LINES),
    "broken dictionaries.txt": "\n".join(
        str(one).replace(", ", ",\n ") for one in LINES),
    "grpo_zero.txt": "\n".join(
        f"\rStep {one['step']}, mean_reward: {one['reward']}, train success_rate: "
        f"{one['success']}, grad_norm: 0.20, duration: 9.10, num_finished_episodes: 64, "
        "mean_response_len: 46.00, entropy: 0.35"
        for one in LINES),
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


SICK = {  # the row of the list, and what people paste
    "unsloth, cut off": (7, "Step\treward\tcompletions / clipped_ratio\n" + "\n".join(
        f"{step}\t0.1\t0.9" for step in STEPS)),
    "unsloth, paid twice": (9, "Step\treward\trewards / form / mean\trewards / correct / mean\n"
                            + "\n".join(f"{step}\t{0.3 + step / 40}\t{0.1 + step / 40}\t0.2"
                                        for step in STEPS)),
    "unsloth, never right": (3, "Step\treward\trewards / correct / mean\n" + "\n".join(
        f"{step}\t0.1\t0.0" for step in STEPS)),
    "GRPO-Zero, by heart": (8, "\n".join(
        f"\rStep {step}, mean_reward: {0.4 + step / 40}, train success_rate: {0.2 + step / 40}\n"
        "\rEval success rate: 0.20       " for step in STEPS))}


def verl(of, norms="0.213", rate="0.000", more=""):
    """What verl prints, by default as older versions did: each number has three decimals."""
    return "\n".join(f"step:{step} - actor/lr:{rate} - actor/grad_norm:{norms} - "
                     f"critic/score/mean:{of(step):.3f} - timing_s/gen:31.250{more}"
                     for step in STEPS)


UP, DOWN = rising(0.4, 0.01), rising(0.46, -0.012)
OF_ZEROS = {  # what people paste, the rows that are seen, and what is not judged
    "older verl": (verl(UP), [], "learning_rate"),
    "older verl, it falls": (verl(DOWN), [10], "learning_rate"),
    "older verl, small gradients": (verl(UP, norms="0.000"), [], "learning_rate, gradient_norm"),
    "verl, no rate": (verl(UP, rate="0.0", more=" - actor/kl_loss:1e-05"), [0], ""),
    "six decimals, a small rate": ("Step\treward\tlearning_rate\n" + "\n".join(
        f"{step}\t{UP(step):.6f}\t0.000000" for step in STEPS), [], "learning_rate"),
    "six decimals, no gradient": ("Step\treward\tgrad_norm\n" + "\n".join(
        f"{step}\t{UP(step):.6f}\t0.000000" for step in STEPS), [0], ""),
    "OpenRLHF": ("\n".join(f"Global step {step}: {{'reward': {UP(step) / 3!r}, 'actor_lr': 0.0}}"
                           for step in STEPS), [0], ""),
    "TRL's texts": ("\n".join(str({"reward": f"{UP(step) / 3:.4g}", "learning_rate": "0"})
                              for step in STEPS), [0], ""),
    "rounded JSON": ("\n".join(json.dumps({"reward": round(UP(step), 3),
                                           "learning_rate": 0.0}) for step in STEPS),
                     [], "learning_rate"),
    "CSV of W&B": ("Step,a - train/reward,a - train/learning_rate\n" + "\n".join(
        f"{step},{UP(step) / 3!r},0" for step in STEPS), [0], ""),
    "ratios of three decimals": ("\n".join(
        f"step: {step} | reward {UP(step):.3f} | ratio_mean 1.000 | clipped_share 0.000"
        for step in STEPS), [], "ratio")}


@pytest.mark.parametrize("name", OF_ZEROS)
def test_a_number_that_is_rounded_to_0_says_nothing(name, tmp_path):
    text, rows, rounded = OF_ZEROS[name]
    (tmp_path / "log.txt").write_text(text)
    assert rows_of(tmp_path / "log.txt") == rows
    said = said_of(tmp_path / "log.txt")
    assert (f"Not judged: {rounded}, printed with so few digits" in said) == bool(rounded)


def test_a_growth_from_what_is_rounded_to_0(tmp_path):
    """From 0.000, which is 0.0005 at most, 0.003 may be no growth; from 0.0003 it is one."""
    for small, large, rows in (("0.000", "0.003", []), ("0.000", "0.006", [6]),
                               ("0.0003", "0.0030", [6])):
        lines = [f"step:{step} - actor/grad_norm:{small if step < 20 else large} - "
                 f"critic/score/mean:0.40{step % 3}" for step in STEPS]
        (tmp_path / "verl.log").write_text("\n".join(lines))
        assert rows_of(tmp_path / "verl.log") == rows


@pytest.mark.parametrize("name", SICK)
def test_what_is_wrong_is_seen_in_what_people_paste(name, tmp_path):
    row, text = SICK[name]
    (tmp_path / "log.txt").write_text(text)
    assert rows_of(tmp_path / "log.txt") == [row]


def test_held_out_reward_is_compared_with_reward_and_success_with_success(path):
    """Of two parts of a reward, correctness is learned by heart, and the form is right from the
    start. The sum on held-out problems, 1.27, lies above correctness."""
    learned = rising(0.35, 0.02)
    lines = trl(reward=lambda step: 1 + learned(step), part_correctness=learned, part_form=1.0)
    evaluations = [{"eval_reward": 1.33}, {"eval_reward": 1.27}]
    write_lines(path, [evaluations[0], *lines, evaluations[1]])
    log = read_log(path)
    assert log.paid == "success" and rows_of(path) == [8]
    assert "held_out went from 1.33 to 1.27. The run that" in said_of(path)
    write_lines(path, [evaluations[0], *lines, {"eval_reward": 1.8}])
    assert rows_of(path) == []


def test_a_column_can_be_named_and_what_is_not_read_is_listed(tmp_path, capsys):
    file = tmp_path / "log.csv"
    file.write_text("step,my_score,mine (x),other\n" + "\n".join(
        f"{one['step']},{one['reward']},46,{one['step']}" for one in LINES))
    assert "the one that --column reward=NAME says" in refusal(diagnose.main, [str(file)])
    assert diagnose.main([str(file), "--column", "reward=my_score,length=mine (x)"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "5 of 21 signs of a mistake could be looked for" in said
    assert "Looked at: reward, length." in said and said.endswith("Not read: other.")
    for typed, words in (("reward=none", "has no numbers under none, only under step, my_score"),
                         ("rewards=my_score", "NAME is one of reward, success"),
                         ("reward", "should be NAME=COLUMN")):
        assert words in refusal(diagnose.main, [str(file), "--column", typed])


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "np.float64(nan)", "Infinity"])
def test_what_is_no_number_is_seen_however_it_is_printed(tmp_path, text):
    """By verl's console, in CSV, and as a text in JSON. A cell that is empty says nothing."""
    norms, plain = ["0.5", text], text.removeprefix("np.float64(").removesuffix(")")
    (tmp_path / "verl.log").write_text("\n".join(
        f"step:{step} - actor/grad_norm:{norms[step % 2]} - critic/rewards/mean:0.5"
        for step in STEPS))
    rows = ["step,reward,grad_norm", *(f"{n},0.5,{['0.5', plain][n % 2]}" for n in STEPS)]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    write_lines(tmp_path / "log.jsonl", trl(reward=0.5, grad_norm=lambda n: [0.5, plain][n % 2]))
    (tmp_path / "trl.txt").write_text("\n".join(  # as Python prints it
        str({"reward": 0.5, "grad_norm": float(plain), "loss": -math.inf}) for _ in STEPS))
    for name in ("verl.log", "log.csv", "log.jsonl", "trl.txt"):
        assert rows_of(tmp_path / name)[0] == 6, name
    (tmp_path / "log.csv").write_text("\n".join(row.replace(plain, "") for row in rows))
    assert 6 not in rows_of(tmp_path / "log.csv")


@pytest.mark.parametrize("name, text, words", [
    ("log.txt", "", "no line with a reward"), ("log.txt", "[" * 100_000, "no line with a reward"),
    ("log.csv", "step,my_reward\n1,0.5\n", "this file has step, my_reward"),
    ("log.csv", "Step,good - train/reward,dead - train/reward\n1,0.5,0\n",
     "several runs: dead, good"),
    ("trainer_state.json", '{"log_history": [{"reward": 0.5}, {"rew', "perhaps it was cut"),
    ("metrics.jsonl", "", "it has no config.json of a run"), ("config.json", "{", "is not JSON")])
def test_what_cannot_be_read_ends_in_a_sentence(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    if name == "config.json":
        (tmp_path / "metrics.jsonl").write_text("")
    is_file = name.startswith("log.")
    assert words in refusal(said_of, tmp_path / name if is_file else tmp_path)


def test_the_command_has_a_status(tmp_path, path, capsys):
    os.mkfifo(tmp_path / "pipe")  # it would never end
    for name, words in (("none", "no run or log"), ("pipe", "pipe")):
        assert words in refusal(diagnose.main, [str(tmp_path / name)])
    for lines, status in ((ours()[:3], 2), (ours(), 0), (LOGS["cut off"][1], 1)):
        write_lines(path, lines)
        assert diagnose.main([str(path)]) == status
    printed = " ".join(capsys.readouterr().out.split())
    assert "7 of docs/reference/how_a_run_fails.md). Seen: " in printed
    assert "Seen: finished is 0.25 in every step" in printed
