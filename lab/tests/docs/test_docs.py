"""What the pages tell a reader to paste works as it stands there."""
import inspect
import itertools
import json
import re
import shlex
import textwrap
import tomllib

import numpy as np
import pytest

import mitigations

from conftest import ROOT, project_files
from countdown_task import evaluates_to
from lab.countdown import Problem, Task, parse_problem
from lab.engine.model_folder import read_model_folder
from lab.harness.record import read_given
from lab_runs import SHORT, block, blocks, copy_project, printed_by_each, program
from small import OWN, log_probs_behind

README = (ROOT / "README.md").read_text("utf-8")
TRAIN = """
import json, sys
import lab.run as train
for flags in json.loads(sys.argv[1]):
    train.train_beyond(flags)
"""
RUNS = {"task": ["--task", "my_task"],
        "advantage": ["--advantage", "my_credit", "--form", "0.25", "--seed", "1"],
        "candidates": ["--mitigation", "close_call", "--rescale", "none"],
        # sixteen answers, because the pages follow token 7 of answer 15
        "plain": ["--steps", "3", "--max_new_tokens", "80", "--out", "runs/none-grpo-s0",
                  "--answers", "8", "--eval_every", "1", "--eval_tasks", "8"]}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the program with a task, an advantage and a weighting of the pages; and runs
    of it, all in one process, the plain one under the name that the pages use."""
    folder = copy_project(tmp_path_factory.mktemp("copy"), "models", "docs", "examples")
    of_task = [text for text in blocks("docs/reference/your_own_task.md")
               if "my_trl_task" not in text]  # its two lines import another program
    (folder / "my_task.py").write_text("\n".join(of_task))
    (folder / "divide.py").write_text(block("docs/course/1_can_i_watch_it_learn.md", "def reward"))
    with open(folder / "mitigations.py", "a") as source:
        source.write("\n\n" + block("README.md", "def my_idea") + "\n\n"
                     + block("docs/course/2_why_does_a_step_raise_the_reward.md", "def right_only")
                     + "\n\n" + block("docs/reference/your_own_idea.md", "def my_credit")
                     + "\n\n" + block("docs/reference/your_own_idea.md", "class close_call"))
    program(folder, "-c", TRAIN, json.dumps([
        [*SHORT, "--steps", "1", "--out", f"runs/{name}", *flags] for name, flags in RUNS.items()]))
    return folder


def test_the_readme_mitigations_and_page_10_show_the_same_idea():
    docstring = inspect.cleandoc(mitigations.__doc__ or "")
    assert textwrap.indent(block("README.md", "def my_idea").strip(), "    ") in docstring
    page_10 = "docs/course/10_is_my_idea_better.md"
    assert block(page_10, "def my_idea") == block("README.md", "def my_idea")


ASK = """
from lab.engine.errors import UserError
from lab.tools import sample
for problem in "1 2 3", "11 7 6 make 24":
    try:
        sample.main(["models/tiny", problem, "--task", "my_task"])
    except UserError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def pasted(project):
    """What the blocks of the pages print that are pasted into a file, by name."""
    tables = [block("docs/reference/a_run.md", "read_step"),
              block("docs/reference/real_models.md", "read_parquet")]
    return printed_by_each(project, {
        "asked": ASK, "tables": STAND_INS + "\n".join(tables) + TOLD})


@pytest.mark.slow
def test_a_task_of_ones_own_is_a_list_and_a_reward(pasted, project):
    """The page's task: own problems, own reward, and the labels that it adds; it is asked, too."""
    folder = project / "runs/task"
    config = json.loads((folder / "config.json").read_text())
    assert config["task"] == "my_task" and "numbers" not in config
    assert config["reward"] == "reward of my_task"
    with np.load(folder / "credit/step_000001.npz") as credit:
        assert credit["section"].any() and len(credit["group"]) == 8
    printed = pasted["asked"]
    assert "1 2 3 is none of the problems of my_task; " in printed
    assert "\n11 7 6 make 24\n" in printed and "   reward " in printed


