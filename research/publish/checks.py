"""A published number beside the one that was computed again (recompute.py)."""
from dataclasses import dataclass

CLOSE = 2e-6  # the project reads Student's t off a table of 100,000 steps
Result = dict


@dataclass
class Check:
    """A published number or interval, and what was computed again."""
    what: str
    published: list[float]
    again: list[float]
    tolerance: float = CLOSE

    @property
    def agrees(self) -> bool:
        if len(self.published) != len(self.again):
            return False
        return all(abs(one - two) <= self.tolerance * max(1.0, abs(one))
                   for one, two in zip(self.published, self.again))


def table(result: Result, name: str) -> list[dict]:
    return next(one["rows"] for one in result["tables"] if one["name"] == name)


def ends(cell: dict) -> list[float]:
    return [cell["value"], cell["low"], cell["high"]]
