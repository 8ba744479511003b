"""The pictures of the pages, each drawn from research/results alone.

    python -m research pictures

A picture carries a fingerprint of what it shows, so a test sees one that is older than its result.

README's answer, docs/answer.png, was drawn at commit 99d9392, which has its program and its data.
It was chosen by a rule, not by its looks: of the first step on record the first answer that solved
its problem at its second try. The bars below it are results/scoreboard.json's.
"""
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis.plots import BLUE, COLOURS, GREY, ORANGE, legend_below, plt, save, style_of
from analysis.statistics import mean_over
from engine.errors import PROJECT
from harness.screen import say
from harness.parser import make_parser
from research.experiments.arms import CONTROLS, SCALE
from research.experiments.published import RESULTS, fingerprint, read_result

MARKED = {"larger batches": COLOURS[2], "the control": COLOURS[3]}
SIGNS = "os^DvP*"
FAR = 5                 # points


def main(argv: list[str]) -> None:
    make_parser("python -m research pictures", __doc__, {}).read(argv)
    for picture, (drawing, *source) in PUBLISHED.items():
        draw(drawing, PROJECT / picture, shown_of(*source))
        say(f"drawn: {picture}")


def draw(drawing: Callable[[dict], Figure], path: Path, shown: dict) -> None:
    """`shown` is a table or the values as a result stores them."""
    save(drawing(shown), path.parent, path.stem, "", fingerprint(shown))


def shown_of(name: str, part: str) -> dict:
    """A table of a result by its name, or the `values` that its tables were made of."""
    result = read_result(RESULTS / f"{name}.json")
    return {**result, **{table["name"]: table for table in result["tables"]}}[part]


MEANINGS = {**dict.fromkeys(SCALE, "larger batches"), **dict.fromkeys(CONTROLS, "the control")}


def draw_leads(table: dict, meanings: dict[str, str] = MEANINGS,
               ahead: str = " and, for ahead, a second\nlook") -> Figure:
    """A leaderboard: each arm's lead, the best at the top; crosses are what was predicted.
    `meanings` has the arms that are no methods; `ahead`, what else it takes to be called so."""
    rows = sorted(table["rows"], key=lambda row: row["lead"])
    figure, axis = plt.subplots(figsize=(8.0, 1.5 + 0.27 * len(rows)))
    colours = {"ahead": BLUE, "behind": ORANGE, "no difference seen": GREY, **MARKED}
    for word, colour in colours.items():
        axis.plot([], [], "o-", color=colour, lw=2, ms=5, label=word)
    for height, row in enumerate(rows):
        colour = colours[meanings.get(row["arm"]) or meaning_of(row)]
        axis.plot(100 * np.array(row["95%"]), [height, height], color=colour, lw=2)
        axis.plot(100 * row["lead"], height, "o", color=colour, ms=5)
        if row["predicted"] is not None:
            axis.plot(100 * row["predicted"], height, "kx", ms=6)
    axis.axvline(0, color="black", lw=0.8)
    axis.set(yticks=range(len(rows)), yticklabels=[row["arm"] for row in rows],
             ylim=(-0.7, len(rows) - 0.3), title="Who is ahead of plain GRPO?",
             xlabel="points of mean success in training, minus plain GRPO")
    axis.plot([], [], "kx", ms=6, label="predicted")
    legend_below(figure, axis, ncols=3, title="Lines: the 95% interval of one arm alone. Colours: "
                 f"the verdict, by p corrected for the number\nof methods{ahead}. So a line beside "
                 "0 may be grey.")
    return figure


def meaning_of(row: dict) -> str:
    """What the colour of a method stands for."""
    word = row["verdict"].partition(",")[0]
    return word if word in ("ahead", "behind") else "no difference seen"


