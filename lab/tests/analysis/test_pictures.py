"""What the pictures show: read from their axes, before they are saved."""

import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from conftest import credit_columns, write_log

import analyze as book
import lab.tools.page as analyze
from lab.analysis import plots
from lab.analysis import html_page as page
from lab.analysis.run_folders import Run


@pytest.fixture
def drawn(monkeypatch):
    """name -> figure of what is drawn; nothing is written."""
    figures = {}

    def keep(figure, folder, name, caption):
        figures[name] = figure
        return folder / f"{name}.png", caption

    monkeypatch.setattr(analyze, "save", keep)
    yield figures
    for figure in figures.values():
        plots.plt.close(figure)


def tally_of(folder):
    return book.Tally(book.Run(folder))


def labels_of(axis):
    return axis.get_legend_handles_labels()[1]


def test_no_picture_without_content(tmp_path, drawn):
    of_metrics = {"learning_curve"}
    of_gradient = {"gradient_by_kind"}
    line = {"step": 1, "success": 0.5, "entropy": 0.1}
    for name, metrics, more, expected in (
            ("all", [line, {**line, "step": 2}], {"kind": np.arange(40) % 2},
             of_metrics | of_gradient | {"over_training"}),
            ("with change", [line], {"kind": np.arange(40) % 2, "change": np.ones(40)},
             of_gradient | {"change_by_kind"}),
            ("one point is no curve", [line], {"kind": np.arange(40) % 2}, of_gradient),
            ("a task that labels no token", [line], {}, set()),
            ("flat", [line], {"kind": np.arange(40) % 2, "advantage": np.zeros(40)}, set())):
        columns = credit_columns([40], [0], **more)
        steps = {step + 1: columns for step in range(max(1, len(metrics)))}
        folder = write_log(tmp_path / name, steps, metrics=metrics)
        drawn.clear()
        pictures = analyze.draw_run(Run(folder), tally_of(folder), tmp_path)
        assert {path.stem for path, _ in pictures} == expected


def test_a_picture_shows_the_shares_that_its_sentence_names(tmp_path, drawn):
    """One word, one quantity, one colour. Two words with p = 1/2 of two, so s^2 = 1/2, and A = 1;
    two numbers with p = 4/5 of two, so s^2 = 0.08, and A = 3. The gradient is 1.414 and 1.697 of
    3.111, the push 1 and 0.48 of 1.48, the change 0.6 and 0.2 of 0.8."""
    columns = credit_columns([4], [0], kind=[0, 0, 2, 2], advantage=[1, -1, 3, 3],
                             log_prob=np.log([0.5, 0.5, 0.8, 0.8]),
                             collision=[0.5, 0.5, 0.68, 0.68], change=[0.3, -0.3, 0.1, 0.1])
    tally = tally_of(write_log(tmp_path / "run", {1: columns}, metrics=[{"step": 1}]))
    analyze.gradient_by_kind(tally, tmp_path)
    analyze.change_by_kind(tally, tmp_path)
    shown = {}
    titles = {name: figure.axes[0].get_title(loc="left") for name, figure in drawn.items()}
    assert titles == {
        "gradient_by_kind": "Number tokens: 50% of the tokens, 55% of the gradient",
        "change_by_kind": "Number tokens: 32% of the push, 25% of the change"}
    for figure in drawn.values():
        [axis] = figure.axes
        for bars in axis.containers:
            shown[bars.get_label(), to_hex(bars[0].get_facecolor())] = [
                bar.get_height() for bar in bars]
    expected = {("share of the tokens", plots.TOKENS_COLOUR): [0.5, 0.5],
                ("share of the gradient", plots.GRADIENT_COLOUR): [1.414 / 3.111, 1.697 / 3.111],
                ("share of the push", plots.PUSH_COLOUR): [1 / 1.48, 0.48 / 1.48],
                ("share of the change", plots.CHANGE_COLOUR): [0.75, 0.25]}
    assert shown == {key: pytest.approx(values, rel=1e-3) for key, values in expected.items()}


def test_the_page_has_the_colours_of_the_pictures():
    style = page.part("page.css")
    found = dict(re.findall(r"--(\w+): (\d+,\d+,\d+);", style))
    expected = {"up": plots.COLOURS[0], "down": plots.COLOURS[1], "gradient": plots.GRADIENT_COLOUR,
                "unsure": plots.COLOURS[4], "neutral": plots.COLOURS[7]}
    in_hex = {name: f"#{bytes(map(int, text.split(','))).hex()}" for name, text in found.items()}
    assert in_hex == expected
    meanings = [*expected.values(), plots.PUSH_COLOUR, plots.CHANGE_COLOUR]
    assert len(set(meanings)) == len(meanings)


def test_kinds_that_never_have_a_hundredth_have_no_curve(tmp_path, drawn):
    """Operators have 0.005 of the gradient in the first step and 0.05 in the second one, brackets
    0.0025 in both."""
    steps = {step: credit_columns([4], [0], kind=[0, 2, 3, 4], advantage=advantage)
             for step, advantage in ((1, [120, 79, 1, 0.5]), (2, [120, 70, 10, 0.5]))}
    folder = write_log(tmp_path / "run", steps, metrics=[{"step": 1}])
    analyze.over_training(tally_of(folder), tmp_path)
    assert labels_of(drawn["over_training"].axes[0]) == ["word", "number", "operator"]
