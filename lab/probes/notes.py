"""The ten tables and the four pictures of the notes on credit in GRPO, of any run.

    python -m lab notes runs/none-grpo-s0
    python -m lab notes runs/none-grpo-s0 runs/inverse_logprob-grpo-s0
    python -m lab notes docs/qwen-steps/untrained

Each table has this run's numbers beside the published ones, both in the notes' unit A log p and as
the size of the gradient, and a sentence on what the table can and cannot show. Beside a run whose
thinking has weight 0.75, the published numbers are those of the notes' run with 0.75; beside any
other run they are those of their plain run. The last two tables have a row for each run, and they
are the only ones if there are several runs. The pictures are written into RUN/analysis/notes.png.

`python -m lab claims RUN` says for each sentence of the notes whether it holds in the run.
"""
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lab.analysis import report
from lab.analysis.html_page import Picture
from lab.analysis.plots import COLOURS, GRADIENT_COLOUR, Axes, plt, save
from lab.analysis.run_folders import Run, existing
from lab.analysis.statistics import Floats
from lab.analysis.tables import Cell, Row, Table, by_row, show
from lab.engine.errors import PROJECT, read_json
from lab.engine.tokens import ANSWER
from lab.harness.flags import Flag, read
from lab.harness.screen import say
from lab.probes.run_tokens import (CLASSES, FILLER, REASONING, UNITS, RunTokens, class_codes,
                                   t_numbers)

FLAGS = {
    "output_dir": Flag(None, "folder for the picture. By default it is analysis/ in the run")}
LEGEND = (
    "The notes' experiment (github.com/Ja-Crispy/GRPO-Zero) trained Qwen2.5-0.5B for 100 steps of "
    "Countdown, with 303,042 tokens. The notes called A log p the contribution of a token and took "
    "it for the token's gradient. Here A is the advantage of a token, w its weight and p its "
    "probability. The gradient's size at the logits is abs(A) w s, with s = norm(onehot - p), and "
    "each table shows it, too.")
UNDEFINED = np.errstate(invalid="ignore", divide="ignore")  # nan, which a table shows as -
VALUES = np.linspace(-5, 5, 101)  # edges of histograms; what lies outside counts in the last bar
LOG_PROBS, ADVANTAGES = np.linspace(-10, 0, 51), np.linspace(-4, 4, 41)

# What the notes published of their plain run, and of their run with weight 0.75 on the thinking;
# their most frequent tokens; of each weighting the held-out success at the end, and what they
# expected and saw
PUBLISHED = read_json(PROJECT / "lab/probes/published.json")
PLAIN, DISCOUNTED = "plain", "weight 0.75"


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = read(argv, "python -m lab notes RUN ... [flags]", __doc__, FLAGS,
                 {"RUN ...": "run folders"})
    runs = [Run(existing(name)) for name in flags.run]
    if len(runs) > 1:
        of_runs = [RunTokens(run) for run in runs]
        show([f"These are {len(runs)} runs.", LEGEND], [summary(of_runs), four_metrics(
            {tokens.run.folder.name: [metrics_of(tokens)] for tokens in of_runs})])
        return
    tokens = RunTokens(runs[0])
    show([report.describe(runs[0]), LEGEND], notes_tables(tokens))
    if np.isfinite(tokens["log_prob"]).any():
        folder = Path(flags.output_dir or runs[0].folder / "analysis")
        folder.mkdir(parents=True, exist_ok=True)
        path, _ = draw_notes(tokens, folder)
        print(f"\nThe four pictures are in {path}")


def published_run(run: Run) -> str:
    """The one of the notes' two runs whose numbers stand beside this run's."""
    config = run.config
    is_discounted = (config["mitigation"] == "outcome_conditional"
                     and config.get("think_discount") == 0.75)
    return DISCOUNTED if is_discounted else PLAIN


def published(tokens: RunTokens, name: str, count: int) -> Floats:
    """(count,) numbers; nan where there is none."""
    return np.array(PUBLISHED[published_run(tokens.run)].get(name, [None] * count), float)


def headings(tokens: RunTokens, /, **more: str) -> dict[str, str]:
    old = "A w log p" if (tokens["weight"] != 1).any() else "A log p"
    return {"old": old, "new": "A w s", "theirs": "published", "why": "depends on",
            "lp": "mean log p", "size": f"mean abs({old})", "new size": "mean abs(A) w s",
            "notes' lp": "published mean log p", "notes' size": "published mean abs", **more}


# ------------------------------------------------------------------- the tables


