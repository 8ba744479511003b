"""Does the noise of an arm, measured on the way, say how fast it will learn?"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator

from analysis.plots import BLUE, ORANGE, panels, save
from analysis.runs import is_number
from analysis.statistics import Estimate, rank_correlation
from analysis.tables import Table, by_row
from engine.errors import UserError
from engine.files import read_json
from study.experiments import RACE_STEPS, RACE_TO
from study.finished import END, Study, evaluated, mean_success, moving_mean, training_success
from truth.common import Findings
from truth.pictures import name_points, write_across

SAME_DIRECTION = {"dr_grpo": "rloo"}  # a multiple of it, so its noise is the same
START, THIRD = "before training", "after a third of it"  # when the noise was measured
DRAWS = 4000
FEWEST_ARMS = 4


@dataclass
class Racer:
    """An arm: its noise by when it was measured, how many answers it needed, how far it came."""
    arm: str
    seeds: int
    noise: dict[str, float]      # without the times at which it is unknown
    answers: float               # until the mean over seeds got there; infinite if it never did
    by_seed: list[float]         # the same of each seed alone
    success: float               # held out, at the end
    ends: tuple[float, float]    # of the seed with the least of it, and with the most


def report(study: Study) -> Findings:
    racers = sorted(racers_of(study).values(), key=lambda racer: (racer.answers, -racer.success))
    forecasts = [(when, known_at(when, racers)) for when in (START, THIRD)]
    correlations = {when: correlate(known, when) for when, known in forecasts}
    tables = [race_table(racers, study), correlation_table(correlations)]
    return Findings("The forecast", study.intro(), tables, ("race",),
                    pictures=[draw(study, forecasts)], places={"race": ("forecast",)})


def racers_of(study: Study) -> dict[str, Racer]:
    """Of each arm that has a finished run."""
    noises = {START: noise_of_arms(study.scores), THIRD: noise_of_arms(study.later_scores)}
    return {arm: make_racer(arm, runs, noises) for arm, runs in study.runs.items()}


def noise_of_arms(folder: Path | None) -> dict[str, float]:
    """Arms whose noise is unknown are left out."""
    noises = scored(folder, "directions", "noise")
    return {arm: noise for arm, noise in noises.items() if is_number(noise) and noise > 0}


def scored(folder: Path | None, table: str, column: str) -> dict[str, float | None]:
    """What the scoreboard's table has in this column, by arm."""
    if folder is None:
        return {}
    numbers = read_json(folder / "numbers.json")
    try:
        tables = {of_numbers["name"]: of_numbers for of_numbers in numbers["tables"]}
        return {row["arm"]: row[column] for row in tables[table]["rows"]}
    except (KeyError, TypeError):
        raise UserError(f"{folder}/numbers.json has no table of {table}: what --scores and "
                        "--later_scores name is written by python -m truth.scoreboard") from None


def make_racer(arm: str, runs: dict[int, dict], noises: dict[str, dict[str, float]]) -> Racer:
    name = SAME_DIRECTION.get(arm, arm)
    noise = {when: of_arm[name] for when, of_arm in noises.items() if name in of_arm}
    by_seed = [answers_needed([run]) for run in runs.values()]
    ends = [evaluated(run, END)["success"] for run in runs.values()]
    return Racer(arm, len(runs), noise, answers_needed(list(runs.values())), by_seed,
                 mean_success(runs, END), (min(ends), max(ends)))


def answers_needed(runs: list[dict]) -> float:
    """Until the mean curve of these runs is there; infinite if it never is."""
    config = runs[0]["config"]
    curve = np.mean([training_success(run) for run in runs], axis=0)
    there = np.flatnonzero(moving_mean(curve, RACE_STEPS) >= RACE_TO - 1e-9)
    if not len(there):
        return float("inf")
    return float((there[0] + RACE_STEPS) * config["questions"] * config["answers"])


def known_at(when: str, racers: list[Racer]) -> list[Racer]:
    return [racer for racer in racers if when in racer.noise]


@dataclass
class Correlation:
    """Of the noise, over arms: with the answers needed, and with the success at the end."""
    arms: int
    answers: Estimate
    success: Estimate


