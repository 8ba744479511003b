"""The tables of the experiment that this lab began with, made from the credit files of any run.

    notes = Notes(run)
    notes.mean("class", "abs contribution")   # (3,) of filler, reasoning, structure

The earlier experiment (github.com/Ja-Crispy/GRPO-Zero) took contribution = A log p for the gradient
of a token. It is the value of a term of the objective; the gradient at the logits has the size
abs(A) w s. So each table shows both, beside the figures that the experiment published. The
definitions are those of its notes: classes by the token's own text; bins of equal width up to the
largest t / length, closed on the right; one t-statistic at each position t.
"""
import re
from math import ceil, floor

import numpy as np
import torch
from tokenizers import Tokenizer

from lab.analysis.run_folders import Run, read_tokenizer
from lab.analysis.statistics import Floats
from lab.analysis.token_table import StepRecord, TokenTable, read_step
from grpo import group_z_score
from lab.engine.errors import UserError
from lab.harness.record import credit_path
from lab.harness.screen import show_status

CLASSES = FILLER, REASONING, STRUCTURE = "filler", "reasoning", "structure"
SPELLED = ("equals", "plus", "minus", "times", "divided")
UNITS = ("contribution", "gradient")  # A w log p, A w s
MEASURES = ("tokens", "log_prob", "s", *UNITS, *(f"{how} {unit}" for how in ("abs", "squared")
                                                 for unit in UNITS))
BLOCKS = 50      # parts of training that a curve is drawn from
UNDEFINED = np.errstate(invalid="ignore", divide="ignore")  # nan, which a table shows as -
VALUES = np.linspace(-5, 5, 101)  # edges of histograms; what lies outside counts in the last bar
LOG_PROBS, ADVANTAGES = np.linspace(-10, 0, 51), np.linspace(-4, 4, 41)
PUBLISHED_SIZES = {  # mean absolute contribution by class, and by the discount of their run
    1.0: {FILLER: 0.333, REASONING: 0.254}, 0.75: {FILLER: 0.348, REASONING: 0.247}}


class Notes:
    """Sums over a run's tokens, with one step in memory at a time: of[partition][cell, measure]."""

    def __init__(self, run: Run):
        folder, steps, config = run.folder, run.steps, run.config
        self.is_weighted, self.tokenizer = False, read_tokenizer(folder)
        self.blocks = np.array_split(np.array(steps), min(BLOCKS, len(steps)))
        # a model can have more tokens than its tokenizer, since embeddings are padded
        self.longest, ids = 0, 2 * self.tokenizer.get_vocab_size() + 4096
        for step in steps:
            record = read_step(folder, step)
            self.longest = max(self.longest, int(record.answers["length"].max()))
            if (highest := record.tokens["token_id"].max()) >= ids:
                raise UserError(f"{credit_path(folder, step)} is damaged: it has a token "
                                f"{highest}, which the run's tokenizer does not know")
        is_discounted = (config["mitigation"] == "outcome_conditional"
                         and config.get("think_discount") == 0.75)
        self.published = 0.75 if is_discounted else 1.0  # which of the two published runs
        self.is_of_the_notes = is_discounted or config["mitigation"] == "none"
        cells = {"all": 1, "reward": 3, "bin": 10, "class": 3, "class by fifth": 15,
                 "class by block": 3 * len(self.blocks), "position": self.longest, "token": ids}
        self.of = {name: np.zeros((count, len(MEASURES))) for name, count in cells.items()}
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}
        self.values = {unit: np.zeros(len(VALUES) - 1) for unit in UNITS}
        self.cloud = np.zeros((len(LOG_PROBS) - 1, len(ADVANTAGES) - 1))
        for block, of_block in enumerate(self.blocks):
            for step in of_block.tolist():
                show_status(f"{folder.name}: the earlier experiment's tables, step {step}")
                self.add(read_step(folder, step), block)

    def add(self, record: StepRecord, block: int) -> None:
        tokens = with_contributions(record.tokens)
        self.is_weighted |= bool((tokens["weight"] != 1).any())
        for name, cell in self.cells_of(record, block).items():
            for sums, measure in zip(self.of[name].T, MEASURES):
                sums += np.bincount(cell, tokens[measure], len(sums))
        self.add_histograms(tokens)

    def cells_of(self, record: StepRecord, block: int) -> dict[str, np.ndarray]:
        """(n,) of each partition: the cell that each token belongs to."""
        tokens = record.tokens
        of_class = class_codes(self.tokenizer, tokens["token_id"])
        sign_of_reward = signs_of_rewards(record)[tokens["answer"]]
        fifth = self.bin_of(tokens, 5)
        return {
            "all": np.zeros_like(of_class),
            "reward": 1 + sign_of_reward,
            "bin": self.bin_of(tokens, 10),
            "class": of_class,
            "class by fifth": 5 * of_class + fifth,
            "class by block": 3 * block + of_class,
            "position": tokens["position"],
            "token": tokens["token_id"]}

    def add_histograms(self, tokens: TokenTable) -> None:
        for unit in UNITS:
            values, (low, high) = tokens[unit], self.extremes[unit]
            self.extremes[unit] = [min(low, values.min()), max(high, values.max())]
            counts, _ = np.histogram(within(values, VALUES), VALUES)
            self.values[unit] += counts
        log_prob = within(tokens["log_prob"], LOG_PROBS)
        advantage = within(tokens["advantage"], ADVANTAGES)
        counts, _, _ = np.histogram2d(log_prob, advantage, [LOG_PROBS, ADVANTAGES])
        self.cloud += counts

    def bin_of(self, tokens: TokenTable, bins: int) -> np.ndarray:
        """(n,) the published bin of each token. Unlike in TokenTable.part_of_answer, the last bin
        ends at the largest t / length of the run, and a token on an edge belongs to the bin before
        it."""
        edges = np.linspace(0, (self.longest - 1) / self.longest, bins + 1)[1:-1]
        return np.asarray(np.searchsorted(edges, tokens["position"] / tokens["length"]))

    def total(self, partition: str, measure: str) -> Floats:
        return np.asarray(self.of[partition][:, MEASURES.index(measure)])

    def mean(self, partition: str, measure: str) -> Floats:
        return self.total(partition, measure) / self.total(partition, "tokens")

    def share(self, partition: str, measure: str) -> Floats:
        return np.asarray(self.total(partition, measure) / self.total(partition, measure).sum())

    def spread(self, partition: str, unit: str) -> Floats:
        """The sample's standard deviation."""
        n = self.total(partition, "tokens")
        variance = self.mean(partition, f"squared {unit}") - self.mean(partition, unit) ** 2
        return np.asarray(np.sqrt(variance.clip(0) * n / (n - 1)))

    def t(self, unit: str) -> Floats:
        """(positions,) t of each position that several answers have."""
        n = self.total("position", "tokens")
        total, square = (self.total("position", name) for name in (unit, f"squared {unit}"))
        has_enough = n > 1
        return t_values(n[has_enough], total[has_enough], square[has_enough])

    @property
    def heads(self) -> dict[str, str]:
        """The headings of the columns of these tables."""
        old = "A w log p" if self.is_weighted else "A log p"
        return {"old": old, "new": "A w s", "theirs": "published",
                "lp": "mean log p", "size": f"mean abs({old})", "new size": "mean abs(A) w s",
                "notes' lp": "published mean log p", "notes' size": "published mean abs"}