@UNDEFINED
def notes_tables(tokens: RunTokens) -> list[Table]:
    return [contributions(tokens), signs(tokens), t_statistics(tokens), bins(tokens),
            early_over_late(tokens), classes(tokens), classes_by_fifth(tokens),
            top_tokens(tokens), summary([tokens]),
            four_metrics({tokens.run.folder.name: [metrics_of(tokens)]})]


def contributions(tokens: RunTokens) -> Table:
    columns = []
    for unit in UNITS:
        x = tokens[unit]
        spread = x.std(ddof=1) if len(x) > 1 else np.nan
        columns.append([x.mean(), spread, tokens[f"abs {unit}"].mean(), x.min(), x.max()])
    names = ("mean", "standard deviation", "mean absolute", "smallest", "largest")
    why = ("whether answers with A < 0 are longer or less certain",
           "rare tokens: log p is unbounded, s is not",
           "how uncertain the model is, and how many groups have equal rewards",
           "one rare token of a right answer", "one rare token of a wrong answer")
    formats = {"": "", "old": ".3f", "theirs": ".3f", "new": ".3f", "why": ""}
    rows = zip(names, columns[0], published(tokens, "contribution", 5), columns[1], why)
    return Table("notes contribution", "The contribution of a token, over all tokens",
                 by_row(formats, rows), [
        "This table can show how large the terms of the objective are. It cannot show the credit "
        "of a token, because A log p is not a gradient: it has the sign of -A, and A w s has that "
        "of A."], headings(tokens, **{"": "number"}))


def signs(tokens: RunTokens) -> Table:
    count, old = tokens.total("sign"), tokens.mean("sign", "contribution")
    size, new = tokens.sizes("sign")
    names = ("normalised reward <= 0", "normalised reward not known", "normalised reward > 0")
    rows: list[Row] = []
    for cell, theirs in enumerate(published(tokens, "sign", 3)):
        if count[cell]:
            rows.append([names[cell], count[cell], old[cell], theirs, size[cell], new[cell]])
    formats = {"": "", "tokens": ",.0f", "old": "+.3f", "theirs": "+.3f", "size": ".3f",
               "new size": ".4f"}
    heads = headings(tokens, theirs="published mean")
    return Table("notes sign", "The contribution by the sign of the normalised reward",
                 by_row(formats, rows), [
        "This table can show nothing: log p is never above 0, so A log p has the sign of -A, "
        "whatever the model has learned. The notes counted groups with equal rewards among those "
        "with a normalised reward <= 0."],
        heads | {"": "tokens with", "old": f"mean {heads['old']}"})


def t_statistics(tokens: RunTokens) -> Table:
    old, new = (t_numbers(tokens["position"], tokens[unit]) for unit in UNITS)
    several = (np.bincount(tokens["position"]) > 1).sum()
    no_effect = 0.0027, 0.8664, 0.7979
    rows = zip(("above 3", "below 1.5", "mean of abs(t)"), old, published(tokens, "t", 3),
               no_effect, new)
    formats = {"abs(t)": "", "old": ".3f", "theirs": ".2f", "normal": ".3f", "new": ".3f"}
    return Table("notes t", "The t of each position in the answer, over all answers of all steps",
                 by_row(formats, rows), [
        "The t of a position is the mean over its answers, divided by the standard error of this "
        f"mean. Of {several:,} positions that several answers have, the rows have the share "
        "whose abs(t) is above 3, the share below 1.5, and the mean of abs(t).",
        "This table can show that at some positions right answers are more certain or less "
        "certain than wrong ones. It cannot show that a token matters: t grows with the number of "
        "answers, and all tokens of an answer share one advantage. Normal numbers: what random "
        "numbers from a normal distribution would give."],
        headings(tokens, normal="normal numbers"))


def bins(tokens: RunTokens) -> Table:
    count, old = tokens.total("bin"), tokens.mean("bin", "contribution")
    squares = (tokens["contribution"] - old[tokens.cells["bin"]]) ** 2
    spread = np.sqrt(np.bincount(tokens.cells["bin"], squares, 10) / (count - 1))
    size, new_size = tokens.sizes("bin")
    rows = zip(map(str, range(10)), count, old, spread, size, published(tokens, "bin size", 10),
               tokens.mean("bin", "log_prob"), published(tokens, "bin log p", 10), new_size)
    formats = {"bin": "", "tokens": ",.0f", "old": ".4f", "sd": ".3f", "size": ".4f",
               "notes' size": ".3f", "lp": ".3f", "notes' lp": ".2f", "new size": ".4f"}
    heads = headings(tokens, bin="bin, from the start", sd="standard deviation")
    return Table("notes bins", "The contribution in ten bins of position in the answer",
                 by_row(formats, rows), [
        "This table can show where in an answer the large contributions lie. It cannot show why, "
        "because each position has its own kinds of token."],
        heads | {"old": f"mean {heads['old']}"})


