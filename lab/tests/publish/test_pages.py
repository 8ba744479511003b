"""Results beside the pages: published once, written into the pages, shown, noticed when changed."""
import json
import re
from collections import defaultdict

import pytest
from conftest import ROOT
from matplotlib.colors import to_hex

from lab.analysis.statistics import Estimate
from lab.analysis.tables import Table, by_row
from lab.engine.errors import UserError
from lab.__main__ import main
from lab.publish import pages, pictures, publish, show
from lab.publish import results as store
from lab.publish.results import (Results, fingerprint, made_by, read_result,
                                      write_result)

TABLE = Table("success", "Success", by_row(
    {"arm": "", "when": "", "end": ".1%", "gain": "points", "range": "points"},
    [["none", "end", 0.5, Estimate(0.015, 0.01, 0.02), (0.01, 0.02)],
     ["rloo", "end", 0.25, Estimate(0.2, -0.01, 0.5), (-0.01, 0.5)],
     ["rloo", "middle", None, Estimate(0.2), (-0.1, float("nan"))]]), "rloo is behind.",
              headings={"range": "lowest to highest"})
SIZES = Table("size", "By size", by_row(
    {"": "", "share, all": ".1%"}, [["size: abs(t) > 3", 0.5], ["size: abs(t) < 1", 0.25]]))
LOG = Table("log", "A log", {"line": ("", ["   1/2  0.5", " ..."])})
PRINTED = {"README.md": ("first_run", 16), "docs/real_models.md": ("real_run", 73)}

ALL = Results()
STORED = sorted(store.RESULTS.glob("*.json"))


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_pages_are_as_the_results_have_them(page):
    text = page.read_text(encoding="utf-8")
    assert pages.fill(text, page.name, ALL) == text


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_no_line_begins_with_a_number_of_a_result(page):
    """Markdown takes a line that begins with a comment for HTML, and then shows the rest of the
    line with its stars and backticks."""
    assert not re.findall(r"^ *<!-- (?:number|interval) .*", page.read_text(), flags=re.M)


def test_a_line_of_a_page_with_a_commit_is_the_source_of_the_stored_result_that_it_names():
    """Its command is not printed, because it may be one of that commit alone."""
    found = []
    for page in pages.pages():
        found += re.findall(r"^Made at commit .*", page.read_text(), flags=re.M)
    assert found
    for line in found:
        name = line.rpartition("(`python -m lab show ")[2].removesuffix("`)")
        source = re.sub(" by `.*?`", "", show.source_of(ALL.result(name)))
        assert line == f"{source} (`python -m lab show {name}`)"


@pytest.mark.parametrize("page", PRINTED)
def test_the_last_line_of_a_run_is_that_of_its_stored_transcript(page):
    result, number = PRINTED[page]
    line = ALL.table(result, "transcript")["rows"][number - 1]["line"]
    assert f"\n{line}\n" in (ROOT / page).read_text(encoding="utf-8")


OVERVIEWS = {"README.md", "lab/README.md", "lab/LOG.md"}  # that tell what a report has found


def test_an_interval_stands_in_its_report_and_in_at_most_one_overview():
    """A report is the page that has the table, or else the only other page that has the number. A
    number that is told on many pages has to be told anew on each when it changes."""
    with_interval, with_table = defaultdict(set), defaultdict(set)
    for page in pages.pages():
        name = page.relative_to(ROOT).as_posix()
        for kind, words, _ in pages.MARKED.findall(page.read_text(encoding="utf-8")):
            if kind not in ("table", "interval"):
                continue
            result, table, *_ = words.replace(";", " ").split()
            if kind == "table":
                with_table[result, table].add(name)
            else:
                with_interval[result, table, words].add(name)
    crowded = {}
    for (result, table, words), places in with_interval.items():
        places |= with_table[result, table]
        if len(places - OVERVIEWS) > 1 or len(places) > 2:
            crowded[words] = sorted(places)
    assert not crowded


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, with one: small.json."""
    folder = tmp_path / "results"
    for module in (store, publish, show):
        monkeypatch.setattr(module, "RESULTS", folder)
    folder.mkdir()
    result = {"measured": "small", "question": "Is it small?",
              "command": "python -m study small", "day": "2026-11-21",
              "git_commit": "a" * 40, "versions": {"torch": "2.13.0"},
              "tables": [table.to_json() for table in (TABLE, SIZES, LOG)]}
    write_result(folder / "small.json", result)
    return folder


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The only page, with one number, which is not up to date."""
    path = tmp_path / "page.md"
    path.write_text("<!-- number small success none; end -->12%<!-- end -->")
    monkeypatch.setattr(pages, "pages", lambda: [path])
    return path


