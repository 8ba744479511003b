"""Sums over the tokens of a run, from its credit files, with one step in memory at a time.

    tally = Tally(run)
    tally.mean("kind", "abs gradient")      # (7,) the mean size of each kind of token's gradient
    rest_columns(tally, "kind", range(7))   # each kind over all other tokens, with intervals

The gradient of a token at the logits is A w (onehot - p), of size abs(A) w s (analyze.py).

Sums are made for each block of training. The intervals need a second kind of sum: for each group,
the products of its own sums with each other, added up over all groups. Groups vary independently,
so standard errors follow from these products (`error`).
"""
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lab.analysis.shares import LEAST, shares
from lab.analysis.statistics import FEWEST, Estimate, Floats, estimate, ratio, verdicts
from lab.analysis.tables import Columns
from lab.analysis.token_table import StepRecord, TokenTable, read_step
from lab.engine.errors import UserError
from lab.engine.tokens import KINDS, SECTIONS
from lab.harness.read_record import credit_steps, read_tokenizer
from lab.harness.record import credit_path
from lab.harness.screen import show_status

Look = Callable[[StepRecord, Tokenizer], None]
SomeBlocks = slice | np.ndarray  # which of the parts that training was split into
PARTITIONS: dict[str, tuple[str, ...]] = {  # name: what its cells are called
    "all": ("all",), "kind": KINDS, "section": SECTIONS,
    "position": tuple(f"{10 * i}-{10 * i + 10}%" for i in range(10))}
MEAN_MEASURES = ("tokens", "abs gradient")  # what is also summed as products
CHANGE_MEASURES = (  # of steps whose record has a column `change` (lab/analysis/change.py)
    "measured", "push", "change", "credit", "abs push", "abs change", "abs credit",
    "squared credit", "up", "up, fell", "down", "down, rose")
MEASURES = (*MEAN_MEASURES, "squared gradient", "abs advantage", "entropy", "s", *CHANGE_MEASURES)
ID_MEASURES = ("entropy", "log_prob", "abs gradient")  # summed for each token id
BLOCKS = 50      # parts of training that the curves are drawn from
RARE = 0.001     # share of the tokens: what is rarer has neither a ratio nor a bar
OVER_REST = ("Mean size relative to all other tokens: the mean abs(A) w s of the row's tokens, "
             "divided by that of all other tokens. It is left out for a row with less than "
             f"{RARE:.1%} of the tokens. Its 95% interval shows how much it varies between the "
             "groups of this run, each of which is the answers to one problem, and not how much it "
             "varies between seeds. More or less gradient: a row has more or less than all other "
             "tokens if this ratio differs from 1 with a p-value below 0.05, after Holm's "
             "correction for the rows of this table alone. Otherwise no difference is seen, or "
             "there are too few tokens or groups for a test")


def measured_of(tokens: TokenTable) -> dict[str, np.ndarray]:
    """The values (n,) that are summed, for each of MEASURES. Where no change was measured, push,
    change and credit count as 0, so that their shares are of the same tokens."""
    nothing = np.zeros(len(tokens))
    found = {
        "tokens": nothing + 1,
        "entropy": tokens["entropy"],
        "s": tokens["s"],
        "abs gradient": tokens["abs gradient"],
        "squared gradient": tokens["gradient"] ** 2,
        "abs advantage": np.abs(tokens["advantage"])}
    found |= dict.fromkeys(CHANGE_MEASURES, nothing)
    if "change" not in tokens:
        return found
    push, change = tokens["push"], tokens["change"]
    found["measured"] = nothing + 1
    found |= {"push": push, "abs push": np.abs(push)}
    found |= {"change": change, "abs change": np.abs(change)}
    found |= ways_of_push(push, change)
    if "true_credit" in tokens:
        credit = tokens["true_credit"]
        found |= {"credit": credit, "abs credit": np.abs(credit)}
    if "decided" in tokens:
        found["squared credit"] = tokens["decided"]
    return found


