"""What the pages tell a reader to paste works as it stands there."""
import json
import re
import tomllib

import numpy as np
import pytest

from conftest import REMOVABLE, ROOT, is_taken_away, project_files
from runs import SHORT, blocks, copy_project, paste, program
from tools.countdown_data import read_problems


TRAIN = """
import json, sys
import train
for flags in json.loads(sys.argv[1]):
    train.main(flags)
"""
RUNS = {"task": ["--task", "my_task"],
        "advantage": ["--advantage", "my_credit", "--process", "0.25", "--seed", "1"],
        "plain": ["--steps", "3", "--max_new_tokens", "80", "--out", "runs/none-grpo-s0",
                  "--eval_every", "1", "--eval_tasks", "8"]}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the program with a task and an advantage pasted from the pages, and a run of each,
    all in one process; the plain one under the name that the pages use."""
    folder = copy_project(tmp_path_factory.mktemp("copy"))
    (folder / "my_task.py").write_text(blocks("docs/your_own_task.md")[0])
    [pasted] = [block for block in blocks("docs/weightings.md") if "def my_credit" in block]
    with open(folder / "grpo.py", "a") as source:
        source.write("\nfrom harness.flags import Share\n\n\n" + pasted)
    commands = [[*SHORT, "--steps", "1", *flags] for flags in RUNS.values()]
    (folder / "printed").write_text(program(folder, "-c", TRAIN, json.dumps(commands)))
    return folder


@pytest.fixture(scope="module")
def folder_of(project):
    """Where each run lies."""
    places = re.findall(r"writing to (\S+)", (project / "printed").read_text())
    return dict(zip(RUNS, (project / place for place in places)))


def test_a_task_of_ones_own_is_a_list_and_a_reward(project, folder_of):
    """The page's task: own problems, own reward, no labels."""
    folder = folder_of["task"]
    assert folder.name.startswith("my_task-")
    config = json.loads((folder / "config.json").read_text())
    assert config["task"] == "my_task" and "numbers" not in config
    assert config["reward"] == "reward of my_task"
    with np.load(folder / "credit/step_000001.npz") as credit:
        assert not credit["section"].any() and len(credit["group"]) == 8


def test_an_advantage_of_ones_own_is_one_function(folder_of):
    """Signed credit: another choice of --advantage with a flag, on record token by token."""
    assert "none-my_credit-process0.25-" in folder_of["advantage"].name
    with np.load(folder_of["advantage"] / "credit/step_000001.npz") as credit:
        assert np.ptp(credit["advantage"]) > 0 and (credit["advantage"] < 0).any()


OTHER_TOOLS = "docs/credit_files.md"


def test_tensorboard_gets_every_number(project, folder_of):
    """Told to a stand-in for the writer."""
    told = paste(project, OTHER_TOOLS, "SummaryWriter", WRITER).splitlines()
    assert "none-grpo-s0 success 3" in told and "none-grpo-s0 held_out/greedy 0" in told
    assert not any(" step " in line or " weight_note " in line for line in told)


WRITER = """
import sys
from types import SimpleNamespace

class Writer:
    def __init__(self, folder): self.name = folder.split("/")[-1]
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def add_scalar(self, name, value, step): print(self.name, name, step)

sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=Writer)
"""


def test_wandb_gets_the_steps_in_order(project, folder_of):
    """Told to a stand-in: in the order of the steps, held-out success beside the step's own."""
    told = paste(project, OTHER_TOOLS, "wandb.init", WANDB).splitlines()
    told = [line for line in map(json.loads, told) if line.pop("run") == "none-grpo-s0"]
    assert told[0] == {"mode": "offline", "seed": 0}
    assert [line["at"] for line in told[1:]] == [0, 1, 2, 3]
    assert set(told[1]) == {"at", "held_out/sampled", "held_out/greedy"}
    assert {"held_out/sampled", "success"} <= set(told[-1])


WANDB = """
import json
import sys
from types import SimpleNamespace

class Run:
    def __init__(self, project, name, config, mode, dir):
        self.name = name
        print(json.dumps({"run": name, "mode": mode, "seed": config["seed"]}))
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def log(self, values, step): print(json.dumps({**values, "run": self.name, "at": step}))

sys.modules["wandb"] = SimpleNamespace(init=Run)
"""