@pytest.mark.parametrize("marked, content", [
    ("number small success none; end", "50.0%"),
    ("number small success rloo; end; range", "-1.0 to +50.0"),
    ("number small success rloo; end; gain", "+20.0"),
    ("interval small success rloo; end; gain", "+20.0 (-1.0 to +50.0)"),
    ("interval small success rloo; middle; gain", "+20.0"),
    ("number small size size: abs(t) > 3; share, all", "50.0%"),
    ("table small success; arm = rloo; when = end; arm; end", "\n| arm | end |\n|:--|--:|\n"
     "| rloo | 25.0% |\n"),
    ("table small size; share, all", "\n| share, all |\n|--:|\n| 50.0% |\n| 25.0% |\n"),
    ("table small success; arm; range",
     "\n| arm | lowest to highest |\n|:--|--:|\n| none | +1.0 to +2.0 |\n| rloo | -1.0 to +50.0 |\n"
     "| rloo | - |\n"),
    ("table small success; when = end; gain",
     "\n| gain |\n|--:|\n| +1.5 (+1.0 to +2.0) |\n| +20.0 (-1.0 to +50.0) |\n"),
])
def test_what_is_marked_is_made_again(results, marked, content):
    page = f"before <!-- {marked} -->whatever\nthis was<!-- end --> after <!-- a comment -->"
    made = f"before <!-- {marked} -->{content}<!-- end --> after <!-- a comment -->"
    read = Results()
    assert pages.fill(page, "page.md", read) == made == pages.fill(made, "page.md", read)


def test_a_result_is_read_once(results, monkeypatch):
    """However many marks name it, and whatever they ask for."""
    read = []
    monkeypatch.setattr(store, "read_result", lambda path: read.append(path) or read_result(path))
    marks = ("number small success none; end", "table small success", "table small size")
    page = "".join(f"<!-- {words} --><!-- end -->" for words in marks)
    pages.fill(page, "page.md", Results())
    assert read == [results / "small.json"]


def test_a_source_names_the_codes_that_made_the_runs(results):
    made_by = [{"git_commit": code * 40, "runs": [], "versions": {"torch": torch}}
               for code, torch in (("b", "2.13.0"), ("c", "2.11.0"), ("c", "2.11.0"))]
    path = results / "small.json"
    write_result(path, {**read_result(path), "made_by": made_by})
    made = show.source_of(read_result(path))
    assert made == ("Made at commit bbbbbbb and ccccccc by `python -m study small`, 2026-11-21, "
                    "torch 2.13.0 and 2.11.0")


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
        pages.fill(f"<!-- {marked} --><!-- end -->", "page.md", Results())


@pytest.mark.parametrize("text", [
    "<!-- number small success none; end -->1% and <!-- table small success -->x<!-- end -->",
    "<!-- table small success -->x<!-- end --> <!-- number small success none; end -->1%",
    "<!-- table small success -->x<!-- end --> 1%<!-- end -->",
    "<!-- number small success none; end -->1% <!-- table small size -->x<!-- end --><!-- end -->",
    "<!-- words small success -->x<!-- end -->",  # no kind of mark
    "<!-- nubmer small success none; end -->1%<!-- end -->"])
def test_a_mark_that_is_not_closed_replaces_no_text(results, text):
    with pytest.raises(UserError, match="page.md has . marks and . times <!-- end -->"):
        pages.fill(text, "page.md", Results())


def test_a_check_publishes_nothing_and_a_folder_of_something_else_is_told(results, page, tmp_path):
    with pytest.raises(UserError, match="--check publishes nothing: leave out x or --check"):
        main(["publish", "x", "--check"])
    (tmp_path / "numbers.json").write_text('{"measured": "small", "tables": []}')
    with pytest.raises(UserError, match="was not written by python -m lab"):
        main(["publish", str(tmp_path)])


def test_who_made_the_runs_is_kept(results, page, tmp_path):
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


def test_pages_are_written_where_they_differ(results, page, capsys):
    with pytest.raises(UserError, match="not up to date: page.md. python -m lab publish"):
        main(["publish", "--check"])
    assert "12%" in page.read_text()
    for said in ("written: page.md\n", ""):
        main(["publish"])
        assert "50.0%" in page.read_text() and capsys.readouterr().out == said
    main(["publish", "--check"])
    assert capsys.readouterr().out == "all pages are up to date\n"


def numbers_in(folder, measured, tables):
    folder.mkdir()
    numbers = {"measured": measured, "settings": {}, "command": "c", "git_commit": "a" * 40,
               "versions": {"torch": "2.13.0"}, "tables": [table.to_json() for table in tables]}
    (folder / "numbers.json").write_text(json.dumps(numbers))
    return str(folder)


@pytest.mark.parametrize("measured, cell, said", [
    ("../../evil", 1.0, '"measured" is .*evil.*, and should be the name of an experiment'),
    (None, 1.0, '"measured" is None'), (["x"], 1.0, "and should be the name"),
    ("new", float("nan"), "holds a NaN or an infinity")])
