"""Which of TRL's tables of completions are training batches, told by how TRL writes them.

TRL keeps the last M answers in a queue, M as many as a batch has, and writes all of it at every
update: training puts M answers in at once, an evaluation as many as it has. So the answers of a
file, compared with those of the file before it, are

    all old                          the batch serves one more update: passed over
    old, then fewer than M new       an evaluation's: passed over with the old ones
    all new                          a batch; or an evaluation, or both, and no file says which

Files of the last sort may hold an evaluation where their prompts come again at the end of another
file. These are named.
"""
from collections import defaultdict
from hashlib import sha256


def digest(value) -> str:
    return sha256(repr(value).encode()).hexdigest()


class Queue:
    """The files of a run so far, and which of their steps were batches."""

    def __init__(self):
        self.rows = []         # the digests of the answers in the file before
        self.prompts = {}      # step that was all new -> digests of its prompts, in their order
        self.evaluated = []    # the prompts of evaluations that are known to be some
        self.again = []        # steps that were written once more
        self.evaluations = {}  # step -> how many answers of an evaluation

    def is_new(self, step: int, rows: list[dict]) -> bool:
        """Whether a file, rows in our fields, is a batch of its own. Ask in the files' order."""
        before = self.rows
        self.rows = [digest({**row, "step": 0, "where": ""}) for row in rows]
        prompts = [digest(row["prompt_ids"]) for row in rows]
        old = overlap(before, self.rows)
        if old == len(rows):
            self.again.append(step)
        elif len(set(self.rows[:old])) > 1:  # a single answer may be equal by chance
            self.evaluations[step] = len(rows) - old
            self.evaluated.append(prompts[old:])
        else:
            self.prompts[step] = prompts
        return step in self.prompts

    def perhaps(self) -> dict[int, int]:
        """Steps that may hold an evaluation -> how many of their answers may be of it. Where the
        prompts of most steps come again, as in a small data set, that says nothing."""
        by_last_prompt = defaultdict(list)
        for prompts in [*self.evaluated, *self.prompts.values()]:
            by_last_prompt[prompts[-1]].append(prompts)
        found = {}
        for step, prompts in self.prompts.items():
            others = [other for other in by_last_prompt[prompts[-1]] if other is not prompts]
            if others:
                found[step] = max(common_end(prompts, other) for other in others)
        return found if 2 * len(found) <= len(self.prompts) else {}

    def notes(self) -> list[str]:
        """The sentences in which the page says what was passed over."""
        said = []
        if self.again:
            said.append("These were passed over, because an update wrote them once more: "
                        f"{some(self.again)}.")
        if self.evaluations:
            said.append("These were left out as evaluations: "
                        f"{sum(self.evaluations.values()):,} answers, {some(self.evaluations)}.")
        if self.prompts:
            said.append("TRL writes the answers of an evaluation in the place of those of the "
                        "training step before it. Where all answers of a file are new, it cannot "
                        "be seen that they are of an evaluation.")
        perhaps = self.perhaps()
        if perhaps:
            answers = sum(len(prompts) for prompts in self.prompts.values())
            said.append("These may be evaluations, because their prompts come again: "
                        f"{sum(perhaps.values()):,} of {answers:,} answers, {some(perhaps)}.")
        return said


def overlap(before: list[str], rows: list[str]) -> int:
    """How many rows at the beginning are the last ones of the file before."""
    for count in range(min(len(rows), len(before)), 0, -1):
        if before[-count:] == rows[:count]:
            return count
    return 0


def common_end(prompts: list[str], others: list[str]) -> int:
    """How many prompts at the end are the same in both."""
    count = 0
    for one, other in zip(reversed(prompts), reversed(others)):
        if one != other:
            break
        count += 1
    return count


def some(steps) -> str:
    """The first eight steps, and how many there are if there are more."""
    first = ", ".join(str(step) for step in list(steps)[:8])
    more = f", ... ({len(steps)})" if len(steps) > 8 else ""
    return f"step {first}{more}"