def early_over_late(tokens: RunTokens) -> Table:
    """The two published definitions."""
    early, late = tokens.ends()
    of_bins, of_positions = [], []
    for unit, size in zip(UNITS, tokens.sizes("bin")):
        of_bins.append(size[0] / size[9])
        each = tokens[f"abs {unit}"]
        has_both = early.any() and late.any()
        of_positions.append(each[early].mean() / each[late].mean() if has_both else np.nan)
    theirs = published(tokens, "early over late", 2)
    rows: list[Row] = [
        ["bin 0 over bin 9", of_bins[0], theirs[0], of_bins[1],
         "how certain the model is of an answer's ending"],
        ["positions below the 20% quantile over those above the 80% quantile", of_positions[0],
         theirs[1], of_positions[1], "only long answers have late positions"]]
    formats = {"": "", "old": ".2f", "theirs": ".2f", "new": ".2f", "why": ""}
    heads = headings(tokens, **{"": "ratio"})
    return Table("notes early", "Mean size of early tokens over that of late ones: two published "
                 "definitions", by_row(formats, rows), [
        "This table can show that a run's early tokens were less certain than its late ones. The "
        "notes compared a number by one definition with a number by the other, and such a "
        "comparison says nothing."],
        heads | {"old": heads["size"], "new": heads["new size"]})


def classes(tokens: RunTokens) -> Table:
    count = tokens.total("class")
    share = count / count.sum()
    numbers = (  # name, the notes' contribution, A w s, and what it depends on
        ("share of the tokens", share, share, "how the tokenizer cuts tags"),
        ("mean log p; mean s", tokens.mean("class", "log_prob"), tokens.mean("class", "s"),
         "what the model has learned"),
        ("mean", *(tokens.mean("class", unit) for unit in UNITS), "how A varies with log p"),
        ("mean absolute", *(tokens.mean("class", f"abs {unit}") for unit in UNITS),
         "how uncertain the model is, and abs(A)"))
    rows: list[Row] = []
    for c in np.flatnonzero(count).tolist():
        for (name, old, new, why), theirs in zip(numbers, published(tokens, CLASSES[c], 4)):
            rows.append([CLASSES[c], name, old[c], theirs, new[c], why])
    formats = {"class": "", "": "", "old": ".4f", "theirs": ".4f", "new": ".4f", "why": ""}
    return Table("notes classes", "Classes of tokens, by the published regular expressions",
                 by_row(formats, rows), [
        "The row 'mean log p; mean s' has mean log p in its first columns, and mean s in the "
        "column A w s.",
        "This table can show which class is written with less certainty. It cannot show whether "
        "the contributions of a class cancel, because their mean depends on how A varies with log "
        "p. A whole tag is structure. Where the tokenizer cuts a tag into pieces, these are "
        "filler."], headings(tokens, **{"": "number"}))


def classes_by_fifth(tokens: RunTokens) -> Table:
    count, log_prob = tokens.total("class by fifth"), tokens.mean("class by fifth", "log_prob")
    size, new = tokens.sizes("class by fifth")
    rows: list[Row] = []
    for fifth in range(5):
        for c, name in enumerate(CLASSES):
            cell = 5 * c + fifth
            if count[cell]:
                rows.append([f"{20 * fifth}-{20 * fifth + 20}%", name, count[cell], log_prob[cell],
                             published(tokens, f"log p {name}", 5)[fifth], size[cell],
                             published(tokens, f"size {name}", 5)[fifth], new[cell]])
    formats = {"part": "", "class": "", "tokens": ",.0f", "lp": ".3f", "notes' lp": ".2f",
               "size": ".4f", "notes' size": ".3f", "new size": ".4f"}
    heads = headings(tokens, part="part of the answer")
    ahead, new_ahead = ((x[:5] > x[5:10]).sum() for x in (size, new))
    their_filler, their_reasoning = (published(tokens, f"size {name}", 5)
                                     for name in (FILLER, REASONING))
    return Table("notes classes by position", "Classes in five bins of position",
                 by_row(formats, rows), [
        f"Measured by {heads['old']}, filler is larger than reasoning in {ahead} of 5 bins, and "
        f"measured by {heads['new']} in {new_ahead}. In the notes it was larger in "
        f"{(their_filler > their_reasoning).sum()} of 5 by A log p.",
        "This table can show that the difference between the classes does not come from the "
        "position alone. Five bins remove a part of the position's effect, and no other effect."],
        heads)