def test_a_parquet_file_becomes_lines_that_data_takes(project):
    """Told by a stand-in for pandas, whose rows hold arrays of numpy's whole numbers."""
    paste(project, "docs/large_models.md", "read_parquet", PANDAS)
    problems = read_problems(str(project / "Countdown-Tasks-3to4.jsonl"))
    assert problems == [((44, 19, 35), 98), ((3, 7, 5, 9), 24)]


PANDAS = """
import sys
from types import SimpleNamespace

import numpy as np

ROWS = {"nums": [np.array([44, 19, 35]), np.array([3, 7, 5, 9])], "target": np.array([98, 24])}
ASKED = {"Countdown-Tasks-3to4/data": ROWS}
sys.modules["pandas"] = SimpleNamespace(read_parquet=ASKED.__getitem__)
"""


def test_the_loss_follows_from_the_record(project, folder_of):
    """The page's two ways to the loss of a step agree; one number an answer adds up to 0."""
    rows = [line.split() for line in paste(project, "docs/questions.md", "reduceat").splitlines()]
    losses = np.array([row[1:] for row in rows[1:]], float)
    assert losses.shape == (3, 4) and np.abs(losses[:, 0]).max() > 0.01
    assert np.abs(losses[:, 0] - losses[:, 1]).max() < 2e-6
    assert np.abs(losses[:, 2]).max() > 0.01 and np.abs(losses[:, 3]).max() < 1e-6


def test_the_derivative_of_one_token_follows_from_the_record(project, folder_of):
    """-weight * advantage / N, asked of a token that has an advantage here; two weightings."""
    [block] = [block for block in blocks("docs/reading_the_code.md") if "read_credit" in block]
    for step in (1, 2, 3):
        with np.load(folder_of["plain"] / f"credit/step_{step:06d}.npz") as credit:
            advantage, starts = credit["advantage"], credit["episode_start"]
        if advantage.any():
            break
    b = advantage[starts].nonzero()[0][0]
    slope = -advantage[starts[b]] / len(advantage)
    here = block.replace("[5, 22]", f"[{b}, 0]").replace("(run, 1, ", f"(run, {step}, ")
    (project / "pasted.py").write_text(here)
    printed = program(project, "pasted.py").splitlines()
    rows = [list(map(float, re.findall(r"-?\d\.\d+(?:e-\d+)?", line))) for line in printed]
    assert rows[0] == pytest.approx([1, slope], rel=1e-3)
    assert rows[1][0] != 1 and rows[1][1] == pytest.approx(slope * rows[1][0], rel=1e-3)


def test_the_lines_that_lead_to_a_tokens_credit_are_in_the_files():
    quoted = [block.splitlines() for block in blocks("docs/reading_the_code.md")
              if block.startswith("# ")]
    assert len(quoted) == 4
    for heading, *quote in quoted:
        source = (ROOT / re.match(r"# (\w+\.py):", heading)[1]).read_text()
        assert all(line in source for line in quote), heading


def test_editors_and_uv_are_told_the_same_packages():
    """pyproject.toml has the lines of requirements.txt, and is no package to build."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert said["project"]["dependencies"] == (ROOT / "requirements.txt").read_text().split()
    assert said["tool"]["uv"]["package"] is False


def all_pages():
    """Those of the lab, and of the other rooms that are there."""
    return [ROOT / "README.md",
            *(page for room in ("docs", *REMOVABLE) for page in project_files(f"{room}/*.md"))]


def test_every_test_that_a_page_names_exists():
    """A promise is kept by the test beside it."""
    named = {(page, *name) for page in all_pages()
             for name in re.findall(r"`([\w/]*tests/[\w/]+\.py)::(\w+)`", page.read_text())
             if not is_taken_away(ROOT / name[0])}
    assert len(named) > 15
    for page, path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{page.name}: {path}::{test}"


def test_every_link_of_a_page_leads_somewhere():
    """Files that a page links to exist, and so do the headings behind a #."""
    for page in all_pages():
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if is_taken_away(target):
                continue
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in headings(target), f"{page.name}: {link}"


def headings(page) -> set[str]:
    """As GitHub names them: lower case, punctuation gone, spaces as hyphens."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
