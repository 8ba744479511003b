"""The tables and the picture of exact credit on a real model (listed.py), for one model or several.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from analysis.plots import COLOURS, legend_below, plt, save
from analysis.statistics import FEWEST
from analysis.tables import Table, by_row
from engine.tokens import KINDS
from research.probes import became
from research.probes.credit import MeasuredTokens
from research.probes.scoreboard import PARTITIONS, decided_table
from research.probes.tree import Listing

ORDINALS = ("1st", "2nd", "3rd", *(f"{number}th" for number in range(4, 1000)))
WHERE = {"kind": PARTITIONS["kind"],
         "index": (ORDINALS, "The same by the token's place in the answer")}
STEPS = {"plain step": True, "AdamW's first": False}  # whether it is plain gradient descent
TYPES = 8  # that are shown


@dataclass
class Stage:
    """What was measured of one model."""
    listing: Listing
    tokens: MeasuredTokens           # of the listed answers
    sampled: dict[str, np.ndarray]   # of the batch's tokens whose credit is known
    known: float                     # the share of the batch's tokens whose credit is known


def tables_of(stages: dict[str, Stage], tokenizer: Tokenizer, answers: int) -> list[Table]:
    tables = [stacked({name: decided_table(stage.tokens, partition, WHERE)
                       for name, stage in stages.items()}) for partition in WHERE]
    tables[0].notes.append("over the listed answers, each by its probability; A: the mean over "
                           f"all groups of {answers} that an answer may stand in")
    tables.append(listed_table(stages))
    moved = {name: stage for name, stage in stages.items() if stage.sampled["advantage"].any()}
    if moved:
        tables += [follow_table(moved), shares_table(moved), types_table(moved, tokenizer)]
    return tables


def draw_kinds(stages: dict[str, Stage], folder: Path) -> None:
    """For each model, the shares of each kind: of the tokens, of the gradient, of what decides."""
    width = max(6, 1 + 3.2 * len(stages))
    figure, axes = plt.subplots(1, len(stages), figsize=(width, 3.6), sharey=True, squeeze=False)
    for axis, (name, stage) in zip(axes[0], stages.items()):
        tokens = stage.tokens
        sizes = {"tokens": tokens.count, "plain GRPO's gradient":
                 np.abs(tokens.advantage) * tokens.size, "what is decided": tokens.decided}
        for number, (label, size) in enumerate(sizes.items()):
            total = np.bincount(tokens.codes["kind"], size, len(KINDS))
            axis.barh(np.arange(len(KINDS)) + 0.27 * (number - 1), 100 * total / (total.sum() or 1),
                      0.25, color=COLOURS[number], label=label)
        axis.set(title=name, yticks=range(len(KINDS)), yticklabels=KINDS, xlabel="share, %")
    axes[0, 0].invert_yaxis()
    legend_below(figure, axes[0, 0], ncols=3)
    save(figure, folder, "kinds", "")


def stacked(tables: dict[str, Table]) -> Table:
    """The rows of all models' tables, with the model in the first column."""
    first = next(iter(tables.values()))
    formats = {"model": "", **{name: spec for name, (spec, _) in first.columns.items()}}
    rows = [[name, *row] for name, table in tables.items() for row in table.rows]
    finding = "\n".join(f"{name}: {table.finding}" for name, table in tables.items())
    return Table(first.name, first.title, by_row(formats, rows), finding, list(first.notes),
                 {**first.headings, "tokens": "tokens of an answer to each problem"})


def listed_table(stages: dict[str, Stage]) -> Table:
    rows, told = [], []
    for name, stage in stages.items():
        listing, tokens = stage.listing, stage.tokens
        problems = range(len(listing.listed))
        value = np.mean([listing.value[n, ()] for n in problems])
        low, high = np.mean([listing.bounds[n, ()] for n in problems], 0).tolist()
        missing = np.abs(tokens.by_question(tokens.decided) - listing.variance).max()
        rows.append([name, len(problems), len(listing.share) / len(problems),
                     listing.listed.mean(), listing.listed.min(), value, (low, high),
                     mean_width(listing)])
        told.append(f"{name}: {listing.listed.mean():.2%} of the probability is listed, of each "
                    f"problem at least {listing.listed.min():.2%}. The squared credits sum to the "
                    f"reward's variance of each problem within {missing:.0e}.")
    formats = {"model": "", "problems": "d", "answers": ".0f", "listed": ".2%", "least": ".2%",
               "V": ".1%", "bounds": ".1%", "width": ".3f"}
    return Table("listed", "How much is listed, and how surely V is known", by_row(formats, rows),
                 "\n".join(told),
                 ["bounds: what is not listed has the least reward, or the greatest; width: of "
                  "the bounds of V, the mean over the prefixes of an answer"],
                 {"answers": "listed answers to a problem", "listed": "probability listed, mean",
                  "least": "least of a problem", "V": "mean V of the prompts",
                  "width": "mean width of V's bounds"})


