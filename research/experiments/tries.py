"""The tries in an answer, read from its text.

A try is a sentence that computes: a chain of steps, the last of which has its result, and then a
verdict.

    " first take 7 + 5 = 12 and 12 + 3 = 15 no. last 5 * 3 = 15, 15 + 7 = 22 yes!</think>"
                                         15 no                            22 yes

So an answer to a problem with the target 22 was solved by a later try.
"""
import re
from dataclasses import dataclass

from countdown_task import STEP

TARGET = re.compile(r"\b(?:make|Reach) (\d+)")  # in the two wordings of the prompt
HOW = ("first try", "later try", "another expression")


@dataclass(frozen=True)
class Try:
    result: int                 # what its last step says
    verdict: tuple[int, int]    # from where to where in the text it is judged


def tries_of(text: str) -> list[Try]:
    """Those of the think section, in order."""
    tries = []
    for sentence in re.finditer(r"[^.!?]+[.!?]?", thought(text)):
        steps = list(STEP.finditer(sentence[0]))
        if steps:
            judged_from = sentence.start() + steps[-1].end(4)
            tries.append(Try(int(steps[-1][4]), (judged_from, sentence.end())))
    return tries


def thought(text: str) -> str:
    """The think section; an answer can begin inside of it."""
    return re.split("</think>|<answer>", text)[0]


def target_of(prompt: str) -> int | None:
    asked = TARGET.search(prompt)
    return int(asked[1]) if asked else None


def how_solved(text: str, target: int) -> str:
    """Of a right answer: which try had reached the target before it."""
    results = [attempt.result for attempt in tries_of(text)]
    if results[:1] == [target]:
        return "first try"
    return "later try" if target in results else "another expression"
