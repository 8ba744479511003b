"""The tables of the notes that this lab began with, from the credit files of any run.

    notes = Notes(run, Tally(run["folder"]))
    notes.mean("class", "abs contribution")   # (3,) of filler, reasoning, structure

The notes (github.com/Ja-Crispy/GRPO-Zero) took contribution = A log p for the gradient of a token.
It is the value of a term of the objective; the gradient has the size abs(A) w s. So each table has
both, and the notes' own figures. The definitions are theirs: classes by the token's own text; bins
of equal width up to the largest t / length, closed on the right; one t-statistic at each place t.
"""
import re
from functools import cache
from math import ceil, floor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LogNorm

from analysis.arms import Comparison
from analysis.page import Picture
from analysis.plots import BLUE, COLOURS, ORANGE, save, whole_steps
from analysis.compare import IN_TRAINING, difference, final_lines, mean_success
from analysis.runs import Run
from analysis.statistics import Estimate, Floats, mean_over
from analysis.tables import Columns, Row, Table, by_row
from analysis.tally import Tally, Tokens, read_tokens
from grpo import group_z_score
from harness.screen import show_status

CLASSES = FILLER, REASONING, STRUCTURE = "filler", "reasoning", "structure"
SPELLED = ("equals", "plus", "minus", "times", "divided")
UNITS = ("contribution", "gradient")  # A w log p, A w s
MEASURES = ("tokens", "log_prob", "s", *UNITS, *(f"{how} {unit}" for how in ("abs", "squared")
                                                 for unit in UNITS))
DRAWS = 20       # shuffles of the advantages within their groups
FEWEST = (2, 30)  # answers that a place must have for a t: the notes' number, and one that holds
UNDEFINED = np.errstate(invalid="ignore", divide="ignore")  # nan, which a table shows as -
VALUES = np.linspace(-5, 5, 101)  # edges of histograms; what lies outside counts in the last bar
LOG_PROBS, ADVANTAGES = np.linspace(-10, 0, 51), np.linspace(-4, 4, 41)

# The notes' figures, and in a few words what each depends on
CONTRIBUTION = {
    "mean": (0.079, "whether answers with A < 0 are longer or less sure"),
    "standard deviation": (1.168, "rare tokens: log p has no limit, s has"),
    "mean absolute": (0.307, "how unsure the model is; groups without spread"),
    "smallest": (-28.0, "one rare token of a right answer"),
    "largest": (33.3, "one rare token of a wrong answer")}
OF_BINS = (0.347194, 0.366896, 0.329356, 0.303315, 0.318367,
           0.306196, 0.305382, 0.300810, 0.270468, 0.212966)
LOG_PROB_OF_BINS = (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835,
                    -0.503752, -0.537406, -0.560431, -0.511919, -0.258263)
OF_T = {"above 3": (0.0027, 0.20), "below 1.5": (0.8664, 0.39),  # of normal numbers; the notes'
        "mean of abs(t)": (0.7979, 1.92)}
OF_CLASSES = {  # share of the tokens, mean log p, mean contribution
    FILLER: (0.678, -0.555, 0.0786), REASONING: (0.322, -0.489, 0.0793)}
OF_A_CLASS = {"share of the tokens": "how the tokenizer cuts tags",
              "mean log p; mean s": "what the model has learned",
              "mean": "how A goes along with log p",
              "mean absolute": "how unsure the model is, and abs(A)"}
LOG_PROB_OF_FIFTHS = {FILLER: (-0.6655, -0.6953, -0.5277, -0.4948, -0.3070),
                      REASONING: (-0.4088, -0.2738, -0.4922, -0.5909, -0.5414)}
SIZES = {  # mean absolute contribution of each class, by the discount of their run
    1.0: {FILLER: 0.333, REASONING: 0.254}, 0.75: {FILLER: 0.348, REASONING: 0.247}}
FIFTHS = {1.0: {FILLER: (0.3579, 0.3656, 0.3176, 0.3890, 0.2356),
                REASONING: (0.3458, 0.2084, 0.2977, 0.2362, 0.2568)},
          0.75: {FILLER: (0.386, 0.380, 0.345, 0.378, 0.235),
                 REASONING: (0.244, 0.190, 0.357, 0.242, 0.237)}}
