"""The metrics of a run, step by step: of one of ours, or from the log of another trainer.

    log = read_log(Path("runs/none-grpo-s0"))
    log["entropy"].start, log["entropy"].end    # means of the first and of the last fifth

NAMES has the names that other trainers give to a metric. What a log does not have is unknown.
"""
import ast
import csv
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lab.engine.errors import UserError, read_text
from lab.harness.read_record import run_config
from lab.harness.record import read_lines

LARGEST_FILE = 200e6  # bytes of a log
# Our name of a metric, and patterns for those of TRL (ms-swift writes the same, and unsloth with
# blanks around /), verl b178a3cd, OpenRLHF 3c3be623, slime 624b824a, prime-rl 559b4477, nanochat
# and GRPO-Zero. A leading "train/" is left out.
NAMES = {
    "reward": ("reward", "critic/rewards/mean", "critic/score/mean", "rollout/raw_reward",
               "agg/all/[^/]+/reward/mean", "Average reward", "mean_reward"),
    "success": ("success", "(train )?success_rate", "success_rate/train"),
    "equal_groups": ("groups_without_spread", "frac_reward_zero_std"),
    "spread": ("reward_std", "group_reward_std"),
    "entropy": ("entropy", "entropy/mean", "actor/entropy", "actor/entropy_loss", "entropy_loss",
                "entropy/all/mean"),
    "length": ("length", "completions/mean_length", "completion_length", "response_length/mean",
               "response_length", "rollout/response_len/mean",
               "agg/all/[^/]+/num_output_tokens/mean", "Average sequence length",
               "mean_response_len"),
    "turns": ("turns", "num_turns/mean", "tools/call_frequency"),
    "finished": ("finished",),
    "cut_off": ("completions/clipped_ratio", "response_length/clip_ratio", "response_clip_ratio",
                "rollout/truncated_(ratio|rate)", "agg/all/[^/]+/is_truncated/mean"),
    "gradient_norm": ("gradient_norm", "grad_norm", "actor/grad_norm", "actor_grad_norm",
                      "optim/grad_norm"),
    "gradient_norm_last": ("gradient_norm_last",),
    "loss": ("loss", "Training Loss", "actor/pg_loss", "policy_loss", "pg_loss", "loss/mean"),
    "kl": ("kl", "actor/kl_loss", "objective/kl", "kl_loss"),
    "gap": ("sampler_gap",),
    "gap_of_engines": ("sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean",
                       "train_rollout_logprob_abs_diff",
                       "rollout_corr/(kl|rollout_is_log_prob_diff_abs_mean|log_ppl_abs_diff)"),
    "ratio": ("ratio_mean",),
    "clipped": ("clipped_share", "clip_ratio/region_mean", "actor/pg_clipfrac", "ppo_clip_ratio",
                "pg_clipfrac"),
    "policy_kl": ("actor/ppo_kl", "ppo_kl", "approx_kl", "policy/approxkl_avg"),
    "learning_rate": ("learning_rate", "actor/lr", "actor_lr", "lr-pg_0", "optim/lr"),
    "held_out": ("eval_reward", "eval/reward", "val-core/.+/reward/mean@.+",
                 "eval/.+/all/.+/avg@.+"),
    "held_out_success": ("val-core/.+/acc/mean@.+", "(eval/)?eval_.+_pass1",
                         "(eval|val|test)[/_ ](accuracy|acc|success|success_rate)",
                         "success_rate/eval", "Eval success rate")}
