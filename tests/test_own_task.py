"""A task of one's own, in a file of its own: nothing but its class Task is asked for."""
import json

import numpy as np
import pytest

import train
from conftest import refusal
from runs import SHORT, copy_project, lines, program

TASK = '''
"""Write the number that follows. Nothing here comes from Countdown."""
import random
from dataclasses import dataclass

from harness.flags import option


@dataclass(frozen=True)
class Question:
    start: int


@dataclass
class Task:
    top: int = option(50, "largest number", least=2, most=140)
    reward = "next number"

    def training_problems(self, seed, step, count):
        rng = random.Random(f"{seed} {step}")
        return [Question(2 * rng.randint(1, self.top // 2)) for _ in range(count)]

    def held_out_problems(self, count):
        return [Question(start) for start in range(1, self.top, 2)][:count]

    def extreme_problems(self):
        return [Question(self.top)]

    def prompt_for(self, problem):
        return f"<|im_start|>user\\n {problem.start}<|im_end|>\\n<|im_start|>assistant\\n"

    def show(self, problem):
        return f"after {problem.start}"

    def score(self, problem, text):
        right = float(f" {problem.start + 1} " in text)
        short = 1 / (1 + len(text))
        return {"reward": right + short, "format": short, "answer": right, "reasoning": 0.5}

    def label(self, pieces):
        """The second half is the answer; the kind is the length of the token, up to 6."""
        half = len(pieces) // 2
        sections = [1 if place < half else 2 for place in range(len(pieces))]
        return sections, [min(len(piece), 6) for piece in pieces]
'''

RUN = """
import json, sys
import train
from tools import preview

short = json.loads(sys.argv[1])
train.main([*short, "--task", "my_task", "--top", "20", "--steps", "1", "--out", "runs/mine"])
train.main(["--resume", "runs/mine", "--steps", "2"])
preview.main(["runs/mine", "--mitigation", "outcome_conditional", "--show", "1"])
"""


def test_a_task_that_shares_nothing_with_countdown_trains(tmp_path):
    folder = copy_project(tmp_path)
    (folder / "my_task.py").write_text(TASK)
    short = [*SHORT, "--max_new_tokens", "16", "--eval_every", "1", "--eval_tasks", "4"]
    printed = program(folder, "-c", RUN, json.dumps(short))
    assert "after 1: " in printed and "; outcome_conditional" in printed and "\nanswer " in printed
    run = folder / "runs/mine"
    config = json.loads((run / "config.json").read_text())
    assert (config["task"], config["top"], config["reward"]) == ("my_task", 20, "next number")
    assert "max_target" not in config
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [1, 2]
    assert all(line["trained_tokens"] > 0 for line in lines(run / "metrics.jsonl"))
    assert len(lines(run / "evaluations.jsonl")[0]["answer"]) == 4
    with np.load(run / "credit/step_000002.npz") as credit:
        np.testing.assert_allclose(credit["reward"],
                                   credit["reward_format"] + credit["reward_answer"])
        assert (credit["reward_reasoning"] == 0.5).all()
        first = credit["episode_start"][1]
        assert credit["section"][:first].tolist() == [1] * (first // 2) + [2] * (first - first // 2)
        assert set(credit["kind"]) <= set(range(1, 7)) and len(set(credit["kind"])) > 1


@pytest.mark.parametrize("name, words", [
    ("my_tsk", "there is no such module"),
    ("../my_task", "there is no such module"),
    ("tools/largest_last.py", "the file tools/my_task.py is the module tools.my_task"),
    ("harness.files", "this module has neither `problems` and"),
])
def test_a_module_that_is_no_task_is_named(name, words):
    assert words in refusal(train.main, ["--task", name])
