"""The programs that measure: their cases, flags and tables. Nothing is timed."""
from dataclasses import replace

import pytest

from benchmarks import cases, gpu
from benchmarks.cases import Case
from conftest import assert_bounded
from engine.errors import UserError

SMALL = Case("rollout", questions=2, answers=2, new_tokens=8, micro_batch=3)


@pytest.mark.parametrize("what, flags", [
    ("rollout", {}), ("update", {}), ("step", {}),
    ("step", {"dtype": "bfloat16", "checkpointing": True, "offload_optimizer": True})])
def test_every_kind_of_work_counts_its_tokens(what, flags):
    assert cases.work_of(replace(SMALL, what=what, **flags))() == {"tokens": 32}


def test_every_number_has_bounds_and_its_defaults_lie_within():
    assert_bounded(gpu.FLAGS)


@pytest.mark.parametrize("argv", [[], ["--help"], ["3"], ['{"what": "rollout", "x": 3}'], ["{}"]])
def test_what_is_no_case(argv):
    with pytest.raises(UserError, match="one case as JSON.*what, size, model"):
        cases.main(argv)
