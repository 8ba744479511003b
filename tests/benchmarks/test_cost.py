"""The table of what each arm costs."""
import pytest

from harness.command_line import read_flags
from engine.errors import UserError
from harness.registry import MITIGATIONS
from harness.settings import make_settings


def test_the_table_of_costs_by_hand(capsys):
    """Two steps of an arm against two of plain GRPO, and every weighting has its row."""
    from benchmarks import cost

    def line(credit, update, memory, extra=0):
        return {
            "credit_seconds": credit, "update_seconds": update, "seconds": 2.0, "tokens": 100,
            "extra_tokens": extra, "peak_memory_bytes": memory * 2 ** 20
        }
    plain = [line(0.0, 1.0, 600), line(0.002, 1.0, 610)]
    row = cost.row("gae", [line(0.5, 1.1, 640, 250), line(0.502, 1.1, 650, 250)], plain)
    assert row == "| gae | 501.0 | +25.0% | 1100 | +30% | 2.5 | 129 | +40 |"
    assert set(MITIGATIONS) <= set(cost.ARMS)
    assert all(make_settings(read_flags(argv)) for argv in cost.ARMS.values())
    with pytest.raises(UserError, match="no arm gea; there are: none"):
        cost.main(["gea"])
