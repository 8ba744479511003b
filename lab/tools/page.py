"""The page of a run, on which its answers can be clicked through token by token.

    python -m lab page runs/none-grpo-s0

It needs no model. Its tables are those that `python analyze.py RUN` prints, and of Countdown one
more: where the success comes from. page.html and the learning curve are written into --output_dir.
"""
import textwrap
from pathlib import Path

import analyze
import lab.analysis.plots  # noqa: F401  how the curve is drawn, and a sentence where it cannot be
from analyze import Table, Tally
from lab.analysis import report
from lab.analysis.answers import answers_of
from lab.analysis.html_page import (figure_of, folded, paragraphs, section_of, viewer,
                                    write_page)
from lab.analysis.run_folders import Run, existing
from lab.analysis.successes import successes
from lab.harness.flags import Flag, read
from lab.harness.record import Json
from lab.harness.screen import python_command, say, show_status

LEGEND = (
    "A is the advantage of a token, w its weight, p its probability, and s = norm(onehot - p) the "
    "size of the gradient of log p at the logits. The gradient's size at the logits is abs(A) w s. "
    "A share of the gradient is a share of the sum of these sizes, so the directions of gradients "
    "do not count. The push of a token, A w s^2, is what its own term of the loss would do to its "
    "log-prob, if nothing else moved it. Its change is the log-prob after the step minus before, "
    "at the same prefix.")
FLAGS = {"output_dir": Flag(None, "folder for page.html and its curve. By default it is "
                            "analysis/ in the run")}


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = read(argv, "python -m lab page [RUN] [flags]", __doc__, FLAGS,
                 {"[RUN]": "a run folder. By default it is the newest in runs/"})
    run = Run(existing(flags.run))
    show_status("sums over the credit files")
    tally = Tally(run) if run.credit else None
    answers = answers_of(run) if run.credit else []
    success = successes(run)
    folder = Path(flags.output_dir or run.folder / "analysis")
    folder.mkdir(parents=True, exist_ok=True)  # now there is something to write
    show_status("the page")
    sentences = report.opening(run)
    body = [paragraphs([report.task_in_words(run.config)]), paragraphs(sentences, "lead"),
            paragraphs([report.describe(run)], "note"),
            *body_of(run, tally, success, tables_of(run, tally), folder)]
    write_page(folder / "page.html", report.title_of(run), body, answers, shown_evaluations(run))
    show_status("")
    for sentence in sentences:
        say(textwrap.fill(sentence, 100))
    if success.rows:
        say(f"\n{success.as_text()}")
    if tally:
        say("To follow one token through a step: "
            f"{python_command('-m', 'lab', 'follow', run.folder)}")
    say(f"The page is {folder / 'page.html'}.")


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
    return tables


def body_of(run: Run, tally: Tally | None, success: Table, tables: list[Table],
            folder: Path) -> list[str]:
    """The body of the page: the run step by step, where its success comes from, and below it,
    folded, the tables."""
    curve = ""
    if max(len(run.metrics), len(run.evaluated())) > 1:
        what = ("Share of answers that solve their problem" if run.measure == "success"
                else "Mean reward")
        curve = figure_of(analyze.learning_curve(run, folder / "learning_curve.png"),
                          f"{what}, in training and on held-out problems (with 95% intervals)")
    sections = [section_of(table) for table in tables]
    legend = paragraphs([LEGEND] if tally else [], "note")
    tables_below = [folded("The tables of this run", [legend, *sections])] if tables else []
    return [viewer(curve), *([section_of(success)] if success.rows else []), *tables_below]
