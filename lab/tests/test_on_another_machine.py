"""A machine unlike ours: torch's plainest kernels, no /proc and nothing that Linux alone has, the
locale C, a home that cannot be written, and a path with a blank and an umlaut."""
import os
import subprocess
import sys

import pytest
from lab_runs import copy_project

pytestmark = pytest.mark.slow

# Takes away what other systems do not have, and then runs the program.
WITHOUT_LINUX = """
import builtins, ctypes, io, os, runpy, sys, threading

if hasattr(os, "sched_getaffinity"):
    del os.sched_getaffinity
armed = threading.Event()  # set once torch is imported: it may read /proc itself

def refuse_proc(event, arguments):
    name = str(arguments[0]) if arguments else ""
    if armed.is_set() and event == "open" and name.startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", name)

class WithoutGlibc(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("malloc_trim", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)

sys.path.insert(0, os.getcwd())
import lab.engine
import torch
ctypes.CDLL = WithoutGlibc
sys.modules.update(fcntl=None, resource=None)
sys.addaudithook(refuse_proc)
armed.set()
script = sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "mein Häuschen"
    folder.mkdir()
    return copy_project(folder, "models")


def there(folder, *command):
    """What a command prints on that machine."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": "/dev/null/home", "LC_ALL": "C", "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    result = subprocess.run([sys.executable, "-c", WITHOUT_LINUX, *command], cwd=folder,
                            env=environment, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


LAB_TRAIN = "import sys\nfrom lab.run import main\nmain(sys.argv[1:])\n"


@pytest.mark.parametrize("door, more", [("train.py", ()), ("lab_train.py", ("--lora", "1"))])
def test_a_step_is_trained_and_analysed_on_a_machine_unlike_ours(elsewhere, door, more):
    (elsewhere / "lab_train.py").write_text(LAB_TRAIN)
    out = f"läufe/one run{len(more)}"
    there(elsewhere, door, "--questions", "2", "--answers", "4", "--steps", "1",
          "--max_new_tokens", "48", "--eval_tasks", "4", "--out", out, *more)
    said = there(elsewhere, "analyze.py", out)
    assert "Where the gradient went" in said
    assert (elsewhere / out / "analysis/report.html").is_file()
    assert "2/2" in there(elsewhere, door, "--resume", out, "--steps", "2")


ASKED = """
from lab.harness import memory
from lab.tools import planned_runs as runs
print(runs.usable_cores() >= 1)
memory.keep_memory()
memory.return_memory()
"""


def test_cores_and_memory_are_known_without_linux(elsewhere):
    (elsewhere / "asked.py").write_text(ASKED)
    assert there(elsewhere, "asked.py") == "True\n"
