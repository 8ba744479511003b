"""Sixty steps of a whole trainer: does it learn as much as this project does?

`TaskReward` is the reward function. It scores each answer by the task, and writes it into the
dummy's folder. Then the success of all answers is compared with that of twelve seeds of

    python train.py --questions 8 --answers 8 --steps 60 --eval_every 0 --learning_rate 2.5e-4

A trainer that does the same falls outside the interval once in twenty times. An untrained model has
a success of about 0.26, and with shuffled rewards it stays there.
"""
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from analysis.statistics import student_quantile
from countdown_task import Task
from engine.errors import PROJECT, UserError

STEPS, QUESTIONS, ANSWERS = 60, 8, 8
SUCCESS = (.3398, .3760, .3695, .3430, .3615, .3479, .3464, .3596, .3763, .3628, .3305, .3693)
SEEDS = "40 to 51"
PROBLEM_SEED = 90
SIXTY, RECORD = "sixty.jsonl", "sixty_answers.jsonl"
RECIPE = json.loads((PROJECT / "models/tiny/recipe.json").read_text(encoding="utf-8"))


def the_task() -> Task:
    """The task that models/tiny was made for."""
    names = ("prompt", "numbers", "min_number", "max_number", "max_target", "max_result")
    return Task(**{name: RECIPE[name] for name in names})


def write_folder(folder: Path, prompts_of_step: list[str]) -> None:
    """Write the model, the prompts of one step and those of sixty, in their order."""
    if folder.exists():
        raise UserError(f"{folder} exists already: name another folder")
    shutil.copytree(PROJECT / "models/tiny", folder / "model")
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts_of_step]
    (folder / "step.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    task, lines = the_task(), []
    for step in range(1, STEPS + 1):
        for problem in task.training_problems(PROBLEM_SEED, step, QUESTIONS):
            lines.append(json.dumps({"step": step, "prompt": task.prompt_for(problem),
                                     "numbers": problem.numbers, "target": problem.target}))
    (folder / SIXTY).write_text("\n".join(lines) + "\n", encoding="utf-8")


class TaskReward:
    """The reward function of sixty steps. With `shuffled`, each batch's rewards are exchanged at
    random, and what is written down is the success of the answers as they are."""

    __name__ = "TaskReward"  # trainers name a reward by it

    def __init__(self, folder: str | Path, shuffled: bool = False):
        self.folder, self.task, self.shuffled = Path(folder), the_task(), shuffled
        self.random = random.Random(0)
        self.problems = {}
        for problem in self.known_problems():
            self.problems[self.task.prompt_for(problem)] = problem

    def known_problems(self):
        for step in range(1, STEPS + 1):
            yield from self.task.training_problems(PROBLEM_SEED, step, QUESTIONS)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str],
                 **_: object) -> list[float]:
        rewards, lines = [], []
        for prompt, text in zip(prompts, completions):
            if prompt not in self.problems:
                raise UserError(f"the trainer asks for the reward of the prompt {prompt!r}, which "
                                f"is none of {SIXTY}: a template was put around it")
            score = self.task.score(self.problems[prompt], text)
            rewards.append(score["reward"])
            lines.append(json.dumps({"success": score["answer"], "reward": score["reward"]}))
        with (self.folder / RECORD).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        if self.shuffled:
            self.random.shuffle(rewards)
        return rewards


def interval() -> tuple[float, float]:
    """In which the success of one more seed lies, 19 times in 20."""
    n = len(SUCCESS)
    reach = student_quantile(.975, n - 1) * stdev(SUCCESS) * (1 + 1 / n) ** .5
    return mean(SUCCESS) - reach, mean(SUCCESS) + reach


def sentences_about_run(folder: Path) -> list[str]:
    """Whether the answers that were written down have the success of this project's runs."""
    path, expected = folder / RECORD, STEPS * QUESTIONS * ANSWERS
    if not path.exists():
        raise UserError(f"{folder} has no {RECORD}: the reward function was never called")
    success = [json.loads(line)["success"] for line in path.read_text("utf-8").splitlines()]
    if len(success) != expected:
        raise UserError(f"{path} has {len(success)} answers, and {STEPS} steps of {QUESTIONS} "
                        f"problems x {ANSWERS} answers are {expected}. Remove it before another "
                        "run, which adds to it")
    low, high = interval()
    tenth = expected // 10
    said = [f"Success of all answers: {mean(success):.3f}; of the first tenth "
            f"{mean(success[:tenth]):.3f}, of the last {mean(success[-tenth:]):.3f}.",
            f"Seeds {SEEDS} of this project: {mean(SUCCESS):.3f}, and a further one lies between "
            f"{low:.3f} and {high:.3f} in 19 of 20 cases."]
    if low <= mean(success) <= high:
        return [*said, "Inside: this trainer learns as much as this project does."]
    way = "less" if mean(success) < low else "more"
    return [*said, f"Outside: this trainer learns {way} than this project does."]
