"""How far a long computation is. The engine notes what is done of how much, and the status line of
a terminal shows it while a stage of a step takes its time (harness/screen.py)."""
from collections.abc import Iterator

from torch import Tensor

done = ""  # such as "16 of 64 answers"


def note(text: str) -> None:
    global done
    done = text


def over_answers(parts: list[Tensor]) -> Iterator[Tensor]:
    """The micro-batches, one after the other. Before each it is noted how many answers are done."""
    total, so_far = sum(map(len, parts)), 0
    for part in parts:
        note(f"{so_far} of {total} answers")
        yield part
        so_far += len(part)
