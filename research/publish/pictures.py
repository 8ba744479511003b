"""The pictures of the pages, each drawn from research/results or from a formula alone; `python -m
research publish` draws them. Those that explain how GRPO works are in lessons.py, and those that
explain what results mean in lessons_of_runs.py.

A picture carries a fingerprint of what it shows, so a test sees one that is older than its result.
"""
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.plots import (BLUE, CHANGE_COLOUR, COLOURS, CREDIT_COLOUR, GRADIENT_COLOUR, GREY,
                            ORANGE, PUSH_COLOUR, TOKENS_COLOUR, legend_below, plt, save, style_of,
                            whole_steps)
from engine.errors import PROJECT
from research.publish import lessons, lessons_of_runs
from research.boards.arms import CONTROLS, SCALE
from research.publish.results import Results, estimates_as_arrays, fingerprint

COLOUR_OF_MEANING = {"larger batches": COLOURS[2], "the control": COLOURS[3]}
MEANINGS = {**dict.fromkeys(SCALE, "larger batches"), **dict.fromkeys(CONTROLS, "the control")}
COLOUR_OF_VERDICT = {"better": BLUE, "ahead": BLUE, "worse": ORANGE, "behind": ORANGE}
NOT_SEEN = "no difference seen"
SIGNS = "os^DvP*"
FAR = 5                 # points
Shares = dict[tuple[str, str], dict]  # of a task and an arm: its share of the true credit's gain


def draw_all_published(results: Results) -> list[str]:
    """Draw the pictures of all pages, and return their paths in the project."""
    for picture, (drawing, *source) in PUBLISHED.items():
        draw_published(drawing, PROJECT / picture, shown_of(results, *source))
    return list(PUBLISHED)


def outdated_pictures(results: Results) -> list[str]:
    """The pictures that do not show what their results hold."""
    outdated = []
    for picture, (_, *source) in PUBLISHED.items():
        mark = fingerprint(shown_of(results, *source))
        if not carries(PROJECT / picture, mark):
            outdated.append(picture)
    return outdated


def carries(path: Path, mark: str) -> bool:
    """Whether a picture was saved with this fingerprint, which is a text chunk of the PNG."""
    return path.exists() and f"tEXtShows\0{mark}".encode() in path.read_bytes()


def draw_published(drawing: Callable[[dict], Figure], path: Path, shown: dict) -> None:
    """Draw and save with a fingerprint of `shown`, a table or the values as a result stores
    them."""
    save(drawing(shown), path.parent, path.stem, "", fingerprint(shown))


def shown_of(results: Results, name: str | Callable[[], dict], part: str = "") -> dict:
    """A table of a result by its name, or the `values` that its tables were made of. A picture of a
    formula has a function in the place of a result, which computes what the picture shows."""
    if callable(name):
        return name()
    return results.result(name)["values"] if part == "values" else results.table(name, part)


def draw_gains(table: dict, meanings: dict[str, str] = MEANINGS,
               second_look: str = ", and ahead takes a second look") -> Figure:
    """A leaderboard: each arm's gain, the largest at the top; crosses are what was predicted.
    `meanings` has the arms that are no methods; `second_look`, what else it takes to be ahead."""
    rows = sorted(table["rows"], key=lambda row: row["gain"]["value"])
    better, worse = ("ahead", "behind") if second_look else ("better", "worse")
    figure, axis = plt.subplots(figsize=(8.0, 1.5 + 0.27 * len(rows)))
    for word, colour in {better: BLUE, worse: ORANGE, NOT_SEEN: GREY, **COLOUR_OF_MEANING}.items():
        axis.plot([], [], "o-", color=colour, lw=2, ms=5, label=word)
    for height, row in enumerate(rows):
        gain = row["gain"]
        meaning = meanings.get(row["arm"])
        colour = COLOUR_OF_MEANING[meaning] if meaning else colour_of_verdict(row["verdict"])
        axis.plot([100 * gain["low"], 100 * gain["high"]], [height, height], color=colour, lw=2)
        axis.plot(100 * gain["value"], height, "o", color=colour, ms=5)
        if row["predicted"] is not None:
            axis.plot(100 * row["predicted"], height, "kx", ms=6)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set(title="Gain over plain GRPO",
             xlabel="gain in mean success in training, points")
    axis.plot([], [], "kx", ms=6, label="predicted")
    legend_below(figure, axis, ncols=3, title="A line is the 95% interval of one arm alone. Its "
                 "colour is the verdict,\nfor which p is corrected for the number of methods"
                 f"{second_look}.\nSo a line that does not reach 0 may still be grey.")
    return figure


