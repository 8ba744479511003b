"""The page and the tables on it: what a model wrote stays text, and who is shown first."""

import html
import json
import re

import numpy as np
from conftest import credit_columns, write_log
from logs import tallied

from analysis import page as page_file
from analysis.answers import answers_of, first_shown
from analysis.tables import NOTHING, Table, by_row, show_in_short
from engine.tokens import load_tokenizer


def test_groups_with_different_rewards_come_first_and_true_credit_is_shown(tmp_path):
    columns = credit_columns([2] * 6, [0, 0, 1, 1, 2, 2], reward=[1, 1, 0, 1, 0, 0],
                             true_credit=np.arange(12, dtype=np.float32) / 10)
    folder = write_log(tmp_path / "run", {1: columns})
    found = answers_of(folder, load_tokenizer(folder), [1], {}, most_tokens=3)
    assert [e["group"] for e in found] == [1, 1] and found[1]["values"]["true credit"] == [0.6, 0.7]
    everything = answers_of(folder, load_tokenizer(folder), [1], {})
    assert [e["group"] for e in everything] == [1, 1, 0, 0, 2, 2]
    assert next(iter(found[0]["values"])) == "gradient size"  # what tokens are shaded by at first


def test_the_page_starts_with_an_answer_of_the_first_step_and_one_of_the_last(tmp_path):
    """Solved, from a group with a gradient."""
    def columns(rewards):
        return credit_columns([1, 3, 2, 2], [0, 0, 1, 1], reward=rewards, reward_answer=rewards)

    files = {1: columns([0, 1, 0, 1]), 3: columns([0, 1, 1, 1]), 5: columns([0, 0, 1, 0])}
    folder = write_log(tmp_path / "run", files)
    answers = answers_of(folder, load_tokenizer(folder), [1, 3, 5], {})
    shown = [answers[place] for place in first_shown(answers)]
    assert [(a["step"], a["episode"]) for a in shown] == [(1, 1), (5, 2)]
    one_step = answers_of(folder, load_tokenizer(folder), [5], {})
    assert len(first_shown(one_step)) == 1 and first_shown([]) == []


def test_left_and_right_are_the_same_problem_where_it_was_asked_twice(tmp_path):
    """Problem 7 in steps 1 and 3, 8 in 2 and 5, with different rewards; 9 in 1 and 6, but all of
    step 6 got the same; 5 only in neighbouring steps."""
    def columns(first, second, rewards=(0, 1, 0, 1)):
        return credit_columns([2] * 4, [0, 0, 1, 1], reward=rewards, reward_answer=rewards,
                              prompt_ids=[first, second], prompt_start=[0, 1])

    files = {1: columns(7, 9), 2: columns(5, 8), 3: columns(5, 7), 4: columns(1, 2),
             5: columns(8, 3), 6: columns(4, 9, (1, 1, 1, 1))}
    folder = write_log(tmp_path / "run", files)
    tally = tallied(folder)
    assert tally.asked_twice() == {2: 1, 5: 0}
    answers = answers_of(folder, tally.tokenizer, [1, 2, 5, 6], {2: 1, 5: 0}, most_tokens=4)
    left, right = (answers[place] for place in first_shown(answers))
    assert (left["step"], left["group"], right["step"], right["group"]) == (2, 1, 5, 0)
    assert left["prompt"] == right["prompt"]
    (folder / "credit/step_000005.npz").unlink()
    assert tallied(folder).asked_twice() == {1: 1, 6: 1}
    for step in (3, 6):
        (folder / f"credit/step_00000{step}.npz").unlink()
    assert tallied(folder).asked_twice() == {}


def test_what_a_model_wrote_stays_text(tmp_path):
    nasty = '</script><script>alert(1)</script><!-- & " \u2028'
    answers = [{"step": 1, "answer": 1, "texts": [nasty], "prompt": nasty,
                "values": {"gradient size": [1.0]}}]
    table = Table("x", nasty, {nasty: ("", [nasty])}, nasty, [nasty])
    picture = tmp_path / "a.png"
    picture.write_bytes(b"")
    body = [*page_file.report_body([nasty], [nasty], [table], (picture, nasty), True),
            page_file.folded(nasty, [])]
    page_file.write_page(tmp_path / "r.html", nasty, body, answers)
    page = (tmp_path / "r.html").read_text()
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "alert(1)</script>" not in page and "innerHTML" not in page
    data = re.search(r'id="episodes">(.*?)</script>', page, re.S)[1]
    assert json.loads(data)[0]["texts"] == [nasty]
    assert page.count(html.escape(nasty)) >= 10 and page.count("<figure") == 1


def test_a_page_for_screen_readers(tmp_path):
    table = Table("a b", "T", {"kind": ("", ["word"]), "n": ("d", [1])}, headings={"n": "how many"})
    picture = tmp_path / "a.png"
    picture.write_bytes(b"")
    text = page_file.section_of(table, [(picture, "what is seen")])
    assert "<th scope=col>kind</th><th scope=col class=n>how many</th>" in text
    assert "<tr><th scope=row>word</th><td class=n>1</td></tr>" in text
    assert 'role=region tabindex=0 aria-label="T"' in text and 'alt="what is seen"' in text
    assert "aria-labelledby=\"a-b-title\"" in text and "id=a-b-title" in text


def test_a_table_in_every_form():
    rows = [["a|b", 1234, 0.5, (0.1, 0.25)], ["c", 5, None, (float("nan"), 1.0)]]
    table = Table("t", "T", by_row({"name": "", "n": ",d", "x": ".2f", "95%": ".1%"}, rows))
    assert table.to_text() == (
        "| name |     n |    x |            95% |\n|------|------:|-----:|---------------:|\n"
        "| a\\|b | 1,234 | 0.50 | 10.0% to 25.0% |\n| c    |     5 |    - |              - |"
    )
    assert table.to_json()["rows"][1] == {"name": "c", "n": 5, "x": None, "95%": [None, 1.0]}


def test_a_wide_table_is_wrapped():
    """Headings first, then texts; numbers never."""
    table = Table("t", "T", {"arm": ("", ["one " * 30, "two"]), "n": ("d", [10**20, 2])},
                  headings={"n": "a long heading of several words"})
    lines = table.to_text(60).split("\n")
    assert {len(line) for line in lines} == {60} and f"{10**20} |" in lines[3]
    assert lines[0].split("|")[2].strip() == "a long heading of" and lines[-1].startswith("| two ")
    assert table.to_text(1000).split("\n")[0].endswith("a long heading of several words |")


def test_neither_cell_nor_finding_shows_an_undefined_number():
    nan, inf = float("nan"), float("inf")
    columns = {"x": (".1f", [nan, -inf]), "95%": (".1f", [(0.1, inf), (nan, 0.2)])}
    table = Table("t", "T", columns, f"It went from 0.5 to {nan:.2f}.")
    assert table.cells() == [["-", "-"], ["-", "-"]] and table.finding == NOTHING
    assert Table("t", "T", {}, "after 'nan' and information").finding != NOTHING


def test_in_short_is_a_screen(capsys):
    rows = {"a": ("d", list(range(100)))}
    show_in_short(["word " * 400, "once", "once", NOTHING], [Table("t", "T", rows)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 35 and lines[-1] == "... 76 more lines with --all"
    assert lines.count("- once") == 1 and lines[4].endswith(" ...") and max(map(len, lines)) <= 100
