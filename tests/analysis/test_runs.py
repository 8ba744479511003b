"""What analysis refuses of a run folder: settings, lines and folders that no run has."""
import json

import pytest
from conftest import cut, refusal, write_lines
from logs import random_log, write_run
from runs import edit_config, lines

from analysis.arms import Comparison
from analysis.runs import read_run

HUGE, INF, NAN = 10 ** 400, float("inf"), float("nan")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", 0.5)


def is_json(value):
    """NaN and infinity are refused as JSON already."""
    return not any(word in json.dumps(value) for word in ("NaN", "Infinity"))


@pytest.mark.parametrize("name, key, values", [
    ("metrics", "step", (-1, 1.0, "1", True, None, HUGE)),
    ("metrics", "success", (1.01, NAN, True, "x")),
    ("metrics", "finished", ("x", -5, True)), ("metrics", "weight_factor", ("x", -1.0)),
    ("metrics", "entropy", (INF, HUGE, 1e39, "x", [])), ("metrics", "skipped", (1, [])),
    ("metrics", "of_my_weighting", ([], {"a": 1}, 1e39)),
    ("evaluations", "mode", ("other", None)),
    ("evaluations", "success_low", (-0.1, "x", None)),
    ("evaluations", "answer", ("1010", {"0": 1}, [0, 2], [0, True], [-0.5])),
    ("evaluations", "shown", ("x", ["x"], [{"problem": "", "text": "", "answer": 2}])),
    ("evaluations", "length", ("x", ["x"])), ("evaluations", "format_mean", (None, "x"))])
def test_values_that_no_line_has(run, name, key, values):
    path = run / f"{name}.jsonl"
    first, second, *others = lines(path)
    for value in values:
        write_lines(path, [first, {**second, key: value}, *others])
        wrong = f"not of this program: its {key} is" if is_json(value) else "not JSON"
        assert f"{name}.jsonl, line 2 is {wrong}" in refusal(read_run, run)


@pytest.mark.parametrize("order, said", [
    ([1, 1, 2, 3], "line 2 is step 1"), ([1, 3, 2], "line 2 is step 3"),
    ([2, 3, 4], "line 1 is step 2"), ([0, 1, 2], "line 1 is step 0")])
def test_metrics_have_one_line_a_step_in_order(run, order, said):
    line = lines(run / "metrics.jsonl")[0]
    write_lines(run / "metrics.jsonl", [{**line, "step": step} for step in order])
    said = f"metrics.jsonl, {said}: lines are missing, doubled or out of order"
    assert said in refusal(read_run, run)


def test_credit_files_that_are_missing_are_said(tmp_path, capsys):
    """None at all is a choice: they are the largest part of a run."""
    run, _ = random_log(tmp_path / "run", steps=3)
    write_lines(run / "metrics.jsonl", [{"step": step, "success": 0.5} for step in (1, 2, 3)])
    for step, said in ((None, ""), (2, "lost the files of 1 steps, the first is step 2"),
                       (1, "lost the files of 2 steps, the first is step 1"), (3, "")):
        if step:
            (run / f"credit/step_{step:06d}.npz").unlink()
        read_run(run)
        shown = capsys.readouterr().err
        assert said in shown and bool(said) == bool(shown)


def test_lines_that_are_missing_at_the_end_of_metrics_are_noticed(tmp_path):
    """A credit file is written before its line, so there may be one more."""
    run, _ = random_log(tmp_path / "run", steps=4)
    write_lines(run / "metrics.jsonl", [{"step": step, "success": 0.5} for step in (1, 2, 3)])
    assert len(read_run(run)["metrics"]) == 3
    cut(run / "metrics.jsonl", 2)
    assert "has files from after step 3: lines are missing" in refusal(read_run, run)


@pytest.mark.parametrize("lost", ([0], [3], range(6)))
def test_an_evaluation_that_is_lost_is_noticed(tmp_path, lost):
    """Ten steps: evaluations at 0 and 5 have to be there, the last can still be made."""
    run = write_run(tmp_path / "run", 0.5, ranks=1, eval_every=5)
    path = run / "evaluations.jsonl"
    made = [{**lines(path)[0], "step": step, "mode": mode}
            for step in (0, 5, 10) for mode in ("sampled", "greedy")]
    write_lines(path, made[:4])
    read_run(run)
    step, mode = made[lost[0]]["step"], made[lost[0]]["mode"]
    write_lines(path, [line for i, line in enumerate(made) if i not in lost])
    assert f"has lost the {mode} evaluation at step {step}" in refusal(read_run, run)
    edit_config(run, eval_every=0)
    read_run(run)


def test_settings_that_every_run_has(run):
    for name in ("model", "seed", "steps"):
        edit_config(run, **{name: KeyError})
        assert refusal(read_run, run) == (
            f"{run}/config.json is not of this program: its {name} is missing")


def test_a_setting_of_another_type_is_named(run):
    for name, value in (("kl", "x"), ("loss_norm", "x"), ("drop_unfinished", 1), ("advantage", {})):
        edit_config(run, **{name: value})
        assert refusal(read_run, run).startswith(f"{run}/config.json: --{name} ")
        edit_config(run, **{name: KeyError})


def test_what_was_deleted_since_can_still_be_looked_at(run):
    for task in ("my_task", "a" * 5000):
        edit_config(run, mitigation="gone", advantage="gone_too", task=task, forgotten=[1],
                    min_number="any")
        assert list(Comparison([read_run(run)], None).arms) == ["gone"]
