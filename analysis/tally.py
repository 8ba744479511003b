"""From the credit files of a run to sums over its tokens: a step in memory at a time.

    tally = Tally(run)
    tally.read()
    tally.mean("kind", "abs gradient")      # (7,) the mean size of each kind of token's gradient
    over_the_rest(tally, "kind")            # of each kind over all other tokens, with intervals

A is the advantage of a token, w its weight, p its probability. The gradient at the logits is
`A w (onehot - p)`, of size `abs(A) w s` with s = norm(onehot - p) (grpo.gradient_size). The
contribution `A log p` is what an earlier experiment took for it.

Every sum is made twice: as it is, by blocks of training, and with the groups drawn again
(bootstrap), which is where the intervals come from.
"""
import itertools
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from analysis.statistics import Estimate, ratio, verdicts
from engine.errors import UserError
from engine.tokens import KINDS, SECTIONS, load_tokenizer, naive_class
from grpo import gradient_size
from harness.credit_reading import credit_steps, read_columns

UNITS = ("contribution", "gradient")
LABELS = {"contribution": "A lp", "gradient": "A w s"}  # lp: log p
SIZES = {"contribution": "abs(A lp)", "gradient": "abs(A) w s"}
CLASSES = ("filler", "reasoning", "structure")  # by an earlier experiment's regex
PARTITIONS = {  # name: what its cells are called
    "all": ("all",),
    "class": CLASSES,
    "kind": KINDS,
    "section": SECTIONS,
    "trained": (*KINDS, "without a ratio or a gradient"),
    "position": tuple(range(10)),
    "ends": ("first fifth", "middle", "last fifth"),
    "class by fifth": tuple(itertools.product(CLASSES, range(5)))}
SQUARED = ("s", "ratio", *UNITS)
RESAMPLED = ("tokens", *(f"abs {unit}" for unit in UNITS))
MEASURES = (*RESAMPLED, "log_prob", "entropy", "abs advantage", *SQUARED,
            *(f"squared {name}" for name in SQUARED))
OF_AN_ID = ("entropy", "log_prob", "abs gradient")  # summed for each token id
BLOCKS = 50      # parts of training that the curves are drawn from
DRAWS = 1000     # of the bootstrap over groups
RARE = 0.001     # share of the tokens: what is rarer has neither a ratio nor a bar
OVER_REST = ("mean abs(A) w s over that of all other tokens, where a row has at least "
             f"{RARE:.1%} of the tokens; interval by drawing the groups again, Holm's correction "
             "over the rows (of this table alone)")


def read_tokens(run: Path, step: int) -> dict[str, np.ndarray]:
    """What a run has on record of the tokens of a step."""
    return lay_flat(read_columns(run, int(step)))


def lay_flat(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A credit file's columns, with what follows from them, one value a token."""
    length = lengths(columns)
    answer = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(answer)) - columns["episode_start"][answer]
    numbers = {"log_prob", "entropy", "collision", "weight", "advantage", "ratio"}
    floats = {name: columns[name].astype(np.float64) for name in numbers & columns.keys()}
    codes = {name: columns[name].astype(np.int64) for name in ("kind", "section", "group")}
    s = gradient_size(torch.from_numpy(floats["log_prob"]), torch.from_numpy(floats["collision"]))
    tokens = {**columns, **floats, **codes, "s": s.numpy(), "length": length, "answer": answer,
              "position": position, "relative": position / length[answer]}
    tokens |= {unit: tokens["advantage"] * factor for unit, factor in units(tokens).items()}
    return tokens | {f"abs {name}": np.abs(tokens[name]) for name in ("advantage", *UNITS)}


def lengths(columns: dict[str, np.ndarray]) -> np.ndarray:
    """(answers,) tokens of each."""
    return np.diff(np.append(columns["episode_start"], len(columns["token_id"])))


