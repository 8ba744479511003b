"""The earlier experiment's tables of one run; notes_sums.py beside it has their sums.

Each table has its unit A log p beside the gradient's size, the published figures, and one sentence
on what the table can and cannot mean.
"""
import numpy as np

from lab.analysis.statistics import Floats
from lab.analysis.tables import Row, Table, by_row
from lab.probes.notes_sums import (CLASSES, FILLER, PUBLISHED_SIZES, REASONING, STRUCTURE,
                                   UNDEFINED, UNITS, Notes, class_codes, quantile)

# The published figures, and in a few words what each depends on
CONTRIBUTION = {
    "mean": (0.079, "whether answers with A < 0 are longer or less certain"),
    "standard deviation": (1.168, "rare tokens: log p is unbounded, s is not"),
    "mean absolute": (0.307, "how uncertain the model is, and how many groups have equal rewards"),
    "smallest": (-28.0, "one rare token of a right answer"),
    "largest": (33.3, "one rare token of a wrong answer")}
SIZE_OF_BINS = (0.347194, 0.366896, 0.329356, 0.303315, 0.318367,
                0.306196, 0.305382, 0.300810, 0.270468, 0.212966)
LOG_PROB_OF_BINS = (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835,
                    -0.503752, -0.537406, -0.560431, -0.511919, -0.258263)
MEAN_OF_SIGNS = {  # mean contribution in each cell
    "normalised reward <= 0": 0.242, "normalised reward not known": None,
    "normalised reward > 0": -0.560}
T_NUMBERS = {  # of normal numbers; published
    "above 3": (0.0027, 0.20), "below 1.5": (0.8664, 0.39), "mean of abs(t)": (0.7979, 1.92)}
PUBLISHED_CLASSES = {  # share of the tokens, mean log p, mean contribution
    FILLER: (0.678, -0.555, 0.0786), REASONING: (0.322, -0.489, 0.0793)}
CLASS_NUMBERS = {"share of the tokens": "how the tokenizer cuts tags",
              "mean log p; mean s": "what the model has learned",
              "mean": "how A varies with log p",
              "mean absolute": "how uncertain the model is, and abs(A)"}
LOG_PROB_OF_FIFTHS = {FILLER: (-0.6655, -0.6953, -0.5277, -0.4948, -0.3070),
                      REASONING: (-0.4088, -0.2738, -0.4922, -0.5909, -0.5414)}
SIZE_OF_FIFTHS = {1.0: {FILLER: (0.3579, 0.3656, 0.3176, 0.3890, 0.2356),
                        REASONING: (0.3458, 0.2084, 0.2977, 0.2362, 0.2568)},
                  0.75: {FILLER: (0.386, 0.380, 0.345, 0.378, 0.235),
                         REASONING: (0.244, 0.190, 0.357, 0.242, 0.237)}}
TOP = {FILLER: (" ", ">", "answer", ",", " </", " to", ">\n"),
       REASONING: ("1", "2", "3", "4", "5", "6", " -"), STRUCTURE: ()}


@UNDEFINED
def notes_tables(notes: Notes) -> list[Table]:
    return [contributions(notes), signs(notes), t_statistics(notes), bins(notes),
            early_over_late(notes), classes(notes), classes_by_fifth(notes), top_tokens(notes)]


def both_means(notes: Notes, partition: str) -> list[Floats]:
    """The mean absolute contribution of each cell, and the mean gradient size."""
    return [notes.mean(partition, f"abs {unit}") for unit in UNITS]


def contributions(notes: Notes) -> Table:
    of_units = []  # of each unit the five rows of CONTRIBUTION
    for unit in UNITS:
        mean, size = notes.mean("all", unit)[0], notes.mean("all", f"abs {unit}")[0]
        spread = notes.spread("all", unit)[0]
        smallest, largest = notes.extremes[unit]
        of_units.append([mean, spread, size, smallest, largest])
    rows: list[Row] = []
    for (name, (theirs, why)), old, new in zip(CONTRIBUTION.items(), *of_units):
        rows.append([name, old, theirs, new, why])
    formats = {"": "", "old": ".3f", "theirs": ".3f", "new": ".3f", "why": ""}
    return Table("notes contribution", "The contribution of a token, over all tokens",
                 by_row(formats, rows), "", [
        "This table can show how large the terms of the objective are. It cannot show the credit "
        "of a token, because A log p is not a gradient: it has the sign of -A, and A w s has that "
        "of A."], notes.heads | {"": "number", "why": "depends on"})