TOP = {FILLER: (" ", ">", "answer", ",", " </", " to", ">\n"),
       REASONING: ("1", "2", "3", "4", "5", "6", " -"), STRUCTURE: ()}
BROKEN = 0.0, "equal credit, may destabilise; broken at step 60, norm 0.6 to 0.7"
EXPECTED = {  # weighting: held-out success at the notes' end; what they expected; and saw
    "none": (0.15, "wastes gradient on filler; learns, norm 2 to 3"),
    "outcome_conditional": (0.12, "more credit to the answer, may hurt reasoning; hurts"),
    "inverse_logprob": BROKEN, "inverse_logprob_as_published": BROKEN,
    "attention_credit": (None, "credit by the model's own attention; not run"),
    "entropy_weighted": (None, "forking tokens, gains from 8 billion parameters on; not run"),
    "entropy_masking": (None, "forking tokens; the gradient explodes")}


class Notes:
    """Sums over a run's tokens, a step in memory at a time: of[partition][cell, measure]. And at
    each place over[draw, unit, power, place]: draw 0 as it was, others with shuffled advantages."""

    def __init__(self, run: Run, tally: Tally, draws: int = DRAWS):
        self.tally, self.longest, self.is_weighted = tally, tally.longest, False
        self.rng, self.class_of = np.random.default_rng(0), cache(self.class_of_id)
        config = run["config"]
        is_discounted = (config["mitigation"], config.get("think_discount")) == (
            "outcome_conditional", 0.75)
        self.published = 0.75 if is_discounted else 1.0
        self.is_of_the_notes = is_discounted or config["mitigation"] == "none"
        ids, blocks = len(tally.kinds_of_id), len(tally.blocks)
        cells = {"all": 1, "sign": 3, "reward": 3, "bin": 10, "class": 3, "class by fifth": 15,
                 "class by block": 3 * blocks, "place": self.longest, "token": ids}
        self.of = {name: np.zeros((count, len(MEASURES))) for name, count in cells.items()}
        self.over = np.zeros((1 + draws, len(UNITS), 2, self.longest))
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}
        self.values = {unit: np.zeros(len(VALUES) - 1) for unit in UNITS}
        self.cloud = np.zeros((len(LOG_PROBS) - 1, len(ADVANTAGES) - 1))
        for block, steps in enumerate(tally.blocks):
            for step in steps.tolist():
                show_status(f"{run['folder'].name}: the notes' tables, step {step}")
                self.add(as_in_the_notes(read_tokens(run["folder"], step)), block)

    def class_of_id(self, token: int) -> int:
        return CLASSES.index(class_of(self.text_of(token)))

    def text_of(self, token: int) -> str:
        return self.tally.tokenizer.decode([token], skip_special_tokens=False)

    def add(self, tokens: Tokens, block: int) -> None:
        ids, which = np.unique(tokens["token_id"], return_inverse=True)
        by_class = np.array([self.class_of(i) for i in ids.tolist()])[which]
        cells = {"all": 0 * which, "sign": 1 + np.sign(tokens["advantage"]).astype(int),
                 "reward": 1 + tokens["reward sign"], "bin": self.bin_of(tokens, 10),
                 "class": by_class, "class by fifth": 5 * by_class + self.bin_of(tokens, 5),
                 "class by block": 3 * block + by_class, "place": tokens["place"],
                 "token": ids[which]}
        for name, cell in cells.items():
            for sums, measure in zip(self.of[name].T, MEASURES):
                values = tokens[measure] if measure != "tokens" else None
                sums += np.bincount(cell, values, len(sums))
        self.is_weighted |= bool((tokens["weight"] != 1).any())
        for unit in UNITS:
            low, high = self.extremes[unit]
            self.extremes[unit] = [min(low, tokens[unit].min()), max(high, tokens[unit].max())]
            self.values[unit] += np.histogram(tokens[unit].clip(*VALUES[[0, -1]]), VALUES)[0]
        self.cloud += np.histogram2d(tokens["log_prob"].clip(*LOG_PROBS[[0, -1]]),
                                     tokens["advantage"].clip(*ADVANTAGES[[0, -1]]),
                                     [LOG_PROBS, ADVANTAGES])[0]
        self.add_draws(tokens)

    def add_draws(self, tokens: Tokens) -> None:
        """A shuffle gives an answer the advantages of another one of its group: at a token that at
        the same share of its length."""
        answers, length = np.arange(len(tokens["group"])), tokens["length"]
        for draw, over in enumerate(self.over):
            giver = shuffled(tokens["group"], self.rng) if draw else answers
            theirs, mine = giver[tokens["answer"]], tokens["answer"]
            place = tokens["place"] * length[theirs] // length[mine]
            advantage = tokens["advantage"][tokens["episode_start"][theirs] + place]
            for sums, factor in zip(over, ("log_prob", "s")):
                value = advantage * tokens["weight"] * tokens[factor]
                sums[0] += np.bincount(tokens["place"], value, self.longest)
                sums[1] += np.bincount(tokens["place"], value ** 2, self.longest)

    def bin_of(self, tokens: Tokens, bins: int) -> np.ndarray:
        edges = np.linspace(0, (self.longest - 1) / self.longest, bins + 1)[1:-1]
        return np.searchsorted(edges, tokens["place"] / tokens["length"][tokens["answer"]])

    def total(self, partition: str, measure: str) -> Floats:
        return np.asarray(self.of[partition][:, MEASURES.index(measure)])

    def mean(self, partition: str, measure: str) -> Floats:
        return self.total(partition, measure) / self.total(partition, "tokens")

    def share(self, partition: str, measure: str) -> Floats:
        return np.asarray(self.total(partition, measure) / self.total(partition, measure).sum())

    def spread(self, partition: str, unit: str) -> Floats:
        """The sample's standard deviation."""
        n = self.total(partition, "tokens")
        variance = self.mean(partition, f"squared {unit}") - self.mean(partition, unit) ** 2
        return np.asarray(np.sqrt(variance.clip(0) * n / (n - 1)))

    def t(self, unit: str, fewest: int) -> Floats:
        """(1 + draws, places): mean / (population std / sqrt n), 0 without spread."""
        there = self.total("place", "tokens") >= fewest
        n, over = self.total("place", "tokens")[there], self.over[:, UNITS.index(unit)][..., there]
        mean, square = np.moveaxis(over / n, 1, 0)
        variance = square - mean ** 2
        has_spread = variance > 1e-14 * square  # less is rounding
        return np.where(has_spread, mean / np.sqrt(np.where(has_spread, variance, 1) / n), 0)

    @property
    def heads(self) -> dict[str, str]:
        """What the columns of these tables are called."""
        old = "A w log p" if self.is_weighted else "A log p"
        return {"old": old, "new": "A w s", "theirs": "notes'", "lp": "mean log p",
                "size": f"mean abs({old})", "new size": "mean abs(A) w s",
                "notes' lp": "notes' log p", "notes' size": "notes' mean abs"}


