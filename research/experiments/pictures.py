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
from analysis.plots import (BLUE, COLOURS, GREY, ORANGE, legend_below, plt, save, style_of)
from harness.log_reading import is_number
from engine.errors import UserError
from engine.tokens import KINDS, load_tokenizer
from harness.credit_reading import credit_steps
from harness.files import PROJECT
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.progress import say
from harness.identity import run_config
from research.experiments.arms import CONTROLS, SCALE
from research.experiments.published import RESULTS, fingerprint, read_result, write_result
from research.statistics import mean_reach

MARKED = {"larger batches": COLOURS[2], "the control": COLOURS[3]}
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


def draw_leads(table: dict):
    """The board: each arm's lead, the best at the top; crosses are what was predicted."""
    rows = sorted(table["rows"], key=lambda row: row["lead"])
    figure, axis = plt.subplots(figsize=(8.0, 1.5 + 0.27 * len(rows)))
    colours = {"ahead": BLUE, "behind": ORANGE, "no difference seen": GREY, **MARKED}
    for word, colour in colours.items():
        axis.plot([], [], "o-", color=colour, lw=2, ms=5, label=word)
    for height, row in enumerate(rows):
        colour = colours[meaning_of(row)]
        if all(map(is_number, row["95%"])):
            axis.plot(100 * np.array(row["95%"]), [height, height], color=colour, lw=2)
        axis.plot(100 * row["lead"], height, "o", color=colour, ms=5)
        if is_number(row["predicted"]):
            axis.plot(100 * row["predicted"], height, "kx", ms=6)
    axis.axvline(0, color="black", lw=0.8)
    axis.set(yticks=range(len(rows)), yticklabels=[row["arm"] for row in rows],
             ylim=(-0.7, len(rows) - 0.3), title="Who is ahead of plain GRPO?",
             xlabel="points of mean success in training, minus plain GRPO")
    if any(is_number(row["predicted"]) for row in rows):
        axis.plot([], [], "kx", ms=6, label="predicted")
    legend_below(figure, axis, ncols=3, title="Lines: the 95% interval of one arm alone. Colours: "
                 "the verdict, by p corrected for the number\nof methods and, for ahead, a second "
                 "look. So a line beside 0 may be grey.")
    return figure, "Mean success in training, each arm minus plain GRPO, with 95% intervals"


def meaning_of(row: dict) -> str:
    """What its colour stands for."""
    if row["arm"] in (*SCALE, *CONTROLS):
        return "larger batches" if row["arm"] in SCALE else "the control"
    word = row["verdict"].partition(",")[0]
    return word if word in ("ahead", "behind") else "no difference seen"


def points_with_names(axis, points: dict[str, tuple[float, float]], named: Sequence[str]) -> None:
    """All points, for a legend: names beside them would lie on each other."""
    for number, name in enumerate(named):
        if name in points:
            axis.plot(*points[name], SIGNS[number % len(SIGNS)], ms=7, ls="", label=name,
                      color=COLOURS[number % (len(COLOURS) - 1)])  # without grey
    others = [place for name, place in points.items() if name not in named]
    if others:
        axis.plot(*zip(*others), "o", color=GREY, ms=4, zorder=1.5, label="others")


def draw_cosine_and_noise(table: dict):
    points = {row["mitigation"]: (row["cosine"], row["noise"]) for row in table["rows"]}
    points = {name: place for name, place in points.items() if all(map(is_number, place))}
    figure, axis = plt.subplots()
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


FAR = 5  # points


def draw_dials(values: dict):
    """Of the probe dial: the share of the true credit's lead that an arm gains, by the share of
    tokens that decides, a line each, a panel for each length; only worlds whose other dials are as
    they were. Grey is plain GRPO with more problems."""
    cells = {(cell["world"], cell["arm"]): np.array(cell["mean"]) for cell in values["cells"]}
    shares = {world: [int(number) for number in world.split("/")] for world, _ in cells
              if world.replace("/", "").isdigit()}
    lengths = sorted({tokens for tokens, _ in shares.values()})
    names = [name for name in dict.fromkeys(arm for _, arm in cells)
             if name not in ("plain GRPO", "true credit")]
    figure, axes = plt.subplots(1, max(1, len(lengths)), sharey=True, squeeze=False,
                                figsize=(5.6 * max(1, len(lengths)), 5.4))
    for axis, length in zip(axes[0], lengths):
        worlds = sorted((keys, world) for world, (tokens, keys) in shares.items()
                        if tokens == length)
        for number, name in enumerate(names):
            points = [(keys / length, *share_of_lead(cells, world, name)) for keys, world in worlds
                      if (world, name) in cells]
            is_scale = name.startswith("batch ")
            style = dict(color=GREY, ls=":", lw=2) if is_scale else style_of(number)
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
    axes[0][0].set(ylabel="lead, as a share of the true credit's", ylim=(-1.5, 1.2))
    legend_below(figure, axes[0][0], ncols=5)
    return figure, ("Lead over plain GRPO as a share of the true credit's, by the share of tokens "
                    "that decides, each arm at its own rate: means over seeds with 95% intervals; "
                    "what lies below -1.5 is cut off")


def share_of_lead(cells: dict, world: str, name: str) -> tuple[float, float]:
    """And how far its interval reaches, the true credit's lead taken as it is."""
    plain = cells[world, "plain GRPO"]
    leads, true = cells[world, name] - plain, (cells[world, "true credit"] - plain).mean()
    return leads.mean() / true, float(mean_reach(leads[:, None])[0] / abs(true))


def draw_law(table: dict):
    """Of the probe dial: predicted leads against measured ones, a colour for each world, those with
    a reward of all or nothing apart. Named are points FAR from the diagonal whose interval does not
    reach it."""
    worlds = list(dict.fromkeys(row["world"] for row in table["rows"]))
    parts = [[world for world in worlds if is_all == world.endswith("all")]
             for is_all in (False, True)]
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.2))
    for axis, part in zip(axes, parts):
        rows = [row for row in table["rows"] if row["world"] in part]
        ends = [100 * end for row in rows for end in (row["predicted"], row["lead"])] or [0]
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="black", lw=1)
        for world in part:
            number = worlds.index(world)
            own = [row for row in rows if row["world"] == world]
            predicted, lead, low, high = 100 * np.array(
                [[row["predicted"], row["lead"], *row["95%"]] for row in own]).T
            axis.errorbar(predicted, lead, [lead - low, high - lead], ms=4, elinewidth=0.6,
                          fmt=SIGNS[number % len(SIGNS)], color=COLOURS[number % len(COLOURS)],
                          label=world)
            for row, x, y in zip(own, predicted, lead):
                if row["verdict"] == "off" and abs(x - y) > FAR:
                    axis.annotate(f"{row['arm']}, {world}", (x, y), (5, -3),
                                  textcoords="offset points", fontsize=6.5)
        axis.set(xlabel="predicted lead, points", ylabel="measured lead, points")
    axes[0].set_title("The reward is the share of keys that are right")
    axes[1].set_title("The reward is 1 if all are right, else 0")
    legend_below(figure, axes[0], ncols=4)
    return figure, ("What a method should lead by, from the noise of its gradient and plain GRPO's "
                    "own leads by the size of its batch, and what it led by: 95% intervals over "
                    f"seeds; named where they miss the diagonal by more than {FAR} points")


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
    "research/results/board-leads.png": (draw_leads, "board board"),
    "research/results/dial-law.png": (draw_law, "dial law"),
    "research/results/dial-shares.png": (draw_dials, "dial values")}
