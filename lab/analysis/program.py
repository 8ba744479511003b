"""Tables, pictures and the page of a run, on which its answers can be clicked through token by
token; of several runs their arms, compared.

    python -m lab page runs/none-grpo-s0    # one run: where its gradient went
    python -m lab page runs/*               # several runs: their arms, compared

It needs no model. analyze.py at the root is the short form of it: the same sums, in one file.

The findings are printed. Pictures and the page report.html are written into --output_dir. An arm is
a set of runs with the same settings and different seeds. Arms are compared by pairs of runs that
have the same seed.

A is the advantage of a token, w its weight, p its probability, and s = norm(onehot - p) the size of
the gradient of its log-prob at the logits. The gradient's size at the logits is abs(A) w s.
"""
# The order of this file:
#
# 1. Read the run: settings, metrics, evaluations (lab/analysis/run_folders.py).
# 2. Go through its credit files once: sum up the numbers of their tokens
#    (lab/analysis/tally.py), and choose answers that the page shows token by token
#    (lab/analysis/answers.py).
# 3. Make the tables and pictures, in the order in which the page shows them.
# 4. Write the page (lab/analysis/report.py).
#
# Several runs are compared in lab/analysis/compare.py.
#
# Five words of this file: a *partition* puts each token of a run into one *cell*, for example by
# its kind, of which there are seven. A *block* is a part of the training, which is cut into at most
# 50 blocks of steps. A *tally* has sums over the tokens of each cell in each block. A *finding* is
# the sentence that says what a table shows. A *chapter* is a part of the page: several tables.
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from lab.analysis import report
from lab.analysis.answers import ShownAnswer, Viewer
from lab.analysis.page import Picture, make_output_folder, write_page
from lab.analysis.plots import (CHANGE_COLOUR, COLOURS, CREDIT_COLOUR, GRADIENT_COLOUR, GREY,
                            PUSH_COLOUR, TOKENS_COLOUR, Style, legend_below, save, whole_steps)
from lab.analysis.run_folders import Run, evaluations, read_runs, task_of
from lab.analysis.shares import shares
from lab.analysis.statistics import mean_over, paired_difference
from lab.analysis.tables import (TOO_FEW_GROUPS, WITH_INTERVAL, Columns, Row, Table, by_row,
                             without_format)
from lab.analysis.tally import (OVER_REST, PARTITIONS, RARE, Tally, early_over_late, over_rest,
                            rest_columns)
from lab.gradient_noise import in_words, noise_share
from lab.harness.read_record import read_columns, sampling_models
from lab.harness.record import PART, Json
from lab.harness.screen import python_command, show_status
from lab.engine.tokens import KINDS

if TYPE_CHECKING:
    from lab.analysis.arms import Comparison

# parts of the reward that a task may lack: then they are 0 for every answer
WITHOUT = (f"{PART}format", f"{PART}reasoning")
FINDINGS = (  # the tables whose findings are printed, and shown beside a picture on the page
    "gradient by kind", "change by kind", "gradient by section", "gradient by position")
IN_SHORT = ("gradient by kind", "gains")  # the tables that are printed
ABOUT_FACTORS = (
    "Mean abs(A) shows how large the advantages of these tokens are, and mean s how uncertain the "
    "model was. The share of the squares is a share of the sum of (A w s)^2, on which the variance "
    "of the gradient depends")
HEADINGS = {  # for the short name of a column its heading in a table
    "abs(A) w s": "mean abs(A) w s", "abs(A)": "mean abs(A)", "s": "mean s",
    "over rest": f"mean size relative to all other tokens{WITH_INTERVAL}",
    "difference": "more or less gradient"}
MODES_IN_WORDS = {"sampled": "sampled", "greedy": "greedy (likeliest token)"}
CURVES: dict[str, Style] = {  # for each mode of evaluation how its line is drawn
    "sampled": {"color": "black", "ls": "-"}, "greedy": {"color": "black", "ls": "--"}}


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = report.read_analysis_flags(argv, __doc__)
    runs = read_runs(flags.run)
    first_folder = runs[0]["folder"]
    if len(runs) == 1:
        analyze_run(runs[0], Path(flags.output_dir or first_folder / "analysis"), flags.all)
    else:
        folder = Path(flags.output_dir or first_folder.parent / "comparison")
        compare_runs(runs, folder, flags.baseline, flags.all)


