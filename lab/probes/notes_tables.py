"""The earlier experiment's tables of one run; notes_sums.py beside it has their sums.

Each table has its unit A log p beside the gradient's size, the published figures, whether ours is
the same or another, and one sentence on what the table can and cannot mean.
"""
import numpy as np

from lab.analysis.statistics import Floats
from lab.analysis.tables import Row, Table, by_row
from lab.probes.notes_sums import (CLASSES, FILLER, PUBLISHED_SIZES, REASONING, STRUCTURE,
                                   UNDEFINED, UNITS, Notes, class_codes, quantile, same_or_other)

FEWEST_ANSWERS = (2, 30)  # that a position must have for a t: the published number, and enough

# The published figures, and in a few words what each depends on
CONTRIBUTION = {
    "mean": (0.079, "whether answers with A < 0 are longer or less certain"),
    "standard deviation": (1.168, "rare tokens: log p is unbounded, s is not"),
    "mean absolute": (0.307, "how uncertain the model is, and how many groups have equal rewards"),
    "smallest": (-28.0, "one rare token of a right answer"),
    "largest": (33.3, "one rare token of a wrong answer")}
MEAN_SIZE = CONTRIBUTION["mean absolute"][0]
SIZE_OF_BINS = (0.347194, 0.366896, 0.329356, 0.303315, 0.318367,
                0.306196, 0.305382, 0.300810, 0.270468, 0.212966)
LOG_PROB_OF_BINS = (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835,
                    -0.503752, -0.537406, -0.560431, -0.511919, -0.258263)
MEAN_OF_SIGNS: dict[str, dict[str, float | None]] = {  # mean contribution in each cell
    "sign": {"advantage < 0": None, "advantage = 0": None, "advantage > 0": None},
    "reward": {"normalised reward <= 0": 0.242, "normalised reward not known": None,
               "normalised reward > 0": -0.560}}
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
            early_over_late_in_notes(notes), classes(notes), classes_by_fifth(notes),
            filler_over_reasoning(notes), top_tokens(notes)]


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
        rows.append([name, old, theirs, same_or_other(old, theirs), new, why])
    formats = {"": "", "old": ".3f", "theirs": ".3f", "look": "", "new": ".3f", "why": ""}
    return Table("notes contribution", "The contribution of a token, over all tokens",
                 by_row(formats, rows), "", [
        "This table can show how large the terms of the objective are. It cannot show the credit "
        "of a token, because A log p is not a gradient: it has the sign of -A, and A w s has that "
        "of A."], notes.heads | {"": "number", "why": "depends on"})


def signs(notes: Notes) -> Table:
    rows: list[Row] = []
    for partition, cells in MEAN_OF_SIGNS.items():
        tokens, old = notes.total(partition, "tokens"), notes.mean(partition, "contribution")
        size, new = both_means(notes, partition)
        for cell, (name, theirs) in enumerate(cells.items()):
            if tokens[cell]:
                look = same_or_other(old[cell], theirs, 0)
                rows.append([name, tokens[cell], old[cell], theirs, look, size[cell], new[cell]])
    formats = {"": "", "tokens": ",.0f", "old": "+.3f", "theirs": "+.3f", "look": "",
               "size": ".3f", "new size": ".4f"}
    return Table("notes sign", "The contribution by the sign of the advantage",
                 by_row(formats, rows), "", [
        "This table can show nothing: log p is never above 0, so A log p has the sign of -A, "
        "whatever the model has learned. Here ours is the same if it has the sign of the published "
        "one. The earlier experiment counted groups with equal rewards among those with a "
        "normalised reward <= 0."],
        notes.heads | {"": "tokens with",
                       "old": f"mean {notes.heads['old']}", "theirs": "published mean"})


