"""Helpers of all pictures: colours that colour-blind readers can tell apart, and saving. The lab
takes matplotlib from here, because it may be installed and broken."""
from pathlib import Path

from lab.engine.errors import UserError

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except Exception as error:
    raise UserError(f"matplotlib cannot be imported: {error!r}. To install it: pip install -r "
                    "requirements.txt") from None

from run import whole

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7",  # Okabe and Ito
           "#e69f00", "#56b4e9", "#000000", "#999999")
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], COLOURS[7]
# A colour with a name has one meaning in all pictures and on the page (page.css). Arms and kinds of
# tokens are too many for that: they take COLOURS in order, and a legend says which is which.
GRADIENT_COLOUR = COLOURS[5]
DPI = 108
plt.rcParams.update({
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5,
    "axes.titlelocation": "left", "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 8.5, "font.size": 9.5,
    "figure.figsize": (7.5, 4.0), "figure.constrained_layout.use": True,
    "text.parse_math": False})  # a $ in the name of an arm is a $


def save(figure: Figure, folder: Path, name: str, caption: str,
         shows: str = "") -> tuple[Path, str]:
    """Write the picture, which appears whole or not at all, and return its path and caption.
    `shows` is kept in it."""
    path = folder / f"{name}.png"
    with whole(path) as unfinished:
        figure.savefig(unfinished, dpi=DPI, format="png", metadata={"Shows": shows})
    plt.close(figure)
    return path, caption


def legend_below(figure: Figure, axis: Axes, ncols: int) -> None:
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=ncols)
