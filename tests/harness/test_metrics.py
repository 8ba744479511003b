"""Every line of metrics.jsonl has the names of one list, and the page lists the same; what the
lines of a run that does not learn make it say."""
import math
import re

import pytest

from conftest import ROOT
from countdown_task import Task
from harness.metrics import METRICS, Watch
from runs import SHORT, lines, run

PARTS = {"reward_format", "reward_answer", "reward_reasoning"}
NOTHING_LEFT = "--max_new_tokens 1 --drop_unfinished"


@pytest.mark.parametrize("flags, own, is_skipped", [
    ("--steps 3 --change_every 3", set(), False),  # step 2 measures no change
    ("--steps 1 --kl 0.1 --epochs 2", set(), False),
    (f"--steps 1 {NOTHING_LEFT}", set(), True),
    (f"--steps 1 --epochs 2 --mitigation lambda_grpo {NOTHING_LEFT}", {"lambda"}, True),
    (f"--steps 1 --mitigation learned_importance {NOTHING_LEFT}", {"importance_loss"}, True),
    ("--steps 1 --loss dpo --max_new_tokens 1", {"dpo_loss", "pairs", "pairs_in_order"}, True)])
def test_every_line_has_the_same_names(tmp_path, flags, own, is_skipped):
    """In any run, in steps that are skipped too; what is undefined there is null."""
    run(*SHORT, *flags.split(), "--out", tmp_path / "x")
    for line in lines(tmp_path / "x/metrics.jsonl"):
        assert line.keys() == METRICS.keys() | PARTS | own
        assert bool(line["skipped"]) == is_skipped
        undefined = {name for name, value in line.items() if value is None}
        assert not is_skipped or {"kl", "ratio_mean", "gradient_norm", "change_correlation",
                                  "sampler_gap"} <= undefined
        assert undefined.isdisjoint({"kl", "ratio_mean"}) == ("--kl" in flags)
        if "--kl" in flags:  # with these flags all that is listed is computed
            assert undefined == {"weight_note", "skipped"}


def test_the_page_lists_the_metrics():
    page = (ROOT / "docs/what_a_run_leaves.md").read_text("utf-8")
    section = page.partition("## The metrics of a step")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))
    assert rows == METRICS


def step(success, entropy=0.4, spread=1.0, skipped="equal rewards"):
    """What a line of metrics.jsonl has of what advice depends on; spread as groups without it."""
    return {"success": success, "entropy": entropy, "groups_without_spread": spread,
            "skipped": skipped}


def told(steps):
    """(number of the step, words of its advice that name the reason), of the steps with advice."""
    watch, found = Watch(), []
    for number, line in enumerate(steps, 1):
        advice = watch.advice(line)
        names = ("right so far", "every answer was right", "or more --answers",
                 "no longer tries other")
        reasons = [words for words in names if words in advice]
        if advice:
            found.append((number, *reasons))
    return found


WORKS = step(0.3, spread=0.5, skipped=None)


@pytest.mark.parametrize("steps, expected", [
    ([step(0.0)] * 9, []),
    ([step(0.0)] * 40, [(10, "right so far")]),
    ([step(0.0)] * 9 + [step(0.0, spread=0.9)] + [step(0.0)] * 10, [(20, "right so far")]),
    ([WORKS] + [step(1.0)] * 40, [(11, "every answer was right")]),
    ([step(1.0)] * 9 + [step(0.9)] + [step(1.0)] * 9, [(10, "or more --answers")]),
    ([step(0.0)] * 10 + [WORKS] + [step(1.0)] * 10,
     [(10, "right so far"), (21, "every answer was right")]),
    ([WORKS] + [step(0.0)] * 30, [(11, "or more --answers")]),  # some were right once
    ([step(0.5)] * 30, [(10, "or more --answers")]),
    ([step(0.5, skipped=None)] * 30, []),  # a critic learns from it
    ([step(0.5, skipped=None)] * 5 + [step(1.0, skipped=None)] * 10,
     [(15, "every answer was right")]),  # of a longer row the last ten count
    ([step(math.nan)] * 30, [(10, "or more --answers")]),  # a reward that is not right or wrong
    ([step(None)] * 30, [(10, "or more --answers")])])  # and as it is read back
def test_a_run_without_spread_says_so_once(steps, expected):
    assert told(steps) == expected


SURE = {"entropy": 0.004, "skipped": None}


@pytest.mark.parametrize("steps, expected", [
    ([WORKS] * 2 + [step(0.26, spread=0.875, **SURE)] * 14, [(7, "no longer tries other")]),
    ([WORKS] * 2 + [step(0.64, **SURE), step(0.0, **SURE)] * 3, [(7, "no longer tries other")]),
    ([WORKS] * 2 + [step(0.0, **SURE)] * 20, [(7, "no longer tries other")]),
    ([WORKS] * 2 + [step(0.26, entropy=0.011, skipped=None)] * 20, []),
    ([WORKS] * 2 + [step(0.26, spread=0.7, **SURE)] * 20, []),
    ([WORKS] * 2 + [step(0.9, spread=0.875, **SURE)] * 20, []),  # it has learned
    ([step(0.26, spread=0.875, **SURE)] * 20, [])])  # it was so before the first step
def test_success_that_falls_to_one_answer_is_told_once(steps, expected):
    assert told(steps) == expected


def test_advice_has_its_numbers():
    watch = Watch()
    for line in [WORKS] + [step(0.25, **SURE)] * 5:
        advice = watch.advice(line)
    assert "in the last 5 steps" in advice
    assert "(entropy 0.004), and 25% of the answers were right" in advice


@pytest.mark.parametrize("steps, evaluations, said", [
    ([step(0.0)], (0.0, 0.0), "no answer in training was right, either. What helps: solved"),
    ([WORKS], (0.0, 0.0), "but some answers in training were: with more --steps"),
    ([step(0.0)], (0.0, 0.1), ""), ([step(0.0)], (0.1, 0.0), "")])
def test_the_end_of_a_run_that_learned_nothing(steps, evaluations, said):
    watch = Watch()
    for line in steps:
        watch.advice(line)
    advice = watch.advice_at_end(*evaluations)
    assert said in advice and bool(said) == bool(advice)


def test_a_resumed_run_does_not_say_it_again(tmp_path, monkeypatch):
    """No answer is right. It is told at step 10 of 11, and not at step 21 again. The end says so
    each time."""
    score = Task.score
    monkeypatch.setattr(Task, "score", lambda *args: dict.fromkeys(score(*args), 0.0))
    flags = [*SHORT, "--eval_every", "100", "--eval_tasks", "4", "--change_every", "0",
             "--max_new_tokens", "8"]
    first = run(*flags, "--steps", "11", "--checkpoint_every", "11", "--out", tmp_path / "x").stdout
    second = run("--resume", tmp_path / "x", "--steps", "21").stdout
    assert first.count("in the last 10 steps") == 1
    assert "continuing after step 11" in second and "in the last 10 steps" not in second
    for printed in (first, second):
        assert printed.count("no answer in training was right, either") == 1
