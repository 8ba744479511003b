"""The tables and the picture of exact credit on a real model (listed.py), for one model or several.
"""
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from analysis.plots import CREDIT_COLOUR, GRADIENT_COLOUR, TOKENS_COLOUR, legend_below, plt, save
from analysis.shares import occurring, share_of, shares_by
from analysis.statistics import FEWEST
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from analysis.tokens import TokenTable
from engine.tokens import KINDS
from research.probes import change_tables
from research.probes.change_batches import ADAMW_STEP, PLAIN_STEP, PUSH
from research.probes.change_tables import (correlations_with_credit, items_of,
                                           largest_credit_first, live_tokens)
from research.probes.decided import PARTITIONS, decided_table
from research.probes.tree import Listing

ORDINALS = ("1st", "2nd", "3rd", *(f"{number}th" for number in range(4, 1000)))
WHERE = {"kind": PARTITIONS["kind"],
         "index": (ORDINALS, "The same by the position of the token in the answer")}
LABELS = {PUSH: "push", PLAIN_STEP: "change, plain step", ADAMW_STEP: "change, AdamW's first"}
MOST_ITEMS = 8  # vocabulary items that are shown


@dataclass
class MeasuredModel:
    """Measurements of one model."""
    listing: Listing
    tokens: TokenTable    # of the listed answers
    sampled: TokenTable   # of the batch, those whose credit is known
    known: float          # the share of the batch's tokens whose credit is known


Models = Mapping[str, MeasuredModel]  # by name


def listed_model_tables(models: Models, tokenizer: Tokenizer, answers: int) -> list[Table]:
    tables = []
    for partition in WHERE:
        of_models = {}
        for name, one in models.items():
            of_models[name] = decided_table(one.tokens, partition, WHERE)
        tables.append(stacked(of_models))
    tables[0].notes.append("Sums are over the listed answers, each times its probability. The "
                           f"advantage A of an answer is its mean over all groups of {answers} "
                           "answers in which it may be")
    tables.append(listed_table(models))
    moved = {name: one for name, one in models.items() if one.sampled["push"].any()}
    if moved:
        tables += [follow_table(moved), shares_table_of_models(moved),
                   largest_items_table(moved, tokenizer)]
    return tables


def draw_shares(models: Models, folder: Path) -> None:
    """Draw a panel for each model: the share of the tokens that each kind of token has, of the
    gradient, and the share it decides."""
    width = max(6, 1 + 3.2 * len(models))
    figure, axes = plt.subplots(1, len(models), figsize=(width, 3.6), sharey=True, squeeze=False)
    for axis, (name, one) in zip(axes[0], models.items()):
        tokens = one.tokens
        gradient = np.abs(tokens["advantage"]) * tokens["s"]
        sizes = {"tokens": (tokens["count"], TOKENS_COLOUR),
                 "plain GRPO's gradient": (gradient, GRADIENT_COLOUR),
                 "the share it decides": (tokens["squared credit"], CREDIT_COLOUR)}
        for number, (label, (size, colour)) in enumerate(sizes.items()):
            share = 100 * shares_by(tokens["kind"], size, len(KINDS))
            places = np.arange(len(KINDS)) + 0.27 * (number - 1)
            axis.barh(places, share, 0.25, color=colour, label=label)
        axis.set(title=name, yticks=range(len(KINDS)), yticklabels=KINDS,
                 xlabel="share of the sum, %")
    axes[0, 0].invert_yaxis()
    legend_below(figure, axes[0, 0], ncols=3)
    save(figure, folder, "kinds", "")


def stacked(tables: dict[str, Table]) -> Table:
    """The rows of all models' tables, with the model in the first column."""
    first = next(iter(tables.values()))
    formats = {"model": ""}
    for column, (spec, _) in first.columns.items():
        formats[column] = spec
    rows: list[Row] = []
    sentences = []
    for name, table in tables.items():
        rows += [[name, *row] for row in table.rows]
        sentences.append(f"{name}: {table.finding}")
    return Table(first.name, first.title, by_row(formats, rows), "\n".join(sentences),
                 list(first.notes),
                 {**first.headings, "tokens": "tokens in one answer to each problem"})


def listed_table(models: Models) -> Table:
    rows: list[Row] = []
    sentences = []
    for name, one in models.items():
        listing, squared = one.listing, one.tokens["squared credit"]
        prompts = [(number, ()) for number in range(len(listing.listed))]
        value = np.mean([listing.value[prompt] for prompt in prompts])
        low, high = np.mean([listing.bounds[prompt] for prompt in prompts], 0).tolist()
        missing = np.abs(one.tokens.sums_by_problem(squared) - listing.variance).max()
        answers = len(listing.share) / len(prompts)
        mean, least = listing.listed.mean(), listing.listed.min()
        rows.append([name, len(prompts), answers, mean, least, value, (low, high),
                     mean_width(listing)])
        sentences.append(f"{name}: the listed answers have {mean:.2%} of the probability on "
                         f"average, and at least {least:.2%} for each problem. For each problem "
                         "the squared credits sum to the variance of the reward, up to "
                         f"{missing:.0e}.")
    formats = {"model": "", "problems": "d", "answers": ".0f", "listed": ".2%", "least": ".2%",
               "V": ".1%", "bounds": ".1%", "width": ".3f"}
    return Table("listed", "How much is listed, and how precisely V is known",
                 by_row(formats, rows), "\n".join(sentences),
                 ["Answers that are not listed count in the lower bound of V as if they had the "
                  "least reward, and in the upper bound as if they had the greatest. The width is "
                  "the upper bound minus the lower one, as a mean over the prefixes of the listed "
                  "answers"],
                 {"answers": "listed answers to a problem",
                  "listed": "probability of the listed answers, mean",
                  "least": "least of any problem", "V": "mean V of the prompts",
                  "bounds": "bounds of this V", "width": "mean width of the bounds"})