def test_a_folder_of_hostile_numbers_publishes_nothing(results, tmp_path, measured, cell, said):
    """Least of all outside of the folder of results."""
    numbers = {"measured": measured, "tables": [{"rows": [{"x": cell}]}], "settings": {}}
    folder = tmp_path / "a/b/hostile"
    folder.mkdir(parents=True)
    (folder / "numbers.json").write_text(json.dumps(numbers))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=said):
        publish.publish(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_published_result_is_not_lost(results, page, tmp_path):
    """Neither to a result that the pages cannot be filled from, nor to another experiment."""
    before = (results / "small.json").read_bytes()
    lacking = numbers_in(tmp_path / "lacking", "small", [SIZES])
    with pytest.raises(UserError, match="no table success, only size. So .* was not published"):
        main(["publish", lacking])
    other = numbers_in(tmp_path / "other", "other", [TABLE])
    with pytest.raises(UserError, match="measured by small, not by other"):
        main(["publish", other, "--name", "small"])
    assert (results / "small.json").read_bytes() == before and len(list(results.iterdir())) == 1
    main(["publish", other])
    again = numbers_in(tmp_path / "again", "small", [TABLE, SIZES])
    main(["publish", again])
    assert len(read_result(results / "small.json")["tables"]) == 2
    assert sorted(path.name for path in results.iterdir()) == ["other.json", "small.json"]


def test_a_result_is_shown_whole_or_one_of_its_tables(results, tmp_path, capsys):
    main(["show", "small"])
    printed = capsys.readouterr().out
    assert printed.startswith("Is it small?\n\nMade at commit aaaaaaa by `python -m study small`, ")
    assert "## Success (success)" in printed and "| rloo " in printed and "+20.0" in printed
    assert "rloo is behind." in printed and "## A log (log)" in printed
    main(["show", "small", "--table", "size"])
    printed = capsys.readouterr().out
    assert "size: abs(t) > 3" in printed and "rloo" not in printed
    main(["show"])
    assert capsys.readouterr().out == f"{'small':24s} Is it small?\n"
    main(["show", numbers_in(tmp_path / "mine", "mine", [TABLE])])
    assert "## Success (success)" in capsys.readouterr().out
    for flags, said in ((["smal"], "no stored result smal, and no"),
                        (["small", "--table", "x"], "--table x: the result has success, size")):
        with pytest.raises(UserError, match=said):
            main(["show", *flags])


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_result_is_as_it_was_written_has_its_question_and_is_shown(path):
    result = read_result(path)
    assert result["question"].endswith((".", "?", ")"))
    assert result["question"] in " ".join(show.in_text(result).split())


SHOWN = {  # pictures, and which table of which result each of them shows
    "docs/answer.png": ("group", "tokens"), "docs/one-step.png": ("group", "answers"),
    "docs/push-and-change.png": ("group", "kinds"),
    "docs/found.png": ("real_board_brief_8_gpu", "board"),
    "docs/noise.png": ("exact_policies", "advantages"),
    "docs/real-run.png": ("real_run", "transcript"),
    "lab/results/decided.png": ("scoreboard_24", "kind"),
    "lab/results/exact-real.png": ("exact_real", "kind"),
    "lab/results/dial-shares-plain.png": ("dial", "board"),
    "lab/results/board-leads.png": ("board", "board"),
    "lab/results/change.png": ("change_steps", "kinds")}


@pytest.mark.parametrize("picture", SHOWN)
def test_a_picture_carries_the_fingerprint_of_the_table_that_it_shows(picture):
    """A text chunk of the PNG has it. So a picture that shows other numbers is noticed."""
    result, table = SHOWN[picture]
    mark = fingerprint(ALL.table(result, table))
    assert f"tEXtShows\0{mark}".encode() in (ROOT / picture).read_bytes()


def test_a_token_is_shaded_by_its_value_and_faint_where_its_credit_is_not_seen():
    tokens = {"rows": [{"token": " a", "push": 1, "change": -1},
                       {"token": " b", "push": 2, "change": 1}]}
    measured = {"credit": [0.2, 0.1], "low": [0.1, -0.1], "high": [0.3, 0.3]}
    push, change, credit = pictures.draw_answer(tokens, measured).axes
    assert [box.get_alpha() for box in push.patches] == pytest.approx([0.3, 0.6])
    assert [to_hex(box.get_facecolor()) for box in change.patches] == [pictures.DOWN, pictures.UP]
    assert [box.get_alpha() for box in credit.patches] == pytest.approx([1, 0.15 / 2])


def test_the_picture_of_what_was_found_has_gains_in_points_with_their_verdict():
    name, verdict, *gain = pictures.gains_of(ALL, "board")[0]
    assert (name, verdict) == ("four times the answers", "ahead")
    assert [round(number, 1) for number in gain] == [9.2, 8.2, 10.1]


def test_the_pictures_are_drawn_anew(tmp_path):
    pictures.draw_all(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {"answer.png", "step.png", "found.png"}


def test_every_picture_is_on_a_page_and_every_picture_of_a_page_is_there():
    """A page of lab/trl/ may show a picture of another program."""
    shown = {(page.parent / path).resolve().relative_to(ROOT.resolve()).as_posix()
             for page in store.pages() if page.parent.name != "trl"
             for path in re.findall(r"\(([^\s()]+\.png)\)", page.read_text(encoding="utf-8"))}
    kept = {path.relative_to(ROOT).as_posix() for folder in ("docs", "lab/results")
            for path in (ROOT / folder).rglob("*.png")}
    assert shown == kept
