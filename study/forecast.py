"""Does the noise of an arm, measured before training, say how fast it will learn?"""
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
from study.finished import Study, moving_mean, training_success
from truth.common import Findings
from truth.pictures import name_points, write_across

SAME_DIRECTION = {"dr_grpo": "rloo"}  # a multiple of it, so its noise is the same
DRAWS = 4000
FEWEST_ARMS = 4


@dataclass
class Racer:
    """An arm: its noise before training, and how many answers it needed."""
    arm: str
    seeds: int
    noise: float | None     # None: it was not measured
    answers: float          # infinite: it never got there


def report(study: Study) -> Findings:
    noises = noise_of_arms(study.scores) if study.scores else {}
    racers = []
    for arm, runs in study.runs.items():
        noise = noises.get(SAME_DIRECTION.get(arm, arm))
        racers.append(Racer(arm, len(runs), noise, answers_needed(list(runs.values()))))
    known = [racer for racer in racers if racer.noise is not None]
    rows = [row_of(racer) for racer in racers]
    formats = {"arm": "", "seeds": "d", "noise": ".1f", "answers": ",.0f", "there": ""}
    correlation = spearman(known)
    table = Table("race", f"Noise at the start, and answers needed to reach {RACE_TO:.0%}",
                  by_row(formats, rows), in_words(known, correlation), notes(study),
                  {"noise": "noise at the start", "answers": "answers needed",
                   "there": "got there"})
    numbers = Table("correlation", "Rank correlation of the two, over arms", by_row(
        {"arms": "d", "correlation": "+.2f", "95%": "+.2f"},
        [[len(known), correlation.value, correlation.interval]]), headings={"95%": "95% interval"})
    return Findings("The forecast", study.intro(), [table, numbers], ("race",),
                    pictures=[draw(study, known)], places={"race": ("forecast",)})


def notes(study: Study) -> list[str]:
    texts = [f"answers needed: trained on until the mean success of the last {RACE_STEPS} training "
             f"steps, over seeds, reaches {RACE_TO:.0%}. Noise: variance of a batch over the "
             "squared part of the mean along the true gradient. The interval is a bootstrap over "
             "arms"]
    if not study.scores:
        texts.append("the noise needs --scores, a folder that python -m truth.scoreboard wrote")
    return texts


def noise_of_arms(folder: Path) -> dict[str, float]:
    """From the scoreboard's table of directions; arms whose noise is unknown are left out."""
    numbers = read_json(folder / "numbers.json")
    try:
        tables = {table["name"]: table for table in numbers["tables"]}
        noises = {row["arm"]: row["noise"] for row in tables["directions"]["rows"]}
    except (KeyError, TypeError):
        raise UserError(f"{folder}/numbers.json has no table of directions: --scores is a folder "
                        "that python -m truth.scoreboard wrote") from None
    return {arm: noise for arm, noise in noises.items() if is_number(noise) and noise > 0}


def answers_needed(runs: list[dict]) -> float:
    """Until the mean curve of these runs is there; infinite if it never is."""
    config = runs[0]["config"]
    curve = np.mean([training_success(run) for run in runs], axis=0)
    there = np.flatnonzero(moving_mean(curve, RACE_STEPS) >= RACE_TO - 1e-9)
    if not len(there):
        return float("inf")
    return float((there[0] + RACE_STEPS) * config["questions"] * config["answers"])


def row_of(racer: Racer) -> list:
    if np.isfinite(racer.answers):
        return [racer.arm, racer.seeds, racer.noise, racer.answers, "yes"]
    return [racer.arm, racer.seeds, racer.noise, None, "never"]


def spearman(racers: list[Racer]) -> Estimate:
    """Those that never got there are last, and equal."""
    noise = np.array([racer.noise for racer in racers], float)
    answers = np.array([racer.answers for racer in racers])
    unknown = float("nan")
    if len(racers) < FEWEST_ARMS:
        return Estimate(unknown, unknown, unknown, unknown)
    rng, draws = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = rng.integers(0, len(racers), len(racers))
        draws.append(rank_correlation(noise[drawn], answers[drawn]))
    low, high = np.nanquantile(draws, [0.025, 0.975]).tolist()
    return Estimate(rank_correlation(noise, answers), low, high, unknown)


def in_words(racers: list[Racer], correlation: Estimate) -> str:
    if not np.isfinite(correlation.value):
        return f"Too few arms with a known noise ({len(racers)}) to compare the two orders."
    return (f"Noise at the start and answers needed have a rank correlation of "
            f"{correlation.value:+.2f} ({correlation.low:+.2f} to {correlation.high:+.2f}) over "
            f"{len(racers)} arms.")


def draw(study: Study, racers: list[Racer]):
    figure, axis = panels(1, figsize=(9.0, 5.0))
    axis.set(title=f"Does noise say how long it takes to reach {RACE_TO:.0%}?",
             xlabel="noise over signal, measured at the start", ylabel="answers needed")
    if racers:
        draw_racers(axis, racers)
    else:
        write_across(axis, "The noise of no finished arm is known")
    return save(figure, study.folder, "forecast",
                "Noise of a batch before training, and the answers an arm was trained on until it "
                f"solved {RACE_TO:.0%}; orange at the top edge: never")


def draw_racers(axis, racers: list[Racer]) -> None:
    finite = [racer.answers for racer in racers if np.isfinite(racer.answers)]
    top = 1.15 * max(finite, default=1.0)
    points = []
    for racer in racers:
        got_there = np.isfinite(racer.answers)
        height = racer.answers if got_there else top
        axis.plot(racer.noise, height, "o" if got_there else "^", ms=5, clip_on=False,
                  color=BLUE if got_there else ORANGE)
        points.append((racer.arm, racer.noise, height))
    axis.set(xscale="log", ylim=(0, top))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    name_points(axis, points)
