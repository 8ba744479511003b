"""Short runs give the digits that they gave when they were recorded, on the same kind of CPU; their
first step gives them on any."""
import json

import pytest

import golden


@pytest.mark.numerics
@pytest.mark.parametrize("arm", golden.ARMS)
def test_the_digits_are_those_of_the_record(arm):
    path = golden.RECORDS / f"{golden.kind_of_cpu()}.json"
    if not path.exists():
        pytest.skip(f"tests/digits/ has no {path.name}, the digits of this kind of CPU; to record "
                    "them before a change: python -m lab.tests.golden --record")
    recorded, today = json.loads(path.read_text())[arm], golden.digits_of(arm)
    different = [name for name, digits in recorded.items() if today.get(name) != digits]
    assert not different, (f"{arm} has other digits than in {path.name}: {', '.join(different)}. "
                           "If they are meant to be: python -m lab.tests.golden --record")


ROUNDING = ("sampler_gap",)  # it is nothing else


@pytest.mark.numerics
@pytest.mark.parametrize("arm", golden.ON_ANY)
def test_the_first_step_is_that_of_the_record_on_any_cpu(arm):
    recorded, today = json.loads(golden.ANY.read_text())[arm], golden.first_step(arm)
    assert today["columns"] == recorded["columns"]
    for name, value in recorded["metrics"].items():
        if name not in ROUNDING:
            assert today["metrics"][name] == pytest.approx(value, rel=2e-3, abs=1e-6), name