def top_tokens(tokens: RunTokens) -> Table:
    """The most frequent tokens of each class."""
    count, (size, new), rows = tokens.total("token"), tokens.sizes("token"), list[Row]()
    of_class = class_codes(tokens.tokenizer, tokens.ids)
    for c, name in enumerate(CLASSES):
        own = np.flatnonzero(of_class == c)
        for i in own[np.argsort(-count[own], kind="stable")][:7].tolist():
            text = tokens.tokenizer.decode([int(tokens.ids[i])], skip_special_tokens=False)
            rows.append([name, repr(text), count[i], count[i] / count[own].sum(),
                         "yes" if text in PUBLISHED["top tokens"][name] else "", size[i], new[i]])
    formats = {"class": "", "token": "", "tokens": ",.0f", "share": ".1%", "theirs": "",
               "size": ".4f", "new size": ".4f"}
    return Table("notes top tokens", "The most frequent tokens of each class",
                 by_row(formats, rows), [
        "This table can show what a class consists of: pieces of cut tags are filler. It cannot "
        "show what a token does at its position."],
        headings(tokens, tokens="count", share="share of its class",
                 theirs="among the seven published ones"))


@UNDEFINED
def summary(of_runs: Sequence[RunTokens]) -> Table:
    """The notes' summary of their runs: a row for each run."""
    rows: list[Row] = []
    for tokens in of_runs:
        run = tokens.run
        weighting = run.config["mitigation"]
        their_success, words = PUBLISHED["success, expected and seen"].get(
            weighting, (None, "not in the notes"))
        is_theirs = published_run(run) == DISCOUNTED or weighting == "none"
        their_sizes = [published(tokens, name, 4)[3] for name in (FILLER, REASONING)]
        theirs: Cell = their_sizes[0] / their_sizes[1] if is_theirs else None
        size, new = tokens.sizes("class")
        ends = run.evaluated()
        norms = [line["gradient_norm"] for line in run.metrics if line["gradient_norm"]]
        rows.append([run.folder.name, ends[-1]["success"] if ends else None, their_success,
                     size[0], size[1], size[0] / size[1], theirs, new[0] / new[1],
                     float(np.mean(norms)) if norms else None, words])
    formats = {"run": "", "end": ".1%", "their end": ".0%", FILLER: ".3f", REASONING: ".3f",
               "ratio": ".2f", "theirs": ".2f", "new": ".2f", "norm": ".3f", "words": ""}
    return Table("notes summary", "The notes' summary: success, mean abs(A w log p) by class, and "
                 "what they expected and saw", by_row(formats, rows), [
        "Success is of held-out problems, at the last evaluation. A ratio is that of filler to "
        "reasoning. The norm is the gradient's before clipping.",
        "This table can show how these runs ended and which class has the larger terms. It cannot "
        "show that a weighting is better or worse: one run shows nothing about that, and the notes "
        "had one of each, whose 15% and 12% of 128 problems differ by z = 0.74. Nor can it show "
        "that credit moved, because the terms contain the weight, and because the runs wrote "
        "other texts."],
        {"end": "success at the end", "their end": "theirs", "theirs": "their ratio",
         "new": "ratio by A w s", "norm": "mean norm", "words": "the notes expected; saw"})


@UNDEFINED
def four_metrics(arms: Mapping[str, Sequence[Sequence[float]]]) -> Table:
    """What the notes compare mitigations by, each in a column or two: of an arm the means over what
    `metrics_of` gives for its runs."""
    rows: list[Row] = []
    for name, of_runs in arms.items():
        *fifths, end, ratio, answer, norm, deviation = np.mean(of_runs, axis=0).tolist()
        curve = " ".join("-" if np.isnan(part) else f"{part:.0%}" for part in fifths)
        rows.append([name, curve, end, ratio, answer, norm, deviation])
    formats = {"run": "", "curve": "", "end": ".1%", "ratio": ".2f", "answer": ".1%",
               "norm": ".3f", "sd": ".3f"}
    return Table("notes metrics", "The notes' four metrics: learning speed, final accuracy, "
                 "credit, and the gradient's stability", by_row(formats, rows), [
        "The curve is the success in training in each fifth of the steps. This table can compare "
        "runs. It cannot say which weighting is better: `python -m lab experiment notes_1` to "
        "notes_3 train pairs"],
        {"curve": "success by fifths", "end": "held out, at the end", "ratio":
         "filler / reasoning, A w s", "answer": "answer's share of A w s", "norm": "mean norm",
         "sd": "its deviation"})


