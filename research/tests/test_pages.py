"""Results beside the pages: published once, written into the pages, drawn, noticed when changed."""
import json
import re

import pytest
from conftest import ROOT, credit_columns, write_log
from PIL import Image  # matplotlib brings it

from analysis.plots import COLOURS, plt
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.files import paths_in
from research.__main__ import main
from research.experiments import pages, pictures, published
from research.experiments.pictures import PUBLISHED, draw, shown_of
from research.experiments.published import fingerprint, made_by, read_result, write_result

TABLE = Table("success", "Success", by_row(
    {"arm": "", "when": "", "end": ".1%", "95%": "points"},
    [["none", "end", 0.5, (0.01, 0.02)], ["rloo", "end", 0.25, (-0.01, 0.5)],
     ["rloo", "middle", None, (-0.1, float("nan"))]]), "rloo is behind.",
              headings={"95%": "interval"})


SIZES = Table("success by size", "By size", by_row(
    {"": "", "share, all": ".1%"}, [["size: abs(t) > 3", 0.5], ["size: abs(t) < 1", 0.25]]))


LOG = Table("log", "A log", {"line": ("", ["   1/2  0.5", " ..."])})


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_pages_are_as_the_results_have_them(page):
    text = page.read_text(encoding="utf-8")
    assert pages.fill(text, page.name) == text