def analyze_run(run: Run, folder: Path, with_all: bool) -> None:
    """Write the tables, pictures and page of one run into the folder, and print the main ones."""
    tally: Tally | None = None
    answers: list[ShownAnswer] = []
    if run["steps"]:
        viewer = Viewer(run)
        tally = Tally(run["folder"], viewer.look)  # reads each credit file once, for both
        answers = viewer.answers()
    chapters = run_chapters(run, tally)
    make_output_folder(folder)  # now it is known that there is something to write
    show_status("pictures and page")
    pictures = draw_run(run, tally, folder)
    by_name = {}
    for tables in chapters.values():
        for table in tables:
            by_name[table.name] = table
    findings = findings_of(by_name)
    description = report.describe(run, tally)
    sentences = [f"{report.task_in_words(run['config'])}.", description, *report.opening(run)]
    noise, length = ([line.get(name) for line in run["metrics"]]
                     for name in ("gradient_noise", "gradient_norm"))
    if any(noise):
        squares = [None if value is None else value ** 2 for value in noise]
        sentences.append(in_words(noise_share(squares, length)))
    page = report.run_page(sentences, findings, chapters, pictures)
    write_page(folder / "report.html", report.title_of(run), page, answers, shown_evaluations(run))
    first = [by_name[name] for name in IN_SHORT if name in by_name]
    legend = report.SHORT_LEGEND if tally and not with_all else []
    texts = [*sentences, *legend, *findings.values()]
    report.print_report(texts, first, chapters, folder, with_all)
    say_what_went_wrong(run["folder"])
    if tally:
        print("To follow one token through a step: "
              f"{python_command('-m', 'lab', 'follow', run['folder'])}")
        say_how_to_measure(run)


def say_what_went_wrong(folder: Path) -> None:
    """Print in a line which mistakes of docs/how_a_run_fails.md the run's metrics show."""
    from lab.tools.helpers.diagnosis import in_short
    from lab.tools.helpers.log import read_log
    if (folder / "metrics.jsonl").is_file() and (verdict := in_short(read_log(folder))):
        print(f"{verdict} The numbers: {python_command('-m', 'lab', 'diagnose', folder)}")


def say_how_to_measure(run: Run) -> None:
    """Name the command that measures the credit of an answer, if a model was kept for that, and the
    task is there that scores what it writes."""
    models = sampling_models(run["folder"], str(run["config"].get("model", "")))
    if models and task_of(run["config"]) and run["config"].get("loss") != "dpo":
        if "own" in read_columns(Path(run["folder"]), min(models)):
            return  # an environment has replied: credit is measured in answers of one turn alone
        command = python_command("-m", "lab", "follow", run["folder"], "--step", min(models),
                                 "--answer", 0, "--credit", report.CONTINUATIONS, "--keep")
        print(f"To measure what each token of an answer earned, for the page: {command}")


def findings_of(tables: dict[str, Table]) -> dict[str, str]:
    """The findings of the tables that FINDINGS names. If there are too few groups for any of them,
    it is the first alone, which says so."""
    found = {name: tables[name].finding for name in FINDINGS if name in tables}
    definite = {name: text for name, text in found.items() if text != TOO_FEW_GROUPS}
    return definite or dict(list(found.items())[:1])


def shown_evaluations(run: Run) -> list[Json]:
    """The evaluations that kept their answers to a few held-out problems."""
    found = []
    for line in report.main_evaluations(run):
        if line["shown"]:
            found.append({name: line[name] for name in ("step", "mode", "success", "shown")})
    return found


def run_chapters(run: Run, tally: Tally | None) -> dict[str, list[Table]]:
    """The tables of a run, by the title of their chapter."""
    of_training: list[Table] = []
    of_gradient: list[Table] = []
    if any(len(evaluations(run, mode)) > 1 for mode in CURVES):
        of_training.append(held_out_gains(run))
    if tally is None:
        return {report.TRAINING: of_training}
    of_training += [growth(run, tally), rewards(tally)]
    for name in ("kind", "section"):
        if tally.has_cells(name):
            of_gradient.append(gradient_table(tally, name))
    if tally.has_change:
        from lab.analysis.change import change_table
        for name in ("kind", "section", "position"):
            if name == "position" or tally.has_cells(name):
                of_gradient.append(change_table(tally, name))
    of_gradient += [position_gradients(tally), forks(tally)]
    return {report.TRAINING: of_training, report.GRADIENT: of_gradient}


