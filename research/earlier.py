"""The tables of an earlier experiment by its own definitions, the right figure beside:
python analyze.py RUN --all.

LEGEND says what it did; what was wrong in it is in research/published_mistake.md.
"""
import itertools
from pathlib import Path

import numpy as np

from analysis.statistics import verdicts
from analysis.tables import Table, by_row
from analysis.tally import (DRAWN, MEASURES, PARTITIONS, Tally, cell_over_cell,
                            early_over_late, text_of)
from engine.tokens import naive_class
from harness.identity import run_config

TITLE = "The tables of an earlier experiment, by its own definitions"
LEGEND = (
    "An earlier experiment (github.com/Ja-Crispy/GRPO-Zero) logged advantage * log_prob of every "
    "token and called it the gradient: the old unit here. Its classes came from a regex: "
    "reasoning is digits and operators, structure whole tags, filler the rest. pub.* and "
    "published* are its figures, phase 1 and 2 its two attempts. They are those of another model "
    "(Qwen2.5-0.5B-Instruct, its own problems, 303,042 tokens): for orientation, not for "
    "comparison.")
UNITS = ("contribution", "gradient")
LABELS = {"contribution": "A lp", "gradient": "A w s"}  # lp: log p
SIZES = {"contribution": "abs(A lp)", "gradient": "abs(A) w s"}
CLASSES = ("filler", "reasoning", "structure")  # of its regex
WORDS = {  # full headings of the columns of these tables
    "A lp": "mean A log p", "log p": "mean log p", "abs(A)": "mean abs(A)", "s": "mean s",
    "abs(A lp)": "mean abs(A log p), old unit", "abs(A) w s": "mean abs(A) w s, gradient",
    "pub.*": "published*", "log p*": "published* log p",
    "95%": "95% interval", "spread": "standard deviation", "of all": "share of all tokens",
    "bin": "tenth of the answer, from 0"}
PUBLISHED = {
    "mean": 0.079, "spread": 1.168, "mean size": 0.307, "smallest": -28.0, "largest": 33.3,
    "early over late": 1.6,
    "position": (0.347194, 0.366896, 0.329356, 0.303315, 0.318367,
                 0.306196, 0.305382, 0.300810, 0.270468, 0.212966),
    "position log p": (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835,
                       -0.503752, -0.537406, -0.560431, -0.511919, -0.258263),
    "classes": {  # tokens, share, mean log p, mean contribution, mean size
        "filler": (205_410, 0.678, -0.555, 0.0786, 0.333),
        "reasoning": (97_632, 0.322, -0.489, 0.0793, 0.254)},
    "filler by fifth": (0.3579, 0.3656, 0.3176, 0.3890, 0.2356),
    "reasoning by fifth": (0.3458, 0.2084, 0.2977, 0.2362, 0.2568),
    "filler over reasoning": 1.31}
PUBLISHED_DISCOUNTED = {  # what it published of its run with a discount of 0.75
    "classes": {"filler": (None, None, None, None, 0.348),
                "reasoning": (None, None, None, None, 0.247)},
    "filler by fifth": (0.386, 0.380, 0.345, 0.378, 0.235),
    "reasoning by fifth": (0.244, 0.190, 0.357, 0.242, 0.237),
    "filler over reasoning": 1.41}


