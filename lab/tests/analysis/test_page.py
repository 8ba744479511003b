"""What stands around the tables: sentences, each figure by hand; the page, and what is printed."""

import html
import json
import os
import re

import numpy as np
from conftest import credit_columns, evaluation, write_log

import lab.tools.page as analyze
from lab.analysis import html_page as page_file
from lab.analysis.answers import answers_of
from lab.analysis.report import task_in_words
from lab.analysis.run_folders import Run
from lab.analysis.tables import Table, by_row, shown


def test_groups_with_different_rewards_come_first_and_true_credit_is_shown(tmp_path):
    """Two answers at least, however little room there is; of a group the best and the worst."""
    columns = credit_columns([5, *[2] * 6], [0, 0, 1, 1, 1, 2, 2], reward=[1, 1, 0, 1, 0.1, 0, 0],
                             true_credit=np.arange(17, dtype=np.float32))
    folder = write_log(tmp_path / "run", {1: columns})
    found = answers_of(Run(folder), most_tokens=1)
    assert [e["episode"] for e in found] == [3, 2] and found[0]["values"]["credit"] == [9, 10]
    assert [e["episode"] for e in answers_of(Run(folder))] == [3, 2, 4, 0, 1, 5, 6]
    assert len(answers_of(Run(folder), most_tokens=6)) == 3  # of two tokens each
    assert next(iter(found[0]["values"])) == "gradient size"  # what tokens are shaded by at first


def test_the_page_has_every_evaluation_with_its_answers_to_a_few_problems(tmp_path):
    def shown(text, **more):
        return [{"problem": "1 2 make 3", "text": text, "answer": 1, **more}]

    sure = {"texts": ["x", "<y"], "log_prob": [-1, -2]}
    lines = [{**evaluation(step, [0, 1]), "shown": answers} for step, answers in (
        (0, shown("x<y", **sure)), (8, []), (10, shown("x<y", **sure)))]
    greedy = {**evaluation(10, [1, 1], "greedy"), "shown": shown("x<y", **sure)}
    folder = write_log(tmp_path / "run", {}, evaluations=[*lines, greedy])
    analyze.main([str(folder)])
    known = data_of((folder / "analysis/page.html").read_text())
    answer = shown("x<y", **sure)[0] | {"outcome": "right"}
    said = "50.0% of the held-out problems were solved"
    assert known == ([], [{"step": step, "mode": "sampled", "said": said, "shown": [answer]}
                          for step in (0, 10)])


def data_of(page):
    known = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    return known["answers"], known["evaluations"]


def test_what_a_model_wrote_stays_text(tmp_path):
    nasty = '</script><script>alert(1)</script><!-- & " \u2028'
    answers = [{"step": 1, "answer": 1, "texts": [nasty], "prompt": nasty,
                "values": {"gradient size": [1.0]}}]
    table = nasty, [nasty], [[nasty, nasty]]
    picture = tmp_path / "a.png"
    picture.write_bytes(b"")
    nasty_name = os.fsdecode(b"a\xff")  # a folder's, in bytes that are no text
    page_file.write_page(tmp_path / "r.html", nasty_name, [nasty_name])
    assert (tmp_path / "r.html").read_text().count("a?") == 3
    body = [page_file.paragraphs([nasty]), page_file.viewer(page_file.figure_of(picture, nasty)),
            page_file.section_of(table), page_file.folded(nasty, [])]
    told = [{"step": 1, "shown": [{"problem": nasty, "text": nasty, "texts": [nasty]}]}]
    page_file.write_page(tmp_path / "r.html", nasty, body, answers, told)
    page = (tmp_path / "r.html").read_text()
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "alert(1)</script>" not in page and "innerHTML" not in page
    assert data_of(page) == (answers, told)
    assert page.count(html.escape(nasty)) >= 10


def test_the_first_sentence_names_the_task_and_not_its_file():
    for config in ({"task": "countdown_task"}, {"numbers": "3"}):  # of the lab, of the book
        assert task_in_words(config).startswith(
            "In Countdown a problem is solved if the expression makes the target")


def test_a_table_in_every_form():
    rows = [["a|b", 1234, 0.5, (0.1, 0.25)], ["c", 5, None, (float("nan"), 1.0)]]
    table = Table("t", "T", by_row({"name": "", "n": ",d", "x": ".2f", "95%": ".1%"}, rows))
    assert table.to_text() == (
        "| name |     n |    x |            95% |\n|------|------:|-----:|---------------:|\n"
        "| a\\|b | 1,234 | 0.50 | 10.0% to 25.0% |\n| c    |     5 |    - |              - |"
    )
    assert table.to_json()["rows"][1] == {"name": "c", "n": 5, "x": None, "95%": [None, 1.0]}


def test_answers_on_a_page_are_of_steps_that_are_evenly_spaced(tmp_path):
    """Of 41 steps 21, each second one. Answers have four tokens, and 210 fit: ten of a step, so two
    answers."""
    columns = credit_columns([4] * 5, [0] * 5)
    folder = write_log(tmp_path / "run", dict.fromkeys(range(1, 42), columns))
    found = answers_of(Run(folder), most_tokens=210)
    assert sorted({one["step"] for one in found}) == list(range(1, 42, 2)) and len(found) == 42
    assert len(answers_of(Run(folder), most_tokens=21 * 12)) == 21 * 3
    np.savez(folder / "credit/step_000002.npz", **columns, change=np.zeros(20))
    assert {one["step"] for one in answers_of(Run(folder))} == {2}  # its change was measured


def test_no_cell_shows_an_undefined_number_or_a_p_of_0():
    assert [shown(p, "p") for p in (0.00099, 0.001, 0.0499)] == ["<0.001", "0.001", "0.050"]
    nan, inf = float("nan"), float("inf")
    columns = {"x": (".1f", [nan, -inf]), "95%": (".1f", [(0.1, inf), (nan, 0.2)])}
    assert Table("t", "T", columns).cells() == [["-", "-"], ["-", "-"]]