@UNDEFINED
def metrics_of(tokens: RunTokens) -> list[float]:
    """Success in each fifth of the steps and at the end, filler / reasoning, the answer's share of
    A w s, the mean and the deviation of the gradient's norm; nan where a run has none."""
    run, sizes = tokens.run, tokens.sizes("class")[1]
    fifths = np.array_split([line["success"] for line in run.metrics], 5)
    ends = run.evaluated()
    norms = [line["gradient_norm"] for line in run.metrics if line["gradient_norm"]] or [np.nan]
    in_answer = tokens["abs gradient"] @ (tokens["section"] == ANSWER)
    return [*(float(np.mean(part)) if len(part) else np.nan for part in fifths),
            ends[-1]["success"] if ends else np.nan, sizes[0] / sizes[1],
            in_answer / tokens["abs gradient"].sum(), float(np.mean(norms)), float(np.std(norms))]


def print_metrics(arms: Mapping[str, Mapping[int, Run]]) -> None:
    """The four metrics of arms of runs, if all of them have credit files."""
    if all(run.steps and run.measure == "success" for arm in arms.values() for run in arm.values()):
        table = four_metrics({name: [metrics_of(RunTokens(run)) for run in arm.values()]
                              for name, arm in arms.items()})
        say(f"\n{table.title}:\n{table.to_text()}")


# ------------------------------------------------------------------- the four pictures


@UNDEFINED
def draw_notes(tokens: RunTokens, folder: Path) -> Picture:
    """The four published pictures, in both units."""
    figure, ((of_bins, histogram), (cloud, over_steps)) = plt.subplots(2, 2, figsize=(11, 7.6))
    heads = headings(tokens)
    for unit, name, colour, shift in (("contribution", "old", "black", -0.2),
                                      ("gradient", "new", GRADIENT_COLOUR, 0.2)):
        size = tokens.mean("bin", f"abs {unit}")
        of_bins.bar(np.arange(10) + shift, size / tokens[f"abs {unit}"].mean(), 0.4, color=colour,
                    label=f"size by {heads[name]}")
        counts, _ = np.histogram(tokens[unit].clip(VALUES[0], VALUES[-1]), VALUES)
        histogram.stairs(counts, VALUES, color=colour, label=heads[name])
    of_bins.set(xlabel="tenth of the answer", xticks=range(10),
                ylabel="mean size / that of all tokens", title="Size by position")
    histogram.set(xlabel="value of a token (values beyond 5 are in the last bar)", yscale="log",
                  ylabel="number of tokens", title="Values with their sign")
    histogram.yaxis.set_major_formatter("{x:g}")
    counts, *_ = np.histogram2d(tokens["log_prob"].clip(LOG_PROBS[0], LOG_PROBS[-1]),
                                tokens["advantage"].clip(ADVANTAGES[0], ADVANTAGES[-1]),
                                [LOG_PROBS, ADVANTAGES])
    occurring = np.where(counts, counts, np.nan)  # what never occurs is not coloured
    drawn = cloud.pcolormesh(LOG_PROBS, ADVANTAGES, occurring.T, cmap="viridis",
                             norm="log", vmin=1, vmax=max(2, counts.max()))
    figure.colorbar(drawn, ax=cloud, label="number of tokens", format="{x:g}")
    cloud.set(xlabel="log p of a token", ylabel="its advantage", title="Log p and advantage")
    draw_classes(over_steps, tokens)
    for axis in (of_bins, histogram, over_steps):
        axis.legend(fontsize=7.5)
    return save(figure, folder, "notes", "The four pictures of the notes, with the contribution "
                "and with the gradient's size: the mean size by position, divided by that of all "
                "tokens; how often each value occurs; log p and advantage; the mean size of each "
                "class over training")


def draw_classes(axis: Axes, tokens: RunTokens) -> None:
    for unit, style in zip(UNITS, ("-", ":")):
        of_step = tokens.mean("class by step", f"abs {unit}").reshape(-1, 3)
        for c in np.flatnonzero(tokens.total("class")).tolist():
            axis.plot(tokens.steps, of_step[:, c], color=COLOURS[c], ls=style,
                      label=f"{CLASSES[c]}, {unit}")
    axis.set(xlabel="step", ylabel="mean absolute value", ylim=(0, None),
             title="Size by class, over training")
    axis.locator_params(axis="x", integer=True)  # whole steps
