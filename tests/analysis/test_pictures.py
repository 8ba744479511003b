"""What the pictures show: read from their axes, before they are saved."""

import numpy as np
import pytest
from conftest import credit_columns, cut, evaluation, write_log
from logs import comparison_of, make, tallied

import analyze
from analysis import compare, plots
from analysis.runs import read_run
from engine.errors import UserError


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


def test_the_learning_curve_has_what_was_finished(tmp_path, drawn):
    evaluations = [evaluation(0, [0, 1]), evaluation(9, [1, 1])]
    metrics = [{"step": i, "success": 0.5, "finished": 0.75} for i in range(1, 10)]
    run = {"config": {"steps": 30}, "evaluations": evaluations, "metrics": metrics}
    analyze.learning_curve(run, tmp_path)
    [axis] = drawn["learning_curve"].axes
    assert labels_of(axis) == ["not cut off, in training", "solved, in training",
                               "solved, held-out, sampled"]
    assert list(axis.lines[0].get_ydata()) == [0.75] * 9 and axis.get_ylim()[1] > 1


def test_no_picture_without_content(tmp_path, drawn):
    of_metrics = {"learning_curve"}
    of_gradient = {"credit_by_kind", "over_training", "position"}
    line = {"step": 1, "success": 0.5, "entropy": 0.1}
    for name, metrics, more, expected in (
            ("all", [line], {}, of_metrics | of_gradient),
            ("flat", [], {"advantage": np.zeros(40)}, set())):
        columns = credit_columns([40], [0], **more)
        folder = write_log(tmp_path / name, {1: columns}, metrics=metrics)
        drawn.clear()
        tally = tallied(folder)
        analyze.draw_run(read_run(folder), tally, tmp_path)
        assert set(drawn) == expected


@pytest.mark.parametrize("seeds", (1, 3))
def test_seeds_are_thin_lines_behind_the_mean_and_the_caption_says_so(tmp_path, drawn, seeds):
    """And the picture shows what its values span."""
    arms = {"a": (0.5, {}), "b": (0.8, {"mitigation": "pay_$x_and_$y"})}
    _, caption = compare.learning_curves(comparison_of(make(tmp_path, arms, seeds)), tmp_path)
    held_out, training, _ = drawn["learning_curves"].axes
    thin = [0.6] * seeds * (seeds > 1)
    assert [line.get_linewidth() for line in training.lines] == [*thin, 1.8] * 2
    runs = f"({seeds} run{'s' * (seeds > 1)})"
    assert labels_of(training) == [f"none {runs}", f"pay_$x_and_$y {runs}"]
    low, high = held_out.get_ylim()
    assert 0.2 < low < high < 1
    assert ("interval" in caption and "thin" in caption) == (seeds > 1)


def test_an_arm_without_a_finished_step_has_no_curve(tmp_path, drawn):
    runs = make(tmp_path, {"a": (0.5, {}), "b": (0.8, {"mitigation": "random"})}, seeds=1)
    for name in ("metrics.jsonl", "credit/step_000001.npz"):
        (tmp_path / "b-s0" / name).unlink()
    cut(tmp_path / "b-s0/evaluations.jsonl", 2)
    compare.learning_curves(comparison_of(runs), tmp_path)
    assert labels_of(drawn["learning_curves"].axes[1]) == ["none (1 run)"]


def test_a_picture_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    figure, _ = plots.plt.subplots()
    plots.save(figure, tmp_path, "a", "")
    before = (tmp_path / "a.png").read_bytes()
    figure, _ = plots.plt.subplots()

    def full_disk(path, **_):
        path.write_bytes(before[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full_disk)
    with pytest.raises(UserError, match="a.png: No space left"):
        plots.save(figure, tmp_path, "a", "")
    assert (tmp_path / "a.png").read_bytes() == before
