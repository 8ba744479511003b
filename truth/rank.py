"""Is the gradient of rank 2, and do rewards for each token raise its rank?

It has been claimed that advantages which sum to zero give GRPO's gradient an intrinsic rank-2 structure, whatever the size R
of the group, that it becomes sparse over training, and that rewards for each token would raise its rank. Which matrix is
meant? Three are measured:

    A   R x parameters: a row is an answer's part, a_i grad log p(y_i), or with credit for each token sum_t a_it grad log p(y_it)
    B   the gradient that a group's answers make together, in each weight matrix
    C   the mean gradient of the answers of each reward: m rows, where m rewards occur

Some of it can be said in advance. A has R rows, so at R = 2 rank 2 says nothing. Advantages that depend on the reward alone
make the update a combination of the rows of C; where they also sum to zero, of the differences of these rows, one fewer. With
two rewards that is one direction, whatever R is. None of this is about the rank of A or B.

So each arm is compared with arms that know nothing of rewards or do not sum to zero, and with a null: for A rows of the same
lengths in random directions (orthogonal, in so many dimensions), for B a Gaussian matrix of the same shape. The gradient of a
linear layer is sum_t delta_t x_t'. Its inputs x_t have much in common whatever the advantages are; the control takes their
mean away: sum_t delta_t (x_t - mean)'. On a task whose credit is known, true rewards for each token take the place of
estimates. Sparsity over training is measured on a run, in sparsity.py.
"""
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from analysis.statistics import Estimate
from analysis.plots import COLOURS, GREY, panels, save
from engine.errors import UserError
from analysis.tables import Table, by_row, shown
from engine.rollouts import Rollouts
from truth import sparsity
from truth.common import Findings, Flag, Probe, Progress, sample_batch
from truth.credit import true_credit
from truth.planted import planted_lab, sample_planted, true_rewards
from truth.spectra import DEFINITIONS, ONES, RANKS, Found, Z, matrix_ranks, medians, study

FLAGS = {"questions": Flag(16, 2, "questions, each with matrices of its own", 2),
         "answers": Flag(32, 4, "answers to each; groups are the first 2, 4, 8, 16, 32 of them", 2),
         "credit_answers": Flag(8, 1, "the first so many get Monte Carlo credit"),
         "credit_k": Flag(8, 2, "continuations behind a token's credit, about"),
         "critic_batches": Flag(4, 1, "batches of as many questions and answers that the critic learns from"),
         "length": Flag(24, 8, "tokens of an answer of the planted task", 3), **sparsity.FLAGS}
CREDIT, CRITIC, NOISE = "Monte Carlo credit", "critic", "random per token"
TRUE, EXACT = "true reward per token", "exact credit"
LOOKED_AT = [(matrix, rank) for matrix in ("A", "B") for rank in ("entropy rank", "stable rank", "participation")]


def study_countdown(probe: Probe, progress: Progress) -> Found:
    args = probe.args
    lab, found = probe.lab(advantage="gae", gae_lambda=0.95), Found(args.answers)
    for i in range(args.critic_batches):
        progress("critic", i / args.critic_batches)
        lab.advantage(sample_batch(lab, 1001 + i, args.questions, args.answers), lab)
    for q in range(args.questions):
        progress("questions", q / args.questions)
        rollouts = sample_batch(lab, 1 + q, 1, args.answers)
        few = torch.arange(args.answers, device=rollouts.mask.device)[:, None] < args.credit_answers
        credit = true_credit(lab, replace(rollouts, mask=rollouts.mask & few), args.credit_k).value
        tokens = {CREDIT: credit, CRITIC: lab.advantage(rollouts, lab), NOISE: noise_like(rollouts)}
        found.explained.append(lab.advantage.metrics["explained_variance"])
        study(lab, rollouts, q, tokens, {CREDIT: args.credit_answers}, found)
    generator = torch.Generator().manual_seed(args.seed)
    found.shapes = {name: tuple(parameter.shape) for name, parameter in lab.model.named_parameters() if parameter.dim() == 2}
    gaussian = {name: matrix_ranks(torch.randn(shape, generator=generator)) for name, shape in found.shapes.items()}
    for name, values in {**gaussian, "median": medians(gaussian)}.items():
        found.add("B null", name, found.main, 0, values)
    return found


