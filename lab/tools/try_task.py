"""What will a training show the model, and what will it get? Seen before it begins.

    python -m lab try my_task.py
    python -m lab try my_task.py --model models/Qwen2.5-Coder-0.5B-Instruct --lora 1
    python -m lab try questions.jsonl --model FOLDER       (or .parquet)
    python -m lab try reasoning-gym:gcd --model FOLDER
    python -m lab try my_task.py --trl grpo_config.json    (the settings of a script for TRL)

TASK is a file with a task or a reward (TRL's, too), a file of questions with answers, or a task of
reasoning-gym; without it, Countdown. All other flags are those of `lab train`, and mean the
training that is planned.

It shows prompts as the model reads them, an answer to each with its reward, and then makes three
steps of the training in a folder that is removed: how many groups of the first one have different
rewards, the seconds of the third, because the first two are also checks, and their memory. Of a
large model they have two problems. Then it says whether GRPO will learn, from groups of untrained
answers to more problems:

    learns                  enough groups have answers with different rewards, because some are
                            right and some are wrong
    learns the form only    the rewards differ, but not because an answer is right
    cannot                  hardly a group has answers with different rewards
    pays by chance          a blank or a word more, and an answer's reward is another: as by a hash
    has a hole              one answer earns as much as the best, whatever the problem is

The learning rate is not part of the verdict. The last line is the command that trains. The exit
status is 0 if it learns, 1 at another verdict, and 2 if there is none.
"""
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from lab.engine.errors import PROJECT, UserError, read_json
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts, has_turns
from lab.engine.tokens import without_earlier_turns
from lab.harness.build import load_policy
from lab.harness.flags import Flag, read
from lab.harness.flags_elsewhere import ELSEWHERE, INSTEAD
from lab.harness.record import Json
from lab.harness.screen import python_command, say, show_status
from lab.harness.settings import OPTIONS, LabSettings, make_settings
from lab.harness.tasks import score_again
from lab.tools.prospects import LEARNS, Blind, Group, answer_by, rule_of, verdict
from run import read_lines

SHOWN = 3            # prompts
LONGEST = 1500       # characters of a prompt or an answer that are shown
FEW_PROBLEMS = 2     # of a step of a large model
STEPS = 3            # that are made: in the first two every method is asked twice
WITH_MORE = 16       # answers to a problem that are scored again with a blank or a word more
TRIED = 30           # rules, as the answer to problems to which they were not sampled
BLIND_PROBLEMS = 16  # by which one of them is chosen, and as many on which it is judged
LATER = 1000         # the step whose problems these are
WORD = "so"          # before an answer it leaves what is answered as it is
FLAGS = {"problems": Flag(32, "problems to which groups of answers are sampled for the verdict",
                          least=4, most=10_000),
         "trl": Flag(None, "a file of JSON with the fields of TRL's GRPOConfig. Those that mean a "
                     "flag here are taken, and of the others it is said what there is")}
FOR_TRL: dict[tuple[str, object], Json] = {  # values of fields that are named otherwise here
    ("loss_type", "grpo"): {"loss_norm": "sequence"},
    ("loss_type", "dapo"): {"loss_norm": "token"},
    ("loss_type", "bnpo"): {"loss_norm": "token"},
    ("loss_type", "dr_grpo"): {"loss_norm": "constant"},
    ("scale_rewards", "none"): {"advantage": "dr_grpo"},
    ("scale_rewards", False): {"advantage": "dr_grpo"},
    ("scale_rewards", "group"): {"advantage": "grpo"},
    ("scale_rewards", True): {"advantage": "grpo"},
    ("mask_truncated_completions", True): {"drop_unfinished": True},
    ("lr_scheduler_type", "linear"): {"decay": "linear"},
    ("bf16", True): {"dtype": "bfloat16"}}


