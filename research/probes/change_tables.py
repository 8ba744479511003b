"""Tables of push, change and credit (change.py), and their statistics with the estimate's variance
taken out. Sums over a vocabulary item are over all tokens of that spelling, with their sign."""
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from analysis.shares import jackknife_of_sums, over, share_of, share_of_sums, sums_by_problem
from analysis.statistics import Estimate, within
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from analysis.tokens import TokenTable, joined_tables
from engine.errors import UserError
from engine.tokens import KINDS
from grpo import ways_of_push
from research.probes.change_batches import (ADAMW_STEP, PLAIN_STEP, PUSH, SMALL_GROUPS, STEPS,
                                            MeasuredBatch)
from research.probes.common import rank_correlation

COMMON_ITEM = 20  # tokens of a vocabulary item: in each run, or for the correlations as below
MOST_ITEMS = 6    # that are shown
SHOWN = ("word", "number", "operator")
PUSH_AND_CHANGES = (PUSH, *STEPS)
ByStep = Mapping[int, Sequence[MeasuredBatch]]  # by step, one of each run


def live_tokens(tokens: TokenTable, arm: str) -> TokenTable:
    """The tokens that have a push and a known change, with a column `change`: that of the arm's
    step, or the push itself."""
    push = tokens["push in groups of 4" if arm == SMALL_GROUPS else "push"]
    change = push if arm == PUSH else tokens[arm]
    known = (push != 0) & ~np.isnan(change)
    kept = ("problem", "token_id", "kind", "credit 1", "credit 2")
    columns = {name: tokens[name] for name in kept}
    columns |= {"push": push, "change": change}
    return TokenTable(columns).where(known)


def pooled(batches: Sequence[MeasuredBatch], arm: str) -> TokenTable:
    return joined_tables([live_tokens(batch.tokens, arm) for batch in batches])


def size_of_credit(tokens: TokenTable) -> np.ndarray:
    """The credit by one half of the continuations times its sign by the other half: a size to which
    the variance of the estimate adds nothing."""
    return np.asarray(tokens["credit 1"] * np.sign(tokens["credit 2"]))


