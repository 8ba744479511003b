"""How long steps take: what is said of a slow one, and how threads wait."""
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from harness.metrics import Pace


def test_a_step_that_takes_five_times_the_usual_is_commented_now_and_then():
    pace = Pace()
    for _ in range(4):
        assert pace.add(2.0) is None
    assert pace.add(20.0) is None  # too few steps to know what is usual
    assert pace.add(9.9) is None
    assert "took 10 s, 5 times the usual 2.0 s" in pace.add(10.0)
    assert [pace.add(seconds) for seconds in [50.0] + 18 * [2.0]] == 19 * [None]
    assert "took 12 s, 6 times the usual 2.0 s" in pace.add(12.0)


def test_what_is_left_is_the_mean_of_the_last_twenty():
    pace = Pace()
    for seconds in [100.0] + 10 * [1.0] + 10 * [3.0]:
        pace.add(seconds)
    assert pace.left(5) == 10.0


BEFORE_TORCH = """
import os, sys
sys.path.insert(0, sys.argv[2])
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            os._exit(7 if os.environ.get("GOMP_SPINCOUNT") == "1000" else 1)
sys.meta_path.insert(0, Watch())
__import__(sys.argv[1])
"""


@pytest.mark.parametrize("name", ["train", "research.probes.exact", "tools.sample",
                                  "benchmarks.speed"])
def test_threads_are_told_how_to_wait_before_torch_is_imported(name):
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", BEFORE_TORCH, name, str(ROOT)]
    assert subprocess.run(command, env=environment).returncode == 7