class Tally:
    """Sums over a run: of[partition][block, cell, measure], and for MEAN_MEASURES the
    products[partition][cell and measure, cell and measure].

    The records of the steps are read one after the other. While one is in memory, `look` is called
    with it, and with the run's tokenizer.
    """

    def __init__(self, run: Path, look: Look | None = None):
        self.steps = credit_steps(run)
        if not self.steps:
            raise UserError(f"{run} has no credit files yet")
        self.tokenizer = read_tokenizer(run)
        self.blocks = np.array_split(np.array(self.steps), min(BLOCKS, len(self.steps)))
        self.tokens, self.groups, self.longest = 0, 0, 0  # longest: tokens of an answer
        self.answers = np.zeros(len(self.blocks), np.int64)
        # answers in groups whose rewards are all equal; nan if a reward is not known
        self.answers_without_spread = np.zeros(len(self.blocks))
        self.rewards: dict[str, float] = defaultdict(float)  # of each part: its sum over answers
        # a model can have more tokens than its tokenizer, since embeddings are padded
        ids = 2 * self.tokenizer.get_vocab_size() + 4096
        self.of_id = {name: np.zeros(ids) for name in ID_MEASURES}
        self.kinds_of_id = np.zeros((ids, len(KINDS)))  # how often it was of each kind
        self.of: dict[str, Floats] = {}
        self.products: dict[str, Floats] = {}
        # for each cell the number of groups that have a token with an advantage in it
        self.groups_with_advantage: dict[str, np.ndarray] = {}
        for name, cells in PARTITIONS.items():
            self.of[name] = np.zeros((len(self.blocks), len(cells), len(MEASURES)))
            self.products[name] = np.zeros((len(MEAN_MEASURES) * len(cells),) * 2)
            self.groups_with_advantage[name] = np.zeros(len(cells), np.int64)

        for block, steps in enumerate(self.blocks):
            for step in steps.tolist():
                show_status(f"{Path(run).name}: step {step} of {self.steps[-1]}")
                record = read_step(run, step)
                if (highest := record.tokens["token_id"].max()) >= ids:
                    raise UserError(f"{credit_path(run, step)} is damaged: it has a token "
                                    f"{highest}, which the run's tokenizer does not know")
                self.add(record, block)
                if look:
                    look(record, self.tokenizer)

    def add(self, record: StepRecord, block: int) -> None:
        self.add_answers(record.answers, block)
        self.longest = max(self.longest, int(record.answers["length"].max()))
        tokens = record.tokens
        self.tokens += len(tokens)
        self.add_sums(tokens, block)
        self.add_by_id(tokens)

    def add_answers(self, answers: dict[str, np.ndarray], block: int) -> None:
        reward, group = answers["reward"], answers["group"]
        self.answers[block] += len(reward)
        for number in np.unique(group):
            self.groups += 1
            of_group = reward[group == number]
            if np.isnan(of_group).any():
                self.answers_without_spread[block] += np.nan
            elif np.ptp(of_group) == 0:
                self.answers_without_spread[block] += len(of_group)
        for name, values in answers.items():
            if name.startswith("reward"):
                self.rewards[name] += float(values.sum())

    def add_by_id(self, tokens: TokenTable) -> None:
        ids = tokens["token_id"]
        for name, of_id in self.of_id.items():
            of_id += np.bincount(ids, tokens[name], len(of_id))
        kinds = self.kinds_of_id
        id_and_kind = ids * len(KINDS) + tokens["kind"]
        kinds += np.bincount(id_and_kind, minlength=kinds.size).reshape(kinds.shape)

    def add_sums(self, tokens: TokenTable, block: int) -> None:
        groups, group = np.unique(tokens["problem"], return_inverse=True)
        measured = measured_of(tokens)
        cells = {"all": np.zeros_like(tokens["kind"]), "kind": tokens["kind"],
                 "section": tokens["section"], "position": tokens.part_of_answer(10)}
        for name, cell in cells.items():
            size = len(groups), len(PARTITIONS[name])
            index = np.ravel_multi_index((group, cell), size)
            by_group = np.zeros((*size, len(MEASURES)))  # (groups, cells, measures)
            for number, measure in enumerate(MEASURES):
                sums = np.bincount(index, measured[measure], np.prod(size))
                by_group[..., number] = sums.reshape(size)
            self.of[name][block] += by_group.sum(0)
            has_advantage = by_group[..., MEASURES.index("abs advantage")] > 0
            self.groups_with_advantage[name] += has_advantage.sum(0)
            of_group = by_group[..., :len(MEAN_MEASURES)].reshape(len(groups), -1)
            self.products[name] += of_group.T @ of_group

    def total(self, partition: str, measure: str, blocks: SomeBlocks = slice(None)) -> Floats:
        """(cells,) the sum over all of training, or over some blocks of it."""
        return np.asarray(self.by_block(partition, measure)[blocks].sum(0))

    def by_block(self, partition: str, measure: str) -> Floats:
        """(blocks, cells)"""
        return self.of[partition][..., MEASURES.index(measure)]

    def count(self, partition: str) -> np.ndarray:
        return self.total(partition, "tokens").astype(np.int64)

    def mean(self, partition: str, measure: str, blocks: SomeBlocks = slice(None)) -> Floats:
        total = self.total(partition, measure, blocks)
        tokens = self.total(partition, "tokens", blocks)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / tokens

    def shares(self, partition: str, measure: str = "abs gradient") -> Floats:
        """(cells,) each cell's share of the gradient, or of another sum."""
        return shares(self.total(partition, measure))

    @property
    def has_change(self) -> bool:
        """Whether the change of the tokens was measured in any step."""
        return bool(self.total("all", "measured")[0])

    def has_cells(self, partition: str) -> bool:
        """Whether the partition has tokens in more than one cell. A task need not label tokens, and
        then all of them are in one."""
        return int((self.count(partition) > 0).sum()) > 1

    def is_common(self, partition: str) -> np.ndarray:
        """(cells,) whether there are enough tokens to say something about them."""
        return self.count(partition) >= max(1, RARE * self.tokens)

    def log_mean(self, partition: str, cells: Floats) -> tuple[float, Floats]:
        """The logarithm of the mean gradient in some cells (1 there, 0 elsewhere), and its slope by
        each of their sums."""
        tokens, sizes = (cells @ self.total(partition, name) for name in MEAN_MEASURES)
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = np.stack([-cells / tokens, cells / sizes], -1).ravel()
            return float(np.log(sizes / tokens)), slope

    def error(self, partition: str, slope: Floats) -> float:
        """The standard error, by the delta method, of a number with this slope by each sum over
        groups."""
        with np.errstate(invalid="ignore"):  # nothing is known where a sum is 0
            variance = slope @ self.products[partition] @ slope
            return float(np.sqrt(np.maximum(variance, 0)))

    def share(self, partition: str, cell: int) -> Estimate:
        """A cell's share of the gradient, by the delta method over groups with advantages."""
        sizes = self.total(partition, "abs gradient")
        part, groups = self.shares(partition)[cell], int(self.groups_with_advantage["all"][0])
        if groups < FEWEST:
            return Estimate(part)
        is_cell = np.arange(len(sizes)) == cell
        slope = (is_cell - part) / max(float(sizes.sum()), LEAST)  # by each sum of sizes
        slope_of_sums = np.stack([np.zeros_like(slope), slope], -1).ravel()
        error = self.error(partition, slope_of_sums)
        return estimate(part, error * np.sqrt(groups / (groups - 1)), groups - 1)

    def over(self, partition: str, cells: Floats, others: Floats) -> Estimate:
        """The mean gradient in some cells over that in others. Groups without advantages say
        nothing, so they do not make the interval narrower."""
        mine, slope = self.log_mean(partition, cells)
        theirs, their_slope = self.log_mean(partition, others)
        groups = int(self.groups_with_advantage[partition][cells == 1].min())
        return ratio(mine - theirs, self.error(partition, slope - their_slope), groups)


