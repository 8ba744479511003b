"""The tasks of reasoning-gym, a package that makes problems and checks answers (2505.24760).

    pip install reasoning-gym
    python -m lab train --task examples.reasoning_gym_task --name gcd --lora 1 \\
        --model models/Qwen2.5-Coder-0.5B-Instruct --config lab/recipes/laptop.json

    "Find the Greatest Common Divisor (GCD) of these numbers: 6, 420. Give only the GCD as your
    final answer.\\nWrite <answer>, the answer and </answer>."
    "<answer>6</answer>" -> 1.0     "6" -> 0.0

The same flags always give the same problems, of which a fifth is never trained on. A task whose
problems differ from process to process is refused. Only a right answer is paid: many tasks give
something between 0 and 1 to a long text that has the right answer in it, which --partial pays, too.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab train --task examples.reasoning_gym_task "
                     "--model FOLDER --name gcd")
import json
import os
import subprocess
import sys
from functools import cache
from typing import Annotated, Any

from countdown_task import between
from lab.engine.declared import Range
from lab.engine.errors import UserError, did_you_mean_name
from lab.harness.chat_template import Message

ASK = "Write <answer>, the answer and </answer>."
FIRST_QUESTIONS = """
import json, sys, reasoning_gym
name, size, options = json.loads(sys.argv[1])
problems = reasoning_gym.create_dataset(name, size=size, seed=0, **options)
print(json.dumps([problems[n]["question"] for n in range(min(20, size))]))
"""
Name = Annotated[str, Range(text="a task of reasoning-gym")]
Size = Annotated[int, Range(text="number of problems; twins count once", least=2, most=100_000)]
Options = Annotated[str, Range(text="settings of the task, as JSON: '{\"max_value\": 20}'")]
Shown = Annotated[int, Range(text="number of solved problems that stand in the prompt as earlier "
                             "turns. They are not trained on", most=20)]
Ask = Annotated[str, Range(text="the sentence after each question")]
Partial = Annotated[bool, Range(text="also pay what the package gives to an answer that is not "
                                "wholly right")]


def problems(*, name: Name = "gcd", size: Size = 1000, options: Options = "{}", examples: Shown = 4,
             ask: Ask = ASK, partial: Partial = False) -> list[dict[str, Any]]:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        missing = str(error.name).replace("_", "-")
        raise UserError(f"this task needs a package: pip install {missing}") from None
    known = reasoning_gym.factory.DATASETS
    if name not in known:
        raise UserError(f"--name {name}: reasoning-gym has no such task"
                        f"{did_you_mean_name(name, known)}")
    try:
        made = [*reasoning_gym.create_dataset(name, size=size, seed=0, **json.loads(options))]
    except (AssertionError, TypeError, ValueError) as error:  # so the package refuses settings
        raise UserError(f"--name {name} --options '{options}': {error}") from None
    if [entry["question"] for entry in made[:20]] != in_another_process(name, size, options):
        raise UserError(f"--name {name}: another process makes other problems of the same seed, so "
                        "no run could be repeated or resumed")
    entries = [*{entry["question"]: entry for entry in made}.values()]
    turns: list[Message] = []
    for shown in [entry for entry in entries if entry["answer"] is not None][:examples]:
        entries.remove(shown)
        turns += [asked(shown, ask),
                  {"role": "assistant", "content": f"<answer>{shown['answer']}</answer>"}]
    return [{"prompt": [*turns, asked(entry, ask)], "name": name, "entry": entry,
             "partial": partial} for entry in entries]


def asked(entry: dict[str, Any], ask: str) -> Message:
    return {"role": "user", "content": f"{entry['question']}\n{ask}"}


@cache
def in_another_process(name: str, size: int, options: str) -> list[str]:
    """The first questions, with another order of Python's sets, and other random numbers."""
    given = json.dumps([name, size, json.loads(options)])
    made = subprocess.run([sys.executable, "-c", FIRST_QUESTIONS, given], check=True, text=True,
                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "1"})
    questions: list[str] = json.loads(made.stdout)
    return questions


def reward(problem: dict[str, Any], text: str) -> float:
    """As the package scores what stands between the tags."""
    import reasoning_gym
    answer = (between(text, "<answer>", "</answer>") or "").strip()
    score_of = reasoning_gym.get_score_answer_fn(problem["name"])
    try:
        score = score_of(answer, problem["entry"]) if answer else 0.0
    except Exception:  # of a text that is no number, for example
        return 0.0
    return float(score if problem["partial"] else score >= 1)