def study_planted(probe: Probe, progress: Progress) -> Found:
    args = probe.args
    lab, found = planted_lab(args.seed, args.length), Found(args.answers)
    for q in range(args.questions):
        progress("planted", q / args.questions)
        rollouts = sample_planted(lab, 1 + q, 1, args.answers)
        tokens = {TRUE: true_rewards(lab, rollouts), EXACT: rollouts.true_credit, NOISE: noise_like(rollouts)}
        study(lab, rollouts, q, tokens, {}, found)
    return found


def noise_like(rollouts: Rollouts) -> torch.Tensor:
    return torch.randn(rollouts.mask.shape, generator=rollouts.generator).to(rollouts.mask.device) * rollouts.mask


def told(e: Estimate) -> str:
    return f"{e.value:.2f}" + (f" ({e.low:.2f} to {e.high:.2f})" if np.isfinite(e.low) else "")


def word(e: Estimate, rise: str = "higher", fall: str = "lower") -> str:
    if not np.isfinite(e.low):
        return "too few"
    if max(abs(e.low), abs(e.high)) < 1e-3:  # rounding
        return "the same"
    return rise if e.low > 0 else fall if e.high < 0 else "none seen"


def sentence(start: str, rows: list[tuple]) -> str:
    """Name, value and, last, verdict of the rows: by verdict."""
    said = {row[-1]: [f"{name.partition(', R =')[0]} ({shown(value, '.3g')})" for name, value, *_, last in rows if last == row[-1]] for row in rows}
    return f"{start}: " + "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in said.items()) + "."


def verdicts(found: Found, planted: Found, sparse: list[Table]) -> Table:
    """A claim gives rows (measured, value, interval, what could be seen, the same for all ones, verdict), and a sentence."""
    claims = {"zero-sum gives rank 2": claim_rank_2(found), "the rank is about 2": claim_about_2(found), "whatever R is": claim_any_size(found),
              "sparser over training": claim_sparser(sparse), "tokens' rewards raise it": claim_tokens(found, planted),
              "other baselines raise it": claim_others(found)}
    rows = [(claim if i == 0 else "", *row) for claim, (part, _) in claims.items() for i, row in enumerate(part)]
    formats = {"claim": "", "measured": "", "value": ".3g", "95%": ".3g", "visible": ".2g", "all ones": ".3g", "verdict": ""}
    finding = " ".join(f"({letter}) {said}" for letter, (_, said) in zip("abcdef", claims.values()))
    return Table("verdicts", "The claims, and what is found", by_row(formats, rows), finding,
                 ["All ones: the same where every token has the advantage 1, which knows no reward and does not sum to zero. About 2: from 1.5 to "
                  "2.5. Visible: a difference that would be seen in 80 of 100 repetitions. Intervals are not corrected for their number."],
                 keys=dict(zip(claims, "abcdef")))


def claim_rank_2(found: Found) -> tuple[list[tuple], str]:
    R, rows = found.main, []
    for matrix in ("A", "B"):
        e, ones = (found.mean(matrix, arm, R, "numerical") for arm in (Z, ONES))
        rows.append((f"numerical rank of {matrix}, R = {R}", e.value, e.interval, None, ones.value, "rank 2" if e.value < 2.5 else "not rank 2"))
    for arm in (Z, "raw reward"):
        e, ones = (found.mean("outside", one, R, "differences") for one in (arm, ONES))
        rows.append((f"{arm}, outside the differences of C", e.value, e.interval, None, ones.value, "inside" if e.value < 1e-4 else "outside"))
    full, _, inside, raw = rows
    return rows, (f"Zero-sum advantages{' do not' * (full[1] >= 2.5)} give A rank 2 (numerical rank {full[1]:.1f} of {R}, all ones {full[4]:.1f}); "
                  f"they put the update into the span of the differences of mean gradients, one dimension fewer than without zero sum (share outside "
                  f"{inside[1]:.0e}, raw reward {raw[1]:.2f}).")


def claim_about_2(found: Found) -> tuple[list[tuple], str]:
    R, rows = found.main, []
    for matrix, rank in LOOKED_AT:
        e, ones = (found.mean(matrix, arm, R, rank) for arm in (Z, ONES))
        said = "too few" if not np.isfinite(e.low) else "may be 2" if e.low <= 2.5 and e.high >= 1.5 else "not 2"
        rows.append((f"{rank} of {matrix}, R = {R}", e.value, e.interval, None, ones.value, said))
    return rows, sentence(f"At R = {R}", rows) + f" With all ones, in this order: {', '.join(f'{row[4]:.3g}' for row in rows)}."


