"""Runs as arms, compared: which runs are one arm, what may be compared, the gain of one arm over
another, and the verdict. `lab idea`, `lab experiment`, `lab compare` and `lab notes` share it.

    arms = arms_of(runs)                                    # by the settings in which runs differ
    found = gains({"my_idea": (arms["my_idea"], arms["none"])})
    found["my_idea"].estimate                               # the mean over seeds, with its interval
    found["my_idea"].verdict                                # better, worse, or no difference seen

An arm is a set of runs, one for each seed. Two runs with the same seed get the same problems at
every step, so runs are paired by seed: problems that are easy or hard for both arms cancel in the
difference.

There is one rule for all experiments. Pairs of runs are a *look*. In one look a method is better or
worse if its p is below 0.05, after Holm's correction for all methods that are tested together
(`Gain.verdict`). A method is *ahead* if it is better, and better again in a second look on new
seeds. It is *behind* if it is worse: one look is enough (`called`).

Success in training is the mean over all answers that training sampled: it counts each of them. Held
out success at the end is that of the last policy, on problems that no run trained on. If a task
does not say which answers are right, the reward takes the place of success.
"""
import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from analyze import MEASURES as COLUMNS
from lab.analysis.run_folders import PLAIN_SETTINGS, Run, flags_of_methods, share_seen_before
from lab.analysis.statistics import (Estimate, Floats, holm, mean_over, mean_over_pairs,
                                     paired_difference)
from lab.analysis.tables import WITH_INTERVAL, Cell, Table, shown
from lab.engine.errors import UserError
from lab.harness.read_record import missing_steps
from lab.harness.record import Json
from lab.countdown import Task
from lab.harness.flags import flags_of
from lab.harness.settings import GONE, NOT_SETTINGS, LabSettings
from lab.harness.versions import (PLAIN, Version, changes_of_run, chosen_in, differing, digest_of,
                                  versions_of)
from run import code_folders

IN_TRAINING, AT_THE_END = MEASURES = ("success in training", "held-out success at the end")
GREEDY_AT_THE_END = "held-out success of greedy answers at the end"
LEVEL = 0.05        # a difference is seen if its corrected p is below this
FEWEST_PAIRS = 4    # from fewer pairs not even their spread is known
BETTER, WORSE, NOT_SEEN = "better", "worse", "no difference seen"  # in one look
AHEAD, BEHIND = "ahead", "behind"
MOST_REPEATED = 0.1  # share of the training problems that had come before

Arm = Mapping[int, Run]  # the runs of one arm, by seed
Arms = Mapping[str, Arm]


# ------------------------------------------------------------------- what may be compared


# settings in which runs of one arm may differ. With more --steps the same steps come first, and
# arms are compared at steps that all have.
NOT_OF_ARM = {*NOT_SETTINGS, "seed", "out", "threads", "checkpoint_every", "change_every",
              "eval_every", "micro_batch", "steps", "eval_tasks"}
DEFAULTS = GONE | {name: flag.default for owner in (LabSettings, Task)
                   for name, flag in flags_of(owner).items()}


def names_of(runs: Sequence[Run]) -> list[str]:
    """A name for the arm of each run. Runs have the same name if they have equal settings and if
    equal code and data made them, as a whole. So a run of train.py and one of the lab are two arms,
    which you may compare: with equal settings they have the same numbers, as long as nobody edits
    what only one of them calls."""
    settings = [settings_of(run) for run in runs]
    versions = [version_of_run(run, chosen_in(run.config)) for run in runs]
    earlier = [[versions_of(run.folder, chosen_in(run.config)), run.config.get("changed")]
               for run in runs]
    keys, known = [digest_of(one) for one in zip(settings, versions, earlier)], dict[str, str]()
    for key, name in zip(keys, names_by_words(runs, settings, versions)):
        known.setdefault(key, f"{name} {key[:4]}" if name in known.values() else name)
    return [known[key] for key in keys]


def settings_of(run: Run) -> Json:
    """The settings of a run that make its arm, and what is known of its versions. A setting that
    config.json lacks has its default."""
    of_methods = {name: flag.default for name, flag in flags_of_methods(run.config).items()}
    known = sorted((DEFAULTS | of_methods | run.config).items())
    changes, by = changes_of_run(run.folder, run.config), "an earlier version"
    if code := code_folders(run.folder):
        by = "the lab" if (code[-1] / "lab/run.py").exists() else "the book"
    return {name: value for name, value in known if name not in NOT_OF_ARM} | {
        "made by": by, "changed": ", ".join(f"after step {step}: {in_short(labels)}"
                                            for step, labels in changes.items()) or "never"}


