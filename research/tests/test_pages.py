"""Results beside the pages: published once, written into the pages, drawn, noticed when changed."""
import json
import re

import pytest
from conftest import ROOT
from PIL import Image  # matplotlib brings it

from analysis.tables import Table, by_row
from engine.errors import UserError
from research.__main__ import main
from research.experiments import pages, pictures, published
from research.experiments.pictures import PUBLISHED, shown_of
from research.experiments.published import fingerprint, made_by, read_result, write_result

TABLE = Table("success", "Success", by_row(
    {"arm": "", "when": "", "end": ".1%", "95%": "points"},
    [["none", "end", 0.5, (0.01, 0.02)], ["rloo", "end", 0.25, (-0.01, 0.5)],
     ["rloo", "middle", None, (-0.1, float("nan"))]]), "rloo is behind.",
              headings={"95%": "interval"})
SIZES = Table("size", "By size", by_row(
    {"": "", "share, all": ".1%"}, [["size: abs(t) > 3", 0.5], ["size: abs(t) < 1", 0.25]]))
LOG = Table("log", "A log", {"line": ("", ["   1/2  0.5", " ..."])})


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_pages_are_as_the_results_have_them(page):
    text = page.read_text(encoding="utf-8")
    assert pages.fill(text, page.name) == text


STORED = sorted(published.RESULTS.glob("*.json"))


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


@pytest.mark.parametrize("marked, content", [
    ("number small success none; end", "50.0%"),
    ("number small success rloo; end; 95%", "-1.0 to +50.0"),
    ("number small size size: abs(t) > 3; share, all", "50.0%"),
    ("interval small success none; end; 95%", "50.0% (+1.0 to +2.0)"),
    ("table small success; arm = rloo; when = end; arm; end", "\n| arm | end |\n|:--|--:|\n"
     "| rloo | 25.0% |\n"),
    ("table small size; share, all", "\n| share, all |\n|--:|\n| 50.0% |\n| 25.0% |\n"),
    ("text small log", "\n```\n   1/2  0.5\n ...\n```\n"),
    ("words small success", "\nrloo is behind.\n"),
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
    ("table small success; start", "no column 'start'"),
    ("table small failure", "no table failure, only success"),
    ("table large success", "there is no .*large.json"),
    ("number small", "a result and a table should be named"),
])
def test_a_mark_that_means_nothing_is_named_with_its_page(results, marked, complaint):
    with pytest.raises(UserError, match=rf"page.md: <!-- {marked} -->: .*{complaint}"):
        pages.fill(f"<!-- {marked} --><!-- end -->", "page.md")


def test_who_made_the_runs_is_kept(results, tmp_path):
    old = {"git_commit": "a" * 40, "versions": {"torch": "2.12.0"}}
    new = {"git_commit": "b" * 40, "versions": {"torch": "2.13.0"}}
    several = made_by({"none-s0": old, "rloo-s0": new, "none-s1": old})
    numbers = {"measured": "board", "tables": [],
               "settings": {"made_by": several, "steps": 60, "out": "/here"}}
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    main(["publish", str(tmp_path)])
    kept = read_result(results / "board.json")
    assert kept["settings"] == {"steps": 60}
    assert kept["made_by"] == several
    assert several == [{**old, "runs": ["none-s0", "none-s1"]}, {**new, "runs": ["rloo-s0"]}]


def test_pages_are_written_where_they_differ(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- number small success none; end -->12%<!-- end -->")
    monkeypatch.setattr(pages, "pages", lambda: [page])
    for said in ("written: page.md\n", ""):
        pages.main([])
        assert "50.0%" in page.read_text() and capsys.readouterr().out == said


def kept_in(path):
    return Image.open(path).text["Shows"]


@pytest.mark.parametrize("picture", PUBLISHED)
def test_no_picture_is_older_than_what_it_shows(picture):
    _, *source = PUBLISHED[picture]
    assert kept_in(ROOT / picture) == fingerprint(shown_of(*source)), "python -m research pictures"


def test_every_picture_of_readme_and_pages_is_drawn_by_the_command_and_no_other_is_kept():
    shown = {(page.parent / path).relative_to(ROOT).as_posix() for page in published.pages()
             for path in re.findall(r"\(([^\s()]+\.png)\)", page.read_text(encoding="utf-8"))}
    kept = {path.relative_to(ROOT).as_posix() for room in ("docs", "research")
            for path in (ROOT / room).rglob("*.png")}
    assert shown == kept == {*PUBLISHED, "docs/answer.png"}  # whose program is of an earlier commit
