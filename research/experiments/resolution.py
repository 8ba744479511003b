"""What the board can see: the spread of a pair by measure, and how often a difference is found.

An arm's differences from plain GRPO, its mean taken out, are what chance makes of a pair. From them
pairs are drawn, with signs flipped at random: the same method twice. A point is added for a known
effect. The last row's pairs do not share a seed, so not its problems either: what is left of the
others' spread is not theirs, so the initial model's success at them was not asked as well.
"""
import numpy as np

from analysis.compare import success_by_step
from analysis.statistics import student_quantile
from analysis.tables import Table, by_row

MEASURES = {"last step": lambda curve: curve[-1], "last 30 steps": lambda curve: curve[-30:].mean(),
            "all steps": lambda curve: curve.mean()}
EXPERIMENTS, EFFECT, FEW, MORE = 4000, 0.01, 8, 12


def resolution_table(runs: dict[str, dict[int, dict]], plain: dict[int, dict]) -> Table:
    """`runs` by arm and seed, each paired with the plain run of its seed."""
    runs = {arm: of_arm for arm, of_arm in runs.items() if len(of_arm.keys() & plain.keys()) >= FEW}
    rows = []
    for name, measure in MEASURES.items():
        of_plain = {seed: measure(success_by_step(run)) for seed, run in plain.items()}
        pairs = [np.array([measure(success_by_step(of_arm[seed])) - of_plain[seed]
                           for seed in sorted(of_arm.keys() & plain.keys())])
                 for of_arm in runs.values()]
        rows.append(row_of(name, pairs))
    rows.append(row_of("all steps, other seeds", [unpaired(np.array(list(of_plain.values())))]))
    formats = {"measure": "", "spread": "size", "same": ".0%", "few": ".0%", "more": ".0%"}
    return Table("resolution", "What such an experiment can see", by_row(formats, rows), "",
                 [f"of {EXPERIMENTS} experiments drawn from the pairs of {len(runs)} arms: how "
                  "many of 100 tell a method from itself, and from one that is a point better; "
                  "by Student's t at 95%"],
                 {"spread": "standard deviation of a pair", "same": "the same method, 8 pairs",
                  "few": "1 point found, 8 pairs", "more": "1 point found, 12 pairs"})


def row_of(name: str, pairs: list[np.ndarray]) -> list:
    spread = float(np.median([found.std(ddof=1) for found in pairs])) if pairs else None
    chance = [found_in(pairs, *case) for case in ((FEW, 0.0), (FEW, EFFECT), (MORE, EFFECT))]
    return [name, spread, *chance]


def unpaired(values: np.ndarray) -> np.ndarray:
    """Differences of each from the next."""
    return values - np.roll(values, 1)


def found_in(pairs: list[np.ndarray], count: int, effect: float) -> float | None:
    """In which share of experiments with `count` pairs a difference is seen at 95%."""
    chance = [(found - found.mean()) * np.sqrt(len(found) / (len(found) - 1))
              for found in pairs if len(found) > 1]
    if not chance:
        return None
    rng = np.random.default_rng(0)
    arms = rng.integers(0, len(chance), EXPERIMENTS)
    drawn = np.stack([rng.choice(chance[arm], count) for arm in arms])
    drawn = effect + drawn * rng.choice([-1, 1], drawn.shape)
    error = drawn.std(1, ddof=1) / np.sqrt(count)
    return float(np.mean(abs(drawn.mean(1)) > student_quantile(0.975, count - 1) * error))