def version_of_run(run: Run, chosen: Collection[str]) -> Version:
    """The code that made its last steps, and digests of data. Of a run of earlier versions there
    are digests alone, also of definitions."""
    digests: dict[str, str] = run.config.get("made_of") or run.config.get("functions", {})
    return (*newest_code(run, chosen), *sorted(digests.items()))


def newest_code(run: Run, chosen: Collection[str]) -> Version:
    return next(reversed(versions_of(run.folder, chosen).values()), ())


def names_by_words(runs: Sequence[Run], settings: list[Json], versions: list[Version]
                   ) -> list[str]:
    """What of its settings and its version most runs do not have, or else its weighting and
    advantage. Its version is compared with most runs that have the same settings, and as far as it
    counts for plain GRPO, too, with most runs of all."""
    usual: dict[str, str] = {}  # of the settings in which some differ
    for setting in sorted(set().union(*settings)):
        values = [json.dumps(own[setting]) for own in settings if setting in own]
        if len({*values}) > 1:
            usual[setting] = max(values, key=values.count)
            if setting in PLAIN_SETTINGS:
                usual[setting] = json.dumps(PLAIN_SETTINGS[setting])
    of_plain = [newest_code(run, PLAIN.values()) for run in runs]
    unlike_same = differing_from_most(versions, list(map(digest_of, settings)))
    unlike_all = differing_from_most(of_plain, [own["made by"] for own in settings])
    names = []
    for own, *labels in zip(settings, unlike_same, unlike_all):
        words = [f"{setting} {own[setting]}" for setting, value in usual.items()
                 if setting in own and json.dumps(own[setting]) != value]
        if any(labels) and own["changed"] == "never":
            words.append(f"another {in_short(labels[0] + labels[1])}")
        axes = [f"{setting} {own[setting]}" for setting in usual if setting in PLAIN]
        names.append(" ".join(words or axes))
    return [name or ("plain GRPO" if any(names) and is_plain({0: run}) else "all other runs"
                     if any(names) else "all runs") for name, run in zip(names, runs)]


def differing_from_most(versions: list[Version], groups: list[str]) -> list[list[str]]:
    """For each run the labels of what differs from most runs of its group."""
    of_group: dict[str, list[Version]] = defaultdict(list)
    for version, group in zip(versions, groups):
        of_group[group].append(version)
    usual = {group: max(known, key=known.count) for group, known in of_group.items()}
    return [differing(usual[group], version) for version, group in zip(versions, groups)]


def in_short(labels: Iterable[str]) -> str:
    first, *others = dict.fromkeys(labels)
    return f"{first} and {len(others)} more" if others else first


def diff_commands(arms: Arms) -> list[str]:
    """Commands that show how the code of other arms differs from that of the first one."""
    runs = [next(iter(arm.values())) for arm in arms.values()]
    chosen = {name for run in runs for name in chosen_in(run.config)}
    first, *others = [(newest_code(run, chosen), code_folders(run.folder)[-1:]) for run in runs]
    found: dict[Version, str] = {}
    for code, folder in others:
        if code and first[0] and code != first[0]:
            found.setdefault(code, shlex.join(["diff", "-r", *map(str, first[1] + folder)]))
    return [*found.values()]


def arms_of(runs: Sequence[Run], baseline: str | None = None) -> dict[str, dict[int, Run]]:
    """The runs by arm and seed. The first arm is the one that the others are compared with: the one
    that is named, or plain GRPO."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run, name in zip(runs, names_of(runs)):
        other = arms[name].setdefault(run.config["seed"], run)
        if other is not run:
            raise UserError(f"{other.folder} and {run.folder} are one arm with one seed: name one")
    if baseline and baseline not in arms:
        raise UserError(f"--baseline {baseline} is none of the arms: {', '.join(arms)}")
    plain = [name for name, arm in arms.items() if is_plain(arm)]
    first = baseline or min(plain, key=len, default=next(iter(arms)))
    return {first: arms.pop(first), **arms}


def is_plain(arm: Arm) -> bool:
    config = next(iter(arm.values())).config
    return all(config.get(name, value) == value for name, value in PLAIN_SETTINGS.items())


def same_part(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The runs up to the newest step that all of them have, with their evaluations up to the newest
    one that all have; and sentences about what is compared. A record with a hole is refused."""
    for run in runs:
        for hole in missing_steps(run.folder):
            raise UserError(f"the record of {run.folder} is not whole: {hole}. So it cannot be "
                            "compared")
    shortest = min(runs, key=lambda run: run.last_step)
    step, held_out, notes = shortest.last_step, evaluated_by_all(runs), []
    where = f"{len(runs)} runs are compared up to step {step}"
    if any(run.last_step > step for run in runs):
        where += f", the last one of {shortest.folder}"
    if not have_same_problems(runs):
        held_out = 0
        notes.append("Held-out success is not compared, because the problems are not known to be "
                     "the same")
    elif held_out:
        where += f", and held-out success after step {held_out}"
    else:
        notes.append("Held-out success is not compared, because there is no evaluation after a "
                     "step that all of them have")
    parts = []
    for run in runs:
        part = copy(run)
        part.metrics = [line for line in run.metrics if line["step"] <= step]
        part.evaluations = [line for line in run.evaluations if line["step"] <= held_out]
        part.last_step = step
        parts.append(part)
    return parts, [where, *notes]


