"""The pictures of README and pages, each drawn from research/results alone.

    python -m research pictures                            # draw all of them again
    python -m research pictures --run runs/none-grpo-s0    # before that, take README's answer anew

A picture carries a fingerprint of what it shows, so a test sees one that is older than its result.

README's answer is chosen by a rule, not by its looks: of the first step on record the first answer
that solved its problem at its second try, each try being two calculations.
"""
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import LogLocator, PercentFormatter

from analysis.answers import answers_of
from analysis.plots import (BLUE, COLOURS, GREY, ORANGE, legend_below, panels, plain_number, plt,
                            save, style_of)
from harness.log_reading import is_number
from engine.errors import UserError
from engine.tokens import KINDS, load_tokenizer
from harness.credit_reading import credit_steps
from harness.files import PROJECT
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.progress import say
from harness.identity import run_config
from research.experiments.published import RESULTS, fingerprint, read_result, write_result
from research.statistics import mean_reach

IN_WORDS = {"seconds": "processor seconds", "tokens": "sampled tokens", "rewards": "scored answers"}
SIGNS = "os^DvP*"
OFF = 0.95              # a cosine below this is another direction
LETTERS = 84            # in a line of README's answer
SHADES = LinearSegmentedColormap.from_list("shades", ["white", COLOURS[5]])
FLAGS = {"run": Flag(None, "folder of the default run, to take README's answer from")}


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m research pictures [flags]", __doc__), FLAGS)
    run = with_defaults(parser.read(argv), FLAGS).run
    if run:
        take_answer(Path(run))
    for picture, (drawing, *sources) in PUBLISHED.items():
        draw(drawing, PROJECT / picture, *map(shown_of, sources))
        say(f"drawn: {picture}")


def draw(drawing: Callable, path: Path, *shown: dict) -> tuple[Path, str]:
    """`shown` are tables or values as a result stores them."""
    figure, caption = drawing(*shown)
    return save(figure, path.parent, path.stem, caption, fingerprint(*shown))


def shown_of(source: str) -> dict:
    """`control values`: of each run, by arm and seed; `control success`: the table of this name."""
    name, _, part = source.partition(" ")
    result = read_result(RESULTS / f"{name}.json")
    parts = {table["name"]: table for table in result["tables"]}
    parts["values"] = result.get("values")
    if not parts.get(part):
        raise UserError(f"{name}.json has no {part}, which a picture shows: measure it again, then "
                        "python -m research publish FOLDER")
    return parts[part]


# experiments

def draw_success(values: dict):
    """Held-out success against each price, a line an arm, with its interval over seeds."""
    figure, axes = panels(len(IN_WORDS), sharey=True)
    several = any(len(runs) > 1 for runs in values.values())
    for axis, (price, words) in zip(axes, IN_WORDS.items()):
        for number, (arm, runs) in enumerate(values.items()):
            if all(price in run for run in runs.values()):
                success_of_arm(axis, list(runs.values()), price, label=arm, **style_of(number))
        axis.set(xlabel=words)
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter(plain_number)
    axes[0].set(ylabel="held-out success, sampled, %")
    legend_below(figure, axes[0], ncols=5)
    return figure, ("Held-out success against what the training has cost" +
                    several * ", means and 95% intervals over seeds")


def success_of_arm(axis, runs: list[dict], price: str, **style) -> None:
    """A share is not below 0 or above 1, and no more is its interval."""
    cost, success = (np.array([run[key] for run in runs]) for key in (price, "success"))
    mean, reach = success.mean(0), None
    if len(runs) > 1:
        reach = 100 * np.minimum(mean_reach(success), [mean, 1 - mean])
    axis.errorbar(cost.mean(0), 100 * mean, reach, marker="o", ms=3, elinewidth=0.7, **style)


