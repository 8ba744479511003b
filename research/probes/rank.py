"""Is the gradient of rank 2?

Question. It has been claimed that advantages which sum to zero give GRPO's gradient an intrinsic
rank of 2, whatever the size R of the group, and that rewards for each token, a critic or other
baselines would raise it. The claims do not say which matrix is meant, nor which rank.

Measurement. Two matrices:

    A   R x parameters: a row is an answer's part, a_i grad log p(y_i), or with credit for each
        token sum_t a_it grad log p(y_it)
    B   the gradient that a group's answers make together, in each weight matrix (median over them)

With the singular values s, largest first, the effective rank is exp(-sum p log p), p = s / sum s
(Roy and Vetterli 2007: of s, not of s^2). Beside it stand the stable rank sum s^2 / s_1^2, the
lowest of the usual definitions, and how many of the s^2 make up 90% of their sum. The null is the
same with all advantages 1, which knows no reward and does not sum to zero. On a planted task the
true reward and the exact credit of each token are known and take the place of estimates.

Reading it. If the claims hold, the z-score has rank 2 at every R, all ones have another rank, and
credit for each token a higher one. If they do not, A has about as many dimensions as the group has
answers, whatever the advantages are.

What follows without measuring: a row times a number other than 0 changes no rank, so zero sum
cannot lower that of A; it only makes the update a combination of R - 1 differences. A has R rows,
so its rank at R = 2 says nothing. Advantages that depend on the reward alone make the update a
combination of the mean gradients of each reward; if they sum to zero, of the differences of these,
which with two rewards is a single direction. None of this is about the rank of A or B.
"""
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from analysis.statistics import Estimate, mean_over, verdicts
from analysis.tables import Table, by_row, shown
from harness.flags import Flag
from engine.policy import Policy
from harness.load import make_advantage
from engine.rollouts import Rollouts
from grpo import grpo, rloo
from research.probes.common import OF_A_MODEL, Findings, Probe, answer_gradients, sample_batch
from research.probes.planted import planted_policy, sample_planted, true_rewards
from research.probes.progress import Progress

FLAGS = {
    **OF_A_MODEL,
    "questions": Flag(16, "problems, each with matrices of its own", least=2, most=10_000,
                      quick=2),
    "answers": Flag(32, "answers to each; groups are the first 2, 4, 8, 16, 32 of them", least=2,
                    most=1000, quick=4),
    "critic_batches": Flag(4, "batches of as many problems and answers that the critic learns "
                              "from", least=1, most=10_000, quick=1),
    "length": Flag(24, "tokens of an answer of the planted task", least=3, most=100_000, quick=8)}
SIZES = (2, 4, 8, 16, 32)
AT_ONCE = 2 ** 20  # columns of a matrix that are taken to float64 together
Z, ONES, NOISE = "z-score", "all ones", "random per token"
CRITIC, TRUE, EXACT = "critic", "true reward per token", "exact credit"


def measure(probe: Probe) -> Findings:
    args, planted = probe.args, planted_policy(probe.args.seed, probe.args.length)
    policy, explained = probe.policy(advantage="gae", gae_lambda=0.95), []
    critic = make_advantage(policy.settings, policy)
    on_countdown, on_planted = Measurements(args.answers), Measurements(args.answers)
    progress = Progress(critic=args.critic_batches, problems=2 * args.questions)
    for i in range(args.critic_batches):
        progress("critic", i / args.critic_batches)
        critic(sample_batch(policy, 1001 + i, args.questions, args.answers), policy)
    for q in range(args.questions):
        progress("problems", q / args.questions)
        rollouts = sample_batch(policy, 1 + q, 1, args.answers)
        by_token = {CRITIC: critic(rollouts, policy), NOISE: noise_like(rollouts)}
        explained.append(critic.metrics["explained_variance"])
        measure_question(policy, rollouts, q, by_token, on_countdown)
        rollouts = sample_planted(planted, 1 + q, 1, args.answers)
        by_token = {TRUE: true_rewards(planted, rollouts), EXACT: rollouts.true_credit,
                    NOISE: noise_like(rollouts)}
        measure_question(planted, rollouts, q, by_token, on_planted)
    intro = [f"{args.model}: {args.questions} problems x {args.answers} answers. Intervals are "
             "over problems.",
             f"The critic (lambda 0.95) explains {mean_over(explained).value:.1%} of the variance "
             f"of its targets; batches that it learned from: {args.critic_batches}."]
    return Findings("Is the gradient of rank 2?", intro,
                    [sizes_table(on_countdown), arms_table(on_countdown, on_planted)],
                    None, "some minutes")