def evaluated_by_all(runs: Sequence[Run]) -> int:
    """The newest step after which all runs were evaluated; 0 if there is none."""
    steps = [{line["step"] for line in run.evaluated()} for run in runs]
    return max(set.intersection(*steps), default=0)


def have_same_problems(runs: Sequence[Run]) -> bool:
    """By the digest of each run's held-out problems; an older run has only those that an evaluation
    shows."""
    known = [run.config.get("held_out_problems", [one["problem"] for one in line["shown"]])
             for run in runs for line in run.evaluations[:1]]
    return all(one == known[0] for one in known)


# ------------------------------------------------------------------- gains


@dataclass(frozen=True)
class Gain:
    """The difference in success between one arm and another, over the seeds that both have.

    p is corrected by Holm's method for all gains that are tested together. It is nan if there are
    too few pairs for a test.
    """
    seeds: tuple[int, ...]
    estimate: Estimate
    p: float = np.nan

    @property
    def pairs(self) -> int:
        return len(self.seeds)

    @property
    def verdict(self) -> str:
        """A word for a table. Where no difference is seen, the interval beside it says how large
        one may still be."""
        if not self.pairs:
            return "nothing to compare"
        if self.pairs == 1:
            return "one seed: no verdict"
        if not self.p < LEVEL:
            return NOT_SEEN
        return BETTER if self.estimate.value > 0 else WORSE


def called(first: Gain, again: Gain | None = None) -> str:
    """The word for a method after one look, or after a second look on new seeds: the one rule for
    ahead and behind.

    Why two looks? Of 100 methods that change nothing, two or three are better in one look by luck,
    and whoever tries many methods finds them.
    """
    if first.verdict == WORSE:
        return BEHIND
    if first.verdict != BETTER:
        return first.verdict
    if again is None:
        return "better once, second look to come"
    return AHEAD if again.verdict == BETTER else f"better once, then {again.verdict}"


def doubt_about_training(runs: list[Run]) -> str:
    """The reason why success in training says little about these runs; empty if there is none."""
    configs = [run.config for run in runs]
    if any(config.get("pairs") for config in configs):
        return "the answers of training were not sampled from the policy"
    if any(config.get("dynamic_sampling", 1) > 1 for config in configs):
        return "--dynamic_sampling has chosen the answers on record by their rewards"
    # Runs that are compared have the same data, steps and problems in a step, so one tells of all.
    recorded = next((run for run in runs if run.steps), None)
    repeated = share_seen_before(recorded) if recorded else 0.0
    if repeated > MOST_REPEATED:
        return (f"{repeated:.0%} of the problems of training had come before, so an answer may "
                "be remembered")
    return ""


def room_left(estimate: Estimate) -> str:
    """A clause that says which gains and losses a 95% interval leaves open."""
    gain, loss = shown(estimate.high, "size"), shown(-estimate.low, "size")
    if not np.isfinite(estimate.low):
        return "these pairs give no interval"
    if estimate.low >= 0:
        return f"the interval leaves room for a gain of up to {gain} points"
    if estimate.high <= 0:
        return f"the interval leaves room for a loss of up to {loss} points"
    return f"the interval leaves room for a gain of up to {gain} points or a loss of up to {loss}"


def gain_over(mine: Arm, theirs: Arm, measure: str = IN_TRAINING) -> Gain:
    """The gain of one arm over another; its p is not corrected."""
    mode = "greedy" if measure == GREEDY_AT_THE_END else "sampled"
    found = {}
    for seed in sorted(set(mine) & set(theirs)):
        if measure == IN_TRAINING:
            difference = difference_in_training(mine[seed], theirs[seed])
        else:
            difference = difference_at_the_end(mine[seed], theirs[seed], mode)
        if difference is not None:
            found[seed] = difference
    if not found:
        return Gain((), Estimate(np.nan))
    pairs = list(found.values())
    estimate = paired_difference(pairs[0]) if len(pairs) == 1 else mean_over_pairs(pairs)
    return Gain(tuple(found), estimate, estimate.p)


