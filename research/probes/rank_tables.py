"""The tables behind the verdicts on rank, and their picture."""
from pathlib import Path

from analysis.plots import COLOURS, GREY, panels, save
from analysis.tables import Table, by_row
from research.probes.rank_claims import change_verdict
from research.probes.rank_measurements import ONES, Measurements, Z
from research.probes.spectra import DEFINITIONS, RANKS


MEANING = {"null": "random directions", "centred": "inputs centred"}
TICKS = (1, 2, 3, 5, 10, 20)
RANK_WORDS = {"participation": "participation ratio", "for 90%": "values for 90%",
              "for 99%": "values for 99%", "numerical": "numerical rank"}


def by_size(measured: Measurements, matrix: str, beside: str) -> Table:
    """Entropy ranks of all arms at all sizes; the column `beside` is what to compare them with."""
    R, rows = measured.main, []
    for arm in measured.arms():
        e = measured.against_z(matrix, arm)
        against = (None, None, "-") if arm == Z else (e.value, e.interval, change_verdict(e))
        at_sizes = [measured.mean(matrix, arm, size).value for size in measured.sizes]
        rows.append((arm, *at_sizes, measured.mean(f"{matrix} {beside}", arm, R).value, *against))
    title = {"A": "Matrix A, answers x parameters: entropy rank by group size",
             "B": "Matrix B, the gradient of each weight matrix (median over them): entropy rank "
                  "by group size"}[matrix]
    meaning = {"null": "rows of the same lengths in random directions",
               "centred": "the mean of a layer's inputs is taken away"}[beside]
    counts = [f"{len(measured.values.get(('A', Z, size), ()))} at R = {size}"
              for size in measured.sizes]
    notes = [f"Means over the problems whose first R answers differ in reward: {', '.join(counts)}"
             f". {MEANING[beside].capitalize()}: {meaning}. Minus the z-score's: paired over "
             f"problems, R = {R}."]
    formats = {"": "", **{f"R={size}": ".2f" for size in measured.sizes},
               f"{beside}, R={R}": ".2f", "minus z-score": "+.2f", "95%": "+.2f", "it is": ""}
    headings = {"": "arm", **of_sizes(measured), f"{beside}, R={R}": f"{MEANING[beside]}, R = {R}",
                "minus z-score": "minus the z-score's", "95%": "95% interval", "it is": "verdict"}
    return Table(f"{matrix} by group size", title, by_row(formats, rows), notes=notes,
                 headings=headings)


def of_sizes(measured: Measurements) -> dict[str, str]:
    return {f"R={size}": f"R = {size}" for size in measured.sizes}


def by_definition(measured: Measurements, matrix: str) -> Table:
    """All arms, and what they are to be compared with."""
    places = {arm: (matrix, arm) for arm in measured.arms()}  # row -> what is looked up
    for arm in (Z, ONES):
        if matrix == "A":
            places[f"{arm}, random directions"] = ("A null", arm)
        else:
            places[f"{arm}, inputs centred"] = ("B centred", arm)
    if matrix == "B":
        places["Gaussian matrices"] = ("B null", "median")
    columns = {"": ("", list(places))}
    for rank in RANKS:
        values = [measured.mean(*place, measured.main, rank).value for place in places.values()]
        columns[rank] = (".2f", values)
    title = f"Matrix {matrix} at R = {measured.main}, by every definition of rank"
    return Table(f"{matrix} by definition", title, columns, notes=[DEFINITIONS],
                 headings={"": "arm", **RANK_WORDS})


def over_sizes(measured: Measurements) -> Table:
    """Of the z-score: every definition at every size, and whether it depends on the size."""
    R, rows = measured.main, []
    for matrix in ("A", "B"):
        for rank in RANKS:
            change = measured.change((matrix, Z, R), (matrix, Z, 2), rank)
            at_sizes = [measured.mean(matrix, Z, size, rank).value for size in measured.sizes]
            rows.append((f"{matrix}: {rank}", *at_sizes, measured.mean(matrix, ONES, R, rank).value,
                         change.interval, change_verdict(change, "grows", "falls")))
    formats = {"z-score": "", **{f"R={size}": ".2f" for size in measured.sizes},
               f"all ones, R={R}": ".2f", f"{R} minus 2, 95%": "+.2f", "it": ""}
    paired = len(measured.values.get(("A", Z, 2), ()))
    notes = [f"The change is over the {paired} problems whose first two answers differ in reward."]
    headings = {"z-score": "rank of the z-score", **of_sizes(measured),
                f"all ones, R={R}": f"with all ones, R = {R}",
                f"{R} minus 2, 95%": f"R = {R} minus R = 2, 95% interval", "it": "verdict"}
    return Table("z-score by definition", "Does the rank depend on the group size?",
                 by_row(formats, rows), notes=notes, headings=headings)


