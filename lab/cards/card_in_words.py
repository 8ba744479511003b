"""The closing paragraph of a card: what follows from its rows, a sentence for each kind of row."""
import re

import numpy as np

from analysis.statistics import Estimate
from analysis.tables import shown
from engine.errors import PROJECT

Rows = dict[str, dict[str, object]]
TURNED = 0.9  # a smaller cosine is called a turn


def closing(name: str, rows: Rows, claim: str, trains: str) -> str:
    """The paragraph. `trains` is the command that makes the runs which the last rows need."""
    said = [*exact_in_words(name, rows), *noises_in_words(rows), *planted_in_words(rows),
            *trained_in_words(rows, trains)]
    if claim:
        said.append(f"Its paper, {claim.rstrip('.')}.")
    return " ".join(said)


def verdict(name: str, rows: Rows) -> str:
    """The first line of a card, from the rows that are exact; "" where there are none."""
    cosine, noise = own_estimate(rows, "direction"), own_estimate(rows, "noise")
    if cosine is None or noise is None:
        return ""
    if cosine.value < TURNED:
        return (f"{name} turns the gradient away from the true one: where all answers are listed "
                f"their cosine is {cosine.value:.2f}, and the noise is {noise.value:.1f} times "
                "plain GRPO's. It is not expected to learn what the reward asks for.")
    size = f"{noise.value:.2f} times plain GRPO's noise, exactly, where all answers are listed"
    if noise.value < 0.95:
        return f"{name} keeps the direction, with less noise: {size}."
    if noise.value > 1.05:
        return f"{name} keeps the direction, with more noise: {size}."
    return f"{name} is as plain GRPO: it keeps the direction, with {size}."


def exact_in_words(name: str, rows: Rows) -> list[str]:
    cosine, noise = own_estimate(rows, "direction"), own_estimate(rows, "noise")
    if cosine is None or noise is None:
        return []
    keeps = "keeps the direction of the true gradient"
    if cosine.value < 0.9995:
        keeps = f"turns the gradient away from the true one, to a cosine of {cosine.value:.3f}"
    return [f"Where all answers are listed {name} {keeps}, with {noise.value:.2f} times plain "
            "GRPO's noise over signal."]


def noises_in_words(rows: Rows) -> list[str]:
    said = []
    for key, when in (("batch_start", "untrained"), ("batch_half", "half trained")):
        factor = own_estimate(rows, key)
        if factor is not None:
            said.append(f"On the {when} model its gradient has {noise_in_words(factor)}.")
    return said


def noise_in_words(factor: Estimate) -> str:
    """less noise than plain GRPO: that of a batch 1.5 times as large (1.1 to 2.1)"""
    number = f"{factor.value:.2f} times as large ({shown(factor.interval, '.2f')})"
    if not np.isfinite(factor.low):
        return "a direction that so few batches do not show"
    if factor.low > 1:
        return f"less noise than plain GRPO's: that of a batch {number}"
    if factor.high < 1:
        return f"more noise than plain GRPO's: that of a batch {number}"
    return f"noise that so few batches do not tell from plain GRPO's: that of a batch {number}"


def planted_in_words(rows: Rows) -> list[str]:
    gains = {key: own_estimate(rows, key) for key in ("few", "some", "many")}
    measured = {key: gain for key, gain in gains.items() if gain is not None}
    if not measured:
        return []
    better = [key for key, gain in measured.items() if gain.low > 0]
    worse = [key for key, gain in measured.items() if gain.high < 0]
    text = f"better where {' or '.join(better)} decide" if better else "not seen to be better"
    if worse:
        text += f", and worse where {' or '.join(worse)} decide"
    told = [str(row["told"]) for row in (rows[key] for key in measured) if row.get("told")]
    return [f"Where it is known which tokens decide, it is {text} (each interval for itself).",
            *told[:1]]


def trained_in_words(rows: Rows, trains: str) -> list[str]:
    said = []
    for key, where in (("board", "On the leaderboard of the tiny model"),
                       ("real", "On that of a real model")):
        gain = own_estimate(rows, key)
        if gain is not None:
            said.append(f"{where} its gain is {shown(gain, 'points')} points: "
                        f"{rows[key]['verdict']}.")
    trained = own_estimate(rows, "training")
    if trained is not None:
        return [*said, f"Trained, it gains {shown(trained, 'points')} points over plain GRPO."]
    if not said:
        said.append("It has not been trained.")
    return [*said, f"{trains} trains it beside its placebo, and its card, made again, then has "
                   "these rows."]


def own_estimate(rows: Rows, key: str) -> Estimate | None:
    """The method's own number in this row, if it has one."""
    own = rows.get(key, {}).get("own")
    return own if isinstance(own, Estimate) else None


def claim_of(name: str) -> str:
    """What the method's paper claims, by the page of methods; empty if it has no row there."""
    path = PROJECT / "docs/methods.md"
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) > 5 and re.match(rf"`{name}`", cells[1]):
                return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[3])
    return ""
