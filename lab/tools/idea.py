"""Is my idea better? It is trained beside plain GRPO and placebos, and a verdict is printed.

    python -m lab idea my_idea --strength 2
    python -m lab idea my_idea --seeds 4 --steps 30    # a quarter of the time
    python -m lab idea my_idea --task my_task --steps 30    # on another task
    python -m lab idea --set "epochs=2 learning_rate=1e-4"  # settings that the idea alone has
    python -m lab idea --against HEAD    # whatever function you have edited, your files and HEAD's
    python -m lab idea my_idea --screen    # half a minute: its first step. Or FILE.py:NAME

NAME is a weighting or an advantage. Its own flags, --rescale and --set are for the idea alone, and
all other flags of `lab train` are for every arm: plain GRPO, the idea and its placebos, which
settings do not have. Unless flags say otherwise, an arm has eight seeds, and a run is 60 steps of 8
problems x 8 answers. A large model has the settings of its recipe, but 24 steps instead of 48. By
then plain GRPO solves about two thirds of the problems, and later most groups have equal rewards,
so that no method can differ. A run of a large model that is finished keeps no model.

1. First it prints what the idea does to the gradient in a few batches of the untrained model, and
   how far its first step goes, there and from a run of plain GRPO that is there already, and what
   became of methods with such a step. --screen stops here.
2. Then it trains the arms, with one process for each core; those of a large model one after the
   other, unless --processes says otherwise. A placebo has the weights or advantages of the idea,
   but at other tokens: at any of the batch, or at others of the same category; or at other answers,
   if all tokens of an answer have the same one. Finished runs are used again, and those of plain
   GRPO are also used for the next idea.
3. Then it prints the verdict in one sentence, and below it what that rests on. The primary metric
   is the mean success of all answers in training, compared in pairs of runs with the same seed: at
   equal processor time if a step costs more than 1.1 times plain GRPO's, else at equal steps. The
   p-value is corrected for all ideas that were compared with the same runs of plain GRPO. If the
   idea is ahead once, all arms are trained again on as many new seeds, and it is called ahead if it
   is ahead there, too. On held-out problems sampled answers are compared, and greedy ones, which
   take the likeliest token at every place: an idea that loses with the former alone leaves the
   model less sure, and not less able.

Ctrl-C stops it, and the same command continues. Of --against lab/tools/against.py says more.
"""
import re
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mitigations import gradient_size
from lab.analysis.verdict import OTHERS
from lab.engine.credited import credited
from lab.engine.errors import UserError
from lab.engine.methods import METHODS, WHOLE_ANSWERS, axis_of
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts, double
from lab.engine.tokens import KINDS
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.flags import Flag, flags_of, read
from lab.harness.memory import return_memory
from lab.harness.record import Json
from lab.harness.screen import python_command, say, show_status
from lab.harness.settings import LabSettings, make_settings, owner_of, read_flags
from lab.harness.versions import PLAIN
from lab.tools import first_step
from lab.tools.against import compare_versions
from lab.tools.arms import Arm, decide
from lab.tools.planned_runs import NOT_TAKEN, PROCESSES, common_settings

FLAGS = {
    "seeds": Flag(8, "number of seeds of each arm. If the idea is ahead on them, all arms are "
                     "trained again on as many new ones",
                  least=2, most=1000),
    "placebos": Flag("any,kind", "which placebos are trained. any: all tokens of a batch exchange "
                                 "their weights, or those of a group their advantages. kind: "
                                 "only tokens of one category do",
                     choices=("any,kind", "any", "none")),
    "set": Flag(None, 'in the place of NAME: settings of lab train, such as "epochs=2 answers=16"'),
    "against": Flag(None, "in the place of NAME: a commit, or a folder with another copy of the "
                          "project. Its files and yours are compared"),
    "screen": Flag(False, "measure the first step, and train nothing"),
    "processes": PROCESSES,
    "runs": Flag("runs/ideas", "folder in which the runs are kept")}
