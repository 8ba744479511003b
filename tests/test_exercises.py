"""Each change that docs/exercises.md asks for fits the code, and does to a short run what the page
says."""
import json
import re

import numpy as np
import pytest

from conftest import ROOT
from runs import SHORT, arrays, copy_project, lines, program

PAGE = (ROOT / "docs/exercises.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d)\. (.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M))

TRAIN = """
import json, sys
import numpy, safetensors.torch, tokenizers, torch
for folder, flags in json.loads(sys.argv[1]):
    sys.path.insert(0, folder)
    import train
    train.main(flags)
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder + "/"):
            del sys.modules[name]
"""
STEP = [*SHORT, "--steps", "1", "--checkpoint_every", "0", "--questions", "4"]
WIDE = [*STEP, "--questions", "12", "--max_new_tokens", "80"]
INVERSE = ["--mitigation", "inverse_logprob", "--rescale", "none"]
MINE = ["--mitigation", "my_idea"]
ENDS = """
@mitigation
def ends(rollouts):
    '''Weight at the end tokens alone.'''
    return (rollouts.kind == 6).float()
"""
RUNS = {  # by name: the exercise whose changes are made, flags
    "plain": ("", STEP),
    "inverse": ("", [*STEP, *INVERSE]),
    "as published": ("", [*STEP, "--mitigation", "inverse_logprob_as_published"]),
    "entropy weighted": ("", [*STEP, "--mitigation", "entropy_weighted"]),
    "two answers": ("", [*WIDE, "--answers", "2"]),
    "four answers": ("", [*WIDE, "--answers", "4"]),
    "no mean": ("1", STEP),
    "own N": ("2", STEP),
    "own N in parts": ("2", [*STEP, "--micro_batch", "4"]),
    "ends alone": ("", [*STEP, "--mitigation", "ends"]),
    "no end": ("3", [*STEP, "--mitigation", "ends"]),
    "no detach": ("4", [*STEP, *INVERSE]),
    "temperature": ("5", STEP),
    "format alone": ("6", [*WIDE, "--answers", "2"]),
    "own weighting": ("7", [*STEP, *MINE]),
    "placebo": ("7", [*STEP, *MINE, "--placebo", "weights"]),
}


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
        with open(copy / "mitigations.py", "a") as source:
            source.write(ENDS)
    commands = [[str(place / f"copy {exercise}"), [*flags, "--out", str(place / name)]]
                for name, (exercise, flags) in RUNS.items()]
    program(place, "-c", TRAIN, json.dumps(commands))
    return {name: (lines(place / name / "metrics.jsonl")[0],
                   arrays(place / name / "credit/step_000001.npz")) for name in RUNS}


def test_the_page_has_eight_exercises_each_with_what_to_see():
    assert sorted(SECTIONS) == list("12345678")
    for number, text in SECTIONS.items():
        assert "```bash" in text and "<details>" in text, number
        assert number == "8" or changes(number), number


def test_without_the_mean_every_answer_is_reinforced(made):
    (before, plain), (after, changed) = made["plain"], made["no mean"]
    assert (plain["advantage"] < 0).any() and (changed["advantage"] >= 0).all()
    assert after["loss"] > 2 * abs(before["loss"])  # no answer's log p counts the other way


def test_with_an_n_of_its_own_each_micro_batch_counts_whole(made):
    whole, parts = (made[name][0]["gradient_norm"] for name in ("own N", "own N in parts"))
    assert parts > 1.5 * whole


def test_without_the_end_token_nothing_teaches_to_stop(made):
    """All weight lies on the end tokens."""
    assert made["ends alone"][0]["gradient_norm"] > 0
    assert made["no end"][0]["skipped"] == "no token has both a weight and an advantage"


def test_without_detach_the_loss_is_the_same_and_its_gradient_is_not(made):
    described, changed, published = (
        made[name][0] for name in ("inverse", "no detach", "as published"))
    assert changed["loss"] == pytest.approx(described["loss"], rel=1e-3, abs=1e-5)
    assert changed["gradient_norm"] < 0.5 * described["gradient_norm"]
    assert changed["gradient_norm"] == pytest.approx(published["gradient_norm"], rel=1e-2)


def test_another_temperature_in_training_shows_in_the_gap_alone(made):
    before, after = made["plain"][0], made["temperature"][0]
    assert before["sampler_gap"] < 1e-4 and after["sampler_gap"] > 1e-2
    assert after["reward"] == before["reward"] and after["entropy"] == before["entropy"]


def test_format_alone_leaves_nothing_to_compare(made):
    before, after = made["two answers"][0], made["format alone"][0]
    assert after["reward"] == after["reward_format"] and before["reward"] != before["reward_format"]
    assert after["groups_without_spread"] > before["groups_without_spread"]


def test_a_placebo_gives_the_same_weights_to_other_tokens(made):
    mine, placebo, known = (
        made[name][1] for name in ("own weighting", "placebo", "entropy weighted"))
    assert np.sort(placebo["weight"]) == pytest.approx(np.sort(mine["weight"]), rel=1e-4)
    likeness = [np.corrcoef(run["weight"], run["entropy"])[0, 1] for run in (mine, placebo)]
    assert likeness[0] > 0.8 and abs(likeness[1]) < 0.4
    assert mine["weight"] == pytest.approx(known["weight"], rel=1e-3)


def test_with_twice_the_answers_fewer_groups_have_nothing_to_compare(made):
    two, four = made["two answers"][0], made["four answers"][0]
    assert four["groups_without_spread"] < two["groups_without_spread"]
    assert four["tokens"] == pytest.approx(2 * two["tokens"], rel=0.25)