@pytest.mark.slow
def test_an_advantage_of_ones_own_is_one_function(project):
    """Signed credit: another choice of --advantage with a flag, on record token by token."""
    with np.load(project / "runs/advantage/credit/step_000001.npz") as credit:
        assert np.ptp(credit["advantage"]) > 0 and (credit["advantage"] < 0).any()


STAND_INS = """
import sys
from unittest.mock import MagicMock
import numpy as np
pandas = sys.modules["pandas"] = MagicMock()
pandas.read_parquet.return_value = {
    "nums": [np.array([44, 19, 35]), np.array([3, 7, 5, 9])], "target": np.array([98, 24])}
"""
TOLD = """
for call in pandas.DataFrame.call_args_list:
    print("rows", len(call.args[0]["s"]))
"""


@pytest.mark.slow
def test_what_a_page_does_with_other_packages_fits_what_a_run_leaves(project, pasted):
    """A stand-in for pandas: every token of step 1 is a row; a parquet file becomes lines that
    --data takes."""
    told = pasted["tables"].splitlines()
    counts = [json.loads(line)["tokens"] for line in
              (project / "runs/none-grpo-s0/metrics.jsonl").read_text().splitlines()]
    assert [line for line in told if line.startswith("rows ")] == [f"rows {counts[0]}"]
    problems = read_given(str(project / "Countdown-Tasks-3to4.jsonl"), "problems", parse_problem)
    assert problems == [Problem((44, 19, 35), 98), Problem((3, 7, 5, 9), 24)]


@pytest.mark.slow
def test_the_other_candidates_of_a_page_are_the_models(project):
    """The weights of one answer, by a forward pass over prompt and answer alone."""
    with np.load(project / "runs/candidates/credit/step_000001.npz") as credit:
        first, end = credit["episode_start"][:2]
        prompt = credit["prompt_ids"][:credit["prompt_start"][1]].tolist()
        answer, weight = credit["token_id"][first:end].tolist(), credit["weight"][first:end]
    model = read_model_folder(ROOT / "models/tiny")
    probabilities = log_probs_behind(model, prompt, answer).detach().exp()
    probabilities[range(len(answer)), answer] = 0
    assert weight == pytest.approx(probabilities.max(1).values.numpy(), abs=1e-5)
    assert weight.max() > 0.01


@pytest.mark.slow
def test_every_tool_of_a_page_runs(project):
    """`python -m lab ...` is run where it trains no model, and is no probe. The flags of all
    commands are read by lab/tests/docs/test_command_lines.py."""
    for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"):
        (project / "models" / name).symlink_to(ROOT / "models/tiny")
    for name in ("one", "before", "usual", "shuffled", "none-grpo-Qwen2.5-Coder-0.5B-Instruct-s0"):
        (project / "runs" / name).symlink_to(project / "runs/none-grpo-s0")
    (project / "lab/results").mkdir(exist_ok=True)
    (project / "lab/results/curves").symlink_to(ROOT / "lab/results/curves")
    (project / "my_loss.py").write_text((ROOT / "examples/a_loss.py").read_text())
    (project / "problems.jsonl").write_text('{"nums": [3, 5, 7], "target": 22}\n')
    pages = [ROOT / "README.md", *project_files("docs/**/*.md")]
    typed = [shlex.split(command.replace("$seed", "0"), comments=True)
             for page in pages for command in
             re.findall(r"^ *python (-m lab .*?)(?: > | \|\| |$)", page.read_text(), flags=re.M)]
    assert len(typed) > 20
    program(project, "-c", TAKE, json.dumps(typed))


TAKE = """
import importlib, json, sys
from dataclasses import replace
import train  # fills the lists of choices
from lab.__main__ import MODULES
from lab.tools import pass_at_k, try_task, warmup

warmup.train, warmup.evaluate = (lambda *_: []), (lambda *_: None)  # they take minutes
for flags in (pass_at_k.FLAGS, try_task.FLAGS):  # usually hundreds of answers
    flags["problems"] = replace(flags["problems"], default=4)
for words in json.loads(sys.argv[1]):
    print(*words)
    if "--credit" in words:  # continuations, of which the pages take thousands
        words[words.index("--credit") + 1] = "40"
    module = MODULES[words[2]]
    if words[2] not in ("idea", "compare", "speedrun") and module.startswith("lab.tools."):
        importlib.import_module(module).main(words[3:])
"""


