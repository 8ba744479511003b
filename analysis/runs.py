"""Reading run folders: settings, metrics, evaluations, and which steps have a credit file."""
import sys
from pathlib import Path

from engine.errors import UserError
from engine.files import read_lines
from engine.run_folder import run_config, step_of

NUMBER = (int, float)
NEEDED = {  # the keys of each line, and their types
    "metrics": {"step": int, "success": NUMBER, "entropy": (*NUMBER, type(None))},
    "evaluations": {"step": int, "mode": str, "success": NUMBER, "success_low": NUMBER,
                    "success_high": NUMBER, "answer": list}}


def read_runs(folders: list[str]) -> list[dict]:
    """The runs in these folders. One that was named wrongly is an error; one that a pattern like
    runs/* caught is passed over, with a line."""
    runs, several = [], len(folders) > 1
    for folder in {Path(name).resolve(): Path(name) for name in folders}.values():
        if not folder.exists():
            raise UserError(f"{folder} does not exist")
        if not (folder / "config.json").is_file():
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
    elif list(folder.glob("*/config.json")):
        raise UserError(f"{folder} is not a run folder, but holds some: did you mean {folder}/*?")
    else:
        run_config(folder)  # raises, and says what is missing


def pass_over(folder: Path, reason: str) -> None:
    print(f"passed over: {folder} {reason}", file=sys.stderr)


def read_run(folder: str | Path) -> dict:
    folder = Path(folder)
    run = {"folder": folder, "config": run_config(folder), "steps": credit_steps(folder)}
    for name in NEEDED:
        run[name] = read_lines(folder / f"{name}.jsonl")
    for name in NEEDED:
        check_lines(folder, name, run[name])
    check_held_out(folder, run["evaluations"])
    for key in ("steps", "seed"):
        if type(run["config"].get(key)) is not int:
            raise UserError(f"{folder}/config.json says nothing of {key}")
    return run


def credit_steps(run: Path) -> list[int]:
    """The steps that have a credit file; files that people named otherwise do not count."""
    steps = [step_of(path) for path in Path(run).glob("credit/step_*.npz")]
    return sorted(step for step in steps if step)


def check_lines(folder: Path, name: str, lines: list) -> None:
    for number, line in enumerate(lines, 1):
        known = line if isinstance(line, dict) else {}
        for key, kind in NEEDED[name].items():
            if not isinstance(known.get(key), kind):
                value = line.get(key) if isinstance(line, dict) else line
                raise UserError(f"{folder}/{name}.jsonl, line {number} is not of this program: its "
                                f"{key} is {value}")


def check_held_out(folder: Path, lines: list[dict]) -> None:
    """Every evaluation should be on the same problems."""
    for number, line in enumerate(lines, 1):
        count, first = len(line["answer"]), len(lines[0]["answer"])
        if count != first or not count:
            raise UserError(f"{folder}/evaluations.jsonl, line {number} has {count} answers, "
                            f"line 1 has {first}: the held-out problems should be the same")


def evaluations(run: dict, mode: str) -> list[dict]:
    """Those that were `sampled` or `greedy`, in the order of their steps."""
    lines = [line for line in run["evaluations"] if line["mode"] == mode]
    return sorted(lines, key=lambda line: line["step"])


def steps_done(run: dict) -> int:
    return max((line["step"] for line in run["metrics"]), default=0)


def is_done(run: dict) -> bool:
    return steps_done(run) >= run["config"]["steps"]