PLACEBOS = {  # the value of --placebo, by the axis of the idea
    "mitigation": {"any": "weights", "kind": "weights_by_kind"},
    "advantage": {"any": "advantages", "kind": "advantages_by_kind"}}
LABELS = {"plain": "plain", "idea": "{}", "any": "{}-placebo", "kind": "{}-placebo-kind"}
BATCHES = 4   # of the untrained model that are looked at first
RARE = 0.005  # share of the gradient: a kind of token that has less is left out


def main(argv: list[str]) -> None:
    typed: dict[str, Any] = {}  # flags of lab train and of the idea
    own = read(argv, "python -m lab idea NAME [flags of NAME, of lab train, or of this list]",
               __doc__, FLAGS, {"[NAME]": "a weighting or an advantage. It comes first. "
                                "`lab train --help NAME` describes it and its flags"}, others=typed)
    if own.screen and (own.against or own.set):
        raise UserError("--screen measures the first step of a NAME, and not of other settings or "
                        "files: leave --screen out to train them")
    if own.against:
        if own.name:
            typed |= {axis_of(own.name): own.name}
        return compare_versions(own, typed, python_command("-m", "lab", "idea", *argv))
    if own.set and not own.name:
        return compare_settings(own, typed, python_command("-m", "lab", "idea", *argv))
    if not own.name or own.set:
        raise UserError("give one of these: the name of a weighting or an advantage, --set, or "
                        "--against COMMIT. --help says more")
    if own.name in PLAIN.values():
        raise UserError(f"{own.name} is plain GRPO, with which an idea is compared: give another "
                        "name")
    if own.screen and ":" in own.name:
        plain = make_settings(common_settings(make_settings(typed, beside=FLAGS).typed))
        return first_step.report(own.name, plain, plain, [])
    axis, flags = arms_of(own.name, typed, own.placebos)
    arms = {key: Arm(LABELS[key].format(own.name), of_arm, Path(own.runs))
            for key, of_arm in flags.items()}
    for arm in () if own.screen else arms.values():
        arm.copied()  # now, because the look takes a while, and you may go on editing
    first_look(own.name, arms)
    if own.screen:
        return
    of_idea = [f" --{flag} {value}" for flag, value in typed.items()
               if flag in own_flags(axis, own.name)]
    decide(arms, own.name, OTHERS["plain"], own.name + "".join(of_idea), own,
           python_command("-m", "lab", "idea", *argv))


def compare_settings(own: SimpleNamespace, typed: Json, command: str) -> None:
    """The idea is settings. There is nothing to shuffle, so there are no placebos."""
    common = common_settings(make_settings(typed, beside=FLAGS).typed)
    changed = read_flags([f"--{word}" for word in own.set.split()])
    plain = make_settings(common)
    of_all = {*NOT_TAKEN, "task", "eval_tasks", *flags_of(owner_of("task", plain.task))}
    if taken := of_all & changed.keys():
        raise UserError(f"--set {min(taken)}: all arms have the same task, seeds and folders")
    before, now = plain.to_json(), make_settings(common | changed).to_json()
    differ = [f"{name} is {now[name]}, and not {before.get(name)}"
              for name in now if now[name] != before.get(name)]
    if not differ:
        raise UserError(f"--set {own.set}: plain GRPO has these settings, so nothing differs")
    say(textwrap.fill(f"{own.set} compared with plain GRPO: {'; '.join(differ)}", 100))
    label = re.sub(r"[^\w.=-]+", "-", own.set)
    arms = {"plain": Arm("plain", common, Path(own.runs)),
            "idea": Arm(label, common | changed, Path(own.runs))}
    decide(arms, own.set, OTHERS["plain"], own.set, own, command)


