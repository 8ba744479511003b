"""How tools are found and started, and what they refuse."""
import re

import pytest

from conftest import ROOT, refusal
from runs import assert_programs_say_how_to_start, says
from lab.tools import follow, sample


def test_a_tool_that_is_started_as_a_file_says_how_to_start_it():
    names = assert_programs_say_how_to_start("lab/tools")
    listed = re.findall(r"python -m lab (\w+)", says("-m", "lab").stdout)
    assert set(names) <= set(listed) and len(listed) == len(set(listed))


@pytest.mark.parametrize("tool, argv, said", [
    (follow, "TINY", "tiny is not a run folder: it has no config.json of a run"),
    (follow, "RUN --step 9", "run has steps 1 to 3"),
    (follow, "RUN --answer 8", "--answer 8: step 3 has answers 0 to 7"),
    (follow, "RUN --token 1", "--token 1 needs --answer"),
    (sample, "", "are required: RUN, PROBLEM"),
    (sample, "nowhere 3", "nowhere does not exist"),
    (sample, "TINY hello", "expected numbers and then the target"),
    (sample, "TINY 3 5 999999 22", "cannot spell the prompt of the problem 3 5 999999 make 22"),
    (sample, "TINY" + " 3" * 999, "and the model takes 1024")])
def test_wrong_commands(recorded, tool, argv, said):
    named = {"RUN": str(recorded), "TINY": str(ROOT / "models/tiny")}
    assert said in refusal(tool.main, [named.get(word, word) for word in argv.split()])
