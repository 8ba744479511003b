"""One pass over the credit files of a run, a step in memory at a time: every sum that the tables and pictures need.

A token has two sizes. The contribution `A log p` is the value of the objective, which an earlier experiment took for a
gradient; the gradient at the logits is `A (onehot - p)`, of norm `abs(A) s` (grpo.gradient_size). Both are summed with the
mitigation's weight and without, over several partitions of the tokens (by class, by position, ...), and again with the
groups drawn anew, which is where the intervals come from.
"""
import re
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from countdown_task import KINDS, SECTIONS
from engine.tokens import load_tokenizer
from grpo import gradient_size, group_z_score
from analysis.statistics import Estimate, Regression, poisson_draws, ratio, shuffle_within
from engine.errors import UserError
from engine.credit_file import read_columns
from engine.run_folder import step_of

CLASSES = ("filler", "reasoning", "structure")
SIGNS = ("A > 0", "A = 0", "A < 0")
NORMALISED = ("z > 0", "z <= 0")  # z: the reward normalised in its group
UNITS = ("contribution", "weighted contribution", "gradient", "weighted gradient")
LABELS = dict(zip(UNITS, ("A lp", "A w lp", "A s", "A w s")))
MEASURES = ("tokens", "log_prob", "entropy", "s", "weight", "squared weight",
            *UNITS, *(f"abs {unit}" for unit in UNITS), *(f"squared {unit}" for unit in UNITS))
RESAMPLED = ("tokens", *(f"abs {unit}" for unit in UNITS))
PARTITIONS = {  # name: what its cells are called
    "all": ("all",), "sign": SIGNS, "normalised": NORMALISED, "class": CLASSES, "kind": KINDS, "section": SECTIONS,
    "position": tuple(range(10)), "ends": ("first fifth", "middle", "last fifth"),
    "far ends": ("below the 20% quantile", "middle", "above the 80% quantile"),
    "class by fifth": [(c, b) for c in CLASSES for b in range(5)],
    "class by twentieth": [(c, b) for c in CLASSES for b in range(20)], "kind by twentieth": [(k, b) for k in KINDS for b in range(20)],
    "class by kind": [(c, k) for c in CLASSES for k in KINDS], "section by kind": [(s, k) for s in SECTIONS for k in KINDS]}
BLOCKS = 50      # parts of training that the curves are drawn from
DRAWS = 1000     # of the bootstrap over groups
SHUFFLES = 100   # of the advantages within their groups
SIZE_EDGES = np.linspace(-6, 3, 91)  # log10 of a contribution, a gradient size or a weight
LOG_PROB_EDGES, S_EDGES = np.linspace(-14, 0, 141), np.linspace(0, np.sqrt(2), 72)
ENTROPY_EDGES, ADVANTAGE_EDGES = np.linspace(0, 12, 121), np.linspace(-5, 5, 81)


def naive_class(text: str) -> str:
    """The class that the earlier experiment's regular expressions give a token, from its own text alone. Tokenizers cut
    tags into pieces, and the pieces are no whole tags: they count as filler."""
    text = text.strip()
    if re.fullmatch("</?(think|answer|THINK|ANSWER)>", text):
        return "structure"
    digits = re.fullmatch(r"[\d+\-*/()=]+", text) or re.search(r"\d", text)
    return "reasoning" if digits or text in ("equals", "plus", "minus", "times", "divided") else "filler"


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([int(token_id)], skip_special_tokens=False)


def cut_edges(longest: int, bins: int) -> np.ndarray:
    """Bins of equal width between the smallest and the largest relative position, open on the left; the lowest edge lies
    0.1% of the range lower, so that 0 is inside (what pandas.cut does)."""
    if longest == 1:  # every answer is one token: all positions are 0
        return np.linspace(-0.001, 0.001, bins + 1)
    edges = np.linspace(0, (longest - 1) / longest, bins + 1)
    edges[0] -= 0.001 * edges[-1]
    return edges


def credit_steps(run: Path) -> list[int]:
    return sorted(step for path in Path(run).glob("credit/step_*.npz") if (step := step_of(path)))


