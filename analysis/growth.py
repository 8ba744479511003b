"""How what tokens were given changed over training: in at most ten parts of it."""
import numpy as np

from analysis.positions import t_statistics
from analysis.ratios import shares
from analysis.sizes import size_label
from analysis.tables import Table, by_row
from analysis.tally import Tally
from engine.labels import KINDS, SECTIONS


def parts_of_training(tally: Tally, count: int = 10) -> dict[str, np.ndarray]:
    """Blocks of steps, ten of them at most, by the steps they hold."""
    parts = {}
    for blocks in np.array_split(np.arange(len(tally.blocks)), min(count, len(tally.blocks))):
        first, last = tally.blocks[blocks[0]][0], tally.blocks[blocks[-1]][-1]
        parts[f"{first}" if first == last else f"{first}-{last}"] = blocks
    return parts


def growth(run: dict, tally: Tally) -> Table:
    by_step = {line["step"]: line for line in run["metrics"]}
    parts = parts_of_training(tally)
    rows = [growth_row(tally, name, blocks, by_step) for name, blocks in parts.items()]
    formats = {"steps": "", "success": ".1%", "finished": ".1%", "length": ".1f",
               "entropy": ".3f", "flat": ".0%", "new": ".4f", "e/l": ".2f"}
    columns, label = by_row(formats, rows), size_label(tally.final)
    size, flat = columns["new"][1], columns["flat"][1]
    return Table("growth", "Over training", columns,
                 f"From the first to the last part of training the mean gradient size went from "
                 f"{size[0]:.3f} to {size[-1]:.3f}, answers in groups without spread from "
                 f"{flat[0]:.0%} to {flat[-1]:.0%}.",
                 ["a group without spread: all its rewards are equal, so its advantages are 0"],
                 {"success": "success in training batches", "length": "tokens an answer",
                  "flat": "answers in groups without spread",
                  "new": f"mean gradient size {label}",
                  "e/l": "first fifth of an answer over last fifth"})


def growth_row(tally: Tally, name: str, blocks: np.ndarray, by_step: dict) -> list:
    answers = tally.positions.answers[blocks].sum()
    return [name,
            mean_of(tally, blocks, by_step, "success"),
            mean_of(tally, blocks, by_step, "finished"),
            tally.total("all", "tokens", blocks)[0] / answers,
            tally.mean("all", "entropy", blocks)[0],
            tally.positions.flat_answers[blocks].sum() / answers,
            tally.mean("all", f"abs {tally.final}", blocks)[0],
            ratio_of(tally, "ends", tally.final, (0, 2), blocks)]


def mean_of(tally: Tally, blocks: np.ndarray, by_step: dict, key: str) -> float | None:
    """Over the lines of metrics of these blocks of steps."""
    steps = np.concatenate([tally.blocks[block] for block in blocks])
    values = [by_step.get(step, {}).get(key) for step in steps]
    known = [value for value in values if value is not None]
    return np.mean(known) if known else None


def ratio_of(tally: Tally, partition: str, unit: str, cells: tuple, blocks) -> float | None:
    mean, (above, below) = tally.mean(partition, f"abs {unit}", blocks), cells
    return mean[above] / mean[below] if mean[below] else None


def growth_of_shares(tally: Tally) -> Table:
    parts = parts_of_training(tally)
    kinds = np.stack([shares(tally, "kind", blocks) for blocks in parts.values()])
    of_sections = np.stack([shares(tally, "section", blocks) for blocks in parts.values()])
    columns = {"steps": ("", list(parts))}
    columns |= {kind: (".1%", kinds[:, k]) for k, kind in enumerate(KINDS)}
    columns |= {section: (".1%", of_sections[:, i]) for i, section in enumerate(SECTIONS)}
    k = int(np.abs(kinds[-1] - kinds[0]).argmax())
    return Table("growth of shares",
                 "Over training: the share of the gradient that each kind and section got", columns,
                 f"What changed most is the share of {KINDS[k]} tokens: {kinds[0, k]:.0%} to "
                 f"{kinds[-1, k]:.0%} of the gradient.")


def growth_in_old_unit(tally: Tally) -> Table:
    """The earlier experiment's ratios over training."""
    rows = [old_row(tally, name, blocks) for name, blocks in parts_of_training(tally).items()]
    formats = {"steps": "", "old": ".4f", "f/r old": ".2f", "f/r new": ".2f", "t>3": ".0%"}
    columns, label = by_row(formats, rows), size_label(tally.final)
    old = columns["old"][1]
    return Table("growth in the old unit", "Over training, in the old unit", columns,
                 f"The mean size went from {old[0]:.3f} to {old[-1]:.3f} in the old unit.", [],
                 {"old": "mean abs(A log p), old unit",
                  "f/r old": "filler over reasoning, old unit",
                  "f/r new": f"filler over reasoning, gradient {label}",
                  "t>3": "positions with abs(t) over 3, A log p"})


def old_row(tally: Tally, name: str, blocks: np.ndarray) -> list:
    positions = tally.positions
    t = t_statistics(positions.counts[blocks].sum(0),
                     *positions.sums["contribution"][:, blocks].sum(1))
    return [name,
            tally.mean("all", "abs contribution", blocks)[0],
            ratio_of(tally, "class", "contribution", (0, 1), blocks),
            ratio_of(tally, "class", tally.final, (0, 1), blocks),
            (np.abs(t) > 3).mean() if len(t) else None]
