"""Does what a single batch's gradient knows, measured on the way, say how well an arm will learn?

How it is decided, written down before it was measured: the rank correlation over all arms of the
cosine of one batch's gradient with the true gradient (probe noise, five seeds) with the success at
the end, before training and after a third of it. A forecast holds where the interval is above 0.
"""
from dataclasses import dataclass

import numpy as np

from analysis.plots import BLUE, panels, save
from analysis.runs import is_number
from analysis.statistics import Estimate, rank_correlation
from analysis.tables import Table, by_row
from research.experiments.experiments import BEFORE, RACE_STEPS, RACE_TO, WHEN
from research.experiments.finished import (END, Study, cells_of_arms, evaluated, mean_success, moving_mean,
                            training_success)
from research.probes.common import Findings
from research.probes.pictures import name_points, write_across

SAME_DIRECTION = {"dr_grpo": "rloo"}  # a multiple of it
# of an arm: the probe, its table, the column, the interval's column, the format
KNOWN = {"index": ("scoreboard", "scores", "index", "95%", "+.2f"),
         "direction": ("noise", "noise", "cosine", "cosine 95%", ".2f"),
         "one batch": ("noise", "noise", "one batch", "95%", ".3f")}
DRAWS = 4000
FEWEST_ARMS = 4


@dataclass
class Racer:
    """An arm: what one batch knows by when it was measured, how many answers it needed, how far it
    came."""
    arm: str
    seeds: int
    one_batch: dict[str, float]  # without the times at which it is unknown
    answers: float               # until the mean over seeds got there; infinite if it never did
    by_seed: list[float]         # the same of each seed alone
    success: float               # held out, at the end
    ends: tuple[float, float]    # of the seed with the least of it, and with the most


def report(study: Study) -> Findings:
    racers = sorted(racers_of(study).values(), key=lambda racer: -racer.success)
    forecasts = {time: [racer for racer in racers if time in racer.one_batch] for time in WHEN}
    correlations = {time: correlate(known, time) for time, known in forecasts.items()}
    tables = [race_table(racers), correlation_table(correlations)]
    return Findings("The forecast", study.intro(), tables, ("race",),
                    pictures=[draw(study, forecasts)], places={"race": ("forecast",)})


def racers_of(study: Study) -> dict[str, Racer]:
    """Of each arm that has a finished run."""
    measured = {time: cells_of_arms("noise", time, "noise", "one batch") for time in WHEN}
    return {arm: make_racer(arm, runs, measured) for arm, runs in study.runs.items()}


def make_racer(arm: str, runs: dict[int, dict], measured: dict[str, dict[str, list]]) -> Racer:
    one_batch = {}
    for time, of_arms in measured.items():
        [known] = of_arms.get(SAME_DIRECTION.get(arm, arm), [None])
        if is_number(known):
            one_batch[time] = known
    by_seed = [answers_needed([run]) for run in runs.values()]
    ends = [evaluated(run, END)["success"] for run in runs.values()]
    return Racer(arm, len(runs), one_batch, answers_needed(list(runs.values())), by_seed,
                 mean_success(runs, END), (min(ends), max(ends)))


def answers_needed(runs: list[dict]) -> float:
    """Until the mean curve of these runs is there; infinite if it never is."""
    config = runs[0]["config"]
    curve = np.mean([training_success(run) for run in runs], axis=0)
    there = np.flatnonzero(moving_mean(curve, RACE_STEPS) >= RACE_TO - 1e-9)
    if not len(there):
        return float("inf")
    return float((there[0] + RACE_STEPS) * config["questions"] * config["answers"])


@dataclass
class Correlation:
    """Over arms: with the answers needed, and with the success at the end."""
    arms: int
    answers: Estimate
    success: Estimate


def correlate(racers: list[Racer], time: str) -> Correlation:
    """Arms that never got there are last, and equal."""
    known = [racer.one_batch[time] for racer in racers]
    return Correlation(len(racers), spearman(known, [racer.answers for racer in racers]),
                       spearman(known, [racer.success for racer in racers]))


def spearman(first: list[float], second: list[float]) -> Estimate:
    """With an interval by drawing arms again."""
    unknown, count = float("nan"), len(first)
    if count < FEWEST_ARMS:
        return Estimate(unknown, unknown, unknown, unknown)
    x, y = np.array(first), np.array(second)
    rng, draws = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = rng.integers(0, count, count)
        draws.append(rank_correlation(x[drawn], y[drawn]))
    low, high = np.nanquantile(draws, [0.025, 0.975]).tolist()
    return Estimate(rank_correlation(x, y), low, high, unknown)


