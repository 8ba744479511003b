"""A second task, to copy from: the answer should end with the largest of the numbers.

    numbers 3 12 7     the prompt ends with an opened <think>, the answer follows:
    " hmm. first 7 - 3 = 4, ...</think>\\n<answer> ( 7 - 3 ) + 12</answer><|im_end|>"
    -> {"reward": 1.1, "format": 1.0, "answer": 1.0, "reasoning": 0.0}

It names every number once, the others in any order; what is between the numbers does not count. So
the tiny model, which writes expressions, can be trained on it as it is:

    python train.py --task examples.largest_last --steps 30

The same task in a few lines, without flags, is in docs/reference/your_own_task.md. For one of your
own with flags copy this file to my_task.py beside train.py and change what the methods do.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py --task examples.largest_last")
import hashlib
import random
import re
from dataclasses import dataclass

from countdown_task import between
from lab.countdown import annotate, read_numbers
from lab.harness.flags import option

PROMPT = "<|im_start|>user\n{numbers} make {total}<|im_end|>\n<|im_start|>assistant\n<think>"
FORMAT_WEIGHT = 0.1
MAX_DRAWS = 100_000  # of held-out problems: a few seconds


@dataclass
class Task:
    """A task, whose fields are flags of train.py. A problem is a tuple of numbers here; it could be
    anything."""
    count: int = option(3, "how many numbers", least=2, most=5)
    largest: int = option(15, "largest number", least=5, most=75)

    solved = "the answer names each number once, the largest last"
    rewarded = f"largest last + {FORMAT_WEIGHT} format"  # only runs with the same one are compared

    def training_problems(self, seed: int, step: int, count: int) -> list[tuple[int, ...]]:
        """The problems of a step, which follow from seed and step alone."""
        rng = random.Random(f"train {seed} {step}")
        return [self.draw(rng, wanted_held_out=False) for _ in range(count)]

    def held_out_problems(self, count: int) -> list[tuple[int, ...]]:
        """Distinct problems, the same in every run; fewer than `count` if no more are found."""
        rng = random.Random("held out")
        problems: dict[tuple[int, ...], None] = {}  # a dict keeps their order
        for _ in range(min(20 * count, MAX_DRAWS)):
            problems[self.draw(rng, wanted_held_out=True)] = None
            if len(problems) == count:
                break
        return list(problems)

    def draw(self, rng: random.Random, wanted_held_out: bool) -> tuple[int, ...]:
        while True:
            numbers = tuple(rng.sample(range(1, self.largest + 1), self.count))
            if is_held_out(numbers) == wanted_held_out:
                return numbers

    def extreme_problems(self) -> list[tuple[int, ...]]:
        """Problems with the longest prompts and every number that occurs, to check that the
        tokenizer can write them."""
        return [(number,) * self.count for number in range(1, self.largest + 1)]

    def prompt_for(self, problem: tuple[int, ...]) -> str:
        """Text that ends where the answer begins. The tiny model only knows prompts such as
        "3 12 7 make 22"; the sum is a target that it can reach in any order."""
        numbers = "".join(f" {number}" for number in problem)
        return PROMPT.format(numbers=numbers, total=sum(problem))

    def show(self, problem: tuple[int, ...]) -> str:
        """A line for people."""
        return " ".join(map(str, problem))

    def read(self, words: list[str]) -> tuple[int, ...]:
        """The problem in words that a person typed, written as `show` writes it."""
        return tuple(read_numbers(words, 2, "two numbers or more, such as 3 12 7"))

    def score(self, problem: tuple[int, ...], text: str) -> dict[str, float]:
        """The reward of any string, and its parts. `answer` counts as success, `reasoning` is not
        judged here."""
        answer = between(text, "<answer>", "</answer>")
        before_answer = text.partition("<answer>")[0]
        well_formed = float(answer is not None and "</think>" in before_answer)
        written = [int(digits) for digits in re.findall("[0-9]{1,9}", answer or "")]
        right = float(sorted(written) == sorted(problem) and written[-1] == max(problem))
        return {"reward": right + FORMAT_WEIGHT * well_formed, "format": well_formed,
                "answer": right, "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        """Section and category of each token, for the tables. Those of Countdown fit here, too."""
        return annotate(pieces)


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """Whether a problem with these numbers, in any order, is held out. A fifth of all sets of
    numbers is, and training never uses them."""
    key = ",".join(map(str, sorted(numbers)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 == 0
