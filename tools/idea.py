"""Was my idea better? Trains it beside plain GRPO and its own placebo, and says what is seen.

    python -m tools.idea my_idea --strength 2

NAME is a weighting or an advantage. Its own flags and --rescale are the idea's; all other flags of
train.py hold for every arm. Eight seeds, 8 problems x 8 answers, 60 steps, unless flags say so.
A large model on a CPU has the settings that train.py gives it there. Runs of a large model leave no
model, and one that is stopped begins again.

1. How long it will take, and a look at a few batches of the untrained model: what the idea does to
   the gradient.
2. Training, a process for each core, or as many as memory holds: plain GRPO, the idea, and its
   placebo, which has the same numbers at other tokens, or at other answers if an answer has one
   number. Runs that are there are used again, plain GRPO's also by the next idea.
3. The verdict, by the mean success of all answers of the training, paired by seed. An idea that is
   ahead is looked at again on as many new seeds before that is said of it.

Ctrl-C stops it, and the same command goes on.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.idea")
import hashlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from analysis.runs import read_run
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from engine.policy import Policy
from harness.forecast import available_memory, memory_of, return_memory
from harness.load import load_policy
from harness.record import PROJECT, find_folder
from harness.screen import is_taken_away, python_command, run_as_program, say, show_status
from harness.settings import (MOST_THREADS, Flag, Settings, flags_of, is_large, make_parser,
                              make_settings, read_flags, with_defaults)
from mitigations import rescaled_weight
from tools.helpers.look import look, seconds_of_runs
from tools.preview import on_real_tokens
from tools.runs import PlannedRun, make_runs, usable_cores
from tools.helpers.verdict import Verdict

FLAGS = {
    "seeds": Flag(8, "seeds of each arm; a second look has as many new ones", least=2, most=1000),
    "processes": Flag(0, "runs at a time; 0 is one for each core that this program may use, of a "
                      "large model as many as there is memory for, and one on a GPU", least=0,
                      most=MOST_THREADS),
    "runs": Flag("runs/ideas", "folder of the runs")}
AXES = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}
PLACEBOS = {"mitigation": "weights", "advantage": "advantages"}
PLAIN = ("none", "grpo")
USUAL = {"questions": 8, "answers": 8, "steps": 60, "threads": 1}
NO_MODELS = {"checkpoint_every": 0, "save_model": False}  # of a large one each has gigabytes
STEPS_OF_LARGE = 20  # on a CPU, where its recipe names none
NOT_TAKEN = ("seed", "out", "resume", "continue", "config", "placebo", "loss", "pairs")
NOT_OF_A_STEP = ("analysis", "harness", "research", "tools")  # rooms


def main(argv: list[str]) -> None:
    parser = make_parser("python -m tools.idea NAME [its flags, flags of train.py, flags]", __doc__,
                         FLAGS)
    parser.add_argument("name", metavar="NAME", help="a weighting or an advantage; it comes first")
    given, typed = parser.parse_known_args(argv)
    own, name = with_defaults(parser.values(given), FLAGS), given.name
    axis, arms = arms_of(name, typed)
    settings = {arm: make_settings(flags) for arm, flags in arms.items()}
    plan = make_plan(settings["plain"], settings["idea"], own.processes)
    labels = {"plain": "plain", "idea": name, "placebo": f"{name}-placebo"}
    folders = {arm: Path(own.runs) / f"{labels[arm]}-{digest(settings[arm])}" for arm in arms}

    def runs_of(seeds: range, before: Callable[[], None] = lambda: None
                ) -> dict[str, dict[int, dict]]:
        """Trained where they are missing: look[arm][seed], all arms of a seed before the next."""
        planned = [PlannedRun(labels[arm], seed, folders[arm] / f"s{seed}", as_typed(arms[arm]),
                              settings[arm].steps, seconds=plan.seconds[arm], threads=plan.threads,
                              keeps_checkpoints=settings[arm].checkpoint_every > 0)
                   for seed in seeds for arm in arms]
        command = python_command("-m", "tools.idea", *argv)
        failed = make_runs(planned, plan.processes, command, before, all_or_nothing=True)
        for reason in failed.values():
            raise UserError(reason)
        return {arm: {seed: read_run(folders[arm] / f"s{seed}") for seed in seeds} for arm in arms}

    def first_look() -> None:
        look(name, settings["plain"], settings["idea"], is_weighting=axis == "mitigation")
        for line in on_real_tokens(settings["idea"]) if axis == "mitigation" else []:
            say(textwrap.fill(line, 100, subsequent_indent="    "))
        return_memory()           # for the runs, what models have taken here
        torch.cuda.empty_cache()  # without a GPU it does nothing

    verdict = Verdict(name, runs_of(range(own.seeds), first_look))
    if verdict.is_ahead():
        say(f"{name} is ahead on these seeds: looking again on {own.seeds} new ones")
        verdict.looks.append(runs_of(range(own.seeds, 2 * own.seeds)))
    verdict.tell()
    say(f"\npicture: {verdict.draw(folders['idea'])}")
    runs = " ".join(f"{folder}/s*/" for folder in folders.values())
    say(f"tables and a page: python analyze.py {runs}")
    if settings["plain"].task == Settings.task and not is_taken_away("research"):
        show_status("a synthetic task in which it is known which tokens decide")
        of_method = flags_of(AXES[axis][name])
        flags = {flag: value for flag, value in arms["idea"].items() if flag in of_method}
        said = import_module("research.probes.dial").worth_in_a_sentence(name, flags)
        say(textwrap.fill(said, 100))
        typed = " ".join([name, *as_typed(flags)])
        say("more tasks: " + python_command("-m", "research", "dial", "--only", typed))


@dataclass
class Plan:
    processes: int  # runs at a time
    threads: int    # of each
    seconds: dict[str, float]  # that a run of an arm takes


def make_plan(plain: Settings, idea: Settings, processes: int) -> Plan:
    """`processes` are those that were asked for, or 0."""
    available = available_memory()  # before a model is loaded here
    policy = load_policy(plain)
    processes = processes or runs_at_a_time(plain, policy, available)
    threads = 1
    if is_large_on_cpu(plain):
        threads = max(1, usable_cores() // processes)
        if not plain.threads:
            torch.set_num_threads(min(threads, torch.get_num_threads()))
    of_plain, of_idea = seconds_of_runs(policy, plain, idea)
    return Plan(processes, threads, {"plain": of_plain, "idea": of_idea, "placebo": of_idea})


def runs_at_a_time(s: Settings, policy: Policy, available: float) -> int:
    """One for each core; of a large model as many as there is memory for, and always one."""
    if s.device != "cpu":
        return 1
    if not is_large_on_cpu(s):
        return usable_cores()
    return max(1, min(usable_cores(), int(available / memory_of(s, policy.model))))


def is_large_on_cpu(s: Settings) -> bool:
    return s.device == "cpu" and is_large(find_folder(s.model))


def usual_settings(given: dict) -> dict:
    """What holds unless something else is typed. For a large model on a CPU it is the recipe that
    train.py has for it there."""
    s = make_settings(given)
    if is_large_on_cpu(s):
        return {"steps": s.defaults.get("steps", STEPS_OF_LARGE)} | NO_MODELS
    return USUAL | NO_MODELS if is_large(find_folder(s.model)) else USUAL


def arms_of(name: str, typed: list[str]) -> tuple[str, dict[str, dict]]:
    """The axis of the idea, and the flags of train.py of each arm."""
    axis = next((axis for axis, choices in AXES.items() if name in choices), None)
    if name in PLAIN:
        raise UserError(f"{name} is what an idea is compared with: give another name")
    if axis is None:
        near = get_close_matches(name, [*MITIGATIONS, *ADVANTAGES], 1)
        raise UserError(f"there is no weighting and no advantage {name}"
                        + (f"; did you mean {near[0]}?" if near else ", which comes first: is its "
                           "function in mitigations.py, below @mitigation or @advantage?"))
    for word in typed:
        flag = word.partition("=")[0].replace("-", "_").removeprefix("__")
        if word.startswith("--") and flag in NOT_TAKEN:
            raise UserError(f"--{flag} is not for this program: it chooses seeds, folders, placebo "
                            f"and loss of plain GRPO, {name} and its placebo itself")
    given = read_flags([f"--{axis}", name, *typed])
    own = (axis, "rescale", *flags_of(AXES[axis][name]))
    of_idea = {flag: given.pop(flag) for flag in own if flag in given}
    common = usual_settings(given) | given
    common = {"eval_every": common["steps"], "checkpoint_every": common["steps"]} | common
    if common["steps"] < 1:
        raise UserError(f"--steps {common['steps']}: then nothing is trained")
    if not common["eval_every"]:
        raise UserError("--eval_every 0: the evaluation at the end decides where training cannot, "
                        "as with problems that are asked again. --eval_tasks 100 makes it short")
    common.setdefault("eval_modes", "sampled")
    return axis, {"plain": common, "idea": common | of_idea,
                  "placebo": common | of_idea | {"placebo": PLACEBOS[axis]}}


def as_typed(flags: dict) -> list[str]:
    """Of an arm, without what a planned run adds."""
    words = {name: "yes" if value is True else "no" if value is False else str(value)
             for name, value in flags.items() if name != "steps"}
    return [part for name, word in words.items() for part in (f"--{name}", word)]


def digest(s: Settings) -> str:
    """Of all that a run of these settings follows from, but its seed: the files of what computes a
    step, and of what its task uses. Plain GRPO's runs are used by every idea, so of mitigations.py
    their functions count. Of any other run every file does that is loaded: an idea may use what
    stands anywhere."""
    values = {name: value for name, value in s.to_json().items() if name not in ("seed", "out")}
    chosen = (MITIGATIONS[s.mitigation], ADVANTAGES[s.advantage], rescaled_weight)
    is_plain = (s.mitigation, s.advantage) == PLAIN
    files = {PROJECT / name for name in ("train.py", "grpo.py", "qwen2_model.py")}
    files |= set((PROJECT / "engine").glob("*.py"))
    used = {getattr(one, "__module__", None) for one in vars(sys.modules[s.task]).values()}
    files |= set(files_of({s.task, *used}))  # by the task, say for problems
    files |= set() if is_plain else set(filter(is_own, files_of(sys.modules)))
    files |= {path for value in values.values() if (path := Path(str(value))).is_file()}  # problems
    files |= {path for path in find_folder(s.model).iterdir() if path.is_file()}
    known = {"values": values,
             "files": {os.path.relpath(path, PROJECT): digest_of_file(path, path.stat().st_mtime_ns)
                       for path in files},
             "functions": [inspect.getsource(function) for function in chosen if is_plain]}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]


@cache  # the weights of a large model are read for seconds
def digest_of_file(path: Path, changed: int) -> str:
    """`changed`: when it was."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(modules: Iterable[str]) -> list[Path]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in list(modules)]
    return [Path(name) for name in files if name and name.endswith(".py") and os.path.isabs(name)]


def is_own(path: Path) -> bool:
    """Not Python's, nor that of a package that was installed, nor of a room without influence."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if PROJECT in path.parents:
        return path.relative_to(PROJECT).parts[0] not in NOT_OF_A_STEP
    return Path(sys.base_prefix) not in path.parents


if __name__ == "__main__":
    run_as_program("idea", main, interrupted="stopped at once; the same command goes on")
