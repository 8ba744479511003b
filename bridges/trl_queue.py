"""Which of TRL's tables of completions are training batches, told by how TRL writes them.

TRL keeps the last M answers in a queue, M as many as a batch has, and writes all of it at every
update: training puts M answers in at once, an evaluation as many as it has. So the answers of a
file, compared with those of the file before it, are

    all old                          the batch serves one more update: passed over
    old, then fewer than M new       an evaluation's: passed over with the old ones
    all new                          a batch; or an evaluation, or both, and no file says which

Without this an answer would count as often as its batch was used. `CreditGRPOTrainer`
(trl_trainer.py) records a run while it trains, and needs none of this.
"""
from hashlib import sha256


class Queue:
    """What the file before held, and what was passed over so far."""

    def __init__(self):
        self.rows = []         # the digests of the answers in the file before
        self.again = []        # steps that were written once more
        self.evaluations = {}  # step -> how many answers of an evaluation
        self.has_batch = False

    def is_new(self, step: int, rows: list[dict]) -> bool:
        """Whether a file, rows in our fields, is a batch of its own. Ask in the files' order."""
        before = self.rows
        self.rows = [digest({**row, "step": 0, "where": ""}) for row in rows]
        old = overlap(before, self.rows)
        if old == len(rows):
            self.again.append(step)
            return False
        if len(set(self.rows[:old])) > 1:  # a single answer may be equal by chance
            self.evaluations[step] = len(rows) - old
            return False
        self.has_batch = True
        return True

    def notes(self) -> list[str]:
        """The sentences in which the page says what was passed over."""
        said = []
        if self.again:
            said.append("These were passed over, because an update wrote them once more: "
                        f"{some(self.again)}.")
        if self.evaluations:
            said.append("These were left out as evaluations: "
                        f"{sum(self.evaluations.values()):,} answers, {some(self.evaluations)}.")
        if self.has_batch:
            said.append("TRL writes the answers of an evaluation in the place of those of the "
                        "training step before it. Where all answers of a file are new, it cannot "
                        "be seen that they are of an evaluation.")
        return said


def digest(value) -> str:
    return sha256(repr(value).encode()).hexdigest()


def overlap(before: list[str], rows: list[str]) -> int:
    """How many rows at the beginning are the last ones of the file before."""
    for count in range(min(len(rows), len(before)), 0, -1):
        if before[-count:] == rows[:count]:
            return count
    return 0


def some(steps) -> str:
    """The first eight steps, and how many there are if there are more."""
    first = ", ".join(str(step) for step in list(steps)[:8])
    more = f", ... ({len(steps)})" if len(steps) > 8 else ""
    return f"step {first}{more}"