def spans_table(measured: Measurements) -> Table:
    """Matrix C: how much of each arm's update lies outside its rows, and their differences."""
    R, rows = measured.main, []
    for arm in measured.arms():
        means, differences = (measured.mean("outside", arm, R, name)
                              for name in ("means", "differences"))
        rows.append((arm, means.value, differences.value, differences.interval))
    rewards, rank = (measured.mean("C", "", R, name).value for name in ("rewards", "numerical"))
    notes = [f"Share of the update's length, mean over problems. At R = {R} there are "
             f"{rewards:.2f} distinct rewards on average, and C has numerical rank {rank:.2f}."]
    line = [values["off"] for (matrix, _, _), by_question in measured.values.items()
            if matrix == "line" for values in by_question.values()]
    if line:
        notes.append(f"In {len(line)} groups of all sizes there are two rewards. There the "
                     "z-score's update is sqrt(k (R - k)) std / (std + 1e-4) (mean of the k "
                     f"winners - mean of the losers), to {max(line):.0e} of its length.")
    formats = {"": "", "outside the means": ".1e", "outside their differences": ".1e",
               "95%": ".1e"}
    title = ("Matrix C, the mean gradient of each reward: what part of the update lies outside, "
             f"R = {R}")
    headings = {"": "arm", "outside the means": "outside the means of each reward",
                "outside their differences": "outside their differences", "95%": "95% interval"}
    finding = ("The z-score's update lies in the span of the differences of mean gradients, to "
               f"{measured.mean('outside', Z, R, 'differences').value:.0e} of its length.")
    return Table("C", title, by_row(formats, rows), finding, notes, headings)


def planted_table(measured: Measurements, length: int) -> Table:
    R, rows = measured.main, []
    for arm in measured.arms():
        against_a, against_b = (None if arm == Z else measured.against_z(matrix, arm).interval
                                for matrix in ("A", "B"))
        rows.append((arm, measured.mean("A", arm, R).value, measured.mean("A null", arm, R).value,
                     against_a, measured.mean("B", arm, R).value, against_b,
                     measured.mean("B centred", arm, R).value,
                     measured.mean("B", arm, R, "stable rank").value))
    formats = {"": "", "A": ".2f", "A null": ".2f", "A minus z, 95%": "+.2f", "B": ".2f",
               "B minus z, 95%": "+.2f", "B centred": ".2f", "B stable": ".2f"}
    title = (f"Where the true credit is known: entropy ranks at R = {R} on the planted task, "
             f"answers of {length} tokens")
    notes = ["A fresh model. Three tokens of an answer matter; the true reward of each is a third "
             "or 0, its exact credit is V after it minus V before it."]
    headings = {"": "arm", "A": "rank of A", "A null": "A, random directions",
                "A minus z, 95%": "A minus the z-score's, 95% interval", "B": "rank of B",
                "B minus z, 95%": "B minus the z-score's, 95% interval",
                "B centred": "B, inputs centred", "B stable": "B, stable rank"}
    return Table("planted", title, by_row(formats, rows), notes=notes, headings=headings)


def by_weight(measured: Measurements) -> Table:
    """The weight matrices whose gradients have the lowest and the highest rank."""
    R = measured.main
    names = sorted((measured.mean("B each", name, R).value, name) for name in measured.shapes)
    ends = names if len(names) <= 6 else names[:3] + names[-3:]
    rows = []
    for _, name in ends:
        of_weight = [measured.mean("B each", name, R, rank).value
                     for rank in ("entropy rank", "stable rank", "participation")]
        rows.append((name.removeprefix("model."), "{} x {}".format(*measured.shapes[name]),
                     *of_weight, measured.mean("B null", name, R).value))
    formats = {"": "", "shape": "", "entropy rank": ".2f", "stable rank": ".2f",
               "participation": ".2f", "Gaussian, entropy": ".1f"}
    title = f"Matrix B: the weight matrices with the lowest and the highest rank, z-score, R = {R}"
    notes = ["Gaussian: the entropy rank of a Gaussian matrix of this shape."]
    headings = {"": "weight matrix", "participation": "participation ratio",
                "Gaussian, entropy": "Gaussian matrix, entropy rank"}
    return Table("B by weight matrix", title, by_row(formats, rows), notes=notes,
                 headings=headings)


def draw(measured: Measurements, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2, sharex=True)
    titles = {"A": "answers x parameters", "B": "each weight matrix, median"}
    for axis, (matrix, meaning) in zip(axes, titles.items()):
        draw_arms(axis, measured, matrix)
        sizes = [R for R in measured.sizes if (matrix, Z, R) in measured.values]
        smallest_and_largest = sorted({sizes[0], sizes[-1]})
        ranks = [f"{measured.mean(matrix, Z, R).value:.1f} at R = {R}"
                 for R in smallest_and_largest]
        axis.set(title=f"{matrix}, {meaning}: {', '.join(ranks)}")
    null = [measured.mean("A null", Z, R).value for R in measured.sizes]
    axes[0].plot(measured.sizes, null, color=GREY, ls="--", label="z-score, random directions")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return save(figure, folder, "rank",
                "Entropy rank by group size, arm by arm; dotted: the claimed 2")


def draw_arms(axis, measured: Measurements, matrix: str) -> None:
    arms = [arm for arm in measured.arms() if arm not in ("mean only", "rloo")]
    for i, arm in enumerate(arms):
        sizes = [R for R in measured.sizes if (matrix, arm, R) in measured.values]
        label = "z-score, mean only, rloo" if arm == Z else arm  # the three lie on each other
        axis.plot(sizes, [measured.mean(matrix, arm, R).value for R in sizes],
                  color=COLOURS[i % len(COLOURS)], marker="o", ms=3, lw=1.3, label=label)
    axis.axhline(2, color="#000000", lw=0.8, ls=":")
    axis.set(xscale="log", yscale="log", xlabel="group size R", ylabel="entropy rank",
             xticks=measured.sizes, xticklabels=measured.sizes, yticks=TICKS,
             yticklabels=TICKS)
    axis.minorticks_off()
