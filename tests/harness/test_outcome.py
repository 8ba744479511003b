"""What a run shows on its way and says at its end."""
import io
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import progress
from harness.run import NEVER_RIGHT, Run
from harness.progress import Visible

LINE = {"seconds": 1.0, "gradient_norm": 1.0, "reward": 0.1, "reward_format": 1.0, "length": 9.0,
        "finished": 1.0, "entropy": 0.3, "tokens": 90, "skipped": ""}


@pytest.mark.parametrize("values, shown", [
    ([0.25], "▁ 25% to 25%"), ([0.0, 0.5, 1.0], "▁▅█ 0% to 100%"),
    ([0.0, 0.2, 0.3, 0.5, 0.9, 0.9], "▁▄█ 10% to 90%")])  # neighbours share a bar
def test_a_sparkline_goes_from_its_lowest_to_its_highest(values, shown):
    assert progress.sparkline(values, 3) == shown


def test_problems_whose_words_repeat_are_shown_last():
    assert progress.most_varied(["11 11 11", "3 5 3", "1 2 3", "4 4 5", "6 7 8"]) == [2, 4, 1]
    assert progress.most_varied(["a a"]) == [0]


@pytest.mark.parametrize("right, told", [([0] * 9, 1), ([0] * 4 + [0.1] + [0] * 4, 0)])
def test_a_model_that_never_finds_a_right_answer_is_told_once(right, told, capsys):
    run = SimpleNamespace(settings=SimpleNamespace(steps=9), seconds=deque(), success=[], done=0,
                          append=lambda *_: None)
    for step, success in enumerate(right, 1):
        Run.log(run, {**LINE, "step": step, "success": success})
    printed = capsys.readouterr().out
    assert printed.count("so there is none to learn from") == told
    assert f"of {NEVER_RIGHT} steps" in printed or not told


def test_an_answer_is_marked_and_cannot_colour_itself(monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr("sys.stdout", Visible(printed))
    monkeypatch.setattr("harness.progress.has_colour", lambda: True)
    line = {**evaluation("sampled", 0.5, [1, 0]), "format_mean": 1.0, "length_mean": 9.0,
            "finished_mean": 1.0, "shown": [{"problem": "3 5", "text": "\x1b[2J", "answer": 1},
                                            {"problem": "4 6", "text": "x " * 500, "answer": 0}]}
    progress.print_evaluation(line, 1.0)
    _, right, wrong = printed.getvalue().splitlines()
    assert right == "  \033[1;32mright\033[0m  3 5: \\x1b[2J"
    assert wrong.startswith("  \033[1;31mwrong\033[0m  4 6: x") and wrong.endswith("x ...")
    assert len(wrong) < 400


@pytest.fixture
def ended(monkeypatch, capsys):
    """What is said at the end of a run with these evaluations."""
    def say_of(evaluations, **settings):
        task = SimpleNamespace(show=lambda problem: f"{problem} make 9", read=None,
                               held_out_problems=lambda count: ["1 2", "3 4", "5 6"])
        run = SimpleNamespace(
            folder=SimpleNamespace(path=Path("runs/x")), done=0, start=0.0,
            settings=SimpleNamespace(eval_every=5, eval_tasks=3, checkpoint_every=5, **settings),
            policy=SimpleNamespace(task=task))
        monkeypatch.setattr(progress, "read_lines", lambda path: evaluations)
        monkeypatch.setattr(progress.time, "monotonic", lambda: 232.0)
        progress.tell_outcome(run)
        return capsys.readouterr().out
    return say_of


def evaluation(mode, success, answer):
    return {"mode": mode, "success": success, "success_low": success - 0.1,
            "success_high": success + 0.1, "answer": answer}


def test_the_end_tells_what_changed_and_the_first_problem_that_turned(ended):
    printed = ended([evaluation("sampled", 0.2, [0, 0, 0]), evaluation("greedy", 0.3, [1, 0, 0]),
                     evaluation("sampled", 0.5, [0, 1, 0]), evaluation("greedy", 0.6, [0, 1, 1])])
    assert ("20.0% (95% interval 10.0% to 30.0%) -> 50.0% (40.0% to 60.0%) of 3 held-out "
            "problems, 3 min 52 s\n") in printed
    assert "\n  python analyze.py runs/x\n  python -m tools.follow runs/x\n" in printed
    assert "(2 did, 1 the other way)" in printed
    assert printed.endswith("\n  python -m tools.sample runs/x 3 4 make 9 --greedy\n")


def test_a_run_without_two_evaluations_tells_its_time(ended):
    for evaluations in ([], [evaluation("sampled", 0.2, [0]), evaluation("greedy", 0.3, [1])]):
        printed = ended(evaluations)
        assert printed.startswith("  3 min 52 s\n") and "tools.sample" not in printed