def draw_run(run: Run, tally: Tally | None, folder: Path) -> list[Picture]:
    lengths = [len(evaluations(run, mode)) for mode in CURVES]  # of the curves of the evaluations
    points = max(len(run["metrics"]), *lengths)
    pictures = [learning_curve(run, folder)] if points > 1 else []
    if tally and tally.total("all", "abs gradient").sum() > 0:
        if tally.has_cells("kind"):
            pictures.append(gradient_by_kind(tally, folder))
            if tally.has_change:
                pictures.append(change_by_kind(tally, folder))
            if len(tally.blocks) > 1:
                pictures.append(over_training(tally, folder))
        pictures.append(position_bars(tally, folder))
    return pictures


def held_out_gains(run: Run) -> Table:
    """The table of held-out success at the start and at the end, paired by problem."""
    rows: list[Row] = []
    for mode in CURVES:
        lines = evaluations(run, mode)
        if len(lines) < 2:
            continue
        start, end = lines[0], lines[-1]
        change = np.array(end["answer"], float) - np.array(start["answer"], float)
        gain = paired_difference(change)
        rows.append([MODES_IN_WORDS[mode], len(end["answer"]), start["success"], end["success"],
                     gain, end["format_mean"], end["finished_mean"], end["length_mean"]])
    formats = {"mode": "", "problems": ",d", "start": ".1%", "end": ".1%", "gain": "+.1%",
               "format": ".2f", "finished": ".1%", "length": ".0f"}
    columns = without_format(by_row(formats, rows))
    of_format = "the mean score of the format, " if "format" in columns else ""
    return Table("gains", "Held-out success, from the first evaluation to the last", columns, "",
                 ["A sampled answer draws each token from the model's distribution, and a greedy "
                  "one takes the likeliest token at every place. Start and end are the share of "
                  "right answers. The gain is the difference, paired by problem, because the "
                  f"problems are the same at the start and at the end. The columns after it are "
                  f"of the end: {of_format}the share of answers that finished before the limit, "
                  "and their mean length"],
                 {"mode": "answers", "gain": f"gain{WITH_INTERVAL}",
                  "length": "tokens in an answer"})


def learning_curve(run: Run, folder: Path) -> Picture:
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    known = [(line["step"], line["success"]) for line in run["metrics"]
             if line["success"] is not None]
    if known:
        axis.plot(*zip(*known), color=GREY, lw=1.0, label="in training")
    for mode, style in CURVES.items():
        if lines := evaluations(run, mode):
            success = np.array([line["success"] for line in lines])
            bounds = np.array([[line["success_low"], line["success_high"]] for line in lines])
            axis.errorbar([line["step"] for line in lines], success, np.abs(bounds.T - success),
                          **style, marker="o", ms=3, lw=1.4, capsize=2, label=f"held-out, {mode}")
    axis.set(xlabel="step", ylabel="share of answers that are right", ylim=(0, 1.03),
             title="Success while training")
    whole_steps(axis)
    legend_below(figure, axis, ncols=3)
    path, caption = save(figure, folder, "learning_curve",
                         "Share of answers that solve their problem, in training and on held-out "
                         "problems (with 95% intervals). Greedy answers take the likeliest token "
                         "at every place")
    # The page has a slider for the step, and a mark in this picture moves with it. Its style says,
    # in percent of the picture, where the mark stands at step 0 and how far it moves for a step.
    box, (low, high) = axis.get_position(), axis.get_xlim()
    per_step = 100 * box.width / (high - low)
    at_zero = 100 * box.x0 - low * per_step
    mark = (f"--zero:{at_zero:.2f}%;--step:{per_step:.4f}%;"
            f"top:{100 - 100 * box.y1:.2f}%;height:{100 * box.height:.2f}%")
    return path, caption, mark