def main(argv: list[str]) -> int:
    """Print what was seen, and return the exit status."""
    asked: Json = {}  # flags of lab train
    own = read(argv, "python -m lab try [TASK] [flags of lab train]", __doc__, FLAGS,
               {"[TASK]": "a file, or reasoning-gym:NAME"}, others=asked)
    for name in ("out", "resume", "continue"):
        if name in asked:
            raise UserError(f"--{name} has no effect, because nothing is kept")
    of_config = flags_of_config(Path(own.trl)) if own.trl else {}
    planned = flags_of_task(own.task) | of_config | asked
    settings = make_settings(planned, beside=FLAGS)
    policy = load_policy(settings)
    problems = policy.task.training_problems(settings.seed, 1, settings.questions)[:SHOWN]
    show_status("answers are sampled")
    batch = policy.ask(problems, 1, derived_seed("try", settings.seed))
    show_answers(batch, [policy.task.prompt_for(problem) for problem in problems])
    groups, earned = sampled_groups(policy, settings, own.problems)
    blind = None if has_turns(policy.task) else best_blind(earned, policy.task, settings.seed)
    word, reason = verdict(groups, settings.questions, policy.task.knows_success, blind)
    is_large = policy.model.is_large
    del policy  # the step below needs its memory
    questions = min(FEW_PROBLEMS, settings.questions) if is_large else settings.questions
    lines = first_steps(planned, questions)
    say("\n".join([*about_steps(lines, settings, questions),
                   textwrap.fill(f"{word.upper()}: {reason}", 100)]))
    words = [word for name, value in settings.typed.items()
             for word in (f"--{name}", typed(value))]
    config = ["--config", asked["config"]] if "config" in asked else []
    say(f"\nTo train: {python_command('-m', 'lab', 'train', *config, *words)}")
    return int(word != LEARNS)


# ------------------------------------------------------------------- what is asked for