def draw_dials(values: dict) -> Figure:
    """Share of the true credit's lead that an arm gains, by the share of tokens that decides: a
    panel for each length, worlds of plain dials. Grey, the eighth colour, is plain GRPO with more
    problems; what lies below -1.5 is cut off."""
    cells = {(cell["world"], cell["arm"]): np.array(cell["mean"]) for cell in values["cells"]}
    shares = {world: [int(number) for number in world.split("/")] for world, _ in cells
              if world.replace("/", "").isdigit()}
    lengths = sorted({tokens for tokens, _ in shares.values()})
    names = [name for name in dict.fromkeys(arm for _, arm in cells)
             if name not in ("plain GRPO", "true credit")]
    names.sort(key=lambda name: name.startswith("batch "))
    figure, axes = plt.subplots(1, max(1, len(lengths)), sharey=True, squeeze=False,
                                figsize=(5.6 * max(1, len(lengths)), 5.4))
    for axis, length in zip(axes[0], lengths):
        worlds = sorted((keys, world) for world, (tokens, keys) in shares.items()
                        if tokens == length)
        for number, name in enumerate(names):
            points = [(keys / length, *share_of_lead(cells, world, name)) for keys, world in worlds
                      if (world, name) in cells]
            is_scale = name.startswith("batch ")
            style = dict(color=GREY, ls=":", lw=2) if is_scale else style_of(number + number // 7)
            if points:
                place, share, reach = zip(*points)
                axis.errorbar(place, share, reach, marker="o", ms=4, elinewidth=0.7, label=name,
                              **style)
                if is_scale:
                    axis.annotate(name, (place[-1], share[-1]), (6, -3),
                                  textcoords="offset points", color=GREY, fontsize=8)
        axis.axhline(1, color="black", lw=1, label="true credit")
        axis.axhline(0, color="black", lw=0.6)
        axis.set(title=f"Answers of {length} tokens", xscale="log", xlabel="share that decides")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    axes[0][0].set(ylabel="lead, as a share of the true credit's", ylim=(-1.5, 1.2))
    legend_below(figure, axes[0][0], ncols=5)
    return figure


def draw_curves(values: dict) -> Figure:
    """Success and gradient norm over the steps, means over seeds of five steps each."""
    figure, axes = plt.subplots(1, 2, figsize=(11.0, 4.4))
    runs: dict[str, list] = {}
    for name, curves in values["curves"].items():
        runs.setdefault(name.rpartition(" ")[0], []).append(curves)
    for number, (arm, curves) in enumerate(runs.items()):
        window = min(5, len(curves[0][0]))
        for axis, curve in zip(axes, np.mean(curves, 0)):
            smooth = np.convolve(curve, np.full(window, 1 / window), "valid")
            axis.plot(np.arange(len(smooth)) + (window + 1) / 2, smooth, label=arm,
                      **style_of(number))
    axes[0].set(title="Success in training", xlabel="step", ylabel="share of right answers")
    axes[1].set(title="Gradient norm before clipping", xlabel="step", yscale="log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_formatter("")
    legend_below(figure, axes[0], ncols=4)
    return figure


def share_of_lead(cells: dict, world: str, name: str) -> tuple[float, float]:
    """And how far its interval reaches, the true credit's lead taken as it is."""
    plain = cells[world, "plain GRPO"]
    lead, true = mean_over(cells[world, name] - plain), (cells[world, "true credit"] - plain).mean()
    return lead.value / true, (lead.high - lead.value) / abs(true)


def draw_law(table: dict) -> Figure:
    """Predicted leads against measured ones, a colour for each world, those with a reward of all or
    nothing apart. Named are points FAR from the diagonal whose interval does not reach it."""
    worlds = list(dict.fromkeys(row["world"] for row in table["rows"]))
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.2))
    for axis, is_all in zip(axes, (False, True)):
        named, ends = [], [0.0]
        for number, world in enumerate(worlds):
            own = [row for row in table["rows"] if row["world"] == world]
            predicted, lead, low, high = 100 * np.array(
                [[row["predicted"], row["lead"], *row["95%"]] for row in own]).T
            if world.endswith("all") == is_all:
                axis.errorbar(predicted, lead, [lead - low, high - lead], ms=4, elinewidth=0.6,
                              fmt=SIGNS[number % len(SIGNS)],
                              color=COLOURS[number % len(COLOURS)], label=world)
                named += [(y, x, f"{row['arm']}, {world}") for row, x, y in zip(
                    own, predicted, lead) if row["verdict"] == "off" and abs(x - y) > FAR]
                ends += [*predicted, *lead]
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", lw=1)
        height, gap = np.inf, 0.026 * (max(ends) - min(ends))
        for y, x, name in sorted(named, reverse=True):  # no name stands on another
            height = min(y, height - gap)
            axis.annotate(name, (x, y), (x + gap, height - gap / 3), fontsize=6.5)
        axis.set(xlabel="predicted lead, points", ylabel="measured lead, points")
    axes[0].set_title("The reward is the share of deciding tokens that are right")
    axes[1].set_title("The reward is 1 if all are right, else 0")
    legend_below(figure, axes[0], ncols=4)
    return figure


def draw_kinds(values: dict) -> Figure:
    """A panel a model: of each kind the share of the tokens, and of the gradient."""
    figure, axes = plt.subplots(1, len(values), figsize=(9.0, 3.2), sharey=True)
    for axis, (title, shares) in zip(axes, values.items()):
        places = np.arange(len(shares["kinds"]))
        axis.bar(places - 0.2, shares["tokens"], 0.4, color=GREY, label="of the tokens")
        axis.bar(places + 0.2, shares["gradient"], 0.4, color=BLUE, label="of the gradient")
        axis.set_xticks(places, shares["kinds"], rotation=35, fontsize=8)
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("%")
    legend_below(figure, axes[0], ncols=2)
    return figure


def draw_became(table: dict) -> Figure:
    """Shares of given, became and earned: a panel for each of the kinds that differ most."""
    kinds = list(dict.fromkeys(row["kind"] for row in table["rows"]))
    figure, axes = plt.subplots(1, len(kinds), sharey=True, squeeze=False, figsize=(10, 3.8))
    names = {"given": BLUE, "plain step": ORANGE, "AdamW": COLOURS[3], "earned": COLOURS[2]}
    for axis, kind in zip(axes[0], kinds):
        rows = [row for row in table["rows"] if row["kind"] == kind]
        for number, (name, colour) in enumerate(names.items()):
            share = 100 * np.array([row[name] for row in rows])
            low, high = 100 * np.array([row[f"{name} 95%"] for row in rows]).T
            axis.bar(np.arange(len(rows)) + 0.2 * (number - 1.5), share, 0.19, color=colour,
                     label=name if name in ("given", "earned") else f"became, {name}",
                     yerr=[share - low, high - share], ecolor=GREY)
        axis.set(title=f"{kind}s: {rows[0]['tokens']:.0%} of the tokens", xlabel="step",
                 xticks=range(len(rows)), xticklabels=[row["step"] for row in rows])
        axis.grid(axis="x", visible=False)
    axes[0][0].set(ylabel="share of the sum of sizes, %", ylim=(0, None))
    legend_below(figure, axes[0][0], ncols=4)
    return figure


PUBLISHED = {  # picture -> how it is drawn, and which table or values of which result it shows
    "research/results/board-leads.png": (draw_leads, "board", "board"),
    "research/results/notes-curves.png": (draw_curves, "notes_2", "values"),
    "research/results/real-kinds.png": (draw_kinds, "real", "values"),
    "research/results/became.png": (draw_became, "became", "kinds"),
    "research/results/dial-law.png": (draw_law, "dial", "law"),
    "research/results/dial-shares.png": (draw_dials, "dial", "values")}
