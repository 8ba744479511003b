"""The files of a verdict for a paper: verdict.csv has a row for each run, verdict.tex the table."""
import csv
import shutil
import subprocess
from pathlib import Path

from lab.analysis.gains import final_lines, mean_success
from lab.analysis.run_folders import Run
from lab.engine.errors import PROJECT
from lab.harness.record import whole
from lab.tools.helpers.verdict import Verdict, mean_norm

COLUMNS = ("arm", "look", "seed", "success_in_training", "held_out_sampled", "held_out_greedy",
           "gradient_norm", "learning_rate", "git_commit", "folder", "flags")
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
           **{character: f"\\{character}" for character in "&%$#_{}"}}


def write_files(verdict: Verdict, folder: Path, flags: dict[str, str], command: str) -> list[str]:
    """Write both files. Returns sentences that say where they are, and how all of it is repeated.
    `flags` are those of train.py of each arm."""
    first = next(iter(verdict.looks[0]["idea"].values()))
    commit = first["config"].get("git_commit")
    again = f"git checkout {commit} && {command}" if commit else command
    if commit and has_changes():
        again += "   # and your changes, which are not in that commit"
    with whole(folder / "verdict.csv") as unfinished, open(unfinished, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, look in enumerate(verdict.looks, 1):
            for arm, runs in look.items():
                for seed, run in runs.items():
                    about = {"arm": arm, "look": number, "seed": seed, "flags": flags[arm]}
                    writer.writerow(about | numbers_of(run))
    with whole(folder / "verdict.tex") as unfinished:
        unfinished.write_text(as_tex(verdict, flags, again), encoding="utf-8")
    return [f"{folder}/verdict.csv has every run, and verdict.tex the table",
            f"To repeat all of it: {again}"]


def numbers_of(run: Run) -> dict[str, object]:
    """What a run has learned, with which rate, and made by which commit."""
    found: dict[str, object] = {
        "success_in_training": round(mean_success(run), 6),
        "gradient_norm": round(mean_norm({0: run}), 6),
        "learning_rate": run["config"]["learning_rate"],
        "git_commit": run["config"].get("git_commit"), "folder": run["folder"]}
    for mode in ("sampled", "greedy"):
        for line in final_lines([run], mode):
            found[f"held_out_{mode}"] = line["success"]
    return found


def as_tex(verdict: Verdict, flags: dict[str, str], again: str) -> str:
    """The table of a verdict as LaTeX. Its caption has the verdict and the settings of the idea."""
    table = verdict.table()
    lines = [f"% {again}", r"\begin{table}", r"\begin{tabular}{lrrr}",
             " & ".join(map(in_tex, table.heads())) + r" \\ \hline"]
    for cells in table.cells():
        lines.append(" & ".join(map(in_tex, cells)) + r" \\")
    caption = [verdict.verdict(), verdict.about_rates or verdict.about_one_rate(),
               *verdict.about_tries(), f"The idea is train.py {flags['idea']}."]
    lines += [r"\end{tabular}", r"\caption{" + in_tex(" ".join(caption)) + "}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def in_tex(text: str) -> str:
    return "".join(SPECIAL.get(character, character) for character in text)


def has_changes() -> bool:
    """Whether a file of this project differs from its commit."""
    if not shutil.which("git"):
        return False
    seen = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=PROJECT,
                          capture_output=True, text=True)
    return bool(seen.stdout.strip())
