"""Results beside the pages: published once, written into the pages, and what has changed since."""
import json

import numpy as np
import pytest

from analysis.statistics import holm, welch
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.files import paths_in
from research.__main__ import main
from research.experiments import leaderboard, pages, published
from research.experiments.experiments import EXPERIMENTS
from research.experiments.published import made_by
from research.experiments.report import IN_WORDS

TABLE = Table("success", "Success", by_row(
    {"arm": "", "when": "", "end": ".1%", "95%": "points"},
    [["none", "end", 0.5, (0.01, 0.02)], ["rloo", "end", 0.25, (-0.01, 0.5)],
     ["rloo", "middle", None, (-0.1, float("nan"))]]), "rloo is behind.",
              headings={"95%": "interval"})


SIZES = Table("success by size", "By size", by_row(
    {"": "", "share, all": ".1%"}, [["size: abs(t) > 3", 0.5], ["size: abs(t) < 1", 0.25]]))


AREA = Table("area", "By length", by_row(
    {"length": "", "arm": "", "lead": ".1%"},
    [["16", "gae", 0.5], ["", "vine", 0.25], ["32", "gae", 0.125], ["", "vine", 0.75]]))


LOG = Table("log", "A log", {"line": ("", ["   1/2  0.5", " ..."])})


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_pages_are_as_the_results_have_them(page):
    text = page.read_text(encoding="utf-8")
    assert pages.fill(text, page.name) == text


OF_RUNS = [path for path in paths_in(published.RESULTS) if path.suffix == ".json"
           and json.loads(path.read_text())["measured"].startswith("study-")
           and path.stem != "subject"]  # made before reports kept the values of seeds


def table_of(result, name):
    """The rows of a table by arm, if it is there."""
    [found] = [table["rows"] for table in result["tables"] if table["name"] == name] or [[]]
    return {row["arm"]: row for row in found}


@pytest.mark.parametrize("path", OF_RUNS, ids=lambda path: path.stem)
def test_a_published_table_can_be_made_again_from_the_values_of_its_seeds(path):
    result = json.loads(path.read_text())
    experiment = EXPERIMENTS[result["measured"].removeprefix("study-")]
    runs = {arm: list(seeds.values()) for arm, seeds in result["values"].items()}
    for arm, row in table_of(result, "success").items():
        ends = [run["success"][-1] for run in runs[arm]]
        assert row["seeds"] == len(ends) and row["end"] == pytest.approx(np.mean(ends))
    check_differences(table_of(result, "differences"), result["values"], experiment.plain_of)
    check_prices(table_of(result, "price"), runs)
    check_board(table_of(result, "board"), runs)
    for table in result["tables"]:
        if table["name"] == "versus":
            check_versus(table["rows"], runs, experiment.plain_of)


def check_differences(rows, values, plain_of):
    """Seed by seed. Their intervals are over problems, too, which are not on file."""
    for arm, row in rows.items():
        mine, theirs = values[arm], values[plain_of(arm)]
        ends = [mine[seed]["success"][-1] - theirs[seed]["success"][-1]
                for seed in mine if seed in theirs]
        assert row["seeds"] == len(ends) and row["end"] == pytest.approx(np.mean(ends))
        assert row["95%"][0] < row["end"] < row["95%"][1]


def cheapest(runs, price):
    return min(run[price][-1] for run in runs if price in run)


def reached(runs, price, cost):
    return [np.interp(cost, run[price], run["success"]) for run in runs]


def check_prices(rows, runs):
    for price in ("seconds", "tokens", "rewards"):
        least = cheapest(sum(runs.values(), []), price)
        for arm, row in rows.items():
            if price in runs[arm][0]:
                found = np.mean(reached(runs[arm], price, least))
                assert row[price] == pytest.approx(found, abs=1e-4)  # rounded prices


def check_versus(rows, runs, plain_of):
    names = {words: price for price, words in IN_WORDS.items()}
    p = []
    for row in rows:
        price, mine, theirs = names[row["price"]], runs[row["arm"]], runs[plain_of(row["arm"])]
        cost = cheapest(mine + theirs, price)
        found = welch(reached(mine, price, cost), reached(theirs, price, cost))
        p.append(found.p)
        if np.isfinite(found.p):
            assert [row["difference"], *row["95%"]] == pytest.approx(
                [found.value, *found.interval], abs=1e-3)
    known = [number for number, value in enumerate(p) if np.isfinite(value)]
    corrected = dict(zip(known, holm([p[number] for number in known])))
    for number, row in enumerate(rows):
        seen = {True: "ahead" if row["difference"] > 0 else "behind", False: "open"}
        assert row["verdict"] == (seen[corrected[number] < 0.05] if number in corrected
                                  else "too few seeds")


