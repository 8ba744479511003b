"""The page of a run, on which its answers can be clicked through token by token.

    python -m lab page runs/none-grpo-s0

It needs no model. Its tables are those that `python analyze.py RUN` prints. page.html and its
pictures are written into --output_dir.
"""
import textwrap
from pathlib import Path

import numpy as np

import analyze
from analyze import Table, Tally
from lab.analysis import report
from lab.analysis.answers import answers_of
from lab.analysis.html_page import (Picture, figure_of, folded, paragraphs, section_of, viewer,
                                    write_page)
from lab.analysis.plots import (CHANGE_COLOUR, COLOURS, GRADIENT_COLOUR, PUSH_COLOUR, TOKENS_COLOUR,
                                Figure, legend_below, plt, save)
from lab.analysis.run_folders import Run, existing, read_columns, read_tokenizer
from lab.engine.tokens import KINDS
from lab.harness.flags import Flag, read
from lab.harness.record import Json
from lab.harness.screen import python_command, say, show_status
from lab.tools.diagnose import in_short
from lab.tools.logs import read_log

RARE = 0.001  # share of the tokens: a kind that is rarer has no bars
LEGEND = (
    "A is the advantage of a token, w its weight, p its probability, and s = norm(onehot - p) the "
    "size of the gradient of log p at the logits. The gradient's size at the logits is abs(A) w s. "
    "A share of the gradient is a share of the sum of these sizes, so the directions of gradients "
    "do not count. The push of a token, A w s^2, is what its own term of the loss would do to its "
    "log-prob, if nothing else moved it. Its change is the log-prob after the step minus before, "
    "at the same prefix.")
FLAGS = {"output_dir": Flag(None, "folder for the pictures and page.html. By default it is "
                            "analysis/ in the run")}


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = read(argv, "python -m lab page [RUN] [flags]", __doc__, FLAGS,
                 {"[RUN]": "a run folder. By default it is the newest in runs/"})
    run = Run(existing(flags.run))
    show_status("sums over the credit files")
    tally = Tally(run) if run.credit else None
    answers = answers_of(run) if run.credit else []
    folder = Path(flags.output_dir or run.folder / "analysis")
    folder.mkdir(parents=True, exist_ok=True)  # now there is something to write
    show_status("pictures and page")
    sentences = report.opening(run)
    body = [paragraphs([report.task_in_words(run.config)]), paragraphs(sentences, "lead"),
            paragraphs([report.describe(run)], "note"),
            *body_of(run, tally, tables_of(run, tally), folder)]
    write_page(folder / "page.html", report.title_of(run), body, answers, shown_evaluations(run))
    show_status("")
    for sentence in sentences:
        say(textwrap.fill(sentence, 100))
    say_what_went_wrong(run.folder)
    if tally:
        say("To follow one token through a step: "
            f"{python_command('-m', 'lab', 'follow', run.folder)}")
    say(f"The page is {folder / 'page.html'}. Its pictures lie beside it.")


def say_what_went_wrong(folder: Path) -> None:
    """Print in a line which mistakes of docs/reference/how_a_run_fails.md the metrics show."""
    if (folder / "metrics.jsonl").is_file() and (verdict := in_short(read_log(folder))):
        say(f"{verdict} The numbers: {python_command('-m', 'lab', 'diagnose', folder)}")


def shown_evaluations(run: Run) -> list[Json]:
    """The evaluations that kept their answers to a few held-out problems."""
    found = []
    for line in report.main_evaluations(run):
        if line["shown"]:
            shown = [one | {"outcome": report.outcome_of(run, one)} for one in line["shown"]]
            mean, *_ = analyze.MEASURES[run.measure]
            said = f"{run.shown(line[mean])} of the held-out problems were solved"
            if run.measure == "reward":
                said = f"the mean reward on held-out problems was {run.shown(line[mean])}"
            found.append({"step": line["step"], "mode": line["mode"], "said": said,
                          "shown": shown})
    return found


def tables_of(run: Run, tally: Tally | None) -> list[Table]:
    """The tables that analyze.py prints of a run, without those of one row: a task need not label
    its tokens, and then all of them are of one kind."""
    tables = [table for table in [analyze.gains(run)] if table.rows]
    if tally:
        tables += [table for name in tally.cells if len((table := tally.table(name)).rows) > 1]
        tables.append(forks(run))
    return tables


def forks(run: Run) -> Table:
    """The ten items of the vocabulary at which the model was least certain what to write, and the
    ten at which it was most certain; of those that make up one token of 2,000."""
    sums: dict[int, list[float]] = {}  # by token id: how often, entropy, size of the gradient
    for step in run.steps:
        tokens = analyze.tokens_of(read_columns(run.folder, step))
        ids, which = np.unique(tokens["token_id"], return_inverse=True)
        columns = [np.bincount(which, tokens[name]) for name in ("one", "entropy", "gradient")]
        for number, *values in zip(ids.tolist(), *columns):
            sums[number] = np.add(sums.get(number, [0.0] * 3), values).tolist()
    fewest = max(10, sum(count for count, *_ in sums.values()) / 2000)
    common = sorted((entropy / count, number, count, gradient / count)
                    for number, (count, entropy, gradient) in sums.items() if count >= fewest)
    tokenizer, rows = read_tokenizer(run.folder), []
    for word, chosen in (("forking", common[::-1][:10]), ("following", common[:10])):
        for entropy, number, count, gradient in chosen:
            text = tokenizer.decode([number], skip_special_tokens=False)
            rows.append([word, repr(text), f"{count:,.0f}", f"{entropy:.3f}", f"{gradient:.4f}"])
    return Table("Where the model was least certain what to write (forking), and most certain "
                 "(following)", ["", "token", "count", "mean entropy", "mean abs(A) w s"], rows)


