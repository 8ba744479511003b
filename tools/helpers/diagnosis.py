"""Which fault a run shows, by the metrics of its steps: ours, or the log of another trainer.

Each check below looks for one row of the table in docs/how_a_run_fails.md, and says what it saw and
which single run would decide. A log says less than a run of this project: what it does not have is
not looked for, and the answer names what was missing.
"""
import ast
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError, read_text
from harness.record import read_lines, run_config

LARGEST_FILE = 200e6  # bytes of a log
# Our name of a metric, and those of TRL (unsloth and ms-swift write the same, but for the entropy)
# and of verl.
NAMES = {
    "step": ("step", "training/global_step", "global_step"),
    "reward": ("reward", "critic/rewards/mean", "critic/score/mean"),
    "success": ("success",),
    "format": ("reward_format",),
    "no_spread": ("groups_without_spread", "frac_reward_zero_std"),
    "spread": ("reward_std",),
    "entropy": ("entropy", "entropy/mean", "actor/entropy", "actor/entropy_loss"),
    "length": ("length", "completions/mean_length", "completion_length",
               "response_length/mean"),
    "finished": ("finished",),
    "cut_off": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "gradient_norm": ("gradient_norm", "grad_norm", "actor/grad_norm"),
    "gradient_norm_last": ("gradient_norm_last",),
    "gap": ("sampler_gap", "sampling/sampling_logp_difference/mean",
            "training/rollout_probs_diff_mean"),
    "ratio": ("ratio_mean",),
    "clipped": ("clipped_share", "clip_ratio/region_mean", "actor/pg_clipfrac"),
    "learning_rate": ("learning_rate", "actor/lr"),
    "held_out": ("eval_reward",)}
PART = "rewards/"  # of a reward function of TRL: rewards/NAME/mean
LOOKED_AT = ("reward", "gradient_norm")  # columns of which a check says that they are not finite
BEING_RIGHT = re.compile("acc|correct|right|solve|exact|answer|math")  # in a part's name
FEWEST = 5  # steps from which on something can be said
# The correlation that says so: three runs with a reward for length had 0.92 to 0.99, and of 30
# others none had more than 0.81, with either sign.
LENGTH_ALONE = 0.9
VERL_LINE = re.compile(r"\bstep:\d+ - ")
VERL_METRIC = re.compile(  # also NAME:np.float64(0.25)
    r"([\w/@.-]+):(?:np\.float\d+\()?(-?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|nan)\)?(?= - |\s*$)")


@dataclass(frozen=True)
class Fault:
    row: int        # of the table in docs/how_a_run_fails.md; 0 if it has none
    what: str       # what it most often is
    evidence: str   # what was seen
    decide: str     # the run that would decide


class Log:
    """The metrics of a run, step by step: log["entropy"] has a number for each step that says it.
    """

    def __init__(self, lines: list[dict[str, Any]], evaluations: list[dict[str, Any]],
                 config: dict[str, Any]):
        self.evaluations, self.config = evaluations, config
        logged = len(lines)
        lines = without_steps_made_again(lines)
        self.made_again = logged - len(lines)
        self.columns: dict[str, np.ndarray] = {}
        for name, aliases in NAMES.items():
            self.columns[name] = column_of(lines, aliases)
        self.not_finite = without_broken_numbers(self.columns)
        cut_off = self.columns.pop("cut_off")
        if not len(self.columns["finished"]) and len(cut_off):
            self.columns["finished"] = 1 - cut_off
        parts = sorted({key for line in lines for key in line
                        if key.startswith(PART) and key.endswith("/mean")})
        self.parts = {key.removeprefix(PART).removesuffix("/mean"): column_of(lines, (key,))
                      for key in parts}
        without_broken_numbers(self.parts)
        self.steps = len(lines)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def has(self, *names: str) -> bool:
        return all(len(self.columns[name]) >= FEWEST for name in names)

    def start(self, name: str) -> float:
        """The mean of the first fifth of the steps."""
        return float(np.mean(self[name][:fifth(self[name])]))

    def end(self, name: str) -> float:
        """The mean of the last fifth of the steps."""
        return float(np.mean(self[name][-fifth(self[name]):]))