def colour_of_verdict(verdict: str) -> str:
    """The colour of a method: `behind, stopped` counts as behind, `better once, ...` as nothing
    seen."""
    return COLOUR_OF_VERDICT.get(verdict.partition(",")[0], GREY)


def draw_dial_shares(board: dict) -> Figure:
    """The share of the true credit's gain that each arm reaches, by the share of tokens that
    decide: a panel for each length, synthetic tasks without further parameters. Grey, the eighth
    colour, is plain GRPO with more problems; what lies below -1.5 is cut off."""
    shares = shares_of_board(board)
    arms = dict.fromkeys(row["arm"] for row in board["rows"])
    compared = [arm for arm in arms if arm not in ("plain GRPO", "true credit")]
    compared.sort(key=lambda arm: arm.startswith("batch "))
    figure, panels = panels_by_length(shares, 5.6, 5.4, (-1.5, 1.2))
    for axis, length, tasks in panels:
        for number, arm in enumerate(compared):
            draw_share_of_arm(axis, shares, tasks, length, arm, number)
        axis.axhline(1, color="black", lw=1, label="true credit")
        axis.axhline(0, color="black", lw=0.6)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    legend_below(figure, figure.axes[0], ncols=5)
    return figure


def panels_by_length(shares: Shares, width: float, height: float, limits: tuple[float, float]
                     ) -> tuple[Figure, list[tuple[Axes, int, list[tuple[int, str]]]]]:
    """A panel for each length of an answer, with the tasks of this length (`plain_tasks`)."""
    of_lengths = sorted(plain_tasks(shares).items())
    figure, axes = plt.subplots(1, max(1, len(of_lengths)), sharey=True, squeeze=False,
                                figsize=(width * max(1, len(of_lengths)), height))
    panels = []
    for axis, (length, tasks) in zip(axes[0], of_lengths):
        axis.set(title=f"Answers of {length} tokens", xscale="log",
                 xlabel="share of the tokens that decide the reward")
        panels.append((axis, length, tasks))
    axes[0][0].set(ylabel="gain, as a share of the true credit's", ylim=limits)
    return figure, panels


def shares_of_board(board: dict) -> Shares:
    """Those that are known."""
    shares = {}
    for row in board["rows"]:
        if row["share"] is not None:
            shares[row["world"], row["arm"]] = row["share"]
    return shares


def plain_tasks(shares: Shares) -> dict[int, list[tuple[int, str]]]:
    """The tasks that are written as 128/12 and no more, by the length of their answers: how many
    tokens decide, and the name."""
    found: dict[int, list[tuple[int, str]]] = {}
    for task in dict.fromkeys(task for task, _ in shares):
        tokens, _, decide = task.partition("/")
        if decide.isdigit():
            found.setdefault(int(tokens), []).append((int(decide), task))
    return {length: sorted(tasks) for length, tasks in found.items()}


