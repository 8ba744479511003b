"""How tools are found and started; test_commands.py has what they refuse."""
import re

from runs import assert_programs_say_how_to_start, says


def test_a_tool_that_is_started_as_a_file_says_how_to_start_it():
    names = assert_programs_say_how_to_start("lab/tools")
    listed = re.findall(r"python -m lab (\w+)", says("-m", "lab").stdout)
    assert set(names) <= set(listed) and len(listed) == len(set(listed))