def typed(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def flags_of_task(given: str | None) -> Json:
    """The flags of lab train that mean this task."""
    if not given:
        return {}
    kind, _, name = given.partition(":")
    if kind == "reasoning-gym":
        return {"task": "examples.reasoning_gym_task"} | ({"name": name} if name else {})
    if Path(given).suffix in (".jsonl", ".parquet"):
        if not Path(given).is_file():
            raise UserError(f"there is no file {given}")
        return {"task": "examples.question_answer", "data": given}
    if Path(given).suffix in (".csv", ".json", ".txt"):
        raise UserError(f"{given}: questions are read from .jsonl, which has an object with "
                        '"question" and "answer" in each line, and from .parquet')
    return {"task": given}


def flags_of_config(path: Path) -> Json:
    """The flags that mean the fields of a GRPOConfig. It is said what becomes of each field that
    asks for something: a whole config has most of them at None or False."""
    fields, found, said, others = read_json(path), Json(), list[str](), list[str]()
    if fields.get("epsilon_high") is None:
        fields["epsilon_high"] = fields.get("epsilon")
    for name, value in fields.items():
        mine, about = meaning_of(name, value, fields.get("num_iterations", 1))
        found |= mine
        if about:
            said.append(f"  {name} {value}: {about}")
        elif not (value is None or value is False or value == -1):
            others.append(name)
    if batch := problems_in_a_step(fields):
        found["questions"] = batch
        said.append(f"  so a step has {batch} problems: --questions {batch}")
    if others:
        said.append(f"  nothing here: {', '.join(others)}")
    say("\n".join([f"The fields of {path}:", *said, ""]))
    return found


def meaning_of(name: str, value: object, passes: int) -> tuple[Json, str]:
    """The flags that mean a field, and what is said of it, which is nothing if there is none."""
    flags = FOR_TRL.get((name, value if isinstance(value, (str, bool)) else str(value)))
    flag = ELSEWHERE.get(name, name)
    if flags is None and (value is None or value is False or value == -1):
        return {}, ""
    if flag in ("clip_low", "clip_high") and passes == 1:
        return {}, "nothing is clipped in one pass"
    if flags is None and flag in OPTIONS and flag not in ("out", "model", "data", "task"):
        flags = {flag: value}
    if flags is None:
        return {}, INSTEAD.get(name, "")
    return flags, " ".join(f"--{one} {typed(chosen)}" for one, chosen in flags.items())


def problems_in_a_step(fields: Json) -> int:
    """TRL counts answers: those of a device at a time, times the times."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    if not fields.keys() & {*names[:2]}:
        return 0
    size, times, group = (fields.get(name) or usual for name, usual in zip(names, (8, 1, 8)))
    if {type(size), type(times), type(group)} != {int}:
        raise UserError(f"{', '.join(names)} should be whole numbers")
    return max(1, size * times // group)


# ------------------------------------------------------------------- what is shown


def show_answers(batch: Rollouts, prompts: list[str]) -> None:
    """The parts of a reward are shown if one of them is not 0."""
    parts = [name for name, score in batch.scores.items() if name != "reward" and score.any()]
    for row, prompt in enumerate(prompts):
        of_parts = ", ".join(f"{name} {batch.scores[name][row]:g}" for name in parts)
        cut = "" if batch.finished[row] else ", cut off"
        say(f"Problem {row + 1}, as the model reads it:\n{indented(without_earlier_turns(prompt))}"
            f"\nand an answer, {int(batch.length[row])} tokens{cut}:\n"
            f"{indented(batch.answers[row])}\n"
            f"reward {batch.reward[row]:g}{f' ({of_parts})' if parts else ''}\n")


def indented(text: str) -> str:
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return textwrap.indent(shown, "  | ", lambda line: True)


def sampled_groups(policy: Policy, s: LabSettings, count: int
                   ) -> tuple[list[Group], dict[str, float]]:
    """Groups of answers to the problems of the first steps, without any training; and what each
    answer has earned as a rule, in all groups together."""
    groups, earned = list[Group](), Counter[str]()
    for step in range(1, 1 + -(-count // s.questions)):
        show_status(f"sampled answers to {len(groups)} of {count} problems")
        wanted = min(s.questions, count - len(groups))
        problems = policy.task.training_problems(s.seed, step, wanted)
        batch = policy.ask(problems, s.answers, derived_seed("groups", s.seed, step))
        if step == 1 and not score_again(batch, policy.task, s.task, policy.environment):
            raise UserError("a reward that changes from one scoring to the next cannot be judged")
        for number, problem in enumerate(problems):
            rows = (batch.group == number).cpu()
            reward, right = (column.cpu()[rows].double().numpy()
                             for column in (batch.reward, batch.scores["answer"]))
            texts = [batch.answers[row] for row in rows.nonzero().flatten().tolist()]
            for text, value in zip(texts, reward):
                earned[rule_of(text, policy.task.show(problem))] += float(value)
            more = [] if has_turns(policy.task) else with_more(policy, problem, texts, reward)
            groups.append(Group(reward, right, np.array(more).reshape(-1, 3)))
    return groups, earned


def best_blind(earned: dict[str, float], task: Any, seed: int) -> Blind:
    """The best answer that ignores the problem, among the rules that have earned most. One half of
    new problems chooses it, and the other half says what it earns."""
    problems = task.training_problems(seed, LATER, 2 * BLIND_PROBLEMS)

    def earns(rule: str, asked: list[Any]) -> float:
        return float(np.mean([float(task.score(one, answer_by(rule, task.show(one)))["reward"])
                              for one in asked]))

    rules = sorted(earned, key=lambda rule: -earned[rule])[:TRIED]
    best = max(rules, key=lambda rule: earns(rule, problems[:BLIND_PROBLEMS]))
    return Blind(best, earns(best, problems[BLIND_PROBLEMS:]))


def with_more(policy: Policy, problem: Any, texts: list[str], rewards: np.ndarray
              ) -> list[list[float]]:
    """The rewards of different answers, and those with a blank behind or a word before them."""
    return [[reward, *(float(policy.task.score(problem, more)["reward"])
                       for more in (f"{text} ", f"{WORD} {text}"))]
            for text, reward in [*dict(zip(texts, rewards)).items()][:WITH_MORE]]


def first_steps(planned: Json, questions: int) -> list[Json]:
    """The lines in metrics.jsonl of the first steps, in a process of its own."""
    show_status("three steps are made")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "step")
        own = {"questions": questions, "steps": STEPS, "eval_every": 0, "checkpoint_every": 0,
               "change_every": 0, "out": out}
        flags = [f"--{name}={typed(value)}" for name, value in (planned | own).items()]
        here = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])}
        made = subprocess.run([sys.executable, "-m", "lab", "train", *flags], env=here,
                              capture_output=True, text=True)  # so a path means the same file
        if made.returncode:
            raise UserError(made.stderr.strip().removeprefix("lab train: ")
                            or f"the step ended with status {made.returncode}")
        return read_lines(out / "metrics.jsonl")


def about_steps(lines: list[Json], s: LabSettings, questions: int) -> list[str]:
    """What the first steps say of the training: groups, time, memory. More problems take more time,
    and at most in proportion."""
    line, last = lines[0], lines[-1]
    equal = round(line["groups_without_spread"] * questions)
    spread = questions - equal
    low = last["seconds"] - last["update_seconds"] + max(one["update_seconds"] for one in lines)
    seconds = [two_digits(low * share) for share in (1, s.questions / questions)]
    minutes = [str(max(1, round(low * share * s.steps / 60))) for share in (
        1, s.questions / questions)]
    said = [f"One step of {questions} problems x {s.answers} answers: in {spread} of {questions} "
            "groups the rewards differ, and only these teach. The mean reward is "
            f"{line['reward']:.2f}, and {line['finished']:.0%} of the answers end before "
            f"{s.max_new_tokens} tokens."]
    memory = (last["peak_memory_bytes"] or 0) / 1e9
    said.append(f"A step takes about {span(seconds)} s, so {s.steps} steps take about "
                f"{span(minutes)} min, without evaluations. At most {two_digits(memory)} GB of "
                "memory were taken.")
    return [textwrap.fill(sentence, 100) for sentence in said]


def two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def span(ends: list[str]) -> str:
    return " to ".join(dict.fromkeys(ends))
