"""Why one token gets more gradient than another: how unsure the model was."""
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
