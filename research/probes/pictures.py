"""What the pictures of several probes share: legends and names that lie on no data."""
from matplotlib.ticker import LogLocator

from analysis.plots import GREY


def more_ticks(axis) -> None:
    """Ticks at 1, 2 and 5 of every decade: numbers often span less than one."""
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def legend_under(axis, **more) -> None:
    """The legend of one panel, below it."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), **more)


def name_points(axis, points: list[tuple[str, float, float]]) -> None:
    """Names in a column beside the axis, in the order of height, each tied to its point (x, y):
    beside the points themselves names of like points would lie on each other."""
    by_height = sorted(points, key=lambda point: point[2])
    for i, (name, x, y) in enumerate(by_height):
        axis.annotate(name, (x, y), xytext=(1.06, (i + 0.5) / len(by_height)),
                      textcoords="axes fraction", va="center", fontsize=7.5,
                      arrowprops=dict(arrowstyle="-", color=GREY, lw=0.6, relpos=(0, 0.5)))