def draw_share_of_arm(axis: Axes, shares: Shares, tasks: list[tuple[int, str]], length: int,
                      name: str, number: int) -> None:
    """One arm's line in a panel."""
    place, share, reaches = points_of_arm(shares, tasks, length, name)
    if not len(place):
        return
    is_scale = name.startswith("batch ")
    style = dict(color=GREY, ls=":", lw=2) if is_scale else style_of(number + number // 7)
    axis.errorbar(place, share, reaches, marker="o", ms=4, elinewidth=0.7, label=name, **style)
    if is_scale:
        axis.annotate(name, (place[-1], share[-1]), (6, -3), textcoords="offset points",
                      color=GREY, fontsize=8)


def points_of_arm(shares: Shares, tasks: list[tuple[int, str]], length: int,
                  name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each task in which the arm's share is known: the share of tokens that decide (n,), the
    arm's share (n,), and how far its interval reaches down and up (2, n)."""
    known = [(decide / length, shares[task, name]) for decide, task in tasks
             if (task, name) in shares]
    share, low, high = estimates_as_arrays([stored for _, stored in known])
    return np.array([place for place, _ in known]), share, np.array([share - low, high - share])


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
    axes[1].set(title="Gradient norm before clipping", xlabel="step", ylabel="norm",
                yscale="log")
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_formatter("")
    legend_below(figure, axes[0], ncols=4)
    return figure


def draw_predicted_gains(table: dict) -> Figure:
    """Predicted gains against measured ones, a colour for each task, those with a reward of all or
    nothing apart. Points FAR from the diagonal whose interval does not reach it are named."""
    tasks = list(dict.fromkeys(row["world"] for row in table["rows"]))
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.2))
    for axis, is_all in zip(axes, (False, True)):
        named, ends = [], [0.0]
        for number, task in enumerate(tasks):
            if task.endswith("all") != is_all:
                continue
            rows = [row for row in table["rows"] if row["world"] == task]
            predicted = 100 * np.array([row["predicted"] for row in rows])
            measured = estimates_as_arrays([row["gain"] for row in rows])
            gain, low, high = (100 * end for end in measured)
            axis.errorbar(predicted, gain, [gain - low, high - gain],
                          fmt=SIGNS[number % len(SIGNS)], color=COLOURS[number % len(COLOURS)],
                          ms=4, elinewidth=0.6, label=task)
            for row, x, y in zip(rows, predicted, gain):
                if row["verdict"] == "off" and abs(x - y) > FAR:
                    named.append((y, x, f"{row['arm']}, {task}"))
            ends += [*predicted, *gain]
        least, greatest = min(ends), max(ends)
        axis.plot([least, greatest], [least, greatest], color="black", lw=1)
        height, gap = np.inf, 0.026 * (greatest - least)
        for y, x, name in sorted(named, reverse=True):  # no name is written over another
            height = min(y, height - gap)
            axis.annotate(name, (x, y), (x + gap, height - gap / 3), fontsize=6.5)
        axis.set(xlabel="predicted gain, points", ylabel="measured gain, points")
    axes[0].set_title("The reward is the share of deciding tokens that are right")
    axes[1].set_title("The reward is 1 if all are right, else 0")
    legend_below(figure, axes[0], ncols=4)
    return figure


def draw_kinds_of_models(values: dict) -> Figure:
    """Each kind's share of the tokens, and of the gradient, a panel for each model."""
    figure, axes = plt.subplots(1, len(values), figsize=(9.0, 3.2), sharey=True)
    for axis, (title, shares) in zip(axes, values.items()):
        places = np.arange(len(shares["kinds"]))
        axis.bar(places - 0.2, shares["tokens"], 0.4, color=TOKENS_COLOUR, label="of the tokens")
        axis.bar(places + 0.2, shares["gradient"], 0.4, color=GRADIENT_COLOUR,
                 label="of the gradient")
        axis.set_xticks(places, shares["kinds"], rotation=35, fontsize=8)
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("share, %")
    legend_below(figure, axes[0], ncols=2)
    return figure


