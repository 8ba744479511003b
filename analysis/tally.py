"""One pass over the credit files of a run, a step in memory at a time.

    tally = Tally(run)
    tally.read()
    tally.mean("kind", "abs gradient")      # (7,) the mean size of each kind of token's gradient

A file beside this one for each thing that is kept: sums, positions, vocabulary, histograms.
"""
from pathlib import Path

import numpy as np

from analysis.histograms import Histograms
from analysis.positions import Positions
from analysis.sizes import lengths, read_tokens
from analysis.sums import MEASURES, RESAMPLED, Sums
from analysis.vocabulary import Vocabulary
from harness.credit_reading import credit_steps, read_columns
from engine.errors import UserError
from engine.tokens import load_tokenizer

BLOCKS = 50      # parts of training that the curves are drawn from


class Tally:
    """What is known of a run after one pass."""

    def __init__(self, run: Path):
        self.run, self.steps = Path(run), credit_steps(run)
        if not self.steps:
            raise UserError(f"{run} has no credit files yet")
        self.tokenizer = load_tokenizer(self.run)
        self.blocks = np.array_split(np.array(self.steps), min(BLOCKS, len(self.steps)))
        self.tokens, self.groups = 0, 0
        self.answers = np.zeros(len(self.blocks), np.int64)
        self.flat_answers = np.zeros(len(self.blocks))  # in groups of equal rewards; nan: unknown
        self.vocabulary, self.histograms = Vocabulary(self.tokenizer), Histograms()

    def read(self, status=lambda text: None) -> None:
        """Where bins lie has to be known before anything is summed: two passes."""
        longest = 0
        for step in self.steps:
            status(f"{self.run.name}: lengths, step {step} of {self.steps[-1]}")
            longest = max(longest, int(lengths(read_columns(self.run, step)).max()))
        self.sums, self.positions = Sums(len(self.blocks), longest), Positions(longest)
        for block, steps in enumerate(self.blocks):
            for step in steps:
                status(f"{self.run.name}: step {step} of {self.steps[-1]}")
                self.add(read_tokens(self.run, step), block)

    def add(self, tokens: dict[str, np.ndarray], block: int) -> None:
        tokens["class"] = self.vocabulary.classes(tokens["token_id"])
        groups = [tokens["reward"][tokens["group"] == g] for g in np.unique(tokens["group"])]
        self.tokens += len(tokens["token_id"])
        self.groups += len(groups)
        self.answers[block] += len(tokens["group"])
        flat = sum(len(r) for r in groups if np.ptp(r) == 0)
        self.flat_answers[block] += np.nan if np.isnan(tokens["reward"]).any() else flat
        self.sums.add(tokens, block)
        for part in (self.vocabulary, self.positions, self.histograms):
            part.add(tokens)

    def total(self, partition: str, measure: str, blocks=slice(None)) -> np.ndarray:
        """(cells,) over all of training, or some blocks of it."""
        return self.by_block(partition, measure)[blocks].sum(0)

    def by_block(self, partition: str, measure: str) -> np.ndarray:
        """(blocks, cells)"""
        return self.sums.of[partition][..., MEASURES.index(measure)]

    def count(self, partition: str) -> np.ndarray:
        return self.total(partition, "tokens").astype(np.int64)

    def mean(self, partition: str, measure: str, blocks=slice(None)) -> np.ndarray:
        total, tokens = (self.total(partition, name, blocks) for name in (measure, "tokens"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / tokens

    def spread(self, partition: str, measure: str) -> np.ndarray:
        """(cells,) the sample's standard deviation."""
        n, total = self.total(partition, "tokens"), self.total(partition, measure)
        squares = self.total(partition, f"squared {measure}")
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(((squares - total ** 2 / n) / (n - 1)).clip(0))

    def summed(self, partition: str, unit: str) -> tuple[np.ndarray, np.ndarray]:
        """(cells,) sizes and tokens."""
        return self.total(partition, f"abs {unit}"), self.total(partition, "tokens")

    def drawn(self, partition: str, unit: str) -> tuple[np.ndarray, np.ndarray]:
        """(draws, cells) sizes and tokens, with the groups drawn again."""
        drawn = self.sums.drawn[partition]
        return drawn[..., RESAMPLED.index(f"abs {unit}")], drawn[..., 0]