def as_in_the_notes(tokens: Tokens) -> Tokens:
    """With the columns of the notes that a credit file does without: contribution, normalised
    reward (its sign: -1, 0 where it is unknown, 1; the notes counted 0 with -1), and place."""
    contribution = tokens["advantage"] * tokens["weight"] * tokens["log_prob"]
    reward, group = (torch.from_numpy(tokens[name]) for name in ("reward", "group"))
    z = group_z_score(reward, group).numpy()
    sign = np.where(np.isnan(z), 0, np.where(z > 0, 1, -1))
    return tokens | {
        "contribution": contribution, "abs contribution": abs(contribution),
        "squared contribution": contribution ** 2, "normalised reward": z[tokens["answer"]],
        "reward sign": sign[tokens["answer"]],
        "place": np.arange(len(contribution)) - tokens["episode_start"][tokens["answer"]]}


def class_of(text: str) -> str:
    """By the notes' regular expressions. A tokenizer cuts tags: a piece of one is filler."""
    text = text.strip()
    if text in ("<think>", "</think>", "<answer>", "</answer>"):
        return STRUCTURE
    is_reasoning = re.fullmatch(r"[0-9+\-*/()=]+", text) or re.search("[0-9]", text)
    return REASONING if is_reasoning or text in SPELLED else FILLER