def mean_width(listing: Listing) -> float:
    """Of the bounds of V, over the prefixes of the listed answers, each by its probability."""
    total = count = 0.0
    for share, group, ids in zip(listing.share, *listing.rollouts.lists):
        for t in range(len(ids)):
            low, high = listing.bounds[group, tuple(ids[:t])]
            total, count = total + share * (high - low), count + share
    return total / count


def follow_table(stages: dict[str, Stage]) -> Table:
    """Do push and change of a token follow its credit?"""
    rows, told = [], []
    for name, stage in stages.items():
        tokens = {what: became.pooled([stage.sampled], what) for what in ("given", *STEPS)}
        found = {what: became.with_credit(part) for what, part in tokens.items()}
        is_frequent = became.of_frequent_types(tokens["given"])
        types = len(np.unique(tokens["given"]["id"][is_frequent]))
        rows += [[name, named(what), by_token.value, by_token.interval, types, by_type.value,
                  by_type.interval] for what, (by_token, by_type) in found.items()]
        for number, cells in enumerate(("token by token", "summed by type")):
            push, change = (found[what][number].value for what in ("given", "plain step"))
            if math.isfinite(push + change) and (number == 0 or types >= FEWEST):
                told.append(f"{name}: {cells}, the correlation with the credit is {change:+.2f} "
                            f"for the change in a plain step, {push:+.2f} for the push.")
    formats = {"model": "", "what": "", "by token": "+.2f", "by token 95%": "+.2f", "types": "d",
               "by type": "+.2f", "by type 95%": "+.2f"}
    return Table("follows", "Does what happens to a token follow its credit?",
                 by_row(formats, rows), "\n".join(told),
                 ["correlations with the exact credit: token by token, and of sums with their "
                  f"sign over all tokens of one spelling, a type; a type has {became.COMMON_TYPE} "
                  "tokens or more, from 32 problems on in proportion; intervals: jackknife over "
                  "problems; tokens without a push are left out"],
                 {"by token 95%": "95% interval", "by type 95%": "95% interval"})


def named(what: str) -> str:
    return "push" if what == "given" else f"change, {what}"


def shares_table(stages: dict[str, Stage]) -> Table:
    """Of all sizes of push, change and credit, the shares of each kind."""
    rows = []
    for name, stage in stages.items():
        parts = {what: became.pooled([stage.sampled], what) for what in ("given", *STEPS)}
        tokens = parts["given"]
        sizes = [np.abs(part["became"]) for part in parts.values()]
        sizes.append(np.abs(tokens["credit 1"]))
        for code, kind in enumerate(KINDS):
            inside = tokens["kind"] == code
            if inside.any():
                shares = [became.jackknifed(tokens, [size * inside, size], became.ratio)
                          for size in sizes]
                rows.append([name, kind, inside.mean(), *(part for share in shares for part in
                                                          (share.value, share.interval))])
    names = ("push", "plain step", "AdamW's first", "credit")
    formats = {"model": "", "kind": "", "tokens": ".1%",
               **{heading: ".1%" for name in names for heading in (name, f"{name} 95%")}}
    return Table("shares", "Shares of the sizes of push, change and credit",
                 by_row(formats, rows), "",
                 ["of the batch's tokens that have a push and a known credit; change: of a plain "
                  "step, and of AdamW's first"],
                 {"tokens": "of all tokens", **{f"{name} 95%": "95% interval" for name in names}})


def types_table(stages: dict[str, Stage], tokenizer: Tokenizer) -> Table:
    """The types with the largest credit, up or down: sums over their tokens, as shares of all
    sizes."""
    rows = []
    for name, stage in stages.items():
        tokens = became.pooled([stage.sampled], "plain step")
        ids, cell, count = np.unique(tokens["id"], return_inverse=True, return_counts=True)
        push, change, credit = (
            np.bincount(cell, tokens[column]) / max(np.abs(tokens[column]).sum(), 1e-300)
            for column in ("given", "became", "credit 1"))
        rows += [[name, repr(tokenizer.decode([int(ids[i])], skip_special_tokens=False)),
                  int(count[i]), push[i], change[i], credit[i]]
                 for i in np.argsort(-np.abs(credit))[:TYPES]]
    formats = {"model": "", "type": "", "tokens": "d", "push": "+.1%", "change": "+.1%",
               "credit": "+.1%"}
    return Table("types", "The types with the largest credit, with their sign",
                 by_row(formats, rows), "", ["change: of a plain step; shares of the sum of all "
                                             "sizes"])
