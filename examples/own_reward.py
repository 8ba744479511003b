"""A reward of your own: 1 for an answer that divides, whether or not it makes the target.

    python -m lab train --task examples.own_reward --questions 8 --answers 8 --steps 30 \\
        --eval_tasks 500

    numbers 3 12 7, target 11    the problems are those of Countdown, and an answer may be
    " first try 12 / 3 = 4, 4 + 7 = 11 yes!</think>\\n<answer> ( 12 / 3 ) + 7</answer>"    -> 1.0

For one of your own copy this file to my_task.py beside train.py, change what is rewarded, and train
with --task my_task. How to bring problems of your own as well is in
docs/reference/your_own_task.md.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab train --task examples.own_reward")
from countdown_task import Problem


def reward(problem: Problem, text: str) -> float:
    """Any number for an answer. `problem` has numbers and a target."""
    expression = text.partition("<answer>")[2].partition("</answer>")[0]
    return 1.0 if "/" in expression else 0.0
