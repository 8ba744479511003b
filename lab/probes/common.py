"""The common parts of all probes: flags, a folder for its findings, and a way to show them.

A probe is a module whose docstring says what it asks, how it measures and how to read it, with two
things; python -m lab NAME runs it:

    FLAGS = {**COMMON, "answers": Flag(8, "answers to each problem", least=2)}

    def measure(args: SimpleNamespace, folder: Path) -> Findings:  # its flags, for its pictures
        ...
"""
import json
import shlex
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import torch

from lab.analysis.tables import Table, show
from lab.engine.errors import UserError
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from grpo import grpo
from lab.harness.build import load_policy
from lab.harness.record import new_folder, provenance, replace_text
from lab.harness.screen import show_status
from lab.harness.flags import MOST_THREADS, Flag, read
from lab.harness.settings import make_settings

COMMON = {
    "threads": Flag(0, "CPU threads; 0 means the number that suits this probe",
                    least=0, most=MOST_THREADS),
    "seed": Flag(0, "seed of all random numbers. The same seed gives the same results")}
MODEL_FLAGS = {
    "model": Flag("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model, for example a "
                  "checkpoint"),
    "max_new_tokens": Flag(0, "the most tokens of an answer; 0 means the number that suits the "
                              "model"),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N"),
    "task": Flag(None, "the task, as --task of train.py; by default that of the run that the model "
                 "lies in, or Countdown"),
    **COMMON}


@dataclass
class Findings:
    """The results of a probe."""
    title: str
    intro: list[str]
    tables: list[Table]


def run_probe(name: str, doc: str, flags: dict[str, Flag], measure: Callable[..., Findings],
              argv: list[str]) -> None:
    """Read the flags, measure, and write the findings into a folder, which appears whole or not at
    all."""
    known = {**flags,
             "out": Flag(None, f"a new folder for the results. By default it is "
                         f"results/{name}-s<seed>")}
    args, start = read(argv, f"python -m lab {name} [flags]", doc, known), time.monotonic()
    folder = Path(args.out or f"results/{name}-s{args.seed}")
    if folder.exists():
        raise UserError(f"{folder} exists already: name another folder with --out, or remove it")
    with new_folder(folder) as unfinished:
        findings = measure(args, unfinished)
        show_status("")
        seconds = time.monotonic() - start
        settings = {flag: vars(args)[flag] for flag in known}
        printed = write_findings(unfinished, name, settings, findings, seconds,
                                 command_of(name, args.typed))
    print(printed)
    print(f"This took {seconds:.0f} s. All numbers are in {folder / 'numbers.json'}.")


def command_of(name: str, typed: dict) -> str:
    """The command that was typed, without the flag that changes no number."""
    words = [f"python -m lab {name}"]
    for flag, value in typed.items():
        if flag != "out":
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join(words)


def write_findings(folder: Path, name: str, settings: dict, findings: Findings, seconds: float,
                   command: str) -> str:
    """Write all numbers, and the text that is stored as a result: its first line is the command,
    the second the commit, and what is printed follows, which is returned."""
    made = provenance()
    numbers = {"measured": name, "question": findings.title, "command": command,
               "settings": settings, **made, "seconds": round(seconds, 1),
               "tables": [table.to_json() for table in findings.tables]}
    replace_text(folder / "numbers.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    printed = StringIO()
    with redirect_stdout(printed):
        show([findings.title, *findings.intro], findings.tables)
    replace_text(folder / "printed.txt", f"{command}\ncommit {made['git_commit']}, torch "
                                         f"{torch.__version__}\n\n{printed.getvalue()}")
    return printed.getvalue()


def run_of(model: Path) -> Path | None:
    """The run that a checkpoint lies in."""
    run = Path(model).parent.parent
    is_run = Path(model).parent.name == "checkpoints" and (run / "config.json").exists()
    return run if is_run else None


def policy_from_flags(args: SimpleNamespace) -> Policy:
    """The model and its problems. A checkpoint has the problems of its run."""
    return load_policy(make_settings(flags_of_model(args)))


def flags_of_model(args: SimpleNamespace) -> dict:
    """A probe's flags about the model, as flags of train.py. The model is sampled at temperature 1,
    because a probe asks about the policy itself."""
    chosen = {name: vars(args)[name] for name in MODEL_FLAGS}
    if not args.max_new_tokens:
        del chosen["max_new_tokens"]
    if not args.task:
        del chosen["task"]
    if run := run_of(Path(args.model)):
        chosen["config"] = str(run / "config.json")
    # a run with LoRA keeps whole models: their W has the addition, and all of it has a gradient
    return {**chosen, "temperature": 1.0, "lora": 0}


def sample_batch(policy: Policy, questions: int, answers: int, step: int = 1,
                 again: bool = False) -> Rollouts:
    """Sample as training does, with plain GRPO's advantages. `again`: other answers to the same
    problems."""
    seed = policy.settings.seed
    problems = policy.task.training_problems(seed, step, questions)
    of_answers = ("probe again", seed, step) if again else ("probe", seed, step)
    rollouts = policy.ask(problems, answers, derived_seed(*of_answers))
    generator = torch.Generator().manual_seed(derived_seed("probe credit", seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    return replace(rollouts, advantage=grpo(rollouts))
