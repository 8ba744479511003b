"""What analysis refuses of a run folder: settings, lines and folders that no run has."""
import json
import os

import numpy as np
import pytest
from conftest import credit_columns, write_log
from logs import random_log, tallied, write_run
from tokenizers import Tokenizer

import analyze
from analysis.arms import Comparison
from analysis.runs import read_run, read_runs
from analysis.tally import describe
from analysis.vocabulary import Vocabulary
from harness.credit_file import credit_path
from engine.errors import UserError


def refusal(read, *arguments):
    with pytest.raises(UserError) as error:
        read(*arguments)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


def lines_of(run, name):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def write_lines(run, name, lines):
    (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed_line(run, name, number, **changed):
    lines = lines_of(run, name)
    lines[number - 1].update(changed)
    write_lines(run, name, lines)


HUGE, INF, NAN = 10 ** 400, float("inf"), float("nan")


def what_is_wrong(key, value):
    """NaN and infinity are refused as JSON already."""
    is_json = not any(word in json.dumps(value) for word in ("NaN", "Infinity"))
    return f"is not of this program: its {key} is " if is_json else "is not JSON"


@pytest.mark.parametrize("key, value", [
    *[("step", value) for value in (-1, 1.0, "1\n", True, None, HUGE, 2 ** 31)],
    *[("success", value) for value in (1.01, -0.01, NAN, INF, HUGE, True, "0.5", None, [0.5])],
    *[("entropy", value) for value in (INF, NAN, HUGE, 1e39, "x", [], True)],
    *[("gradient_norm", value) for value in (INF, NAN, HUGE, 1e39, "x", {})],
    *[("length", value) for value in (NAN, "9", HUGE)],
    *[("a_number_of_my_own", value) for value in (INF, NAN, HUGE)]])
def test_values_that_no_line_of_metrics_has(tmp_path, key, value):
    run = write_run(tmp_path / "run", 0.5)
    changed_line(run, "metrics", 3, **{key: value})
    said = refusal(read_run, run)
    assert f"metrics.jsonl, line 3 {what_is_wrong(key, value)}" in said


@pytest.mark.parametrize("key, value", [
    *[("step", value) for value in (-1, 1.0, "1", False, None, HUGE)],
    *[("mode", value) for value in ("other", 1, None, [])],
    *[("success", value) for value in (1.01, NAN, HUGE, True)],
    *[("success_low", value) for value in (-0.1, "x", None, NAN)],
    *[("success_high", value) for value in (1.1, "x", None, INF)],
    *[("answer", value) for value in ("1010", {"0": 1}, [0, 2], [0, True], [0, "1"], [0.5], [NAN])],
    *[(f"{name}_mean", value) for name in ("format", "finished", "length")
      for value in (None, "x", NAN)]])
def test_values_that_no_line_of_evaluations_has(tmp_path, key, value):
    run = write_run(tmp_path / "run", 0.5)
    changed_line(run, "evaluations", 2, **{key: value})
    said = refusal(read_run, run)
    assert f"evaluations.jsonl, line 2 {what_is_wrong(key, value)}" in said


def test_what_a_line_may_lack_and_what_not(tmp_path):
    run = write_run(tmp_path / "run", 0.5)
    changed_line(run, "metrics", 3, entropy=None, gradient_norm=None, note="text", more=[1, None])
    assert read_run(run)["metrics"][2]["note"] == "text"
    for name, key in (("evaluations", "format_mean"), ("metrics", "entropy")):
        lines = lines_of(run, name)
        del lines[1][key]
        write_lines(run, name, lines)
        said = f"{name}.jsonl, line 2 is not of this program: its {key} is None"
        assert said in refusal(read_run, run)


@pytest.mark.parametrize("order, said", [
    ([1, 1, 2, 3], "line 2 is step 1"), ([1, 3, 2], "line 2 is step 3"),
    ([2, 3, 4], "line 1 is step 2"), ([1, 2, 4], "line 3 is step 4"),
    ([0, 1, 2], "line 1 is step 0")])
def test_metrics_have_one_line_a_step_in_order(tmp_path, order, said):
    run = write_run(tmp_path / "run", 0.5)
    line = lines_of(run, "metrics")[0]
    write_lines(run, "metrics", [{**line, "step": step} for step in order])
    said = f"metrics.jsonl, {said}: lines are missing, doubled or out of order"
    assert said in refusal(read_run, run)


@pytest.mark.parametrize("lines", (1, 2, 3, 4))
def test_lines_that_are_missing_at_the_end_of_metrics_are_noticed(tmp_path, lines):
    """A credit file is written before its line, so there may be one more."""
    run, _ = random_log(tmp_path / "run", steps=4)
    write_lines(run, "metrics", [{"step": step, "success": 0.5, "entropy": 1.0}
                                 for step in range(1, lines + 1)])
    if lines >= 3:
        assert len(read_run(run)["metrics"]) == lines
    else:
        assert f"has {lines} lines, while there are files from after step 3" in refusal(
            read_run, run)


def test_a_training_run_has_metrics_beside_its_credit_files(tmp_path):
    run, _ = random_log(tmp_path / "probe", steps=2, eval_every=1)
    write_lines(run, "metrics", [])
    assert read_run(run)["steps"] == [1, 2]
    write_lines(run, "metrics", [{"step": 1, "success": 0.5, "entropy": 1.0}])
    assert read_run(run)["evaluations"] == []
    run, _ = random_log(tmp_path / "one", steps=1, ranks=1)
    assert read_run(run)["steps"] == [1]
    run, _ = random_log(tmp_path / "two", steps=2, ranks=1)
    assert "metrics.jsonl has 0 lines, while there are files from after step 1" in refusal(
        read_run, run)


@pytest.mark.parametrize("lost", ([0], [1], [2], [3], range(6)))
def test_an_evaluation_that_is_lost_is_noticed(tmp_path, lost):
    """Ten steps: evaluations at 0 and 5 have to be there, the last can still be made."""
    run = write_run(tmp_path / "run", 0.5, ranks=1, eval_every=5)
    start = lines_of(run, "evaluations")[0]
    lines = [{**start, "step": step, "mode": mode}
             for step in (0, 5, 10) for mode in ("sampled", "greedy")]
    write_lines(run, "evaluations", lines[:4])
    read_run(run)
    step, mode = lines[lost[0]]["step"], lines[lost[0]]["mode"]
    write_lines(run, "evaluations", [line for i, line in enumerate(lines) if i not in lost])
    said = refusal(read_run, run)
    assert f"evaluations.jsonl has lost the {mode} evaluation at step {step}" in said
    changed_config(run, eval_every=0)
    read_run(run)


def test_steps_without_a_credit_file_are_counted(tmp_path):
    run, _ = random_log(tmp_path / "run", steps=4)
    write_lines(run, "metrics", [{"step": step, "success": 0.5, "entropy": 1.0}
                                 for step in range(1, 5)])
    assert "no credit file" not in describe(read_run(run), tallied(run))
    for step, missing in ((4, 1), (1, 2), (2, 3)):
        credit_path(run, step).unlink()
        assert f"({missing} steps have no credit file)" in describe(read_run(run), tallied(run))


@pytest.mark.parametrize("order, said", [
    ([0, 1, 2, 3, 3], "line 5 is the second greedy evaluation at step 10"),
    ([0, 0, 1], "line 2 is the second sampled evaluation at step 0"),
    ([2, 3, 0, 1], "line 3 is step 0, after step 10"), ([0, 2, 1, 3], "line 3 is step 0, after")])
def test_evaluations_are_made_once_and_in_order(tmp_path, order, said):
    run = write_run(tmp_path / "run", 0.5)
    lines = lines_of(run, "evaluations")
    write_lines(run, "evaluations", [lines[place] for place in order])
    assert f"evaluations.jsonl, {said}" in refusal(read_run, run)


def test_success_is_that_of_the_answers_and_lies_in_its_interval(tmp_path):
    run = write_run(tmp_path / "run", 0.5)
    changed_line(run, "evaluations", 1, success=0.26)
    assert "line 1 has the success 0.26, but its answers have 0.25" in refusal(read_run, run)
    for low, high in ((0.26, 0.5), (0.1, 0.24), (0.5, 0.1)):
        changed_line(run, "evaluations", 1, success=0.25, success_low=low, success_high=high)
        assert "line 1 has the success 0.25, outside of its interval" in refusal(read_run, run)
    changed_line(run, "evaluations", 1, success_low=0.25 + 1e-12, success_high=0.25)
    read_run(run)


def changed_config(run, **changed):
    path = run / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("name, value", [
    *[("mitigation", value) for value in (3, None, [], {}, "")],
    *[("advantage", value) for value in ([], None)],
    *[("steps", value) for value in (INF, NAN, 1.5, True, -1, "9", None, HUGE)],
    *[("seed", value) for value in ("x", -1, HUGE, None)],
    *[("temperature", value) for value in ("x", 0, NAN, INF, HUGE, [1.0])],
    *[("model", value) for value in (3, None, "")],
    *[("questions", value) for value in (0, "8")], ("task", 5), ("kl", "x"), ("loss", "x" * 5000),
    ("min_number", []), ("gamma", "x"), ("reward", 3), ("reward", ["x"])])
def test_settings_that_no_run_has(tmp_path, name, value):
    run = write_run(tmp_path / "run", 0.5)
    changed_config(run, **{name: value})
    said = refusal(read_run, run)
    if what_is_wrong(name, value) == "is not JSON":
        assert said.startswith(f"{run}/config.json is not JSON")
    else:
        assert said.startswith(f"{run}/config.json: ") and name in said


def test_a_weighting_that_was_deleted_since_can_still_be_looked_at(tmp_path):
    run = write_run(tmp_path / "run", 0.5)
    changed_config(run, mitigation="gone", advantage="gone_too")
    assert read_run(run)["config"]["mitigation"] == "gone"


@pytest.mark.parametrize("name", ("model", "rescale", "forgotten", "reward"))
@pytest.mark.parametrize("value", ("a\0b", "\ud800", "a\nb"))
def test_texts_that_cannot_be_shown(tmp_path, name, value):
    run = write_run(tmp_path / "run", 0.5)
    changed_config(run, **{name: value})
    assert refusal(read_run, run) == (f"{run}/config.json: {name!r} has characters that cannot be "
                                      f"shown: {value!r}")
    changed_config(run, **{name: "none", value: "x"})
    assert "has characters that cannot be shown" in refusal(read_run, run)


@pytest.mark.parametrize("name", ("steps", "seed", "model"))
def test_settings_that_every_run_has(tmp_path, name):
    run = write_run(tmp_path / "run", 0.5)
    config = json.loads((run / "config.json").read_text())
    del config[name]
    (run / "config.json").write_text(json.dumps(config))
    assert refusal(read_run, run) == f"{run}/config.json says nothing of {name}"


def test_a_run_whose_task_is_gone_and_settings_of_older_versions_are_read(tmp_path):
    for number, task in enumerate(("my_task", "a" * 5000)):
        run = write_run(tmp_path / str(number), 0.5, task=task, forgotten=[1], min_number="any")
        Comparison([read_run(run)], None)


def test_arms_that_would_have_one_name_are_named(tmp_path):
    runs = [read_run(write_run(tmp_path / name, 0.5, forgotten=value))
            for name, value in (("a", 1), ("b", "1"))]
    said = refusal(Comparison, runs, None)
    assert f"{tmp_path}/a and {tmp_path}/b have different settings" in said
    assert "none forgotten 1" in said


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
    assert refusal(read_runs, ["a" * 300]) == f"{'a' * 300} does not exist"
    run, ask = write_run(tmp_path / "run", 0.5), os.stat

    def no_permission(path, **more):
        if str(path).startswith(f"{run}/"):
            raise PermissionError(13, "Permission denied")
        return ask(path, **more)
    monkeypatch.setattr(os, "stat", no_permission)
    assert refusal(read_runs, [str(run)]) == f"cannot read {run}/config.json: Permission denied"


def test_a_name_that_no_page_can_say_is_refused(tmp_path):
    run = write_run(tmp_path / os.fsdecode(b"run\xff"), 0.5)
    assert refusal(read_runs, [str(run)]).endswith("run\\udcff' is not UTF-8: give it another")


def test_a_loop_of_links_is_said(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot read" in refusal(read_runs, [str(tmp_path / "loop")])


@pytest.mark.parametrize("step", ("0", "-1", "4", "9" * 30, "9" * 5000))
def test_steps_that_are_not_there(tmp_path, step):
    run, _ = random_log(tmp_path / "run")
    with pytest.raises(UserError, match="--steps"):
        analyze.main([str(run), "--steps", step])


def test_token_ids_of_another_tokenizer_are_refused_before_there_is_room_for_them(tmp_path):
    """Of the 211 tokens of the tokenizer; embeddings are padded, so a few more are fine."""
    columns = credit_columns([2, 2], [0, 0], token_id=[1, 2, 3, 4000])
    run = write_log(tmp_path / "run", {1: columns})
    tallied(run)
    vocabulary = Vocabulary(Tokenizer.from_file(str(run / "tokenizer.json")))
    said = refusal(vocabulary.classes, np.array([3, 2 ** 24]))
    assert "the token_id 16777216, and the run's tokenizer.json 211 tokens" in said
    assert len(vocabulary.class_of) == 0
