"""Which change of the code learns most in half of the default run's time?

    python -m lab speedrun                     # the table of all attempts
    python -m lab speedrun my_change.patch     # judge a change: about ten minutes on two cores

A patch is what `git diff` writes, below two lines: the idea in one sentence, and `class: any task`
or `class: this task`. It may change any file but the judge's, and adds at most 60 lines that are
not blank. A copy of the last commit with the patch is trained with lab/recipes/fast.json, so a
patch of this recipe changes settings. docs/reference/speedrun.md has the rules.

1. Eight seeds follow from the patch. With each of them ten steps of the default run, the standing
   record and the patch are trained, in turns.
2. The patch is void if a run sees one of the judge's problems, if its rewards are not those of the
   task, if a setting that is fixed is another one, or if its steps take more than half of the
   processor time of the default run's.
3. Each trained model answers all of the judge's problems, here and by this code. A patch is a
   record if the lower 99% bound of its gain over the standing record lies above 0, where the 1%
   is divided by the number of attempts. Every attempt becomes a line of the table.
"""
import hashlib
import json
import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from countdown_task import Problem, Task
from grpo import Rollouts, sample
from lab.analysis.run_folders import Run, read_credit, read_tokenizer
from lab.analysis.statistics import mean_over, percentile
from lab.analysis.tables import Row, Table, by_row
from lab.engine.errors import PROJECT, UserError
from lab.harness.flags import Flag, read
from lab.harness.record import Json, provenance
from lab.harness.screen import python_command, say
from lab.judged_task import is_judged, judged_problems
from lab.tools.against import other_version
from lab.tools.planned_runs import PROCESSES, PlannedRun, make_runs, usable_cores
from qwen2_model import load_model, load_tokenizer, read_json
from run import append, read_lines, whole
from train import answer_all

FLAGS = {"runs": Flag("runs/speedrun", "folder in which the runs are kept"), "processes": PROCESSES}
HOME = PROJECT / "lab/speedruns"   # patches of records, and all attempts
TINY, RECIPE = PROJECT / "models/tiny", "lab/recipes/fast.json"
JUDGES = ("lab/tools/speedrun.py", "lab/judged_task.py", "lab/speedruns/", "lab/countdown.py",
          "countdown_task.py", "models/")
CLASSES = ("any task", "this task")
LONGEST, SEEDS, PLAIN_STEPS = 60, 8, 10
STEPS_GIVEN = 50  # of the default run: half of them
FLAGS_OF_ALL = ["--task", "lab.judged_task", "--model", str(TINY), "--threads", "1",
                "--eval_every", "0", "--change_every", "0", "--checkpoint_every", "0"]
FIXED = ("model", "task", "prompt", "numbers", "min_number", "max_number", "max_target",
         "max_result", "reward_form", "reasoning_weight", "max_new_tokens", "temperature", "dtype",
         "lora", "data", "examples")


class Patch(NamedTuple):
    name: str
    text: str  # empty: the recipe as it is

    @property
    def idea(self) -> str:
        return self.text.split("\n")[0].strip() or "the recipe as it is"

    @property
    def of_class(self) -> str:
        found = re.search("^class: (.*)$", self.text.split("diff --git")[0], re.M)
        return found[1].strip() if found else ""

    @property
    def seeds(self) -> list[int]:
        digest = hashlib.sha256(self.text.encode()).digest()
        return [int.from_bytes(digest[3 * i:3 * i + 3], "big") for i in range(SEEDS)]

    def refuse_breaches(self) -> None:
        added = re.findall(r"^\+(?!\+\+ ).*\S", self.text, re.M)
        wrong = []
        if self.of_class not in CLASSES:
            wrong.append(f'it needs a line "class: {CLASSES[0]}" or "class: {CLASSES[1]}"')
        if len(added) > LONGEST:
            wrong.append(f"it adds {len(added)} lines, and {LONGEST} are the most")
        if not re.search("^diff --git ", self.text, re.M) or "GIT binary patch" in self.text:
            wrong.append("it should have changed lines of text, as `git diff` writes them")
        if wrong:
            raise UserError(f"{self.name}: {wrong[0]}")

    def copied(self, runs: Path) -> Path:
        """The files of the last commit with this patch. That it leaves the judge's files as they
        are is seen by these, because a patch can name a file in many ways."""
        code = runs / "code"
        if not code.exists():
            runs.mkdir(parents=True, exist_ok=True)
            with whole(code) as path:
                other_version("HEAD", path)
                before = files_of_judge(path)
                if self.text:  # outside of a repository, so that all of its paths are here
                    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(path.resolve().parent)}
                    done = subprocess.run(["git", "apply", "-"], cwd=path, input=self.text,
                                          env=alone, text=True, capture_output=True)
                    if done.returncode:
                        raise UserError(f"{self.name} does not apply: {done.stderr.strip()}")
                if changed := {name for name, _ in before ^ files_of_judge(path)}:
                    raise UserError(f"{self.name}: it changes {min(changed)}, which is the judge's")
        return code