def test_editors_and_uv_are_told_the_same_packages():
    """pyproject.toml has the lines of requirements.txt, the version that is cited, no package."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert said["project"]["dependencies"] == (ROOT / "requirements.txt").read_text().split()
    cited = f'\nversion: {said["project"]["version"]}\n' in (ROOT / "CITATION.cff").read_text()
    assert cited and said["tool"]["uv"]["package"] is False


def test_what_guesses_would_solve():
    """All 192 expressions of each of the 250 problems of docs/reference/a_run.md are tried. A guess
    is any of them with equal probability, and guesses are independent."""
    task = Task(prompt="short", numbers="3", min_number=1, max_number=15, max_result=150)
    right = []
    for problem in task.held_out_problems(250):
        written = []
        for x, y, z in itertools.permutations(problem.numbers):
            for one, two in itertools.product("+-*/", repeat=2):
                written += [f"({x}{one}{y}){two}{z}", f"{x}{one}({y}{two}{z})"]
        found = [evaluates_to(text, problem.numbers, problem.target) for text in written]
        right.append(sum(found) / len(found))
    one_try, many_tries = np.mean(right), np.mean(1 - (1 - np.array(right)) ** 32)
    page = " ".join((ROOT / "docs/reference/a_run.md").read_text().split())
    assert f"one of the {len(written)} expressions" in page
    said = f"solves {one_try:.1%} of these problems with one try, and {many_tries:.0%} with 32"
    assert said in page


def test_every_test_that_a_page_names_exists():
    """A promise is kept by the test beside it."""
    named = {(page, *name) for page in project_files("**/*.md")
             for name in re.findall(r"`([\w/]*tests/[\w/]+\.py)::(\w+)`", page.read_text())}
    assert len(named) > 15
    for page, path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{page.name}: {path}::{test}"


def test_every_link_of_a_page_leads_somewhere():
    """Files that a page links to exist, and so do the headings behind a #."""
    for page in project_files("**/*.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in headings(target), f"{page.name}: {link}"


def headings(page) -> set[str]:
    """As GitHub names them: lower case, punctuation gone, spaces as hyphens."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_has_the_command_that_runs_and_the_one_that_tests():
    runs, tests = ("pip install -r requirements.txt && python train.py --mitigation none",
                   "pip install -r tests/requirements.txt && python -m pytest -n 2")
    assert re.search(f"^{re.escape(runs)} .*\n{re.escape(tests)} ", README, re.M)


def test_the_readme_counts_the_lines_of_the_seven_files():
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", README, re.M)
    assert len(rows) == 7
    if OWN:
        pytest.skip("somebody has added a method")
    assert rows == [(name, str(len((ROOT / name).read_text().splitlines()))) for name, _ in rows]


def test_the_readme_says_of_the_default_run_what_another_cpu_keeps():
    """Whole percents of the stored run, and its interval, within which other CPUs end."""
    stored = (ROOT / "lab/results/default_run.txt").read_text("utf-8")
    interval = r" +(\S+)% \(95% interval (\S+)% to (\S+)%\)"
    of_run = {mode: re.findall(f"held-out, {mode}{interval}", stored)
              for mode in ("sampled", "greedy")}
    found = {mode: [round(float(line[0])) for line in (lines[0], lines[-1])]
             for mode, lines in of_run.items()}
    low, high = (round(float(end)) for end in of_run["sampled"][-1][1:])
    first, last = found["sampled"]
    assert (f"{first}% are solved before and {last}% (95% interval {low}% to {high}%) after"
            in " ".join(README.split()))
    assert "by greedy answers {}% and {}%".format(*found["greedy"]) in " ".join(README.split())
