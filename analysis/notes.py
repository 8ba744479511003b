"""The tables of the notes that this lab began with, from the credit files of any run.

    notes = Notes(run, Tally(run["folder"]))
    notes.mean("class", "abs contribution")   # (3,) of filler, reasoning, structure

The notes (github.com/Ja-Crispy/GRPO-Zero) took contribution = A log p for the gradient of a token.
It is the value of a term of the objective; the gradient has the size abs(A) w s. So each table has
both, and the notes' own figures. The definitions are theirs: classes by the token's own text; bins
of equal width up to the largest t / length, closed on the right; one t-statistic at each place t.
"""
import re
from math import ceil, floor

import numpy as np
import torch
from tokenizers import Tokenizer

from analysis.runs import Run
from analysis.statistics import Floats, t_values
from analysis.tally import Tally, Tokens, read_tokens
from grpo import group_z_score
from harness.screen import show_status

CLASSES = FILLER, REASONING, STRUCTURE = "filler", "reasoning", "structure"
SPELLED = ("equals", "plus", "minus", "times", "divided")
UNITS = ("contribution", "gradient")  # A w log p, A w s
MEASURES = ("tokens", "log_prob", "s", *UNITS, *(f"{how} {unit}" for how in ("abs", "squared")
                                                 for unit in UNITS))
DRAWS = 20       # shuffles of the advantages within their groups
UNDEFINED = np.errstate(invalid="ignore", divide="ignore")  # nan, which a table shows as -
VALUES = np.linspace(-5, 5, 101)  # edges of histograms; what lies outside counts in the last bar
LOG_PROBS, ADVANTAGES = np.linspace(-10, 0, 51), np.linspace(-4, 4, 41)
SIZES = {  # the notes' mean absolute contribution by class, and by the discount of their run
    1.0: {FILLER: 0.333, REASONING: 0.254}, 0.75: {FILLER: 0.348, REASONING: 0.247}}


class Notes:
    """Sums over a run's tokens, a step in memory at a time: of[partition][cell, measure]. And at
    each place over[draw, unit, power, place]: draw 0 as it was, others with shuffled advantages."""

    def __init__(self, run: Run, tally: Tally, draws: int = DRAWS):
        self.tally, self.longest, self.is_weighted = tally, tally.longest, False
        self.rng, config = np.random.default_rng(0), run["config"]
        is_discounted = (config["mitigation"], config.get("think_discount")) == (
            "outcome_conditional", 0.75)
        self.published = 0.75 if is_discounted else 1.0
        self.is_of_the_notes = is_discounted or config["mitigation"] == "none"
        ids, blocks = len(tally.kinds_of_id), len(tally.blocks)
        cells = {"all": 1, "sign": 3, "reward": 3, "bin": 10, "class": 3, "class by fifth": 15,
                 "class by block": 3 * blocks, "place": self.longest, "token": ids}
        self.of = {name: np.zeros((count, len(MEASURES))) for name, count in cells.items()}
        self.over = np.zeros((1 + draws, len(UNITS), 2, self.longest))
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}
        self.values = {unit: np.zeros(len(VALUES) - 1) for unit in UNITS}
        self.cloud = np.zeros((len(LOG_PROBS) - 1, len(ADVANTAGES) - 1))
        for block, steps in enumerate(tally.blocks):
            for step in steps.tolist():
                show_status(f"{run['folder'].name}: the notes' tables, step {step}")
                self.add(as_in_the_notes(read_tokens(run["folder"], step)), block)

    def add(self, tokens: Tokens, block: int) -> None:
        by_class = class_codes(self.tally.tokenizer, tokens["token_id"])
        cells = {"all": 0 * by_class, "sign": 1 + np.sign(tokens["advantage"]).astype(int),
                 "reward": 1 + tokens["reward sign"], "bin": self.bin_of(tokens, 10),
                 "class": by_class, "class by fifth": 5 * by_class + self.bin_of(tokens, 5),
                 "class by block": 3 * block + by_class, "place": tokens["place"],
                 "token": tokens["token_id"]}
        for name, cell in cells.items():
            for sums, measure in zip(self.of[name].T, MEASURES):
                values = tokens[measure] if measure != "tokens" else None
                sums += np.bincount(cell, values, len(sums))
        self.is_weighted |= bool((tokens["weight"] != 1).any())
        for unit in UNITS:
            low, high = self.extremes[unit]
            self.extremes[unit] = [min(low, tokens[unit].min()), max(high, tokens[unit].max())]
            self.values[unit] += np.histogram(tokens[unit].clip(*VALUES[[0, -1]]), VALUES)[0]
        self.cloud += np.histogram2d(tokens["log_prob"].clip(*LOG_PROBS[[0, -1]]),
                                     tokens["advantage"].clip(*ADVANTAGES[[0, -1]]),
                                     [LOG_PROBS, ADVANTAGES])[0]
        self.add_draws(tokens)

    def add_draws(self, tokens: Tokens) -> None:
        """A shuffle gives an answer the advantages of another one of its group: at a token that at
        the same share of its length."""
        answers, length = np.arange(len(tokens["group"])), tokens["length"]
        for draw, over in enumerate(self.over):
            giver = shuffled(tokens["group"], self.rng) if draw else answers
            theirs, mine = giver[tokens["answer"]], tokens["answer"]
            place = tokens["place"] * length[theirs] // length[mine]
            advantage = tokens["advantage"][tokens["episode_start"][theirs] + place]
            for sums, factor in zip(over, ("log_prob", "s")):
                value = advantage * tokens["weight"] * tokens[factor]
                sums[0] += np.bincount(tokens["place"], value, self.longest)
                sums[1] += np.bincount(tokens["place"], value ** 2, self.longest)

    def bin_of(self, tokens: Tokens, bins: int) -> np.ndarray:
        edges = np.linspace(0, (self.longest - 1) / self.longest, bins + 1)[1:-1]
        return np.searchsorted(edges, tokens["place"] / tokens["length"][tokens["answer"]])

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

    def t(self, unit: str, fewest: int) -> Floats:
        """(1 + draws, places)"""
        n, over = self.total("place", "tokens"), self.over[:, UNITS.index(unit)]
        return t_values(n[n >= fewest], *np.moveaxis(over[..., n >= fewest], 1, 0))

    @property
    def heads(self) -> dict[str, str]:
        """What the columns of these tables are called."""
        old = "A w log p" if self.is_weighted else "A log p"
        return {"old": old, "new": "A w s", "theirs": "notes'", "lp": "mean log p",
                "size": f"mean abs({old})", "new size": "mean abs(A) w s",
                "notes' lp": "notes' log p", "notes' size": "notes' mean abs"}


