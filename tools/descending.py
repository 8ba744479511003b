"""A second task, to copy from: write the given numbers in descending order.

    numbers 3 12 7     the prompt ends with an opened <think>, the response follows:
    " hmm. first 12 + 7 = 19 ...</think>\\n<answer> ( 12 + 7 ) + 3</answer><|im_end|>"    right: 12 7 3

The answer may hold anything beside its numbers, so the tiny model's way of writing expressions will
do. It often has the order right without knowing that it matters, and learns quickly that it does:

    python train.py --task tools.descending --steps 30

The class Task is all that the lab asks of a task (docs/your_own_task.md).
"""
import hashlib
import random
import re
from dataclasses import dataclass

from countdown_task import annotate, between
from engine.flags import option

PROMPT = "<|im_start|>user\n{numbers} make {total}<|im_end|>\n<|im_start|>assistant\n<think>"
FORMAT_WEIGHT = 0.1


@dataclass
class Task:
    """Its fields are flags, its problems tuples of numbers."""
    count: int = option(3, "how many numbers", least=2, most=5)
    largest: int = option(15, "largest number", least=1, most=75)

    reward = f"descending order + {FORMAT_WEIGHT} format"

    def training_problems(self, seed: int, step: int, count: int) -> list[tuple[int, ...]]:
        """They follow from seed and step alone."""
        rng = random.Random(f"train {seed} {step}")
        return [self.draw(rng, wanted_held_out=False) for _ in range(count)]

    def held_out_problems(self, count: int) -> list[tuple[int, ...]]:
        """The same ones in every run; none of them is ever trained on."""
        rng = random.Random("held out")
        drawn = [self.draw(rng, wanted_held_out=True) for _ in range(20 * count)]
        return list(dict.fromkeys(drawn))[:count]

    def draw(self, rng: random.Random, wanted_held_out: bool) -> tuple[int, ...]:
        while True:
            numbers = tuple(rng.randint(1, self.largest) for _ in range(self.count))
            if is_held_out(numbers) == wanted_held_out:
                return numbers

    def extreme_problems(self) -> list[tuple[int, ...]]:
        """The longest prompts, with every number that occurs, to try the tokenizer with."""
        return [(number,) * self.count for number in range(1, self.largest + 1)]

    def prompt_for(self, problem: tuple[int, ...]) -> str:
        """Text that ends where the response begins: in the form that the tiny model knows."""
        numbers = "".join(f" {number}" for number in problem)
        return PROMPT.format(numbers=numbers, total=sum(problem))

    def show(self, problem: tuple[int, ...]) -> str:
        """A line for people."""
        return " ".join(map(str, problem))

    def score(self, problem: tuple[int, ...], response: str) -> dict[str, float]:
        """reward = order + 0.1 format. `answer` counts as success; reasoning has no part here."""
        answer = between(response, "<answer>", "</answer>")
        written = [int(digits) for digits in re.findall("[0-9]{1,9}", answer or "")]
        in_order = float(written == sorted(problem, reverse=True))
        well_formed = float(answer is not None and "</think>" in response.partition("<answer>")[0])
        return {"reward": in_order + FORMAT_WEIGHT * well_formed, "format": well_formed,
                "answer": in_order, "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        """Section and kind of each token: Countdown's tags and kinds fit this task, too."""
        return annotate(pieces)


def is_held_out(numbers: tuple[int, ...]) -> bool:
    """A fifth of all sets of numbers, whatever their order."""
    key = ",".join(map(str, sorted(numbers)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 5 == 0
