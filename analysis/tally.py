"""From the credit files of a run to sums over its tokens: a step in memory at a time.

    tally = Tally(run)
    tally.mean("kind", "abs gradient")      # (7,) the mean size of each kind of token's gradient
    rest_columns(tally, "kind", range(7))   # of each kind over all other tokens, with intervals

The gradient of a token at the logits is A w (onehot - p), of size abs(A) w s (analyze.py).

Sums are made by blocks of training. Beside them stand the sums over groups of the products of a
group's own sums: what varies is the group, and from these products the intervals follow.
"""
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from analysis.statistics import FEWEST, Estimate, Floats, estimate, ratio, verdicts
from analysis.tables import Columns
from engine.errors import UserError
from engine.tokens import KINDS, SECTIONS, load_tokenizer
from grpo import gradient_size
from harness.record import credit_steps, read_columns
from harness.screen import show_status

Tokens = dict[str, np.ndarray]  # a step's columns, one value a token, answer or problem
Blocks = slice | np.ndarray
PARTITIONS: dict[str, tuple[str, ...]] = {  # name: what its cells are called
    "all": ("all",), "kind": KINDS, "section": SECTIONS,
    "position": tuple(f"{10 * i}-{10 * i + 10}%" for i in range(10))}
OF_A_MEAN = ("tokens", "abs gradient")  # what is also summed as products
WATCHED = (  # of files with a column `change`; in the others they count as 0 (analysis/became.py)
    "watched", "given", "change", "credit", "abs given", "abs change", "abs credit", "decided",
    "up", "fell", "down", "rose")
MEASURES = (*OF_A_MEAN, "squared gradient", "abs advantage", "entropy", "s", *WATCHED)
OF_AN_ID = ("entropy", "log_prob", "abs gradient")  # summed for each token id
BLOCKS = 50      # parts of training that the curves are drawn from
RARE = 0.001     # share of the tokens: what is rarer has neither a ratio nor a bar
OVER_REST = ("mean abs(A) w s over that of all other tokens, where a row has at least "
             f"{RARE:.1%} of the tokens; interval over groups, Holm's correction over the rows (of "
             "this table alone)")