def draw_change(table: dict) -> Figure:
    """Shares of push, change and credit: a panel for each of the kinds that differ most."""
    kinds = list(dict.fromkeys(row["kind"] for row in table["rows"]))
    figure, axes = plt.subplots(1, len(kinds), sharey=True, squeeze=False, figsize=(10, 3.8))
    columns = {"push": ("push", PUSH_COLOUR),
               "plain step": ("change, plain step", CHANGE_COLOUR + "80"),
               "AdamW": ("change, AdamW", CHANGE_COLOUR), "credit": ("credit", CREDIT_COLOUR)}
    for axis, kind in zip(axes[0], kinds):
        rows = [row for row in table["rows"] if row["kind"] == kind]
        places = np.arange(len(rows))
        for number, (name, (label, colour)) in enumerate(columns.items()):
            measured = estimates_as_arrays([row[name] for row in rows])
            share, low, high = (100 * end for end in measured)
            axis.bar(places + 0.2 * (number - 1.5), share, width=0.19, color=colour, label=label,
                     yerr=[share - low, high - share], ecolor=GREY)
        axis.set(title=f"{kind}s: {rows[0]['tokens']:.0%} of the tokens", xlabel="step")
        axis.set_xticks(places, [row["step"] for row in rows])
        axis.grid(axis="x", visible=False)
        axis.axhline(0, color="black", lw=0.8)  # an estimated credit may be below it
    axes[0][0].set(ylabel="share of the sum of sizes, %")
    legend_below(figure, axes[0][0], ncols=4)
    return figure


def draw_dial_shares_plainly(board: dict) -> Figure:
    """Three lines of draw_dial_shares: who knows where the reward is decided, who knows half of it,
    and a larger batch."""
    shares = shares_of_board(board)
    figure, panels = panels_by_length(shares, 4.6, 4.2, (-1.1, 1.35))
    for axis, length, tasks in panels:
        for number, (arm, name) in enumerate(PLAINLY.items()):
            place, share, reaches = points_of_arm(shares, tasks, length, arm)
            beside = place * (1 + 0.04 * (number - 1))  # no interval covers another
            axis.errorbar(beside, share, reaches, marker="o", ms=5, lw=2, elinewidth=0.9,
                          label=name, **style_of(number))
        axis.axhline(1, color="black", lw=1)
        axis.axhline(0, color="black", lw=0.8)
        deciding = [decide / length for decide, _ in tasks]
        axis.set_xticks(deciding, [f"{share:.0%}" for share in deciding])
        axis.set_xticks([], minor=True)
    figure.axes[0].set_yticks([-1, -0.5, 0, 0.5, 1],
                              ["-1", "-0.5", "plain GRPO  0", "0.5", "true credit  1"])
    legend_below(figure, figure.axes[0], ncols=3)
    return figure


def draw_decided(table: dict) -> Figure:
    """Each category's share of the tokens, of the gradient and of what is decided, with intervals
    over problems: a panel for each model, where the table has several. Categories with less than 1%
    of the tokens of every model are left out."""
    of_models: dict[str, list[dict]] = {}
    for row in table["rows"]:
        of_models.setdefault(row.get("model", ""), []).append(row)
    kinds = dict.fromkeys(row["kind"] for row in table["rows"])
    shown = [kind for kind in kinds if any(row["of all"] > 0.01 for row in table["rows"]
                                           if row["kind"] == kind)]
    figure, axes = plt.subplots(1, len(of_models), sharey=True, squeeze=False,
                                figsize=(11.0 if len(of_models) > 1 else 8.0, 4.0))
    for axis, (model, rows) in zip(axes[0], of_models.items()):
        draw_decided_kinds(axis, rows, shown)
        if model:
            axis.set(title=f"after {model}" if model.startswith("step") else "before training")
    axes[0][0].set(ylabel="share, %")
    legend_below(figure, axes[0][0], ncols=3)
    return figure


