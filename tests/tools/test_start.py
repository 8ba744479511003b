"""How tools are found and started."""
import re
import subprocess
import sys

from conftest import ROOT, project_files


def says(*argv):
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)


def test_a_tool_that_is_started_as_a_file_says_how_to_start_it():
    """And `python -m tools` lists it."""
    programs = [path.stem for path in project_files("tools/*.py")
                if "run_as_program(" in path.read_text()]
    assert "follow" in programs
    for name in programs:
        ended = says(f"tools/{name}.py")
        assert (ended.returncode, ended.stderr) == (1, f"start it with: python -m tools.{name}\n")
    assert re.findall(r"python -m tools\.(\w+)", says("-m", "tools").stdout) == sorted(programs)