def without_steps_made_again(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines in the order of their steps. Where the steps go back, a trainer was resumed, or a
    second run writes into the same file: of the steps from there on the later lines count."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        steps, epochs = column_of([line], NAMES["step"]), column_of([line], ("epoch",))
        while kept and is_made_again(kept[-1], steps, epochs):
            kept.pop()
        kept.append(line)
    return kept


def is_made_again(before: dict[str, Any], steps: np.ndarray, epochs: np.ndarray) -> bool:
    """Whether an earlier line is of the same step as this one, or of a later one. Where a line
    does not say its step, its epoch tells it; that is rounded, so neighbours may have the same."""
    steps_before = column_of([before], NAMES["step"])
    epochs_before = column_of([before], ("epoch",))
    if steps.size and steps_before.size:
        return bool(steps_before[0] >= steps[0])
    return bool(epochs.size and epochs_before.size and epochs_before[0] > epochs[0])


def without_broken_numbers(columns: dict[str, np.ndarray]) -> list[str]:
    """Leave out what is not finite, and say of which columns; but not where a check looks for it.
    """
    found = []
    for name, values in columns.items():
        broken = int((~np.isfinite(values)).sum())
        if broken and name not in LOOKED_AT:
            columns[name] = values[np.isfinite(values)]
            found.append(f"{name} in {broken} of {len(values)} steps")
    return found


def column_of(lines: list[dict[str, Any]], aliases: Iterable[str]) -> np.ndarray:
    """The numbers under the first of these names that the lines have."""
    for name in aliases:
        values = [line[name] for line in lines if is_number(line.get(name))]
        if values:
            return np.array(values, float)
    return np.array([])


def is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int and abs(value) < 1e300


def fifth(values: np.ndarray) -> int:
    return max(1, len(values) // 5)


def read_log(path: Path) -> Log:
    """The log of a run folder of this project, or of a file or folder of another trainer."""
    if not path.exists():
        raise UserError(f"there is no run or log {path}")
    if (path / "metrics.jsonl").is_file():
        config = run_config(path)
        evaluations = path / "evaluations.jsonl"
        return Log(read_lines(path / "metrics.jsonl"),
                   read_lines(evaluations) if evaluations.exists() else [], config)
    file = log_file_in(path) if path.is_dir() else path
    if file.stat().st_size > LARGEST_FILE:
        raise UserError(f"{file} has {file.stat().st_size / 1e6:.0f} MB: a log of metrics has less")
    found = lines_of_text(file)
    lines = [line for line in found if column_of([line], NAMES["reward"]).size]
    if not lines:
        raise UserError(f"{file} has no line with a reward: expected trainer_state.json of TRL, "
                        "JSON lines, the lines {...} that a trainer prints, or those of verl, "
                        "step:1 - critic/score/mean:0.25 - ...")
    evaluations = [{"mode": "sampled", "success": reward}
                   for reward in column_of(found, NAMES["held_out"]).tolist()]
    return Log(lines, evaluations, {})


def log_file_in(folder: Path) -> Path:
    """trainer_state.json of the newest checkpoint, or a file of JSON lines."""
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    logs = sorted(folder.glob("*.jsonl"))
    if not states + logs:
        raise UserError(f"{folder} has neither metrics.jsonl nor trainer_state.json nor JSON lines")
    return (states or logs)[-1]


def lines_of_text(file: Path) -> list[dict[str, Any]]:
    """The metrics in a file: trainer_state.json, JSON lines, printed dicts, or the lines of verl.
    Nothing in it is executed."""
    text = read_text(file)
    try:
        whole = json.loads(text)
        if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
            return [line for line in whole["log_history"] if isinstance(line, dict)]
    except (ValueError, RecursionError):
        pass  # not one JSON document: it is read line by line
    found = []
    for line in re.split("[\r\n]+", text):  # a text in JSON may have other ends of a line
        if VERL_LINE.search(line):
            found.append(verl_metrics(line))
            continue
        start, end = line.find("{"), line.rfind("}")
        if start < 0 or end < start:
            continue
        one = parsed(line[start:end + 1])
        if isinstance(one, dict) and isinstance(one.get("data"), dict):
            one = one["data"]  # a line of verl's file: {"step": 1, "data": {...}}
        if isinstance(one, dict):
            found.append({key: as_number(value) for key, value in one.items()})
    return found


def verl_metrics(line: str) -> dict[str, Any]:
    """The metrics of a line that verl prints: step:1 - actor/lr:1e-06 - ... A learning rate that
    was rounded to 0.000 is left out."""
    metrics = {}
    for name, digits in VERL_METRIC.findall(line):
        if name != "actor/lr" or float(digits) > 0:
            metrics[name] = float(digits)
    return metrics


def parsed(text: str) -> Any:
    """A JSON object, or the literal of a dict as Python prints it; None if it is neither. Python
    prints nan and inf bare, which are no literals."""
    text = re.sub(r"(?<=['\"]: )-?(nan|inf)(?=[,}])", r"'\g<0>'", text)
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def as_number(value: Any) -> Any:
    """Newer trainers print their numbers as texts: '0.25'."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def no_number(log: Log) -> Fault | None:
    """A reward that is not finite. All advantages of its group are lost with it."""
    broken = int((~np.isfinite(log["reward"])).sum())
    if not broken:
        return None
    return Fault(0, "The reward function returns what is no number",
                 f"the mean reward is not finite in {broken} of {len(log['reward'])} steps",
                 "the reward function alone, on the answers of such a step")


def no_gradient(log: Log) -> Fault | None:
    if not log.has("gradient_norm"):
        return None
    norm = log["gradient_norm"]
    if not np.isfinite(norm).all():
        return Fault(6, "The loss or a weight is not finite, and the model is destroyed",
                     f"the norm of the gradient is not finite in {int((~np.isfinite(norm)).sum())} "
                     f"of {len(norm)} steps", "the same run with a tenth of the learning rate")
    if (norm == 0).all():
        has_spread = log.start("no_spread") < 1 if log.has("no_spread") else not is_constant(log)
        if has_spread:
            return Fault(0, "The loss has no gradient: it is detached, multiplied by 0, or no "
                         "parameter is trained",
                         f"the norm of the gradient is exactly 0 in all {len(norm)} steps, "
                         "although groups had different rewards",
                         "python -m tools.formula on the loss: one backward pass shows it")
    if log.has("learning_rate") and (log["learning_rate"] == 0).all():
        return Fault(0, "Nothing is trained: the learning rate is 0",
                     f"it is 0 in all {len(log['learning_rate'])} steps",
                     "the same run with a learning rate")
    return None


def is_constant(log: Log) -> bool:
    """Whether the mean reward is the same in every step."""
    return log.has("reward") and bool((log["reward"] == log["reward"][0]).all())


def other_sampler(log: Log) -> Fault | None:
    if log.has("gap") and log.start("gap") > 0.01:
        return Fault(1, "Sampling and training compute different log-probs",
                     f"on average they differ by {log.start('gap'):.3g} in the first steps, and "
                     "rounding is at most 0.002",
                     "one step at temperature 1, with the sampler's weights compared to the "
                     "trainer's")
    return None


def destroyed(log: Log) -> Fault | None:
    """What the first two steps had, the end has not: most is lost within a few steps. That the
    problems became harder is excluded by a second sign."""
    name = "success" if log.has("success") else "reward"
    if not log.has(name):
        return None
    at_first, at_last = float(log[name][:2].mean()), log.end(name)
    signs = signs_of_destruction(log)
    if at_first > 0 and at_last < at_first / 4 and signs:
        return Fault(6, "The learning rate is far too high, and the model is destroyed",
                     f"{name} went from {at_first:.3g} in the first two steps to {at_last:.3g}, "
                     f"and {' and '.join(signs)}", "the same run with a tenth of the learning rate")
    return None


def signs_of_destruction(log: Log) -> list[str]:
    """What else a destroyed model shows: larger gradients, a larger entropy, answers that no longer
    end."""
    signs = []
    if log.has("gradient_norm"):
        norm = float(log["gradient_norm"][:2].mean())
        times = float(np.median(log["gradient_norm"][2:])) / max(norm, 1e-12)
        if times > 1.5:
            signs.append(f"the norm of the gradient became {times:.1f} times as large")
    if log.has("entropy"):
        times = log.end("entropy") / max(float(log["entropy"][0]), 1e-12)
        if times > 1.5:
            signs.append(f"the entropy became {times:.1f} times as large")
    if log.has("no_spread") and log.end("no_spread") > 0.95 > 0.8 > log["no_spread"][:2].mean():
        signs.append("no group has different rewards any more")
    if log.has("finished") and log.end("finished") < 0.5 < float(log["finished"][0]):
        signs.append(f"the share of answers that end went from {log['finished'][0]:.0%} to "
                     f"{log.end('finished'):.0%}")
    return signs


def cut_off(log: Log) -> Fault | None:
    if log.has("finished") and log.start("finished") < 0.5:
        return Fault(7, "The limit of new tokens is too small, or the model does not know how to "
                     "end", f"only {log.start('finished'):.0%} of the answers of the first steps "
                     "ended before the limit", "one step with twice the limit")
    return None


def one_answer(log: Log) -> Fault | None:
    if not log.has("entropy"):
        return None
    knows = log.has("success")
    improved = log.has("reward") and rose(log["success" if knows else "reward"])
    solved = log.end("success") > 0.75 if knows else improved
    start, end = log.start("entropy"), log.end("entropy")
    collapsed = end < min(0.02, start / 5) or (end < start / 3 and not improved)
    dead = log.has("no_spread") and log.end("no_spread") > 0.75
    no_spread = log.has("spread") and log.end("spread") < 0.05 * max(log.start("spread"), 1e-9)
    ends = not log.has("finished") or log.end("finished") > 0.5
    if not (log.has("no_spread") or log.has("spread")):
        no_spread = end < min(0.02, start / 5) and not improved  # the entropy alone has to show it
    if collapsed and (dead or no_spread) and ends and not solved:
        return Fault(5, "The learning rate is too high, and the model writes one answer for all",
                     f"the entropy went from {start:.3g} to {end:.3g}"
                     + (", and most groups have equal rewards at the end" if dead else ""),
                     "the same run with a fifth of the learning rate. Look at the answers to "
                     "different problems, too, whether they are the same")
    return None


def dead_groups(log: Log) -> Fault | None:
    if cut_off(log):
        return None  # answers that were cut off have equal rewards
    if log.has("no_spread") and log.start("no_spread") > 0.7:
        solved = log.start("success") if log.has("success") else math.nan
        if solved > 0.75:
            return Fault(4, "The problems are too easy, and nothing is left to learn",
                         f"{solved:.0%} of the answers of the first steps were right",
                         "the same run with harder problems")
        what = "too hard" if log.has("success") else "too hard or too easy"
        return Fault(3, f"The problems are {what}, or the groups too small",
                     f"in the first steps {log.start('no_spread'):.0%} of the groups had equal "
                     "rewards, and such a group has no gradient",
                     "python -m tools.preflight for this task: it says which size of group would "
                     "have different rewards")
    if not log.has("no_spread") and is_constant(log):
        return Fault(3, "The problems are too hard or too easy, or the reward is a constant",
                     f"the mean reward is exactly {log['reward'][0]:.3g} in every step",
                     "python -m tools.preflight for this task: it says whether any reward differs")
    return None


def never_right(log: Log) -> Fault | None:
    if log.has("success") and (log["success"] == 0).all():
        return Fault(3, "The problems are too hard, so only the format is learned, or nothing",
                     f"no answer was right in {len(log['success'])} steps",
                     "easier problems, or the same run after a cold start "
                     "(python -m tools.warmup)")
    if cut_off(log):
        return None
    for name, values in log.parts.items():
        if BEING_RIGHT.search(name.lower()) and len(values) >= FEWEST and not values.any():
            return Fault(3, "The problems are too hard: at most the rest of the reward is learned",
                         f"the part {name} of the reward is 0 in all {len(values)} steps",
                         "easier problems. If some answers are right: that part alone, by hand")
    return None


def paid_for_something_else(log: Log) -> Fault | None:
    if log.has("success", "reward") and rose(log["reward"]) and not rose(log["success"]):
        return Fault(9, "The reward pays for something else",
                     f"the reward went from {log.start('reward'):.3g} to {log.end('reward'):.3g}, "
                     f"success from {log.start('success'):.0%} to {log.end('success'):.0%}",
                     "the same run with the reward of being right alone")
    if log.has("reward") and log.parts and rose(log["reward"]):
        long = {name: values for name, values in log.parts.items() if len(values) >= FEWEST}
        rising = [name for name, values in long.items() if rose(values)]
        flat = [name for name, values in long.items() if can_rise(values) and not rose(values)]
        if rising and flat and not any(BEING_RIGHT.search(name.lower()) for name in rising):
            return Fault(9, "The reward pays for something else than you may want",
                         f"of the parts of the reward {', '.join(rising)} rose, and "
                         f"{', '.join(flat)} did not",
                         f"the same run with {flat[0]} alone")
    return None


def can_rise(part: np.ndarray) -> bool:
    """Whether a part of the reward has room: what is always 0, or nearly 1, has none."""
    return bool(part.any()) and float(part[-fifth(part):].mean()) < 0.9


def paid_for_length(log: Log) -> Fault | None:
    if not log.has("reward", "length") or len(log["reward"]) != len(log["length"]):
        return None
    if len(log["reward"]) < 10 or not rose(log["reward"]):
        return None
    # from step to step: over a whole run both may rise without a connection
    changes = np.diff(log["reward"]), np.diff(log["length"])
    if min(change.std() for change in changes) < 1e-9:
        return None
    together = float(np.corrcoef(*changes)[0, 1])
    if abs(together) > LENGTH_ALONE:
        return Fault(9, "The reward may pay for the length of an answer",
                     f"their changes from step to step have a correlation of {together:+.2f}, "
                     f"and the length went from {log.start('length'):.0f} to "
                     f"{log.end('length'):.0f} tokens",
                     "read ten answers of the last steps; and ask python -m tools.preflight "
                     "what an answer that ignores the problem earns")
    return None


def by_heart(log: Log) -> Fault | None:
    sampled = [line["success"] for line in log.evaluations
               if line.get("mode") == "sampled" and is_number(line.get("success"))]
    name = "success" if log.has("success") else "reward"
    if len(sampled) < 2 or not log.has(name):
        return None
    if log.config.get("dynamic_sampling", 1) > 1:  # success is that of the groups that were kept
        return None
    first, last = sampled[0], sampled[-1]
    if rose(log[name]) and last < first + 0.02 and log.end(name) > last + 0.15:
        return Fault(8, "There are few different problems, and the model learns them by heart",
                     f"{name} in training went from {log.start(name):.3g} to "
                     f"{log.end(name):.3g}, and on held-out problems from {first:.3g} to "
                     f"{last:.3g}", "the same run with more different problems")
    return None


def several_passes(log: Log) -> Fault | None:
    if log.has("ratio", "clipped") and (log["ratio"] == 1).all() and (log["clipped"] == 0).all():
        return Fault(11, "The old log-probs are computed anew in each pass",
                     "the ratio of new to old probability is exactly 1 in every step, although "
                     "batches are used several times",
                     "print the ratio of the second pass over one batch")
    if log.has("gradient_norm_last", "gradient_norm") and (
            log.end("gradient_norm_last") > 5 * log.end("gradient_norm")):
        return Fault(13, "The updates after the first have no clipped ratio",
                     f"the norm of the gradient is {log.end('gradient_norm_last'):.3g} in the last "
                     f"pass over a batch and {log.end('gradient_norm'):.3g} in the first",
                     "the same run with one update for each batch")
    if log.has("clipped") and log.end("clipped") > 0.3:
        return Fault(12, "The passes over a batch move the model too far",
                     f"{log.end('clipped'):.0%} of the tokens are clipped at the end",
                     "the first step with a tenth of the learning rate")
    return None


def rose(values: np.ndarray) -> bool:
    """Whether the last third of the values lies above the first by more than twice its error."""
    third = max(2, len(values) // 3)
    early, late = values[:third], values[-third:]
    error = math.sqrt(float(early.var(ddof=1) + late.var(ddof=1)) / third)
    return float(late.mean() - early.mean()) > max(2 * error, 1e-9)


CHECKS: tuple[Callable[[Log], Fault | None], ...] = (
    no_number, no_gradient, other_sampler, one_answer, destroyed, cut_off, never_right, dead_groups,
    paid_for_something_else, paid_for_length, by_heart, several_passes)
EXPLAINS_ALL = (no_number, no_gradient, one_answer, destroyed, never_right)


def faults_of(log: Log) -> list[Fault]:
    """The faults of a run. If one of EXPLAINS_ALL is among them, the others follow from it."""
    found = []
    for check in CHECKS:
        fault = check(log)
        if fault:
            found.append(fault)
            if check in EXPLAINS_ALL:
                break
    return found


def diagnose(path: Path) -> str:
    """The faults that a run or a log shows, in sentences."""
    log = read_log(path)
    again = ""
    if log.made_again:
        again = (f" {log.made_again} more lines are of steps that were logged again later, as "
                 "after a resume, so they are left out.")
    if log.steps < FEWEST:
        return (f"{path} has too few steps ({log.steps}): with fewer than {FEWEST} nothing can be "
                f"said.{again}")
    known = [name for name in log.columns if log.has(name) and name != "step"]
    missing = [name for name in ("reward", "no_spread", "entropy", "finished", "gradient_norm")
               if name not in known]
    parts: list[str] = []
    for fault in faults_of(log):
        row = f"row {fault.row} of docs/how_a_run_fails.md" if fault.row else "no row has it"
        parts.append(f"{fault.what} ({row}). Seen: {fault.evidence}. The run that would decide: "
                     f"{fault.decide}.")
    if not parts:
        text = "Nothing found"
        if log.has("reward"):
            way = "rises" if rose(log["reward"]) else "does not rise"
            text += (f": the reward {way}, from {log.start('reward'):.3g} to "
                     f"{log.end('reward'):.3g}")
            if way != "rises":
                text += (". The run that would decide is the same one with shuffled advantages: if "
                         "it looks alike, the reward teaches nothing")
        parts.append(f"{text}.")
    head = f"{path}: {log.steps} steps.{again}"
    if log.not_finite:
        head += f" Not finite, and left out: {', '.join(log.not_finite)}."
    if missing:
        head += f" It does not say: {', '.join(missing)}; so their signs were not looked for."
    return "\n\n".join(textwrap.fill(part, 100) for part in (head, *parts))
