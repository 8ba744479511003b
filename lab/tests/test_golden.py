"""The first step of short runs gives the digits that were recorded, on any CPU."""
import json

import pytest

import golden

ROUNDING = ("sampler_gap",)  # it is nothing else


@pytest.mark.numerics
@pytest.mark.parametrize("arm", golden.ARMS)
def test_the_first_step_is_that_of_the_record_on_any_cpu(arm):
    recorded, today = json.loads(golden.ANY.read_text())[arm], golden.first_step(arm)
    assert today["columns"] == recorded["columns"]
    for name, value in recorded["metrics"].items():
        if name not in ROUNDING:
            assert today["metrics"][name] == pytest.approx(value, rel=2e-3, abs=1e-6), name