def as_in_the_notes(tokens: Tokens) -> Tokens:
    """With the columns of the notes that a credit file does without: contribution, normalised
    reward (its sign: -1, 0 where it is unknown, 1; the notes counted 0 with -1), and place."""
    contribution = tokens["advantage"] * tokens["weight"] * tokens["log_prob"]
    reward, group = (torch.from_numpy(tokens[name]) for name in ("reward", "group"))
    z = group_z_score(reward, group).numpy()
    sign = np.where(np.isnan(z), 0, np.where(z > 0, 1, -1))
    return tokens | {
        "contribution": contribution, "abs contribution": abs(contribution),
        "squared contribution": contribution ** 2, "normalised reward": z[tokens["answer"]],
        "reward sign": sign[tokens["answer"]],
        "place": np.arange(len(contribution)) - tokens["episode_start"][tokens["answer"]]}


def class_of(text: str) -> str:
    """By the notes' regular expressions. A tokenizer cuts tags: a piece of one is filler."""
    text = text.strip()
    if text in ("<think>", "</think>", "<answer>", "</answer>"):
        return STRUCTURE
    is_reasoning = re.fullmatch(r"[0-9+\-*/()=]+", text) or re.search("[0-9]", text)
    return REASONING if is_reasoning or text in SPELLED else FILLER


def class_codes(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """(n,) the number of each token's class in CLASSES."""
    distinct, which = np.unique(ids, return_inverse=True)
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in distinct.tolist()]
    return np.array([CLASSES.index(class_of(text)) for text in texts])[which]


def shuffled(group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(answers,) for each another one of its group, drawn without return."""
    giver = np.empty(len(group), int)
    giver[np.argsort(group, kind="stable")] = np.lexsort((rng.random(len(group)), group))
    return giver


def quantile(counts: Floats, share: float) -> float:
    """Of whole numbers that occur so often: numpy.quantile, which is linear between neighbours."""
    rank, ends = share * (counts.sum() - 1), np.cumsum(counts)
    low, high = (np.searchsorted(ends, end, side="right") for end in (floor(rank), ceil(rank)))
    return float(low + (rank % 1) * (high - low))


def look(ours: float, theirs: float | None, border: float | None = None) -> str:
    """Same: within a quarter of the notes' figure; where a border is given, on its side of it."""
    if theirs is None or not np.isfinite(ours):
        return ""
    is_same = (ours > border) == (theirs > border) if border is not None else (
        0.8 <= ours / theirs <= 1.25)
    return "same" if is_same else "other"