def draw_board(table: dict):
    compared = [row for row in table["rows"] if row["ahead"] is not None][::-1]
    figure, axis = panels(1, figsize=(8.0, 1.5 + 0.27 * len(compared)))
    colours = {"ahead": BLUE, "behind": ORANGE, "not told apart": GREY}
    for colour, word in zip(colours.values(), colours):
        axis.plot([], [], "o-", color=colour, lw=2, ms=5, label=word)
    for height, row in enumerate(compared):
        colour = colours.get(row["verdict"], GREY)
        if all(map(is_number, row["95%"] or [None])):
            axis.plot(100 * np.array(row["95%"]), [height, height], color=colour, lw=2)
        axis.plot(100 * row["ahead"], height, "o", color=colour, ms=5)
    axis.axvline(0, color="black", lw=0.8)
    axis.set(yticks=range(len(compared)), yticklabels=[row["arm"] for row in compared],
             ylim=(-0.7, len(compared) - 0.3), title="Who is ahead of plain GRPO?",
             xlabel="points of held-out success, minus plain GRPO")
    legend_below(figure, axis, ncols=3, title="Lines: the 95% interval of one arm alone. Colours: "
                 "by p, of candidates corrected\nfor their number, so a line beside 0 may be grey; "
                 "of controls and placebos not.")
    return figure, "Late held-out success, each arm minus plain GRPO, with 95% intervals"


# probes

def points_with_names(axis, points: dict[str, tuple[float, float]], named: Sequence[str]) -> None:
    """All points, for a legend: names beside them would lie on each other."""
    for number, name in enumerate(named):
        if name in points:
            axis.plot(*points[name], SIGNS[number % len(SIGNS)], ms=7, ls="", label=name,
                      color=COLOURS[number % (len(COLOURS) - 1)])  # without grey
    others = [place for name, place in points.items() if name not in named]
    if others:
        axis.plot(*zip(*others), "o", color=GREY, ms=4, zorder=1.5, label="others")


def draw_cosine_and_noise(cosines: dict, noises: dict | None = None):
    """Of one table; or of two with a column for each advantage, the column of rloo."""
    pairs = zip(cosines["rows"], (noises or cosines)["rows"], strict=True)
    points = {row["mitigation"]: (row.get("rloo", row.get("cosine")),
                                  other.get("rloo", other.get("noise"))) for row, other in pairs}
    points = {name: place for name, place in points.items() if all(map(is_number, place))}
    figure, axis = panels(1)
    elsewhere = [name for name, (cosine, _) in points.items() if cosine < OFF]
    points_with_names(axis, points, ["none", *elsewhere])
    axis.set(xlabel="cosine with the true gradient", ylabel="noise over signal", yscale="log",
             title="Weightings, with the advantage rloo")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # they often span less than a decade
    legend_below(figure, axis, ncols=4)
    return figure, ("Direction and noise of each weighting, by enumeration: lower right is better. "
                    f"Named: none, and those that point elsewhere (cosine below {OFF})")


def bars_by_kind(axis, table: dict) -> None:
    bars = (("of the tokens", GREY, "of all", None),
            ("of plain GRPO's gradient", ORANGE, "gradient", "95% "),
            ("of what is decided", BLUE, "decided", "95%"))
    places = np.arange(len(table["rows"]))
    for i, (label, colour, value, interval) in enumerate(bars):
        heights, reach = np.array([row[value] for row in table["rows"]], float), None
        if interval is not None:
            ends = np.array([row[interval] for row in table["rows"]], float).T
            reach = np.abs(ends - heights)
        axis.bar(places + 0.27 * (i - 1), heights, 0.25, color=colour, label=label, yerr=reach,
                 error_kw=dict(lw=0.8, capsize=2))
    axis.set(xticks=places, xticklabels=[row[table["columns"][0]] for row in table["rows"]],
             ylabel="share of the whole", ylim=(0, min(axis.get_ylim()[1], 1)))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.grid(axis="x", visible=False)


def means_of(cells: list[dict]) -> dict[tuple, np.ndarray]:
    """Of the probe pointer: mean success of each arm and length, by seed."""
    return {(cell["arm"], cell["length"]): np.array([run["mean"] for run in cell["runs"]])
            for cell in cells}