def gains(family: Mapping[str, tuple[Arm, Arm]], measure: str = IN_TRAINING) -> dict[str, Gain]:
    """The gain of the first arm of each pair over the second, by the pair's label.

    Holm's correction is over all labels. A gain of a single pair has no p and does not count as a
    test.
    """
    found = {}
    for label, (mine, theirs) in family.items():
        gain = gain_over(mine, theirs, measure)
        found[label] = gain if gain.pairs >= 2 else replace(gain, p=np.nan)
    corrected = holm([gain.p for gain in found.values()])
    for label, p in zip(family, corrected):
        found[label] = replace(found[label], p=p)
    return found


def over_baseline(arms: Mapping[str, Arm], baseline: str) -> dict[str, tuple[Arm, Arm]]:
    """The pairs of arms that `gains` takes: each arm beside the baseline."""
    return {name: (arm, arms[baseline]) for name, arm in arms.items() if name != baseline}


def gain_table(arms: Arms, measure: str = IN_TRAINING) -> Table:
    """A row for each arm, of which the first is the baseline. The number of pairs, p and the
    verdict are those of the measure. Of a measure that no run has there are no columns."""
    baseline, *_ = arms
    columns: dict[str, tuple[str, list[Cell]]] = {
        "arm": ("", [*arms]), "runs": ("d", [len(arm) for arm in arms.values()])}
    headings = {"p": "p, Holm's correction"}
    for which, short in ((IN_TRAINING, "training"), (AT_THE_END, "held out")):
        means = [mean_of(arm, which) for arm in arms.values()]
        if np.isfinite(means).any():
            found = gains(over_baseline(arms, baseline), which)
            columns[short] = (".1%", [*means])
            columns[f"gain, {short}"] = ("points", [
                found[name].estimate if name in found else None for name in arms])
            headings[f"gain, {short}"] = f"gain{WITH_INTERVAL}"
    tested = gains(over_baseline(arms, baseline), measure)
    columns |= {
        "pairs": ("d", [tested[name].pairs if name in tested else None for name in arms]),
        "p": ("p", [tested[name].p if name in tested else None for name in arms]),
        "verdict": ("", [tested[name].verdict if name in tested else "baseline" for name in arms])}
    said = in_words(measure, (run for arm in arms.values() for run in arm.values()))
    return Table("gains", f"The gain of each arm over {baseline}, in percentage points; p and "
                 f"verdict are of the {said}", columns, headings=headings)


def mean_of(arm: Arm, measure: str) -> float:
    """The mean over the runs of an arm that have it."""
    runs = [*arm.values()]
    if measure == IN_TRAINING:
        return mean_over([mean_in_training(run, of_runs(runs)) for run in runs]).value
    mean, *_ = COLUMNS[of_runs(runs)]
    return mean_over([line[mean] for line in final_lines(runs, "sampled")]).value


def difference_in_training(mine: Run, theirs: Run) -> Floats | None:
    """(1,) how much more success, or reward, one run has than another with the same problems; None
    if that is not known."""
    if not mine.metrics or len(mine.metrics) != len(theirs.metrics):
        return None
    what = of_runs([mine, theirs])
    difference = mean_in_training(mine, what) - mean_in_training(theirs, what)
    return np.array([difference]) if np.isfinite(difference) else None


def difference_at_the_end(mine: Run, theirs: Run, mode: str) -> Floats | None:
    """(problems,) the difference in each held-out problem, after the last step."""
    my_end, their_end = final_lines([mine], mode), final_lines([theirs], mode)
    if not my_end or not their_end or my_end[0]["step"] != their_end[0]["step"]:
        return None
    *_, each = COLUMNS[of_runs([mine, theirs])]
    return np.asarray(np.array(my_end[0][each], float) - np.array(their_end[0][each], float))


def of_runs(runs: Iterable[Run]) -> str:
    """What these runs are compared by: success, or the reward if one of them has no success."""
    return "reward" if any(run.measure == "reward" for run in runs) else "success"


def in_words(measure: str, runs: Iterable[Run]) -> str:
    """A measure as people read it. A difference of rewards is told in hundredths, too."""
    if of_runs(runs) == "success":
        return measure
    return f"{measure.replace('success', 'reward')} (100 points are a reward of 1)"


def mean_in_training(run: Run, what: str) -> float:
    """The success, or the reward, of all answers of the training; every step has as many."""
    return float(np.mean([line[what] for line in run.metrics], dtype=float)) if run.metrics else (
        np.nan)


def final_lines(runs: Collection[Run], mode: str) -> list[Json]:
    """The evaluations after the last step on record, of the runs that have one."""
    return [line for run in runs for line in run.evaluated(mode)[-1:] if line["step"] > 0]
