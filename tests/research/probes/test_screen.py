"""What a probe prints: a screen of findings, and of a quick look only what is clear."""
import json
from types import SimpleNamespace

import pytest

from analysis.tables import Table
from harness.flags import Flag
from research.probes.common import Findings, run_probe, summary_of
from research.probes.screen import clear_rows, command_of, is_clear


def finding_table(rows=60):
    columns = {"arm": ("", [f"arm {n}" for n in range(rows)]),
               "gain": ("+.1f", [1.0] * rows),
               "95%": ("+.1f", [(0.5, 1.5)] + [(-35.7, 34.1)] * (rows - 1)),
               "verdict": ("", ["ahead"] + ["none seen"] * (rows - 1))}
    return Table("gains", "The gains", columns, "One idea.\nAnother idea.",
                 headings={"95%": "95% interval"})


def measured(probe):
    return Findings("Who gains?", ["model x: 2 problems.", "How to read it."],
                    [finding_table(), Table("checks", "Checks", {"left": ("d", [1])},
                                            "The sides agree.\nTo 2e-7.")],
                    ("gains",), ("checks",), "about 8 minutes")


def printed(folder, capsys, *flags):
    known = {"answers": Flag(8, "answers", least=1, quick=2), "note": Flag(None, "a text")}
    run_probe("gains", "A probe.", known, measured, ["--out", str(folder), *flags])
    return capsys.readouterr().out


def test_a_probe_prints_one_screen(tmp_path, capsys):
    out = printed(tmp_path / "x", capsys)
    assert len(out.splitlines()) <= 40 and all(len(line) <= 100 for line in out.splitlines()[:-3])
    for text in ("Who gains?", "- model x: 2 problems.", "- One idea.", "- Another idea.",
                 "95% interval", "more lines with --all", "--all prints every table"):
        assert text in out
    assert "How to read it." not in out and "quick" not in out


def test_all_prints_every_table(tmp_path, capsys):
    out = printed(tmp_path / "x", capsys, "--all")
    assert "arm 59" in out and "## Checks" in out and "How to read it." in out
    assert "--all" not in out


def test_a_quick_look_prints_what_is_clear_and_what_to_type(tmp_path, capsys):
    out = printed(tmp_path / "x", capsys, "--quick", "--note", "a b", "--seed", "3")
    assert "- Measured: model x: 2 problems." in out and "- The sides agree." in out
    assert "To 2e-7." not in out and "One idea." not in out
    assert "- Clear even on so little are these rows:" in out
    assert "arm 0 " in out and "arm 1 " not in out and "35.7" not in out
    in_one_line = " ".join(out.split())
    assert ("A real answer takes about 8 minutes: python -m research gains --note 'a b' --seed 3 "
            in in_one_line)


def test_a_quick_look_of_which_nothing_is_clear_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("research.probes.screen.clear_rows", lambda table: Table("none", "", {"x": ("", [])}))
    out = printed(tmp_path / "x", capsys, "--quick")
    assert "- No interval is narrow enough" in out and "Clear even" not in out and "arm" not in out


def test_a_quick_look_is_marked_and_keeps_everything(tmp_path, capsys):
    printed(tmp_path / "quick", capsys, "--quick")
    printed(tmp_path / "whole", capsys)
    quick, whole = (json.loads((tmp_path / name / "numbers.json").read_text())
                    for name in ("quick", "whole"))
    assert quick["quick_look"] is True and whole["quick_look"] is False
    assert quick["tables"] == whole["tables"] and len(quick["tables"][0]["rows"]) == 60
    pages = [(tmp_path / name / "report.html").read_text() for name in ("quick", "whole")]
    assert ["A quick look" in page for page in pages] == [True, False]
    assert "(a quick look)" in pages[0] and "arm 59" in pages[0]


@pytest.mark.parametrize("row, clear", [
    (("x", 1.0, (0.5, 1.5), "ahead"), True), (("x", 1.0, (-1.5, -0.5), "behind"), True),
    (("x", 1.0, (-0.5, 1.5), "not rank 2"), False), (("x", 1.0, (0.5, 1.5), "too few"), False),
    (("x", 1.0, (0.5, float("nan")), "ahead"), False), (("x", 1.0, None, "ahead"), False),
    (("x", 1.0, (0.5, 1.5), 3), False)])
def test_a_row_is_clear_by_interval_and_verdict(row, clear):
    assert is_clear(row) == clear


def test_an_empty_first_cell_stands_for_the_one_above():
    table = finding_table(3)
    columns = {**table.columns, "arm": ("", ["first", "", ""]),
               "95%": ("", [(-1.0, 1.0), (0.5, 1.0), (-1.0, 1.0)]),
               "verdict": ("", ["none seen", "ahead", "none seen"])}
    rows = clear_rows(Table("t", "T", columns)).rows
    assert [row[0] for row in rows] == ["first"]


def test_a_summary_says_nothing_twice():
    table = finding_table()
    findings = SimpleNamespace(tables=[table, table], short=("gains",))
    assert summary_of(findings) == ["One idea.", "Another idea."]


def test_the_command_leaves_out_what_belongs_to_a_quick_look():
    typed = {"quick": True, "all": True, "out": "x", "model": "runs/it's"}
    assert command_of("rank", typed) == "python -m research rank --model 'runs/it'\"'\"'s'"
