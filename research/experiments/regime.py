"""A map: where is measured credit worth something, over batch size and learning rate?"""
import numpy as np

from analysis.plots import panels, save
from analysis.statistics import Estimate
from analysis.tables import Table, by_row
from research.experiments.experiments import BATCHES, LEARNING_RATES, TRAINED_ANSWERS, cell
from research.experiments.finished import END, Study, ahead, mean_success
from research.probes.common import Findings

Cells = dict[tuple[str, str], float]  # by batch and learning rate


def report(study: Study) -> Findings:
    plain, differences, rows = {}, {}, []
    for questions, answers in BATCHES:
        for rate in LEARNING_RATES:
            place = (f"{questions}x{answers}", rate)
            none, measured = (cell(arm, questions, answers, rate) for arm in ("none", "measured"))
            if study.of(none):
                plain[place] = mean_success(study.of(none), END)
            seeds, estimate = ahead(study, measured, none, END)
            if estimate:
                differences[place] = estimate
            rows.append([*place, seeds, plain.get(place), *numbers_of(estimate)])
    tables = [map_table("map", "Measured credit minus plain GRPO, points at the end",
                        {place: in_points(estimate) for place, estimate in differences.items()}),
              map_table("plain", "Success of plain GRPO at the end",
                        {place: f"{success:.1%}" for place, success in plain.items()}),
              cells_table(rows)]
    pictures = [draw(study, {place: of.value for place, of in differences.items()}, plain)]
    return Findings("Where measured credit is worth something", study.intro(), tables, ("map",),
                    pictures=pictures, places={"map": ("map",)})


def numbers_of(estimate: Estimate | None) -> list:
    return [estimate.value, estimate.interval] if estimate else [None, None]


def in_points(estimate: Estimate) -> str:
    interval = f" ({100 * estimate.low:+.1f} to {100 * estimate.high:+.1f})"
    known = np.isfinite(estimate.low)
    return f"{100 * estimate.value:+.1f}{interval if known else ''}"


def map_table(name: str, title: str, cells: dict[tuple[str, str], str]) -> Table:
    """Batches downwards, learning rates across."""
    rows = []
    for batch in batch_names():
        rows.append([batch, *(cells.get((batch, rate), "-") for rate in LEARNING_RATES)])
    formats = {"batch": "", **dict.fromkeys(LEARNING_RATES, "")}
    return Table(name, title, by_row(formats, rows))


def batch_names() -> list[str]:
    return [f"{questions}x{answers}" for questions, answers in BATCHES]


def cells_table(rows: list) -> Table:
    formats = {"batch": "", "learning rate": "", "seeds": "d", "plain": ".1%",
               "difference": "points", "95%": "points"}
    return Table("cells", "The same as numbers", by_row(formats, rows), "",
                 [f"every run trains on about {TRAINED_ANSWERS:,} answers; held-out success, "
                  "sampled, at the end; seeds are those of both arms. With one seed an interval is "
                  "about problems alone, with two it is wide"], {"95%": "95% interval"})


def draw(study: Study, differences: Cells, plain: Cells):
    figure, axes = panels(2)
    heat(figure, axes[0], "Measured credit minus plain", differences, "RdBu", centred=True)
    heat(figure, axes[1], "Success of plain GRPO", plain, "viridis", centred=False)
    return save(figure, study.folder, "map",
                "Held-out success at the end, in points; an empty cell has no finished runs")


def heat(figure, axis, title: str, cells: Cells, colours: str, centred: bool) -> None:
    """Each cell with its number. Centred: white is 0."""
    values = np.full((len(BATCHES), len(LEARNING_RATES)), np.nan)
    for (batch, rate), value in cells.items():
        values[batch_names().index(batch), LEARNING_RATES.index(rate)] = 100 * value
    most = max(np.nanmax(np.abs(values), initial=0.0), 1.0)
    low = -most if centred else 0.0
    image = axis.imshow(values, cmap=colours, vmin=low, vmax=most, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        text = f"{values[row, column]:+.1f}" if centred else f"{values[row, column]:.1f}"
        axis.text(column, row, text, ha="center", va="center", bbox=dict(color="#ffffffb0", pad=2))
    axis.set(title=title, xlabel="learning rate", ylabel="questions x answers",
             xticks=range(len(LEARNING_RATES)), xticklabels=LEARNING_RATES,
             yticks=range(len(BATCHES)), yticklabels=batch_names())
    axis.grid(False)
    figure.colorbar(image, ax=axis)
