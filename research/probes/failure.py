"""How does a run fail? The signs of it, step by step, beside those of a run that learns.

    python train.py --model models/Qwen2.5-0.5B-Instruct --steps 16 --out runs/learns
    python train.py --model models/Qwen2.5-0.5B-Instruct --steps 16 --learning_rate 1e-5 \\
        --out runs/fails
    python -m research failure --run runs/fails --beside runs/learns

A run can fail because its model gives the same answer to every problem. Then three numbers of
metrics.jsonl are to be read together:

    success                the share of right answers
    entropy                of the distributions that the tokens are drawn from, their mean: 0 means
                           that the model always writes the same
    groups without spread  the share of problems whose answers all got the same reward, so that
                           nothing can be learned from them

Success alone does not show what was forgotten. So, where the task is Countdown, the last table
counts the held-out problems that were solved, by the operator that solves them.
"""
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from analysis.runs import Run, evaluations, read_run
from analysis.tables import Row, Table, by_row
from countdown_task import Problem, solutions_of
from engine.errors import UserError
from harness.flags import Flag
from harness.load import make_task
from harness.metrics import CERTAIN
from harness.record import find_folder
from harness.settings import make_settings
from research.probes.common import Findings

FLAGS = {
    "run": Flag("runs/fails", "folder of a run"),
    "beside": Flag("runs/learns", "folder of a run that learns, for comparison"),
    "seed": Flag(0, "a number in the name of the results' folder; nothing here is random")}
SIGNS = {"success": "success", "entropy": "entropy",
         "groups_without_spread": "groups without spread"}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    runs = {}
    for name in (args.run, args.beside):
        run = read_run(find_folder(name))
        if not run["metrics"]:
            raise UserError(f"{name} has no finished step yet")
        runs[run["folder"].name] = run
    if len(runs) < 2:
        raise UserError(f"--run and --beside are both {args.run}: two runs are compared")
    intro = ["; ".join(f"{name}: {len(run['metrics'])} steps" for name, run in runs.items()) + "."]
    tables = [signs_table(runs)]
    if all(is_countdown(run) for run in runs.values()):
        tables.append(operators_table(runs))
    curves = {name: {sign: [line[sign] for line in run["metrics"]] for sign in SIGNS}
              for name, run in runs.items()}
    return Findings("How does a run fail?", intro, tables, curves)


def signs_table(runs: dict[str, Run]) -> Table:
    """A row for each run: the signs at the beginning and at the end."""
    rows: list[Row] = []
    sentences = []
    for name, run in runs.items():
        lines = run["metrics"]
        certain = [line["step"] for line in lines if line["entropy"] < CERTAIN]
        skipped = sum(bool(line["skipped"]) for line in lines)
        row: Row = [name, len(lines)]
        for sign in SIGNS:
            row += [lines[0][sign], lines[-1][sign]]
        rows.append([*row, certain[0] if certain else None, skipped])
        sentences.append(f"{name}: {skipped} of {len(lines)} steps made no update.")
    formats = {"run": "", "steps": "d", "success": ".1%", "success at the end": ".1%",
               "entropy": ".3f", "entropy at the end": ".3f", "without spread": ".0%",
               "without spread at the end": ".0%", "certain": "d", "skipped": "d"}
    headings = {"success": "success, step 1", "entropy": "entropy, step 1",
                "without spread": "groups without spread, step 1",
                "without spread at the end": "groups without spread, last step",
                "success at the end": "success, last step",
                "entropy at the end": "entropy, last step",
                "certain": f"first step with entropy below {CERTAIN}",
                "skipped": "steps without an update"}
    return Table("signs", "The signs of a run that fails", by_row(formats, rows),
                 "\n".join(sentences), headings=headings)


def is_countdown(run: Run) -> bool:
    config = run["config"]
    return config.get("task") == "countdown_task" and bool(run["evaluations"])


def operators_table(runs: dict[str, Run]) -> Table:
    """A row for each operator: how many held-out problems it solves, and how many of these were
    solved before and after each training."""
    columns: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for name, run in runs.items():
        sampled = evaluations(run, "sampled")
        operators = [operator_of(problem) for problem in held_out_of(run)]
        total = Counter(operators)
        for when, line in (("before", sampled[0]), ("after", sampled[-1])):
            solved = [operator for operator, answer in zip(operators, line["answer"]) if answer]
            columns[f"{name}, {when}"] = Counter(solved)
    rows: list[Row] = []
    for operator, count in total.most_common():
        rows.append([operator, count, *(solved[operator] for solved in columns.values())])
    formats = {"operator": "", "problems": "d", **dict.fromkeys(columns, "d")}
    return Table("operators", "Held-out problems that were solved, by the operator that solves "
                 "them", by_row(formats, rows), "",
                 ["Problems that more than one operator solves are in the row `several`; the "
                  "operator is that of the last step"])


def held_out_of(run: Run) -> list[Problem]:
    """The problems of a run's evaluations."""
    settings = make_settings({"config": str(run["folder"] / "config.json")})
    task = make_task(settings.task, settings.method_flags)
    return task.held_out_problems(settings.eval_tasks)


def operator_of(problem: Problem, most: int = 10_000) -> str:
    """The operator of the last step of every solution, or `several`."""
    last = {solution.steps[-1][1] for solution in solutions_of(problem.numbers, most)
            if solution.value == problem.target}
    return last.pop() if len(last) == 1 else "several"