def claim_any_size(found: Found) -> tuple[list[tuple], str]:
    R, rows = found.main, []
    for matrix, rank in LOOKED_AT:
        e, ones = (found.change((matrix, arm, R), (matrix, arm, 2), rank) for arm in (Z, ONES))
        rows.append((f"{rank} of {matrix}, R = {R} minus R = 2", e.value, e.interval, e.visible, ones.value, word(e, "grows", "falls")))
    return rows, sentence(f"Change from R = 2 to {R}", rows)


def claim_sparser(sparse: list[Table]) -> tuple[list[tuple], str]:
    """From the tables of sparsity.py, whose last columns are change, interval and verdict."""
    rows = [(row[0], row[-3], row[-2], None, None, row[-1]) for table in sparse for row in table.rows if row[0] in sparsity.DECIDE]
    return rows, sentence("Change from the beginning to the end of the run", rows)


def claim_tokens(found: Found, planted: Found) -> tuple[list[tuple], str]:
    arms = [(found, CREDIT), (found, NOISE), (planted, TRUE), (planted, EXACT), (planted, NOISE)]
    rows = [against_z(where, matrix, arm, "planted " * (where is planted)) for matrix in ("A", "B") for where, arm in arms]
    return rows, sentence("Entropy rank minus the z-score's", rows)


def claim_others(found: Found) -> tuple[list[tuple], str]:
    gap = max(abs(value - found.values[matrix, Z, R][q][name]) for (matrix, arm, R), by_question in found.values.items()
              if matrix in ("A", "B") and arm in ("mean only", "rloo") for q, values in by_question.items() for name, value in values.items())
    rows = [("mean only and rloo, any R", gap, None, None, None, "the same" if gap < 1e-3 else "not the same")]
    rows += [against_z(found, matrix, CRITIC) for matrix in ("A", "B")]
    return rows, sentence("Entropy rank minus the z-score's", rows)


def against_z(found: Found, matrix: str, arm: str, task: str = "") -> tuple:
    e = found.against_z(matrix, arm)
    return f"{task}{arm} in {matrix}, R = {found.main}, minus z-score", e.value, e.interval, e.visible, found.against_z(matrix, ONES).value, word(e)


def by_size(found: Found, matrix: str, other: str) -> Table:
    """Entropy ranks of all arms at all sizes; the column `other` is what each is to be compared with."""
    R, rows = found.main, []
    for arm in found.arms():
        e = found.against_z(matrix, arm)
        against = (None, None, "-") if arm == Z else (e.value, e.interval, word(e))
        rows.append((arm, *(found.mean(matrix, arm, size).value for size in found.sizes), found.mean(f"{matrix} {other}", arm, R).value, *against))
    z, ones, beside = found.mean(matrix, Z, R), found.mean(matrix, ONES, R), found.mean(f"{matrix} {other}", Z, R)
    finding = (f"Entropy rank of {matrix} at R = {R}: {told(z)} for the z-score, {told(ones)} for all ones; "
               f"{'rows as long in random directions' if other == 'null' else 'with the inputs centred'}: {told(beside)}.")
    title = {"A": "Matrix A, answers x parameters: entropy rank by group size",
             "B": "Matrix B, the gradient of each weight matrix (median over them): entropy rank by group size"}[matrix]
    formats = {"": "", **{f"R={size}": ".2f" for size in found.sizes}, f"{other}, R={R}": ".2f", "minus z-score": "+.2f", "95%": "+.2f", "it is": ""}
    counted = ", ".join(f"{len(found.values.get(('A', Z, size), ()))} at R = {size}" for size in found.sizes)
    return Table(f"{matrix} by group size", title, by_row(formats, rows), finding,
                 [f"Means over the questions whose first R answers differ in reward: {counted}. Minus z-score: paired over questions, R = {R}."])


