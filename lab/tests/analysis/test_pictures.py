"""What the pictures show: read from their axes, before they are saved."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from conftest import credit_columns, cut, evaluation, write_lines, write_log
from logs import comparison_of, make

import lab.analysis.program as analyze
from lab.analysis.tally import Tally
from lab.analysis import compare, page, plots
from lab.analysis.run_folders import read_run


@pytest.fixture
def drawn(monkeypatch):
    """name -> figure of what is drawn; nothing is written."""
    figures = {}

    def keep(figure, folder, name, caption):
        figures[name] = figure
        return folder / f"{name}.png", caption

    for module in (analyze, compare):
        monkeypatch.setattr(module, "save", keep)
    yield figures
    for figure in figures.values():
        plots.plt.close(figure)


def labels_of(axis):
    return axis.get_legend_handles_labels()[1]


def test_no_picture_without_content(tmp_path, drawn):
    of_metrics = {"learning_curve"}
    of_gradient = {"gradient_by_kind", "position"}
    line = {"step": 1, "success": 0.5, "entropy": 0.1}
    for name, metrics, more, expected in (
            ("all", [line, {**line, "step": 2}], {"kind": np.arange(40) % 2},
             of_metrics | of_gradient | {"over_training"}),
            ("with change", [line], {"kind": np.arange(40) % 2, "change": np.ones(40)},
             of_gradient | {"change_by_kind"}),
            ("one point is no curve", [line], {"kind": np.arange(40) % 2}, of_gradient),
            ("a task that labels no token", [], {}, {"position"}),
            ("flat", [], {"advantage": np.zeros(40)}, set())):
        columns = credit_columns([40], [0], **more)
        steps = {step + 1: columns for step in range(max(1, len(metrics)))}
        folder = write_log(tmp_path / name, steps, metrics=metrics)
        drawn.clear()
        tally = Tally(folder)
        analyze.draw_run(read_run(folder), tally, tmp_path)
        assert set(drawn) == expected


def test_a_picture_shows_the_shares_that_its_sentence_names(tmp_path, drawn):
    """One word, one quantity, one colour. Two words with p = 1/2 of two, so s^2 = 1/2, and A = 1;
    two numbers with p = 4/5 of two, so s^2 = 0.08, and A = 3. The gradient is 1.414 and 1.697 of
    3.111, the push 1 and 0.48 of 1.48, the change 0.6 and 0.2 of 0.8."""
    columns = credit_columns([4], [0], kind=[0, 0, 2, 2], advantage=[1, -1, 3, 3],
                             log_prob=np.log([0.5, 0.5, 0.8, 0.8]),
                             collision=[0.5, 0.5, 0.68, 0.68], change=[0.3, -0.3, 0.1, 0.1])
    tally = Tally(write_log(tmp_path / "run", {1: columns}))
    analyze.gradient_by_kind(tally, tmp_path)
    analyze.change_by_kind(tally, tmp_path)
    shown = {}
    titles = {name: figure.axes[0].get_title(loc="left") for name, figure in drawn.items()}
    assert titles == {
        "gradient_by_kind": "Number tokens: 50% of all tokens, 55% of the gradient",
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
    expected = {"up": plots.UP, "down": plots.DOWN, "gradient": plots.GRADIENT_COLOUR,
                "unsure": plots.UNSURE, "neutral": plots.GREY}
    in_hex = {name: f"#{bytes(map(int, text.split(','))).hex()}" for name, text in found.items()}
    assert in_hex == expected
    meanings = [*expected.values(), plots.PUSH_COLOUR, plots.CHANGE_COLOUR, plots.CREDIT_COLOUR]
    assert len(set(meanings)) == len(meanings)


def test_seeds_are_thin_lines_behind_the_mean(tmp_path, drawn):
    arms = {"a": (0.5, {}), "b": (0.8, {"mitigation": "pay_$x_and_$y"})}
    compare.learning_curves(comparison_of(make(tmp_path, arms, seeds=3)), tmp_path)
    training = drawn["learning_curves"].axes[1]
    assert [line.get_linewidth() for line in training.lines] == [*[0.6] * 3, 1.8] * 2
    assert labels_of(training) == ["none (3 runs)", "pay_$x_and_$y (3 runs)"]


def test_a_curve_has_the_means_of_five_steps_and_held_out_success_its_interval(tmp_path, drawn):
    """Ten steps: the first point is the mean of steps 1 to 5, at step 3. Three seeds with 0.5, 0.6
    and 0.7 held out: their standard error is 0.1 / sqrt 3, Student's t is 4.303."""
    runs = make(tmp_path, {"a": (0.5, {})}, seeds=3, spread=0)
    for run, success in zip(runs, (0.5, 0.6, 0.7)):
        end = evaluation(10, [1]) | {"success": success}
        write_lines(Path(run) / "evaluations.jsonl", [end])
    compare.learning_curves(comparison_of(runs), tmp_path)
    held_out, training, _ = drawn["learning_curves"].axes
    steps, success = training.lines[-1].get_data()
    assert steps.tolist() == [3, 4, 5, 6, 7, 8]
    assert success[0] == pytest.approx(np.mean([0.05, 0.1, 0.15, 0.2, 0.25]))
    [bar] = held_out.containers[0].lines[2][0].get_segments()
    reach = 4.3027 * 0.1 / 3 ** 0.5
    assert bar[:, 1] == pytest.approx([0.6 - reach, 0.6 + reach], rel=1e-4)


def test_kinds_that_never_have_a_hundredth_have_no_curve(tmp_path, drawn):
    """Operators have 0.005 of the gradient in the first step and 0.05 in the second one, brackets
    0.0025 in both."""
    steps = {step: credit_columns([4], [0], kind=[0, 2, 3, 4], advantage=advantage)
             for step, advantage in ((1, [120, 79, 1, 0.5]), (2, [120, 70, 10, 0.5]))}
    analyze.over_training(Tally(write_log(tmp_path / "run", steps)), tmp_path)
    assert labels_of(drawn["over_training"].axes[0]) == ["word", "number", "operator"]


def test_an_arm_without_a_finished_step_has_no_curve(tmp_path, drawn):
    runs = make(tmp_path, {"a": (0.5, {}), "b": (0.8, {"mitigation": "random"})}, seeds=1)
    for name in ("metrics.jsonl", "credit/step_000001.npz"):
        (tmp_path / "b-s0" / name).unlink()
    cut(tmp_path / "b-s0/evaluations.jsonl", 2)
    compare.learning_curves(comparison_of(runs), tmp_path)
    assert labels_of(drawn["learning_curves"].axes[1]) == ["none (1 run)"]