def rewards(tally: Tally) -> Table:
    """The mean over all answers of the reward and of each of its parts. The parts have the names
    that the task gave them. A task may have no score for the format or the reasoning, and then it
    has no row."""
    rows = [(name.removeprefix(PART), total / tally.answers.sum())
            for name, total in tally.rewards.items() if total or name not in WITHOUT]
    return Table("rewards", "Mean reward of all answers, and of each of its parts",
                 by_row({"part": "", "mean": ".3f"}, rows))


def growth(run: Run, tally: Tally) -> Table:
    """The table of how the run's averages developed. Training is cut into at most ten parts, each
    of one or more blocks, and each part has a row."""
    by_step = {line["step"]: line for line in run["metrics"]}
    rows: list[Row] = []
    number_of_blocks = len(tally.blocks)
    for blocks in np.array_split(np.arange(number_of_blocks), min(10, number_of_blocks)):
        steps = np.concatenate([tally.blocks[block] for block in blocks])
        lines = [by_step[step] for step in steps if step in by_step]
        name = f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        means = {}
        for metric in ("success", "finished", "gradient_norm"):
            means[metric] = mean_over([line[metric] for line in lines]).value
        answers = tally.answers[blocks].sum()
        length = tally.total("all", "tokens", blocks)[0] / answers
        without_spread = tally.answers_without_spread[blocks].sum() / answers
        rows.append([name, means["success"], means["finished"], length,
                     tally.mean("all", "entropy", blocks)[0], means["gradient_norm"],
                     without_spread, tally.mean("all", "abs gradient", blocks)[0]])
    formats = {"steps": "", "success": ".1%", "finished": ".1%", "length": ".1f",
               "entropy": ".3f", "norm": ".3f", "flat": ".0%", "abs(A) w s": ".4f"}
    return Table("growth", "How the averages changed over training", by_row(formats, rows), "",
                 ["Finished: the share of answers that ended before the limit. Entropy: the mean "
                  "over the tokens, in nats, of the distribution that each was drawn from. "
                  "Gradient norm: that of the whole model, before clipping. In a group with equal "
                  "rewards all advantages are 0, so nothing is learned from it"],
                 {"success": "success in training batches", "length": "tokens in an answer",
                  "entropy": "mean entropy", "norm": "gradient norm",
                  "flat": "answers in groups with equal rewards",
                  "abs(A) w s": "mean abs(A) w s"})


def forks(tally: Tally) -> Table:
    """The table of the ten items of the vocabulary at which the model was least certain what to
    write, and of the ten at which it was most certain."""
    count = tally.kinds_of_id.sum(1)
    common = np.flatnonzero(count >= max(10, 0.0005 * tally.tokens))
    means = {name: total[common] / count[common] for name, total in tally.of_id.items()}
    order = np.argsort(-means["entropy"])
    chosen = np.concatenate([order[:10], order[::-1][:10]])
    ids, half = common[chosen], len(chosen) // 2
    texts = [tally.tokenizer.decode([i], skip_special_tokens=False) for i in ids.tolist()]
    kinds = [KINDS[k] for k in tally.kinds_of_id[ids].argmax(1)]  # the most frequent of each
    columns: Columns = {
        "": ("", ["forking"] * half + ["following"] * half),
        "token": ("", list(map(repr, texts))),
        "kind": ("", kinds),
        "count": (",.0f", count[ids]),
        "entropy": (".3f", means["entropy"][chosen]),
        "log p": (".3f", means["log_prob"][chosen]),
        "abs(A) w s": (".4f", means["abs gradient"][chosen])}
    return Table("forks",
                 "Where the model was least certain what to write (forking), and most certain "
                 "(following)",
                 columns, "",
                 ["A row is an item of the vocabulary that occurs at least ten times and makes up "
                  "at least 0.05% of the run's tokens. Entropy (in nats) and log p are those of "
                  "the distributions that it was drawn from"],
                 {"entropy": "mean entropy", "log p": "mean log p",
                  "abs(A) w s": "mean abs(A) w s"})


