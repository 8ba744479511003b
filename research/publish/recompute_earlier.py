"""Phase 1 from its tokens, and ranks of a gradient from those of each problem (recompute.py)."""
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from research.publish.checks import Check, Result, ends, table
from research.publish.plain_statistics import (correlation, cut, jackknife, mean, t_interval,
                                               variance)

FILLER, REASONING = 0, 1


@dataclass
class Phase1Token:
    """A token of phase 1. The last token of an answer is left out."""
    problem: int
    answer: int
    position: int
    to_come: int  # tokens of the answer after it
    size: float
    signed: float
    gradient: float
    code: int     # of its class: FILLER, REASONING, or the structure of an answer
    is_word: bool

    @property
    def fifth(self) -> int:
        return 5 * (2 * self.position + 1) // (2 * (self.position + self.to_come + 1))


def tokens_of_phase_1(answers: list[dict]) -> list[Phase1Token]:
    tokens = []
    for answer in answers:
        columns = [list(map(float, answer[name].split()))
                   for name in ("size", "signed", "gradient", "class", "word")]
        length = len(columns[0])
        for t, (size, signed, gradient, code, word) in enumerate(zip(*columns)):
            tokens.append(Phase1Token(answer["problem"], answer["answer"], t, length - t, size,
                                      signed, gradient, int(code), bool(word)))
    return tokens


def t_by_position(tokens: list[Phase1Token], signed: bool = False) -> list[float]:
    """abs(t) = abs(mean) / (std / sqrt n) of each position that several answers have."""
    at: dict[int, list[float]] = {}
    for token in tokens:
        at.setdefault(token.position, []).append(token.signed if signed else token.size)
    found = []
    for numbers in at.values():
        n = len(numbers)
        if n > 1:
            error = math.sqrt(variance(numbers) * (n - 1) / n / n)
            found.append(abs(mean(numbers)) / error if error else 0.0)
    return found


def mean_size(tokens: list[Phase1Token], **wanted: object) -> float:
    return mean([token.size for token in tokens
                 if all(getattr(token, name) == value for name, value in wanted.items())])


def at_like_positions(tokens: list[Phase1Token]) -> float:
    filler, reasoning = (math.fsum(mean_size(tokens, code=code, fifth=fifth)
                                   for fifth in range(5)) for code in (FILLER, REASONING))
    return filler / reasoning


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


OF_PHASE_1: dict[str, Callable[[list[Phase1Token]], float]] = {
    "t of the size above 3": lambda tokens: share([t > 3 for t in t_by_position(tokens)]),
    "t of the size below 1.5": lambda tokens: share([t < 1.5 for t in t_by_position(tokens)]),
    "abs(t) above 3": lambda tokens: share([t > 3 for t in t_by_position(tokens, signed=True)]),
    "abs(t) below 1.5": lambda tokens: share([t < 1.5 for t in t_by_position(tokens, signed=True)]),
    "mean abs(t)": lambda tokens: mean(t_by_position(tokens, signed=True))}
RATIOS_OF_PHASE_1: dict[str, Callable[[list[Phase1Token]], float]] = {
    "early over late": lambda tokens: mean_size(tokens, fifth=0) / mean_size(tokens, fifth=4),
    "filler over reasoning": lambda tokens: (mean_size(tokens, code=FILLER)
                                             / mean_size(tokens, code=REASONING)),
    "the same at like positions": at_like_positions}


def check_phase1(result: Result) -> Iterator[Check]:
    """Phase 1 with its intervals over problems, and those of its flaws that follow from its tokens.
    The controls are not kept."""
    tokens = tokens_of_phase_1(result["values"]["answers"])
    problems = sorted({token.problem for token in tokens})

    def without(i: int | None) -> list[Phase1Token]:
        return [token for token in tokens if i is None or token.problem != problems[i]]

    for row in table(result, "phases"):
        name = row["measure"]
        if name in OF_PHASE_1:
            again = jackknife(len(problems), lambda i: OF_PHASE_1[name](without(i)))
            again = again if name == "mean abs(t)" else cut(again, 0, 1)
        else:
            logs = jackknife(len(problems),
                             lambda i: math.log(RATIOS_OF_PHASE_1[name](without(i))))
            again = list(map(math.exp, logs))
        yield Check(name, ends(row["phase 1"]), again)
    sizes = [token.size for token in tokens]
    half = [token for token in tokens if token.answer % 2 == 0]
    filler = [token for token in tokens if token.code == FILLER]
    flaws = {
        "correlation of the size in phase 1 with abs(A) s": correlation(
            sizes, [token.gradient for token in tokens]),
        "correlation of the size in phase 1 with the number": correlation(
            sizes, [token.to_come for token in tokens]),
        "t: share of positions": OF_PHASE_1["t of the size above 3"](tokens),
        "the same for the number": OF_PHASE_1["abs(t) above 3"](tokens),
        "t grows": mean(t_by_position(tokens)) / mean(t_by_position(half)),
        "after the fact": math.fsum(token.size for token in tokens if not token.gradient)
        / math.fsum(sizes),
        "crude classes": share([not token.is_word for token in filler])}
    for row in table(result, "flaws"):
        for begin, value in flaws.items():
            if row["flaw"].startswith(begin):
                yield Check(begin, [row["found"]], [value])


def check_rank(result: Result) -> Iterator[Check]:
    """Means over problems, and differences to the z-score by problem."""
    ranks = {(one["matrix"], one["advantage"], one["R"]): one for one in result["values"]["ranks"]}
    for row in table(result, "sizes"):
        matrix, rank = row["rank"].split(": ")
        for column, cell in row.items():
            if column.startswith("R="):
                again = t_interval(ranks[matrix, "z-score", int(column[2:])][rank])
                published = ends(cell) if isinstance(cell, dict) else [cell]
                yield Check(f"{row['rank']}, {column}", published, again[:len(published)])
    R = max(R for _, advantage, R in ranks if advantage != "z-score")
    for row in table(result, "arms"):
        for matrix in "AB":
            own, z = ranks[matrix, row["advantage"], R], ranks[matrix, "z-score", R]
            yield Check(f"{row['advantage']}, {matrix}",
                        [row[f"{matrix} entropy"], row[f"{matrix} stable"]],
                        [mean(own["entropy"]), mean(own["stable"])])
            differences = [mine - plain for mine, plain in zip(own["entropy"], z["entropy"])]
            yield Check(f"{row['advantage']}, {matrix}, minus the z-score",
                        ends(row[f"{matrix} change"]), t_interval(differences))