def t_statistics(notes: Notes) -> Table:
    rows: list[Row] = []
    for fewest in FEWEST_ANSWERS:
        old, new = abs(notes.t("contribution", fewest)), abs(notes.t("gradient", fewest))
        at_least = f"{fewest} ({old.shape[1]:,} positions)"
        for name, (no_effect, published) in T_NUMBERS.items():
            theirs = published if fewest == FEWEST_ANSWERS[0] else None
            of_old, old_shuffled = t_in_one_number(name, old)
            of_new, new_shuffled = t_in_one_number(name, new)
            look = same_or_other(of_old, theirs)
            rows.append([at_least, name, of_old, theirs, look, old_shuffled, no_effect, of_new,
                         new_shuffled])
    formats = {"fewest": "", "abs(t)": "", "old": ".3f", "theirs": ".2f", "look": "",
               "shuffled": ".3f", "normal": ".3f", "new": ".3f", "shuffled s": ".3f"}
    heads = notes.heads
    return Table("notes t", "The t of each position in the answer, over all answers of all steps",
                 by_row(formats, rows), "", [
        "The t of a position is the mean over its answers, divided by the standard error of this "
        "mean. The rows have the share of positions whose abs(t) is above 3, the share below 1.5, "
        "and the mean of abs(t).",
        "This table can show that at some positions right answers are more certain or less "
        "certain than wrong ones. It cannot show that a token matters: t grows with the number of "
        "answers, and all tokens of an answer share one advantage. Shuffled: the mean over "
        f"{len(notes.over) - 1} shuffles of the advantages within their groups. Normal numbers: "
        "what random numbers from a normal distribution would give."],
        heads | {"fewest": "positions with at least so many answers",
                 "shuffled": f"{heads['old']}, shuffled", "normal": "normal numbers",
                 "shuffled s": "A w s, shuffled"})


def t_in_one_number(name: str, t: Floats) -> tuple[float, float]:
    """A row of T_NUMBERS from the sizes of t (1 + draws, positions): as they were, and shuffled."""
    if not t.shape[1]:
        return np.nan, np.nan
    values = {"above 3": t > 3, "below 1.5": t < 1.5, "mean of abs(t)": t}[name]
    return float(values[0].mean()), float(values[1:].mean())


def bins(notes: Notes) -> Table:
    size, new_size = both_means(notes, "bin")
    over_mean = size / notes.mean("all", "abs contribution")[0]
    published = np.array(SIZE_OF_BINS) / MEAN_SIZE
    tokens, log_prob = notes.total("bin", "tokens"), notes.mean("bin", "log_prob")
    old, spread = notes.mean("bin", "contribution"), notes.spread("bin", "contribution")
    rows: list[Row] = []
    for b in range(10):
        look = same_or_other(over_mean[b], published[b], 1)
        rows.append([str(b), tokens[b], old[b], spread[b], size[b], SIZE_OF_BINS[b], look,
                     log_prob[b], LOG_PROB_OF_BINS[b], new_size[b]])
    formats = {"bin": "", "tokens": ",.0f", "old": ".4f", "sd": ".3f", "size": ".4f",
               "notes' size": ".3f", "look": "", "lp": ".3f", "notes' lp": ".2f",
               "new size": ".4f"}
    return Table("notes bins", "The contribution in ten bins of position in the answer",
                 by_row(formats, rows), "", [
        "This table can show where in an answer the large contributions lie. It cannot show why, "
        "because each position has its own kinds of token. Here ours is the same if our bin and "
        "the published one both lie above the mean of all tokens, or both below it."],
        notes.heads | {"bin": "bin, from the start",
                       "old": f"mean {notes.heads['old']}", "sd": "standard deviation"})