def by_definition(found: Found, matrix: str) -> Table:
    """All arms, and what they are to be compared with."""
    beside = {"A": [(f"{arm}, random directions", "A null", arm) for arm in (Z, ONES)],
              "B": [*((f"{arm}, inputs centred", "B centred", arm) for arm in (Z, ONES)), ("Gaussian matrices", "B null", "median")]}[matrix]
    places = [(arm, matrix, arm) for arm in found.arms()] + beside
    columns = {"": ("", [name for name, *_ in places])}
    columns |= {rank: (".2f", [found.mean(which, arm, found.main, rank).value for _, which, arm in places]) for rank in RANKS}
    smallest, largest = (end((values[0], rank) for rank, (_, values) in list(columns.items())[1:4]) for end in (min, max))
    finding = f"For the z-score the {smallest[1]} is {smallest[0]:.2f}, the {largest[1]} {largest[0]:.2f}: the definition decides what is found."
    return Table(f"{matrix} by definition", f"Matrix {matrix} at R = {found.main}, by every definition of rank", columns, finding, [DEFINITIONS])


def over_sizes(found: Found) -> Table:
    """Of the z-score: every definition at every size, and whether it depends on the size."""
    rows, R = [], found.main
    for matrix in ("A", "B"):
        for name in RANKS:
            change = found.change((matrix, Z, R), (matrix, Z, 2), name)
            rows.append((f"{matrix}: {name}", *(found.mean(matrix, Z, size, name).value for size in found.sizes),
                         found.mean(matrix, ONES, R, name).value, change.interval, word(change, "grows", "falls")))
    said = {row[-1]: [other[0] for other in rows if other[-1] == row[-1]] for row in rows}
    formats = {"z-score": "", **{f"R={size}": ".2f" for size in found.sizes}, f"all ones, R={R}": ".2f", f"{R} minus 2, 95%": "+.2f", "it": ""}
    notes = [f"The change is paired: {len(found.values.get(('A', Z, 2), ()))} questions' first two answers already differ in reward."]
    finding = f"From R = 2 to {R}, " + "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in said.items()) + "."
    return Table("z-score by definition", "Does the rank depend on the group size?", by_row(formats, rows), finding, notes)


def spans(found: Found) -> Table:
    """Matrix C: how much of each arm's update lies outside its rows, and outside their differences."""
    R = found.main
    both = {arm: [found.mean("outside", arm, R, name) for name in ("means", "differences")] for arm in found.arms()}
    rows = [(arm, means.value, differences.value, differences.interval) for arm, (means, differences) in both.items()]
    line = [value["off"] for (matrix, *_), values in found.values.items() if matrix == "line" for value in values.values()]
    finding = (f"At R = {R} there are {found.mean('C', '', R, 'rewards').value:.2f} distinct rewards on average, and the numerical rank of C is "
               f"{found.mean('C', '', R, 'numerical').value:.2f}. The z-score's update is in the span of the differences of its rows to "
               f"{rows[0][2]:.0e}.")
    if line:
        finding += (f" Where there are two rewards, in {len(line)} groups of all sizes, it is sqrt(k (R - k)) (mean of the winners - mean of the "
                    f"losers) to {max(line):.0e}.")
    formats = {"": "", "outside the means": ".1e", "outside their differences": ".1e", "95%": ".1e"}
    title = f"Matrix C, the mean gradient of each reward: what part of the update lies outside, R = {R}"
    notes = ["Share of the update's length, mean over questions. The formula includes the z-score's epsilon, std / (std + 1e-4)."]
    return Table("C", title, by_row(formats, rows), finding, notes)


def planted_table(found: Found, length: int) -> Table:
    R, rows = found.main, []
    for arm in found.arms():
        b, *others = [found.mean(*key) for key in (("B", arm, R), ("B centred", arm, R), ("B", arm, R, "stable rank"))]
        against = [None if arm == Z else found.against_z(matrix, arm).interval for matrix in ("A", "B")]
        rows.append((arm, found.mean("A", arm, R).value, found.mean("A null", arm, R).value, against[0], b.value, against[1],
                     *(e.value for e in others)))
    said = "; ".join(f"{arm}: A {word(found.against_z('A', arm))}, B {word(found.against_z('B', arm))}" for arm in (TRUE, EXACT))
    formats = {"": "", "A": ".2f", "A null": ".2f", "A minus z, 95%": "+.2f", "B": ".2f", "B minus z, 95%": "+.2f", "B centred": ".2f",
               "B stable": ".2f"}
    return Table("planted", f"Where the true credit is known: entropy ranks at R = {R} on the planted task, answers of {length} tokens",
                 by_row(formats, rows), f"Against the outcome's z-score, {said}.",
                 ["A fresh model. Three tokens of an answer matter; the true reward of each is a third or 0, its exact credit is V after it minus "
                  "V before it."])


