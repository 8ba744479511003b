"""Given, became, earned: three things of a token, and they differ.

    given    A w s^2: how its own gradient at the logits would move its log-prob, but for the rate
    became   the change of its log-prob in the step, which all tokens of the batch make together
    earned   its true credit, where a probe measured it; noise makes sizes of credits larger, so the
             share is of their squares, estimated without bias (column decided)

What answers of both signs have in common cancels, so most of what is given never becomes anything
(2605.08666). Shares are of sums of sizes; `net` sums have their sign, over the sum of sizes.
"""
import numpy as np

from analysis.statistics import FEWEST
from analysis.tables import NOTHING, Columns, Table
from analysis.tally import PARTITIONS, Tally

THREE = {  # measures of the tally: of the shares, and with a sign
    "given": ("abs given", "given"), "became": ("abs change", "change"),
    "earned": ("decided", "credit")}
EARNED = "earned: squared credit"
NOTES = ["given: A w s^2, what its own gradient alone would do to a token's log-prob; became: the "
         "log-prob after the step minus before, where that was measured",
         "net: the sum with its sign, over the sum of sizes; fell: of what is given upwards the "
         "share at tokens that fell, rose: of what is given downwards at tokens that rose"]


def known(tally: Tally) -> list[str]:
    """Of the three those that this run has."""
    has_credit = tally.total("all", "abs credit")[0] > 0
    return list(THREE)[:2 + has_credit] if tally.watched else []


def became(tally: Tally, partition: str) -> Table:
    count = tally.total(partition, "watched")
    used = np.flatnonzero(count)
    names, three = [PARTITIONS[partition][i] for i in used], known(tally)
    shares = {name: tally.shares(partition, THREE[name][0])[used] for name in three}
    columns: Columns = {
        partition: ("", names), "tokens": (".1%", count[used] / count.sum()),
        **{name: (".1%", shares[name]) for name in three},
        **{f"net {name}": ("+.1%", share(tally, partition, net, f"abs {net}", "all")[used])
           for name in three for net in THREE[name][1:]},
        **{name: (".0%", share(tally, partition, name, pushed)[used])
           for name, pushed in (("fell", "up"), ("rose", "down"))}}
    lost = int((shares["given"] - shares["became"]).argmax())
    fell, rose = (share(tally, "all", *pair)[0] for pair in (("fell", "up"), ("rose", "down")))
    is_few = tally.live["all"][0] < FEWEST
    finding = NOTHING if is_few else (
        f"Of the push up {fell:.0%} went to tokens that fell, of the push down {rose:.0%} to "
        f"tokens that rose. {str(names[lost]).capitalize()} tokens were given "
        f"{shares['given'][lost]:.0%} and got {shares['became'][lost]:.0%} of all change.")
    size = tally.total("all", "abs change")[0] / count.sum()
    notes = [*NOTES, f"the mean size of what a token became is {size:.3f}"]
    return Table(f"became by {partition}", f"What became of the tokens, by {partition}", columns,
                 finding if partition == "kind" else "", notes + [EARNED] * ("earned" in three),
                 {"tokens": "share of the tokens"})


def share(tally: Tally, partition: str, part: str, whole: str, of: str = "") -> np.ndarray:
    """Of the same cells, or of all tokens."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(tally.total(partition, part) / tally.total(of or partition, whole))
