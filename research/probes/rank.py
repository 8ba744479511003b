"""Is the gradient of rank 2, and does it become sparse?

Question. It has been claimed that advantages which sum to zero give GRPO's gradient an intrinsic
rank of 2, whatever the size R of the group; that it becomes sparse over training; and that rewards
for each token, or other baselines, would raise its rank. The claims do not say which matrix is
meant, nor which rank.

Measurement. Three matrices, each with six definitions of rank (spectra.py):

    A   R x parameters: a row is an answer's part, a_i grad log p(y_i), or with credit for each
        token sum_t a_it grad log p(y_it)
    B   the gradient that a group's answers make together, in each weight matrix
    C   the mean gradient of the answers of each reward: m rows, where m rewards occur

Each way to give advantages is compared with ways that know no reward or do not sum to zero, and
with what chance gives: for A rows of the same lengths in random directions (orthogonal, in so many
dimensions), for B a Gaussian matrix of the same shape. As the inputs of a layer have much in
common, B is also measured without their mean. On a planted task the true reward and credit of each
token are known and take the place of estimates. Sparsity is measured over a run (sparsity.py).

Reading it. If the claims hold, the z-score has rank 2 at every R, other advantages have another
rank, and credit for each token has a higher one. If they do not, A has about as many dimensions as
the group has answers, whatever the advantages are.

What follows without measuring: A has R rows, so its rank at R = 2 says nothing. Advantages that
depend on the reward alone make the update a combination of the rows of C; if they sum to zero, of
the differences of these rows, one fewer. With two rewards that is one direction, whatever R is.
None of this is about the rank of A or B.
"""
from dataclasses import replace

import numpy as np
import torch

from engine.errors import UserError
from harness.flags import Flag
from harness.progress import Progress
from engine.rollouts import Rollouts
from research.probes import sparsity
from research.probes.common import Findings, Probe, run_probe, sample_batch
from research.probes.credit import true_credit
from research.probes.planted import planted_lab, sample_planted, true_rewards
from research.probes.rank_claims import CREDIT, CRITIC, EXACT, NOISE, TRUE, claims_table
from research.probes.rank_measurements import Measurements, Z, measure_question
from research.probes.rank_tables import (
    by_definition, by_size, by_weight, draw, over_sizes, planted_table, spans_table)
from research.probes.spectra import matrix_ranks, medians

FLAGS = {
    "questions": Flag(16, "problems, each with matrices of its own", least=2, most=10_000,
                      quick=2),
    "answers": Flag(32, "answers to each; groups are the first 2, 4, 8, 16, 32 of them", least=2,
                    most=1000, quick=4),
    "credit_answers": Flag(8, "so many answers to each problem get Monte Carlo credit", least=1,
                           most=1000, quick=1),
    "credit_k": Flag(8, "continuations behind a token's credit, about", least=1, most=10_000,
                     quick=2),
    "critic_batches": Flag(4, "batches of as many problems and answers that the critic learns "
                              "from", least=1, most=10_000, quick=1),
    "length": Flag(24, "tokens of an answer of the planted task", least=3, most=100_000, quick=8),
    **sparsity.FLAGS}


def measure(probe: Probe) -> Findings:
    args = probe.args
    sparsity.check_run(args.run)
    progress = Progress(critic=3 * args.critic_batches,
                        problems=args.questions * (1.3 * args.credit_answers + 5),
                        planted=1.3 * args.questions,
                        training=2.3 * args.steps * (args.run is None),
                        checkpoints=6 * args.batches)
    measured = measure_countdown(probe, progress)
    planted = measure_planted(probe, progress)
    refuse_without_spread(measured)
    refuse_without_spread(planted)
    sparse, sparse_picture = sparsity.measure_run(probe, progress)
    tables = [claims_table(measured, planted, sparse), by_size(measured, "A", "null"),
              by_size(measured, "B", "centred"), over_sizes(measured),
              by_definition(measured, "A"), by_definition(measured, "B"), spans_table(measured),
              planted_table(planted, args.length), by_weight(measured), *sparse]
    explained = np.mean([value for value in measured.explained if value is not None])
    intro = [f"{args.model}: {args.questions} problems x {args.answers} answers. Intervals are "
             "over problems.",
             f"The critic (lambda 0.95) explains {explained:.1%} of the variance of its targets; "
             f"batches that it learned from: {args.critic_batches}."]
    return Findings("Is the gradient of rank 2, and does it become sparse?", intro, tables,
                    short=("verdicts",), checks=("C",), takes="some minutes",
                    pictures=[draw(measured, probe.folder), sparse_picture],
                    places={"A by group size": ("rank",), "sparsity over steps": ("sparsity",)})


def measure_countdown(probe: Probe, progress: Progress) -> Measurements:
    args = probe.args
    lab = probe.lab(advantage="gae", gae_lambda=0.95)
    measured = Measurements(args.answers)
    for i in range(args.critic_batches):
        progress("critic", i / args.critic_batches)
        lab.advantage(sample_batch(lab, 1001 + i, args.questions, args.answers), lab)
    for q in range(args.questions):
        progress("problems", q / args.questions)
        rollouts = sample_batch(lab, 1 + q, 1, args.answers)
        token_arms = {CREDIT: monte_carlo_credit(lab, rollouts, args),
                      CRITIC: lab.advantage(rollouts, lab),
                      NOISE: noise_like(rollouts)}
        measured.explained.append(lab.advantage.metrics["explained_variance"])
        measure_question(lab, rollouts, q, token_arms, {CREDIT: args.credit_answers}, measured)
    add_gaussian_matrices(measured, lab.model, args.seed)
    return measured


def monte_carlo_credit(lab, rollouts: Rollouts, args) -> torch.Tensor:
    """(G, T): estimated for the first answers only; it costs many continuations."""
    few = torch.arange(args.answers, device=rollouts.mask.device) < args.credit_answers
    some_answers = replace(rollouts, mask=rollouts.mask & few[:, None])
    return true_credit(lab, some_answers, args.credit_k).value


def noise_like(rollouts: Rollouts) -> torch.Tensor:
    noise = torch.randn(rollouts.mask.shape, generator=rollouts.generator)
    return noise.to(rollouts.mask.device) * rollouts.mask


def add_gaussian_matrices(measured: Measurements, model, seed: int) -> None:
    """The null of matrix B: a Gaussian matrix of each weight matrix's shape."""
    generator = torch.Generator().manual_seed(seed)
    measured.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()
                       if parameter.dim() == 2}
    gaussian = {name: matrix_ranks(torch.randn(shape, generator=generator))
                for name, shape in measured.shapes.items()}
    for name, values in {**gaussian, "median": medians(gaussian)}.items():
        measured.add("B null", name, measured.main, 0, values)


def measure_planted(probe: Probe, progress: Progress) -> Measurements:
    args = probe.args
    lab, measured = planted_lab(args.seed, args.length), Measurements(args.answers)
    for q in range(args.questions):
        progress("planted", q / args.questions)
        rollouts = sample_planted(lab, 1 + q, 1, args.answers)
        token_arms = {TRUE: true_rewards(lab, rollouts), EXACT: rollouts.true_credit,
                      NOISE: noise_like(rollouts)}
        measure_question(lab, rollouts, q, token_arms, {}, measured)
    return measured


def refuse_without_spread(measured: Measurements) -> None:
    if not measured.values.get(("A", Z, measured.main)):
        raise UserError(f"no problem's first {measured.main} answers differ in reward: more "
                        "--questions or --answers are needed")


def main(argv: list[str]) -> None:
    run_probe("rank", __doc__, FLAGS, measure, argv)