def check_board(rows, runs):
    """Leads, intervals and p; Holm's correction is over all but controls and placebos."""
    late = {arm: [np.mean([success for step, success in zip(run["steps"], run["success"])
                           if 2 * step > run["steps"][-1]]) for run in runs[arm]] for arm in rows}
    for arm, row in rows.items():
        assert row["end"] == pytest.approx(np.mean(late[arm])) and row["seeds"] == len(late[arm])
    found = {arm: welch(late[arm], late["none"]) for arm in rows if arm != "none"}
    family = [arm for arm in found if arm not in leaderboard.CONTROLS and "placebo" not in arm]
    p = {arm: estimate.p for arm, estimate in found.items()}
    p |= dict(zip(family, holm([p[arm] for arm in family])))
    for arm, estimate in found.items():
        row = rows[arm]
        assert [row["ahead"], *row["95%"], row["p"]] == pytest.approx(
            [estimate.value, *estimate.interval, p[arm]])


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, with one: small.json."""
    folder = tmp_path / "results"
    for module in (published, pages):
        monkeypatch.setattr(module, "RESULTS", folder)
    folder.mkdir()
    result = {"command": "python -m research small", "day": "2026-11-21", "git_commit": "a" * 40,
              "versions": {"torch": "2.13.0"},
              "tables": [table.to_json() for table in (TABLE, SIZES, AREA, LOG)]}
    (folder / "small.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("marked, content", [
    ("number small success none; end", "50.0%"),
    ("number small success rloo; middle; end", "-"),
    ("number small success rloo; end; 95%", "-1.0 to +50.0"),
    ("number small success by size size: abs(t) > 3; share, all", "50.0%"),
    ("number small area 32; vine; lead", "75.0%"),  # an empty cell stands for the one above
    ("interval small success none; end; 95%", "50.0% (+1.0 to +2.0)"),
    ("table small success by size; share, all", "\n| share, all |\n|--:|\n| 50.0% |\n| 25.0% |\n"),
    ("words small success", "\nrloo is behind.\n"),
    ("text small log", "\n```\n   1/2  0.5\n ...\n```\n"),
    ("source small", "\n`python -m research small`, 2026-11-21, torch 2.13.0, commit aaaaaaa\n"),
    ("table small success; arm; 95%",
     "\n| arm | interval |\n|:--|--:|\n| none | +1.0 to +2.0 |\n| rloo | -1.0 to +50.0 |\n"
     "| rloo | - |\n"),
])
def test_what_is_marked_is_made_again(results, marked, content):
    page = f"before <!-- {marked} -->whatever\nthis was<!-- end --> after <!-- a comment -->"
    made = f"before <!-- {marked} -->{content}<!-- end --> after <!-- a comment -->"
    assert pages.fill(page, "page.md") == made == pages.fill(made, "page.md")


def test_a_source_names_the_codes_that_made_the_runs(results):
    result = json.loads((results / "small.json").read_text())
    result["made_by"] = [{"git_commit": code * 40, "runs": []} for code in "bc"]
    (results / "small.json").write_text(json.dumps(result))
    assert "commit bbbbbbb and ccccccc" in pages.fill("<!-- source small --><!-- end -->", "p")


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
    """The folder of a report of the experiment subject."""
    numbers = {"measured": "study-subject", "quick_look": False, "settings": {},
               "command": "python -m research subject", "git_commit": None,
               "versions": {}, "seconds": 1.0, "in_short": [], "tables": [], **changes}
    folder = tmp_path / "report"
    folder.mkdir(exist_ok=True)
    (folder / "numbers.json").write_text(json.dumps(numbers))
    return folder


def test_a_result_is_published_under_its_name(results, tmp_path):
    path = published.publish(report(tmp_path))
    assert path == results / "subject.json"
    assert json.loads(path.read_text())["command"] == "python -m research subject"


def test_runs_of_several_codes_are_named_when_they_are_published(results, tmp_path, capsys):
    old = {"git_commit": "a" * 40, "versions": {"torch": "2.12.0"}}
    new = {"git_commit": "b" * 40, "versions": {"torch": "2.13.0"}}
    one = made_by({"none-s0": old, "none-s1": old})
    main(["publish", str(report(tmp_path, settings={"made_by": one}))])
    assert "several codes" not in capsys.readouterr().out
    several = made_by({"none-s0": old, "rloo-s0": new, "none-s1": old})
    main(["publish", str(report(tmp_path, settings={"made_by": several}))])
    said = capsys.readouterr().out
    assert "commit aaaaaaa, torch 2.12.0: none-s0, none-s1\n" in said
    assert "commit bbbbbbb, torch 2.13.0: rloo-s0\n" in said
    kept = json.loads((results / "subject.json").read_text())["made_by"]
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
