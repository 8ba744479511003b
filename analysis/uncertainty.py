"""Where the model was unsure what to write: forking tokens, sections and kinds."""
import numpy as np

from analysis.ratios import REST_WORDS, mean_sizes, shares
from analysis.sizes import size_label
from analysis.sums import PARTITIONS
from analysis.tables import Table
from analysis.tally import Tally
from analysis.vocabulary import text_of
from engine.labels import KINDS


def forks(tally: Tally) -> Table:
    vocabulary = tally.vocabulary
    common = np.flatnonzero(vocabulary.count >= max(10, 0.0005 * tally.tokens))
    entropy = vocabulary.entropy[common] / vocabulary.count[common]
    order = common[np.argsort(-entropy)]
    forking, following = order[:10], order[::-1][:10]
    ids = np.concatenate([forking, following])

    def mean(sums: np.ndarray) -> np.ndarray:
        return sums[ids] / vocabulary.count[ids]

    columns = {"": ("", ["forking"] * len(forking) + ["following"] * len(following)),
               "token": ("", [repr(text_of(tally.tokenizer, i)) for i in ids]),
               "kind": ("", [KINDS[vocabulary.kinds[i].argmax()] for i in ids]),
               "count": (",.0f", vocabulary.count[ids]),
               "entropy": (".3f", mean(vocabulary.entropy)),
               "log p": (".3f", mean(vocabulary.log_prob)),
               size_label(tally.final): (".4f", mean(vocabulary.gradient))}
    finding = "No token is frequent enough."
    if len(order):
        high, low = (f"{text_of(tally.tokenizer, i)!r} (mean entropy "
                     f"{vocabulary.entropy[i] / vocabulary.count[i]:.3g})"
                     for i in (order[0], order[-1]))
        finding = f"Most uncertain where it drew {high}, surest where it drew {low}."
    return Table("forks", "Forking tokens (highest mean entropy) and following tokens (lowest)",
                 columns, finding,
                 ["of tokens that make up at least 0.05% of the run and occur ten times; entropy "
                  "of the distribution they were drawn from"],
                 {**REST_WORDS, "entropy": "mean entropy", "log p": "mean log p"})


def sections(tally: Tally) -> Table:
    cells, tokens = PARTITIONS["section by kind"], tally.count("section by kind")
    used = np.flatnonzero(tokens)
    columns = {"section": ("", [cells[i][0] for i in used]),
               "kind": ("", [cells[i][1] for i in used]),
               "tokens": (",d", tokens[used])}
    for name in ("entropy", "weight", "s"):
        columns[name] = (".3f", tally.mean("section by kind", name)[used])
    columns |= mean_sizes(tally, "section by kind", "gradient", used)
    columns["gradient"] = (".1%", shares(tally, "section by kind")[used])
    often = tokens[used] >= 0.0005 * tally.tokens
    entropy = np.where(often, columns["entropy"][1], -1)
    section, kind = cells[used[entropy.argmax()]]
    return Table("sections", "Entropy, weight and gradient by section and kind", columns,
                 f"The most uncertain are {kind} tokens in the {section} section (mean entropy "
                 f"{entropy.max():.2f}).",
                 ["sections: think up to </think>, answer between the answer tags, other the rest; "
                  "gradient: share of it"],
                 {**REST_WORDS, "entropy": "mean entropy", "weight": "mean weight",
                  "gradient": "share of the gradient"})