def of_frequent_items(tokens: TokenTable) -> np.ndarray:
    """(n,): whether a token is of a vocabulary item that occurs often enough: 20 times, and from 32
    problems on 20 times for every 16 problems."""
    _, item_of, count = np.unique(tokens["token_id"], return_inverse=True, return_counts=True)
    runs = max(1, tokens.problems // 16)
    return np.asarray((count >= COMMON_ITEM * runs)[item_of])


def correlations_with_credit(tokens: TokenTable) -> list[Estimate]:
    """The correlation of change and credit token by token, and that of their sums over vocabulary
    items, with intervals that are cut at -1 and 1."""
    if not tokens["credit 1"].any():
        return [Estimate(np.nan)] * 2
    frequent = of_frequent_items(tokens)
    by_item = Estimate(np.nan)
    if frequent.any():
        part = tokens.where(frequent)
        _, item = np.unique(part["token_id"], return_inverse=True)
        values = [part["change"], part["credit 1"], part["credit 2"]]
        by_item = within(jackknife_of_sums(part["problem"], values, correlation_by_item, item),
                         -1, 1)
    d, c1, c2 = tokens["change"], tokens["credit 1"], tokens["credit 2"]
    dc = d * (c1 + c2) / 2
    products = [np.ones_like(d), d, d * d, c1, c2, c1 * c2, dc]
    by_token = jackknife_of_sums(tokens["problem"], products, correlation_by_token)
    return [within(by_token, -1, 1), by_item]


def correlation_by_token(sums: np.ndarray) -> float:
    """The correlation of change d and credit c from the sums (7, 1) of 1, d, d d, c1, c2, c1 c2 and
    d c. c1 c2, a product of the halves, stands for the square of c without its variance."""
    n, d, dd, c1, c2, cc, dc = sums[:, 0]
    c = (c1 + c2) / 2
    covariance = dc - d * c / n
    variance_of_change, variance_of_credit = dd - d * d / n, cc - c1 * c2 / n
    return float(covariance / np.sqrt(variance_of_change * variance_of_credit))


def correlation_by_item(sums: np.ndarray) -> float:
    """The correlation of sums over items (3, items): of the change, and of the credit's halves."""
    d, c1, c2 = sums - sums.mean(1, keepdims=True)
    covariance = (d * (c1 + c2) / 2).sum()
    return float(covariance / np.sqrt((d * d).sum() * (c1 * c2).sum()))


def sizes_of_tokens(of_step: Sequence[MeasuredBatch]) -> tuple[TokenTable, dict[str, np.ndarray]]:
    """The tokens of a step's batches that have a push, and the sizes (n,) of their push, changes
    and credit."""
    tokens = pooled(of_step, PUSH)
    sizes = {"push": PUSH, "plain step": PLAIN_STEP, "AdamW": ADAMW_STEP}
    found = {name: np.abs(pooled(of_step, arm)["change"]) for name, arm in sizes.items()}
    return tokens, {**found, "credit": size_of_credit(tokens)}


def sums_of_kinds(batches: ByStep) -> dict[str, dict[str, dict[str, list[float]]]]:
    """What the shares are made of: for each step, measure and kind the sum of sizes in each
    problem; `all` is the sum over all kinds."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for step, of_step in batches.items():
        tokens, sizes = sizes_of_tokens(of_step)
        everywhere = np.ones(len(tokens), bool)
        masks = [("all", everywhere), *shown_kinds(tokens)]
        found[str(step)] = sums_by_problem(tokens, sizes, masks)
    return found


def shown_kinds(tokens: TokenTable) -> list[tuple[str, np.ndarray]]:
    """The kinds that the tables show, each with the mask (n,) of its tokens."""
    return [(name, tokens["kind"] == KINDS.index(name)) for name in SHOWN]


def kinds_table(batches: ByStep) -> Table:
    rows: list[Row] = []
    for step, of_step in batches.items():
        tokens, sizes = sizes_of_tokens(of_step)
        if not len(tokens):
            raise UserError(f"at step {step} no measured token has a push, because in each "
                            "measured problem all answers have equal rewards. More --questions or "
                            "--measured problems may help")
        for kind, inside in shown_kinds(tokens):
            shares = [share_of(tokens, inside, size) for size in sizes.values()]
            rows.append([step, kind, inside.mean(), *shares])
    names = ("push", "plain step", "AdamW", "credit")
    formats = {"step": "d", "kind": "", "tokens": ".0%"}
    headings = {"tokens": "share of the tokens", "push": "share of the push",
                "plain step": "share of the change, plain step",
                "AdamW": "share of the change, AdamW's first step",
                "credit": "share of the credit"}
    for name in names:
        formats[name] = ".0%"
        headings[name] += WITH_INTERVAL
    return Table("kinds", "Which kinds of token get the push, the change and the credit",
                 by_row(formats, rows), "",
                 ["The push of a token is A s^2: what its own term of the loss would do to its "
                  "log-prob, if nothing else moved it. The change is its log-prob after the step "
                  "minus before. The credit is V after the token minus V before it, where V is the "
                  "expected reward of going on from there. A share is a share of the sum of sizes. "
                  "The size of a credit is its value from one half of its continuations, times its "
                  "sign from the other half, because the error of an estimate would add to its "
                  "size"], headings)


def fell_and_rose_table(batches: ByStep) -> Table:
    rows: list[Row] = []
    for step, of_step in batches.items():
        for arm in PUSH_AND_CHANGES:
            tokens = pooled(of_step, arm)
            against_push = [Estimate(np.nan)] * 2
            if arm != PUSH:
                by_way = ways_of_push(tokens["push"], tokens["change"])
                against_push = [
                    share_of_sums(tokens["problem"], by_way["up, fell"], by_way["up"]),
                    share_of_sums(tokens["problem"], by_way["down, rose"], by_way["down"])]
            rows.append([step, arm, *against_push, *correlations_with_credit(tokens)])
    formats = {"step": "d", "what": "", "fell": ".0%", "rose": ".0%", "by token": "+.2f",
               "by type": "+.2f"}
    headings = {"what": "push, or change in a step", "fell": f"pushed up, but fell{WITH_INTERVAL}",
                "rose": f"pushed down, but rose{WITH_INTERVAL}",
                "by token": f"correlation with credit, by token{WITH_INTERVAL}",
                "by type": f"correlation with credit, by vocabulary item{WITH_INTERVAL}"}
    return Table("arms", "Which log-probs fell and rose, and whether the change follows the credit",
                 by_row(formats, rows), "",
                 ["Pushed up, but fell: the share of the upward push that went to tokens whose "
                  "log-prob fell. Pushed down, but rose: the share of the downward push that went "
                  "to tokens whose log-prob rose. The correlations are those of the push, or of "
                  "the change in a step, with the credit: token by token, and for sums with their "
                  "signs over all tokens of one vocabulary item"], headings)


def items_of(tokens: TokenTable, tokenizer: Tokenizer) -> tuple[list[str], dict[str, np.ndarray]]:
    """The vocabulary items that occur, spelled out; and for each item the number of its tokens, and
    the sums of their push, change and credit with their signs, as shares of all sizes."""
    ids, item, count = np.unique(tokens["token_id"], return_inverse=True, return_counts=True)
    numbers = {"count": count}
    credit = (tokens["credit 1"] + tokens["credit 2"]) / 2
    for name, values in (("push", tokens["push"]), ("change", tokens["change"]),
                         ("credit", credit)):
        numbers[name] = over(np.bincount(item, values), np.abs(values).sum())
    texts = [repr(tokenizer.decode([i], skip_special_tokens=False)) for i in ids.tolist()]
    return texts, numbers


def largest_credit_first(numbers: dict[str, np.ndarray], fewest: int = 1) -> np.ndarray:
    """The indices of the items with so many tokens or more, the largest credit, up or down, first.
    """
    common = np.flatnonzero(numbers["count"] >= fewest)
    return np.asarray(common[np.argsort(-np.abs(numbers["credit"][common]))])


def items_table(batches: ByStep, tokenizer: Tokenizer) -> Table:
    """The vocabulary items with the largest credit, up or down: sums over their tokens, as shares
    of all sizes."""
    rows: list[Row] = []
    sentences = []
    for step, of_step in batches.items():
        texts, numbers = items_of(pooled(of_step, PLAIN_STEP), tokenizer)
        items = largest_credit_first(numbers, COMMON_ITEM * len(of_step))
        push, change, credit = (numbers[name] for name in ("push", "change", "credit"))
        for i in items[:MOST_ITEMS]:
            rows.append([step, texts[i], push[i], change[i], credit[i]])
        of_change = rank_correlation(change[items], credit[items])
        of_push = rank_correlation(push[items], credit[items])
        sentences.append(f"At step {step}, over {len(items)} vocabulary items, the rank "
                         f"correlation with the credit is {of_change:+.2f} for the change and "
                         f"{of_push:+.2f} for the push.")
    formats = {"step": "d", "type": "", **dict.fromkeys(("push", "change", "credit"), "+.1%")}
    return Table("types", "The vocabulary items with the largest credits, up or down",
                 by_row(formats, rows), "\n".join(sentences),
                 ["The change is that in a step of plain gradient descent. A number is the sum "
                  "over the tokens of the item, with their signs, divided by the sum of sizes over "
                  "all tokens"],
                 {"type": "vocabulary item"})