def draw_worth(values: dict):
    """Of the probe pointer: the lead over plain GRPO by the quality of a pointer, a line for each
    weight elsewhere; placebos and the true credit beside."""
    means = means_of(values["cells"])
    kinds = ("1 of 3", "2 of 3", "3 of 3", "3 of 3, 12 wrong", "3 of 3, 40 wrong", "3 at random")
    lengths = sorted({length for _, length in means})
    figure, axes = panels(len(lengths), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], lengths):
        plain, places = means["plain GRPO", length], np.arange(len(kinds))
        for number, elsewhere in enumerate(("0", "0.1", "0.33")):
            of_kinds = [means.get((f"{kind} ({elsewhere})", length), np.nan * plain)
                        for kind in kinds]
            leads = 100 * (np.stack(of_kinds, 1) - plain[:, None])  # (seeds, kinds)
            axis.errorbar(places + 0.12 * (number - 1), leads.mean(0), mean_reach(leads),
                          marker="o", ms=4, elinewidth=0.8, label=f"weight {elsewhere} elsewhere",
                          **style_of(number))
        true = 100 * (means["true credit", length] - plain).mean()
        axis.axhline(true, color="black", ls="--", lw=1, label="true credit")
        axis.axhline(0, color=GREY, lw=1, label="plain GRPO")
        axis.set(title=f"Answers of {length} tokens", xticks=places,
                 xticklabels=[kind.replace(", ", "\n") for kind in kinds])
    axes[0][0].set_ylabel("points of mean success, minus plain GRPO")
    legend_below(figure, axes[0][0], ncols=5)
    return figure, ("What a pointer is worth by its quality, each at its own learning rate: means "
                    "over seeds with 95% intervals")


def draw_rule(rule: dict, of_seeds: dict, versus: dict):
    """What the rule said of each method before training, of several seeds where they were asked,
    and what it led by at equal tokens."""
    figure, axis = panels(1, figsize=(8.0, 4.2))
    axis.axvline(1, color="black", lw=0.8)
    axis.axhline(0, color=GREY, lw=0.8)
    said = {row["arm"]: row["ratio"] for row in [*rule["rows"], *of_seeds["rows"]]}
    for row in versus["rows"]:
        if row["price"] == IN_WORDS["tokens"] and row["arm"] in said:
            place, lead = said[row["arm"]], 100 * row["difference"]
            reach = np.abs(100 * np.array(row["95%"]) - lead)[:, None]
            axis.errorbar(place, lead, reach, fmt="o", color=BLUE, ms=5, elinewidth=0.8)
            axis.annotate(row["arm"], (place, lead), (6, 4), textcoords="offset points")
    axis.set(xscale="log", xlabel="noise ratio over cost ratio, measured before training",
             ylabel="points minus plain GRPO, at equal tokens")
    return figure, ("What the rule said of a method, and what it led by: above 1 it should be "
                    "ahead. Means over seeds with 95% intervals")


def draw_quality(values: dict, rule: dict, of_seeds: dict, board: dict):
    """By the index of a pointer: lines are the planted task, squares the tiny model. An index is of
    several seeds, where it was measured so."""
    figure, axis = panels(1, figsize=(8.0, 4.4))
    means = {cell: seeds.mean() for cell, seeds in means_of(values["cells"]).items()}
    arms = {"3 at random": (0, 3), "1 of 3": (1, 0), "2 of 3": (2, 0), "3 of 3, 40 wrong": (3, 40),
            "3 of 3, 12 wrong": (3, 12), "3 of 3": (3, 0)}
    for number, length in enumerate(sorted({length for _, length in means})):
        plain, true = means["plain GRPO", length], means["true credit", length]
        points = sorted((planted_index(length, *found), (means[f"{arm} (0.1)", length] - plain)
                         / (true - plain))
                        for arm, found in arms.items() if (f"{arm} (0.1)", length) in means)
        axis.plot(*zip(*points), marker="o", ms=4, label=f"planted, {length} tokens",
                  **style_of(number))
    leads = {row["arm"]: (row["ahead"], row["95%"]) for row in board["rows"]}
    true = leads["measured4"][0]
    index = {row["arm"]: row["index"] for row in [*rule["rows"], *of_seeds["rows"]]}
    for arm in (leads.keys() & index.keys()) - {"none"}:
        lead, interval = leads[arm]
        axis.plot([index[arm]] * 2, np.array(interval) / true, color="black", lw=0.7)
        axis.plot(index[arm], lead / true, "ks", ms=5)
        axis.annotate(arm, (index[arm], lead / true), (6, 4), textcoords="offset points")
    axis.axhline(0, color=GREY, lw=0.8)
    axis.margins(x=0.1)
    axis.set(xlabel="index of the pointer: 1 points at all that decides, 0 by chance",
             ylabel="lead, as a share of the true credit's")
    legend_below(figure, axis, ncols=3, title="Squares: the tiny model, as a share of measured4's "
                 "lead, with the 95% interval of the arm")
    return figure, "What a pointer of a given quality should be worth, and what it was"


