"""Where in an answer the gradient lies, and whether a kind of token is ahead for its place only."""
import numpy as np

from analysis.ratios import (OVER_REST, REST_WORDS, different_cells, early_over_late, mean_sizes,
                             over_the_rest, pair, rest_columns)
from analysis.sizes import size_label
from analysis.statistics import verdicts
from analysis.tables import NOTHING, Table, by_row, shown
from analysis.tally import Tally
from engine.labels import KINDS


def position_gradients(tally: Tally) -> Table:
    rest = over_the_rest(tally, "position", tally.final)
    parts = [f"{10 * i}-{10 * i + 10}%" for i in range(10)]
    columns = {"bin": ("", parts),
               "entropy": (".3f", tally.mean("position", "entropy")),
               "s": (".3f", tally.mean("position", "s")),
               **mean_sizes(tally, "position", "gradient"), **rest_columns(rest, verdicts(rest))}
    value = np.nan_to_num([e.value for e in rest], nan=0, posinf=0)
    finding = NOTHING
    if value.any():
        finding = (f"The largest gradient is that of the part {parts[value.argmax()]} of an "
                   f"answer: {value.max():.2f} times that of all other tokens.")
    return Table("gradient by position", "The gradient by position in the answer", columns,
                 finding, [OVER_REST.format(size_label(tally.final))],
                 {**REST_WORDS, "bin": "part of the answer"})


def first_and_last_fifth(tally: Tally) -> Table:
    """How much more gradient the beginning of an answer gets than its end."""
    units = [unit for unit in tally.units if "gradient" in unit]
    estimates = [early_over_late(tally, "ends", unit) for unit in units]
    columns = {"size": ("", [size_label(unit) for unit in units]),
               "early over late": (".2f", [e.value for e in estimates]),
               "95%": (".2f", [e.interval for e in estimates]),
               "difference": ("", verdicts(estimates, ("early more", "late more")))}
    final = estimates[-1]
    return Table("first and last fifth",
                 "The first fifth of the answers over the last fifth", columns,
                 f"The first fifth of an answer gets {final.value:.2f} times the gradient of the "
                 f"last fifth (95%: {shown(final.interval, '.2f')}).",
                 ["a token counts where its middle stands, (t + 1/2) / length"],
                 {**REST_WORDS, "early over late": "first fifth over last fifth"})


def kinds_at_like_position(tally: Tally) -> Table:
    """Is a kind of token ahead because of where it stands?"""
    kinds = [k for k, name in enumerate(KINDS)
             if tally.count("kind")[k] and name != "end"]  # has its own place in every answer
    estimates = [pair(tally, "kind", tally.final, k, None) for k in kinds]
    verdict = verdicts([like for _, like in estimates])
    rows = []
    for k, (crude, like), word in zip(kinds, estimates, verdict):
        rows.append([KINDS[k], crude.value, crude.interval, like.value, like.interval, word])
    formats = {"kind": "", "crude": ".2f", "95%": ".2f", "20ths": ".2f", "95% of it": ".2f",
               "difference": ""}
    names = [KINDS[k] for k in kinds]
    cells = different_cells(names, [like for _, like in estimates], verdict)
    finding = f"At like position:{cells or ' no difference is seen.'}"
    return Table("kinds at like position",
                 "Each kind of token over all other tokens, as it is and at like position",
                 by_row(formats, rows), finding,
                 ["at like position: as if the kind and all other tokens stood in the same places "
                  "(twenty bins of relative position), with Holm's correction over the rows"],
                 {"crude": "as it is", "95%": "95% interval", "20ths": "at like position",
                  "95% of it": "95% interval of that"})