def over_training(tally: Tally, folder: Path) -> Picture:
    figure, axis = plt.subplots()
    of_blocks = shares(tally.by_block("kind", "abs gradient"))  # (blocks, kinds)
    steps = [block.mean() for block in tally.blocks]
    for kind in np.argsort(-of_blocks.mean(0)):
        if of_blocks[:, kind].max() >= 0.01:
            axis.plot(steps, of_blocks[:, kind], color=COLOURS[kind], lw=1.4, label=KINDS[kind])
    axis.set(xlabel="step", ylabel="share of the gradient", ylim=(0, None),
             title=f"The largest share goes to {KINDS[of_blocks.mean(0).argmax()]} tokens")
    whole_steps(axis)
    legend_below(figure, axis, ncols=len(KINDS))
    return save(figure, folder, "over_training",
                "Share of the gradient that each kind of token got over training. Kinds that never "
                "got 1% are left out")


def gradient_table(tally: Tally, partition: str) -> Table:
    """The shares of the gradient, by kind of token or by section. The last columns compare the mean
    gradient of a row's tokens with that of all other tokens."""
    tokens, share = tally.count(partition), tally.shares(partition)
    used = np.flatnonzero(tokens)  # those that occur in this run
    names = [PARTITIONS[partition][i] for i in used]
    columns: Columns = {
        partition: ("", names),
        "tokens": (".1%", tokens[used] / tally.tokens),
        "gradient": (".1%", share[used]),
        "squares": (".1%", tally.shares(partition, "squared gradient")[used]),
        "abs(A)": (".3f", tally.mean(partition, "abs advantage")[used]),
        "s": (".3f", tally.mean(partition, "s")[used]),
        **rest_columns(tally, partition, used)}
    title = "kind of token" if partition == "kind" else partition
    return Table(f"gradient by {partition}", f"Where the gradient went, by {title}", columns,
                 most_of_the_gradient(tally, partition), [OVER_REST, ABOUT_FACTORS],
                 {**HEADINGS, "tokens": "share of the tokens",
                  "gradient": "share of the gradient", "squares": "share of the squares"})


def most_of_the_gradient(tally: Tally, partition: str) -> str:
    """A sentence about the kind or section whose share is the largest."""
    share = tally.shares(partition)
    most = int(share.argmax())
    if not share[most]:
        return TOO_FEW_GROUPS
    part = tally.share(partition, most)
    of_tokens = tally.count(partition)[most] / tally.tokens
    name = PARTITIONS[partition][most]
    beginning = f"The {name} section has"
    if partition == "kind":
        beginning = f"{name.capitalize()} tokens are"
    return (f"{beginning} {of_tokens:.1%} of all tokens and got the largest share of the gradient: "
            f"{part.value:.1%} of the sum of abs(A) w s (95% interval {part.low:.1%} to "
            f"{part.high:.1%}).")


def gradient_by_kind(tally: Tally, folder: Path) -> Picture:
    tokens, gradient = tally.count("kind") / tally.tokens, tally.shares("kind")
    most = int(gradient.argmax())
    figure = bars_by_kind(
        tally, {"share of the tokens": (tokens, TOKENS_COLOUR),
                "share of the gradient": (gradient, GRADIENT_COLOUR)},
        f"{KINDS[most].capitalize()} tokens: {tokens[most]:.0%} of all tokens, "
        f"{gradient[most]:.0%} of the gradient")
    return save(figure, folder, "gradient_by_kind",
                "Each kind of token: its share of all tokens, and its share of the gradient (of "
                f"the sum of abs(A) w s). Kinds below {RARE:.1%} of the tokens are left out")


def change_by_kind(tally: Tally, folder: Path) -> Picture:
    """Shares in the steps in which the change was measured."""
    from lab.analysis.change import CREDIT, SIZES, known
    count = tally.total("kind", "measured")
    push, change = (tally.shares("kind", SIZES[name]) for name in ("push", "change"))
    bars = {"share of the tokens": (shares(count), TOKENS_COLOUR),
            "share of the push": (push, PUSH_COLOUR),
            "share of the change": (change, CHANGE_COLOUR)}
    meaning = "of the push (the sum of abs(A) w s^2) and of the change (the sum of its sizes)"
    if CREDIT in known(tally):  # the credit of the tokens was measured
        bars["share it decides"] = tally.shares("kind", SIZES[CREDIT]), CREDIT_COLOUR
        meaning += ", and the share of the reward that it decides (of the sum of squared credits)"
    most = int((push - change).argmax())
    figure = bars_by_kind(
        tally, bars, f"{KINDS[most].capitalize()} tokens: {push[most]:.0%} of the push, "
                     f"{change[most]:.0%} of the change")
    return save(figure, folder, "change_by_kind",
                "Each kind of token, in the steps in which the change was measured: its share of "
                f"the tokens, {meaning}. Kinds below {RARE:.1%} of the tokens are left out")


