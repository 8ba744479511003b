"""One arm's gain over another: success over pairs of runs, its interval, its p, and a verdict.

    found = gains({"my_idea": (arms["my_idea"], arms["none"])})
    found["my_idea"].estimate    # the mean over seeds, with its 95% interval
    found["my_idea"].verdict     # better, worse, or no difference seen

An arm is a set of runs, one for each seed. Two runs with the same seed get the same problems at
every step, so runs are paired by seed: problems that are easy or hard for both arms cancel in the
difference.

There is one rule for all experiments. Pairs of runs are a *look*. In one look a method is better or
worse if its p is below 0.05, after Holm's correction for all methods that are tested together
(`Gain.verdict`). A method is *ahead* if it is better, and better again in a second look on new
seeds. It is *behind* if it is worse: one look is enough (`called`).

Success in training is the mean over all answers that training sampled: it counts each of them. Held
out success at the end is that of the last policy, on problems that no run trained on.
"""
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.analysis.run_folders import PLAIN_SETTINGS, Run, share_seen_before
from lab.analysis.statistics import Estimate, Floats, holm, mean_over, paired_difference
from lab.analysis.tables import WITH_INTERVAL, Columns, Row, Table, shown
from lab.engine.errors import UserError
from lab.harness.record import Json

IN_TRAINING, AT_THE_END = MEASURES = ("success in training", "held-out success at the end")
GREEDY_AT_THE_END = "held-out success of greedy answers at the end"
LEVEL = 0.05        # a difference is seen if its corrected p is below this
FEWEST_PAIRS = 4    # from fewer pairs not even their spread is known
BETTER, WORSE, NOT_SEEN = "better", "worse", "no difference seen"  # in one look
AHEAD, BEHIND = "ahead", "behind"
MOST_REPEATED = 0.1  # share of the training problems that had come before
SAME = 1e-12        # success that differs by less differs by rounding alone

Arm = Mapping[int, Run]  # the runs of one arm, by seed
Arms = Mapping[str, Arm]


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
    def is_seen(self) -> bool:
        return self.p < LEVEL

    @property
    def has_few_pairs(self) -> bool:
        return self.pairs < FEWEST_PAIRS

    @property
    def verdict(self) -> str:
        """A word for a table. Where no difference is seen, the interval beside it says how large
        one may still be."""
        if not self.pairs:
            return "nothing to compare"
        if self.pairs == 1:
            return "one seed: no verdict"
        if not self.is_seen:
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


def mean_over_pairs(pairs: list[Floats]) -> Estimate:
    """The mean over pairs of runs, by Student's t. Where all pairs have the same mean difference,
    which is luck in short runs, their spread says nothing of other seeds: there is no interval and
    no p. Runs that are the same to the bit differ by 0 in every pair, and this is known."""
    differences = [float(pair.mean()) for pair in pairs]
    is_known = all((abs(pair) < SAME).all() for pair in pairs)
    if np.ptp(differences) < SAME and not is_known:
        return Estimate(differences[0])
    return mean_over(differences)


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


def gain_table(name: str, title: str, found: Mapping[str, Gain], over: str) -> Table:
    """A row for each arm: pairs, gain, p, and the verdict."""
    pairs: Row = []
    estimates: Row = []
    p: Row = []
    words: Row = []
    for gain in found.values():
        pairs.append(gain.pairs)
        estimates.append(gain.estimate)
        p.append(gain.p)
        words.append(gain.verdict)
    columns: Columns = {
        "arm": ("", list(found)),
        "pairs": ("d", pairs),
        "gain": ("points", estimates),
        "p": ("p", p),
        "verdict": ("", words)}
    headings = {"gain": f"gain over {over}{WITH_INTERVAL}", "p": "p, Holm's correction"}
    return Table(name, title, columns, headings=headings)


def difference_in_training(mine: Run, theirs: Run) -> Floats | None:
    """(1,) how much more success one run has than another with the same problems; None if that is
    not known."""
    if not mine.metrics or len(mine.metrics) != len(theirs.metrics):
        return None
    difference = mean_success(mine) - mean_success(theirs)
    return np.array([difference]) if np.isfinite(difference) else None


def difference_at_the_end(mine: Run, theirs: Run, mode: str) -> Floats | None:
    """(problems,) the difference in each held-out problem, after the last step."""
    my_end, their_end = final_lines([mine], mode), final_lines([theirs], mode)
    if not my_end or not their_end:
        return None
    my_answers = np.array(my_end[0]["answer"], float)
    return np.asarray(my_answers - np.array(their_end[0]["answer"], float))


def mean_success(run: Run) -> float:
    """The success of all answers of the training; every step has as many."""
    return float(success_by_step(run).mean()) if run.metrics else np.nan


def success_by_step(run: Run) -> Floats:
    """(steps,) the share of a batch's answers that are right."""
    return np.array([line["success"] for line in run.metrics], float)


def final_lines(runs: Collection[Run], mode: str) -> list[Json]:
    """The evaluations after the last step, of the runs that have one."""
    lines = []
    for run in runs:
        last_step = run.config["steps"]
        lines += [line for line in run.evaluated(mode) if line["step"] == last_step]
    return lines


# settings in which runs of one arm may differ
NOT_OF_ARM = {"seed", "out", "threads", "versions", "checkpoint_every", "change_every",
              "eval_every", "micro_batch", "model_config", "columns_temperature",
              "trained_parameters", "made_of", "git_commit", "changed", "finished",
              "held_out_problems"}


def names_of(runs: Sequence[Run]) -> list[str]:
    """A name for the arm of each run: the settings in which the arms differ."""
    known = [{name: value for name, value in run.config.items() if name not in NOT_OF_ARM}
             for run in runs]
    differing = [name for name in sorted(set().union(*known))
                 if len({json.dumps(config[name]) for config in known if name in config}) > 1]
    return [" ".join(f"{name} {config[name]}" for name in differing if name in config) or "all runs"
            for config in known]


def arms_of(runs: Sequence[Run], baseline: str | None = None) -> dict[str, dict[int, Run]]:
    """The runs by arm and seed. The first arm is the one that the others are compared with: the one
    that is named, or plain GRPO."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run, name in zip(runs, names_of(runs)):
        other = arms[name].setdefault(run.config["seed"], run)
        if other is not run:
            raise UserError(f"{other.folder} and {run.folder} are one arm with one seed: "
                            "name one")
    if baseline and baseline not in arms:
        raise UserError(f"--baseline {baseline} is none of the arms: {', '.join(arms)}")
    plain = [name for name, arm in arms.items() if is_plain(arm)]
    first = baseline or (plain or list(arms))[0]
    return {first: arms.pop(first), **arms}


def is_plain(arm: Arm) -> bool:
    config = next(iter(arm.values())).config
    return all(config.get(name, value) == value for name, value in PLAIN_SETTINGS.items())
