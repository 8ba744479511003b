"""The page and the tables on it: what a model wrote stays text, and who is shown first."""

import html
import json
import re

import numpy as np
from conftest import credit_columns, write_log

from analysis import page as page_file
from analysis.tables import Table, by_row
from engine.tokens import load_tokenizer


def test_groups_with_different_rewards_come_first_and_true_credit_is_shown(tmp_path):
    columns = credit_columns([2] * 6, [0, 0, 1, 1, 2, 2], reward=[1, 1, 0, 1, 0, 0]) | {
        "true_credit": np.arange(12, dtype=np.float32) / 10
    }
    folder = write_log(tmp_path / "run", {1: columns})
    found = page_file.episodes_of(folder, load_tokenizer(folder), [1], most_tokens=4)
    assert [e["group"] for e in found] == [1, 1] and found[1]["values"]["true credit"] == [0.6, 0.7]
    assert [e["group"] for e in page_file.episodes_of(folder, load_tokenizer(folder), [1])] == [
        1,
        1,
        0,
        0,
        2,
        2,
    ]


def test_what_a_model_wrote_stays_text(tmp_path):
    nasty = '</script><script>alert(1)</script><!-- & " \u2028'
    episodes = [{"texts": [nasty], "prompt": nasty, "values": {"advantage": [1.0]}}]
    table = Table("x", nasty, {nasty: ("", [nasty])}, nasty, [nasty])
    page_file.write_page(tmp_path / "r.html", nasty, [nasty], [nasty], [table], [], {}, episodes)
    page = (tmp_path / "r.html").read_text()
    assert (
        page.count("<script") == 2
        and page.count("</script>") == 2
        and "alert(1)</script>" not in page
    )
    assert json.loads(re.search(r'id="episodes">(.*?)</script>', page, re.S)[1])[0]["texts"] == [
        nasty
    ]
    assert html.escape(nasty) in page and "innerHTML" not in page


def test_a_table_in_every_form():
    table = Table(
        "t",
        "T",
        by_row(
            {"name": "", "n": ",d", "x": ".2f", "95%": ".1%"},
            [["a|b", 1234, 0.5, (0.1, 0.25)], ["c", 5, None, (float("nan"), 1.0)]],
        ),
    )
    assert table.to_text() == (
        "| name |     n |    x |            95% |\n|------|------:|-----:|---------------:|\n"
        "| a\\|b | 1,234 | 0.50 | 10.0% to 25.0% |\n| c    |     5 |    - |              - |"
    )
    assert table.to_json()["rows"][1] == {"name": "c", "n": 5, "x": None, "95%": [None, 1.0]}
    wide = Table(
        "t", "T", {"name": ("", ["x" * 120, "y" * 90]), "n": ("d", [1, 2])}, keys={"y" * 90: "k"}
    ).to_text()
    assert (
        "| a    |   1 |" in wide
        and "(k) " + "y" * 90 in wide
        and max(map(len, wide.split("\n")[:4])) <= 100
    )
