"""How a loss counts tokens: which weight each answer's tokens have, and which tokens there are.

A `Count` is one hypothesis, such as "every answer counts the same". Its weights (B,) are those of
one token of each answer. They are compared with what was read off the gradient, up to a factor
that has to be the same in batches of other sizes.
"""
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.helpers.formula_batches import Case

MICRO_BATCHES = (2, 4, 8)


def places(case: Case) -> dict[str, Tensor]:
    """(B, L) bool for each kind of token. `end` is the end token of an answer, and `cut` is the
    last token of an answer that reached the limit, and so has no end token. `unfinished` are all
    tokens of such an answer."""
    place = torch.arange(case.ids.shape[1])[None]
    start = case.prompt_length[:, None]
    stop = start + case.length[:, None]
    last, ended = place == stop - 1, case.ended[:, None]
    readable = case.lens.to_tokens(torch.ones(case.ids.shape)) > 0
    return {"prompt": (place < start - 1) & readable,
            "prompt_last": (place == start - 1) & readable,
            "first": place == start,
            "middle": (place > start) & (place < stop - 1),
            "end": last & ended, "cut": last & ~ended,
            "padding_first": (place == stop) & readable,
            "padding_rest": (place > stop) & readable,
            "unfinished": case.mask & ~ended}


def tokens_of(case: Case, kinds: frozenset[str]) -> Tensor:
    """(B, L) bool: the tokens of these kinds; those of unfinished answers only if they are among
    the kinds."""
    found = torch.zeros(case.ids.shape, dtype=torch.bool)
    for name, where in places(case).items():
        if name in kinds and name != "unfinished":
            found |= where
    return found if "unfinished" in kinds else found & case.ended[:, None]


LENGTHS = {  # what is counted as an answer's length, in words
    "": "", "trained": "counted by the tokens that have a gradient",
    "without end": "counted without the end token",
    "finished": "those of answers that did not end left out",
    "with prompt": "the prompt's tokens included",
    "with prompt but the first": "the prompt's tokens but the first included",
    "one more": "where an answer has one token more than it has"}


@dataclass(frozen=True)
class Count:
    code: str      # a word for --expect
    words: str     # a sentence about a token's share
    weights: Callable[[Case], Tensor]  # (B,)
    cost: int = 0  # among counts that fit, the one with the lowest cost is named


Trained = Callable[[Case], Tensor]  # (B, L) bool: the tokens that have a gradient


def length_named(case: Case, name: str, trained: Trained) -> Tensor:
    """What a code may take for the length of an answer (B,), by the names of LENGTHS."""
    answer, prompt = case.length, case.prompt_length
    if name == "trained":
        answer = trained(case).sum(1)
    if name == "without end":
        answer = answer - case.ended.long()
    if name == "finished":
        answer = answer * case.ended
    if name.startswith("with prompt"):
        answer = answer + prompt - (1 if name == "with prompt but the first" else 0)
    if name == "one more":
        answer = answer + 1
    return answer.double()


def is_live(case: Case) -> Tensor:
    """(B,) bool: the answers of groups with unequal rewards."""
    groups = int(case.group.max()) + 1
    most = torch.full((groups,), -torch.inf, dtype=torch.float64)
    most = most.scatter_reduce(0, case.group, case.reward, "amax")
    least = -torch.full((groups,), -torch.inf, dtype=torch.float64)
    least = least.scatter_reduce(0, case.group, case.reward, "amin")
    return (most - least > 1e-12)[case.group]


def is_good(case: Case) -> Tensor:
    groups = int(case.group.max()) + 1
    total = torch.zeros(groups, dtype=torch.float64).index_add(0, case.group, case.reward)
    return case.reward > total[case.group] / case.group.bincount()[case.group]


def is_right(case: Case) -> Tensor:
    return case.reward > .5


OTHERS = {"right": ("whose reward is above 0.5", is_right),
          "good": ("whose reward is above the mean of its group", is_good)}
SHARES = {"live": ("of groups with unequal rewards (GPG)", is_live),
          "rewarded": ("whose reward is not 0", lambda case: case.reward != 0)}
WIDTHS = {
    "longest answer": lambda case: case.length.max(),
    "width of a row": lambda case: torch.tensor(case.ids.shape[1]),
    "width of a row less one": lambda case: torch.tensor(case.ids.shape[1] - 1),
    "width less the shortest prompt": lambda case: case.ids.shape[1] - case.prompt_length.min(),
    "width less the longest prompt": lambda case: case.ids.shape[1] - case.prompt_length.max(),
    "number of answers whose reward is above 0.5": lambda case: is_right(case).sum().clamp(1)}


