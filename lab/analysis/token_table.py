"""One table of tokens: all tokens of some answers end to end, with a column for each number.

    tokens = read_step(run, step).tokens
    tokens["log_prob"]                                 # (n,) one value a token
    tokens.where(tokens["kind"] == NUMBER)["change"]   # of the number tokens alone
    tokens.part_of_answer(5)                           # (n,) which fifth of its answer: 0 to 4

An analysis reads such a table from a credit file, a probe makes one from frames (B, T). Every table
has the column `problem`, most have `answer`, `position` and `length`:

    answer     0  0  0  1  1      which answer the token belongs to
    position   0  1  2  0  1      how many tokens of its answer come before it
    length     3  3  3  2  2      how many tokens its answer has
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analyze import tokens_of
from lab.analysis.run_folders import OF_ANSWERS, OF_OTHERS, read_columns
from lab.analysis.statistics import Estimate, over_problems, within

# the columns of tokens that are whole numbers
CODES = ("token_id", "kind", "section", "answer", "position", "length")
NUMBERED = ("problem", "answer")  # where tables are joined, these numbers go on in the next one


class TokenTable:
    """Columns of one value a token. A table is not changed: each method makes a new one."""

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self.columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self["problem"])

    def where(self, kept: np.ndarray | slice) -> "TokenTable":
        """The tokens that a mask or a slice keeps."""
        return TokenTable({name: values[kept] for name, values in self.columns.items()})

    def having(self, columns: Mapping[str, np.ndarray]) -> "TokenTable":
        """The same tokens with these columns too. They replace columns of the same name."""
        return TokenTable({**self.columns, **columns})

    def share(self, inside: np.ndarray, sizes: np.ndarray) -> Estimate:
        """The share that the tokens of a mask have in the sizes (n,), which have no sign, with its
        interval over problems, cut at 0 and 1."""
        columns = sizes * inside, sizes
        return within(over_problems(self["problem"], columns, lambda a, b: a / b), 0, 1)

    def part_of_answer(self, parts: int) -> np.ndarray:
        """(n,) the part of its answer in which the middle of each token lies, if the answer is cut
        into so many equal parts; the first is 0."""
        return np.asarray(parts * (2 * self["position"] + 1) // (2 * self["length"]))


def table_of_frames(mask: torch.Tensor, problem: torch.Tensor,
                    frames: Mapping[str, torch.Tensor]) -> TokenTable:
    """The tokens of a mask (B, T), with the number of each answer's problem (B,) and a column for
    each frame (B, T)."""
    answer, position = mask.cpu().numpy().nonzero()
    length = mask.sum(1).cpu().numpy()  # of each answer
    columns = {
        "problem": problem.cpu().numpy()[answer],
        "answer": answer,
        "position": position,
        "length": length[answer]}
    for name, frame in frames.items():
        columns[name] = flat(frame, mask)
    return TokenTable(columns)


def flat(frame: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """(B, T) -> (n,): float64, or int64 of whole numbers."""
    values = frame[mask].detach().cpu()
    return (values.double() if values.is_floating_point() else values.long()).numpy()


def joined_tables(tables: Sequence[TokenTable]) -> TokenTable:
    """The tokens of all tables, one after the other; problems and answers are numbered on."""
    columns = {}
    for name in tables[0].columns:
        parts = [table[name] for table in tables]
        columns[name] = np.concatenate(numbered_on(parts) if name in NUMBERED else parts)
    return TokenTable(columns)


def numbered_on(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[0, 2, 2], [0, 1] -> [0, 1, 1], [2, 3]"""
    numbers, first = [], 0
    for part in parts:
        distinct, number = np.unique(part, return_inverse=True)
        numbers.append(number + first)
        first += len(distinct)
    return numbers


@dataclass
class StepRecord:
    """A credit file, its columns sorted by what they are of."""
    step: int
    tokens: TokenTable              # those that the model drew
    written: TokenTable             # the same, and those that an environment wrote
    answers: dict[str, np.ndarray]  # one value an answer: group, length, reward, finished, ...
    prompts: list[np.ndarray]       # of each problem the token ids of its prompt

    def tokens_of(self, answer: int) -> TokenTable:
        """All tokens that stand in an answer."""
        return self.written.where(self.written["answer"] == answer)


def read_step(run: Path, step: int) -> StepRecord:
    """The record of a step. Its tokens have the columns on disk and those that `analyze.tokens_of`
    adds to them, with two differences: each has the number of its problem, and A w s stands there
    twice, as `gradient` with the sign of the advantage, and as `abs gradient` without.

    The length of an answer is the number of its tokens that the model drew.
    """
    columns = read_columns(run, step)
    answers, of_tokens = {}, {}
    for name, values in columns.items():
        if name in OF_ANSWERS or name.startswith("reward"):
            answers[name] = values
        elif name not in OF_OTHERS:
            of_tokens[name] = values
    own = of_tokens.pop("own", np.ones(len(columns["token_id"]))).astype(bool)
    # without `own` every token that is written counts as one that the model drew
    of_tokens |= tokens_of({**of_tokens, "episode_start": columns["episode_start"]})
    of_tokens = {name: values.astype(np.int64 if name in CODES else np.float64)
                 for name, values in of_tokens.items() if name not in ("one", "place")}
    answer, before = of_tokens["answer"], np.cumsum(own) - own  # how many of the model's
    of_tokens["own"], of_tokens["position"] = own, before - before[columns["episode_start"][answer]]
    answers["group"] = answers["group"].astype(np.int64)
    answers["length"] = np.bincount(answer, own, len(answers["group"])).astype(np.int64)
    of_tokens["length"] = answers["length"][answer]
    of_tokens["problem"] = answers["group"][answer]
    of_tokens["abs gradient"] = of_tokens["gradient"]
    of_tokens["gradient"] = np.sign(of_tokens["advantage"]) * of_tokens["gradient"]
    prompts = np.split(columns["prompt_ids"], columns["prompt_start"][1:])
    written = TokenTable(of_tokens)
    return StepRecord(step, written.where(own), written, answers, prompts)
