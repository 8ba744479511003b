"""Reads run folders, never a model: how well each run did, and the picture of its learning curve.

    python analyze.py runs/none-grpo-s0
    python analyze.py runs/none-grpo-s*         # several runs in one table and picture
"""
import argparse
import json
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from qwen2_model import UserError, read_json
from run_folder import read_lines

SAMPLED, GREEDY, TRAINING = "#0072b2", "#d55e00", "#999999"  # told apart by colour-blind readers too


def read_run(folder: str) -> dict:
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    run = {"folder": folder, "config": read_json(folder / "config.json"),
           "metrics": read_lines(folder / "metrics.jsonl"), "evaluations": read_lines(folder / "evaluations.jsonl")}
    if not run["metrics"] and not run["evaluations"]:
        raise UserError(f"{folder} has no metrics and no evaluations yet")
    return run


def evaluations(run: dict, mode: str) -> list[dict]:
    return [line for line in run["evaluations"] if line["mode"] == mode]


def print_table(runs: list[dict]) -> None:
    """Start and end of every run, and the mean over the seeds of each arm with its spread from run to run."""
    print("| run | mode | problems | start | end | gain | 95% of the gain | format | finished | length | entropy | gradient norm |\n" + "|---" * 12 + "|")
    for run in runs:
        for mode in ("sampled", "greedy"):
            found = evaluations(run, mode)
            if len(found) > 1:
                print_row(run, mode, found[0], found[-1])
    arms = {}
    for run in runs:
        arms.setdefault(arm_of(run), []).append(run)
    for arm in arms.values():
        for mode in ("sampled", "greedy"):
            pairs = [(found[0], found[-1]) for run in arm if len(found := evaluations(run, mode)) > 1]
            if len(pairs) > 1:
                print_mean(mode, pairs, re.sub(r"-s\d+$", "", arm[0]["folder"].name) if len(arms) > 1 else "")


def arm_of(run: dict) -> str:
    """What runs that differ in their seed alone have in common."""
    apart = ("seed", "out", "threads", "versions", "git_commit")
    return json.dumps({key: value for key, value in run["config"].items() if key not in apart}, sort_keys=True)


def print_row(run: dict, mode: str, start: dict, end: dict) -> None:
    """The gain is paired: the same held-out problems at the start and at the end."""
    gains = np.array(end["answer"]) - np.array(start["answer"])
    half = 1.96 * gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else 1.0  # one problem says nothing
    print(f"| {run['folder'].name} | {mode} | {len(gains)} | {start['success']:.1%} | {end['success']:.1%} | "
          f"{gains.mean():+.1%} | {gains.mean() - half:+.1%} to {gains.mean() + half:+.1%} | {end['format_mean']:.2f} | "
          f"{end['finished_mean']:.1%} | {end['length_mean']:.0f} | {first_and_last(run, 'entropy')} | {first_and_last(run, 'gradient_norm')} |")


def first_and_last(run: dict, key: str, count: int = 10) -> str:
    """Means over the first and the last steps of training, those without an update left out."""
    found = [[line[key] for line in part if line[key] is not None] for part in (run["metrics"][:count], run["metrics"][-count:])]
    return " to ".join(f"{np.mean(values):.3f}" if values else "none" for values in found)


def print_mean(mode: str, pairs: list[tuple[dict, dict]], arm: str) -> None:
    start, end = np.array([[line["success"] for line in pair] for pair in pairs]).T
    mean = {key: np.mean([last[key] for _, last in pairs]) for key in ("format_mean", "finished_mean", "length_mean")}
    gain = end - start
    print(f"| mean of {len(pairs)} runs{arm and ' of ' + arm} | {mode} | | {start.mean():.1%} | {end.mean():.1%} | {gain.mean():+.1%} | "
          f"runs from {gain.min():+.1%} to {gain.max():+.1%} | {mean['format_mean']:.2f} | {mean['finished_mean']:.1%} | "
          f"{mean['length_mean']:.0f} | | |")


def plot_learning_curve(runs: list[dict], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for run in runs:
        first = run is runs[0]
        if run["metrics"]:
            axis.plot([m["step"] for m in run["metrics"]], [m["success"] for m in run["metrics"]], color=TRAINING, lw=0.8,
                      alpha=0.6, label="training batches" if first else None)
        for mode, colour in (("greedy", GREEDY), ("sampled", SAMPLED)):
            lines = evaluations(run, mode)
            success = np.array([line["success"] for line in lines])
            reach = np.abs(np.array([[line["success_low"], line["success_high"]] for line in lines]).reshape(-1, 2).T - success)
            axis.errorbar([line["step"] for line in lines], success, reach, color=colour, marker="o", ms=3, lw=1.4, capsize=2,
                          label=f"held-out, {mode} (95% interval)" if first else None)
    axis.set(xlabel="step", ylabel="share of problems solved", ylim=(0, None),
             title=runs[0]["folder"].name if len(runs) == 1 else f"{len(runs)} runs: success while training")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--output_dir", help="where the picture goes; by default the (first) run's own folder")
    args = parser.parse_args(argv)
    runs = [read_run(folder) for folder in args.runs]
    print_table(runs)
    picture = Path(args.output_dir or runs[0]["folder"]) / "learning_curve.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot_learning_curve(runs, picture)
    except OSError as error:
        raise UserError(f"cannot write {picture}: {error.strerror or error}") from None
    print(f"\npicture: {picture}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"analyze.py: {error}")