def lengths(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.diff(np.append(columns["episode_start"], len(columns["token_id"])))


def lay_flat(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A credit file's columns, with what follows from them, one value a token."""
    length = lengths(columns)
    answer = np.repeat(np.arange(len(length)), length)
    position = np.arange(len(answer)) - columns["episode_start"][answer]
    floats = {name: columns[name].astype(np.float64) for name in ("log_prob", "entropy", "collision", "weight", "advantage")}
    s = gradient_size(torch.from_numpy(floats["log_prob"]), torch.from_numpy(floats["collision"])).numpy()
    codes = {name: columns[name].astype(np.int64) for name in ("kind", "section", "group")}
    return {**columns, **floats, **codes, "s": s, "length": length, "answer": answer, "position": position,
            "relative": position / length[answer], "token_group": codes["group"][answer]}


def end_of(tokens: dict[str, np.ndarray]) -> np.ndarray:
    """Whether the middle of a token stands in the first fifth of its answer, in between, or in the last fifth."""
    return np.digitize((tokens["position"] + 0.5) / tokens["length"][tokens["answer"]], (0.2, 0.8))


def units(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is multiplied by the advantage in each unit."""
    log_prob, weight, s = (tokens[name] for name in ("log_prob", "weight", "s"))
    return dict(zip(UNITS, (log_prob, weight * log_prob, s, weight * s)))


class Tally:
    """What is known of a run after one pass."""

    def __init__(self, run: Path, status=lambda text: None):
        self.run, self.steps = Path(run), credit_steps(run)
        if not self.steps:
            raise UserError(f"{run} has no credit files yet")
        self.tokenizer = load_tokenizer(self.run)
        self.blocks = np.array_split(np.array(self.steps), min(BLOCKS, len(self.steps)))
        self.at_position = self.count_positions(status)  # where bins and quantiles lie has to be known before anything is summed
        self.tokens, self.longest = int(self.at_position.sum()), len(self.at_position)
        self.groups, self.answers, self.weights_are_one = 0, 0, True
        self.sums = Sums(self)
        self.vocabulary, self.positions, self.histograms = Vocabulary(self.tokenizer), Positions(self), Histograms()
        self.regressions = regressions()
        for block, steps in enumerate(self.blocks):
            for step in steps:
                status(f"{self.run.name}: step {step} of {self.steps[-1]}")
                self.add(lay_flat(read_columns(self.run, int(step))), block)

    def count_positions(self, status) -> np.ndarray:
        """How many tokens stand at each position: of position t, the answers longer than t."""
        counts = np.zeros(0, np.int64)
        for step in self.steps:
            status(f"{self.run.name}: lengths, step {step} of {self.steps[-1]}")
            longer = np.cumsum(np.bincount(lengths(read_columns(self.run, step)))[::-1])[::-1][1:]
            counts = np.pad(counts, (0, max(0, len(longer) - len(counts))))
            counts[:len(longer)] += longer
        return counts

    def add(self, tokens: dict[str, np.ndarray], block: int) -> None:
        values = {unit: tokens["advantage"] * value for unit, value in units(tokens).items()}
        tokens["class"] = self.vocabulary.classes(tokens["token_id"])
        self.weights_are_one &= bool((tokens["weight"] == 1).all())
        self.groups += len(np.unique(tokens["group"]))
        self.answers += len(tokens["group"])
        self.sums.add(tokens, values, block)
        self.vocabulary.add(tokens, values)
        self.positions.add(tokens, values, block)
        self.histograms.add(tokens, values)
        for unit, regression in self.regressions.items():
            regression.add(design(tokens, unit), np.abs(values[unit]), tokens["token_group"])

    @property
    def units(self) -> tuple[str, ...]:
        """Those to show: where all weights are 1, weighted and unweighted are the same."""
        return UNITS[::2] if self.weights_are_one else UNITS

    @property
    def final(self) -> str:
        """The unit that counts: the gradient with the weights on record."""
        return "gradient" if self.weights_are_one else "weighted gradient"

    def total(self, partition: str, measure: str, blocks=slice(None)) -> np.ndarray:
        """(cells,) over all of training, or some blocks of it."""
        return self.sums.of[partition][blocks, :, MEASURES.index(measure)].sum(0)

    def count(self, partition: str) -> np.ndarray:
        return self.total(partition, "tokens").astype(np.int64)

    def mean(self, partition: str, measure: str, blocks=slice(None)) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.total(partition, measure, blocks) / self.total(partition, "tokens", blocks)

    def spread(self, partition: str, measure: str) -> np.ndarray:
        """(cells,) the sample's standard deviation."""
        n, total, squares = (self.total(partition, m) for m in ("tokens", measure, f"squared {measure}"))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(((squares - total ** 2 / n) / (n - 1)).clip(0))

    def drawn(self, partition: str, unit: str) -> tuple[np.ndarray, np.ndarray]:
        """(draws, cells) sizes and (draws, cells) tokens, with the groups drawn again."""
        found = self.sums.drawn[partition]
        return found[..., RESAMPLED.index(f"abs {unit}")], found[..., 0]


class Sums:
    """of[partition][block, cell, measure], and drawn[partition][draw, cell, measure] with the groups drawn again."""

    def __init__(self, tally: Tally):
        B, self.rng = len(tally.blocks), np.random.default_rng(0)
        self.edges = {bins: cut_edges(tally.longest, bins) for bins in (5, 10, 20)}
        self.low, self.high = (position_quantile(tally.at_position, q) for q in (0.2, 0.8))
        self.of = {name: np.zeros((B, len(cells), len(MEASURES))) for name, cells in PARTITIONS.items()}
        self.drawn = {name: np.zeros((DRAWS, len(cells), len(RESAMPLED))) for name, cells in PARTITIONS.items()}
        self.live = {name: np.zeros(len(cells), np.int64) for name, cells in PARTITIONS.items()}  # groups with a gradient in a cell
        self.extremes = {name: [np.inf, -np.inf] for name in (*UNITS, "weight")}
        self.answers = np.zeros(len(NORMALISED), np.int64)  # with a normalised reward above 0, and not

    def add(self, tokens, values, block: int) -> None:
        groups, group = np.unique(tokens["token_group"], return_inverse=True)
        of = {"tokens": None, **{name: tokens[name] for name in ("log_prob", "entropy", "s", "weight")}, "squared weight": tokens["weight"] ** 2,
              **values, **{f"abs {unit}": np.abs(x) for unit, x in values.items()}, **{f"squared {unit}": x * x for unit, x in values.items()}}
        drawn = poisson_draws(self.rng, DRAWS, len(groups))
        for name, cell in self.cells(tokens).items():
            shape = len(groups), len(PARTITIONS[name])
            index, size = group * shape[1] + cell, shape[0] * shape[1]
            by_group = np.stack([np.bincount(index, of[m], size).reshape(shape) for m in MEASURES], axis=-1)
            self.of[name][block] += by_group.sum(0)
            self.live[name] += (by_group[..., MEASURES.index("abs gradient")] > 0).sum(0)
            self.drawn[name] += np.tensordot(drawn, by_group[..., [MEASURES.index(m) for m in RESAMPLED]], axes=1)
        for name, (low, high) in self.extremes.items():
            self.extremes[name] = [min(low, of[name].min()), max(high, of[name].max())]

    def cells(self, tokens) -> dict[str, np.ndarray]:
        """Which cell of each partition a token falls into."""
        relative, position = tokens["relative"], tokens["position"]
        kind, section, naive = tokens["kind"], tokens["section"], tokens["class"]
        fifth, tenth, twentieth = (np.searchsorted(self.edges[bins], relative) - 1 for bins in (5, 10, 20))
        z = group_z_score(torch.from_numpy(tokens["reward"]), torch.from_numpy(tokens["group"])).numpy()
        self.answers += [(z > 0).sum(), (z <= 0).sum()]
        return {"all": np.zeros_like(kind), "sign": 1 - np.sign(tokens["advantage"]).astype(np.int64),
                "normalised": (z <= 0).astype(np.int64)[tokens["answer"]], "class": naive, "kind": kind, "section": section,
                "position": tenth, "ends": end_of(tokens),
                "far ends": np.where(position < self.low, 0, np.where(position > self.high, 2, 1)),
                "class by fifth": 5 * naive + fifth, "class by twentieth": 20 * naive + twentieth, "kind by twentieth": 20 * kind + twentieth,
                "class by kind": len(KINDS) * naive + kind, "section by kind": len(KINDS) * section + kind}


class Positions:
    """What a t at each absolute position needs, for the advantages as they are and shuffled within their groups."""

    def __init__(self, tally: Tally):
        B, self.longest, self.rng = len(tally.blocks), tally.longest, np.random.default_rng(1)
        self.counts = np.zeros((B, self.longest), np.int64)
        self.sums = {unit: np.zeros((2, B, self.longest)) for unit in UNITS}            # of values, of squares
        self.shuffled = {unit: np.zeros((2, SHUFFLES, self.longest)) for unit in UNITS}
        self.answers, self.flat_answers = np.zeros(B, np.int64), np.zeros(B, np.int64)  # all, and of groups without spread

    def add(self, tokens, values, block: int) -> None:
        position, group, reward = tokens["position"], tokens["group"], tokens["reward"]
        self.counts[block] += np.bincount(position, minlength=self.longest)
        for unit, x in values.items():
            self.sums[unit][:, block] += self.of(position, x)
        flat = [g for g in np.unique(group) if np.ptp(reward[group == g]) == 0]
        self.answers[block] += len(group)
        self.flat_answers[block] += np.isin(group, flat).sum()
        self.add_shuffled(tokens)

    def of(self, position, x) -> list[np.ndarray]:
        return [np.bincount(position, x, self.longest), np.bincount(position, x * x, self.longest)]

    def add_shuffled(self, tokens) -> None:
        """Answers of a group change places, with all their advantages: where those differ within an answer, the new one reads
        them at the same relative position, so that neighbours stay neighbours."""
        answer, position, advantage, found = tokens["answer"], tokens["position"], tokens["advantage"], {}
        start, length = tokens["episode_start"], tokens["length"]
        donor = shuffle_within(np.arange(len(start)), tokens["group"], SHUFFLES, self.rng).astype(np.int64)  # (draws, answers)
        whole = np.array_equal(advantage[start][answer], advantage)
        for unit, base in units(tokens).items():
            plain = unit.removeprefix("weighted ")
            if unit != plain and (tokens["weight"] == 1).all():
                found[unit] = found[plain]
            elif whole:
                frame, drawn = np.zeros((len(start), self.longest)), advantage[start][donor]
                frame[answer, position] = base
                found[unit] = np.stack([drawn @ frame, drawn ** 2 @ frame ** 2])
            else:
                drawn = (advantage[(start[d] + position * length[d] // length[answer])] for d in donor[:, answer])
                found[unit] = np.stack([self.of(position, base * x) for x in drawn], axis=1)
            self.shuffled[unit] += found[unit]


class Vocabulary:
    """What is known of each token id: its class by the regex, count, sums of entropy, log-prob and gradient, and kinds."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.class_of = tokenizer, np.zeros(0, np.int64)
        self.count, self.entropy, self.log_prob, self.gradient = np.zeros((4, 0))
        self.kinds = np.zeros((0, len(KINDS)))

    def classes(self, ids: np.ndarray) -> np.ndarray:
        more = max(0, int(ids.max()) + 1 - len(self.class_of))
        self.class_of = np.pad(self.class_of, (0, more), constant_values=-1)
        for i in np.unique(ids):
            if self.class_of[i] < 0:
                self.class_of[i] = CLASSES.index(naive_class(text_of(self.tokenizer, i)))
        return self.class_of[ids]

    def add(self, tokens, values) -> None:
        ids, size = tokens["token_id"], len(self.class_of)
        for name, value in (("count", None), ("entropy", tokens["entropy"]), ("log_prob", tokens["log_prob"]),
                            ("gradient", np.abs(values["weighted gradient"]))):
            before = getattr(self, name)
            setattr(self, name, np.bincount(ids, value, size) + np.pad(before, (0, size - len(before))))
        kinds = np.bincount(ids * len(KINDS) + tokens["kind"], minlength=size * len(KINDS)).reshape(size, -1)
        self.kinds = kinds + np.pad(self.kinds, ((0, size - len(self.kinds)), (0, 0)))


class Histograms:
    """Sizes by class on a logarithmic axis, and two quantities against each other."""

    def __init__(self):
        self.sizes = {name: np.zeros((len(CLASSES), len(SIZE_EDGES) - 1)) for name in (*UNITS, "weight")}
        self.zeros = dict.fromkeys(self.sizes, 0)  # they have no logarithm
        self.log_prob_and_s = np.zeros((len(LOG_PROB_EDGES) - 1, len(S_EDGES) - 1))
        self.log_prob_and_advantage = np.zeros((len(LOG_PROB_EDGES) - 1, len(ADVANTAGE_EDGES) - 1))
        self.entropy_and_s = np.zeros((len(ENTROPY_EDGES) - 1, len(S_EDGES) - 1))
        self.by_entropy = np.zeros((3, len(ENTROPY_EDGES) - 1))  # tokens, sum of s^2, sum of 1 - sum p^2

    def add(self, tokens, values) -> None:
        classes = np.arange(len(CLASSES) + 1)
        for name, x in {**values, "weight": tokens["weight"]}.items():
            there = x != 0
            self.zeros[name] += int((~there).sum())
            power = np.log10(np.abs(x[there])).clip(SIZE_EDGES[0], SIZE_EDGES[-1])
            self.sizes[name] += np.histogram2d(tokens["class"][there], power, [classes, SIZE_EDGES])[0]
        log_prob, entropy, s = tokens["log_prob"].clip(LOG_PROB_EDGES[0], 0), tokens["entropy"].clip(0, ENTROPY_EDGES[-1]), tokens["s"]
        self.log_prob_and_s += np.histogram2d(log_prob, s, [LOG_PROB_EDGES, S_EDGES])[0]
        self.log_prob_and_advantage += np.histogram2d(log_prob, tokens["advantage"].clip(-5, 5), [LOG_PROB_EDGES, ADVANTAGE_EDGES])[0]
        self.entropy_and_s += np.histogram2d(entropy, s, [ENTROPY_EDGES, S_EDGES])[0]
        for row, value in zip(self.by_entropy, (None, s ** 2, 1 - tokens["collision"])):
            row += np.histogram(entropy, ENTROPY_EDGES, weights=value)[0]


def regressions() -> dict[str, Regression]:
    """Of a token's size on position, advantage and class: tenths of the answer against the first, the regex's classes against
    reasoning, kinds against words."""
    common = ["constant", *(f"tenth {i}" for i in range(2, 11)), "abs(A)"]
    return {"contribution": Regression([*common, "filler", "structure"]), "gradient": Regression([*common, *KINDS[1:]]),
            "weighted gradient": Regression([*common, *KINDS[1:]])}


def design(tokens, unit: str) -> np.ndarray:
    tenth = np.minimum(10 * tokens["position"] // tokens["length"][tokens["answer"]], 9)
    common = [np.ones(len(tokens["s"])), *(tenth == i for i in range(1, 10)), np.abs(tokens["advantage"])]
    naive = [tokens["class"] == CLASSES.index(name) for name in ("filler", "structure")]
    return np.stack([*common, *(naive if unit == "contribution" else (tokens["kind"] == k for k in range(1, len(KINDS))))], axis=1).astype(np.float64)


def position_quantile(counts: np.ndarray, q: float) -> float:
    """numpy.quantile of positions of which counts[t] stand at t, without making the list."""
    below, place = np.cumsum(counts), q * (counts.sum() - 1)
    left, right = (int(np.searchsorted(below, np.floor(place) + k, side="right")) for k in (0, 1))
    return left + (place - np.floor(place)) * (min(right, len(counts) - 1) - left)


def t_statistics(counts: np.ndarray, total: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """mean / (population std / sqrt n) of the positions with n > 1, 0 where there is no spread. Last axis: positions."""
    there = counts > 1
    n, mean, square = counts[there], total[..., there] / counts[there], squares[..., there] / counts[there]
    spread = np.sqrt((square - mean ** 2).clip(0))
    spread = np.where(spread <= 1e-7 * np.sqrt(square), 0.0, spread)  # sums of squares keep half their digits
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 0, mean / (spread / np.sqrt(n)), 0.0)


def size(unit: str) -> str:
    """The heading of a unit's size."""
    return f"abs({LABELS[unit]})" if "contribution" in unit else f"abs(A){LABELS[unit][1:]}"


def mean_sizes(tally: Tally, partition: str, which: str = "", cells=slice(None), spec: str = ".4f") -> dict[str, tuple]:
    """Columns of a table: the mean size in each cell, in the units whose name has `which` in it."""
    return {size(unit): (spec, tally.mean(partition, f"abs {unit}")[cells]) for unit in tally.units if which in unit}


def mean_ratio(above, below) -> np.ndarray:
    """Of two (sizes, tokens): the mean size of one over that of the other."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return above[0] / above[1] / (below[0] / below[1])


def over_the_rest(tally: Tally, partition: str, unit: str) -> list[Estimate]:
    """Mean size in a cell over mean size in all other tokens, for each cell."""
    def value(sizes, tokens):
        return mean_ratio((sizes, tokens), (sizes.sum(-1, keepdims=True) - sizes, tokens.sum(-1, keepdims=True) - tokens))

    values, draws = value(tally.total(partition, f"abs {unit}"), tally.total(partition, "tokens")), value(*tally.drawn(partition, unit))
    return [ratio(float(values[i]), draws[:, i], int(live)) for i, live in enumerate(tally.sums.live[partition])]


def early_over_late(tally: Tally, partition: str, unit: str) -> Estimate:
    """Mean size in the first cell of `ends` or `far ends` over that in the last."""
    def value(sizes, tokens):
        return mean_ratio((sizes[..., 0], tokens[..., 0]), (sizes[..., 2], tokens[..., 2]))

    observed = value(tally.total(partition, f"abs {unit}"), tally.total(partition, "tokens"))
    return ratio(float(observed), value(*tally.drawn(partition, unit)), int(tally.sums.live[partition][[0, 2]].min()))


def standardised(above, below, bins) -> np.ndarray:
    """Ratio of two mean sizes if both classes stood where the two together stand. Each is (sizes, tokens), last axis bins
    of position, of which those in `bins` count, weighted by the tokens of both."""
    weight = (above[1] + below[1])[..., bins]
    with np.errstate(invalid="ignore", divide="ignore"):
        one, other = ((weight * sizes[..., bins] / tokens[..., bins]).sum(-1) for sizes, tokens in (above, below))
        return one / other


def pair(tally: Tally, partition: str, unit: str, one: int, other: int | None, bins: int = 20) -> tuple[Estimate, Estimate]:
    """Class `one` over class `other` (None: over all others): crude, and standardised over the bins of position in which each
    of the two has at least 1% of what an even spread would give it."""
    def split(sizes, tokens):
        (sizes, mine), (tokens, my_tokens) = ((x, x[..., one, :]) for x in (v.reshape(*v.shape[:-1], -1, bins) for v in (sizes, tokens)))
        theirs = (sizes[..., other, :], tokens[..., other, :]) if other is not None else (sizes.sum(-2) - mine, tokens.sum(-2) - my_tokens)
        return (mine, my_tokens), theirs

    def crude(above, below):
        return mean_ratio(*([x.sum(-1) for x in side] for side in (above, below)))

    name = f"{partition} by {'fifth' if bins == 5 else 'twentieth'}"
    observed, drawn = split(tally.total(name, f"abs {unit}"), tally.total(name, "tokens")), split(*tally.drawn(name, unit))
    both = [b for b in range(bins) if all(tokens[b] > 0 and tokens[b] >= 0.01 * tokens.mean() for _, tokens in observed)]
    live = tally.sums.live[partition]
    groups = int(min(live[one], live[other] if other is not None else live.max()))
    return (ratio(float(crude(*observed)), crude(*drawn), groups),
            ratio(float(standardised(*observed, both)), standardised(*drawn, both), groups))
