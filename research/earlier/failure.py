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

Success alone does not show what was forgotten. So, where the task is Countdown, a table counts the
held-out problems that were solved, by the operator that solves them.

Nor does success show whether the model reads the target at all. The last table is about that. A
*blind* answer puts the same operators between the numbers of every problem, in the order in which
they are given: a + b, or a - b + c. Some problems are solved by it, by luck. The table has the
blind answer that solves the most held-out problems, and says on how many of them the trained model
did just as well or badly. If these are all, the model may have learned that answer and no other.
"""
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from analysis.runs import Run, evaluations, is_foreign, read_run
from analysis.tables import Row, Table, by_row
from countdown_task import MAX_SOLVED, Problem, read_expression, solutions_of
from engine.errors import UserError
from harness.flags import Flag
from harness.load import make_task
from harness.metrics import CERTAIN
from harness.record import find_folder
from harness.screen import most_varied
from harness.settings import settings_of_run
from research.probes.common import FOLDER_SEED, Findings

FLAGS = {
    "run": Flag("runs/fails", "folder of a run"),
    "beside": Flag("runs/learns", "folder of a run that learns, for comparison"),
    "seed": FOLDER_SEED}
SIGNS = {"success": "success", "entropy": "entropy",
         "groups_without_spread": "groups without spread"}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    for flag in ("run", "beside"):
        name = getattr(args, flag)
        if not find_folder(name).is_dir():
            raise UserError(f"--{flag}: there is no run {name}. This command compares two runs of "
                            "your own, --run FOLDER, which fails, and --beside FOLDER, which "
                            "learns: python -m research failure --help has the commands that make "
                            "two such runs")
    runs = two_runs(find_folder(args.run), find_folder(args.beside))
    intro = ["; ".join(f"{name}: {len(run['metrics'])} steps" for name, run in runs.items()) + "."]
    tables = [signs_table(runs)]
    if all(is_countdown(run) for run in runs.values()):
        try:
            held_out = [held_out_of(run) for run in runs.values()]
        except UserError as error:  # the signs above are on record
            held_out = []
            intro.append(f"What solves the held-out problems is not known: {error}.")
        if not all(map(can_be_tried, held_out)):
            intro.append("What solves the held-out problems is not shown, because not all of them "
                         f"have 2 to {MAX_SOLVED} numbers. A single number has no operator, and "
                         "more numbers form too many expressions to try them all.")
        elif held_out:
            if held_out[0] == held_out[1]:  # otherwise their counts could not be compared
                tables.append(operators_table(runs))
            tables.append(blind_table(runs))
    curves = {name: {sign: [line[sign] for line in run["metrics"]] for sign in SIGNS}
              for name, run in runs.items()}
    return Findings("How does a run fail?", intro, tables, curves)


def two_runs(folder: Path, beside: Path) -> dict[str, Run]:
    """Both runs by their names; by their paths if they have the same name."""
    if folder.resolve() == beside.resolve():
        raise UserError(f"--run and --beside are both {folder}: two runs are compared")
    runs = {}
    for path in (folder, beside):
        run = read_run(path)
        if not run["metrics"]:
            raise UserError(f"{path} has no finished step yet")
        runs[str(path) if folder.name == beside.name else path.name] = run
    return runs


def signs_table(runs: dict[str, Run]) -> Table:
    """A row for each run: the signs at the beginning and at the end."""
    rows: list[Row] = []
    sentences = []
    for name, run in runs.items():
        lines = run["metrics"]
        certain = [line["step"] for line in lines
                   if line["entropy"] is not None and line["entropy"] < CERTAIN]
        skipped = None  # another trainer does not say it
        if not is_foreign(run["config"]):
            skipped = sum(bool(line["skipped"]) for line in lines)
            sentences.append(f"{name}: {skipped} of {len(lines)} steps made no update.")
        row: Row = [name, len(lines)]
        for sign in SIGNS:
            row += [lines[0][sign], lines[-1][sign]]
        rows.append([*row, certain[0] if certain else None, skipped])
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
    """Whether a run of Countdown was evaluated before training and later."""
    return (run["config"].get("task") == "countdown_task"
            and len(evaluations(run, "sampled")) > 1)


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
    """The problems of a run's evaluations. They are not on record, only some of them are, so it is
    checked that the settings still give these."""
    settings = settings_of_run(run["folder"])
    task = make_task(settings.task, settings.method_flags)
    problems = task.held_out_problems(settings.eval_tasks)
    titles = [task.show(problem) for problem in problems]
    shown = [titles[index] for index in most_varied(titles)]
    for line in run["evaluations"]:
        recorded = [one["problem"] for one in line["shown"]]
        if len(line["answer"]) != len(problems) or (recorded and recorded != shown):
            raise UserError(f"the settings of {run['folder']} give other problems now than it "
                            "recorded, as after a change of the file of --data")
    return problems


def can_be_tried(problems: list[Problem]) -> bool:
    """Whether each problem has an operator, and few enough numbers to try all expressions."""
    return all(2 <= len(problem.numbers) <= MAX_SOLVED for problem in problems)


def operator_of(problem: Problem, most: int = 10_000) -> str:
    """The operator of the last step of every solution, or `several`."""
    last = {solution.steps[-1][1] for solution in solutions_of(problem.numbers, most)
            if solution.value == problem.target}
    return last.pop() if len(last) == 1 else "several"


def blind_table(runs: dict[str, Run]) -> Table:
    """A row for each run: the best blind answer, what it solves, and what the model solves."""
    rows: list[Row] = []
    for name, run in runs.items():
        problems, sampled = held_out_of(run), evaluations(run, "sampled")
        expression, solved = best_blind_answer(problems)
        before, after = (list(map(bool, line["answer"])) for line in (sampled[0], sampled[-1]))
        same = sum(a == b for a, b in zip(after, solved))
        rows.append([name, expression, len(problems), sum(solved), sum(before), sum(after), same])
    formats = {"run": "", "blind answer": "", "problems": "d", "solved by it": "d", "before": "d",
               "after": "d", "the same": "d"}
    return Table("blind", "The answer to every problem that solves the most of them by luck",
                 by_row(formats, rows),
                 notes=["`of all, the same` counts the problems that the trained model and this "
                        "answer both solved, or both failed"],
                 headings={"blind answer": "blind answer", "solved by it": "it solves",
                           "before": "model solves, before training",
                           "after": "model solves, after it", "the same": "of all, the same"})


def best_blind_answer(problems: list[Problem]) -> tuple[str, list[bool]]:
    """The blind answer that solves the most problems, and which these are. If problems have
    different counts of numbers, the shorter ones take the first of its operators."""
    most = max(len(problem.numbers) for problem in problems)
    best, best_solved = "", [False] * len(problems)
    for operators in product("+-*/", repeat=most - 1):
        solved = [read_expression(blind_answer(problem.numbers, operators)) == problem.target
                  for problem in problems]
        if sum(solved) > sum(best_solved):
            best, best_solved = blind_answer("abcd"[:most], operators), solved
    return best, best_solved


def blind_answer(numbers: Iterable[object], operators: Iterable[str]) -> str:
    """43 - 57 + 70, of these numbers and of - and +."""
    first, *others = map(str, numbers)
    return " ".join([first, *(f"{operator} {number}"
                              for operator, number in zip(operators, others))])
