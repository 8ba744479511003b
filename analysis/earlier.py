"""The tables of an earlier experiment by its own definitions, each with what is wrong about it and the right figure beside it.

The experiment trained Qwen2.5-0.5B with GRPO, logged `advantage * log_prob` of every token and took it for the gradient
(github.com/Ja-Crispy/GRPO-Zero). Its published figures stand here for orientation: they are another model's.
"""
import numpy as np

from countdown_task import KINDS
from analysis.statistics import permutation_p, verdicts
from analysis.tables import Table, by_row, shown
from analysis.tally import CLASSES, LABELS, NORMALISED, PARTITIONS, SIGNS, Tally, early_over_late, mean_sizes, size, t_statistics, text_of

NOTHING = "Nothing to compare: no token of one side has a gradient, or none was there."
ELSEWHERE = ("* published figures of another model (Qwen2.5-0.5B-Instruct, its own problems, 303,042 tokens; "
             "github.com/Ja-Crispy/GRPO-Zero), for orientation, not for comparison")
SHUFFLED = {"as shuffled": "nothing to see.", "fewer": "fewer than by chance.", "more": "advantage goes with what stands there. That long answers "
            "have other advantages is enough for it; it is no sign of credit."}
PUBLISHED = {
    "mean": 0.079, "spread": 1.168, "mean size": 0.307, "smallest": -28.0, "largest": 33.3, "early over late": 1.6,
    "position": (0.347194, 0.366896, 0.329356, 0.303315, 0.318367, 0.306196, 0.305382, 0.300810, 0.270468, 0.212966),
    "position log p": (-0.598505, -0.679701, -0.610746, -0.515499, -0.532835, -0.503752, -0.537406, -0.560431, -0.511919, -0.258263),
    "signs": (-0.560, 0.242),  # mean contribution where the normalised reward is above 0, and where it is not
    "classes": {"filler": (205_410, 0.678, -0.555, 0.0786, 0.333), "reasoning": (97_632, 0.322, -0.489, 0.0793, 0.254)},
    "filler by fifth": (0.3579, 0.3656, 0.3176, 0.3890, 0.2356), "reasoning by fifth": (0.3458, 0.2084, 0.2977, 0.2362, 0.2568),
    "filler over reasoning": 1.31, "filler over reasoning, standardised": 1.24,
    "phase 1": (0.83, 0.019, None), "phase 2": (0.20, 0.39, 1.92),  # share of abs(t) > 3, of abs(t) < 1.5, mean abs(t)
    "top": {"filler": r"' '  '>'  'answer'  ','  ' </'  ' to'  '>\n'", "reasoning": "'1'  '2'  '3'  '4'  '5'  '6'  ' -'"}}


def contributions(tally: Tally) -> Table:
    """Beside the old unit what the earlier log could not show: the gradient and the weights."""
    names = ("mean", "spread", "mean size", "smallest", "largest")

    def statistics(measure):
        mean, spread = tally.mean("all", measure)[0], tally.spread("all", measure)[0]
        sizes = mean if measure == "weight" else tally.mean("all", f"abs {measure}")[0]
        return mean, spread, sizes, *tally.sums.extremes[measure]

    columns = {"": ("", names), **{LABELS[unit]: (".4f", statistics(unit)) for unit in tally.units}, "weight": (".4f", statistics("weight")),
               "pub.* A lp": (".3f", [PUBLISHED[name] for name in names])}
    far = {unit: max(map(abs, tally.sums.extremes[unit])) / size for unit in ("contribution", tally.final) if (size := statistics(unit)[2])}
    w, included = ("", "") if tally.weights_are_one else (" w", ", weights included")
    finding = NOTHING if len(far) < 2 else (
        f"The largest size is {far['contribution']:.0f} times the mean size in the old unit and {far[tally.final]:.0f} times as gradient{included}: "
        f"A lp has no limit as p goes to 0, the gradient is at most sqrt(2) abs(A){w}.")
    same = ["all weights are 1: weighted and unweighted are the same"] * tally.weights_are_one
    return Table("contribution", "What a token was given: the old unit and the gradient, signed", columns, finding,
                 ["spread: the sample's standard deviation; mean size: the mean of the absolute values", *same, ELSEWHERE])


def positions(tally: Tally) -> Table:
    sizes = mean_sizes(tally, "position", "contribution")
    columns = {"bin": ("", [str(i) for i in range(10)]), "tokens": (",d", tally.count("position")),
               "log p": (".3f", tally.mean("position", "log_prob")), "A lp": (".4f", tally.mean("position", "contribution")),
               "spread": (".3f", tally.spread("position", "contribution")), **sizes,
               "pub.*": (".3f", PUBLISHED["position"]), "log p*": (".2f", PUBLISHED["position log p"])}
    peak = int(np.nanargmax(tally.mean("position", "abs contribution")))
    return Table("position", "Ten bins of relative position, in the old unit", columns,
                 f"In the old unit the largest mean size is that of bin {peak} (published: bin 1).", [ELSEWHERE])