def bars_by_kind(tally: Tally, bars: dict[str, tuple[np.ndarray, str]], title: str) -> Figure:
    """Draw bars side by side for each kind of token, one for each label. `bars` has for each label
    the share of every kind, and a colour."""
    used = np.flatnonzero(tally.is_common("kind"))
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    width = 0.84 / len(bars)
    for number, (label, (values, colour)) in enumerate(bars.items()):
        shift = (number - (len(bars) - 1) / 2) * width
        drawn = axis.bar(np.arange(len(used)) + shift, values[used], 0.95 * width, color=colour,
                         label=label)
        axis.bar_label(drawn, [f"{value:.0%}" for value in values[used]], padding=1,
                       fontsize=8.5 if len(bars) < 3 else 7)
    axis.set(xticks=range(len(used)), xticklabels=[KINDS[k] for k in used],
             ylabel="share of the sum over all kinds", title=title)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)
    legend_below(figure, axis, ncols=2)
    return figure


def position_gradients(tally: Tally) -> Table:
    early = early_over_late(tally)
    columns: Columns = {
        "bin": ("", list(PARTITIONS["position"])),
        "entropy": (".3f", tally.mean("position", "entropy")),
        "s": (".3f", tally.mean("position", "s")),
        "abs(A) w s": (".4f", tally.mean("position", "abs gradient")),
        **rest_columns(tally, "position", range(10))}
    return Table("gradient by position", "The gradient by position in the answer", columns,
                 f"The first fifth of an answer gets {early.value:.2f} times the gradient of the "
                 f"last fifth (95% interval {early.low:.2f} to {early.high:.2f}).",
                 [OVER_REST, "A token belongs to the part of the answer in which its middle lies: "
                  "token t of an answer, counted from 0, lies at (t + 1/2) / length"],
                 {**HEADINGS, "bin": "part of the answer", "entropy": "mean entropy"})


def position_bars(tally: Tally, folder: Path) -> Picture:
    figure, axis = plt.subplots()
    found = over_rest(tally, "position", range(10))
    ratio, low, high = np.array([(one.value, one.low, one.high) for one in found]).T
    axis.bar(range(1, 11), ratio, 0.85, yerr=[ratio - low, high - ratio], color=GRADIENT_COLOUR,
             error_kw={"lw": 0.8, "capsize": 2})
    axis.axhline(1, color=GREY, lw=0.8)
    axis.set(xlabel="tenth of the answer", ylabel="mean abs(A) w s / that of all other tokens",
             xticks=range(1, 11), title="The gradient by position")
    return save(figure, folder, "position",
                "Mean abs(A) w s in each tenth of the answer, divided by that of all other tokens. "
                "The lines are the 95% intervals of the table")


def compare_runs(runs: list[Run], folder: Path, baseline: str | None, with_all: bool) -> None:
    """Compare the arms in each set of runs that can be compared, beginning with the largest set.
    Each set has a page of its own."""
    from lab.analysis.arms import Comparison, comparable, finished
    sets, left_out = comparable(finished(runs))
    for number, chosen in enumerate(sets, 1):
        if number == 1:
            comparison = Comparison(chosen, baseline)
            compare_set(comparison, folder, left_out, with_all)
        else:
            compare_set(Comparison(chosen, None), folder / f"set_{number}", [], with_all)


def compare_set(comparison: "Comparison", folder: Path, left_out: list[str],
                with_all: bool) -> None:
    from lab.analysis.compare import chapters_of, learning_curves
    chapters = chapters_of(comparison)
    make_output_folder(folder)
    pictures = [learning_curves(comparison, folder)]
    # twins: a sentence for each run that is left out because another has its settings and seed
    intro = [report.describe_comparison(comparison.runs), *comparison.twins, *left_out,
             *report.changes_of_all(comparison.runs)]
    page = report.comparison_page(intro, chapters, pictures)
    write_page(folder / "report.html", "Runs compared", page)
    first = next(iter(chapters.values()))
    report.print_report(intro, first, chapters, folder, with_all)