def over_rest(tally: Tally, partition: str, cells: Iterable[int]) -> list[Estimate]:
    """The mean gradient in each of these cells over that in all others; nan where a cell is
    rare."""
    each, common = np.eye(len(PARTITIONS[partition])), tally.is_common(partition)
    found = []
    for cell in cells:
        if common[cell]:
            found.append(tally.over(partition, each[cell], 1 - each[cell]))
        else:
            found.append(Estimate(np.nan))
    return found


def rest_columns(tally: Tally, partition: str, cells: Iterable[int]) -> Columns:
    """Columns of a table that has a row for each of these cells; OVER_REST is their note."""
    found = over_rest(tally, partition, cells)
    return {"over rest": (".2f", found), "difference": ("", verdicts(found))}


def early_over_late(tally: Tally) -> Estimate:
    tenth = np.arange(10)
    return tally.over("position", np.array(tenth < 2, float), np.array(tenth > 7, float))


def ways_of_push(push: Floats, change: Floats) -> dict[str, Floats]:
    """The size of each token's push, if it was up and if it was down; and the same of the tokens
    whose log-prob moved the other way: pushed up, it fell, or pushed down, it rose."""
    up, down = push.clip(0), (-push).clip(0)
    return {"up": up, "up, fell": up * (change < 0),
            "down": down, "down, rose": down * (change > 0)}
