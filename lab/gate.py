"""What changed since `lab exact --write FILE`: --baseline FILE, for a check in CI.

The sums are exact, so a difference is the code's, and no luck is in it. A lower cosine or more
noise is worse, and the exit status is 1. Another length is said, because it acts as another
learning rate. If other worlds were judged, or none, it is not compared, and the status is 2.
"""
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lab.engine.errors import UserError, read_text

LEAST = {"cosine": 1e-4, "noise": 0.01, "length": 0.01}  # differences that count; shares but cosine


class InWorld(Protocol):
    """What was found in a world, such as Mean of lab/exact.py. The key is a hash of its numbers."""
    world: Any
    key: Any
    cosine: Any
    noise: Any
    length: Any


Found = Mapping[str, Sequence[InWorld]]  # by the name of what was judged
Numbers = dict[str, Any]                 # of a world


def write(path: Path, found: Found) -> None:
    path.write_text(json.dumps(as_numbers(found), indent=1) + "\n", "utf-8")


def as_numbers(found: Found) -> dict[str, dict[str, Numbers]]:
    """JSON has no infinity, so there it is null."""
    numbers: dict[str, dict[str, Numbers]] = {name: {} for name in found}
    for name, means in found.items():
        for mean in means:
            values = {one: getattr(mean, one) for one in LEAST}
            finite = {one: value if math.isfinite(value) else None for one, value in values.items()}
            numbers[name][mean.key] = {"world": mean.world, **finite}
    return numbers


def compare(path: Path, found: Found) -> tuple[list[str], int]:
    """Sentences, and the exit status."""
    text = read_text(path)
    try:
        earlier = {name: dict(worlds) for name, worlds in json.loads(text).items()}
        said, statuses = [], [0]
        for name, now in as_numbers(found).items():
            sentences, status = changes(name, earlier.get(name, {}), now)
            said += sentences
            statuses.append(status)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no file of lab exact --write: {error!r}") from None
    return said or ["No change since the baseline."], max(statuses)


def changes(name: str, old: Mapping[str, Numbers], new: Mapping[str, Numbers]
            ) -> tuple[list[str], int]:
    """Sentences about one method, each with the world where most changed, and the status."""
    both = [key for key in old if key in new]
    if not both or len(both) < max(len(old), len(new)):
        said = f"{name}: of {len(old)} worlds of the baseline {len(both)} were judged now"
        return [f"{said}. --write makes another one."], 2
    sentences, status = [], 0
    for what, least in LEAST.items():
        worse = {key: much_worse(what, old[key][what], new[key][what]) for key in both}
        changed = [key for key in both if worse[key] > least]
        if changed:
            most = max(changed, key=lambda key: worse[key])
            sentences.append(f"{name}: the {what} was {shown(old[most][what])}, and is "
                             f"{shown(new[most][what])} in: {new[most]['world']}. In "
                             f"{len(changed)} of {len(both)} worlds it is "
                             f"{'another' if what == 'length' else 'worse'}.")
            status = 1 if what != "length" else status
    return sentences, status


def much_worse(what: str, old: float | None, new: float | None) -> float:
    """How much worse a number is; of a length, how far it is from the old one."""
    if old is None or new is None:
        return math.inf if new is None and old is not None else 0.0
    if what == "cosine":
        return old - new
    if what == "length":
        return abs(new - old) / max(abs(old), 1e-9)
    return new / old - 1 if old else 0.0


def shown(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4f}"
