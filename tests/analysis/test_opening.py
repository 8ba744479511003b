"""What a run did, in sentences: each figure by hand."""

from conftest import evaluation

from analysis.report import about, compared, opening
from engine.choices import MITIGATIONS


def run_of(steps_done, evaluations=(), steps=30):
    """Every answer finished but in the first step."""
    metrics = [{"step": i, "success": 0.1, "finished": 0.7 if i == 1 else 1.0}
               for i in range(1, steps_done + 1)]
    return {"config": {"steps": steps, "max_new_tokens": 64}, "steps": [1], "metrics": metrics,
            "evaluations": list(evaluations)}


def test_from_the_first_evaluation_to_the_last():
    lines = [evaluation(0, [0, 0, 0, 1]), evaluation(15, [1, 1, 1, 1]),
             {**evaluation(30, [0, 1, 1, 1]), "success_low": 0.3, "success_high": 0.954}]
    assert opening(run_of(30, lines)) == [
        "With sampled answers it solved 25.0% of 4 held-out problems before training, and 75.0% "
        "after 30 steps (95% interval 30.0% to 95.4%).",
        "25.0% of the held-out answers after 30 steps and 1.0% of all training answers were cut "
        "off by the limit of 64 tokens."]


def test_a_run_that_has_less_says_so():
    assert "not finished: step 15 of 30 so far" in opening(run_of(15))[0]
    assert opening({**run_of(0, steps=0), "steps": []}) == [
        "It was not evaluated on held-out problems.",
        "There are no credit files, so nothing is known of single tokens."]


def test_one_sentence_says_the_task_what_solved_means_and_the_method(monkeypatch):
    def idea(tokens):
        """Weight 1.5 for
        some. What follows is not said."""

    monkeypatch.setitem(MITIGATIONS, "idea", idea)
    text = about({"config": {"mitigation": "none", "task": "countdown_task"}})
    assert text.startswith("Task countdown_task: a problem is solved if the expression in <answer>")
    assert text.endswith("; the method is plain GRPO.")
    changed = {"mitigation": "idea", "advantage": "of_yesterday", "loss": "policy",
               "task": "not.there.any.more"}
    assert about({"config": changed}) == (
        "Task not.there.any.more: a problem is solved if the score that its task calls answer is "
        "1; the method is plain GRPO but for the weighting idea (Weight 1.5 for some) and the "
        "advantage of_yesterday.")


def test_a_comparison_names_its_task_and_its_problems():
    runs = [{"config": {"model": "models/tiny", "steps": 20, "task": "countdown_task"},
             "evaluations": [evaluation(0, [0, 1])]}] * 3
    text = compared(runs)
    assert text.startswith("3 runs of models/tiny, 20 steps. Task countdown_task: a problem is")
    assert "on the same 2 problems" in text
    runs[0]["evaluations"].clear()
    assert "not evaluated" in compared(runs)