def ends(tally: Tally) -> Table:
    """The earlier experiment mixed two definitions; here is one for all, and its own beside it."""
    found = {unit: early_over_late(tally, "ends", unit) for unit in tally.units}
    columns = {"size": ("", [size(unit) for unit in found]), "early over late": (".2f", [e.value for e in found.values()]),
               "95%": (".2f", [e.interval for e in found.values()]), "difference": ("", verdicts(list(found.values()), ("early more", "late more"))),
               "by absolute position": (".2f", [early_over_late(tally, "far ends", unit).value for unit in found]),
               "pub.*": (".1f", [PUBLISHED["early over late"] if unit == "contribution" else None for unit in found])}
    e = found[tally.final]
    finding = NOTHING if not np.isfinite(e.value) else (
        f"The first fifth of an answer gets {e.value:.2f} times the gradient of the last fifth (95%: {shown(e.interval, '.2f')}); "
        f"in the old unit {found['contribution'].value:.2f}.")
    return Table("ends", "Early over late: the first fifth of the answers over the last fifth", columns, finding,
                 ["a token counts where its middle stands, (t + 1/2) / length; by absolute position: tokens below the 20% quantile of absolute "
                  "position over those above the 80% quantile (in long answers only), as the earlier code computed it; its text divided bin 0 "
                  "by bin 9", ELSEWHERE])


def signs(tally: Tally) -> Table:
    def both(values):
        return [*values("sign"), *values("normalised")]

    columns = {"with": ("", [*SIGNS, *NORMALISED]), "tokens": (",d", both(tally.count)),
               "answers": (",d", [None] * len(SIGNS) + tally.sums.answers.tolist()), "A lp": ("+.3f", both(lambda p: tally.mean(p, "contribution"))),
               **{size(unit): (".3f", both(lambda p: tally.mean(p, f"abs {unit}"))) for unit in tally.units},
               "pub.*": ("+.3f", [None] * len(SIGNS) + list(PUBLISHED["signs"]))}
    none = tally.total("sign", "tokens")[SIGNS.index("A = 0")] / tally.tokens
    return Table("signs", "By the sign of the advantage", columns,
                 f"The signs are a tautology: log p is never positive, so A lp always has the sign of -A. {none:.0%} of the tokens had no "
                 "advantage at all; the earlier table counted those as negative.", ["z: the reward normalised in its group", ELSEWHERE])


def classes(tally: Tally) -> Table:
    units, rows = [unit for unit in tally.units if "contribution" in unit], []
    for partition, words in (("class", "regex"), ("kind", "span"), ("section", "section")):
        tokens = tally.count(partition)
        means = [tally.mean(partition, m) for m in ("log_prob", "contribution", *(f"abs {unit}" for unit in units))]
        rows += [[f"{name} ({words})", tokens[i], tokens[i] / tally.tokens, *(mean[i] for mean in means)]
                 for i, name in enumerate(PARTITIONS[partition]) if tokens[i] or partition == "class"]
        if partition == "class":
            rows += [[f"{name} (pub.*)", *figures, *[None] * (len(units) - 1)] for name, figures in PUBLISHED["classes"].items()]
    columns = by_row({"class": "", "tokens": ",d", "of all": ".1%", "log p": ".3f", "A lp": "+.4f", **{size(u): ".4f" for u in units}}, rows)
    mean, spread = tally.mean("class", "contribution"), tally.spread("class", "contribution")
    finding = (f"Signed means of filler and reasoning: {shown(mean[0], '+.4f')} and {shown(mean[1], '+.4f')}, beside spreads of "
               f"{shown(spread[0], '.2f')} and {shown(spread[1], '.2f')}. Their sign says how advantages and log-probs go together over answers; "
               "it is no credit to a class.")
    return Table("classes", "Classes of tokens in the old unit: by the earlier regex, and by spans of the text", columns, finding, [ELSEWHERE])


def what_filler_is(tally: Tally) -> Table:
    counts = tally.count("class by kind").reshape(len(CLASSES), len(KINDS))
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    columns = {"by regex": ("", CLASSES), "tokens": (",d", counts.sum(1)), **{kind: (".1%", shares[:, k]) for k, kind in enumerate(KINDS)}}
    parts = ", ".join(f"{shares[0, k]:.0%} {KINDS[k]}" for k in np.argsort(-shares[0]) if shares[0, k] >= 0.005)
    return Table("regex", "What the regex classes are made of", columns, f"Filler, by the regex, is {parts or 'empty'}.")


