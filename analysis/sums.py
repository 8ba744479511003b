"""Sums over the tokens of a run, cut in several ways: by class, by kind, by position, ...

Every sum is made twice: as it is, by blocks of training, and with the groups drawn again
(bootstrap), which is where the intervals come from.
"""
import itertools

import numpy as np
import torch

from analysis.sizes import UNITS, end_of
from analysis.vocabulary import CLASSES
from engine.tokens import KINDS, SECTIONS
from grpo import group_z_score

DRAWS = 1000     # of the bootstrap over groups
NORMALISED = ("z > 0", "z <= 0")  # z: the reward normalised in its group
SQUARED = ("s", "ratio", *UNITS)
MEASURES = ("tokens", "log_prob", "entropy", "abs advantage", *SQUARED,
            *(f"abs {unit}" for unit in UNITS), *(f"squared {name}" for name in SQUARED))
RESAMPLED = ("tokens", *(f"abs {unit}" for unit in UNITS))


PARTITIONS = {  # name: what its cells are called
    "all": ("all",),
    "normalised": NORMALISED,
    "class": CLASSES,
    "kind": KINDS,
    "section": SECTIONS,
    "trained": (*KINDS, "without a ratio or a gradient"),
    "position": tuple(range(10)),
    "ends": ("first fifth", "middle", "last fifth"),
    "class by fifth": tuple(itertools.product(CLASSES, range(5)))}


class Sums:
    """of[partition][block, cell, measure], and drawn[partition][draw, cell, measure] with the
    groups drawn again. `longest`: tokens of the longest answer of the run."""

    def __init__(self, blocks: int, longest: int):
        self.rng = np.random.default_rng(0)
        self.edges = {bins: cut_edges(longest, bins) for bins in (5, 10)}
        self.of, self.drawn, self.live = {}, {}, {}  # live: groups with a gradient in a cell
        for name, cells in PARTITIONS.items():
            self.of[name] = np.zeros((blocks, len(cells), len(MEASURES)))
            self.drawn[name] = np.zeros((DRAWS, len(cells), len(RESAMPLED)))
            self.live[name] = np.zeros(len(cells), np.int64)
        self.extremes = {unit: [np.inf, -np.inf] for unit in UNITS}

    def add(self, tokens: dict, block: int) -> None:
        groups, group = np.unique(tokens["token_group"], return_inverse=True)
        measures = measured(tokens)
        drawn = poisson_draws(self.rng, DRAWS, len(groups))
        resampled = [MEASURES.index(name) for name in RESAMPLED]
        for name, cell in self.cells(tokens).items():
            by_group = sums_by_group(group, len(groups), cell, len(PARTITIONS[name]), measures)
            self.of[name][block] += by_group.sum(0)
            self.live[name] += (by_group[..., MEASURES.index("abs contribution")] > 0).sum(0)
            self.drawn[name] += np.tensordot(drawn, by_group[..., resampled], axes=1)
        for name, (low, high) in self.extremes.items():
            self.extremes[name] = [min(low, measures[name].min()), max(high, measures[name].max())]

    def cells(self, tokens: dict) -> dict[str, np.ndarray]:
        """Which cell of each partition a token falls into."""
        kind, naive = tokens["kind"], tokens["class"]
        trained = ("ratio" in tokens) & (tokens["weight"] * tokens["advantage"] != 0)
        return {"all": np.zeros_like(kind),
                "normalised": (normalised_reward(tokens) <= 0).astype(int)[tokens["answer"]],
                "class": naive,
                "kind": kind,
                "section": tokens["section"],
                "trained": np.where(trained, kind, len(KINDS)),
                "position": self.bin_of(tokens, 10),
                "ends": end_of(tokens),
                "class by fifth": 5 * naive + self.bin_of(tokens, 5)}

    def bin_of(self, tokens: dict, bins: int) -> np.ndarray:
        return np.searchsorted(self.edges[bins], tokens["relative"]) - 1


def poisson_draws(rng: np.random.Generator, draws: int, groups: int) -> np.ndarray:
    """(draws, groups): how often each group is drawn. With independent Poisson(1) counts the
    bootstrap needs no list of all groups, so its memory does not grow with them (Chamandy et al.
    2012, "Estimating uncertainty for massive data streams")."""
    return rng.poisson(1.0, (draws, groups)).astype(np.float64)


def measured(tokens: dict) -> dict[str, np.ndarray | None]:
    """What is summed over tokens, by name; tokens themselves are counted."""
    measures = {"ratio": np.zeros_like(tokens["s"]), **tokens, "tokens": None}
    measures |= {f"abs {name}": np.abs(tokens[name]) for name in ("advantage", *UNITS)}
    return measures | {f"squared {name}": measures[name] ** 2 for name in SQUARED}


def sums_by_group(group, groups: int, cell, cells: int, measures: dict) -> np.ndarray:
    """(groups, cells, measures)"""
    index, size = group * cells + cell, groups * cells
    sums = [np.bincount(index, measures[name], size).reshape(groups, cells) for name in MEASURES]
    return np.stack(sums, axis=-1)


def normalised_reward(tokens: dict) -> np.ndarray:
    """(answers,)"""
    reward, group = torch.from_numpy(tokens["reward"]), torch.from_numpy(tokens["group"])
    return group_z_score(reward, group).numpy()


def cut_edges(longest: int, bins: int) -> np.ndarray:
    """Bins of equal width between the smallest and the largest relative position, open on the left;
    the lowest edge lies 0.1% of the range lower, so that 0 is inside (what pandas.cut does)."""
    if longest == 1:  # every answer is one token: all positions are 0
        return np.linspace(-0.001, 0.001, bins + 1)
    edges = np.linspace(0, (longest - 1) / longest, bins + 1)
    edges[0] -= 0.001 * edges[-1]
    return edges
