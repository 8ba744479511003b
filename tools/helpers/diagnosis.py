"""Which fault a run shows, by the metrics of its steps: ours, or the log of another trainer.

Each row of CHECKS below looks for one fault, at the end of a log as at its start: its row in the
table of docs/how_a_run_fails.md, what it most often is, the metrics that show it, and the run that
would decide. What the evidence says is the same for all: each of these metrics, from the first
fifth of the steps to the last. A log says less than a run of this project: what it does not have is
not looked for, and the answer names it.
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
from harness.read_record import run_config
from harness.record import read_lines

LARGEST_FILE = 200e6  # bytes of a log
# Our name of a metric, and those of TRL (unsloth and ms-swift write the same) and of verl.
NAMES = {
    "reward": ("reward", "critic/rewards/mean", "critic/score/mean"),
    "success": ("success",),
    "equal_groups": ("groups_without_spread", "frac_reward_zero_std"),
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
PART = re.compile("rewards/(.+)/mean")  # of a reward function of TRL
BEING_RIGHT = re.compile("acc|correct|right|solve|exact|answer|math")  # in a part's name
FEWEST = 5  # steps from which on something can be said
LARGER = {"gradient_norm": 1.5, "entropy": 1.5, "kl": 15.0}  # times, beside a reward that fell
MUCH_LARGER = {"gradient_norm": 8.0, "entropy": 3.0, "kl": 10.0}  # by itself
LENGTH_ALONE = 0.9  # a correlation: runs with a reward for length had 0.92 to 0.99, others 0.81


class Log:
    """The metrics of a run, step by step: log["entropy"] has a number for each step that says it.
    What is asked of a metric that the log does not have is nan, and no comparison holds of that.
    """

    def __init__(self, lines: list[dict[str, Any]], held_out: list[float], config: dict[str, Any]):
        self.steps, self.config = len(lines), config
        every = {name: column_of(lines, aliases) for name, aliases in NAMES.items()}
        parts = {found[1]: key for line in lines for key in line if (found := PART.fullmatch(key))}
        self.parts = sorted(parts)
        every |= {name: column_of(lines, (key,)) for name, key in parts.items()}
        every["held_out"] = np.array(held_out, float)
        if not len(every["finished"]):
            every["finished"] = 1 - every["cut_off"]
        self.broken = {name: int((~np.isfinite(column)).sum()) for name, column in every.items()
                       if not np.isfinite(column).all()}
        self.columns = {name: column[np.isfinite(column)] for name, column in every.items()}
        self.paid = "success" if self.has("success") else "reward"

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def has(self, name: str) -> bool:
        return len(self[name]) >= (2 if name == "held_out" else FEWEST)

    def first(self, name: str) -> float:
        """The mean of the first two steps, before a run goes wrong at once."""
        return float(self[name][:2].mean()) if self.has(name) else math.nan

    def start(self, name: str) -> float:
        """The mean of the first fifth of the steps."""
        return float(self[name][:fifth(self[name])].mean()) if self.has(name) else math.nan

    def end(self, name: str) -> float:
        """The mean of the last fifth of the steps."""
        return float(self[name][-fifth(self[name]):].mean()) if self.has(name) else math.nan

    def always(self, name: str, value: float | None = None) -> bool:
        """Whether a metric has one value in all steps, by default any."""
        wanted = self[name][:1] if value is None else value
        return self.has(name) and bool((self[name] == wanted).all())

    def rises(self, name: str) -> bool:
        """Whether the last third lies above the first by more than twice its error."""
        return self.has(name) and rose(self[name])

    def way(self, name: str) -> str:
        """What a metric did, as evidence."""
        if name in self.broken:
            return f"{name} is not finite in {self.broken[name]} of {self.steps} steps"
        if self.always(name):
            return f"{name} is {self[name][0]:.3g} in every step"
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


def rose(values: np.ndarray) -> bool:
    third = max(2, len(values) // 3)
    early, late = values[:third], values[-third:]
    error = math.sqrt(float(early.var(ddof=1) + late.var(ddof=1)) / third)
    return float(late.mean() - early.mean()) > max(2 * error, 1e-9)


# ------------------------------------------------------------------ what takes more than a line
# Each returns the metrics that show the fault; none of them if it is not there.
def trains_nothing(log: Log) -> list[str]:
    """The rate or every gradient is 0, although groups had different rewards."""
    if log.always("learning_rate", 0):
        return ["learning_rate"]
    differs = log.start("equal_groups") < 1 if log.has("equal_groups") else (
        not log.always("reward"))
    return ["gradient_norm"] if log.always("gradient_norm", 0) and differs else []


def one_answer(log: Log) -> list[str]:
    """The entropy is gone and so are the differences between rewards, but not because the problems
    are solved."""
    improved = log.rises(log.paid)
    solved = log.end("success") > 0.75 if log.has("success") else improved
    start, end = log.start("entropy"), log.end("entropy")
    is_low = end < min(0.02, start / 5)
    dead = log.end("equal_groups") > 0.75
    if log.has("spread"):
        dead = dead or log.end("spread") < 0.05 * max(log.start("spread"), 1e-9)
    elif not log.has("equal_groups"):
        dead = is_low and not improved  # the entropy alone has to show it
    collapsed = is_low or end < start / 3 and not improved
    if solved or not (collapsed and dead) or log.end("finished") <= 0.5:
        return []
    return [name for name in ("entropy", "equal_groups", "spread") if log.has(name)]


def destroyed(log: Log) -> list[str]:
    """What the first two steps had, the end has not, and a second sign excludes that the problems
    became harder."""
    first, signs = log.first(log.paid), signs_of_drift(log, LARGER)
    if log.end("equal_groups") > 0.95 and log.first("equal_groups") < 0.8:
        signs.append("equal_groups")
    if log.end("length") < log.first("length") / 5:
        signs.append("length")
    return [log.paid, *signs] if first > 0 and log.end(log.paid) < first / 4 and signs else []


def signs_of_drift(log: Log, limits: dict[str, float]) -> list[str]:
    """What has become so many times as large as in the first two steps, and answers that no longer
    end. A KL begins at 0, so it is compared with 0.1."""
    found = [name for name, times in limits.items()
             if log.end(name) > times * max(log.first(name), 0.1 if name == "kl" else 1e-12)]
    if log.end("finished") < 0.5 < log["finished"][0]:
        found.append("finished")
    return found


def falls(log: Log) -> list[str]:
    """Half a spread, or a third of the reward, is lost from the first fifth to the last. While the
    reward rises, a success that falls is the fault of another row (`paid_for_something_else`)."""
    if log.rises("reward"):
        return []
    for name in ("success", "reward"):
        lost = log.start(name) - log.end(name)
        is_much = lost > abs(log.start(name)) / 3 or lost > log.start("spread") / 2
        if log.has(name) and rose(-log[name]) and is_much:
            return [name]
    return []


def never_right(log: Log) -> list[str]:
    """No answer was right; or the part of the reward that is for being right is never paid."""
    if log.always("success", 0):
        return ["success"]
    if cut_off(log):
        return []  # what was cut off cannot be right
    return [name for name in log.parts if BEING_RIGHT.search(name.lower()) and log.always(name, 0)]


def too_easy(log: Log) -> list[str]:
    found = log.start("equal_groups") > 0.7 and log.start("success") > 0.75
    return ["success", "equal_groups"] if found else []


def cut_off(log: Log) -> list[str]:
    return ["finished"] if log.start("finished") < 0.5 else []


def dead_groups(log: Log) -> list[str]:
    """Most groups have equal rewards from the start, for no reason that another row has."""
    if cut_off(log) or too_easy(log):
        return []
    if log.start("equal_groups") > 0.7:
        return ["equal_groups"]
    return ["reward"] if log.always("reward") and not log.has("equal_groups") else []


def paid_for_something_else(log: Log) -> list[str]:
    """The reward rises and success does not; or one part of the reward rises and another does not,
    although it could."""
    if not log.rises("reward"):
        return []
    if log.has("success"):
        return [] if log.rises("success") else ["reward", "success"]
    rising = [name for name in log.parts if log.rises(name)]
    flat = [name for name in log.parts if log[name].any() and not log.rises(name)
            and log.end(name) < 0.9]
    is_right = any(BEING_RIGHT.search(name.lower()) for name in rising)
    return rising + flat if rising and flat and not is_right else []


def paid_for_length(log: Log) -> list[str]:
    """The length alone has become another one; or reward and length change together from step to
    step. (Over a whole run both may rise without a connection.)"""
    if log.end("length") > 3 * log.start("length") or log.end("length") < log.start("length") / 5:
        return ["length"]
    if not len(log["reward"]) == len(log["length"]) >= 10 or not log.rises("reward"):
        return []
    changes = np.diff(log["reward"]), np.diff(log["length"])
    if min(change.std() for change in changes) < 1e-9:
        return []
    is_joint = abs(float(np.corrcoef(*changes)[0, 1])) > LENGTH_ALONE
    return ["reward", "length"] if is_joint else []


def by_heart(log: Log) -> list[str]:
    """Training rises, held-out problems do not, and the two are far apart."""
    if log.config.get("dynamic_sampling", 1) > 1 or not log.rises(log.paid):
        return []
    last = log["held_out"][-1] if log.has("held_out") else math.nan
    found = last < log["held_out"][:1].sum() + 0.02 and log.end(log.paid) > last + 0.15
    return [log.paid, "held_out"] if found else []


class Check(NamedTuple):
    row: int      # of the table in docs/how_a_run_fails.md; 0 if it has none
    what: str     # what it most often is
    seen: Callable[[Log], list[str]]  # the metrics that show it
    decide: str   # the run that would decide
    is_cause: bool = False  # the faults below would follow from it


def when(condition: Callable[[Log], bool], *names: str) -> Callable[[Log], list[str]]:
    """These metrics show it when the condition holds."""
    return lambda log: [*names] if condition(log) else []


TENTH = "the same run with a tenth of the learning rate"
CHECKS = (
    Check(0, "The reward function returns what is no number",
          when(lambda log: "reward" in log.broken, "reward"),
          "the reward function alone, on the answers of such a step", True),
    Check(6, "The loss or a weight is not finite, and the model is destroyed",
          lambda log: [name for name in ("loss", "gradient_norm", "kl") if name in log.broken],
          TENTH, True),
    Check(0, "Nothing is trained: the rate is 0, or the loss is detached or multiplied by 0",
          trains_nothing, "python -m lab.formula on the loss: one backward pass shows it", True),
    Check(1, "Sampling and training compute different log-probs, by more than rounding (0.002)",
          when(lambda log: log.start("gap") > 0.01 or log.end("gap") > 0.01, "gap"),
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
          "python -m lab.formula on the loss, and one step of SGD on a batch of two answers", True),
    Check(6, "The model goes astray: the rate is too high, or nothing holds it",
          lambda log: signs_of_drift(log, MUCH_LARGER), TENTH, True),
    Check(9, "The reward pays for something else than you may want", paid_for_something_else,
          "the same run with the reward of being right alone"),
    Check(9, "The reward may pay for the length of an answer", paid_for_length,
          "read ten answers of the last steps; and ask python -m tools.preflight what an answer "
          "that ignores the problem earns"),
    Check(8, "There are few different problems, and the model learns them by heart", by_heart,
          "the same run with more different problems"),
    Check(11, "The old log-probs are computed anew in each pass",
          when(lambda log: log.always("ratio", 1) and log.always("clipped", 0), "ratio", "clipped"),
          "print the ratio of the second pass over one batch"),
    Check(13, "The updates after the first have no clipped ratio",
          when(lambda log: log.end("gradient_norm_last") > 5 * log.end("gradient_norm"),
               "gradient_norm", "gradient_norm_last"),
          "the same run with one update for each batch"),
    Check(12, "The passes over a batch move the model too far",
          when(lambda log: log.end("clipped") > 0.3, "clipped"),
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
        names = check.seen(log)
        if names:
            found.append(Fault(check, ", ".join(map(log.way, names))))
            if check.is_cause:
                break
    return found


def diagnose(path: Path) -> str:
    """The faults that a run or a log shows, in sentences."""
    log = read_log(path)
    head = f"{path}: {log.steps} steps."
    if log.steps < FEWEST:
        return f"{head} With fewer than {FEWEST} nothing can be said."
    looked = [name for name in NAMES if log.has(name) and name != "cut_off"]
    absent = [name for name in ("reward", "equal_groups", "entropy", "length", "finished",
                                "gradient_norm", "loss", "kl") if name not in looked]
    parts = [head]
    for fault in faults_of(log):
        row = f"row {fault.row} of docs/how_a_run_fails.md" if fault.row else "no row has it"
        parts.append(f"{fault.check.what} ({row}). Seen: {fault.evidence}. The run that would "
                     f"decide: {fault.check.decide}.")
    if len(parts) == 1:
        way = "rises" if log.rises("reward") else "does not rise by more than its noise"
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
    if whole is None and file.name == "trainer_state.json":
        raise UserError(f"{file} is not JSON: perhaps it was cut while it was written")
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
