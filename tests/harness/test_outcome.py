"""What a run shows on its way and says at its end."""
import io
import math
from pathlib import Path

import pytest
import torch

from conftest import hand_made
from harness import progress
from harness.metrics import batch_metrics
from harness.screen import Visible

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


def evaluation(mode, success, answer):
    return {"mode": mode, "success": success, "success_low": success - 0.1,
            "success_high": success + 0.1, "answer": answer}


@pytest.mark.parametrize("answers, success", [([1.0, 0.0], 0.5), ([1.7, 0.0], math.nan)])
def test_success_is_known_where_answers_are_right_or_wrong(answers, success):
    """TRL's reward functions have any name, `answer` among them, and any value."""
    scores = {"reward": torch.zeros(2), "answer": torch.tensor(answers)}
    known = batch_metrics(hand_made([[True], [True]], scores=scores))
    assert known["success"] == pytest.approx(success, nan_ok=True)


BEFORE = [evaluation("sampled", 0.2, [0, 0, 0]), evaluation("greedy", 0.3, [1, 0, 0])]
AFTER = [evaluation("sampled", 0.5, [0, 1, 0]), evaluation("greedy", 0.6, [0, 1, 1])]


@pytest.mark.parametrize("evaluations, told", [
    (BEFORE, "3 min 52 s"),  # without two evaluations, the time alone
    (BEFORE + AFTER, "20.0% (95% interval 10.0% to 30.0%) -> 50.0% (40.0% to 60.0%) of 3 held-out "
     "problems, 3 min 52 s")])
def test_the_end_tells_what_changed(capsys, evaluations, told):
    progress.tell_outcome(Path("runs/x"), evaluations, 232.0, 0)
    printed = capsys.readouterr().out
    assert printed.startswith(f"  {told}\n")
    assert "\n  python analyze.py runs/x\n  python -m tools.follow runs/x\n" in printed
