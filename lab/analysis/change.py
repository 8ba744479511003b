"""Push, change and credit: three things of a token, and they differ.

    push     A w s^2: what the token's own term of the loss would do to its log-prob, up to the
             learning rate
    change   its log-prob after the step minus before, at the same prefix: the update on all tokens
             of the batch makes it
    credit   V after the token minus V before it, where a probe measured it. The share it decides is
             its square over the reward's variance. The square is estimated without bias (column
             `decided` of the credit file), because the square of an estimate is on average too
             large, by the variance of the estimate

Tokens share weights, so a token is also moved by the others, and much of the push never becomes a
change. A share is that of a sum of sizes. A `net` number is the sum
with its signs, divided by the sum of sizes.
"""
from collections.abc import Collection

import numpy as np

from lab.analysis.shares import over
from lab.analysis.statistics import FEWEST
from lab.analysis.tables import TOO_FEW_GROUPS, Cell, Table
from lab.analysis.tally import PARTITIONS, Tally

CREDIT = "decides"  # the column of what credit decides
SIZES = {"push": "abs push", "change": "abs change", CREDIT: "squared credit"}  # summed for shares
SIGNED = {"push": "push", "change": "change", CREDIT: "credit"}  # summed for `net`
HEADINGS = {"tokens": "share of the tokens", "push": "share of the push",
            "change": "share of the change", CREDIT: "share it decides",
            "net push": "net push", "net change": "net change", f"net {CREDIT}": "net credit",
            "fell": "pushed up, but fell", "rose": "pushed down, but rose"}
NOTES = ["The push is A w s^2: what a token's own term of the loss would do to its log-prob, if "
         "nothing else moved it. The change is its log-prob after the step minus before, at the "
         "same prefix. Only steps in which the change was measured are counted",
         "Net push: the sum of the row's pushes with their signs, so that up and down cancel, "
         "divided by the sum of the sizes of all pushes. Net change is the same for changes. "
         "Pushed up, but fell: the share of the row's upward push that went to tokens whose "
         "log-prob fell. Pushed down, but rose: the share of its downward push that went to tokens "
         "whose log-prob rose"]
ABOUT_CREDIT = ("The credit of a token is V after it minus V before it, where V is the expected "
                "reward of going on from there. The share it decides is its share of the sum of "
                "squared credits. On average this sum is, over an answer, the variance of the "
                "reward")


def known(tally: Tally) -> list[str]:
    """The names of push, change and credit, as far as they were measured in this run."""
    if not tally.has_change:
        return []
    has_credit = tally.total("all", "abs credit")[0] > 0
    return ["push", "change", CREDIT] if has_credit else ["push", "change"]


def change_table(tally: Tally, partition: str) -> Table:
    count = tally.total(partition, "measured")
    used = np.flatnonzero(count)
    names = [PARTITIONS[partition][cell] for cell in used]
    columns: dict[str, tuple[str, Collection[Cell]]] = {}
    columns[partition] = ("", names)
    columns["tokens"] = (".1%", count[used] / count.sum())
    shares = {name: tally.shares(partition, SIZES[name])[used] for name in known(tally)}
    for name, share in shares.items():
        columns[name] = (".1%", share)
    for name in shares:
        signed = SIGNED[name]
        size = tally.total("all", f"abs {signed}")
        net = over(tally.total(partition, signed), size)
        columns[f"net {name}"] = ("+.1%", net[used])
    columns["fell"] = (".0%", against_push(tally, partition, "up, fell", "up")[used])
    columns["rose"] = (".0%", against_push(tally, partition, "down, rose", "down")[used])

    finding = finding_of(tally, names, shares) if partition == "kind" else ""
    size = tally.total("all", "abs change")[0] / count.sum()
    notes = [*NOTES, f"On average the log-prob of a token changed by {size:.3f}, up or down"]
    if CREDIT in shares:
        notes.append(ABOUT_CREDIT)
    title = "kind of token" if partition == "kind" else partition
    return Table(f"change by {partition}", f"How log-probs changed in a step, by {title}", columns,
                 finding, notes, HEADINGS)


def finding_of(tally: Tally, names: list[str], shares: dict[str, np.ndarray]) -> str:
    if tally.groups_with_advantage["all"][0] < FEWEST:
        return TOO_FEW_GROUPS
    fell = against_push(tally, "all", "up, fell", "up")[0]
    rose = against_push(tally, "all", "down, rose", "down")[0]
    lost = int((shares["push"] - shares["change"]).argmax())
    return (f"{fell:.0%} of the upward push went to tokens whose log-prob fell, and {rose:.0%} of "
            f"the downward push to tokens whose log-prob rose. {names[lost].capitalize()} tokens "
            f"received {shares['push'][lost]:.0%} of the push and {shares['change'][lost]:.0%} of "
            "the change.")


def against_push(tally: Tally, partition: str, part: str, whole: str) -> np.ndarray:
    """(cells,) the share of the push one way that went to tokens that moved the other way."""
    return over(tally.total(partition, part), tally.total(partition, whole))