def correlate(racers: list[Racer], when: str) -> Correlation:
    """Arms that never got there are last, and equal."""
    noise = [racer.noise[when] for racer in racers]
    return Correlation(len(racers), spearman(noise, [racer.answers for racer in racers]),
                       spearman(noise, [racer.success for racer in racers]))


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


def race_table(racers: list[Racer], study: Study) -> Table:
    rows = []
    for racer in racers:
        noise = [racer.noise.get(when) for when in (START, THIRD)]
        rows.append([racer.arm, racer.seeds, *noise, as_text(racer.answers), spread(racer.by_seed),
                     racer.success])
    formats = {"arm": "", "seeds": "d", "noise": ".1f", "later": ".1f", "answers": "",
               "by_seed": "", "end": ".1%"}
    return Table("race", f"Noise, and answers needed to reach {RACE_TO:.0%}",
                 by_row(formats, rows), "", notes(study),
                 {"noise": f"noise {START}", "later": THIRD, "answers": "answers needed",
                  "by_seed": "single seeds", "end": "held out at the end"})


def as_text(answers: float) -> str:
    return f"{answers:,.0f}" if np.isfinite(answers) else "never"


def spread(by_seed: list[float]) -> str:
    low, high = as_text(min(by_seed)), as_text(max(by_seed))
    return low if low == high else f"{low} to {high}"


def notes(study: Study) -> list[str]:
    texts = [f"answers needed: trained on until the mean success of the last {RACE_STEPS} training "
             f"steps, over seeds, reaches {RACE_TO:.0%}. Noise: variance of a batch over the "
             "squared part of the mean along the true gradient"]
    if not (study.scores and study.later_scores):
        texts.append("noise needs --scores and --later_scores, folders that python -m "
                     "truth.scoreboard wrote")
    return texts


def correlation_table(correlations: dict[str, Correlation]) -> Table:
    rows, findings = [], []
    for when, found in correlations.items():
        rows.append([when, found.arms, found.answers.value, found.answers.interval,
                     found.success.value, found.success.interval])
        findings.append(in_words(when, found))
    formats = {"when": "", "arms": "d", "answers": "+.2f", "95%": "+.2f", "success": "+.2f",
               "its 95%": "+.2f"}
    return Table("correlation", "Rank correlation of the noise, over arms", by_row(formats, rows),
                 "\n".join(findings),
                 ["a forecast that holds has +1 with answers needed, -1 with success; intervals "
                  "are a bootstrap over arms"],
                 {"when": "noise measured", "answers": "with answers needed",
                  "95%": "95% interval", "success": "with success at the end",
                  "its 95%": "95% interval"})


def in_words(when: str, found: Correlation) -> str:
    if not np.isfinite(found.success.value):
        return f"Noise {when}: of too few arms ({found.arms}) to compare the two orders."
    success = found.success
    return (f"Noise {when} and success at the end have a rank correlation of {success.value:+.2f} "
            f"({success.low:+.2f} to {success.high:+.2f}) over {found.arms} arms.")


def draw(study: Study, forecasts: list[tuple[str, list[Racer]]]):
    figure, axes = panels(2, figsize=(14.0, 5.0))
    for axis, (when, racers) in zip(axes, forecasts):
        axis.set(title=f"Noise {when}", xlabel="noise over signal", ylabel="answers needed")
        if racers:
            draw_racers(axis, racers, when)
        else:
            write_across(axis, "The noise of no finished arm is known")
    return save(figure, study.folder, "forecast",
                "Noise of a batch, and the answers an arm was trained on until it solved "
                f"{RACE_TO:.0%}; orange at the top edge: never")


def draw_racers(axis, racers: list[Racer], when: str) -> None:
    finite = [racer.answers for racer in racers if np.isfinite(racer.answers)]
    top = 1.15 * max(finite, default=1.0)
    points = []
    for racer in racers:
        got_there = np.isfinite(racer.answers)
        height = racer.answers if got_there else top
        axis.plot(racer.noise[when], height, "o" if got_there else "^", ms=5, clip_on=False,
                  color=BLUE if got_there else ORANGE)
        points.append((racer.arm, racer.noise[when], height))
    axis.set(xscale="log", ylim=(0, top))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    name_points(axis, points)