def early_over_late_in_notes(notes: Notes) -> Table:
    """The two published definitions, and a third one in which both ends have the same classes."""
    of_bins = [size[0] / size[9] for size in both_means(notes, "bin")]
    of_positions = [early_over_late_positions(notes, unit) for unit in UNITS]
    tokens = notes.total("class by fifth", "tokens")
    alike = [at_like_classes(tokens, sizes) for sizes in both_means(notes, "class by fifth")]
    is_discounted = notes.published == 0.75
    rows: list[Row] = []
    for name, (old, new), theirs, why in (
            ("bin 0 over bin 9", of_bins, 1.63, "how certain the model is of an answer's ending"),
            ("positions below the 20% quantile over those above the 80% quantile", of_positions,
             1 / 3 if is_discounted else None, "only long answers have late positions"),
            ("first over last fifth, with the same mix of classes",
             alike, None if is_discounted else 1.48,
             "everything except which classes are early or late")):
        rows.append([name, old, theirs, same_or_other(old, theirs, 1), new, why])
    title = "Mean size of early tokens over that of late ones: two published definitions, and ours"
    return Table("notes early", title,
                 by_row(RATIO_FORMATS, rows), "", [
        "This table can show that a run's early tokens were less certain than its late ones. The "
        "earlier experiment compared a number by one definition with a number by the other, and "
        "such a comparison says nothing. With the same mix of classes, each class has the same "
        "share of both fifths (the 1.48 is computed from the published table). Here ours is the "
        "same if both figures are above 1, or both below."],
        heads_of_ratios(notes))


RATIO_FORMATS = {"": "", "old": ".2f", "theirs": ".2f", "look": "", "new": ".2f", "why": ""}


def heads_of_ratios(notes: Notes) -> dict[str, str]:
    heads = notes.heads
    return heads | {"": "ratio", "old": heads["size"], "new": heads["new size"],
                    "why": "depends on"}


def early_over_late_positions(notes: Notes, unit: str) -> float:
    tokens, sizes = notes.total("position", "tokens"), notes.total("position", f"abs {unit}")
    positions = np.arange(notes.longest)
    early, late = positions < quantile(tokens, 0.2), positions > quantile(tokens, 0.8)
    of_early = sizes[early].sum() / tokens[early].sum()
    of_late = sizes[late].sum() / tokens[late].sum()
    return float(of_early / of_late)


def at_like_classes(tokens: Floats, sizes: Floats) -> float:
    """Ratio of first to last fifth, at one mix of the three classes."""
    first_and_last = [0, 4]
    return with_the_same_mix(tokens.reshape(3, 5).T[first_and_last],
                             sizes.reshape(3, 5).T[first_and_last])


def with_the_same_mix(tokens: Floats, sizes: Floats) -> float:
    """The mean size in the first row over that in the second, (2, cells) each, if both rows had
    their tokens in the same cells: each cell counts by the tokens of both."""
    in_both = (tokens > 0).all(0)
    if not in_both.any():
        return np.nan
    first, second = sizes[:, in_both] @ tokens[:, in_both].sum(0)
    return float(first / second)


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
            rows.append([name, row, old[c], theirs, same_or_other(old[c], theirs), new[c], why])
    formats = {"class": "", "": "", "old": ".4f", "theirs": ".4f", "look": "", "new": ".4f",
               "why": ""}
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
        theirs = published[FILLER][fifth] / published[REASONING][fifth]
        filler_over_reasoning = size[0, fifth] / size[1, fifth]
        for c, name in enumerate(CLASSES):
            if not tokens[c, fifth]:
                continue
            their_log_prob, their_size, look = None, None, ""
            if name in published:
                their_log_prob, their_size = LOG_PROB_OF_FIFTHS[name][fifth], published[name][fifth]
            if name == FILLER:
                look = same_or_other(filler_over_reasoning, theirs, 1)
            rows.append([part, name, tokens[c, fifth], log_prob[c, fifth], their_log_prob,
                         size[c, fifth], their_size, look, new[c, fifth]])
    formats = {"part": "", "class": "", "tokens": ",.0f", "lp": ".3f", "notes' lp": ".2f",
               "size": ".4f", "notes' size": ".3f", "look": "", "new size": ".4f"}
    heads = notes.heads
    ahead, new_ahead = (size[0] > size[1]).sum(), (new[0] > new[1]).sum()
    return Table("notes classes by position", "Classes in five bins of position",
                 by_row(formats, rows),
                 f"Measured by {heads['old']}, filler is larger than reasoning in {ahead} of 5 "
                 f"bins, and measured by {heads['new']} in {new_ahead}. In the earlier experiment "
                 f"it was larger in 4 of 5 by A log p.", [
        "This table can show that the difference between the classes does not come from the "
        "position alone. Five bins remove a part of the position's effect, and no other effect. "
        "Here ours is the same if the same class is the larger one."],
        heads | {"part": "part of the answer"})


