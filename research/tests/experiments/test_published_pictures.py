"""The pictures of README and pages: each as its result is today, and what some of them show."""
import re

import numpy as np
import pytest
from conftest import ROOT, credit_columns, write_log
from PIL import Image  # matplotlib brings it

from analysis.plots import COLOURS, panels, plt
from engine.errors import UserError
from research.experiments import pictures, published
from research.experiments.pictures import PUBLISHED, draw, shown_of
from research.experiments.published import fingerprint

COMMAND = "python -m research pictures"


def kept_in(path):
    return Image.open(path).text["Shows"]


@pytest.mark.parametrize("picture", PUBLISHED)
def test_no_picture_is_older_than_what_it_shows(picture):
    _, *sources = PUBLISHED[picture]
    assert kept_in(ROOT / picture) == fingerprint(*map(shown_of, sources)), f"{COMMAND} draws it"


def test_every_picture_of_readme_and_pages_is_drawn_by_the_command_and_no_other_is_kept():
    shown = {(page.parent / path).relative_to(ROOT).as_posix() for page in published.pages()
             for path in re.findall(r"\(([^\s()]+\.png)\)", page.read_text(encoding="utf-8"))}
    kept = {path.relative_to(ROOT).as_posix() for room in ("docs", "research")
            for path in (ROOT / room).rglob("*.png")}
    assert shown == kept == set(PUBLISHED)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    return tmp_path


def runs(*success, **costs):
    return {str(seed): {"steps": [0, 1], "success": ends, "seconds": [0, 10], "rewards": [0, 4],
                        **costs} for seed, ends in enumerate(success)}


def test_a_picture_is_drawn_from_a_result_and_told_from_one_that_has_changed(results):
    values = {"none": runs([0.25, 0.5], [0.25, 0.5])}
    published.write_result(results / "small.json", {"tables": [], "values": values})
    path, _ = draw(pictures.draw_success, results / "a.png", shown_of("small values"))
    assert kept_in(path) == fingerprint(values)
    assert kept_in(path) != fingerprint({"none": runs([0.25, 0.5], [0.25, 0.75])})
    with pytest.raises(UserError, match="small.json has no board, which a picture shows"):
        shown_of("small board")


def test_success_has_no_interval_below_0_and_of_a_single_seed_none():
    """Two seeds end at 0 and 0.25: the mean is 1/8, and its interval 1/8 * 12.7 to either side."""
    figure, caption = pictures.draw_success({"a": runs([0.5, 0], [0.5, 0.25])})
    [segments] = [bar.get_segments() for bar in figure.axes[0].collections]
    assert segments[1][:, 1] == pytest.approx([0, 100]) and "interval" in caption
    assert len(figure.axes[1].lines) == 0  # its tokens are not known
    figure, caption = pictures.draw_success({"a": runs([0.5, 0])})
    assert not figure.axes[0].collections and "interval" not in caption
    plt.close("all")


def test_the_colour_of_an_arm_is_its_verdict():
    rows = [{"arm": arm, "ahead": ahead, "95%": interval, "verdict": verdict}
            for arm, ahead, interval, verdict in (
                ("b", 0.5, [0.25, 0.75], "ahead"), ("none", None, None, ""),
                ("c", -0.5, [-0.75, -0.25], "open"), ("d", -0.5, [None, None], "too few seeds"))]
    figure, _ = pictures.draw_board({"rows": rows})
    drawn = [(line.get_color(), list(line.get_xdata())) for line in figure.axes[0].lines[3:-1]]
    grey = pictures.GREY
    assert drawn == [(grey, [-50]), (grey, [-75, -25]), (grey, [-50]),
                     (pictures.BLUE, [25, 75]), (pictures.BLUE, [50])]
    plt.close(figure)


def test_the_answer_is_the_first_that_solved_its_problem_at_its_second_try():
    def answer(text, solved=1.0, size=0.5):
        return {"answer": solved, "texts": list(text), "values": {"gradient size": [size]}}

    once, twice = "6-2=4,4*2=8", "6-2=4,4*3=12 no,6-3=3,3*4=12"
    assert pictures.is_second_try(answer(twice))
    for other in (answer(once), answer(twice, solved=0.0), answer(twice, size=0.0)):
        assert not pictures.is_second_try(other)


def test_a_run_without_such_an_answer_is_named(results, tmp_path):
    folder = write_log(tmp_path / "run", {1: credit_columns([2], [0])})
    with pytest.raises(UserError, match="run: no answer of its first step solved"):
        pictures.take_answer(folder)


def test_of_many_points_few_have_names_and_no_name_lies_on_a_point():
    figure, axis = panels(1)
    pictures.points_with_names(axis, {"a": (0, 1), "b": (1, 1), "c": (0, 2)}, ["absent", "b"])
    assert axis.get_legend_handles_labels()[1] == ["b", "others"] and not axis.texts
    named, others = axis.lines
    assert (*named.get_data(), named.get_color()) == ([1], [1], COLOURS[1])
    assert list(others.get_xdata()) == [0, 0] and list(others.get_ydata()) == [1, 2]
    plt.close(figure)


def test_the_rule_is_drawn_against_the_lead_at_equal_tokens():
    said = {"rows": [{"arm": "a", "ratio": 2.0}, {"arm": "not trained", "ratio": 1.0}]}
    lead = {"arm": "a", "price": "sampled tokens", "difference": 0.03, "95%": [0.01, 0.05]}
    rows = [lead, {**lead, "price": "scored answers"}, {**lead, "arm": "not asked"}]
    figure, _ = pictures.draw_rule(
        {"rows": [{"arm": "a", "ratio": 1.5}]}, said, {"rows": rows})
    [axis] = figure.axes
    [(points, _, _)] = axis.containers
    assert points.get_xydata().tolist() == [[2.0, 3.0]]
    assert [text.get_text() for text in axis.texts] == ["a"]


def test_quality_is_drawn_as_shares_of_the_true_credits_lead():
    """Of 11 tokens the ranks -1, -0.8, .. 1: three pointed ones share 0.8, six 0.5, five -0.6."""
    assert pictures.planted_index(11, 3, 0) == pytest.approx(0.8)
    assert pictures.planted_index(11, 2, 4) == pytest.approx(2 / 3 * 0.5 - 1 / 3 * 0.6)
    cells = [{"arm": arm, "length": 11, "runs": [{"mean": mean}, {"mean": mean + 0.1}]}
             for arm, mean in (("plain GRPO", 0.3), ("true credit", 0.7), ("3 of 3 (0.1)", 0.5))]
    rows = [{"arm": arm, "index": 0.5} for arm in ("none", "a", "not trained")]
    board = [{"arm": arm, "ahead": lead, "95%": [lead - 0.01, lead + 0.01]}
             for arm, lead in (("a", 0.01), ("measured4", 0.04))]
    one_seed = {"rows": [{"arm": "a", "index": 0.9}]}
    figure, _ = pictures.draw_quality({"cells": cells}, one_seed, {"rows": rows}, {"rows": board})
    planted, interval, place = [line.get_xydata() for line in figure.axes[0].lines[:3]]
    assert planted == pytest.approx(np.array([[0.8, 0.5]]))
    assert interval[:, 1] == pytest.approx([0, 0.5])
    assert place == pytest.approx(np.array([[0.5, 0.25]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["a"]
    plt.close(figure)