def counts(trained: Trained) -> list[Count]:
    """All hypotheses, the simple ones first."""
    found = [Count("flat", "every token counts the same", lambda case: torch.ones(len(case.ids)))]
    for name, width in WIDTHS.items():
        found.append(Count(f"over {name}", f"every token counts 1 / ({name})",
                           divided_by_width(width), 1))
    for name, (whose, kept) in SHARES.items():
        found.append(Count(f"token over {name} share", "every token of the batch counts the same, "
                           f"times the answers / the answers {whose}", by_token_over(kept), 4))
    for index, name in enumerate(LENGTHS):
        def length(case: Case, name: str = name) -> Tensor:
            return length_named(case, name, trained)

        suffix = f" ({name})" if name else ""
        said = f", {LENGTHS[name]}" if name else ""
        for count in counts_by_length(length):
            found.append(Count(count.code + suffix, count.words + said, count.weights,
                               count.cost + 2 * index))
    return sorted(found, key=lambda count: count.cost)


def counts_by_length(length: Callable[[Case], Tensor]) -> Iterator[Count]:
    yield Count("token", "every token of the batch counts the same", by_token(length))
    yield Count("answer", "every answer counts the same", by_answer(length))
    yield Count("group", "every group counts the same", by_part(length, lambda case: case.group), 1)
    yield Count("root length", "a token counts 1 / sqrt(length of its answer)",
                lambda case: length(case).clamp(min=1) ** -.5, 5)
    yield Count("live token", "every token of the groups with unequal rewards counts the same",
                by_token(length, is_live), 3)
    yield Count("live answer", "every answer of the groups with unequal rewards counts the same",
                by_answer(length, is_live), 3)
    yield Count("finished answer", "every answer that ended counts the same",
                by_answer(length, lambda case: case.ended), 3)
    for name, (words, kept) in OTHERS.items():
        yield Count(f"token over {name}", "every token counts the same, 1 / (the tokens of the "
                    f"answers {words})", by_token(length, kept), 4)
        yield Count(f"answer over {name}", f"every answer counts the same, 1 / (the answers "
                    f"{words})", by_answer(length, kept), 4)
    for rows in MICRO_BATCHES:
        yield Count(f"micro-batch {rows}", f"every micro-batch of {rows} answers counts the same, "
                    "and so does every token in it", by_part(length, rows_by(rows)), 4)


def rows_by(size: int) -> Callable[[Case], Tensor]:
    return lambda case: torch.arange(len(case.ids)) // size


def divided_by_width(width):
    return lambda case: torch.ones(len(case.ids), dtype=torch.float64) / width(case)


def every_answer(case: Case) -> Tensor:
    return torch.ones(len(case.ids), dtype=torch.bool)


def by_token(length, kept=every_answer):
    return lambda case: (torch.ones(len(case.ids), dtype=torch.float64)
                         / (length(case) * kept(case)).sum().clamp(min=1))


def by_token_over(kept):
    def weights(case: Case) -> Tensor:
        share = kept(case).double().mean().clamp(min=1e-9)
        return torch.ones(len(case.ids), dtype=torch.float64) / (case.length.sum() * share)
    return weights


def by_answer(length, kept=every_answer):
    return lambda case: 1 / (kept(case).sum().clamp(min=1) * length(case).clamp(min=1))


def by_part(length, part_of):
    """Every part of the batch counts the same, and every token of a part."""
    def weights(case: Case) -> Tensor:
        part = part_of(case)
        parts = int(part.max()) + 1
        total = torch.zeros(parts, dtype=torch.float64).index_add(0, part, length(case))
        return 1 / (parts * total[part])
    return weights


@dataclass(frozen=True)
class Sizes:
    """Powers of the numbers of answers, groups and answers in a group, by which a weight may be
    multiplied in addition."""
    answers: int = 0
    groups: int = 0
    in_group: int = 0

    def factor(self, case: Case) -> float:
        B, groups = len(case.ids), int(case.group.max()) + 1
        return float(B) ** self.answers * float(groups) ** self.groups \
            * float(B // groups) ** self.in_group

    @property
    def cost(self) -> int:
        return 3 * (abs(self.answers) + abs(self.groups) + abs(self.in_group))

    def words(self) -> str:
        named = {"answers": self.answers, "groups": self.groups,
                 "answers in a group": self.in_group}
        said = [f"{'multiplied' if power > 0 else 'divided'} by the number of {name}"
                for name, power in named.items() if power]
        return " and ".join(said)


def all_sizes() -> list[Sizes]:
    found = [Sizes(*powers) for powers in itertools.product((-1, 0, 1), repeat=3)
             if abs(powers[0]) + abs(powers[1]) + abs(powers[2]) <= 1]
    return sorted(found, key=lambda sizes: sizes.cost)