def filler_over_reasoning(notes: Notes) -> Table:
    tokens = notes.total("class by fifth", "tokens")
    crude = [size[0] / size[1] for size in both_means(notes, "class")]
    alike = [at_like_positions(tokens, sizes) for sizes in both_means(notes, "class by fifth")]
    log_prob, s = notes.mean("class", "log_prob"), notes.mean("class", "s")
    uncertain = [log_prob[0] / log_prob[1], s[0] / s[1]]
    sizes = PUBLISHED_SIZES[notes.published]
    rows: list[Row] = []
    for name, (old, new), theirs, why in (
            ("mean absolute", crude, sizes[FILLER] / sizes[REASONING],
             "which tokens count as filler: words, and pieces of cut tags"),
            ("the same, with both classes at the same positions", alike,
             None if notes.published < 1 else 1.24, "the same, within each of five bins"),
            ("how uncertain the classes are: mean log p, mean s", uncertain, 0.555 / 0.489,
             "the model alone; the ratios above depend on A, too")):
        rows.append([name, old, theirs, same_or_other(old, theirs, 1), new, why])
    return Table("notes filler", "Mean size of filler over that of reasoning",
                 by_row(RATIO_FORMATS, rows), "", [
        "This table can show that filler is written with less certainty than reasoning. It cannot "
        "show that this is waste, because a credit file does not have the credit of a token. With "
        "both classes at the same positions, each has the same share of each of the five bins (the "
        "1.24 is computed from the published table). Here ours is the same if both figures are "
        "above 1, or both below."],
        heads_of_ratios(notes))


def at_like_positions(tokens: Floats, sizes: Floats) -> float:
    """Filler over reasoning, from (15,) of each class by fifth."""
    return with_the_same_mix(tokens.reshape(3, 5)[:2], sizes.reshape(3, 5)[:2])


def top_tokens(notes: Notes) -> Table:
    """The most frequent tokens of each class."""
    count, rows = notes.total("token", "tokens"), list[Row]()
    size, new = both_means(notes, "token")
    occurring = np.flatnonzero(count)
    of_class = class_codes(notes.tally.tokenizer, occurring)
    for c, name in enumerate(CLASSES):
        ids = occurring[of_class == c]
        most_frequent = ids[np.argsort(-count[ids], kind="stable")][:7]
        for i in most_frequent.tolist():
            text = notes.tally.tokenizer.decode([i], skip_special_tokens=False)
            share = count[i] / count[ids].sum()
            look = ""
            if TOP[name]:
                look = "same" if text in TOP[name] else "other"
            rows.append([name, repr(text), count[i], share, look, size[i], new[i]])
    formats = {"class": "", "token": "", "tokens": ",.0f", "share": ".1%", "look": "",
               "size": ".4f", "new size": ".4f"}
    return Table("notes top tokens", "The most frequent tokens of each class",
                 by_row(formats, rows), "", [
        "This table can show what a class consists of: pieces of cut tags are filler. It cannot "
        "show what a token does at its position. Here ours is the same if the token is among the "
        "seven published ones."],
        notes.heads | {"tokens": "count", "share": "share of its class"})
