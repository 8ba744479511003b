"""Is my idea better? It is trained beside plain GRPO and a placebo, and a verdict is printed.

    python -m tools.idea my_idea --strength 2
    python -m tools.idea my_idea --quick    # a quarter of the time; sees only large differences

NAME is a weighting or an advantage. Its own flags and --rescale are for the idea alone, and all
other flags of train.py are for every arm: plain GRPO, the idea and its placebo. Unless flags say
otherwise, each arm is trained with eight seeds, and a run is 60 steps of 8 problems x 8 answers. A
large model has the settings that train.py gives it, but 24 steps instead of 48. By then plain GRPO
solves about two thirds of the problems, and later most groups have equal rewards, so that no
method can differ. Runs of a large model save no model, so a run that is stopped starts again from
step 1.

1. First it prints what the idea does to the gradient in a few batches of the untrained model.
2. Then it trains the three arms, with one process for each core; those of a large model one after
   the other, unless --processes says otherwise. The placebo has the weights or advantages of the
   idea, but at other tokens; or at other answers, if all tokens of an answer have the same one.
   Finished runs are used again, and those of plain GRPO are also used for the next idea.
3. Then it prints the verdict in one sentence, and below it what that rests on. The primary metric
   is the mean success of all answers in training, compared in pairs of runs with the same seed. If
   the idea is better, all arms are trained again on as many new seeds, and it is called ahead if it
   is better there, too. On held-out problems sampled answers are compared, and greedy ones, which
   take the likeliest token at every place: an idea can leave the model less sure without leaving it
   less able.

Ctrl-C stops it, and the same command continues.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.idea")
import hashlib
import json
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine.methods import ADVANTAGES, METHODS, MITIGATIONS, without_decorator
from engine.errors import UserError
from harness.flags import Flag, flags_of, read
from harness.made_of import made_of
from harness.memory import return_memory
from harness.record import find_folder
from harness.screen import python_command, run_as_program, say
from harness.settings import CHANGEABLE, Settings, is_large, make_settings
from tools.helpers.look import look
from tools.helpers.runs import PROCESSES, Arms, Experiment, PlannedRun, side_by_side
from tools.helpers.verdict import Verdict

QUICK_SEEDS = 4
FLAGS = {
    "seeds": Flag(8, "number of seeds of each arm. If the idea is better on them, all arms are "
                     "trained again on as many new ones",
                  least=2, most=1000),
    "quick": Flag(False, f"a first look: {QUICK_SEEDS} seeds and half of the steps, unless flags "
                         "say otherwise. This takes a quarter of the time, and only a large "
                         "difference can be seen"),
    "processes": PROCESSES,
    "runs": Flag("runs/ideas", "folder in which the runs are kept")}
PLACEBOS = {"mitigation": "weights", "advantage": "advantages"}
PLAIN = ("none", "grpo")
USUAL = {"questions": 8, "answers": 8, "steps": 60, "threads": 1}
NO_MODELS = {"checkpoint_every": 0}  # of a large one each has gigabytes
STEPS_OF_LARGE = 20  # on a CPU, where its recipe names none
NOT_TAKEN = ("seed", "out", "placebo", "resume", "continue")  # flags of train.py


def main(argv: list[str]) -> None:
    typed: dict[str, Any] = {}  # flags of train.py and of the idea
    own = read(argv, "python -m tools.idea NAME [flags of NAME, of train.py, or of this list]",
               __doc__, FLAGS, {"NAME": "a weighting or an advantage. It comes first. `python "
                                "train.py --help NAME` describes it and its flags"}, others=typed)
    if own.quick and "seeds" not in own.typed:
        own.seeds = QUICK_SEEDS
    idea = Idea(own.name, typed, own, python_command("-m", "tools.idea", *argv))
    verdict = Verdict(own.name, idea.runs_of(range(own.seeds), idea.first_look))
    if verdict.needs_second_look():
        say(f"{own.name} is better than plain GRPO on these seeds, so all arms are trained again "
            f"on {own.seeds} new seeds")
        verdict.looks.append(idea.runs_of(range(own.seeds, 2 * own.seeds)))
    verdict.print_findings()
    folders = idea.folders
    picture = verdict.draw(folders["idea"])
    say(f"\nThe picture is {picture}")
    runs = " ".join(f"{shlex.quote(str(folder))}/s*/" for folder in folders.values())
    say(f"For tables and a page: python analyze.py {runs}")


class Idea:
    """An idea, and its experiment: the runs of plain GRPO, of the idea, and of its placebo."""

    def __init__(self, name: str, typed: dict[str, Any], own: SimpleNamespace, command: str):
        self.name, self.own, self.command = name, own, command
        self.axis, self.flags = arms_of(name, typed, own.quick)
        self.settings = {arm: make_settings(flags) for arm, flags in self.flags.items()}
        self.labels = {"plain": "plain", "idea": name, "placebo": f"{name}-placebo"}
        self.folders = {arm: Path(own.runs) / f"{self.labels[arm]}-{digest(s)}"
                        for arm, s in self.settings.items()}
        self.experiment = Experiment(self.planned_run)

    def planned_run(self, arm: str, seed: int) -> PlannedRun:
        s = self.settings[arm]
        return PlannedRun(self.labels[arm], seed, self.folders[arm] / f"s{seed}",
                          as_typed(self.flags[arm]), s.steps,
                          keeps_checkpoints=s.checkpoint_every > 0)

    def runs_of(self, seeds: range, before: Callable[[], None] = lambda: None) -> Arms:
        """The runs of each arm by seed; those that are missing are trained, all arms of a seed
        before the next seed."""
        keys = [(arm, seed) for seed in seeds for arm in self.flags]
        arms = [self.settings["plain"], self.settings["idea"]]
        processes, threads = side_by_side(arms, self.own.processes)
        failed = self.experiment.make(keys, self.command, processes, threads, before=before,
                                      all_or_nothing=True)
        if failed:
            raise UserError("; ".join(failed.values()))
        return self.experiment.arms(keys)

    def first_look(self) -> None:
        """Print what the idea does to the gradient of the untrained model."""
        look(self.name, self.settings["plain"], self.settings["idea"],
             is_weighting=self.axis == "mitigation")
        return_memory()           # the runs need the memory that models have taken here
        torch.cuda.empty_cache()  # without a GPU it does nothing


def usual_settings(given: dict) -> dict:
    """The settings of all arms, unless something else is typed. A large model has the recipe that
    train.py has for it, but half of its steps where the folder has none of its own: by then plain
    GRPO solves about two thirds of the problems. Later most groups have equal rewards, and then no
    method can differ."""
    s = make_settings(given)
    folder = find_folder(s.model)
    if not is_large(folder):
        return USUAL
    if "steps" in s.defaults:
        is_laptops = not (folder / "recipe.json").exists()
        steps = s.defaults["steps"] // 2 if is_laptops else s.defaults["steps"]
        return {"steps": steps} | NO_MODELS
    if s.device == "cpu":
        return {"steps": STEPS_OF_LARGE} | NO_MODELS
    return USUAL | NO_MODELS


def arms_of(name: str, typed: dict[str, Any], is_quick: bool = False
            ) -> tuple[str, dict[str, dict]]:
    """The axis of the idea, and the flags of train.py of each arm. A quick look has half of the
    usual steps."""
    axis = axis_of(name)
    for flag in typed:
        if flag == axis:
            raise UserError(f"--{axis} cannot be given: {name} is the one that is tried")
        if flag in NOT_TAKEN:
            raise UserError(f"--{flag} cannot be given to this program, because it chooses the "
                            "seeds, folders, loss and placebo of its three arms itself: plain "
                            f"GRPO, {name} and its placebo")
    given = make_settings({axis: name, **typed}, beside=FLAGS).typed
    own = (axis, "rescale", *flags_of(METHODS[axis][name]))
    of_idea = {flag: given.pop(flag) for flag in own if flag in given}
    usual = usual_settings(given)
    if is_quick:
        usual = usual | {"steps": usual["steps"] // 2}
    common = usual | given
    common = {"eval_every": common["steps"], "checkpoint_every": common["steps"]} | common
    if common["steps"] < 1:
        raise UserError(f"--steps {common['steps']}: with this, nothing is trained")
    if not common["eval_every"]:
        raise UserError("--eval_every 0: the verdict needs the evaluation at the end, because "
                        "success in training says little where problems are repeated. "
                        "--eval_tasks 100 makes the evaluation short")
    return axis, {"plain": common, "idea": common | of_idea,
                  "placebo": common | of_idea | {"placebo": PLACEBOS[axis]}}


def axis_of(name: str) -> str:
    """mitigation or advantage: the flag that the idea is a choice of."""
    if name in PLAIN:
        raise UserError(f"{name} is plain GRPO, with which an idea is compared: give another name")
    for axis, choices in METHODS.items():
        if name in choices:
            return axis
    hint = ". Is its function in mitigations.py, below @mitigation or @advantage?"
    near = get_close_matches(name, [*MITIGATIONS, *ADVANTAGES], 1)
    if near:
        hint = f"; did you mean {near[0]}?"
    if said := without_decorator(name):
        hint = f". {said}"
    raise UserError(f"{name} is neither a weighting nor an advantage{hint}")


def as_typed(flags: dict) -> list[str]:
    """The flags of an arm as words of a command, without those that a planned run adds."""
    words = []
    for name, value in flags.items():
        if name != "steps":
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
            words += [f"--{name}", text]
    return words


def digest(s: Settings) -> str:
    """Eight characters, which change with the settings, except the seed, and with whatever a run
    is made of (harness/made_of.py)."""
    settings = {name: value for name, value in s.to_json().items()
                if name not in ("seed", "out", *CHANGEABLE)}
    known = json.dumps([settings, made_of(s)], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:8]


if __name__ == "__main__":
    run_as_program("idea", main, interrupted="stopped at once; the same command continues")
