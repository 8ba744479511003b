"""Each change that docs/exercises.md asks for fits the code, and does to a short run what the page
says."""
import json
import re

import pytest

from conftest import ROOT
from runs import SHORT, arrays, copy_project, lines, program, program_here

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/exercises.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M))

TRAIN = """
import json, sys
import numpy, safetensors.torch, tokenizers, torch
for folder, flags in json.loads(sys.argv[1]):
    sys.path.insert(0, folder)
    import lab.harness.made_of, train
    lab.harness.made_of.digest_of_part = lambda path, settings: ""  # to read all code takes 0.3 s
    train.main(flags)
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder + "/"):
            del sys.modules[name]
"""
STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--questions", "4"]
INVERSE = ["--mitigation", "inverse_logprob", "--rescale", "none"]
RUNS = {  # by name: the exercise whose changes are made, flags
    "plain": ("", STEP), "inverse": ("", [*STEP, *INVERSE]),
    "no mean": ("1", STEP), "own N in parts": ("2", [*STEP, "--micro_batch", "4"]),
    "no detach": ("3", [*STEP, *INVERSE]),
    "clipped ratio": ("", [*STEP, "--epochs", "2"]), "no ratio": ("5", [*STEP, "--epochs", "2"])}


def changes(exercise: str) -> list[tuple[str, str, str]]:
    """(file, old lines, new lines) of each block of an exercise."""
    found = []
    for name, block in re.findall(r"```diff\n# (\S+): .*?\n(.*?)```", SECTIONS[exercise],
                                  flags=re.S):
        rows = block.splitlines(keepends=True)
        found.append((name, *("".join(row[1:] for row in rows if row[0] in signs)
                              for signs in (" -", " +"))))
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Metrics and credit of each of RUNS, all made by one process in copies of the program."""
    place = tmp_path_factory.mktemp("exercises")
    for exercise in {exercise for exercise, _ in RUNS.values()}:
        copy = place / f"copy {exercise}"
        copy.mkdir()
        copy_project(copy)
        for name, old, new in changes(exercise) if exercise else []:
            text = (copy / name).read_text()
            assert text.count(old) == 1, f"exercise {exercise}: {old!r} is not once in {name}"
            (copy / name).write_text(text.replace(old, new))
    commands = [[str(place / f"copy {exercise}"), [*flags, "--out", str(place / name)]]
                for name, (exercise, flags) in RUNS.items()]
    program(place, "-c", TRAIN, json.dumps(commands))
    return {name: (lines(place / name / "metrics.jsonl")[0],
                   arrays(place / name / "credit/step_000001.npz")) for name in RUNS}


def test_another_temperature_ends_the_run_in_its_first_step(tmp_path):
    copy_project(tmp_path)
    for name, old, new in changes("4"):
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    said = program(tmp_path, "train.py", *STEP, expect=1)
    [gap] = re.findall(r"log-probs of sampler and update differ by (\S+) a token: one of the "
                       "two is wrong", said)
    assert float(gap) > 0.05


def test_log_probs_of_the_wrong_positions_differ_from_the_samplers(tmp_path):
    [(name, old, new)] = changes("6")
    text = (ROOT / name).read_text()
    assert text.count(old) == 1
    (tmp_path / "one_step.py").write_text(text.replace(old, new))
    [gap] = re.findall(r"from those of the sampler by at most (\S+)",
                       program_here(tmp_path / "one_step.py", ROOT / "models/tiny"))
    assert float(gap) > 10


def test_each_change_does_what_the_page_says(made):
    """All answers are reinforced; each micro-batch counts whole; the loss is the same and its
    gradient is not; the loss without a ratio is another one."""
    metrics, credit = ({name: run[i] for name, run in made.items()} for i in (0, 1))
    plain, norm = metrics["plain"], {name: run["gradient_norm"] for name, run in metrics.items()}
    assert (credit["plain"]["advantage"] < 0).any() and (credit["no mean"]["advantage"] >= 0).all()
    assert norm["own N in parts"] > 1.5 * norm["plain"]
    assert metrics["no detach"]["loss"] == pytest.approx(metrics["inverse"]["loss"], abs=1e-5)
    assert norm["no detach"] < 0.5 * norm["inverse"]
    assert plain["sampler_gap"] < 1e-4
    # without the ratio the loss is that of log p in every update, with it another
    assert metrics["no ratio"]["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert abs(metrics["clipped ratio"]["loss"] - plain["loss"]) > 1e-3
