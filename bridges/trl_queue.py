"""Training and evaluation told apart in TRL's tables of completions, by how they are written.

TRL keeps the last M answers in a queue, M as many as a batch has, and writes all of it at every
update: training puts M answers in at once, an evaluation as many as it has. So of a file beside the
one before it

    nothing is new                   the batch serves one more update: passed over
    less than M are new, at the end  they are an evaluation's: passed over with the old ones
    all are new                      a batch; or an evaluation, or both, and no file says which

Of the last kind those are named whose prompts come again at the end of another file.
"""
from collections import defaultdict
from hashlib import sha256


def digest(value) -> str:
    return sha256(repr(value).encode()).hexdigest()


class Queue:
    def __init__(self):
        self.rows = []         # of the file before
        self.prompts = {}      # of each step that was all new: its prompts, in their order
        self.evaluated = []    # those of evaluations that are known to be
        self.again, self.evaluations = [], {}  # steps; and how many answers of each

    def is_new(self, step: int, rows: list[dict]) -> bool:
        """Whether a file, rows in our fields, is a batch of its own. It is asked in their order."""
        before, size = self.rows, len(rows)
        self.rows = [digest({**row, "step": 0, "where": ""}) for row in rows]
        prompts = [digest(row["prompt_ids"]) for row in rows]
        old = next((n for n in range(min(size, len(before)), 0, -1)
                    if before[-n:] == self.rows[:n]), 0)
        if old == size:
            self.again.append(step)
        elif len(set(self.rows[:old])) > 1:  # one equal answer may be chance
            self.evaluations[step] = size - old
            self.evaluated.append(prompts[old:])
        else:
            self.prompts[step] = prompts
        return step in self.prompts

    def perhaps(self) -> dict[int, int]:
        """Steps that may hold an evaluation, and how many of their answers may be of it. Where the
        prompts of most steps come again, as in a small data set, they tell nothing."""
        ends = defaultdict(list)
        for prompts in [*self.evaluated, *self.prompts.values()]:
            ends[prompts[-1]].append(prompts)
        found = {step: max((common_end(prompts, other) for other in ends[prompts[-1]]
                            if other is not prompts), default=0)
                 for step, prompts in self.prompts.items()}
        found = {step: count for step, count in found.items() if count}
        return found if 2 * len(found) <= len(self.prompts) else {}

    def notes(self) -> list[str]:
        """What the page says of it."""
        perhaps, answers = self.perhaps(), sum(map(len, self.prompts.values()))
        sentences = (
            (self.again, f"Passed over as written once more, at an update: {some(self.again)}."),
            (self.evaluations, f"Left out as evaluations: {sum(self.evaluations.values()):,} "
             f"answers, {some(self.evaluations)}."),
            (self.prompts, "TRL writes an evaluation over answers of the training step before it, "
             "and where a file is all new, no file says so."),
            (perhaps, "Perhaps evaluations, by prompts that come again: "
             f"{sum(perhaps.values()):,} of {answers:,} answers, {some(perhaps)}."))
        return [sentence for holds, sentence in sentences if holds]


def common_end(prompts: list[str], others: list[str]) -> int:
    pairs = zip(reversed(prompts), reversed(others))
    return next((n for n, (one, other) in enumerate(pairs) if one != other),
                min(len(prompts), len(others)))


def some(steps) -> str:
    """The first of them, and how many there are."""
    return f"step {', '.join(map(str, [*steps][:8]))}" + f", ... ({len(steps)})" * (len(steps) > 8)