def mean_width(listing: Listing) -> float:
    """The mean width of V's bounds over the prefixes of the listed answers, each by its
    probability."""
    total = count = 0.0
    for share, group, ids in zip(listing.share, *listing.rollouts.groups_and_ids):
        for t in range(len(ids)):
            low, high = listing.bounds[group, tuple(ids[:t])]
            total += share * (high - low)
            count += share
    return total / count


def follow_table(models: Models) -> Table:
    """Do push and change of a token follow its credit?"""
    rows: list[Row] = []
    sentences = []
    for name, one in models.items():
        found = {arm: correlations_with_credit(live_tokens(one.sampled, arm)) for arm in LABELS}
        pushed = live_tokens(one.sampled, PUSH)
        frequent = change_tables.of_frequent_items(pushed)
        items = len(np.unique(pushed["token_id"][frequent]))
        for arm, (by_token, by_item) in found.items():
            rows.append([name, LABELS[arm], by_token, items, by_item if items >= FEWEST else None])
        for number, how in enumerate(("token by token", "summed over vocabulary items")):
            push, change = found[PUSH][number].value, found[PLAIN_STEP][number].value
            is_known = math.isfinite(push + change) and (number == 0 or items >= FEWEST)
            if is_known:
                sentences.append(f"{name}: {how}, the credit has a correlation of {change:+.2f} "
                                 f"with the change in a plain step, and of {push:+.2f} with the "
                                 "push.")
    formats = {"model": "", "what": "", "by token": "+.2f", "types": "d", "by type": "+.2f"}
    return Table("follows", "Do push and change of a token follow its credit?",
                 by_row(formats, rows), "\n".join(sentences),
                 ["The numbers are correlations with the exact credit: token by token, and for "
                  "sums with their signs over all tokens of one vocabulary item. Only items with "
                  f"{change_tables.COMMON_ITEM} or more tokens are counted, and from 32 problems "
                  "on proportionally more. Between fewer than "
                  f"{FEWEST} items there is no correlation to speak of. Intervals are by the "
                  "jackknife over problems. Tokens without a push are left out"],
                 {"what": "push, or change in a step",
                  "by token": f"correlation by token{WITH_INTERVAL}", "types": "vocabulary items",
                  "by type": f"correlation by vocabulary item{WITH_INTERVAL}"})


def shares_table_of_models(models: Models) -> Table:
    """The share of each kind in the sizes of push, change and credit."""
    rows: list[Row] = []
    for name, one in models.items():
        tokens = live_tokens(one.sampled, PUSH)
        sizes = [np.abs(live_tokens(one.sampled, arm)["change"]) for arm in LABELS]
        sizes.append(np.abs(tokens["credit 1"]))
        for kind, inside in occurring(tokens["kind"], KINDS):
            shares = [share_of(tokens, inside, size) for size in sizes]
            rows.append([name, kind, inside.mean(), *shares])
    formats = {"model": "", "kind": "", "tokens": ".1%"}
    headings = {"tokens": "share of the tokens"}
    for column, of in (("push", "push"), ("plain step", "change, plain step"),
                       ("AdamW's first", "change, AdamW's first step"), ("credit", "credit")):
        formats[column] = ".1%"
        headings[column] = f"share of the {of}{WITH_INTERVAL}"
    return Table("shares", "Which kinds of token get the push, the change and the credit",
                 by_row(formats, rows), "",
                 ["Shares are of sums of sizes, over the batch's tokens that have a push and a "
                  "known credit. The change is that in a step of plain gradient descent, and in "
                  "AdamW's first step"], headings)


def largest_items_table(models: Models, tokenizer: Tokenizer) -> Table:
    """The vocabulary items with the largest credit, up or down: sums over their tokens, as shares
    of all sizes."""
    rows: list[Row] = []
    for name, one in models.items():
        texts, numbers = items_of(live_tokens(one.sampled, PLAIN_STEP), tokenizer)
        for i in largest_credit_first(numbers)[:MOST_ITEMS]:
            values = [numbers[column][i] for column in ("push", "change", "credit")]
            rows.append([name, texts[i], int(numbers["count"][i]), *values])
    formats = {"model": "", "type": "", "tokens": "d", "push": "+.1%", "change": "+.1%",
               "credit": "+.1%"}
    return Table("types", "The vocabulary items with the largest credits, up or down",
                 by_row(formats, rows), "",
                 ["The change is that in a step of plain gradient descent. A number is the sum "
                  "over the tokens of the item, with their signs, divided by the sum of sizes over "
                  "all tokens"],
                 {"type": "vocabulary item"})
