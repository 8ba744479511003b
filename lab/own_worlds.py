"""Worlds for `lab exact` of the answers of a run: --rows FILE.jsonl

A line has prompt, reward and length, the number of tokens. The answers to a prompt become at most
four sorts, by reward and then by length, each with its share, mean reward and mean length. The
policy chooses a sort with its first token, and the rest is forced. Lengths are scaled down to 64
tokens. So it is seen what the rewards and lengths of a run do to a mean, and not what tokens do.
"""
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.engine.errors import UserError, read_text
from lab.worlds import LETTERS, Answer, Kind, World, WorldTask

FIRST, TEXTS = "x7A!", "x7<!"  # the first token of each sort, and the first letter of its text
LONGEST, PROBLEMS = 64, 2
Row = tuple[float, float]      # reward and length


class Sort(NamedTuple):
    share: float
    reward: float
    length: float


def sorts_of(rows: list[Row]) -> list[Sort]:
    """At most four: the lower and the higher rewards, and of each the shorter and the longer."""
    rewards = [reward for reward, _ in rows]
    middle = (min(rewards) + max(rewards)) / 2
    found = []
    for is_high in (False, True):
        half = sorted((row for row in rows if (row[0] > middle) == is_high), key=lambda row: row[1])
        for part in (half[:len(half) // 2], half[len(half) // 2:]):
            if part:
                reward, length = (sum(values) / len(part) for values in zip(*part))
                found.append(Sort(len(part) / len(rows), reward, length))
    return found


class OwnTask(WorldTask):
    sorts: list[list[Sort]]

    def score(self, problem: int, text: Any) -> dict[str, Any]:
        reward = self.sorts[problem][TEXTS.index(str(text)[0])].reward
        return {"reward": reward, "answer": 0.0, "format": 0.0, "reasoning": 0.0}


class OwnWorld(World):
    """Its problems are prompts of the run."""

    def __init__(self, about: str, settings: Mapping[str, Any], sorts: list[list[Sort]],
                 sizes: tuple[int, ...]):
        self.sorts = sorts
        longest = max(one.length for own in sorts for one in own)
        self.scale = min(1.0, LONGEST / longest)
        super().__init__(about, settings, 0, Kind(".", (), sizes, len(sorts), LONGEST))

    def make_task(self) -> WorldTask:
        task = OwnTask(self.kind, self.seed)
        task.sorts = self.sorts
        return task

    def continued(self, problem: int, *begun: Any) -> Iterator[Answer]:
        for letter, one in zip(FIRST, self.sorts[problem]):
            length = max(2, round(one.length * self.scale))
            ids = (LETTERS.index(letter), *[LETTERS.index("x")] * (length - 2), 0)
            yield Answer(problem, ids, (1,) * length, True)

    def first_logits(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        logits = torch.zeros(shape).double()
        for (prompt, begun), row in self.beginnings.items():
            if not begun:
                for letter, one in zip(FIRST, self.sorts[len(prompt) - 1]):
                    logits[row, LETTERS.index(letter)] = math.log(one.share)
        return logits


def worlds_from(path: Path, settings: Mapping[str, Any], seeds: int,
                sizes: tuple[int, ...] = ()) -> list[World]:
    """Twice `seeds` worlds of two prompts each, of those whose rewards differ. Groups have the
    file's size, at most 4, and 2."""
    answers = defaultdict[str, list[Row]](list)
    lines = read_text(path).splitlines()
    try:
        for line in lines:
            row = json.loads(line)
            answers[str(row["prompt"])].append((float(row["reward"]), float(row["length"])))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: each line has prompt, reward and length, such as "
                        f'{{"prompt": "p1", "reward": 1, "length": 230}}: {error!r}') from None
    telling = {prompt: rows for prompt, rows in answers.items()
               if len({reward for reward, _ in rows}) > 1}
    if len(telling) < PROBLEMS:
        raise UserError(f"{path} has {len(telling)} prompts with different rewards, and two are "
                        "needed")
    sizes = sizes or (min(4, *map(len, telling.values())), 2)
    pairs = [*itertools.islice(itertools.combinations(telling, PROBLEMS), 10_000)]
    chosen = random.Random(0).sample(pairs, min(len(pairs), 2 * seeds))
    return [OwnWorld(" and ".join(prompt[-15:] for prompt in pair), settings,
                     [sorts_of(telling[prompt]) for prompt in pair], sizes) for pair in chosen]