def by_weight(found: Found) -> Table:
    """The weight matrices whose gradients have the lowest and the highest rank."""
    each = sorted((found.mean("B each", name, found.main).value, name) for name in found.shapes)
    ends = each if len(each) <= 6 else each[:3] + each[-3:]
    rows = [(name.removeprefix("model."), "{} x {}".format(*found.shapes[name]),
             *(found.mean("B each", name, found.main, rank).value for rank in ("entropy rank", "stable rank", "participation")),
             found.mean("B null", name, found.main).value) for _, name in ends]
    usual = found.mean("B null", "median", found.main).value
    finding = f"From {rows[0][2]:.1f} ({rows[0][0]}) to {rows[-1][2]:.1f} ({rows[-1][0]}); Gaussian matrices of these shapes: {usual:.0f} (median)."
    formats = {"": "", "shape": "", "entropy rank": ".2f", "stable rank": ".2f", "participation": ".2f", "Gaussian, entropy": ".1f"}
    return Table("B by weight matrix", f"Matrix B: the weight matrices with the lowest and the highest rank, z-score, R = {found.main}",
                 by_row(formats, rows), finding)


def draw(found: Found, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2, sharex=True)
    arms = [arm for arm in found.arms() if arm not in ("mean only", "rloo")]  # they lie on the z-score
    for axis, matrix, what in zip(axes, ("A", "B"), ("answers x parameters", "each weight matrix, median")):
        for i, arm in enumerate(arms):
            sizes = [R for R in found.sizes if (matrix, arm, R) in found.values]
            axis.plot(sizes, [found.mean(matrix, arm, R).value for R in sizes], color=COLOURS[i % len(COLOURS)], marker="o", ms=3, lw=1.3,
                      label=arm + ", mean only, rloo" * (arm == Z))
        axis.axhline(2, color="#000000", lw=0.8, ls=":")
        ends = [f"{found.mean(matrix, Z, R).value:.1f} at R = {R}" for R in found.sizes if (matrix, Z, R) in found.values]
        axis.set(xscale="log", yscale="log", xlabel="group size R", ylabel="entropy rank", xticks=found.sizes, xticklabels=found.sizes,
                 yticks=(2, 5, 10, 20), yticklabels=(2, 5, 10, 20),
                 title=f"{matrix}, {what}: {ends[0]}" + f", {ends[-1]}" * (len(ends) > 1))
        axis.minorticks_off()
    axes[0].plot(found.sizes, [found.mean("A null", Z, R).value for R in found.sizes], color=GREY, ls="--", label="z-score, random directions")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return save(figure, folder, "rank", "Entropy rank by group size, arm by arm; dotted: the claimed 2")


def measure(probe: Probe) -> Findings:
    args = probe.args
    sparsity.check_run(args.run)
    progress = Progress(critic=3 * args.critic_batches, questions=args.questions * (1.3 * args.credit_answers + 5), planted=1.3 * args.questions,
                        training=2.3 * args.steps * (args.run is None), checkpoints=6 * args.batches)
    found, planted = study_countdown(probe, progress), study_planted(probe, progress)
    if not all(one.values.get(("A", Z, one.main)) for one in (found, planted)):
        raise UserError(f"no question's first {found.main} answers differ in reward: more --questions or --answers are needed")
    sparse, picture = sparsity.measure_run(probe, progress)
    explained = np.mean([value for value in found.explained if value is not None])
    intro = [f"{args.questions} questions of up to {args.answers} answers, intervals over questions. The critic (lambda 0.95) learned from "
             f"{args.critic_batches} batches and explains {explained:.1%} of the variance of its targets."]
    tables = [verdicts(found, planted, sparse), by_size(found, "A", "null"), by_size(found, "B", "centred"), over_sizes(found),
              by_definition(found, "A"), by_definition(found, "B"), spans(found), planted_table(planted, args.length), by_weight(found), *sparse]
    return Findings("Is the gradient of rank 2, and does it become sparse?", intro, tables, ("verdicts",), [draw(found, probe.folder), picture],
                    {"A by group size": ("rank",), "sparsity over steps": ("sparsity",)})
