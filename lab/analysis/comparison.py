"""Runs as arms, compared: which runs are one arm, what may be compared, the gain of one arm over
another, and the verdict. `lab idea`, `lab experiment`, `lab compare` and `lab notes` share it.

    arms = arms_of(runs)                                    # by the settings in which runs differ
    found = gains({"my_idea": (arms["my_idea"], arms["none"])})
    found["my_idea"].estimate                               # the mean over seeds, with its interval
    found["my_idea"].verdict                          # ahead once, behind, or no difference seen

An arm is a set of runs, one for each seed. Two runs with the same seed get the same problems at
every step, so runs are paired by seed: problems that are easy or hard for both arms cancel in the
difference.

There is one rule for all experiments. Pairs of runs are a *look*. In one look a method is *ahead
once* or *behind* if its p is below 0.05, after Holm's correction for all methods that are tested
together (`Gain.verdict`). It is *ahead* if it is ahead once more in a second look on new seeds. For
*behind* one look is enough (`called`). Where no difference is seen, the interval's upper end says
which gains are excluded.

Success in training is the mean over all answers that training sampled, up to equal cost: as many
steps, as many sampled tokens, or as much processor time (lab/analysis/cost.py). If a step costs
more than DEARER times as much as the other arm's, the verdict is that of equal time, and if the
time is not known, that of equal tokens; else it is that of equal steps. Held-out success at the end
is that of the last policy, on problems that no run trained on. If a task does not say which answers
are right, the reward takes the place of success.
"""
import json
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from analyze import MEASURES as COLUMNS
from lab.analysis.cost import (Costs, Pair, at_equal_time, break_even, gain_for, is_known,
                               ratio_of)
from lab.analysis.run_folders import PLAIN_SETTINGS, Run, flags_of_methods, share_seen_before
from lab.analysis.statistics import (Estimate, Floats, holm, mean_over, mean_over_pairs,
                                     paired_difference, percentile)
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from lab.engine.errors import UserError
from lab.harness.read_record import missing_steps
from lab.harness.record import Json
from lab.harness.screen import say
from lab.countdown import Task
from lab.harness.flags import flags_of
from lab.harness.settings import NOT_SETTINGS, LabSettings
from lab.harness.versions import (PLAIN, Version, changes_of_run, chosen_in, differing, digest_of,
                                  versions_of)
from run import code_folders

IN_TRAINING, AT_EQUAL_TOKENS, AT_EQUAL_TIME, AT_THE_END, GREEDY_AT_THE_END = MEASURES = (
    "success in training", "success in training at equal sampled tokens",
    "success in training at equal processor time", "held-out success at the end",
    "held-out success of greedy answers at the end")
LABELS = dict(zip(MEASURES, ("equal steps", "equal tokens", "equal time", "end, sampled",
                             "end, greedy")))
DEARER = 1.1        # times as much: a step that costs more is judged at equal time
LEVEL = 0.05        # a difference is seen if its corrected p is below this
FEWEST_PAIRS = 4    # from fewer pairs not even their spread is known
AHEAD_ONCE, BEHIND, NOT_SEEN = "ahead once", "behind", "no difference seen"  # in one look
AHEAD = "ahead"
MOST_REPEATED = 0.1  # share of the training problems that had come before

Arm = Mapping[int, Run]  # the runs of one arm, by seed
Arms = Mapping[str, Arm]


# ------------------------------------------------------------------- what may be compared


# settings in which runs of one arm may differ. With more --steps the same steps come first, and
# arms are compared at steps that all have.
NOT_OF_ARM = {*NOT_SETTINGS, "seed", "out", "threads", "checkpoint_every", "change_every",
              "eval_every", "micro_batch", "steps", "eval_tasks"}
