"""Which fault a run shows, by the metrics of its steps: ours, or the log of another trainer.

Each line of CHECKS below looks for one fault, at the end of a log as at its start: its row in the
table of docs/how_a_run_fails.md, what it most often is, what was seen, and the run that would
decide. A log says less than a run of this project: what it does not have is not looked for, and the
answer names it.
"""
import json
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import UserError, read_text
from harness.record import read_lines, run_config

LARGEST_FILE = 200e6  # bytes of a log
# Our name of a metric, and those of TRL (unsloth and ms-swift write the same) and of verl.
NAMES = {
    "step": ("step", "training/global_step", "global_step"),
    "reward": ("reward", "critic/rewards/mean", "critic/score/mean"),
    "success": ("success",),
    "no_spread": ("groups_without_spread", "frac_reward_zero_std"),
    "spread": ("reward_std",),
    "entropy": ("entropy", "entropy/mean", "actor/entropy", "actor/entropy_loss"),
    "length": ("length", "completions/mean_length", "completion_length", "response_length/mean"),
    "finished": ("finished",),
    "cut_off": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "gradient_norm": ("gradient_norm", "grad_norm", "actor/grad_norm"),
    "gradient_norm_last": ("gradient_norm_last",),
    "loss": ("loss", "actor/pg_loss"),
    "kl": ("kl", "actor/kl_loss", "objective/kl"),
    "gap": ("sampler_gap", "sampling/sampling_logp_difference/mean",
            "training/rollout_probs_diff_mean"),
    "ratio": ("ratio_mean",),
    "clipped": ("clipped_share", "clip_ratio/region_mean", "actor/pg_clipfrac"),
    "learning_rate": ("learning_rate", "actor/lr"),
    "held_out": ("eval_reward",)}
PART = "rewards/"  # of a reward function of TRL: rewards/NAME/mean
BEING_RIGHT = re.compile("acc|correct|right|solve|exact|answer|math")  # in a part's name
FEWEST = 5  # steps from which on something can be said
LARGER = {"gradient_norm": 1.5, "entropy": 1.5, "kl": 15.0}  # times, beside a reward that fell
MUCH_LARGER = {"gradient_norm": 8.0, "entropy": 3.0, "kl": 10.0}  # by itself
LENGTH_ALONE = 0.9  # a correlation: runs with a reward for length had 0.92 to 0.99, others 0.81


class Log:
    """The metrics of a run, step by step: log["entropy"] has a number for each step that says it.
    """

    def __init__(self, lines: list[dict[str, Any]], held_out: list[float], config: dict[str, Any]):
        logged, lines = len(lines), without_steps_made_again(lines)
        self.held_out, self.config = held_out, config
        self.steps, self.made_again = len(lines), logged - len(lines)
        every = {name: column_of(lines, aliases) for name, aliases in NAMES.items()}
        parts = sorted({key for line in lines for key in line
                        if key.startswith(PART) and key.endswith("/mean")})
        self.broken = {name: int((~np.isfinite(column)).sum()) for name, column in every.items()
                       if not np.isfinite(column).all()}
        self.columns = {name: column[np.isfinite(column)] for name, column in every.items()}
        if not len(self.columns["finished"]):
            self.columns["finished"] = 1 - self.columns["cut_off"]
        self.parts = {key.removeprefix(PART).removesuffix("/mean"): column_of(lines, (key,))
                      for key in parts}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def has(self, *names: str) -> bool:
        return all(len(self.columns[name]) >= FEWEST for name in names)

    def start(self, name: str) -> float:
        """The mean of the first fifth of the steps; 0 where there is none."""
        return float(np.mean(self[name][:fifth(self[name])])) if self.has(name) else 0.0

    def end(self, name: str) -> float:
        """The mean of the last fifth of the steps; 0 where there is none."""
        return float(np.mean(self[name][-fifth(self[name]):])) if self.has(name) else 0.0

    def way(self, name: str) -> str:
        return f"{name} went from {self.start(name):.3g} to {self.end(name):.3g}"


