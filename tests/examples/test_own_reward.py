"""The reward of one's own: a file that has nothing else is trained on and analysed."""
import runpy

import pytest

import lab.tools.page as analyze
from runs import ROOT, run


@pytest.mark.parametrize("name", ["own_reward", "largest_last", "hackable", "question_answer",
                                  "higher_lower", "calculator"])
def test_an_example_that_is_no_program_says_how_it_is_started(name):
    """As a file it would not find the project's other files."""
    with pytest.raises(SystemExit, match="start it with: python (train|examples)"):
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")


def test_no_line_and_no_table_has_a_column_for_a_format(tmp_path, capsys, undrawn):
    folder = tmp_path / "run"
    printed = run("--task", "examples.own_reward", "--questions", "2", "--answers", "4", "--steps",
                  "1", "--eval_tasks", "8", "--out", folder).stdout
    analyze.main([str(folder)])
    printed += capsys.readouterr().out
    assert "success" in printed and "format" not in printed
    assert ">format<" not in (folder / "analysis/page.html").read_text()