DEFAULTS = {name: flag.default for owner in (LabSettings, Task)
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
    changes, code = changes_of_run(run.folder, run.config), code_folders(run.folder)
    is_of_lab = code and (code[-1] / "lab/run.py").exists()
    changed = [f"after step {step}: {in_short(labels)}" for step, labels in changes.items()]
    return {name: value for name, value in known if name not in NOT_OF_ARM} | {
        "made by": "the lab" if is_of_lab else "the book",
        "changed": ", ".join(changed) or "never"}


def version_of_run(run: Run, chosen: Collection[str]) -> Version:
    """The code that made its last steps, and digests of data."""
    digests: dict[str, str] = run.config.get("made_of", {})
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


def refuse_holes(runs: Sequence[Run]) -> None:
    for run in runs:
        for hole in missing_steps(run.folder):
            raise UserError(f"the record of {run.folder} is not whole: {hole}. So it cannot be "
                            "compared")


def comparable(arms: Arms, at_ends: bool = False) -> tuple[dict[str, dict[int, Run]], list[str]]:
    """The runs of each arm up to the newest step that all of them have, with their evaluations up
    to the one that is compared; and sentences about what is compared. Evaluations are compared
    after the same step, or, of arms of different lengths, at their ends if all had paid alike, or
    if this is asked for."""
    parts, shorter = {}, ""
    for name, arm in arms.items():
        by_end = {run.last_step: run for run in arm.values()}
        end = min(by_end, default=0)
        parts[name] = {seed: cut(run, end) for seed, run in arm.items()}
        if len(by_end) > 1:
            shorter += f"; {name} up to step {end}, the last one of {by_end[end].folder}"
    runs = [run for arm in parts.values() for run in arm.values()]
    ends, held_out = {run.last_step for run in runs}, evaluated_by_all(runs)
    what = f"Held-out success is compared after step {held_out}"
    if not have_same_problems(runs):
        held_out = 0
        what = ("Held-out success is not compared, because the problems are not known to be the "
                "same")
    elif len(ends) > 1 and are_paid_alike(runs):
        held_out = max(ends)
        what = "Held-out success is compared at the ends: all have sampled as many tokens by then"
    elif len(ends) > 1 and at_ends and all(map(ends_evaluated, runs)):
        held_out = max(ends)
        what = "Held-out success is compared at the end of each arm, which have not paid alike"
    elif not held_out:
        what = ("Held-out success is not compared, because there is no evaluation after a step "
                "that all of them have")
    for run in runs:
        run.evaluations = [line for line in run.evaluations if line["step"] <= held_out]
    return parts, [f"{len(runs)} runs are compared, each arm up to the newest step that all of its "
                   f"runs have{shorter}", what]


def cut(run: Run, step: int) -> Run:
    """The run up to this step."""
    part = copy(run)
    part.metrics = [line for line in run.metrics if line["step"] <= step]
    part.evaluations = [line for line in run.evaluations if line["step"] <= step]
    part.last_step = step
    return part


def are_paid_alike(runs: Sequence[Run]) -> bool:
    """Whether all runs end with an evaluation and have sampled as many tokens by then."""
    paid = [np.sum(cost_of(run, AT_EQUAL_TOKENS)) for run in runs]
    return all(map(ends_evaluated, runs)) and bool(max(paid) <= DEARER * min(paid))


def ends_evaluated(run: Run) -> bool:
    return run.last_step in [line["step"] for line in run.evaluated()]


def evaluated_by_all(runs: Sequence[Run]) -> int:
    """The newest step after which all runs were evaluated; 0 if there is none."""
    steps = [{line["step"] for line in run.evaluated()} for run in runs]
    return max(set.intersection(*steps), default=0)


def have_same_problems(runs: Sequence[Run]) -> bool:
    """By the digest of each run's held-out problems; a run of the book has only those that an
    evaluation shows."""
    known = [run.config.get("held_out_problems") or [one["problem"] for one in line["shown"]]
             for run in runs for line in run.evaluations[:1]]
    return all(one == known[0] for one in known)


# ------------------------------------------------------------------- gains


@dataclass(frozen=True)
class Gain:
    """The difference in success between one arm and another, over the seeds that both have.

    p is corrected by Holm's method for all gains that are tested together. It is nan if there are
    too few pairs for a test. `cost` is how many times as much a step costs; if that is not known
    well enough, no gain is told.
    """
    seeds: tuple[int, ...]
    estimate: Estimate
    p: float = np.nan
    cost: Estimate = Estimate(np.nan)
    is_told: bool = True

    @property
    def pairs(self) -> int:
        return len(self.seeds)

    @property
    def verdict(self) -> str:
        if not self.pairs:
            return "nothing to compare"
        if self.pairs == 1:
            return "one seed: no verdict"
        if not self.p < LEVEL:
            return NOT_SEEN
        return AHEAD_ONCE if self.estimate.value > 0 else BEHIND

    def excluded_above(self, tests: int = 1) -> float:
        """Gains above this are excluded by the 95% interval; of several arms that are tested
        together it holds for all at once (Bonferroni). nan if the pairs are too few."""
        if self.pairs < FEWEST_PAIRS:
            return np.nan
        wider = percentile(self.pairs - 1, 1 - 0.025 / tests) / percentile(self.pairs - 1)
        up = self.estimate.high - self.estimate.value
        return max(self.estimate.value + wider * up, 0.0)


def called(first: Gain, again: Gain | None = None) -> str:
    """The word for a method after one look, or after a second look on new seeds: the one rule for
    ahead and behind.

    Why two looks? Of 100 methods that change nothing, two or three are ahead in one look by luck,
    and whoever tries many methods finds them.
    """
    if again is None or first.verdict != AHEAD_ONCE:
        return first.verdict
    return AHEAD if again.verdict == AHEAD_ONCE else f"{AHEAD_ONCE}, then {again.verdict}"


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


def gain_over(mine: Arm, theirs: Arm, measure: str = IN_TRAINING) -> Gain:
    """The gain of one arm over another; its p is not corrected."""
    pairs = {seed: (mine[seed], theirs[seed]) for seed in sorted(set(mine) & set(theirs))}
    if measure not in (AT_THE_END, GREEDY_AT_THE_END):
        return gain_in_training(pairs, measure)
    mode = "greedy" if measure == GREEDY_AT_THE_END else "sampled"
    ends = {seed: difference_at_the_end(*pair, mode) for seed, pair in pairs.items()}
    found = {seed: end for seed, end in ends.items() if end is not None}
    if not found:
        return Gain((), Estimate(np.nan))
    known = list(found.values())
    estimate = paired_difference(known[0]) if len(known) == 1 else mean_over_pairs(known)
    return Gain(tuple(found), estimate, estimate.p)


def gain_in_training(pairs: Mapping[int, tuple[Run, Run]], measure: str) -> Gain:
    """The gain up to equal cost, over the pairs of which success and cost are on record."""
    found = dict[int, tuple[Pair, Costs]]()
    for seed, (mine, theirs) in pairs.items():
        success, paid = success_of(mine, theirs), (cost_of(mine, measure), cost_of(theirs, measure))
        if min(map(len, success)) and np.isfinite(np.concatenate([*success, *paid])).all():
            found[seed] = success, paid
    if not found:
        return Gain((), Estimate(np.nan), is_told=False)
    both, costs = [one for one, _ in found.values()], [one for _, one in found.values()]
    is_time, ratio = measure == AT_EQUAL_TIME, ratio_of(costs)
    gain = (at_equal_time if is_time else gain_for)(both, costs)
    return Gain(tuple(found), gain, gain.p, ratio, not is_time or is_known(ratio))


def success_of(mine: Run, theirs: Run) -> Pair:
    what = of_runs([mine, theirs])
    one, other = (np.array([line[what] for line in run.metrics], float) for run in (mine, theirs))
    return one, other


def cost_of(run: Run, measure: str) -> Floats:
    """(steps,) what each step cost; nan if that is not on record. The time of a step is the median
    over the run's steps, because other programs disturb some of them."""
    if measure == IN_TRAINING:
        return np.ones(len(run.metrics))
    if measure == AT_EQUAL_TOKENS:
        names = "tokens", "extra_tokens"  # of the batch, and what else a method has sampled
        of_batch, more = (np.array([line.get(name) for line in run.metrics], float)
                          for name in names)
        return np.asarray(of_batch + np.nan_to_num(more))
    clock = "processor_seconds" if run.config.get("device", "cpu") == "cpu" else "seconds"
    seconds = np.array([line.get(clock) for line in run.metrics], float)
    return np.full(len(seconds), np.median(seconds) if len(seconds) else np.nan)


def deciding(mine: Arm, theirs: Arm) -> str:
    """The measure that the verdict is about."""
    for measure in (AT_EQUAL_TIME, AT_EQUAL_TOKENS):
        gain = gain_over(mine, theirs, measure)
        if gain.is_told:
            return measure if gain.cost.value > DEARER else IN_TRAINING
    return IN_TRAINING


def gains(family: Mapping[str, tuple[Arm, Arm]], measure: str = IN_TRAINING) -> dict[str, Gain]:
    """The gain of the first arm of each pair over the second, by the pair's label. Holm's
    correction is over all labels."""
    return corrected({label: gain_over(*pair, measure) for label, pair in family.items()})


def corrected(found: Mapping[str, Gain]) -> dict[str, Gain]:
    """The gains with Holm's correction for all of them. A gain of a single pair has no p and does
    not count as a test."""
    p = holm([gain.p if gain.pairs >= 2 else np.nan for gain in found.values()])
    return {label: replace(gain, p=one) for (label, gain), one in zip(found.items(), p)}


def over_baseline(arms: Mapping[str, Arm], baseline: str) -> dict[str, tuple[Arm, Arm]]:
    """The pairs of arms that `gains` takes: each arm beside the baseline."""
    return {name: (arm, arms[baseline]) for name, arm in arms.items() if name != baseline}


def arm_table(arms: Arms) -> Table:
    """What each arm reached: means over its runs."""
    rows: list[Row] = []
    for name, arm in arms.items():
        steps = max((run.last_step for run in arm.values()), default=None)
        rows.append([name, len(arm), steps, *(mean_of(arm, one) for one in (
            IN_TRAINING, AT_THE_END, GREEDY_AT_THE_END))])
    formats = {"arm": "", "runs": "d", "steps": "d", "in training": ".1%", "end, sampled": ".1%",
               "end, greedy": ".1%"}
    return Table("arms", "", by_row(formats, rows))


def gain_table(arms: Arms, measure: str = "") -> Table:
    """The gain of each arm over the first one, the baseline, by each measure on record. The one by
    which an arm is judged, `measure` or else the one that its cost decides, has p and verdict."""
    baseline, *_ = arms
    family = over_baseline(arms, baseline)
    judged_by = {name: measure or deciding(*pair) for name, pair in family.items()}
    judged = corrected({name: gain_over(*pair, judged_by[name]) for name, pair in family.items()})
    rows: list[Row] = []
    notes = []
    for name, pair in family.items():
        for one, label in LABELS.items():
            gain, p, verdict = gain_over(*pair, one), np.nan, ""
            if one == judged_by[name]:
                p, verdict = judged[name].p, with_excluded(judged[name])
            is_first = one == IN_TRAINING
            if gain.pairs or verdict or is_first:
                rows.append([name if is_first else "", label, gain.cost.value,
                             gain.estimate if gain.is_told else None, gain.pairs, p, verdict])
        notes += [f"{name} {clause} one of {baseline}" for clause in about_cost(*pair)]
    limits = [gain.excluded_above(len(judged)) for gain in judged.values()]
    is_one_ahead = AHEAD_ONCE in [gain.verdict for gain in judged.values()]
    if len(judged) > 1 and np.isfinite(limits).all() and not is_one_ahead:
        limit = shown(max(limits), "points")
        notes.append(f"For all {len(judged)} arms together, gains above {limit} are excluded (95%)")
    formats = {"arm": "", "compared at": "", "a step costs": ".2f", "gain": "points",
               "pairs": "d", "p (Holm)": "p", "verdict": ""}
    hundredths = in_words("", (run for arm in arms.values() for run in arm.values()))
    return Table("gains", f"The gain of each arm over {baseline} in percentage points{hundredths}, "
                 f"and what a step costs, in steps of {baseline}", by_row(formats, rows), notes,
                 {"gain": f"gain{WITH_INTERVAL}"})


def say_gains(arms: Arms, measure: str = "") -> None:
    table = gain_table(arms, measure)
    say(f"\n{arm_table(arms).to_text()}\n\n{textwrap.fill(table.title, 100)}:\n{table.to_text()}\n")
    for note in table.notes:
        say(textwrap.fill(f"{note}.", 100))


def with_excluded(gain: Gain) -> str:
    """The verdict for a table: beside *no difference seen* stands which gains are excluded."""
    limit = gain.excluded_above()
    if gain.verdict != NOT_SEEN or not np.isfinite(limit):
        return gain.verdict
    return f"{NOT_SEEN}, above {shown(limit, 'points')} excluded"


def about_cost(mine: Arm, theirs: Arm) -> Iterator[str]:
    """Clauses on how dear a step is, where no gain is told at equal time, and on how dear it may
    be, where there is a gain at equal steps that it may lose."""
    at_steps, at_time = (gain_over(mine, theirs, one) for one in (IN_TRAINING, AT_EQUAL_TIME))
    is_unsure = at_time.pairs > 1 and not at_time.is_told
    if is_unsure:
        yield ("cannot be compared at equal processor time, because a step was measured to cost "
               f"{shown(at_time.cost.interval, '.2f')} times as much as")
    if at_steps.estimate.low > 0 or is_unsure and at_steps.estimate.value > 0:
        most = break_even([success_of(mine[seed], theirs[seed]) for seed in at_steps.seeds])
        yield f"gains as long as a step costs less than {shown(most, '.1f')} times as much as"


def mean_of(arm: Arm, measure: str) -> float:
    """The mean over the runs of an arm that have it."""
    runs = [*arm.values()]
    if measure == IN_TRAINING:
        return mean_over([mean_in_training(run, of_runs(runs)) for run in runs]).value
    mean, *_ = COLUMNS[of_runs(runs)]
    mode = "greedy" if measure == GREEDY_AT_THE_END else "sampled"
    return mean_over([line[mean] for line in final_lines(runs, mode)]).value


def difference_at_the_end(mine: Run, theirs: Run, mode: str) -> Floats | None:
    """(problems,) the difference in each held-out problem, after the last step."""
    my_end, their_end = final_lines([mine], mode), final_lines([theirs], mode)
    if not my_end or not their_end:
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