def units(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is multiplied by the advantage in each unit."""
    return {"contribution": tokens["log_prob"], "gradient": tokens["weight"] * tokens["s"]}


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([int(token_id)], skip_special_tokens=False)


class Vocabulary:
    """Of each token id: its class by the regex, what is summed, and how often it was of each kind.
    A model can have more tokens than its tokenizer, since embeddings are padded, but not ever so
    many."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.size = tokenizer, 2 * tokenizer.get_vocab_size() + 4096
        self.class_of = np.full(self.size, -1)  # where nobody has asked
        self.sums = {name: np.zeros(self.size) for name in OF_AN_ID}
        self.kinds = np.zeros((self.size, len(KINDS)))

    def classes(self, ids: np.ndarray) -> np.ndarray:
        """(tokens,) the index in CLASSES of each."""
        for i in np.unique(ids[self.class_of[ids] < 0]):
            self.class_of[i] = CLASSES.index(naive_class(text_of(self.tokenizer, i)))
        return self.class_of[ids]

    def add(self, tokens: dict[str, np.ndarray]) -> None:
        ids = tokens["token_id"].astype(np.int64)
        for name, total in self.sums.items():
            total += np.bincount(ids, tokens[name], self.size)
        id_and_kind = ids * len(KINDS) + tokens["kind"]
        self.kinds += np.bincount(id_and_kind, minlength=self.kinds.size).reshape(self.kinds.shape)

    @property
    def count(self) -> np.ndarray:
        return self.kinds.sum(1)


class Tally:
    """What is known of a run: of[partition][block, cell, measure], and
    resampled[partition][draw, cell, measure] with the groups drawn again."""

    def __init__(self, run: Path):
        self.run, self.steps = Path(run), credit_steps(run)
        if not self.steps:
            raise UserError(f"{run} has no credit files yet")
        self.tokenizer = load_tokenizer(self.run)
        self.blocks = np.array_split(np.array(self.steps), min(BLOCKS, len(self.steps)))
        self.tokens, self.groups = 0, 0
        self.answers = np.zeros(len(self.blocks), np.int64)
        self.flat_answers = np.zeros(len(self.blocks))  # in groups of equal rewards; nan: unknown
        self.vocabulary, self.rng = Vocabulary(self.tokenizer), np.random.default_rng(0)
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}
        self.of, self.resampled, self.live = {}, {}, {}  # live: groups with a gradient in a cell
        for name, cells in PARTITIONS.items():
            self.of[name] = np.zeros((len(self.blocks), len(cells), len(MEASURES)))
            self.resampled[name] = np.zeros((DRAWS, len(cells), len(RESAMPLED)))
            self.live[name] = np.zeros(len(cells), np.int64)

    def read(self, status=lambda text: None) -> None:
        """Where bins lie has to be known before anything is summed: two passes."""
        longest = 0  # tokens of the longest answer
        for step in self.steps:
            status(f"{self.run.name}: lengths, step {step} of {self.steps[-1]}")
            longest = max(longest, int(lengths(read_columns(self.run, step)).max()))
        self.edges = {bins: cut_edges(longest, bins) for bins in (5, 10)}
        for block, steps in enumerate(self.blocks):
            for step in steps:
                status(f"{self.run.name}: step {step} of {self.steps[-1]}")
                self.add(read_tokens(self.run, step), block)

    def add(self, tokens: dict[str, np.ndarray], block: int) -> None:
        groups = [tokens["reward"][tokens["group"] == g] for g in np.unique(tokens["group"])]
        self.tokens += len(tokens["token_id"])
        self.groups += len(groups)
        self.answers[block] += len(tokens["group"])
        flat = sum(len(r) for r in groups if np.ptp(r) == 0)
        self.flat_answers[block] += np.nan if np.isnan(tokens["reward"]).any() else flat
        self.add_sums(tokens, block)
        self.vocabulary.add(tokens)
        for unit, (low, high) in self.extremes.items():
            self.extremes[unit] = [min(low, tokens[unit].min()), max(high, tokens[unit].max())]

    def add_sums(self, tokens: dict[str, np.ndarray], block: int) -> None:
        groups, group = np.unique(tokens["group"][tokens["answer"]], return_inverse=True)
        measures = measured(tokens)
        # How often each group is drawn: with independent Poisson(1) counts the bootstrap needs no
        # list of all groups, so its memory does not grow with them (Chamandy et al. 2012,
        # "Estimating uncertainty for massive data streams").
        drawn = self.rng.poisson(1.0, (DRAWS, len(groups))).astype(np.float64)
        for name, cell in self.cells(tokens).items():
            by_group = sums_by_group(group, len(groups), cell, len(PARTITIONS[name]), measures)
            self.of[name][block] += by_group.sum(0)
            self.live[name] += (by_group[..., MEASURES.index("abs contribution")] > 0).sum(0)
            self.resampled[name] += np.tensordot(drawn, by_group[..., :len(RESAMPLED)], axes=1)

    def cells(self, tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Which cell of each partition a token falls into."""
        kind, naive = tokens["kind"], self.vocabulary.classes(tokens["token_id"])
        middle = (tokens["position"] + 0.5) / tokens["length"][tokens["answer"]]
        trained = ("ratio" in tokens) & (tokens["weight"] * tokens["advantage"] != 0)
        fifth, tenth = (np.searchsorted(self.edges[bins], tokens["relative"]) - 1
                        for bins in (5, 10))
        return {"all": np.zeros_like(kind),
                "class": naive,
                "kind": kind,
                "section": tokens["section"],
                "trained": np.where(trained, kind, len(KINDS)),
                "position": tenth,
                "ends": np.digitize(middle, (0.2, 0.8)),
                "class by fifth": 5 * naive + fifth}

    def total(self, partition: str, measure: str, blocks=slice(None)) -> np.ndarray:
        """(cells,) over all of training, or some blocks of it."""
        return self.by_block(partition, measure)[blocks].sum(0)

    def by_block(self, partition: str, measure: str) -> np.ndarray:
        """(blocks, cells)"""
        return self.of[partition][..., MEASURES.index(measure)]

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

    def shares(self, partition: str) -> np.ndarray:
        """(cells,) of the gradient."""
        sizes = self.total(partition, "abs gradient")
        return sizes / max(sizes.sum(), 1e-300)

    def is_common(self, partition: str) -> np.ndarray:
        """(cells,) whether there are enough tokens to say something of them."""
        return self.count(partition) >= max(1, RARE * self.tokens)

    def ratios(self, partition: str, unit: str, ratio_of) -> tuple[np.ndarray, np.ndarray]:
        """A ratio of mean sizes, `ratio_of(sizes, tokens)`: as it is, and of every draw."""
        sizes, tokens = (self.total(partition, name) for name in (f"abs {unit}", "tokens"))
        drawn = self.resampled[partition]  # (draws, cells, RESAMPLED)
        drawn_sizes, drawn_tokens = drawn[..., RESAMPLED.index(f"abs {unit}")], drawn[..., 0]
        with np.errstate(invalid="ignore", divide="ignore"):
            return ratio_of(sizes, tokens), ratio_of(drawn_sizes, drawn_tokens)


def measured(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray | None]:
    """What is summed over tokens, by name; tokens themselves are counted."""
    measures = {"ratio": np.zeros_like(tokens["s"]), **tokens, "tokens": None}
    return measures | {f"squared {name}": measures[name] ** 2 for name in SQUARED}


def sums_by_group(group, groups: int, cell, cells: int, measures: dict) -> np.ndarray:
    """(groups, cells, measures)"""
    index, size = group * cells + cell, groups * cells
    sums = [np.bincount(index, measures[name], size).reshape(groups, cells) for name in MEASURES]
    return np.stack(sums, axis=-1)


def cut_edges(longest: int, bins: int) -> np.ndarray:
    """Bins of equal width between the smallest and the largest relative position, open on the left;
    the lowest edge lies 0.1% of the range lower, so that 0 is inside (what pandas.cut does)."""
    if longest == 1:  # every answer is one token: all positions are 0
        return np.linspace(-0.001, 0.001, bins + 1)
    edges = np.linspace(0, (longest - 1) / longest, bins + 1)
    edges[0] -= 0.001 * edges[-1]
    return edges


def over_the_rest(tally: Tally, partition: str) -> list[Estimate]:
    """Mean gradient in a cell over that in all other tokens, for each cell."""
    def ratio_of(sizes, tokens):
        other_sizes, other_tokens = (x.sum(-1, keepdims=True) - x for x in (sizes, tokens))
        return sizes / tokens / (other_sizes / other_tokens)

    values, draws = tally.ratios(partition, "gradient", ratio_of)
    values = np.where(tally.is_common(partition), values, np.nan)
    live = tally.live[partition]
    return [ratio(float(values[i]), draws[:, i], int(live[i])) for i in range(len(live))]


def rest_columns(tally: Tally, partition: str, cells) -> dict[str, tuple]:
    """Columns of a table that has a row for each of these cells; OVER_REST is their note."""
    of_all = over_the_rest(tally, partition)
    found = [of_all[cell] for cell in cells]
    return {"over rest": (".2f", [one.value for one in found]),
            "95%": (".2f", [one.interval for one in found]),
            "difference": ("", verdicts(found))}


def cell_over_cell(tally: Tally, partition: str, unit: str, one: int, other: int) -> Estimate:
    """Mean size in one cell over that in another."""
    value, draws = tally.ratios(partition, unit, lambda sizes, tokens: (
        sizes[..., one] / tokens[..., one] / (sizes[..., other] / tokens[..., other])))
    return ratio(float(value), draws, int(tally.live[partition][[one, other]].min()))


def early_over_late(tally: Tally, unit: str) -> Estimate:
    """The first fifth of the answers over the last."""
    return cell_over_cell(tally, "ends", unit, 0, 2)