def signs(notes: Notes) -> Table:
    tokens, old = notes.total("reward", "tokens"), notes.mean("reward", "contribution")
    size, new = both_means(notes, "reward")
    rows: list[Row] = []
    for cell, (name, theirs) in enumerate(MEAN_OF_SIGNS.items()):
        if tokens[cell]:
            rows.append([name, tokens[cell], old[cell], theirs, size[cell], new[cell]])
    formats = {"": "", "tokens": ",.0f", "old": "+.3f", "theirs": "+.3f", "size": ".3f",
               "new size": ".4f"}
    return Table("notes sign", "The contribution by the sign of the normalised reward",
                 by_row(formats, rows), "", [
        "This table can show nothing: log p is never above 0, so A log p has the sign of -A, "
        "whatever the model has learned. The earlier experiment counted groups with equal rewards "
        "among those with a normalised reward <= 0."],
        notes.heads | {"": "tokens with",
                       "old": f"mean {notes.heads['old']}", "theirs": "published mean"})


def t_statistics(notes: Notes) -> Table:
    rows: list[Row] = []
    old, new = abs(notes.t("contribution")), abs(notes.t("gradient"))
    for name, (no_effect, published) in T_NUMBERS.items():
        rows.append([name, t_in_one_number(name, old), published, no_effect,
                     t_in_one_number(name, new)])
    formats = {"abs(t)": "", "old": ".3f", "theirs": ".2f", "normal": ".3f", "new": ".3f"}
    return Table("notes t", "The t of each position in the answer, over all answers of all steps",
                 by_row(formats, rows), "", [
        "The t of a position is the mean over its answers, divided by the standard error of this "
        f"mean. Of {len(old):,} positions that several answers have, the rows have the share whose "
        "abs(t) is above 3, the share below 1.5, and the mean of abs(t).",
        "This table can show that at some positions right answers are more certain or less "
        "certain than wrong ones. It cannot show that a token matters: t grows with the number of "
        "answers, and all tokens of an answer share one advantage. Normal numbers: what random "
        "numbers from a normal distribution would give."],
        notes.heads | {"normal": "normal numbers"})


def t_in_one_number(name: str, t: Floats) -> float:
    """A row of T_NUMBERS from the size of t at each position."""
    if not len(t):
        return np.nan
    return float({"above 3": t > 3, "below 1.5": t < 1.5, "mean of abs(t)": t}[name].mean())


def bins(notes: Notes) -> Table:
    size, new_size = both_means(notes, "bin")
    tokens, log_prob = notes.total("bin", "tokens"), notes.mean("bin", "log_prob")
    old, spread = notes.mean("bin", "contribution"), notes.spread("bin", "contribution")
    rows: list[Row] = []
    for b in range(10):
        rows.append([str(b), tokens[b], old[b], spread[b], size[b], SIZE_OF_BINS[b],
                     log_prob[b], LOG_PROB_OF_BINS[b], new_size[b]])
    formats = {"bin": "", "tokens": ",.0f", "old": ".4f", "sd": ".3f", "size": ".4f",
               "notes' size": ".3f", "lp": ".3f", "notes' lp": ".2f", "new size": ".4f"}
    return Table("notes bins", "The contribution in ten bins of position in the answer",
                 by_row(formats, rows), "", [
        "This table can show where in an answer the large contributions lie. It cannot show why, "
        "because each position has its own kinds of token."],
        notes.heads | {"bin": "bin, from the start",
                       "old": f"mean {notes.heads['old']}", "sd": "standard deviation"})


def early_over_late(notes: Notes) -> Table:
    """The two published definitions."""
    of_bins = [size[0] / size[9] for size in both_means(notes, "bin")]
    of_positions = [early_over_late_positions(notes, unit) for unit in UNITS]
    theirs_of_positions = 1 / 3 if notes.published == 0.75 else None
    rows: list[Row] = []
    for name, (old, new), theirs, why in (
            ("bin 0 over bin 9", of_bins, 1.63, "how certain the model is of an answer's ending"),
            ("positions below the 20% quantile over those above the 80% quantile", of_positions,
             theirs_of_positions, "only long answers have late positions")):
        rows.append([name, old, theirs, new, why])
    formats = {"": "", "old": ".2f", "theirs": ".2f", "new": ".2f", "why": ""}
    return Table("notes early", "Mean size of early tokens over that of late ones: two published "
                 "definitions", by_row(formats, rows), "", [
        "This table can show that a run's early tokens were less certain than its late ones. The "
        "earlier experiment compared a number by one definition with a number by the other, and "
        "such a comparison says nothing."],
        notes.heads | {"": "ratio", "old": notes.heads["size"], "new": notes.heads["new size"],
                       "why": "depends on"})


def early_over_late_positions(notes: Notes, unit: str) -> float:
    tokens, sizes = notes.total("position", "tokens"), notes.total("position", f"abs {unit}")
    positions = np.arange(notes.longest)
    early, late = positions < quantile(tokens, 0.2), positions > quantile(tokens, 0.8)
    of_early = sizes[early].sum() / tokens[early].sum()
    of_late = sizes[late].sum() / tokens[late].sum()
    return float(of_early / of_late)