STORED = [path for path in paths_in(published.RESULTS) if path.suffix == ".json"]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_published_result_is_as_it_was_written(path):
    read_result(path)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, with one: small.json."""
    folder = tmp_path / "results"
    for module in (published, pages, pictures):
        monkeypatch.setattr(module, "RESULTS", folder)
    folder.mkdir()
    result = {"measured": "small", "command": "python -m study small", "day": "2026-11-21",
              "git_commit": "a" * 40, "versions": {"torch": "2.13.0"},
              "tables": [table.to_json() for table in (TABLE, SIZES, LOG)]}
    write_result(folder / "small.json", result)
    return folder


@pytest.mark.parametrize("old, new, said", [
    ('"end": 0.25', '"end": 0.35', "was changed by hand or damaged: .* sha256"),
    ('"day": "2026-11-21",', "", "was changed by hand or damaged"),
    ('"sha256"', '"seal"', "was changed by hand or damaged"),
    ("}\n", "", "is not JSON")])
def test_a_result_that_was_changed_by_hand_or_damaged_is_named(results, old, new, said):
    path = results / "small.json"
    written = path.read_text()
    assert old in written
    path.write_text(new.join(written.rsplit(old, 1)))
    with pytest.raises(UserError, match=f"small.json {said}"):
        pages.fill("<!-- source small --><!-- end -->", "p")


@pytest.mark.parametrize("marked, content", [
    ("number small success none; end", "50.0%"),
    ("number small success rloo; middle; end", "-"),
    ("number small success rloo; end; 95%", "-1.0 to +50.0"),
    ("number small success by size size: abs(t) > 3; share, all", "50.0%"),
    ("interval small success none; end; 95%", "50.0% (+1.0 to +2.0)"),
    ("table small success by size; share, all", "\n| share, all |\n|--:|\n| 50.0% |\n| 25.0% |\n"),
    ("text small log", "\n```\n   1/2  0.5\n ...\n```\n"),
    ("source small", "\n`python -m study small`, 2026-11-21, torch 2.13.0, commit aaaaaaa, "
     "a command of that commit, no longer here\n"),
    ("table small success; arm; 95%",
     "\n| arm | interval |\n|:--|--:|\n| none | +1.0 to +2.0 |\n| rloo | -1.0 to +50.0 |\n"
     "| rloo | - |\n"),
])
def test_what_is_marked_is_made_again(results, marked, content):
    page = f"before <!-- {marked} -->whatever\nthis was<!-- end --> after <!-- a comment -->"
    made = f"before <!-- {marked} -->{content}<!-- end --> after <!-- a comment -->"
    assert pages.fill(page, "page.md") == made == pages.fill(made, "page.md")


def test_a_source_names_the_codes_that_made_the_runs(results):
    made_by = [{"git_commit": code * 40, "runs": []} for code in "bc"]
    path = results / "small.json"
    write_result(path, {**read_result(path), "made_by": made_by})
    made = pages.fill("<!-- source small --><!-- end -->", "p")
    assert "commit bbbbbbb and ccccccc, a command of that commit" in made
    write_result(path, {**read_result(path), "measured": "exact"})
    assert pages.fill(made, "p").endswith("ccccccc\n<!-- end -->")  # it is still here


@pytest.mark.parametrize("marked, complaint", [
    ("number small success rloo; end", "2 rows have rloo, one is needed"),
    ("number small success gae; end", "0 rows have gae"),
    ("number small success none; start", "no column 'start', only arm, when, end, 95%"),
    ("table small success; start", "no column 'start'"),
    ("table small failure", "no table failure, only success"),
    ("table large success", "there is no .*large.json"),
    ("number small", "a result and a table should be named"),
])
def test_a_mark_that_means_nothing_is_named_with_its_page(results, marked, complaint):
    with pytest.raises(UserError, match=rf"page.md: <!-- {marked} -->: .*{complaint}"):
        pages.fill(f"<!-- {marked} --><!-- end -->", "page.md")


# publishing, and what has changed since

def report(tmp_path, **changes):
    """The folder of a report of the board."""
    numbers = {"measured": "board", "quick_look": False, "settings": {},
               "command": "python -m research board", "git_commit": None,
               "versions": {}, "seconds": 1.0, "in_short": [], "tables": [], **changes}
    folder = tmp_path / "report"
    folder.mkdir(exist_ok=True)
    (folder / "numbers.json").write_text(json.dumps(numbers))
    return folder


def test_a_result_is_published_under_its_name(results, tmp_path):
    path = published.publish(report(tmp_path, settings={"steps": 60, "out": "/here"}))
    assert path == results / "board.json"
    assert read_result(path)["command"] == "python -m research board"
    assert read_result(path)["settings"] == {"steps": 60}


def test_runs_of_several_codes_are_named_when_they_are_published(results, tmp_path, capsys):
    old = {"git_commit": "a" * 40, "versions": {"torch": "2.12.0"}}
    new = {"git_commit": "b" * 40, "versions": {"torch": "2.13.0"}}
    one = made_by({"none-s0": old, "none-s1": old})
    main(["publish", str(report(tmp_path, settings={"made_by": one}))])
    assert "several codes" not in capsys.readouterr().out
    several = made_by({"none-s0": old, "rloo-s0": new, "none-s1": old})
    main(["publish", str(report(tmp_path, settings={"made_by": several}))])
    said = capsys.readouterr().out
    assert "do they compute the same? aaaaaaa (2 runs), bbbbbbb (1 runs)\n" in said
    kept = json.loads((results / "board.json").read_text())["made_by"]
    assert kept == [{**old, "runs": ["none-s0", "none-s1"]}, {**new, "runs": ["rloo-s0"]}]


def test_what_says_nothing_is_not_published(results, tmp_path):
    (tmp_path / "numbers.json").write_text('{"tables": []}')
    for folder in (report(tmp_path, quick_look=True), tmp_path):
        with pytest.raises(UserError, match="is a quick look"):
            published.publish(folder)


def test_pages_are_written_where_they_differ(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- number small success none; end -->12%<!-- end -->")
    monkeypatch.setattr(pages, "pages", lambda: [page])
    for said in ("written: page.md\n", ""):
        pages.main([])
        assert "50.0%" in page.read_text() and capsys.readouterr().out == said


# pictures

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
    figure, axis = plt.subplots()
    pictures.points_with_names(axis, {"a": (0, 1), "b": (1, 1), "c": (0, 2)}, ["absent", "b"])
    assert axis.get_legend_handles_labels()[1] == ["b", "others"] and not axis.texts
    named, others = axis.lines
    assert (*named.get_data(), named.get_color()) == ([1], [1], COLOURS[1])
    assert list(others.get_xdata()) == [0, 0] and list(others.get_ydata()) == [1, 2]
    plt.close(figure)


def test_a_picture_is_drawn_from_a_result_and_told_from_one_that_has_changed(results):
    table = {"name": "board", "rows": [{"arm": "a", "lead": 0.5, "95%": [0, 1], "predicted": None,
                                        "verdict": "ahead"}]}
    write_result(results / "small.json", {"tables": [table]})
    path, _ = draw(pictures.draw_leads, results / "a.png", shown_of("small board"))
    assert kept_in(path) == fingerprint(table) != fingerprint({**table, "name": "other"})
    with pytest.raises(UserError, match="small.json has no values, which a picture shows"):
        shown_of("small values")