HELD_OUT = ("held_out", "held_out_success")  # of some steps only
PART = re.compile("rewards/([^/]+)(?:/mean)?")  # of a reward function of TRL
STEP = ("step", "Step", "global_step", "_step", "training/global_step", "trainer/global_step")
BEING_RIGHT = re.compile("acc|correct|right|solve|exact|answer|math")  # in a part's name
FORM = re.compile("format|tag|xml")  # such a part is not, whatever else its name has
COLOUR = re.compile(r"\x1b\[[\d;]*m")
# by verl, nanochat and GRPO-Zero, and by the last one after an evaluation
PRINTED = re.compile(r"\b[Ss]tep[: ]\s*(\d+)(?:/\d+)?(?: [-|]|,) (.*)")
EVALUATED = re.compile(r"(Eval success rate): ([\d.]+)")
FEWEST = 5  # steps from which on something can be said
# A number that is the same in all steps, and says nothing if it has so few decimals: a rate of
# 0.000 may be 1e-06, as older versions of verl print it.
ROUNDED = {"learning_rate": (0, 7), "gradient_norm": (0, 4), "ratio": (1, 4)}


class Printed(float):
    """A number with the text that it stood in."""

    def __init__(self, text: str):
        self.text = text


class Metric:
    """A number of each step. What is asked of one that the log does not have, or has too seldom, is
    nan, and no comparison holds of that. `unit` is one at the last decimal, where there are few."""

    def __init__(self, column: np.ndarray, fewest: int = FEWEST, unit: float = 0.0):
        self.unit = unit
        self.values = column[np.isfinite(column)]
        self.broken = len(column) - len(self.values)  # steps in which it is not finite
        self.is_known = len(self.values) >= fewest
        fifth = max(1, len(self.values) // 5)
        self.last = self.values[-fifth:]
        self.mean = self.mean_of(self.values)
        self.first = self.mean_of(self.values[:2])  # two steps, before a run goes wrong at once
        self.start = self.mean_of(self.values[:fifth])
        self.end = self.mean_of(self.last)

    def mean_of(self, values: np.ndarray) -> float:
        return float(values.mean()) if self.is_known else math.nan

    def always(self, value: float | None = None) -> bool:
        """Whether it has one value in all steps, by default any."""
        wanted = self.values[:1] if value is None else value
        return self.is_known and bool((self.values == wanted).all())

    @property
    def rises(self) -> bool:
        """Whether the last third lies above the first by more than twice its error."""
        return self.is_known and rose(self.values)

    @property
    def falls(self) -> bool:
        return self.is_known and rose(-self.values)


class Log:
    """The metrics of a run: log["entropy"] is a Metric. `held_out` is success on held-out problems,
    of a run of ours. `chosen` has the names of columns by ours, where somebody has typed them."""

    def __init__(self, lines: list[dict[str, Any]], config: dict[str, Any], path: Path,
                 held_out: list[float] | None = None, chosen: dict[str, str] = {}):
        self.config, self.path = config, path
        self.parts, read = [], set(STEP)
        columns: dict[str, np.ndarray] = {}
        units: dict[str, float] = {}
        of_log = most_decimals(value for line in lines for value in line.values())
        for name in NAMES:
            key, columns[name] = column_of(lines, names_of(name, chosen))
            units[name] = unit_of([line.get(key) for line in lines], of_log)
            read.add(key)
        self.rounded = [name for name, (value, most) in ROUNDED.items()
                        if units[name] > 10.0 ** -(most + 0.5) and (columns[name] == value).all()]
        columns |= {name: np.array([]) for name in self.rounded}
        for key in keys_of(lines):
            if found := PART.fullmatch(key):
                read.add(key)
                self.parts.append(found[1])
                columns[found[1]] = column_of(lines, (key,))[1]
        self.steps = len(columns["reward"])
        if not len(columns["finished"]):
            columns["finished"] = 1 - columns["cut_off"]
        for_being_right = [name for name in self.parts if is_for_being_right(name)]
        if not len(columns["success"]) and len(for_being_right) == 1:
            [name] = for_being_right
            of_part = columns[name]
            if len(of_part) and of_part.min() >= 0 and of_part.max() <= 1:
                columns["success"] = of_part
                key, evaluated = column_of(lines, (f"eval[/_]rewards/{re.escape(name)}(/mean)?",))
                if not len(columns["held_out_success"]):
                    columns["held_out_success"] = evaluated
                read.add(key)
        if held_out is not None:
            columns["held_out_success"] = np.array(held_out, float)
        self.unread = [key for key in keys_of(lines)
                       if key not in read and column_of(lines, (key,))[1].size]
        self.metrics = {name: Metric(column, 2 if name in HELD_OUT else FEWEST,
                                     units.get(name, 0.0)) for name, column in columns.items()}
        self.paid = "success" if self["success"].is_known else "reward"

    def __getitem__(self, name: str) -> Metric:
        return self.metrics[name]

    def has(self, name: str) -> bool:
        return self[name].is_known or self[name].broken > 0

    def way(self, name: str) -> str:
        """What a metric did, as evidence."""
        metric = self[name]
        if metric.broken:
            return f"{name} is not finite in {metric.broken} of {self.steps} steps"
        if metric.always():
            return f"{name} is {metric.values[0]:.3g} in every step"
        return f"{name} went from {metric.start:.3g} to {metric.end:.3g}"


def is_for_being_right(part: str) -> bool:
    name = part.lower()
    return bool(BEING_RIGHT.search(name)) and not FORM.search(name)


def names_of(name: str, chosen: dict[str, str]) -> tuple[str, ...]:
    """The names that a metric may have: the chosen one alone, or those of other trainers."""
    return (re.escape(chosen[name]),) if name in chosen else NAMES[name]


def keys_of(lines: list[dict[str, Any]]) -> list[str]:
    return sorted({key for line in lines for key in line})


def column_of(lines: list[dict[str, Any]], aliases: tuple[str, ...]) -> tuple[str, np.ndarray]:
    """The first of these names under which the lines have numbers, and the numbers."""
    keys = keys_of(lines)
    for alias in aliases:
        for name in [alias] if alias in keys else keys:
            if name == alias or re.fullmatch(alias, name):
                values = [line[name] for line in lines if is_number(line.get(name))]
                if values:
                    return name, np.array(values, float)
    return "", np.array([])


def unit_of(column: list[Any], of_log: float) -> float:
    """One at the last decimal of a column: 0.001 if its longest number is 0.250. A column of 0.0
    alone does not say it; then it is that of the log, if this has at most three decimals."""
    most = most_decimals(column)
    if most < 2:
        most = of_log if of_log <= 3 else math.inf
    return 10.0 ** -most


def most_decimals(values: Iterable[Any]) -> float:
    """The most digits behind a point; infinitely many if a number has an exponent."""
    texts = (getattr(value, "text", str(value)).lower() for value in values if is_number(value))
    return max((math.inf if "e" in text else len(text.partition(".")[2]) for text in texts),
               default=math.inf)


def is_number(value: Any) -> bool:
    return isinstance(value, float) or type(value) is int and abs(value) < 1e300


def rose(values: np.ndarray, errors: float = 2) -> bool:
    third = max(2, len(values) // 3)
    early, late = values[:third], values[-third:]
    error = math.sqrt(float(early.var(ddof=1) + late.var(ddof=1)) / third)
    return float(late.mean() - early.mean()) > max(errors * error, 1e-9)


def read_log(path: Path, chosen: dict[str, str] = {}) -> Log:
    """The log of a run folder of this project, or of a file or folder of another trainer."""
    if not path.exists():
        raise UserError(f"there is no run or log {path}")
    if (path / "metrics.jsonl").is_file():
        config, evaluations = run_config(path), path / "evaluations.jsonl"
        held_out = [line["success"] for line in
                    (read_lines(evaluations) if evaluations.exists() else [])
                    if line.get("mode") == "sampled" and is_number(line.get("success"))]
        return Log(read_lines(path / "metrics.jsonl"), config, path, held_out, chosen)
    file = log_file_in(path) if path.is_dir() else path
    if file.stat().st_size > LARGEST_FILE:
        raise UserError(f"{file} has {file.stat().st_size / 1e6:.0f} MB: a log of metrics has less")
    rewards = (chosen["reward"],) if "reward" in chosen else NAMES["reward"]
    found = by_step([{plain_name(key): number_in(value) for key, value in line.items()}
                     for line in lines_of_text(file, rewards)])
    columns = ", ".join(dict.fromkeys(key for line in found for key in line))
    for name, key in chosen.items():
        if not column_of(found, names_of(name, chosen))[1].size:
            raise UserError(f"--column {name}={key}: {file} has no numbers under {key}, only under "
                            f"{columns[:400] or 'none'}")
    if not column_of(found, names_of("reward", chosen))[1].size:
        raise UserError(
            f"{file} has no line with a reward: expected a run of this project, trainer_state.json "
            "of TRL, JSON, lines of JSON or of what TRL, verl, nanochat or GRPO-Zero print, CSV, "
            f"or a table. A reward has one of the names {', '.join(NAMES['reward'][:4])}, or the "
            f"one that --column reward=NAME says; this file has {columns[:200] or 'no numbers'}")
    return Log(found, {}, file, chosen=chosen)


def plain_name(key: Any) -> str:
    """A column's name as TRL writes it: unsloth's *completions / clipped_ratio* has blanks."""
    return re.sub(r"\s*/\s*", "/", str(key).strip()).removeprefix("train/")


def by_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each step, in their order: what a restarted trainer logged again counts once. A
    cell that is nan is missing, and no fault, if its column has numbers, but none in a line that
    has what this line has."""
    present = [{key for key, value in line.items() if is_number(value) and math.isfinite(value)}
               for line in lines]
    beside: dict[str, set[str]] = {}
    for keys in present:
        for key in keys:
            beside.setdefault(key, set()).update(keys)
    kept = [{key: value for key, value in line.items() if value == value or not keys - {*STEP}
             or beside.get(key, keys) & keys - {*STEP}} for line, keys in zip(lines, present)]
    name = next((name for name in STEP if any(is_number(line.get(name)) for line in kept)), None)
    steps: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(kept):
        steps.setdefault(line[name] if name in line else (number,), {}).update(line)
    if name is None or len(steps) < len(kept) / 4:  # a number within an epoch, perhaps
        return kept
    numbered = {step: line for step, line in steps.items() if is_number(step)}
    return [line for step, line in steps.items() if step not in numbered] + [
        numbered[step] for step in sorted(numbered)]


def log_file_in(folder: Path) -> Path:
    """trainer_state.json of the newest checkpoint, or a file of JSON lines, or CSV."""
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    logs = sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")])
    if not states + logs:
        raise UserError(f"{folder} has neither metrics.jsonl nor trainer_state.json, nor a file of "
                        "JSON lines or CSV")
    return (states or logs)[-1]


def lines_of_text(file: Path, rewards: tuple[str, ...]) -> list[dict[str, Any]]:
    """The metrics in a file: trainer_state.json, a JSON array, JSON lines, what trainers print, CSV
    or a table. verl's JSON lines have them under "data"."""
    text = COLOUR.sub("", read_text(file))
    whole = parsed(text)
    if whole is None and file.name == "trainer_state.json":
        raise UserError(f"{file} is not JSON: perhaps it was cut while it was written")
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        whole = whole["log_history"]
    if isinstance(whole, list):
        return [line for line in whole if isinstance(line, dict)]
    found = []
    # a dictionary may be broken over lines
    text = re.sub(r"\{\s*['\"][^{}]*\}", lambda one: " ".join(one[0].split()), text)
    for line in re.split("[\r\n]+", text):  # a text in JSON may have other ends of a line
        one = parsed(line)
        if isinstance(one, dict) and isinstance(one.get("data"), dict):
            one = one["data"]
        if one is None and (printed := PRINTED.search(line)):
            one = of_console(printed[1], printed[2])
        elif one is None and (evaluated := EVALUATED.search(line)):
            one = {evaluated[1]: float(evaluated[2])}
        elif one is None and "{'" in line:
            one = of_dictionary(line[line.index("{'"):])
        if isinstance(one, dict):
            found.append(one)
    return found or of_table(text, rewards)


def of_console(step: str, text: str) -> dict[str, Any]:
    """The metrics of one step: *actor/grad_norm:0.31 - critic/score/mean:np.float64(0.5)*, or
    *Average reward: 0.5 | Average sequence length: 120*, or *mean_reward: 0.5, grad_norm: 0.3*, or
    *loss +0.0129 | reward 0.3171*."""
    found: dict[str, Any] = {"step": float(step)}
    for part in re.split(r" [-|] |, ", text):
        part = part.strip()
        name, _, value = part.rpartition(":" if ":" in part else " ")
        number = number_in(without_numpy(value))
        if name and is_number(number):
            found[name] = number
    return found


def of_dictionary(text: str) -> dict[str, Any] | None:
    """What TRL prints in a step: *{'loss': 0.0, 'reward': '0.5'}*."""
    text = without_numpy(text[:text.rfind("}") + 1])
    text = re.sub(r"(?<![\w'\"-])(-?(?:nan|inf))\b", r"'\1'", text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else None


def without_numpy(text: str) -> str:
    return re.sub(r"np\.\w+\(([^()]*)\)", r"\1", text)


def of_table(text: str, rewards: tuple[str, ...]) -> list[dict[str, Any]]:
    """The numbers of CSV, or of a notebook's table, whose columns stand between |, tabs, semicolons
    or several blanks. Lines above the headings are left out. A name may have that of its run before
    it, as in W&B's *my run - train/reward*."""
    rows = [line.strip().strip("|") for line in text.replace("\0", "").splitlines()]
    rows = [line for line in rows if line.strip("|-: ")]
    is_head = [any(metric_in(name) in rewards for name in cells_of(row)) for row in rows]
    rows = rows[is_head.index(True) if True in is_head else 0:]
    csv.field_size_limit(int(LARGEST_FILE))
    mark = mark_of(rows[0]) if rows else ","
    found, runs = [], set()
    for row in csv.DictReader([with_marks(row, mark) for row in rows], delimiter=mark):
        numbers = {}
        for name, value in row.items():
            if mark == ";" and isinstance(value, str):  # where a comma stands before decimals
                value = re.sub(r"^\s*(-?\d+),(\d+)\s*$", r"\1.\2", value)
            number = number_in(value)
            if is_number(number):
                metric = metric_in(str(name))
                runs.add(str(name).rpartition(" - ")[0]) if metric in rewards else None
                numbers[metric] = number
        found.append(numbers)
    if len(runs) > 1:
        raise UserError(f"the table has the rewards of several runs: {', '.join(sorted(runs))}. "
                        "Export one of them")
    return found


def metric_in(heading: str) -> str:
    """The name of a metric, without the run's name before it."""
    return plain_name(heading.strip().strip('"').rpartition(" - ")[2])


def mark_of(head: str) -> str:
    """What stands between the columns of a table."""
    known = next((mark for mark in ("|", "\t", ";", ",") if mark in head), "")
    return known or ("\t" if re.search(r"\S {2,}\S", head) else ",")


def with_marks(row: str, mark: str) -> str:
    return row if mark in row or mark != "\t" else re.sub(" {2,}", "\t", row)


def cells_of(row: str) -> list[str]:
    mark = mark_of(row)
    return with_marks(row, mark).split(mark)


def number_in(value: Any) -> Any:
    """The number that a text holds, also *nan* and *inf*; another value as it is."""
    try:
        return Printed(value) if isinstance(value, str) else value
    except ValueError:
        return value


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
