"""A tool for a real model: Countdown with a calculator that answers.

    python train.py --task examples.calculator --model models/Qwen2.5-Coder-0.5B-Instruct \\
        --config lab/recipes/laptop.json --lora 1
    python train.py --task examples.calculator --calculator no --model ...    # without the tool

    Make 22 from 3 and 5 and 7. -> "calculate 3 * 5", "15", "calculate 15 + 7", "22",
                                   "answer 3 * 5 + 7"

A turn that begins with *calculate* gets its result as the next turn of the user, up to four times.
Any other turn ends the answer. Four solved problems stand in the prompt, so that a model that has
never seen this game knows its form. Nothing that the model wrote is executed: `read_expression`
parses it, and carries out its operators one by one.

It takes its problems from Countdown, and is another example of a task in a class
(docs/reference/turns.md).
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --task examples.calculator --model FOLDER")
from dataclasses import dataclass
from typing import Any

from countdown_task import Problem, evaluates_to, read_expression
from lab import countdown
from lab.harness.flags import option

CALLS = 4
USER, MODEL, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
# what is asked, what the model calculates, and its answer
SOLVED = (("Make 22 from 3 and 5 and 7.", ("3 * 5", "15 + 7"), "3 * 5 + 7"),
          ("Make 19 from 25 and 6.", ("25 + 6", "25 - 6"), "25 - 6"),
          ("Make 5 from 4 and 8 and 3.", ("8 / 4", "2 + 3"), "8 / 4 + 3"),
          ("Make 144 from 18 and 8.", ("18 + 8", "18 * 8"), "18 * 8"))


@dataclass
class Task(countdown.Task):
    """Countdown's flags and problems, with other defaults, another prompt and an environment."""
    numbers: str = option("2", "how many numbers a problem has", choices=("2", "3", "4", "3,4"))
    min_number: int = option(2, "smallest number of a problem", least=1, most=99)
    max_number: int = option(30, "largest number of a problem", least=1, most=99)
    max_target: int = option(900, "largest target of a problem", least=1, most=10_000)
    calculator: str = option("yes", "no: the same problems, to be answered at once",
                             choices=("yes", "no"))

    has_format = False
    rewarded = "right"  # only runs with the same one are compared

    def prompt_for(self, problem: Problem) -> str:
        turns = []
        for asked, steps, answer in SOLVED:
            turns.append(f"{USER}{asked}{END}{MODEL}")
            for step in steps if self.calculator == "yes" else ():
                turns.append(f"calculate {step}{self.said(step)}")
            turns.append(f"answer {answer}{END}")
        numbers = " and ".join(map(str, problem.numbers))
        return "".join(turns) + f"{USER}Make {problem.target} from {numbers}.{END}{MODEL}"

    def said(self, expression: str) -> str:
        """The end of the model's turn, the result, and the beginning of its next turn."""
        value = read_expression(expression)
        return f"{END}{USER}{'no expression' if value is None else value}{END}{MODEL}"

    def reply(self, problem: Problem, turns: list[str]) -> str | None:
        asked, _, expression = turns[-1].strip().partition(" ")
        if self.calculator == "no" or asked != "calculate" or len(turns) > CALLS:
            return None
        return self.said(expression).removeprefix("<|im_end|>")

    def score(self, problem: Problem, turns: Any) -> dict[str, float]:
        asked, _, expression = turns[-1].strip().partition(" ")
        right = float(asked == "answer"
                      and evaluates_to(expression, problem.numbers, problem.target))
        return {"reward": right, "format": 0.0, "answer": right, "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:  # type: ignore[override]
        return [0] * len(pieces), [0] * len(pieces)
