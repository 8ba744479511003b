"""Reading run folders: settings, metrics, evaluations, and which steps have a credit file."""
import os
import sys
from pathlib import Path

from analysis.settings import check_settings, shortened
from harness.credit_columns import LARGEST
from harness.credit_file import checkpoint_folders, credit_steps
from engine.errors import UserError
from harness.files import is_there, paths_in
from harness.identity import MODES, lines_of_run, missing_evaluations, refuse_gaps
from harness.run_folder import run_config


def read_runs(folders: list[str]) -> list[dict]:
    """The runs in these folders. One that was named wrongly is an error; one that a pattern like
    runs/* caught is passed over, with a line."""
    runs, several = [], len(folders) > 1
    for folder in {os.path.realpath(name): Path(name) for name in folders}.values():
        if not is_there(folder):
            raise UserError(f"{folder} does not exist")
        if not is_there(folder / "config.json"):
            refuse_or_pass_over(folder, several)
            continue
        run = read_run(folder)
        if run["metrics"] or run["evaluations"] or run["steps"]:
            runs.append(run)
        elif several:
            pass_over(folder, "has no finished step yet")
    if not runs:
        raise UserError(f"none of these is a run folder with a finished step: {', '.join(folders)}")
    return runs


def refuse_or_pass_over(folder: Path, several: bool) -> None:
    if several:
        pass_over(folder, "is not a run folder, it has no config.json")
    elif any(is_there(path / "config.json") for path in paths_in(folder)):
        raise UserError(f"{folder} is not a run folder, but holds some: did you mean {folder}/*?")
    else:
        run_config(folder)  # raises, and says what is missing


def pass_over(folder: Path, reason: str) -> None:
    print(f"passed over: {folder} {reason}", file=sys.stderr)


def read_run(folder: str | Path) -> dict:
    folder = Path(folder)
    refuse_unspeakable(folder)
    config = run_config(folder)
    check_settings(folder / "config.json", config)
    run = {"folder": folder, "config": config, "steps": credit_steps(folder)}
    for name in NEEDED:
        run[name] = lines_of_run(folder, f"{name}.jsonl")
        check_lines(folder / f"{name}.jsonl", run[name], NEEDED[name], IF_THERE[name])
    check_evaluations(folder / "evaluations.jsonl", run["evaluations"])
    refuse_gaps(folder, config, run["metrics"], run["evaluations"], steps_made(run))
    return run


def refuse_unspeakable(folder: Path) -> None:
    """The page is UTF-8 and says the folder's name, which can be any bytes."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name of the folder {ascii(str(folder))} is not UTF-8: give it "
                        "another") from None


def is_number(value) -> bool:
    """True and False are none, and neither is what no float can hold."""
    return type(value) in (int, float) and abs(value) <= LARGEST  # not so for NaN


def is_number_or_null(value) -> bool:
    return value is None or is_number(value)


def is_share(value) -> bool:
    return is_number(value) and 0 <= value <= 1


def is_step(value) -> bool:
    return type(value) is int and 0 <= value < 2 ** 31


def is_mode(value) -> bool:
    return value in MODES


def are_answers(values) -> bool:
    """Right or wrong for each of the held-out problems."""
    return isinstance(values, list) and all(is_number(value) and value in (0, 1)
                                            for value in values)


NEEDED = {  # of each line: the keys, and what their values have to be
    "metrics": {"step": is_step, "success": is_share, "entropy": is_number_or_null},
    "evaluations": {"step": is_step, "mode": is_mode, "success": is_share,
                    "success_low": is_share, "success_high": is_share, "format_mean": is_number,
                    "finished_mean": is_number, "length_mean": is_number, "answer": are_answers}}
IF_THERE = {"metrics": {"gradient_norm": is_number_or_null, "length": is_number_or_null},
            "evaluations": {}}


def check_lines(path: Path, lines: list, needed: dict, if_there: dict) -> None:
    for number, line in enumerate(lines, 1):
        known = line if isinstance(line, dict) else {}
        right = {key: key in known and test(known[key]) for key, test in needed.items()}
        for key, value in known.items():
            if key not in needed:
                right[key] = if_there.get(key, is_finite)(value)
        for key, is_right in right.items():
            if not is_right:
                value = line.get(key) if isinstance(line, dict) else line
                raise UserError(f"{path}, line {number} is not of this program: its {key} is "
                                f"{shortened(repr(value), 60)}")


def is_finite(value) -> bool:
    """NaN and infinity are no JSON; a whole number can be too large for a float."""
    return type(value) not in (int, float) or abs(value) <= sys.float_info.max


def check_evaluations(path: Path, lines: list[dict]) -> None:
    """Each is made once, in the order of the steps, on the same problems."""
    seen, last = set(), 0
    for number, line in enumerate(lines, 1):
        where, step, mode = f"{path}, line {number}", line["step"], line["mode"]
        if step < last:
            raise UserError(f"{where} is step {step}, after step {last}")
        if (step, mode) in seen:
            raise UserError(f"{where} is the second {mode} evaluation at step {step}")
        seen.add((step, mode))
        last = step
        check_answers(where, line, len(lines[0]["answer"]))


def check_answers(where: str, line: dict, first: int) -> None:
    """Success is the mean of the answers, and lies in its interval."""
    count = len(line["answer"])
    if count != first or not count:
        raise UserError(f"{where} has {count} answers, line 1 has {first}: the held-out problems "
                        "should be the same")
    success, rounding = sum(line["answer"]) / count, 1e-9
    if abs(line["success"] - success) > rounding:
        raise UserError(f"{where} has the success {line['success']}, but its answers have "
                        f"{success}")
    if not line["success_low"] - rounding <= success <= line["success_high"] + rounding:
        raise UserError(f"{where} has the success {success}, outside of its interval")


def steps_made(run: dict) -> int:
    """Up to which step all has to be on record. What training writes comes in order: the evaluation
    before the first step, then of each step its credit file, its line of metrics, its evaluation
    and its checkpoint. Of the last step all that follows may be missing; -1 if nothing has to be
    there. Probes leave credit files alone, and no `ranks` in config.json."""
    done = steps_done(run)
    kept = [step for step, path in checkpoint_folders(run["folder"]).items() if paths_in(path)]
    if done or "ranks" in run["config"]:
        kept += [step - 1 for step in run["steps"][-1:]]
    return max([done - 1, *kept])


def evaluations(run: dict, mode: str) -> list[dict]:
    """Those that were `sampled` or `greedy`, in the order of their steps."""
    lines = [line for line in run["evaluations"] if line["mode"] == mode]
    return sorted(lines, key=lambda line: line["step"])


def steps_done(run: dict) -> int:
    return max((line["step"] for line in run["metrics"]), default=0)


def is_done(run: dict) -> bool:
    """Whether it has all its steps, and their evaluations."""
    steps = run["config"]["steps"]
    missing = missing_evaluations(run["config"], run["evaluations"], steps)
    return steps_done(run) >= steps and not missing
