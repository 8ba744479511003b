"""What the pictures show: read from their axes, before they are saved."""

import numpy as np
import pytest
from conftest import credit_columns, cut, write_log
from logs import comparison_of, make

import analyze
from analysis.tally import Tally
from analysis import compare, plots
from analysis.runs import read_run


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
    of_gradient = {"credit_by_kind", "position"}
    line = {"step": 1, "success": 0.5, "entropy": 0.1}
    for name, metrics, more, expected in (
            ("all", [line, {**line, "step": 2}], {"kind": np.arange(40) % 2},
             of_metrics | of_gradient | {"over_training"}),
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


def test_seeds_are_thin_lines_behind_the_mean(tmp_path, drawn):
    arms = {"a": (0.5, {}), "b": (0.8, {"mitigation": "pay_$x_and_$y"})}
    compare.learning_curves(comparison_of(make(tmp_path, arms, seeds=3)), tmp_path)
    training = drawn["learning_curves"].axes[1]
    assert [line.get_linewidth() for line in training.lines] == [*[0.6] * 3, 1.8] * 2
    assert labels_of(training) == ["none (3 runs)", "pay_$x_and_$y (3 runs)"]


def test_an_arm_without_a_finished_step_has_no_curve(tmp_path, drawn):
    runs = make(tmp_path, {"a": (0.5, {}), "b": (0.8, {"mitigation": "random"})}, seeds=1)
    for name in ("metrics.jsonl", "credit/step_000001.npz"):
        (tmp_path / "b-s0" / name).unlink()
    cut(tmp_path / "b-s0/evaluations.jsonl", 2)
    compare.learning_curves(comparison_of(runs), tmp_path)
    assert labels_of(drawn["learning_curves"].axes[1]) == ["none (1 run)"]
