"""The notes' tables and pictures of one run; analysis/notes.py has their sums.

Each table has the notes' unit beside the size of the gradient, the notes' own figures, whether ours
is the same or another, and one sentence on what it can and cannot mean.
"""
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from analysis.notes import (ADVANTAGES, CLASSES, FILLER, LOG_PROBS, REASONING, SIZES, STRUCTURE,
                            UNDEFINED, UNITS, VALUES, Notes, class_codes, look, quantile)
from analysis.page import Picture
from analysis.plots import BLUE, COLOURS, ORANGE, save, whole_steps
from analysis.statistics import Floats
from analysis.tables import Columns, Row, Table, by_row

FEWEST = (2, 30)  # answers that a place must have for a t: the notes' number, and one that holds

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
FIFTHS = {1.0: {FILLER: (0.3579, 0.3656, 0.3176, 0.3890, 0.2356),
                REASONING: (0.3458, 0.2084, 0.2977, 0.2362, 0.2568)},
          0.75: {FILLER: (0.386, 0.380, 0.345, 0.378, 0.235),
                 REASONING: (0.244, 0.190, 0.357, 0.242, 0.237)}}
TOP = {FILLER: (" ", ">", "answer", ",", " </", " to", ">\n"),
       REASONING: ("1", "2", "3", "4", "5", "6", " -"), STRUCTURE: ()}


@UNDEFINED
def tables_of(notes: Notes) -> list[Table]:
    return [contributions(notes), signs(notes), t_statistics(notes), bins(notes),
            early_over_late(notes), classes(notes), classes_by_fifth(notes),
            filler_over_reasoning(notes), top_tokens(notes)]


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
    """The notes' two definitions, and whether it is the classes in disguise."""
    tokens, places = notes.total("place", "tokens"), np.arange(notes.longest)
    early, late = places < quantile(tokens, 0.2), places > quantile(tokens, 0.8)
    of_bins, of_places = ([], [])
    for unit in UNITS:
        size, sums = notes.mean("bin", f"abs {unit}"), notes.total("place", f"abs {unit}")
        of_bins.append(size[0] / size[9])
        of_places.append((sums[early].sum() / tokens[early].sum()) /
                         (sums[late].sum() / tokens[late].sum()))
    by_class = [notes.mean("class by fifth", f"abs {unit}") for unit in UNITS]
    alike = [at_like_classes(notes.total("class by fifth", "tokens"), sizes) for sizes in by_class]
    discounted = 1 / 3 if notes.published == 0.75 else None
    rows = [[name, old, theirs, look(old, theirs, 1), new, why]
            for name, (old, new), theirs, why in (
                ("bin 0 over bin 9", of_bins, 1.63, "how sure the end is of an answer's form"),
                ("places below the 20% quantile over those above the 80%", of_places, discounted,
                 "late places are those of long answers alone"),
                ("first over last fifth, classes alike", alike,
                 None if discounted else 1.48, "not on which class stands where"))]
    formats = {"": "", "old": ".2f", "theirs": ".2f", "look": "", "new": ".2f", "why": ""}
    return Table("notes early", "Early over late, the notes' two definitions and classes alike",
                 by_row(formats, rows), "", [
        "It can say that a run's early tokens were less sure than its late ones. It cannot be "
        "compared from one definition to the other, as the notes did. Classes alike: each counts "
        "by its tokens in both fifths (the notes' 1.48 is computed from their table). Same: same "
        "side of 1."],
        notes.heads | {"old": notes.heads["size"], "new": notes.heads["new size"],
                       "why": "depends on"})


def at_like_classes(tokens: Floats, sizes: Floats) -> float:
    """The first fifth over the last, from (15,) of each class by fifth."""
    tokens, sizes = (of.reshape(3, 5)[:, [0, 4]] for of in (tokens, sizes))
    in_both = (tokens > 0).all(1)
    early, late = tokens[in_both].sum(1) @ sizes[in_both]
    return float(early / late) if in_both.any() else np.nan


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
    by_class = class_codes(notes.tally.tokenizer, occurring)
    for c, name in enumerate(CLASSES):
        ids = occurring[by_class == c]
        for i in ids[np.argsort(-count[ids], kind="stable")][:7].tolist():
            text = notes.tally.tokenizer.decode([i], skip_special_tokens=False)
            is_theirs = ("same" if text in TOP[name] else "other") if TOP[name] else ""
            rows.append([name, repr(text), count[i], count[i] / count[ids].sum(), is_theirs,
                         size[i], new[i]])
    formats = {"class": "", "token": "", "tokens": ",.0f", "share": ".1%", "look": "",
               "size": ".4f", "new size": ".4f"}
    return Table("notes top tokens", "The most frequent tokens of each class",
                 by_row(formats, rows), "", [
        "It can say what a class consists of: pieces of cut tags are filler. It cannot say what a "
        "token does where it stands. Same: among the seven that the notes name."],
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
                             norm=LogNorm(1, max(2, notes.cloud.max())), cmap="viridis")
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