class EarlierTally(Tally):
    """With its unit, the contribution A log p, and its classes."""
    partitions = {name: PARTITIONS[name] for name in ("all", "position", "ends")} | {
        "class": CLASSES, "class by fifth": tuple(itertools.product(CLASSES, range(5)))}
    drawn = (*DRAWN, "abs contribution")
    measures = (*drawn, *MEASURES[len(DRAWN):], "log_prob", *UNITS,
                *(f"squared {unit}" for unit in UNITS))

    def __init__(self, run: Path):
        super().__init__(run)
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}

    def add(self, tokens: dict[str, np.ndarray], block: int) -> None:
        given = tokens["advantage"] * tokens["log_prob"]
        tokens = {**tokens, "contribution": given, "abs contribution": np.abs(given)}
        super().add(tokens, block)
        for unit, (low, high) in self.extremes.items():
            self.extremes[unit] = [min(low, tokens[unit].min()), max(high, tokens[unit].max())]

    def cells(self, tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        by_class = classes_of(self.tokenizer, tokens["token_id"])
        cells = {"class": by_class, "class by fifth": 5 * by_class + self.bin_of(tokens, 5)}
        return {name: cell for name, cell in (super().cells(tokens) | cells).items()
                if name in self.partitions}

    def spread(self, partition: str, measure: str) -> np.ndarray:
        """(cells,) the sample's standard deviation."""
        n, total = self.total(partition, "tokens"), self.total(partition, measure)
        squares = self.total(partition, f"squared {measure}")
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(((squares - total ** 2 / n) / (n - 1)).clip(0))


def classes_of(tokenizer, ids: np.ndarray) -> np.ndarray:
    """(tokens,) the index in CLASSES of each."""
    different, which = np.unique(ids, return_inverse=True)
    return np.array([CLASSES.index(naive_class(text_of(tokenizer, i))) for i in different])[which]


def published_of(tally: EarlierTally) -> dict:
    """Its figures; where the run has the discount that it also published figures of, those."""
    config = run_config(tally.run)
    if (config["mitigation"], config.get("think_discount")) == ("outcome_conditional", 0.75):
        return PUBLISHED | PUBLISHED_DISCOUNTED
    return PUBLISHED


def earlier_tables(run: Path, status=lambda text: None) -> dict[str, list[Table]]:
    """Of a run, as a chapter of its page."""
    tally = EarlierTally(run)
    tally.read(status)
    return {TITLE: [contributions(tally), positions(tally), classes(tally),
                    classes_by_fifth(tally), filler_over_reasoning(tally)]}


def contributions(tally: EarlierTally) -> Table:
    names = ("mean", "spread", "mean size", "smallest", "largest")
    columns = {"": ("", names)}
    for unit in UNITS:
        values = [tally.mean("all", unit)[0], tally.spread("all", unit)[0],
                  tally.mean("all", f"abs {unit}")[0], *tally.extremes[unit]]
        columns[LABELS[unit]] = (".4f", values)
    columns["pub.* A lp"] = (".3f", [PUBLISHED[name] for name in names])
    return Table("contribution", "What a token was given: the old unit and the gradient, signed",
                 columns, "",
                 [LEGEND, "A log p has no limit as p goes to 0, A w s has; spread: the sample's "
                  "standard deviation; mean size: the mean of the absolute values"],
                 {"A lp": "A log p, old unit", "A w s": "A w s, gradient",
                  "pub.* A lp": "published* A log p"})


def positions(tally: EarlierTally) -> Table:
    columns = {"bin": ("", [str(i) for i in range(10)]),
               "tokens": (",d", tally.count("position")),
               "log p": (".3f", tally.mean("position", "log_prob")),
               "A lp": (".4f", tally.mean("position", "contribution")),
               "spread": (".3f", tally.spread("position", "contribution")),
               "abs(A lp)": (".4f", tally.mean("position", "abs contribution")),
               "pub.*": (".3f", PUBLISHED["position"]),
               "log p*": (".2f", PUBLISHED["position log p"])}
    early = early_over_late(tally, "contribution")
    return Table("position", "Ten bins of relative position, in the old unit", columns,
                 f"In the old unit the first fifth over the last is {early.value:.2f} (published: "
                 f"{PUBLISHED['early over late']}).", [],
                 {**WORDS, "pub.*": "published* mean size"})


def classes(tally: EarlierTally) -> Table:
    tokens = tally.count("class")
    measures = ("log_prob", "contribution", "abs contribution", "abs gradient", "abs advantage",
                "s")
    means = np.stack([tally.mean("class", measure) for measure in measures], axis=1)
    rows = [[f"{name} (regex)", tokens[i], tokens[i] / tally.tokens, *means[i]]
            for i, name in enumerate(CLASSES)]
    for name, figures in published_of(tally)["classes"].items():
        rows.append([f"{name} (pub.*)", *figures, None, None, None])
    formats = {"class": "", "tokens": ",d", "of all": ".1%", "log p": ".3f", "A lp": "+.4f",
               "abs(A lp)": ".4f", "abs(A) w s": ".4f", "abs(A)": ".3f", "s": ".3f"}
    return Table("classes", "Classes of tokens by the earlier regex, in the old unit",
                 by_row(formats, rows), "",
                 ["the sign of a mean A log p says how advantages and log-probs go together over "
                  "answers; it is no credit to a class"], WORDS)


def classes_by_fifth(tally: EarlierTally) -> Table:
    """Fifth by fifth, and in each the classes that occur there."""
    tokens, known = tally.count("class by fifth"), published_of(tally)
    published = [known["filler by fifth"], known["reasoning by fifth"], [None] * 5]
    rows = [(fifth, c) for fifth in range(5) for c in range(len(CLASSES)) if tokens[5 * c + fifth]]
    cells = [5 * c + fifth for fifth, c in rows]
    columns = {"part": ("", [f"{20 * fifth}-{20 * fifth + 20}%" for fifth, _ in rows]),
               "class": ("", [CLASSES[c] for _, c in rows]),
               "tokens": (",d", tokens[cells]),
               "log p": (".3f", tally.mean("class by fifth", "log_prob")[cells])}
    ahead = []
    for unit in UNITS:
        sizes = tally.mean("class by fifth", f"abs {unit}")
        columns[SIZES[unit]] = (".3f", sizes[cells])
        ahead.append(f"in {int((sizes[:5] > sizes[5:10]).sum())} of 5 bins by {SIZES[unit]}")
    columns["pub.*"] = (".3f", [published[c][fifth] for fifth, c in rows])
    return Table("class by position", "Classes (regex) in five bins of relative position", columns,
                 f"Filler is ahead of reasoning {', '.join(ahead)} (published: "
                 f"{sum(np.greater(*published[:2]))} of 5 in the old unit).", [],
                 {**WORDS, "pub.*": "published* abs(A lp)"})


def filler_over_reasoning(tally: EarlierTally) -> Table:
    found = [cell_over_cell(tally, "class", unit, 0, 1) for unit in UNITS]
    names = [f"filler/reasoning ({LABELS[unit]})" for unit in UNITS]
    published = published_of(tally)["filler over reasoning"]
    columns = {"ratio": ("", ["published*", *names]),
               "crude": (".2f", [published, *(e.value for e in found)]),
               "95%": (".2f", [None, *(e.interval for e in found)]),
               "difference": ("", ["", *verdicts(found)])}
    return Table("filler over reasoning", "Filler over reasoning: mean sizes, wherever they stand",
                 columns, "", [],
                 {"ratio": "filler over reasoning", "crude": "ratio", "95%": "95% interval"})
