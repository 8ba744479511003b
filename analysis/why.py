"""Why one token gets more gradient than another: how unsure the model was, and its ratio."""
import numpy as np

from analysis.tables import Table
from analysis.tally import Tally, text_of
from engine.tokens import KINDS


def forks(tally: Tally) -> Table:
    """Single tokens: where the model was least sure what to write, and where it was surest."""
    words = tally.vocabulary
    count, kinds = words.count, words.kinds.argmax(1)
    common = np.flatnonzero(count >= max(10, 0.0005 * tally.tokens))
    means = {name: total / count.clip(1) for name, total in words.sums.items()}
    order = common[np.argsort(-means["entropy"][common])]
    ids = np.concatenate([order[:10], order[::-1][:10]])
    texts = [repr(text_of(tally.tokenizer, i)) for i in ids]
    half = len(ids) // 2
    columns = {"": ("", ["forking"] * half + ["following"] * half),
               "token": ("", texts),
               "kind": ("", [KINDS[kinds[i]] for i in ids]),
               "count": (",.0f", count[ids]),
               "entropy": (".3f", means["entropy"][ids]),
               "log p": (".3f", means["log_prob"][ids]),
               "abs(A) w s": (".4f", means["abs gradient"][ids])}
    return Table("forks", "Forking tokens (highest mean entropy) and following tokens (lowest)",
                 columns, "",
                 ["of tokens that make up at least 0.05% of the run and occur ten times; entropy "
                  "of the distribution they were drawn from"],
                 {"entropy": "mean entropy", "log p": "mean log p",
                  "abs(A) w s": "mean size abs(A) w s"})


def ratio_and_size(tally: Tally) -> Table:
    """At the last update from a batch a token's gradient is A w r s, unless it is clipped. Does it
    vary with the ratio r, or with s, which is large where the model is unsure?"""
    names = ("tokens", "ratio", "squared ratio", "s", "squared s")
    sums = np.stack([tally.total("trained", name)[:-1] for name in names], axis=1)
    used = np.flatnonzero(sums[:, 0])
    tokens, r, rr, s, ss = np.concatenate([sums[used], sums.sum(0, keepdims=True)]).T
    of_r, of_s = relative_spread(tokens, r, rr), relative_spread(tokens, s, ss)
    columns = {"kind": ("", [*(KINDS[i] for i in used), "all"]),
               "tokens": (",.0f", tokens),
               "mean r": (".4f", r / tokens),
               "spread of r": (".1%", of_r),
               "mean s": (".4f", s / tokens),
               "spread of s": (".1%", of_s)}
    return Table("ratio and size", "What varies from token to token: the ratio, or s?", columns,
                 "",
                 ["tokens that were trained on; r: probability before the last update from a batch "
                  "over that before the first; spread: standard deviation over the mean"])


def relative_spread(tokens, total, squares) -> np.ndarray:
    """The standard deviation over the mean."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / tokens
        return np.sqrt((squares / tokens - mean ** 2).clip(0)) / mean