def within(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The values, of which those beyond the outer edges are clipped."""
    return values.clip(edges[0], edges[-1])


def with_contributions(tokens: TokenTable) -> TokenTable:
    """The tokens with a column for each of MEASURES."""
    contribution = tokens["advantage"] * tokens["weight"] * tokens["log_prob"]
    return tokens.having({
        "tokens": np.ones(len(tokens)),
        "contribution": contribution,
        "abs contribution": np.abs(contribution),
        "squared contribution": contribution ** 2,
        "squared gradient": tokens["gradient"] ** 2})


def signs_of_rewards(record: StepRecord) -> np.ndarray:
    """(answers,) the sign of the normalised reward: 1, or -1 where it is 0 or less, as the earlier
    experiment counted it; 0 where it is not known."""
    reward, group = record.answers["reward"], record.answers["group"]
    z = group_z_score(torch.from_numpy(reward), torch.from_numpy(group)).numpy()
    sign = np.where(z > 0, 1, -1)
    return np.where(np.isnan(z), 0, sign)


def class_of(text: str) -> str:
    """The class of a token, by the regular expressions of the earlier experiment. A piece of a tag
    is filler: a tokenizer cuts tags."""
    text = text.strip()
    if text in ("<think>", "</think>", "<answer>", "</answer>"):
        return STRUCTURE
    is_reasoning = re.fullmatch(r"[0-9+\-*/()=]+", text) or re.search("[0-9]", text)
    return REASONING if is_reasoning or text in SPELLED else FILLER


def class_codes(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """(n,) the number of each token's class in CLASSES."""
    distinct, which = np.unique(ids, return_inverse=True)
    codes = []
    for token in distinct.tolist():
        text = tokenizer.decode([token], skip_special_tokens=False)
        codes.append(CLASSES.index(class_of(text)))
    return np.array(codes)[which]


def quantile(counts: Floats, share: float) -> float:
    """The quantile of the numbers 0, 1, 2, ..., of which number i occurs counts[i] times. As in
    numpy.quantile, it is linear between neighbours."""
    rank, ends = share * (counts.sum() - 1), np.cumsum(counts)
    low = np.searchsorted(ends, floor(rank), side="right")
    high = np.searchsorted(ends, ceil(rank), side="right")
    return float(low + (rank % 1) * (high - low))


def t_values(n: Floats, total: Floats, square: Floats) -> Floats:
    """The t-values mean / (population std / sqrt n), from sums of numbers and of their squares; 0
    where there is no spread."""
    mean, square = total / n, square / n
    variance = square - mean ** 2
    has_spread = variance > 1e-14 * square  # less is rounding
    return np.where(has_spread, mean / np.sqrt(np.where(has_spread, variance, 1) / n), 0)