def read_tokens(run: Path, step: int) -> Tokens:
    """A step's record, and what follows from it, one value a token."""
    columns = read_columns(run, step)
    length = np.diff(np.append(columns["episode_start"], len(columns["token_id"])))
    answer = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(answer)) - columns["episode_start"][answer]
    numbers = {"log_prob", "entropy", "collision", "weight", "advantage", "ratio", "change",
               "true_credit"}
    floats = {name: columns[name].astype(np.float64) for name in numbers & columns.keys()}
    codes = {name: columns[name].astype(np.int64) for name in ("kind", "section", "group")}
    s = gradient_size(torch.from_numpy(floats["log_prob"]), torch.from_numpy(floats["collision"]))
    tokens = {**columns, **floats, **codes, "s": s.numpy(), "length": length, "answer": answer,
              "tenth": 5 * (2 * position + 1) // length[answer]}  # where its middle stands
    tokens["gradient"] = tokens["advantage"] * (tokens["weight"] * tokens["s"])
    if "change" in tokens:
        tokens |= watched(tokens)
    return tokens | {"abs advantage": np.abs(tokens["advantage"]),
                     "abs gradient": np.abs(tokens["gradient"]),
                     "squared gradient": tokens["gradient"] ** 2}


def watched(tokens: Tokens) -> Tokens:
    given, change = tokens["gradient"] * tokens["s"], tokens["change"]
    up, down, unknown = given.clip(0), (-given).clip(0), np.zeros_like(given)
    three = {"given": given, "change": change, "credit": tokens.get("true_credit", unknown)}
    return {**three, **{f"abs {name}": np.abs(values) for name, values in three.items()},
            "decided": tokens.get("decided", unknown), "watched": np.ones_like(given),
            "up": up, "fell": up * (change < 0), "down": down, "rose": down * (change > 0)}


class Tally:
    """What is known of a run: of[partition][block, cell, measure], and for OF_A_MEAN the
    products[partition][cell and measure, cell and measure]."""

    def __init__(self, run: Path):
        self.steps = credit_steps(run)
        if not self.steps:
            raise UserError(f"{run} has no credit files yet")
        self.tokenizer = load_tokenizer(run)
        self.blocks = np.array_split(np.array(self.steps), min(BLOCKS, len(self.steps)))
        self.tokens, self.groups, self.longest = 0, 0, 0  # longest: tokens of an answer
        self.watched: list[int] = []  # steps of which it is known what became of each token
        self.answers = np.zeros(len(self.blocks), np.int64)
        self.flat_answers = np.zeros(len(self.blocks))  # in groups of equal rewards; nan: unknown
        self.rewards: Counter[str] = Counter()  # of each part: its sum over answers
        # a model can have more tokens than its tokenizer, since embeddings are padded
        ids = 2 * self.tokenizer.get_vocab_size() + 4096
        self.of_id = {name: np.zeros(ids) for name in OF_AN_ID}
        self.kinds_of_id = np.zeros((ids, len(KINDS)))  # how often it was of each kind
        self.of: dict[str, Floats] = {}
        self.products: dict[str, Floats] = {}
        self.live: dict[str, np.ndarray] = {}  # groups with advantages in a cell
        for name, cells in PARTITIONS.items():
            self.of[name] = np.zeros((len(self.blocks), len(cells), len(MEASURES)))
            self.products[name] = np.zeros((len(OF_A_MEAN) * len(cells),) * 2)
            self.live[name] = np.zeros(len(cells), np.int64)

        for block, steps in enumerate(self.blocks):
            for step in steps.tolist():
                show_status(f"{Path(run).name}: step {step} of {self.steps[-1]}")
                tokens = read_tokens(run, step)
                self.watched += [step] if "change" in tokens else []
                self.add(tokens, block)

    def add(self, tokens: Tokens, block: int) -> None:
        groups = [tokens["reward"][tokens["group"] == g] for g in np.unique(tokens["group"])]
        self.tokens += len(tokens["token_id"])
        self.groups += len(groups)
        self.longest = max(self.longest, int(tokens["length"].max()))
        self.answers[block] += len(tokens["group"])
        flat = sum(len(r) for r in groups if np.ptp(r) == 0)
        self.flat_answers[block] += np.nan if np.isnan(tokens["reward"]).any() else flat
        parts = [name for name in tokens if name.startswith("reward")]
        self.rewards.update({name: float(tokens[name].sum()) for name in parts})
        self.add_sums(tokens, block)
        ids, kinds = tokens["token_id"].astype(np.int64), self.kinds_of_id
        for name, of_id in self.of_id.items():
            of_id += np.bincount(ids, tokens[name], len(of_id))
        id_and_kind = ids * len(KINDS) + tokens["kind"]
        kinds += np.bincount(id_and_kind, minlength=kinds.size).reshape(kinds.shape)

    def add_sums(self, tokens: Tokens, block: int) -> None:
        groups, group = np.unique(tokens["group"][tokens["answer"]], return_inverse=True)
        nothing = np.zeros_like(tokens["s"])
        seen = tokens if "change" in tokens else {**tokens, **dict.fromkeys(WATCHED, nothing)}
        measured = [seen[name] if name != "tokens" else None for name in MEASURES]  # counted
        cells = {"all": np.zeros_like(tokens["kind"]), "kind": tokens["kind"],
                 "section": tokens["section"], "position": tokens["tenth"]}
        for name, cell in cells.items():
            size = len(groups), len(PARTITIONS[name])
            index = np.ravel_multi_index((group, cell), size)
            by_group = np.stack([np.bincount(index, values, np.prod(size)).reshape(size)
                                 for values in measured], axis=-1)  # (groups, cells, measures)
            self.of[name][block] += by_group.sum(0)
            self.live[name] += (by_group[..., MEASURES.index("abs advantage")] > 0).sum(0)
            of_group = by_group[..., :len(OF_A_MEAN)].reshape(len(groups), -1)
            self.products[name] += of_group.T @ of_group

    def total(self, partition: str, measure: str, blocks: Blocks = slice(None)) -> Floats:
        """(cells,) over all of training, or some blocks of it."""
        return np.asarray(self.by_block(partition, measure)[blocks].sum(0))

    def by_block(self, partition: str, measure: str) -> Floats:
        """(blocks, cells)"""
        return self.of[partition][..., MEASURES.index(measure)]

    def count(self, partition: str) -> np.ndarray:
        return self.total(partition, "tokens").astype(np.int64)

    def mean(self, partition: str, measure: str, blocks: Blocks = slice(None)) -> Floats:
        total, tokens = (self.total(partition, name, blocks) for name in (measure, "tokens"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / tokens

    def shares(self, partition: str, measure: str = "abs gradient") -> Floats:
        """(cells,) of the gradient, or of another sum."""
        sizes = self.total(partition, measure)
        return sizes / max(float(sizes.sum()), 1e-300)

    def has_cells(self, partition: str) -> bool:
        """Whether it tells tokens apart: a task need not label them."""
        return int((self.count(partition) > 0).sum()) > 1

    def is_common(self, partition: str) -> np.ndarray:
        """(cells,) whether there are enough tokens to say something of them."""
        return self.count(partition) >= max(1, RARE * self.tokens)

    def log_mean(self, partition: str, cells: Floats) -> tuple[float, Floats]:
        """The logarithm of the mean gradient in some cells (1 there, 0 elsewhere), and its slope by
        each of their sums."""
        tokens, sizes = (cells @ self.total(partition, name) for name in OF_A_MEAN)
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = np.stack([-cells / tokens, cells / sizes], -1).ravel()
            return float(np.log(sizes / tokens)), slope

    def error(self, partition: str, slope: Floats) -> float:
        """By the delta method: of what has this slope by each sum over groups."""
        with np.errstate(invalid="ignore"):  # nothing is known where a sum is 0
            return float(np.sqrt(np.maximum(slope @ self.products[partition] @ slope, 0)))

    def share(self, partition: str, cell: int) -> Estimate:
        """A cell's share of the gradient, by the delta method over groups with advantages."""
        sizes = self.total(partition, "abs gradient")
        part, groups = self.shares(partition)[cell], int(self.live["all"][0])
        if groups < FEWEST:
            return Estimate(part)
        slope = ((np.arange(len(sizes)) == cell) - part) / max(float(sizes.sum()), 1e-300)
        error = self.error(partition, np.stack([np.zeros_like(slope), slope], -1).ravel())
        return estimate(part, error * np.sqrt(groups / (groups - 1)), groups - 1)

    def over(self, partition: str, cells: Floats, others: Floats) -> Estimate:
        """The mean gradient in some cells over that in others. Groups without advantages say
        nothing, and do not make it surer."""
        (mine, slope), (theirs, their_slope) = (
            self.log_mean(partition, part) for part in (cells, others))
        groups = int(self.live[partition][cells == 1].min())
        return ratio(mine - theirs, self.error(partition, slope - their_slope), groups)


def rest_columns(tally: Tally, partition: str, cells: Iterable[int]) -> Columns:
    """Columns of a table that has a row for each of these cells; OVER_REST is their note."""
    each, common = np.eye(len(PARTITIONS[partition])), tally.is_common(partition)
    found = [tally.over(partition, each[cell], 1 - each[cell]) if common[cell] else Estimate(np.nan)
             for cell in cells]
    return {"over rest": (".2f", [one.value for one in found]),
            "95%": (".2f", [one.interval for one in found]),
            "difference": ("", verdicts(found))}


def early_over_late(tally: Tally) -> Estimate:
    tenth = np.arange(10)
    return tally.over("position", np.array(tenth < 2, float), np.array(tenth > 7, float))