def draw_decided_kinds(axis: Axes, rows: list[dict], kinds: list[str]) -> None:
    """Three bars for each of these categories: of the tokens, of the gradient, of what is
    decided."""
    row_of = {row["kind"]: row for row in rows}
    places = np.arange(len(kinds))
    tokens = [100 * row_of[kind]["of all"] for kind in kinds]
    axis.bar(places - 0.27, tokens, 0.25, color=TOKENS_COLOUR, label="of the tokens")
    labels = {"gradient": "of plain GRPO's gradient", "decided": "of what is decided"}
    colours = {"gradient": GRADIENT_COLOUR, "decided": CREDIT_COLOUR}
    for number, name in enumerate(labels):
        estimates = [row_of[kind][name] for kind in kinds]
        share, low, high = (100 * ends for ends in estimates_as_arrays(estimates))
        reach = np.maximum([share - low, high - share], 0)  # an estimate may lie beyond its cut end
        axis.bar(places + 0.27 * number, share, 0.25, color=colours[name], ecolor="black",
                 yerr=reach, capsize=2, error_kw={"elinewidth": 0.9}, label=labels[name])
    axis.set_xticks(places, kinds)
    axis.grid(axis="x", visible=False)


def draw_failure(values: dict) -> Figure:
    """Success, entropy and groups without spread over the steps of training: a line for each
    run."""
    titles = {"success": "Success in training", "entropy": "Entropy",
              "groups_without_spread": "Groups without spread"}
    labels = {"success": "share of right answers", "entropy": "mean over the tokens",
              "groups_without_spread": "share of the problems"}
    figure, axes = plt.subplots(1, len(titles), figsize=(11.5, 3.6))
    for run, curves in values.items():
        for axis, sign in zip(axes, titles):
            steps = np.arange(1, len(curves[sign]) + 1)
            axis.plot(steps, curves[sign], marker="o", ms=3, label=run,
                      color=BLUE if run == "learns" else ORANGE)
    for axis, sign in zip(axes, titles):
        axis.set(title=titles[sign], xlabel="step", ylabel=labels[sign])
        axis.set_ylim(-0.02, None if sign == "entropy" else 1.02)
    whole_steps(*axes)
    legend_below(figure, axes[0], ncols=len(values))
    return figure


PLAINLY = {"mask 0.1": "knows all tokens that decide", "half known 0.1": "knows half of them",
           "batch 4x": "plain GRPO, four times as many answers"}
PUBLISHED = {  # picture -> how it is drawn, and which table or values of which result it shows
    "docs/answer.png": (lessons.draw_shaded_answer, "group", "tokens"),
    "docs/one-step.png": (lessons.draw_one_step, "group", "answers"),
    "docs/one-answer.png": (lessons.draw_one_answer, "group", "tokens"),
    "docs/push-and-change.png": (lessons.draw_push_and_change, "group", "kinds"),
    "docs/gradient-size.png": (lessons.draw_gradient_size, lessons.gradient_sizes),
    "docs/z-score.png": (lessons.draw_z_scores, lessons.z_scores),
    "docs/clip.png": (lessons.draw_clipped_losses, lessons.clipped_losses),
    "docs/collapse.png": (draw_failure, "failure", "values"),
    "docs/noise.png": (lessons_of_runs.draw_noise, "exact_policies", "advantages"),
    "docs/seeds.png": (lessons_of_runs.draw_seeds, "board", "values"),
    "docs/real-run.png": (lessons_of_runs.draw_real_run, "real_run", "transcript"),
    "docs/weights.png": (lessons_of_runs.draw_weights, lessons_of_runs.weights_by_probability),
    "research/results/decided.png": (draw_decided, "scoreboard_24", "kind"),
    "research/results/exact-real.png": (draw_decided, "exact_real", "kind"),
    "research/results/dial-shares-plain.png": (draw_dial_shares_plainly, "dial", "board"),
    "research/results/real-pairs.png": (lessons_of_runs.draw_real_pairs, "real_board_brief_8_gpu",
                                        "values"),
    "research/results/board-leads.png": (draw_gains, "board", "board"),
    "research/results/notes-curves.png": (draw_curves, "notes_2", "values"),
    "research/results/real-kinds.png": (draw_kinds_of_models, "real", "values"),
    "research/results/change.png": (draw_change, "change_steps", "kinds"),
    "research/results/dial-law.png": (draw_predicted_gains, "dial", "law"),
    "research/results/dial-shares.png": (draw_dial_shares, "dial", "board")}