def entropy_rank(s: torch.Tensor) -> float:
    return torch.special.entr(s / s.sum()).sum().exp().item()


def stable_rank(s: torch.Tensor) -> float:
    return (s.square().sum() / s[0].square()).item()


def energy_rank(s: torch.Tensor) -> float:
    """How many singular values have 90% of the energy, the sum of their squares."""
    share = s.square().cumsum(0) / s.square().sum()
    return 1.0 + (share < 0.9 - 1e-9).sum().item()


RANKS = {"entropy rank": entropy_rank, "stable rank": stable_rank, "90% of the energy": energy_rank}


def ranks(gram: torch.Tensor) -> dict[str, float]:
    """Of any matrix with this Gram matrix; undefined for a matrix of zeros."""
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return {name: rank(s) if s[0] > 0 else np.nan for name, rank in RANKS.items()}


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(n, P) float32 -> (n, n) float64, some columns at a time: P may be very large."""
    return sum(part.double() @ part.double().T for part in rows.split(AT_ONCE, dim=1))


@dataclass
class Measurements:
    """Ranks by (matrix, arm, R) and problem."""
    answers: int
    values: dict = field(default_factory=lambda: defaultdict(dict))

    @property
    def sizes(self) -> list[int]:
        return [R for R in SIZES if R <= self.answers]

    @property
    def main(self) -> int:
        """The group size at which arms are compared."""
        return max(R for R in self.sizes if R <= 8)

    def mean(self, matrix: str, arm: str, R: int, rank: str = "entropy rank") -> Estimate:
        return mean_over([ranks[rank] for ranks in self.values[matrix, arm, R].values()])

    def change(self, one: tuple, other: tuple, rank: str = "entropy rank") -> Estimate:
        """One (matrix, arm, R) minus another, over the problems that both have."""
        first, second = self.values[one], self.values[other]
        return mean_over([first[q][rank] - second[q][rank] for q in first if q in second])


def noise_like(rollouts: Rollouts) -> torch.Tensor:
    noise = torch.randn(rollouts.mask.shape, generator=rollouts.generator)
    return noise.to(rollouts.mask.device) * rollouts.mask


def measure_question(policy: Policy, rollouts: Rollouts, question: int,
                     by_token: dict[str, torch.Tensor], measured: Measurements) -> None:
    """Add what one problem's answers give at every group size.

    `by_token` are the arms with an advantage (G, T) for each token. A group of equal rewards says
    nothing about any arm. All gradients take (1 + len(by_token)) * G * parameters * 4 bytes.
    """
    kinds = {ONES: rollouts.mask.float(), **by_token}
    parameters = list(policy.model.parameters())
    rows = torch.empty(len(kinds), len(rollouts.mask), sum(p.numel() for p in parameters),
                       device=rollouts.mask.device)
    for b, of_answer in enumerate(answer_gradients(policy, rollouts, list(kinds.values()))):
        rows[:, b] = torch.stack(of_answer)
    of_kind = {kind: (kind_rows, gram(kind_rows)) for kind, kind_rows in zip(kinds, rows)}
    for R in measured.sizes:
        factors = answer_arms(rollouts, R)
        if not factors[Z].any():
            continue
        arms = {arm: (ONES, factor) for arm, factor in factors.items()}
        arms |= {arm: (arm, factors[ONES]) for arm in by_token}
        for arm, (kind, factor) in arms.items():
            kind_rows, grams = of_kind[kind]
            of_rows = grams[:R, :R] * torch.outer(factor, factor)
            measured.values["A", arm, R][question] = ranks(of_rows)
            measured.values["B", arm, R][question] = median_ranks(policy, factor @ kind_rows[:R])


def answer_arms(rollouts: Rollouts, R: int) -> dict[str, torch.Tensor]:
    """(R,) for each arm that gives all tokens of an answer the same: the advantages that training
    would give to a group of the first R answers."""
    beyond = torch.arange(len(rollouts.mask), device=rollouts.mask.device) >= R
    apart = replace(rollouts, group=beyond.long())
    advantages = {Z: grpo(apart), "rloo": rloo(apart)}
    factors = {arm: advantage[:R, 0] for arm, advantage in advantages.items()}
    return {**factors, ONES: torch.ones_like(factors[Z])}


def median_ranks(policy: Policy, update: torch.Tensor) -> dict[str, float]:
    """Matrix B: of a flat update (P,), the median over the weight matrices."""
    parameters = list(policy.model.parameters())
    parts = update.split([p.numel() for p in parameters])
    matrices = [part.view_as(p) for part, p in zip(parts, parameters) if p.dim() == 2]
    of_matrices = [ranks(gram(m if m.shape[0] <= m.shape[1] else m.T)) for m in matrices]
    return {name: float(np.median([each[name] for each in of_matrices])) for name in RANKS}


def sizes_table(measured: Measurements) -> Table:
    """Of the z-score: all definitions at every size."""
    R, rows, lines = measured.main, [], []
    columns = [f"R={size}" for size in measured.sizes]
    columns.insert(measured.sizes.index(R) + 1, f"95%, R={R}")
    for matrix, rank in itertools.product("AB", RANKS):
        e, ones = (measured.mean(matrix, arm, R, rank) for arm in (Z, ONES))
        change = measured.change((matrix, Z, R), (matrix, Z, 2), rank)
        is_2, it = about_2(e), change_verdict(change, ("grows", "falls"))
        cells = [measured.mean(matrix, Z, size, rank).value for size in measured.sizes]
        cells.insert(measured.sizes.index(R) + 1, e.interval)
        rows.append((f"{matrix}: {rank}", *cells, is_2, ones.value,
                     change.value, change.interval, it))
        lines.append(f"The {rank} of {matrix} at R = {R} is {shown(e.value, '.3g')}, with all ones "
                     f"{shown(ones.value, '.3g')}: {is_2}; from R = 2 on: {it}.")
    ones, change = f"all ones, R={R}", f"{R} minus 2"
    formats = {"z-score": "", **dict.fromkeys(columns, ".2f"), "is it 2": "", ones: ".2f",
               change: "+.2f", f"{change}, 95%": "+.2f", "it": ""}
    headings = {"z-score": "rank of the z-score", f"95%, R={R}": "95% interval",
                change: f"R={R} minus R=2", f"{change}, 95%": "95% interval", "it": "verdict"}
    notes = ["About 2: from 1.5 to 2.5. Means over the problems whose first R answers differ in "
             "reward; the change is over those whose first two do."]
    return Table("z-score by definition", "Is the rank 2, and does it depend on the group size?",
                 by_row(formats, rows), "\n".join(lines), notes, headings)


def about_2(e: Estimate) -> str:
    if not np.isfinite(e.low):
        return "too few"
    return "may be 2" if e.low <= 2.5 and e.high >= 1.5 else "not 2"


def arms_table(measured: Measurements, planted: Measurements) -> Table:
    """Entropy ranks minus the z-score's."""
    R, rows, by_verdict = measured.main, [], defaultdict(list)
    tasks = {"": (measured, ("rloo", ONES, CRITIC, NOISE)),
             "planted: ": (planted, (ONES, TRUE, EXACT, NOISE))}
    for task, (of_task, arms) in tasks.items():
        for arm in arms:
            row = [f"{task}{arm}"]
            for matrix in "AB":
                e = of_task.change((matrix, arm, R), (matrix, Z, R))
                row += [e.value, e.interval, change_verdict(e)]
                by_verdict[row[-1]].append(f"{task}{arm} in {matrix} ({shown(e.value, '+.2f')})")
            rows.append(row)
    finding = "\n".join(f"Entropy rank beside the z-score's, {verdict}: {', '.join(names)}."
                        for verdict, names in by_verdict.items())
    formats = {"": ""}
    for matrix in "AB":
        formats |= {matrix: "+.2f", f"95%, {matrix}": "+.2f", f"{matrix} is": ""}
    headings = {"": "arm", "95%, A": "95% interval", "95%, B": "95% interval"}
    notes = [f"R = {R}, paired over problems; intervals are not corrected for their number. "
             "Planted: a fresh model, three tokens of an answer matter."]
    return Table("against the z-score", "Do credit for each token or other baselines raise it?",
                 by_row(formats, rows), finding, notes, headings)


def change_verdict(e: Estimate, words: tuple[str, str] = ("higher", "lower")) -> str:
    if max(abs(e.low), abs(e.high)) < 1e-3:  # rounding
        return "the same"
    return verdicts([e], words, null=0.0)[0]