def planted_index(length: int, found: int, wrong: int) -> float:
    """Of a pointer to some of the three places that decide alike. Equal weights share their rank,
    so the pointed ones are at 1 - (n - 1) / (length - 1), the others at -n / (length - 1)."""
    share, pointed = found / 3, found + wrong
    return (share * (length - pointed) - (1 - share) * pointed) / (length - 1)


# README

def take_answer(run: Path) -> None:
    config, steps = run_config(run), credit_steps(run)[:1]
    answers = sorted(answers_of(run, load_tokenizer(run), steps), key=lambda a: a["episode"])
    answer = next(filter(is_second_try, answers), None)
    if answer is None:
        raise UserError(f"{run}: no answer of its first step solved its problem at the second try")
    kept = {key: answer[key] for key in ("step", "episode", "prompt", "reward", "texts", "values")}
    kept |= {"kinds": [KINDS[kind] for kind in answer["kind"]],
             "rewards": [other["reward"] for other in answers if other["group"] == answer["group"]]}
    made = {key: config[key] for key in ("git_commit", "versions")}
    result = {"measured": "answer", "command": f"python -m research pictures --run {run}", **made,
              "day": date.today().isoformat(), "tables": [], "values": kept}
    write_result(RESULTS / "answer.json", result)


def is_second_try(answer: dict) -> bool:
    """A try takes two calculations. If all of a group solve it, nothing has a gradient."""
    solved = answer["answer"] == 1 and any(answer["values"]["gradient size"])
    return solved and "".join(answer["texts"]).count("=") == 4


def draw_answer(answer: dict, kinds: dict):
    """Above, one answer; below, what is true of many."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.4, 5.8), layout="constrained",
                                          height_ratios=(1, 1.8))
    write_tokens(figure, above, answer["texts"], answer["values"]["gradient size"])
    problem = answer["prompt"].split("\n")[1].removesuffix("<|im_end|>").strip()
    above.set_title(f'An answer to "{problem}" in step {answer["step"]}: right, reward '
                    f'{answer["reward"]:.2f}, the mean of its {len(answer["rewards"])} is '
                    f'{np.mean(answer["rewards"]):.2f}')
    bars_by_kind(below, kinds)
    below.set_title("Many answers before training: the share of each kind of token")
    legend_below(figure, below, ncols=3)
    return figure, "One answer, shaded by its gradient, and the shares of each kind of token"


def write_tokens(figure, axis, texts: list[str], sizes: list[float]) -> None:
    """Each in a box, shaded by its size."""
    line, place = 0, 0
    for text, size in zip(texts, sizes):
        if place + len(text) > LETTERS:
            line, place = line + 1, 0
        axis.add_patch(plt.Rectangle((place, -line - 0.42), len(text), 0.84, lw=0,
                                     color=SHADES(size / max(sizes))))
        axis.text(place, -line, text.replace("\n", "↵"), family="monospace", fontsize=11,
                  va="center_baseline")
        line, place = (line + 1, 0) if text.endswith("\n") else (line, place + len(text))
    axis.set(xlim=(0, LETTERS), ylim=(-line - 0.6, 0.6))
    axis.axis("off")
    shades = ScalarMappable(Normalize(0, max(sizes)), SHADES)
    figure.colorbar(shades, ax=axis, orientation="horizontal", fraction=0.08, aspect=40,
                    label="shade: size of the push at the logits that a token was given, "
                    "abs(A) w s; A its advantage, w its weight")


PUBLISHED = {  # picture -> how it is drawn, and which tables or values of results it shows
    "docs/answer.png": (draw_answer, "answer values", "scoreboard kind"),
    "research/results/control-success.png": (draw_success, "control values"),
    "research/results/exact-cosine_and_noise.png": (draw_cosine_and_noise, "exact cosine",
                                                    "exact noise"),
    "research/results/finals-board.png": (draw_board, "finals board"),
    "research/results/leaderboard-board.png": (draw_board, "leaderboard board"),
    "research/results/pointer-worth.png": (draw_worth, "pointer values"),
    "research/results/pointers-quality.png": (draw_quality, "pointer values", "rule rule",
                                              "rule_seeds rule", "pointers board"),
    "research/results/pointers-rule.png": (draw_rule, "rule rule", "rule_seeds rule",
                                          "pointers versus"),
    "research/results/price-success.png": (draw_success, "price values")}