def fifth(values: np.ndarray) -> int:
    return max(1, len(values) // 5)


def column_of(lines: list[dict[str, Any]], aliases: tuple[str, ...]) -> np.ndarray:
    """The numbers under the first of these names that the lines have."""
    for name in aliases:
        values = [line[name] for line in lines if is_number(line.get(name))]
        if values:
            return np.array(values, float)
    return np.array([])


def is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int and abs(value) < 1e300


def without_steps_made_again(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines in the order of their steps. Where the steps go back, a trainer was resumed, or a
    second run writes into the same file: of the steps from there on the later lines count."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and is_made_again(kept[-1], line):
            kept.pop()
        kept.append(line)
    return kept


def is_made_again(before: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether an earlier line is of the same step as this one, or of a later one. Where a line
    does not say its step, its epoch tells it; that is rounded, so neighbours may have the same."""
    steps = [column_of([one], NAMES["step"]) for one in (before, line)]
    if all(step.size for step in steps):
        return bool(steps[0][0] >= steps[1][0])
    epochs = [column_of([one], ("epoch",)) for one in (before, line)]
    return all(epoch.size for epoch in epochs) and bool(epochs[0][0] > epochs[1][0])


def rose(values: np.ndarray) -> bool:
    """Whether the last third of the values lies above the first by more than twice its error."""
    third = max(2, len(values) // 3)
    early, late = values[:third], values[-third:]
    error = math.sqrt(float(early.var(ddof=1) + late.var(ddof=1)) / third)
    return float(late.mean() - early.mean()) > max(2 * error, 1e-9)


# ------------------------------------------------------------------ the checks
# Each returns what was seen, or "".
def reward_is_no_number(log: Log) -> str:
    count = log.broken.get("reward", 0)
    return f"the mean reward is not finite in {count} of {log.steps} steps" if count else ""


def loss_is_no_number(log: Log) -> str:
    found = [f"{name} in {log.broken[name]} of {log.steps} steps"
             for name in ("loss", "gradient_norm", "kl") if name in log.broken]
    return f"not finite are {', '.join(found)}" if found else ""


def trains_nothing(log: Log) -> str:
    if log.has("learning_rate") and (log["learning_rate"] == 0).all():
        return f"the learning rate is 0 in all {len(log['learning_rate'])} steps"
    if not log.has("gradient_norm") or (log["gradient_norm"] != 0).any():
        return ""
    differs = log.start("no_spread") < 1 if log.has("no_spread") else not is_constant(log)
    return ("the norm of the gradient is exactly 0 in all steps, although groups had different "
            "rewards") if differs else ""


def is_constant(log: Log) -> bool:
    """Whether the mean reward is the same in every step."""
    return log.has("reward") and bool((log["reward"] == log["reward"][0]).all())


def other_sampler(log: Log) -> str:
    if log.start("gap") > 0.01:
        return (f"on average they differ by {log.start('gap'):.3g} in the first steps, and "
                "rounding is at most 0.002")
    return ""


def one_answer(log: Log) -> str:
    if not log.has("entropy"):
        return ""
    paid = "success" if log.has("success") else "reward"
    improved = log.has("reward") and rose(log[paid])
    solved = log.end("success") > 0.75 if log.has("success") else improved
    start, end = log.start("entropy"), log.end("entropy")
    is_low = end < min(0.02, start / 5)
    collapsed = is_low or end < start / 3 and not improved
    dead = log.end("no_spread") > 0.75
    if log.has("spread"):
        dead = dead or log.end("spread") < 0.05 * max(log.start("spread"), 1e-9)
    elif not log.has("no_spread"):
        dead = is_low and not improved  # the entropy alone has to show it
    ends = not log.has("finished") or log.end("finished") > 0.5
    if collapsed and dead and ends and not solved:
        return log.way("entropy") + ", and most groups have equal rewards at the end"
    return ""


def destroyed(log: Log) -> str:
    """What the first two steps had, the end has not, and a second sign excludes that the problems
    became harder."""
    name = "success" if log.has("success") else "reward"
    if not log.has(name):
        return ""
    first, last, signs = float(log[name][:2].mean()), log.end(name), signs_of_drift(log, LARGER)
    if log.end("no_spread") > 0.95 and log.has("no_spread") and log["no_spread"][:2].mean() < 0.8:
        signs.append("no group has different rewards any more")
    if first > 0 and last < first / 4 and signs:
        return f"{name} went from {first:.3g} to {last:.3g}, and {' and '.join(signs)}"
    return ""


def drifted(log: Log) -> str:
    """Signs of a model that goes astray, whatever the reward does."""
    return " and ".join(signs_of_drift(log, MUCH_LARGER))


def signs_of_drift(log: Log, limits: dict[str, float]) -> list[str]:
    """What has become so many times as large as in the first two steps, and answers that no longer
    end. A KL begins at 0, so it is compared with 0.1."""
    found = []
    for name, times in limits.items():
        if log.has(name):
            before = float(log[name][:2].mean())
            if log.end(name) > times * max(before, 0.1 if name == "kl" else 1e-12):
                found.append(f"{name} went from {before:.3g} to {log.end(name):.3g}")
    if log.has("finished") and log.end("finished") < 0.5 < float(log["finished"][0]):
        found.append(f"the share of answers that end went from {log['finished'][0]:.0%} to "
                     f"{log.end('finished'):.0%}")
    return found


def falls(log: Log) -> str:
    """Half a spread, or a third of the reward, is lost from the first fifth to the last."""
    for name in ("success", "reward"):
        if not log.has(name) or not rose(-log[name]):
            continue
        start, lost = log.start(name), log.start(name) - log.end(name)
        if lost > abs(start) / 3 or log.has("spread") and lost > log.start("spread") / 2:
            return log.way(name)
    return ""


def cut_off(log: Log) -> str:
    if log.has("finished") and log.start("finished") < 0.5:
        return (f"only {log.start('finished'):.0%} of the answers of the first steps ended before "
                "the limit")
    return ""


def never_right(log: Log) -> str:
    if log.has("success") and (log["success"] == 0).all():
        return f"no answer was right in {len(log['success'])} steps"
    for name, values in log.parts.items():
        if BEING_RIGHT.search(name.lower()) and len(values) >= FEWEST and not values.any():
            return "" if cut_off(log) else f"the part {name} of the reward is 0 in all steps"
    return ""


def too_easy(log: Log) -> str:
    if log.start("no_spread") > 0.7 and log.start("success") > 0.75:
        return f"{log.start('success'):.0%} of the answers of the first steps were right"
    return ""


def dead_groups(log: Log) -> str:
    if cut_off(log) or too_easy(log):
        return ""  # answers that were cut off have equal rewards
    if log.start("no_spread") > 0.7:
        return (f"in the first steps {log.start('no_spread'):.0%} of the groups had equal rewards, "
                "and such a group has no gradient")
    if not log.has("no_spread") and is_constant(log):
        return f"the mean reward is exactly {log['reward'][0]:.3g} in every step"
    return ""


def paid_for_something_else(log: Log) -> str:
    if not log.has("reward") or not rose(log["reward"]):
        return ""
    if log.has("success"):
        return "" if rose(log["success"]) else f"{log.way('reward')}, {log.way('success')}"
    long = {name: values for name, values in log.parts.items() if len(values) >= FEWEST}
    rising = [name for name, values in long.items() if rose(values)]
    flat = [name for name, values in long.items() if values.any() and not rose(values)
            and float(values[-fifth(values):].mean()) < 0.9]
    if rising and flat and not any(BEING_RIGHT.search(name.lower()) for name in rising):
        return f"of the parts of the reward {', '.join(rising)} rose, and {', '.join(flat)} did not"
    return ""


def paid_for_length(log: Log) -> str:
    """The changes from step to step: over a whole run both may rise without a connection. Or the
    length alone has become another one."""
    if not log.has("length"):
        return ""
    start, end = log.start("length"), log.end("length")
    if end > 3 * start or end < start / 5:
        return log.way("length")
    if not log.has("reward") or not len(log["reward"]) == len(log["length"]) >= 10:
        return ""
    changes = np.diff(log["reward"]), np.diff(log["length"])
    if not rose(log["reward"]) or min(change.std() for change in changes) < 1e-9:
        return ""
    together = float(np.corrcoef(*changes)[0, 1])
    if abs(together) > LENGTH_ALONE:
        return (f"the changes of reward and length from step to step have a correlation of "
                f"{together:+.2f}, and {log.way('length')}")
    return ""


def by_heart(log: Log) -> str:
    name = "success" if log.has("success") else "reward"
    if len(log.held_out) < 2 or not log.has(name) or log.config.get("dynamic_sampling", 1) > 1:
        return ""
    first, last = log.held_out[0], log.held_out[-1]
    if rose(log[name]) and last < first + 0.02 and log.end(name) > last + 0.15:
        return (f"in training {log.way(name)}, and on held-out problems from {first:.3g} to "
                f"{last:.3g}")
    return ""


def ratio_is_one(log: Log) -> str:
    if log.has("ratio", "clipped") and (log["ratio"] == 1).all() and (log["clipped"] == 0).all():
        return "the ratio is exactly 1 in every step, although batches are used several times"
    return ""


def last_pass_is_unclipped(log: Log) -> str:
    if log.has("gradient_norm_last", "gradient_norm") and (
            log.end("gradient_norm_last") > 5 * log.end("gradient_norm")):
        return (f"the norm of the gradient is {log.end('gradient_norm_last'):.3g} in the last pass "
                f"over a batch and {log.end('gradient_norm'):.3g} in the first")
    return ""


def moves_too_far(log: Log) -> str:
    if log.end("clipped") > 0.3:
        return f"{log.end('clipped'):.0%} of the tokens are clipped at the end"
    return ""


class Check(NamedTuple):
    row: int      # of the table in docs/how_a_run_fails.md; 0 if it has none
    what: str     # what it most often is
    seen: Callable[[Log], str]
    decide: str   # the run that would decide
    is_cause: bool = False  # the faults below would follow from it


TENTH = "the same run with a tenth of the learning rate"
CHECKS = (
    Check(0, "The reward function returns what is no number", reward_is_no_number,
          "the reward function alone, on the answers of such a step", True),
    Check(6, "The loss or a weight is not finite, and the model is destroyed", loss_is_no_number,
          TENTH, True),
    Check(0, "Nothing is trained: the rate is 0, or the loss is detached or multiplied by 0",
          trains_nothing, "python -m lab.formula on the loss: one backward pass shows it", True),
    Check(1, "Sampling and training compute different log-probs", other_sampler,
          "one step at temperature 1, with the sampler's weights compared to the trainer's"),
    Check(5, "The learning rate is too high, and the model writes one answer for all", one_answer,
          "the same run with a fifth of the learning rate; and read answers to different problems",
          True),
    Check(6, "The learning rate is far too high, and the model is destroyed", destroyed, TENTH,
          True),
    Check(7, "The limit of new tokens is too small, or the model does not know how to end, as one "
             "whose prompts lack its chat template: trainers apply it to lists of messages alone",
          cut_off, "one step with twice the limit; and print one prompt as the model gets it"),
    Check(3, "The problems are too hard, so at most the form is learned", never_right,
          "easier problems, or the same run after a cold start (python -m tools.warmup)", True),
    Check(4, "The problems are too easy, and nothing is left to learn", too_easy,
          "the same run with harder problems"),
    Check(3, "The problems are too hard or too easy, or the groups too small", dead_groups,
          "python -m tools.preflight: it says which size of group would have different rewards"),
    Check(10, "The sign of the loss is wrong, or advantages belong to other answers", falls,
          "python -m lab.formula on the loss, and one step of SGD with lab/trl/dummy.py", True),
    Check(6, "The model goes astray: the rate is too high, or nothing holds it", drifted, TENTH,
          True),
    Check(9, "The reward pays for something else than you may want", paid_for_something_else,
          "the same run with the reward of being right alone"),
    Check(9, "The reward may pay for the length of an answer", paid_for_length,
          "read ten answers of the last steps; and ask python -m tools.preflight what an answer "
          "that ignores the problem earns"),
    Check(8, "There are few different problems, and the model learns them by heart", by_heart,
          "the same run with more different problems"),
    Check(11, "The old log-probs are computed anew in each pass", ratio_is_one,
          "print the ratio of the second pass over one batch"),
    Check(13, "The updates after the first have no clipped ratio", last_pass_is_unclipped,
          "the same run with one update for each batch"),
    Check(12, "The passes over a batch move the model too far", moves_too_far,
          "the first step with a tenth of the learning rate"))


@dataclass(frozen=True)
class Fault:
    check: Check
    evidence: str

    @property
    def row(self) -> int:
        return self.check.row


def faults_of(log: Log) -> list[Fault]:
    """The faults of a run. What follows from one that is a cause is left out."""
    found = []
    for check in CHECKS:
        evidence = check.seen(log)
        if evidence:
            found.append(Fault(check, evidence))
            if check.is_cause:
                break
    return found


def diagnose(path: Path) -> str:
    """The faults that a run or a log shows, in sentences."""
    log = read_log(path)
    head = f"{path}: {log.steps} steps."
    if log.made_again:
        head += (f" {log.made_again} more lines are of steps that were logged again later, as "
                 "after a resume, so they are left out.")
    if log.steps < FEWEST:
        return f"{head} With fewer than {FEWEST} nothing can be said."
    looked = [name for name in NAMES if log.has(name) and name not in ("step", "cut_off")]
    absent = [name for name in ("reward", "no_spread", "entropy", "length", "finished",
                                "gradient_norm", "loss", "kl") if name not in looked]
    parts = [head]
    for fault in faults_of(log):
        row = f"row {fault.row} of docs/how_a_run_fails.md" if fault.row else "no row has it"
        parts.append(f"{fault.check.what} ({row}). Seen: {fault.evidence}. The run that would "
                     f"decide: {fault.check.decide}.")
    if len(parts) == 1:
        way = "rises" if log.has("reward") and rose(log["reward"]) else "does not rise"
        parts.append(f"Nothing of {len(CHECKS)} rows. The reward {way}, from "
                     f"{log.start('reward'):.3g} to {log.end('reward'):.3g}.")
    parts.append(f"Looked at: {', '.join(looked)}."
                 + (f" Not in this log: {', '.join(absent)}." if absent else ""))
    return "\n\n".join(textwrap.fill(part, 100) for part in parts)


# ------------------------------------------------------------------ reading
def read_log(path: Path) -> Log:
    """The log of a run folder of this project, or of a file or folder of another trainer."""
    if not path.exists():
        raise UserError(f"there is no run or log {path}")
    if (path / "metrics.jsonl").is_file():
        config, evaluations = run_config(path), path / "evaluations.jsonl"
        held_out = [line["success"] for line in
                    (read_lines(evaluations) if evaluations.exists() else [])
                    if line.get("mode") == "sampled" and is_number(line.get("success"))]
        return Log(read_lines(path / "metrics.jsonl"), held_out, config)
    file = log_file_in(path) if path.is_dir() else path
    if file.stat().st_size > LARGEST_FILE:
        raise UserError(f"{file} has {file.stat().st_size / 1e6:.0f} MB: a log of metrics has less")
    found = lines_of_text(file)
    lines = [line for line in found if column_of([line], NAMES["reward"]).size]
    if not lines:
        raise UserError(f"{file} has no line with a reward: expected a run of this project, "
                        "trainer_state.json of TRL, or JSON lines with a reward in each")
    return Log(lines, column_of(found, NAMES["held_out"]).tolist(), {})


def log_file_in(folder: Path) -> Path:
    """trainer_state.json of the newest checkpoint, or a file of JSON lines."""
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    logs = sorted(folder.glob("*.jsonl"))
    if not states + logs:
        raise UserError(f"{folder} has neither metrics.jsonl nor trainer_state.json nor JSON lines")
    return (states or logs)[-1]


def lines_of_text(file: Path) -> list[dict[str, Any]]:
    """The metrics in a file: trainer_state.json, or JSON lines. verl's have them under "data"."""
    text = read_text(file)
    whole = parsed(text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        return [line for line in whole["log_history"] if isinstance(line, dict)]
    found = []
    for line in re.split("[\r\n]+", text):  # a text in JSON may have other ends of a line
        one = parsed(line)
        if isinstance(one, dict) and isinstance(one.get("data"), dict):
            one = one["data"]
        if isinstance(one, dict):
            found.append(one)
    return found


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