def classes_by_fifth(tally: Tally) -> Table:
    here = np.flatnonzero(tally.total("class by fifth", "tokens").reshape(len(CLASSES), 5).T.ravel())  # fifth by fifth, as it is read
    cells = [(c, b) for b in range(5) for c in range(len(CLASSES))]
    order, at = [5 * c + b for c, b in (cells[i] for i in here)], [cells[i] for i in here]
    published = [PUBLISHED[f"{CLASSES[c]} by fifth"][b] if f"{CLASSES[c]} by fifth" in PUBLISHED else None for c, b in at]
    first = [i == 0 or at[i][1] != at[i - 1][1] for i in range(len(at))]
    columns = {"part": ("", [f"{20 * b}-{20 * b + 20}%" if new else "" for (_, b), new in zip(at, first)]),
               "class": ("", [CLASSES[c] for c, _ in at]),
               "tokens": (",d", tally.count("class by fifth")[order]), "log p": (".3f", tally.mean("class by fifth", "log_prob")[order]),
               **mean_sizes(tally, "class by fifth", cells=order, spec=".3f"), "pub.*": (".3f", published)}
    sizes = {unit: tally.mean("class by fifth", f"abs {unit}") for unit in tally.units}
    ahead = ", ".join(f"in {int((x[:5] > x[5:10]).sum())} of 5 bins by {size(unit)}" for unit, x in sizes.items())
    return Table("class by position", "Classes (regex) in five bins of relative position", columns,
                 f"Filler is ahead of reasoning {ahead} (published: 4 of 5 in the old unit).", [ELSEWHERE])


def t_table(tally: Tally) -> Table:
    rows = [[f"{phase}*", over, None, None, under, None, mean, ""] for phase in ("phase 1", "phase 2") for over, under, mean in [PUBLISHED[phase]]]
    rows.append(["no effect", 0.0027, None, None, 0.866, None, 0.80, ""])
    counts = tally.positions.counts.sum(0)
    many, finding = int((counts > 1).sum()), "No position occurs twice."
    for unit in tally.units if many else ():
        t = np.abs(t_statistics(counts, *tally.positions.sums[unit].sum(1)))
        null = np.abs(t_statistics(counts, *tally.positions.shuffled[unit]))
        over, shuffled = (t > 3).mean(), (null > 3).mean(1)
        low, high = np.quantile(shuffled, (0.025, 0.975))
        said = "as shuffled" if permutation_p(over, shuffled) >= 0.05 else "more" if over > shuffled.mean() else "fewer"
        rows.append([LABELS[unit], over, shuffled.mean(), (low, high), (t < 1.5).mean(), (null < 1.5).mean(), t.mean(), said])
        finding = (f"{over:.0%} of the positions have abs(t) > 3 as gradient, {shuffled.mean():.0%} ({low:.0%} to {high:.0%}) with the answers of "
                   f"a group shuffled: {SHUFFLED[said]}")  # the last unit counts
    formats = {"unit": "", "over 3": ".1%", "shuffled": ".1%", "95%": ".1%", "under 1.5": ".1%", "shuffled, too": ".1%", "mean": ".2f", "over 3?": ""}
    return Table("t", f"abs(t), one t per absolute position over all answers ({many} positions)", by_row(formats, rows), finding,
                 ["tokens of one answer share one advantage, so these t are not independent and no test; the shuffled columns show what they "
                  "look like when credit has nothing to do with the answer. More than shuffled means that advantage and what stands at a "
                  "position go together over answers, length included; no effect: independent normal draws", ELSEWHERE])


def top_tokens(tally: Tally) -> Table:
    words, by_kind = tally.vocabulary, tally.vocabulary.kinds

    def most(counts):
        return "  ".join(repr(text_of(tally.tokenizer, i)) for i in np.argsort(-counts, kind="stable")[:7] if counts[i])

    rows = [[f"{name} (regex)", most(np.where(words.class_of == c, words.count, 0))] for c, name in enumerate(CLASSES)]
    rows += [[f"{name} (pub.*)", texts] for name, texts in PUBLISHED["top"].items()]
    rows += [[f"{name} (span)", most(by_kind[:, k])] for k, name in enumerate(KINDS) if by_kind[:, k].any()]
    pieces = np.where((words.class_of == CLASSES.index("filler")) & (by_kind[:, KINDS.index("tag")] > words.count / 2), words.count, 0)
    finding = f"Pieces of tags among the regex's filler: {most(pieces) if pieces.any() else 'none'}."
    return Table("top tokens", "The most frequent tokens of each class", by_row({"class": "", "tokens": ""}, rows), finding, [ELSEWHERE])