def files_of_judge(code: Path) -> set[tuple[str, bytes]]:
    names = {path: path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    return {(name, path.read_bytes()) for path, name in names.items() if name.startswith(JUDGES)}


def main(argv: list[str]) -> None:
    args = read(argv, "python -m lab speedrun [PATCH] [flags]", __doc__, FLAGS,
                {"[PATCH]": "a change, as `git diff` writes it, with two lines before it"})
    if not args.patch:
        return say(table(attempts()).to_text())
    path = Path(args.patch)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. `git diff > my_change.patch` writes one")
    patch = Patch(path.stem, path.read_text("utf-8"))
    patch.refuse_breaches()
    if [one for one in attempts() if one["seeds"] == patch.seeds]:
        raise UserError(f"{path} was judged before, and stands in the table")
    kept = HOME / path.name
    if kept.exists() and kept.read_text("utf-8") != patch.text:
        raise UserError(f"{kept} is another patch of this name: give yours another one")
    command = python_command("-m", "lab", "speedrun", *argv)
    line = judge(patch, Path(args.runs), args.processes or usable_cores(), command)
    kept.write_text(patch.text, "utf-8")
    append(HOME / "attempts.jsonl", line)
    say(f"\n{table([line]).to_text()}\n\n{textwrap.fill(line['verdict'], 100)}")


def attempts() -> list[Json]:
    path = HOME / "attempts.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def standing(of_class: str) -> Patch:
    """The last record of this class. A record for any task stands in the other class, too."""
    may_stand = CLASSES[:1 + CLASSES.index(of_class)]
    records = [line["patch"] for line in attempts()
               if line["verdict"].startswith("record") and line["class"] in may_stand]
    if not records:
        return Patch("fast", "")
    return Patch(records[-1], (HOME / f"{records[-1]}.patch").read_text("utf-8"))


# ------------------------------------------------------------------- the judge


def judge(patch: Patch, runs: Path, processes: int, command: str) -> Json:
    other, now = standing(patch.of_class), len(attempts()) + 1
    of_attempt = runs / f"{patch.name}-{patch.seeds[0]}"
    arms = {name: planned(one, name, of_attempt / name, patch.seeds)
            for name, one in (("default", Patch("default", "")), ("record", other),
                              ("patch", patch))}
    in_turns = [run for of_seed in zip(*arms.values()) for run in of_seed]
    failed = make_runs(in_turns, command, processes)
    if failed.keys() - {"patch"}:
        raise UserError("; ".join(failed.values()))
    line: Json = {"patch": patch.name, "idea": patch.idea, "class": patch.of_class,
                  "commit": provenance()["git_commit"], "record": other.name,
                  "seeds": patch.seeds, "success": [], "of_record": [], "share": None}
    if failed:
        return line | {"verdict": f"void: {failed['patch']}"}
    try:
        line["success"] = [success(run.folder) for run in arms["patch"]]
    except UserError as error:  # such as a checkpoint that is no whole model
        return line | {"verdict": f"void: {error}"}
    line["of_record"] = [success(run.folder) for run in arms["record"]]
    line["share"] = float(np.mean([share_of_time(one.folder, plain.folder)
                                   for one, plain in zip(arms["patch"], arms["default"])]))
    wrong = [sentence for one, plain in zip(arms["patch"], arms["default"])
             for sentence in breaches(one.folder, plain.folder)]
    return line | {"verdict": verdict(line, wrong, now)}


def planned(patch: Patch, arm: str, runs: Path, seeds: list[int]) -> list[PlannedRun]:
    code = patch.copied(runs)
    flags, steps = FLAGS_OF_ALL, PLAIN_STEPS
    if arm != "default":
        flags, steps = ["--config", RECIPE, *flags], read_json(code / RECIPE)["steps"]
    return [PlannedRun(arm, seed, runs / f"s{seed}", flags, steps, code) for seed in seeds]


def share_of_time(run: Path, plain: Path) -> float:
    """The processor time of all steps of a run, in units of half of the default run's steps."""
    mine, usual = ([line["processor_seconds"] for line in read_lines(folder / "metrics.jsonl")]
                   for folder in (run, plain))
    return float(sum(mine) / (STEPS_GIVEN * np.median(usual)))


def success(run: Path) -> float:
    """The share of the judge's problems that the trained model solves, with sampled answers."""
    *_, last = sorted((run / "checkpoints").glob("step_*"))
    model, tokenizer = load_model(last), load_tokenizer(TINY)
    if model.config != load_model(TINY).config:
        raise UserError(f"{last} has not the size of models/tiny")
    recipe = read_json(TINY / "recipe.json")
    task = Task(**{name: recipe[name] for name in vars(Task()) if name in recipe})

    def ask(problems: list[Problem], generator: Any) -> Rollouts:
        return sample(model, tokenizer, task, problems, 1, recipe["max_new_tokens"], generator)

    return float(answer_all(task, judged_problems(task), 256, ask)["success"])


def breaches(run: Path, plain: Path) -> list[str]:
    """Which rules a run has broken, by its record."""
    mine, usual = Run(run), Run(plain)
    found = [f"--{name} is {mine.config[name]}" for name in FIXED
             if mine.config[name] != usual.config[name]]
    tokenizer = read_tokenizer(run)
    for step in mine.steps:
        batch = read_credit(run, step, tokenizer)
        words = [re.findall(r"\d+", tokenizer.decode(ids)) for ids in batch.prompt_ids]
        problems = [Problem(tuple(map(int, numbers)), int(target)) for *numbers, target in words]
        if any(map(is_judged, problems)):
            found.append(f"step {step} trains on a problem of the judge")
        if step in (mine.steps[0], mine.steps[-1]):
            due = [Task().score(problems[g], text)["reward"]
                   for g, text in zip(batch.group.tolist(), batch.answers)]
            if not np.allclose(batch.reward.numpy(), due, atol=1e-5):
                found.append(f"the rewards of step {step} are not those of the task")
    return found


def verdict(line: Json, wrong: list[str], attempt: int) -> str:
    if line["share"] > 1:
        wrong = [*wrong, f"its steps take {line['share']:.2f} of the time that is given: the "
                 "recipe can have fewer of them"]
    if wrong:
        return f"void: {wrong[0]}"
    gains = 100 * (np.array(line["success"]) - np.array(line["of_record"]))
    bound = lower_bound(gains, 0.01 / attempt)
    found = (f"{mean_over(gains).value:+.1f} points over {line['record']}, at least {bound:+.1f} "
             f"with 99% certainty, corrected for {attempt} attempts")
    return f"record: {found}" if bound > 0 else f"no record: {found}"


def lower_bound(values: np.ndarray, share: float) -> float:
    """The one-sided bound of a mean, by Student's t, below which it lies with this probability."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - percentile(len(values) - 1, 1 - share) * error)


def table(lines: list[Json]) -> Table:
    rows: list[Row] = []
    for line in lines:
        gains = np.array(line["success"]) - np.array(line["of_record"])
        rows.append([line["patch"], line["idea"], line["class"],
                     float(np.mean(line["success"])) if line["success"] else None,
                     line["share"], mean_over(gains.tolist()), line["verdict"].split(":")[0]])
    formats = {"patch": "", "idea": "", "class": "", "success": ".1%", "share": ".2f",
               "gain": "points", "verdict": ""}
    return Table("speedrun", "", by_row(formats, rows), headings={
        "share": "share of the time", "gain": "points over the record (95% interval)"})
