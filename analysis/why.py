"""Why one token gets more gradient than another: its place, how unsure the model was, its ratio."""
import numpy as np

from analysis.ratios import REST_WORDS, different_cells, pair
from analysis.sizes import size_label
from analysis.statistics import verdicts
from analysis.tables import Table, by_row
from analysis.tally import Tally
from analysis.vocabulary import text_of
from engine.labels import KINDS


def why_tables(tally: Tally) -> list[Table]:
    tables = [kinds_at_like_position(tally), forks(tally)]
    if tally.total("trained", "ratio").any():  # where a batch had several updates
        tables.append(ratio_and_size(tally))
    return tables


def kinds_at_like_position(tally: Tally) -> Table:
    """Is a kind of token ahead because of where it stands?"""
    kinds = [k for k, name in enumerate(KINDS)
             if tally.count("kind")[k] and name != "end"]  # has its own place in every answer
    estimates = [pair(tally, "kind", tally.final, k, None) for k in kinds]
    all_like, names = [like for _, like in estimates], [KINDS[k] for k in kinds]
    rows = []
    for name, (crude, like), word in zip(names, estimates, verdicts(all_like)):
        rows.append([name, crude.value, crude.interval, like.value, like.interval, word])
    formats = {"kind": "", "crude": ".2f", "95%": ".2f", "20ths": ".2f", "95% of it": ".2f",
               "difference": ""}
    cells = different_cells(names, all_like)
    return Table("kinds at like position",
                 "Each kind of token over all other tokens, as it is and at like position",
                 by_row(formats, rows), f"At like position:{cells or ' no difference is seen.'}",
                 ["at like position: as if the kind and all other tokens stood in the same places "
                  "(twenty bins of relative position), with Holm's correction over the rows"],
                 {"crude": "as it is", "95%": "95% interval", "20ths": "at like position",
                  "95% of it": "95% interval of that"})


def forks(tally: Tally) -> Table:
    """Single tokens: where the model was least sure what to write, and where it was surest."""
    words = tally.vocabulary
    count, kinds = words.sums["count"], words.kinds.argmax(1)
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
               size_label(tally.final): (".4f", means["gradient"][ids])}
    finding = "No token is frequent enough."
    if half:
        high, low = means["entropy"][order[[0, -1]]]
        finding = (f"Most uncertain where it drew {texts[0]} (mean entropy {high:.3g}), surest "
                   f"where it drew {texts[half]} (mean entropy {low:.3g}).")
    return Table("forks", "Forking tokens (highest mean entropy) and following tokens (lowest)",
                 columns, finding,
                 ["of tokens that make up at least 0.05% of the run and occur ten times; entropy "
                  "of the distribution they were drawn from"],
                 {**REST_WORDS, "entropy": "mean entropy", "log p": "mean log p"})


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
                 f"From token to token the ratio at the last update varies by {of_r[-1]:.1%} of "
                 f"its mean, the size of the gradient of log p by {of_s[-1]:.1%}.",
                 ["tokens that were trained on; r: probability before the last update from a batch "
                  "over that before the first; spread: standard deviation over the mean"])


def relative_spread(tokens, total, squares) -> np.ndarray:
    """The standard deviation over the mean."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / tokens
        return np.sqrt((squares / tokens - mean ** 2).clip(0)) / mean