def race_table(racers: list[Racer]) -> Table:
    """What the probes know of each arm beside what became of it."""
    names = {racer.arm: SAME_DIRECTION.get(racer.arm, racer.arm) for racer in racers}
    columns = {"arm": ("", list(names)), "seeds": ("d", [racer.seeds for racer in racers])}
    headings = {"answers": "answers needed", "by seed": "single seeds",
                "end": "success at the end"}
    for what, (probe, table, value, interval, spec) in KNOWN.items():
        for time, when in WHEN.items():
            cells = cells_of_arms(probe, time, table, value, interval)
            values, intervals = zip(*[cells.get(name, [None, None]) for name in names.values()])
            key = what if time == BEFORE else f"later {what}"
            columns |= {key: (spec, list(values)), f"{key} 95%": (spec, list(intervals))}
            headings |= {key: f"{what} {when}", f"{key} 95%": "lowest to highest"}
    columns |= {"answers": ("", [as_text(racer.answers) for racer in racers]),
                "by seed": ("", [spread(racer.by_seed) for racer in racers]),
                "end": (".1%", [racer.success for racer in racers])}
    return Table("race", "What the probes know, and what became of it", columns, "", notes(),
                 headings)


def as_text(answers: float) -> str:
    return f"{answers:,.0f}" if np.isfinite(answers) else "never"


def spread(by_seed: list[float]) -> str:
    low, high = as_text(min(by_seed)), as_text(max(by_seed))
    return low if low == high else f"{low} to {high}"


def notes() -> list[str]:
    return ["index: what the weights know of where the reward is decided, from -1 to 1, 0 by "
            "chance; direction: cosine of the mean gradient with the true one, 1 where an arm "
            "changes no direction; one batch: that of a single batch's gradient. python -m research "
            "probes --only scoreboard and --only noise measure them",
            f"answers needed: trained on until the mean success of the last {RACE_STEPS} training "
            f"steps, over seeds, reaches {RACE_TO:.0%}"]


def correlation_table(correlations: dict[str, Correlation]) -> Table:
    rows, findings = [], []
    for time, found in correlations.items():
        rows.append([WHEN[time], found.arms, found.answers.value, found.answers.interval,
                     found.success.value, found.success.interval])
        findings.append(in_words(WHEN[time], found))
    formats = {"when": "", "arms": "d", "answers": "+.2f", "95%": "+.2f", "success": "+.2f",
               "its 95%": "+.2f"}
    return Table("correlation", "Rank correlation of what one batch knows, over arms",
                 by_row(formats, rows), "\n".join(findings),
                 ["a forecast that holds has -1 with answers needed, +1 with success; intervals "
                  "are a bootstrap over arms"],
                 {"when": "one batch measured", "answers": "with answers needed",
                  "95%": "95% interval", "success": "with success at the end",
                  "its 95%": "95% interval"})


def in_words(when: str, found: Correlation) -> str:
    if not np.isfinite(found.success.value):
        return f"One batch {when}: known of too few arms ({found.arms}) to compare the orders."
    success = found.success
    return (f"What one batch knows {when} and success at the end have a rank correlation of "
            f"{success.value:+.2f} ({success.low:+.2f} to {success.high:+.2f}) over {found.arms} "
            "arms.")


def draw(study: Study, forecasts: dict[str, list[Racer]]):
    figure, axes = panels(2, figsize=(14.0, 5.0))
    for axis, (time, racers) in zip(axes, forecasts.items()):
        axis.set(title=f"Measured {WHEN[time]}", ylabel="held-out success at the end, %",
                 xlabel="cosine of a single batch's gradient with the true one")
        if racers:
            draw_racers(axis, racers, time)
        else:
            write_across(axis, "It is known of no finished arm")
    return save(figure, study.folder, "forecast",
                "Cosine of a single batch's gradient with the true one, and held-out success at "
                "the end of training")


def draw_racers(axis, racers: list[Racer], time: str) -> None:
    points = []
    for racer in racers:
        place = racer.one_batch[time], 100 * racer.success
        axis.plot(*place, "o", ms=5, color=BLUE)
        points.append((racer.arm, *place))
    name_points(axis, points)