# ------------------------------------------------------------------- the page and its pictures


def body_of(run: Run, tally: Tally | None, tables: list[Table], folder: Path) -> list[str]:
    """The body of the page: the run step by step, two pictures of where its gradient went and what
    its steps changed, and below them, folded, the tables."""
    figures = {picture[0].stem: figure_of(*picture) for picture in draw_run(run, tally, folder)}
    body = [viewer(figures.pop("learning_curve", ""))]
    over_training = figures.pop("over_training", "")
    if figures:
        sides = "".join(f"<div>{figure}</div>" for figure in figures.values())
        body += ["<h2>Where the gradient went, and what a step changed</h2>",
                 f"<div class=beside>{sides}</div>"]
    if not tables:
        return body
    sections = [section_of(table) for table in tables]
    legend = paragraphs([LEGEND] if tally else [], "note")
    return [*body, folded("The tables behind these pictures", [legend, over_training, *sections])]


def draw_run(run: Run, tally: Tally | None, folder: Path) -> list[Picture]:
    pictures: list[Picture] = []
    if max(len(run.metrics), len(run.evaluated())) > 1:
        path = analyze.learning_curve(run, folder / "learning_curve.png")
        what = ("Share of answers that solve their problem" if run.measure == "success"
                else "Mean reward")
        pictures.append((path, f"{what}, in training and on held-out problems (with 95% "
                         "intervals)"))
    kinds = np.count_nonzero(tally.share("kind", "one")) if tally else 0
    if tally and kinds > 1 and tally.of("kind", "gradient").any():
        pictures.append(gradient_by_kind(tally, folder))
        if tally.of("kind", "measured").any():
            pictures.append(change_by_kind(tally, folder))
        if len(tally.of("kind", "one")) > 1:
            pictures.append(over_training(tally, folder))
    return pictures


def over_training(tally: Tally, folder: Path) -> Picture:
    figure, axis = plt.subplots()
    of_steps = tally.of("kind", "gradient")  # (steps, kinds)
    share = of_steps / np.maximum(of_steps.sum(1, keepdims=True), 1e-300)
    for kind in np.argsort(-share.mean(0)):
        if share[:, kind].max() >= 0.01:
            axis.plot(range(1, 1 + len(share)), share[:, kind], color=COLOURS[kind], lw=1.4,
                      label=KINDS[kind])
    axis.set(xlabel="step", ylabel="share of the gradient", ylim=(0, None),
             title=f"The largest share goes to {KINDS[share.mean(0).argmax()]} tokens")
    axis.locator_params(axis="x", integer=True)  # whole steps
    legend_below(figure, axis, ncols=len(KINDS))
    return save(figure, folder, "over_training",
                "Share of the gradient that each kind of token got over training. Kinds that never "
                "got 1% are left out")


def gradient_by_kind(tally: Tally, folder: Path) -> Picture:
    tokens, gradient = tally.share("kind", "one"), tally.share("kind", "gradient")
    figure = bars_by_kind(tally, int(gradient.argmax()), {
        "the tokens": (tokens, TOKENS_COLOUR), "the gradient": (gradient, GRADIENT_COLOUR)})
    return save(figure, folder, "gradient_by_kind",
                "Each kind of token: its share of all tokens, and its share of the gradient (of "
                f"the sum of abs(A) w s). Kinds below {RARE:.1%} of the tokens are left out")


def change_by_kind(tally: Tally, folder: Path) -> Picture:
    """Shares in the steps in which the change was measured."""
    tokens, push, change = (tally.share("kind", name)
                            for name in ("measured", "abs push", "abs change"))
    figure = bars_by_kind(tally, int((push - change).argmax()), {
        "the tokens": (tokens, TOKENS_COLOUR), "the push": (push, PUSH_COLOUR),
        "the change": (change, CHANGE_COLOUR)})
    return save(figure, folder, "change_by_kind",
                "Each kind of token, in the steps in which the change was measured: its share of "
                "the tokens, of the push (the sum of abs(A) w s^2) and of the change (the sum of "
                f"its sizes). Kinds below {RARE:.1%} of the tokens are left out")


def bars_by_kind(tally: Tally, told: int, bars: dict[str, tuple[np.ndarray, str]]) -> Figure:
    """Draw bars side by side for each kind of token, one for each quantity. `bars` has for each of
    them the share of every kind, and a colour. The title has the last two of the kind `told`."""
    used = np.flatnonzero(tally.share("kind", "one") >= RARE)
    figure, axis = plt.subplots(figsize=(5.6, 3.8))
    width = 0.84 / len(bars)
    shares = [f"{values[told]:.0%} of {what}" for what, (values, _) in bars.items()]
    for number, (what, (values, colour)) in enumerate(bars.items()):
        shift = (number - (len(bars) - 1) / 2) * width
        drawn = axis.bar(np.arange(len(used)) + shift, values[used], 0.95 * width, color=colour,
                         label=f"share of {what}")
        axis.bar_label(drawn, [f"{value:.0%}" for value in values[used]], padding=1,
                       fontsize=8.5 if len(bars) < 3 else 7)
    axis.set(xticks=range(len(used)), xticklabels=[KINDS[k] for k in used],
             ylabel="share of the sum over all kinds",
             title=f"{KINDS[told].capitalize()} tokens: {', '.join(shares[-2:])}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.margins(y=0.12)
    axis.grid(axis="x", visible=False)
    legend_below(figure, axis, ncols=2)
    return figure
