"""Results beside the pages: published once, written into the pages, out of date when the lab does
something else."""
import json
import subprocess

import pytest
from conftest import ROOT

import mitigations
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.registry import MITIGATIONS
from research.experiments import pages, published, witness
from research.experiments.published import as_anyone_types, out_of_date

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


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, with one: small.json."""
    folder = tmp_path / "results"
    for module in (published, pages):
        monkeypatch.setattr(module, "RESULTS", folder)
    folder.mkdir()
    result = {"command": "python -m research small", "day": "2026-11-21", "git_commit": "a" * 40,
              "versions": {"torch": "2.13.0"}, "tables": [TABLE.to_json(), SIZES.to_json(), LOG.to_json()]}
    (folder / "small.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("marked, content", [
    ("number small success none; end", "50.0%"),
    ("number small success rloo; middle; end", "-"),
    ("number small success rloo; end; 95%", "-1.0 to +50.0"),
    ("number small success by size size: abs(t) > 3; share, all", "50.0%"),
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


def test_check_changes_nothing_and_fails(results, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- number small success none; end -->12%<!-- end -->")
    monkeypatch.setattr(pages, "pages", lambda: [page])
    with pytest.raises(SystemExit) as end:
        pages.main(["--check"])
    assert end.value.code == 1 and "12%" in page.read_text()
    pages.main([])
    assert "50.0%" in page.read_text()
    pages.main(["--check"])
    assert "all pages are as the results have them" in capsys.readouterr().out


# publishing, and what makes a result out of date

def report(tmp_path, **changes):
    """The folder of a report of the experiment subject, which has one arm."""
    numbers = {"measured": "study-subject", "quick_look": False, "settings": {},
               "command": "/usr/bin/python3 -m study subject --report_only", "git_commit": None,
               "versions": {}, "seconds": 1.0, "in_short": [], "tables": [], **changes}
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "numbers.json").write_text(json.dumps(numbers))
    for name in ("curve", "other"):
        (folder / f"{name}.png").write_bytes(b"a picture")
    return folder


def test_a_published_result_is_up_to_date_until_an_arm_does_something_else(
        results, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("![A curve](results/subject-curve.png)")
    monkeypatch.setattr(published, "pages", lambda: [page])
    path = published.publish(report(tmp_path))
    assert path == results / "subject.json" and not (results / "subject-other.png").exists()
    assert (results / "subject-curve.png").read_bytes() == b"a picture"
    assert json.loads(path.read_text())["command"] == "python -m research subject"
    assert out_of_date(path) == []
    plain = mitigations.none

    def none(tokens):
        """Twice as much at the first token."""
        weight = plain(tokens)
        weight[:, 0] *= 2
        return weight

    monkeypatch.setitem(MITIGATIONS, "none", none)
    witness.what_it_does.cache_clear()
    assert out_of_date(path) == ["none does something else"]
    witness.what_it_does.cache_clear()


def test_arms_that_differ_in_what_is_short_anyway_are_made_once():
    longer = "--questions 8 --answers 8 --steps 60 --advantage measured --measured_k 2"
    assert witness.without_short(longer) == "--advantage measured --measured_k 2"
    assert witness.without_short("--mitigation random") == "--mitigation random"


def test_an_experiment_that_is_gone_is_named():
    with pytest.raises(UserError, match="there is no experiment gone any more"):
        published.arms_of("study-gone")


def test_flags_of_the_evaluation_do_not_keep_an_arm_from_being_published():
    """The short steps have no evaluation, and train.py refuses a flag that does nothing."""
    did = witness.what_it_does(witness.without_short("--eval_every 1 --eval_tasks 20"))
    assert len(did) == 2


def test_runs_of_other_code_are_not_published(results, tmp_path, monkeypatch):
    """The first step of a run of the experiment, and the same with another loss."""
    monkeypatch.setattr(published, "arms_of", lambda measured: {"none": "--questions 2 --steps 60"})
    monkeypatch.setattr(published, "made_by", lambda *what: {})
    flags = witness.without_short("--questions 2 --steps 60", witness.ONE_STEP)
    [first] = witness.what_it_does(flags, witness.ONE_STEP)
    published.publish(report(tmp_path, settings={"first_steps": {"none": first}}))
    reward, tokens, loss, norm = first
    other = {"first_steps": {"none": [reward, tokens, 1.01 * loss, norm]}}
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError, match="the runs of none were made by other code than today's"):
        published.publish(report(tmp_path / "again", settings=other))


def test_another_model_another_recipe_and_another_source_are_named():
    before = {"model": "a", "recipe": {"steps": 3}, "arms": {}, "source": {"research.probes.exact": "b"}}
    now = {"model": "c", "recipe": {"steps": 4}, "arms": {}, "source": {"research.probes.exact": "d"}}
    assert witness.what_differs(before, before) == []
    assert witness.what_differs(before, now) == [
        "the model is another one", "the recipe is another one",
        "research.probes.exact computes something else"]


def test_an_arm_that_is_gone_or_has_other_flags_is_not_the_same():
    arm = {"flags": "--answers 4", "did": [[0.1, 20, 0.0, None], [0.5, 21, -0.1, 0.3]]}
    near = {"flags": "--answers 4", "did": [[0.1, 20, 0.0, None], [0.5, 21, -0.1, 0.3001]]}
    far = {"flags": "--answers 4", "did": [[0.1, 20, 0.0, 0.0], [0.5, 21, -0.1, 0.3]]}
    assert witness.does_the_same(arm, near)
    assert not witness.does_the_same(arm, far)
    assert not witness.does_the_same(arm, None)
    assert not witness.does_the_same(arm, {**arm, "flags": "--answers 8"})


def test_comments_and_docstrings_do_not_count_as_source(tmp_path, monkeypatch):
    monkeypatch.setattr(witness, "PROJECT", tmp_path)
    (tmp_path / "truth").mkdir()
    probe, helper = tmp_path / "research/probes/probe.py", tmp_path / "research/probes/helper.py"
    helper.write_text("A = 1\n")
    probe.write_text('"""One."""\nfrom truth.helper import A\n\ndef f():\n    """Two."""\n'
                     "    return A\n")
    before = witness.sources_of("research.probes.probe")
    assert list(before) == ["research.probes.helper", "research.probes.probe"]
    probe.write_text('"""Other."""\nimport math\nfrom truth.helper import A  # why\n\ndef f():\n    """Too."""\n'
                     "    return A\n")
    assert witness.sources_of("research.probes.probe") == before
    helper.write_text("A = 2\n")
    after = witness.sources_of("research.probes.probe")
    assert [name for name in after if after[name] != before[name]] == ["research.probes.helper"]


def test_the_source_is_that_of_the_commit_that_measured():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("needs a checkout")
    of_commit = witness.sources_of("research.probes.exact", head.stdout.strip())
    assert {"research.probes.exact", "research.probes.world", "research.probes.batches"} <= set(of_commit)
    with pytest.raises(UserError, match="research/probes/exact.py of commit 0000000, which measured this"):
        witness.sources_of("research.probes.exact", "0" * 40)


def test_what_says_nothing_is_not_published(results, tmp_path):
    with pytest.raises(UserError, match="is a quick look"):
        published.publish(report(tmp_path, quick_look=True))
    (tmp_path / "numbers.json").write_text('{"tables": []}')
    with pytest.raises(UserError, match="has no measured: publish what python -m research NAME or"):
        published.publish(tmp_path)


def test_a_command_is_published_as_anyone_types_it():
    typed = "/a/b/python -m research control --out /a/runs --seeds 3 --report_only"
    assert as_anyone_types(typed) == "python -m research control --seeds 3"
