"""The logs of a run, read: each line is of this run, each column holds what it may hold, and no
step is missing.

A weighting or an advantage adds columns of its own, and so does another trainer: of those nothing
is known but that each is a number, a text, yes, no or null. What may be null may also be missing,
as in a run of an older version.
"""
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.errors import UserError
from harness.files import LARGEST, read_lines
from harness.flags import shortened
from harness.identity import MODES, check_origin, run_id_on_record


def is_number(value, low: float = -LARGEST, high: float = LARGEST) -> bool:
    """True and False are none, and neither is what no float can hold."""
    return type(value) in (int, float) and low <= value <= high  # not so for NaN


is_share, is_amount = partial(is_number, low=0, high=1), partial(is_number, low=0)


def is_text(value) -> bool:
    return isinstance(value, str)


def is_step(value) -> bool:
    return type(value) is int and 0 <= value < 2 ** 31


def is_plain(value) -> bool:
    return value is None or type(value) in (bool, str) or is_number(value)


def or_null(is_right: Callable) -> Callable:
    return lambda value: value is None or is_right(value)


def list_of(is_right: Callable) -> Callable:
    return lambda values: isinstance(values, list) and all(map(is_right, values))


def each(is_right: Callable, *names: str) -> dict[str, Callable]:
    return dict.fromkeys(names, is_right)


def is_example(value) -> bool:
    """An answer of an evaluation, as a page shows it; its tokens are not in every older run."""
    return isinstance(value, dict) and all(
        is_right(value.get(name)) for name, is_right in EXAMPLE.items())


EXAMPLE = each(is_text, "problem", "text") | {
    "answer": is_share, "texts": or_null(list_of(is_text)), "log_prob": or_null(list_of(is_number))}
COLUMNS = {  # by log
    "metrics.jsonl": {
        "step": is_step,
        **each(or_null(is_share), "success", "finished", "groups_without_spread"),
        **each(or_null(is_number), "reward", "reward_format", "entropy", "loss"),
        **each(or_null(is_amount), "tokens", "N", "trained_tokens", "extra_tokens", "extra_answers",
               "length", "collision", "gradient_norm", "sampler_gap", "weight_factor", "weight_max",
               "seconds", "rollout_seconds", "credit_seconds", "update_seconds", "record_seconds",
               "processor_seconds", "rollout_tokens_per_second", "update_tokens_per_second",
               "peak_memory_bytes"),
        **each(or_null(is_text), "weight_note", "skipped")},
    "evaluations.jsonl": {
        "step": is_step, "mode": lambda value: value in ("sampled", "greedy"),
        **each(is_share, "success", "success_low", "success_high", "finished_mean"),
        **each(is_number, "format_mean", "length_mean"),
        "answer": list_of(is_share),  # of each held-out problem: 0 or 1 of a single answer
        **each(or_null(list_of(is_number)), "format", "length"),
        "shown": or_null(list_of(is_example))},
    "samples.jsonl": {"step": is_step}}


def wrong_column(log: str, line: dict) -> str | None:
    """The first column of a line that holds what it cannot. What is missing is null from here."""
    columns = COLUMNS[log]
    others = [] if log == "samples.jsonl" else line.keys() - columns.keys()
    tests = columns | dict.fromkeys(others, is_plain)
    return next((name for name, is_right in tests.items()
                 if not is_right(line.setdefault(name))), None)


def lines_of_run(run: Path, name: str) -> list[dict]:
    """The lines of a log, each of which is of this run and holds what its columns may hold."""
    wanted = {"run_id": run_id_on_record(run)}
    lines = read_lines(run / name)
    for number, line in enumerate(lines, 1):
        check_origin(f"{run / name}, line {number}", line, wanted)
        if column := wrong_column(name, line):
            raise UserError(f"{run / name}, line {number} is not of this program: its {column} is "
                            f"{shortened(repr(line[column]))}")
    return lines


def last_step(run: Path) -> int:
    """The last step on record; 0 before the first."""
    return max((line["step"] for line in lines_of_run(run, "metrics.jsonl")), default=0)


def missing_evaluations(config: dict, evaluations: list[dict], done: int) -> list[tuple[int, str]]:
    """Step and mode of those that a run with `done` steps has to have. A probe evaluates nothing;
    its config.json has no `ranks`."""
    every = config.get("eval_every", 0) if "ranks" in config else 0
    if not every:
        return []
    steps = [*range(0, done + 1, every)]
    if done == config["steps"] and done % every:
        steps.append(done)
    made = {(line["step"], line.get("mode")) for line in evaluations}
    modes = MODES[config.get("eval_modes", "both")]
    return [(step, mode) for step in steps for mode in modes if (step, mode) not in made]


def refuse_gaps(run: Path, config: dict, metrics: list[dict], evaluations: list[dict],
                done: int) -> None:
    """Stop unless every step up to `done` is on record, in order, with its evaluation."""
    path = run / "metrics.jsonl"
    for number, line in enumerate(metrics, 1):
        if line["step"] != number:
            raise UserError(f"{path}, line {number} is step {line['step']}: lines are missing, "
                            "doubled or out of order")
    if len(metrics) < done:
        raise UserError(f"{path} has {len(metrics)} lines, while there are files from after step "
                        f"{done}: lines are missing")
    for step, mode in missing_evaluations(config, evaluations, done):
        raise UserError(f"{run}/evaluations.jsonl has lost the {mode} evaluation at step {step}: "
                        f"{done} steps are done. --resume makes it again once the checkpoints from "
                        f"step {step} on are moved away; without one from before, train again "
                        "with another --out")