def first_look(name: str, arms: dict[str, Arm]) -> None:
    """Print what the idea does to the gradient of the untrained model. If all tokens are of one
    category, as those of some tasks, both placebos would be the same runs."""
    has_kinds = look(name, arms["plain"].settings, arms["idea"].settings)
    if not has_kinds and arms.pop("kind", None):
        say("  all tokens are of one category here, so there is one placebo")
    trained = sorted(arms["plain"].folder.glob("s*/checkpoints/step_*"))[:1]
    first_step.report(name, arms["plain"].settings, arms["idea"].settings, trained)
    return_memory()           # the runs need the memory that models have taken here
    torch.cuda.empty_cache()  # without a GPU it does nothing


def arms_of(name: str, typed: Json, placebos: str = "any,kind") -> tuple[str, dict[str, Json]]:
    """The axis of the idea, and the flags of lab train of each arm. An advantage that is the same
    for all tokens of an answer has one placebo, whose answers are shuffled."""
    axis = axis_of(name)
    if axis in typed:
        raise UserError(f"--{axis} cannot be given: {name} is the one that is tried")
    given = make_settings({axis: name, **typed}, beside=FLAGS).typed
    of_idea = {flag: given.pop(flag) for flag in own_flags(axis, name) if flag in given}
    common = common_settings(given)
    arms = {"plain": common, "idea": common | of_idea}
    kinds = placebos.removeprefix("none").removesuffix(",kind" * (name in WHOLE_ANSWERS))
    for placebo in filter(None, kinds.split(",")):
        arms[placebo] = arms["idea"] | {"placebo": PLACEBOS[axis][placebo]}
    return axis, arms


def own_flags(axis: str, name: str) -> tuple[str, ...]:
    """The flags that are for the idea alone."""
    return axis, "rescale", *flags_of(METHODS[axis][name])


def look(name: str, plain: LabSettings, idea: LabSettings) -> bool:
    """Print which categories of token get more of the gradient than in plain GRPO, in a few batches
    of the untrained model. A token's gradient at the logits has the size abs(A) w s. Returns
    whether there are several categories."""
    policy, found, notes = load_policy(plain), [], set()
    of_plain, of_idea = ((make_advantage(s, policy), make_weighting(s, policy))
                         for s in (plain, idea))
    count = 1 if policy.model.is_large else BATCHES
    for step in range(1, count + 1):
        show_status(f"a look at the untrained model, batch {step} of {count}")
        batch = sample(policy, plain, step)
        usual, _, _ = credited(batch, of_plain, policy, plain, step)
        mine, weight, metrics = credited(batch, of_idea, replace(policy, settings=idea), idea, step)
        if metrics["weight_note"]:
            notes.add(metrics["weight_note"])
        s = gradient_size(batch.log_prob, batch.collision)
        frames = (mine.kind, (mine.advantage * weight * s).abs(), (usual.advantage * s).abs())
        found.append([double(frame[mine.mask]) for frame in frames])
    kind, *sizes = (torch.cat(parts).numpy() for parts in zip(*found))
    say(f"{name} compared with plain GRPO, for {count * len(batch.mask)} answers "
        f"({len(kind)} tokens) of the untrained model:")
    gains = share_gains(kind.astype(int), *sizes) or "unknown, because plain GRPO has no gradient"
    for line in (f"each kind's share of the gradient, divided by its share in plain GRPO: {gains}",
                 *notes):
        say(textwrap.fill(f"  {line}", 100, subsequent_indent="    "))
    return bool((kind != kind[0]).any())


def share_gains(kind: np.ndarray, *sizes: np.ndarray) -> str:
    """word 1.50, number 0.67: by which factor each kind's share of the first sizes is larger than
    that of the second, the largest first."""
    mine, plain = (np.bincount(kind, one) / max(float(one.sum()), 1e-300) for one in sizes)
    gains = {KINDS[k]: mine[k] / plain[k] for k in np.flatnonzero(plain > RARE)}
    largest_first = sorted(gains.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gain:.2f}" for name, gain in largest_first)


def sample(policy: Policy, s: LabSettings, step: int) -> Rollouts:
    problems = policy.task.training_problems(s.seed, step, s.questions)
    return policy.ask(problems, s.answers, derived_seed("train", s.seed, step))