def classes(notes: Notes) -> Table:
    share = notes.share("class", "tokens")
    of_units = []  # of each unit the four rows of CLASS_NUMBERS, (3,) each
    for certainty, unit in zip(("log_prob", "s"), UNITS):
        mean_certainty = notes.mean("class", certainty)
        mean, size = notes.mean("class", unit), notes.mean("class", f"abs {unit}")
        of_units.append([share, mean_certainty, mean, size])
    rows: list[Row] = []
    for c in np.flatnonzero(notes.total("class", "tokens")).tolist():
        name = CLASSES[c]
        their_size = PUBLISHED_SIZES[notes.published].get(name)
        published = [*PUBLISHED_CLASSES.get(name, [None] * 3), their_size]
        for (row, why), theirs, old, new in zip(CLASS_NUMBERS.items(), published, *of_units):
            rows.append([name, row, old[c], theirs, new[c], why])
    formats = {"class": "", "": "", "old": ".4f", "theirs": ".4f", "new": ".4f", "why": ""}
    return Table("notes classes", "Classes of tokens, by the published regular expressions",
                 by_row(formats, rows), "", [
        "The row 'mean log p; mean s' has mean log p in its first columns, and mean s in the "
        "column A w s.",
        "This table can show which class is written with less certainty. It cannot show whether "
        "the contributions of a class cancel, because their mean depends on how A varies with log "
        "p. A whole tag is structure. Where the tokenizer cuts a tag into pieces, these are "
        "filler."],
        notes.heads | {"": "number", "why": "depends on"})


def classes_by_fifth(notes: Notes) -> Table:
    tokens = notes.total("class by fifth", "tokens").reshape(3, 5)
    log_prob = notes.mean("class by fifth", "log_prob").reshape(3, 5)
    size, new = (sizes.reshape(3, 5) for sizes in both_means(notes, "class by fifth"))
    published = SIZE_OF_FIFTHS[notes.published]
    rows: list[Row] = []
    for fifth in range(5):
        part = f"{20 * fifth}-{20 * fifth + 20}%"
        for c, name in enumerate(CLASSES):
            if not tokens[c, fifth]:
                continue
            their_log_prob, their_size = None, None
            if name in published:
                their_log_prob, their_size = LOG_PROB_OF_FIFTHS[name][fifth], published[name][fifth]
            rows.append([part, name, tokens[c, fifth], log_prob[c, fifth], their_log_prob,
                         size[c, fifth], their_size, new[c, fifth]])
    formats = {"part": "", "class": "", "tokens": ",.0f", "lp": ".3f", "notes' lp": ".2f",
               "size": ".4f", "notes' size": ".3f", "new size": ".4f"}
    heads = notes.heads
    ahead, new_ahead = (size[0] > size[1]).sum(), (new[0] > new[1]).sum()
    return Table("notes classes by position", "Classes in five bins of position",
                 by_row(formats, rows),
                 f"Measured by {heads['old']}, filler is larger than reasoning in {ahead} of 5 "
                 f"bins, and measured by {heads['new']} in {new_ahead}. In the earlier experiment "
                 f"it was larger in 4 of 5 by A log p.", [
        "This table can show that the difference between the classes does not come from the "
        "position alone. Five bins remove a part of the position's effect, and no other effect."],
        heads | {"part": "part of the answer"})


def top_tokens(notes: Notes) -> Table:
    """The most frequent tokens of each class."""
    count, rows = notes.total("token", "tokens"), list[Row]()
    size, new = both_means(notes, "token")
    occurring = np.flatnonzero(count)
    of_class = class_codes(notes.tokenizer, occurring)
    for c, name in enumerate(CLASSES):
        ids = occurring[of_class == c]
        most_frequent = ids[np.argsort(-count[ids], kind="stable")][:7]
        for i in most_frequent.tolist():
            text = notes.tokenizer.decode([i], skip_special_tokens=False)
            share = count[i] / count[ids].sum()
            rows.append([name, repr(text), count[i], share, "yes" if text in TOP[name] else "",
                         size[i], new[i]])
    formats = {"class": "", "token": "", "tokens": ",.0f", "share": ".1%", "theirs": "",
               "size": ".4f", "new size": ".4f"}
    return Table("notes top tokens", "The most frequent tokens of each class",
                 by_row(formats, rows), "", [
        "This table can show what a class consists of: pieces of cut tags are filler. It cannot "
        "show what a token does at its position."],
        notes.heads | {"tokens": "count", "share": "share of its class",
                       "theirs": "among the seven published ones"})