def shuffled(group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(answers,) for each another one of its group, drawn without return."""
    giver = np.empty(len(group), int)
    giver[np.argsort(group, kind="stable")] = np.lexsort((rng.random(len(group)), group))
    return giver


@UNDEFINED
def tables_of(notes: Notes) -> list[Table]:
    return [contributions(notes), signs(notes), t_statistics(notes), bins(notes),
            early_over_late(notes), classes(notes), classes_by_fifth(notes),
            filler_over_reasoning(notes), top_tokens(notes)]


def look(ours: float, theirs: float | None, border: float | None = None) -> str:
    """Same: within a quarter of the notes' figure; where a border is given, on its side of it."""
    if theirs is None or not np.isfinite(ours):
        return ""
    is_same = (ours > border) == (theirs > border) if border is not None else (
        0.8 <= ours / theirs <= 1.25)
    return "same" if is_same else "other"


def contributions(notes: Notes) -> Table:
    of_units = [[notes.mean("all", unit)[0], notes.spread("all", unit)[0],
                 notes.mean("all", f"abs {unit}")[0], *notes.extremes[unit]] for unit in UNITS]
    rows = [[name, old, theirs, look(old, theirs), new, why]
            for (name, (theirs, why)), old, new in zip(CONTRIBUTION.items(), *of_units)]
    formats = {"": "", "old": ".3f", "theirs": ".3f", "look": "", "new": ".3f", "why": ""}
    return Table("notes contribution", "The contribution of a token", by_row(formats, rows), "", [
        "It can say how large the terms of the objective are. It cannot say what a token was "
        "credited with: A log p is no gradient. Its sign is that of -A, that of A w s is "
        "A's."], notes.heads | {"why": "depends on"})


def signs(notes: Notes) -> Table:
    rows: list[Row] = []
    for partition, name, signs, theirs in (
            ("sign", "advantage", ("< 0", "= 0", "> 0"), (None, None, None)),
            ("reward", "normalised reward", ("<= 0", "not known", "> 0"), (0.242, None, -0.560))):
        means = [notes.mean(partition, measure) for measure in (
            "contribution", "abs contribution", "abs gradient")]
        rows += [[f"{name} {sign}", tokens, old, figure, look(old, figure, 0), size, new]
                 for sign, tokens, figure, old, size, new in zip(
                     signs, notes.total(partition, "tokens"), theirs, *means) if tokens]
    formats = {"": "", "tokens": ",.0f", "old": "+.3f", "theirs": "+.3f", "look": "",
               "size": ".3f", "new size": ".4f"}
    return Table("notes sign", "By the sign of the advantage", by_row(formats, rows), "", [
        "A tautology: log p is never above 0, so the sign is that of -A, whatever was learned. "
        "Same: of the same sign. The notes counted groups without spread as negative."],
        notes.heads | {"old": f"mean {notes.heads['old']}", "theirs": "notes' mean"})


def t_statistics(notes: Notes) -> Table:
    rows: list[Row] = []
    for fewest in FEWEST:
        found = [abs(notes.t(unit, fewest)) for unit in UNITS]
        places = found[0].shape[1]
        shares = [(t > 3, t < 1.5, t) for t in found] if places else []
        for number, (name, (no_effect, theirs)) in enumerate(OF_T.items()):
            (old, old_null), (new, new_null) = (
                (float(of_unit[number][0].mean()), float(of_unit[number][1:].mean()))
                for of_unit in shares) if places else ((np.nan, np.nan),) * 2
            figure = theirs if fewest == FEWEST[0] else None
            rows.append([f"{fewest} ({places:,} places)", name, old, figure, look(old, figure),
                         old_null, no_effect, new, new_null])
    formats = {"fewest": "", "abs(t)": "", "old": ".3f", "theirs": ".2f", "look": "",
               "shuffled": ".3f", "normal": ".3f", "new": ".3f", "shuffled s": ".3f"}
    return Table("notes t", "t of each place in the answer, over all answers of all steps",
                 by_row(formats, rows), "", [
        "It can say that right answers are surer or less sure at a place than wrong ones. It "
        "cannot say that a token matters: t grows with the number of answers, and tokens of an "
        f"answer share an advantage. Shuffled: mean over {len(notes.over) - 1} shuffles of the "
        "advantages within their groups."],
        notes.heads | {"fewest": "answers at least", "normal": "normal numbers",
                       "shuffled s": "A w s, shuffled"})


def bins(notes: Notes) -> Table:
    size, mean = notes.mean("bin", "abs contribution"), notes.mean("all", "abs contribution")[0]
    columns: Columns = {
        "bin": ("", [str(number) for number in range(10)]),
        "tokens": (",.0f", notes.total("bin", "tokens")),
        "old": (".4f", notes.mean("bin", "contribution")),
        "sd": (".3f", notes.spread("bin", "contribution")),
        "size": (".4f", size), "notes' size": (".3f", OF_BINS),
        "look": ("", [look(*pair, 1) for pair in zip(size / mean, np.array(OF_BINS) / 0.307)]),
        "lp": (".3f", notes.mean("bin", "log_prob")), "notes' lp": (".2f", LOG_PROB_OF_BINS),
        "new size": (".4f", notes.mean("bin", "abs gradient"))}
    return Table("notes bins", "Ten bins of position", columns, "", [
        "It can say where in an answer the size lies. It cannot say why: each place has its own "
        "kinds of token. Same: on the same side of the mean of all tokens."],
        notes.heads | {"old": f"mean {notes.heads['old']}", "sd": "standard deviation"})


def early_over_late(notes: Notes) -> Table:
    """The notes' two definitions."""
    tokens, places = notes.total("place", "tokens"), np.arange(notes.longest)
    early, late = places < quantile(tokens, 0.2), places > quantile(tokens, 0.8)
    of_bins, of_places = ([], [])
    for unit in UNITS:
        size, sums = notes.mean("bin", f"abs {unit}"), notes.total("place", f"abs {unit}")
        of_bins.append(size[0] / size[9])
        of_places.append((sums[early].sum() / tokens[early].sum()) /
                         (sums[late].sum() / tokens[late].sum()))
    discounted = 1 / 3 if notes.published == 0.75 else None
    rows = [[name, old, theirs, look(old, theirs, 1), new, why]
            for name, (old, new), theirs, why in (
                ("bin 0 over bin 9", of_bins, 1.63, "an answer ends in its form, which is sure"),
                ("places below the 20% quantile over those above the 80%", of_places, discounted,
                 "late places are those of long answers alone"))]
    formats = {"": "", "old": ".2f", "theirs": ".2f", "look": "", "new": ".2f", "why": ""}
    return Table("notes early", "Early over late, in the notes' two definitions",
                 by_row(formats, rows), "", [
        "It can say that a run's early tokens were less sure than its late ones. It cannot be "
        "compared from one definition to the other, as the notes did. Same: same side of 1."],
        notes.heads | {"old": notes.heads["size"], "new": notes.heads["new size"],
                       "why": "depends on"})


def quantile(counts: Floats, share: float) -> float:
    """Of whole numbers that occur so often: numpy.quantile, which is linear between neighbours."""
    rank, ends = share * (counts.sum() - 1), np.cumsum(counts)
    low, high = (np.searchsorted(ends, end, side="right") for end in (floor(rank), ceil(rank)))
    return float(low + (rank % 1) * (high - low))


def classes(notes: Notes) -> Table:
    share, (old, new) = notes.share("class", "tokens"), (
        [notes.mean("class", name) for name in (of_mean, unit, f"abs {unit}")]
        for of_mean, unit in zip(("log_prob", "s"), UNITS))
    rows: list[Row] = []
    for c in np.flatnonzero(notes.total("class", "tokens")).tolist():
        known = [*OF_CLASSES.get(CLASSES[c], [None] * 3), SIZES[notes.published].get(CLASSES[c])]
        rows += [[CLASSES[c], name, ours[c], theirs, look(ours[c], theirs), size[c], why]
                 for (name, why), theirs, ours, size in zip(
                     OF_A_CLASS.items(), known, (share, *old), (share, *new))]
    formats = {"class": "", "": "", "old": ".4f", "theirs": ".4f", "look": "", "new": ".4f",
               "why": ""}
    return Table("notes classes", "Classes of tokens, by the notes' regular expressions",
                 by_row(formats, rows), "", [
        "It can say which class is written less surely. It cannot say whether a class washes out: "
        "its mean says how A goes along with log p. Structure is a whole tag; pieces of a cut tag "
        "are filler."], notes.heads | {"why": "depends on"})


def classes_by_fifth(notes: Notes) -> Table:
    tokens, log_prob, size, new = (of.reshape(3, 5) for of in (
        notes.total("class by fifth", "tokens"), *(notes.mean("class by fifth", measure) for measure
        in ("log_prob", "abs contribution", "abs gradient"))))
    known, ahead = FIFTHS[notes.published], [size[0] > size[1], new[0] > new[1]]
    rows: list[Row] = []
    for fifth in range(5):
        is_ahead = look(size[0, fifth] / size[1, fifth],
                        known[FILLER][fifth] / known[REASONING][fifth], 1)
        for c, name in enumerate(CLASSES):
            theirs = [of[name][fifth] if name in of else None for of in (LOG_PROB_OF_FIFTHS, known)]
            rows += [[f"{20 * fifth}-{20 * fifth + 20}%", name, tokens[c, fifth],
                      log_prob[c, fifth], theirs[0], size[c, fifth], theirs[1],
                      "" if c else is_ahead, new[c, fifth]]] * bool(tokens[c, fifth])
    formats = {"part": "", "class": "", "tokens": ",.0f", "lp": ".3f", "notes' lp": ".2f",
               "size": ".4f", "notes' size": ".3f", "look": "", "new size": ".4f"}
    heads = notes.heads
    return Table("notes classes by position", "Classes in five bins of position",
                 by_row(formats, rows),
                 f"Filler is ahead of reasoning in {ahead[0].sum()} of 5 bins by {heads['old']}, "
                 f"in {ahead[1].sum()} by {heads['new']}; in the notes in 4 by A log p.", [
        "It can say that being ahead is not owed to the place alone. Five bins control for the "
        "place in part, and for nothing else. Same: the same class is ahead."], heads)


def filler_over_reasoning(notes: Notes) -> Table:
    tokens = notes.total("class by fifth", "tokens")
    crude, alike = [], []
    for unit in UNITS:
        size = notes.mean("class", f"abs {unit}")
        crude.append(size[0] / size[1])
        alike.append(at_like_places(tokens, notes.mean("class by fifth", f"abs {unit}")))
    unsure = [of[0] / of[1] for of in (notes.mean("class", name) for name in ("log_prob", "s"))]
    sizes = SIZES[notes.published]
    theirs = sizes[FILLER] / sizes[REASONING], None if notes.published < 1 else 1.24, 0.555 / 0.489
    rows = [[name, old, figure, look(old, figure, 1), new, why]
            for name, (old, new), figure, why in zip(
                ("mean absolute", "the same at like places", "how unsure: mean log p, mean s"),
                (crude, alike, unsure), theirs,
                ("what filler is: words, pieces of cut tags", "the same, in each of five bins",
                 "not all of the ratio: A goes along with the class, too"))]
    formats = {"ratio": "", "old": ".2f", "theirs": ".2f", "look": "", "new": ".2f", "why": ""}
    return Table("notes filler", "Filler over reasoning", by_row(formats, rows), "", [
        "It can say that filler is written less surely than reasoning. It cannot say that this is "
        "waste: what a token earned stands in no credit file. At like places: each bin of five "
        "counts by its tokens of both classes (the notes' 1.24 is computed from their table). "
        "Same: on the same side of 1."],
        notes.heads | {"old": notes.heads["size"], "new": notes.heads["new size"],
                       "why": "depends on"})


def at_like_places(tokens: Floats, sizes: Floats) -> float:
    """Filler over reasoning, from (15,) of each class by fifth."""
    tokens, sizes = (of.reshape(3, 5)[:2] for of in (tokens, sizes))
    in_both = (tokens > 0).all(0)
    filler, reasoning = sizes[:, in_both] @ tokens[:, in_both].sum(0)
    return float(filler / reasoning) if in_both.any() else np.nan


def top_tokens(notes: Notes) -> Table:
    """The most frequent ones of each class."""
    count, rows = notes.total("token", "tokens"), list[Row]()
    size, new = (notes.mean("token", f"abs {unit}") for unit in UNITS)
    occurring = np.flatnonzero(count)
    by_class = np.array([notes.class_of(i) for i in occurring.tolist()])
    for c, name in enumerate(CLASSES):
        ids = occurring[by_class == c]
        for i in ids[np.argsort(-count[ids], kind="stable")][:7].tolist():
            text = notes.text_of(i)
            is_theirs = ("same" if text in TOP[name] else "other") if TOP[name] else ""
            rows.append([name, repr(text), count[i], count[i] / count[ids].sum(), is_theirs,
                         size[i], new[i]])
    formats = {"class": "", "token": "", "tokens": ",.0f", "share": ".1%", "look": "",
               "size": ".4f", "new size": ".4f"}
    return Table("notes top tokens", "The most frequent tokens of each class",
                 by_row(formats, rows), "", [
        "It can say what a class consists of, pieces of tags among the filler. It cannot say what "
        "a token means where it stands. Same: among the seven that the notes name."],
        notes.heads | {"share": "of its class"})


@UNDEFINED
def draw(notes: Notes, folder: Path) -> Picture:
    """The notes' four pictures, in both units."""
    figure, ((bars, histogram), (cloud, classes)) = plt.subplots(2, 2, figsize=(11, 7.6))
    heads, labels = notes.heads, [notes.heads[name] for name in ("size", "new size")]
    steps = [block.mean() for block in notes.tally.blocks]
    for unit, label, colour, shift, style in zip(UNITS, labels, (BLUE, ORANGE), (-0.2, 0.2), "-:"):
        relative = notes.mean("bin", f"abs {unit}") / notes.mean("all", f"abs {unit}")[0]
        bars.bar(np.arange(10) + shift, relative, 0.4, color=colour, label=label)
        histogram.stairs(notes.values[unit], VALUES, color=colour,
                         label=heads["old" if unit == UNITS[0] else "new"])
        by_block = notes.mean("class by block", f"abs {unit}").reshape(-1, 3)
        for c in np.flatnonzero(notes.total("class", "tokens")):
            classes.plot(steps, by_block[:, c], color=COLOURS[c], ls=style,
                         label=f"{CLASSES[c]}, {label.removeprefix('mean ')}")
    bars.set(xlabel="bin of position", xticks=range(10), ylabel="times the mean of all tokens",
             title="Size by position")
    histogram.set(xlabel="value of a token (beyond: in the last bar)", ylabel="tokens",
                  yscale="log", title="Contributions")
    drawn = cloud.pcolormesh(LOG_PROBS, ADVANTAGES, np.where(notes.cloud, notes.cloud, np.nan).T,
                             norm=LogNorm(), cmap="viridis")
    figure.colorbar(drawn, ax=cloud, label="tokens", format="{x:g}")
    cloud.set(xlabel="log p", ylabel="advantage", title="Log p against advantage")
    classes.set(xlabel="step", ylabel="mean size", ylim=(0, None), title="By class over steps")
    histogram.yaxis.set_major_formatter("{x:g}")
    whole_steps(classes)
    for axis in (bars, histogram, classes):
        axis.legend(fontsize=7.5)
    return save(figure, folder, "notes", "The notes' pictures, in both units: size by position, "
                "each over its own mean; values with their sign; log p against advantage; classes "
                "over training")


@UNDEFINED
def compared(comparison: Comparison) -> list[Table]:
    """What the notes expected of each weighting, and what was found; their summary table."""
    of_arms = {name: [Notes(run, Tally(run["folder"]), draws=0) for run in arm.values()
                      if run["steps"]] for name, arm in comparison.arms.items()}
    known = {name: all_notes for name, all_notes in of_arms.items() if all_notes}
    return [expected(comparison), summary(known), shares(known)]


def expected(comparison: Comparison) -> Table:
    rows: list[Row] = []
    baseline = comparison.arms[comparison.baseline]
    for name, arm in comparison.arms.items():
        runs, weighting = list(arm.values()), str(comparison.one_of(name)["config"]["mitigation"])
        theirs, words = EXPECTED.get(weighting, (None, ""))
        _, ahead = difference(arm, baseline, IN_TRAINING) if arm is not baseline else ([], None)
        norms = [line["gradient_norm"] for run in runs for line in run["metrics"]]
        ends = [line["success"] for line in final_lines(runs, "sampled")]
        rows.append([name, mean_over([mean_success(run) for run in runs]).value,
                     *([ahead.value, ahead.interval] if ahead else [None, None]),
                     mean_over(ends).value, theirs, seen(ahead, theirs), mean_over(norms).value,
                     words])
    formats = {"arm": "", "speed": ".1%", "minus": "points", "95%": "points", "end": ".1%",
               "theirs": ".0%", "look": "", "norm": ".3f", "words": ""}
    return Table("notes expected", "Expected against found", by_row(formats, rows), "", [
        "Learning speed: mean success of all answers of the training; minus that of the baseline, "
        "with a 95% interval over seeds. It can say how these runs learned; one seed says nothing "
        "of a weighting, and the notes had one: 15% and 12% of 128 problems are z = 0.74. Same: "
        "the interval lies on the notes' side of 0; other: on the far side."],
        {"speed": "learning speed", "minus": f"minus {comparison.baseline}", "95%": "95% interval",
         "end": "held out at the end", "theirs": "notes'", "norm": "norm before clipping",
         "words": "the notes expected; and saw"})


def seen(ahead: Estimate | None, theirs: float | None) -> str:
    """Whether a difference from plain GRPO is what the notes saw."""
    if ahead is None or theirs is None or not np.isfinite(ahead.low):
        return ""
    below, above = ahead.high < 0, ahead.low > 0
    return ("same" if below == (theirs < 0.15) else "other") if below or above else "not seen"


def summary(known: dict[str, list[Notes]]) -> Table:
    rows: list[Row] = []
    for name, all_notes in known.items():
        old, new = (np.mean([notes.mean("class", f"abs {unit}")[:2] for notes in all_notes], 0)
                    for unit in UNITS)
        sizes, is_theirs = SIZES[all_notes[0].published], all_notes[0].is_of_the_notes
        theirs = sizes[FILLER] / sizes[REASONING] if is_theirs else None
        rows.append([name, *old, old[0] / old[1], theirs, look(old[0] / old[1], theirs, 1),
                     *new, new[0] / new[1]])
    formats = {"arm": "", "filler": ".3f", "reasoning": ".3f", "ratio": ".2f", "theirs": ".2f",
               "look": "", "new filler": ".3f", "new reasoning": ".3f", "new ratio": ".2f"}
    return Table("notes summary", "The notes' summary table: mean abs(A w log p) by class",
                 by_row(formats, rows), "", [
        "Beside it the mean abs(A) w s. It can say which class has the larger terms. It cannot say "
        "that credit moved: a weight is in them, and these runs wrote other texts. Same: on the "
        "same side of 1."],
        {"theirs": "notes' ratio", "new filler": "filler, abs(A) w s", "new reasoning": "reasoning",
         "new ratio": "ratio"})


def shares(known: dict[str, list[Notes]]) -> Table:
    rows = [[name, *(value for measure in ("tokens", *(f"abs {unit}" for unit in UNITS))
                     for value in np.mean([notes.share("class", measure)[:2]
                                           for notes in all_notes], 0))]
            for name, all_notes in known.items()]
    formats = dict.fromkeys(("arm", "tokens", "", "filler", "reasoning", "new filler",
                             "new reasoning"), ".1%") | {"arm": ""}
    return Table("notes shares", "Shares of the classes", by_row(formats, rows), "", [
        "Of the tokens, of the summed contributions and of the gradient; the rest is structure. "
        "It can say how the size is spread, not what the tokens earned."],
        {"tokens": "filler, of the tokens", "": "reasoning", "filler": "filler, of abs(A w log p)",
         "new filler": "filler, of abs(A) w s", "new reasoning": "reasoning"})
