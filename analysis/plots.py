"""What all pictures share: colours that colour-blind readers tell apart too, panels, saving."""
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7",  # Okabe and Ito
           "#e69f00", "#56b4e9", "#000000", "#999999")
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[7]
DPI = 108
plt.rcParams.update({
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titlesize": 10.5, "axes.titlelocation": "left", "legend.frameon": False,
    "legend.fontsize": 8.5, "font.size": 9.5})


def panels(count: int, **more):
    """A figure and its axes, side by side."""
    width = 5.6 * count if count > 1 else 7.5
    return plt.subplots(1, count, figsize=(width, 4.0), layout="constrained", **more)


def save(figure, folder: Path, name: str, caption: str) -> tuple[Path, str]:
    """Path and caption of the picture."""
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path, caption


def shade(axis, x_edges, y_edges, counts: np.ndarray) -> None:
    """Counts of two quantities, on a logarithmic scale; empty cells stay white."""
    known = np.where(counts > 0, counts, np.nan)
    axis.pcolormesh(x_edges, y_edges, np.log10(known).T, cmap="viridis_r", rasterized=True)
    axis.grid(False)
