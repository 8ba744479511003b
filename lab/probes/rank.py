"""The ranks of a group's gradient, with any advantages.

The paper says that advantages which sum to zero give the gradient an effective rank of about 2, but
neither of which matrix nor which rank. So two matrices are measured:

    A   a matrix with a row for each of the R answers, and a column for each parameter. Row i is
        answer i's part of the gradient, sum_t A_it grad log p(y_it)
    B   the gradient of the whole group with respect to one weight matrix, that of mlp.up_proj in
        the middle layer

and of each, five ranks from its singular values s_1 >= s_2 >= ...:

    entropy     exp(-sum q log q), where q = s / sum s (Roy and Vetterli 2007)
    stable      sum s^2 / s_1^2
    90%, 99%    how many of them make up 90% or 99% of the sum of s^2
    threshold   how many of them are above a hundredth of s_1

Part of the question needs no measurement. To multiply a row by a number other than 0 does not
change the rank, so advantages that sum to zero do not lower the rank of A. They only make the sum
of the rows a combination of R - 1 differences. If there are only two distinct rewards, this sum is
a multiple of one vector, the mean of the right answers minus that of the wrong ones, and a vector
has no rank.

The ranks of A are computed from its Gram matrix (R x R, in float32, summed in float64). Gradients
are kept for one part of the parameters at a time, so that they take at most 4 GiB, and each part
needs a pass over all answers of its own.
"""
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import torch

from grpo import group_z_score
from lab.analysis.statistics import Estimate, mean_over
from lab.credit.critic import gae
from lab.engine.forward import response_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import NUMBER
from lab.harness.screen import show_status
from lab.probes.common import sample_batch

GROUP_SIZES = (2, 4, 8)
ANSWERS = max(GROUP_SIZES)
COLUMNS_AT_ONCE = 2 ** 15  # of more of them float32 loses the last digits
MEMORY = 2 ** 32  # bytes for gradients
Z, SHUFFLED, RANDOM_SUM, NO_BASELINE, ONES = OF_ANSWERS = (
    "z-score", "shuffled", "random sum", "no baseline", "all equal")
PLANTED, RANDOM, CRITIC = "planted rewards by token", "random by token", "a critic (gae)"
Kinds = dict[str, torch.Tensor]  # by the way in which tokens are weighted
# (matrix, advantage, R): the ranks for each problem
FoundRanks = dict[tuple[str, str, int], list[dict[str, float]]]


def found_ranks(policy: Policy, problems: int, critic: gae | None = None) -> FoundRanks:
    """The ranks of some problems with 8 answers each. Groups are the first 2, 4 and 8 of them, and
    those whose rewards are all equal are left out. With a critic, credit by token is tried, too."""
    found: FoundRanks = defaultdict(list)
    for number in range(problems):
        show_status(f"ranks: problem {number + 1} of {problems}")
        rollouts = sample_batch(policy, 1, ANSWERS, step=1 + number)
        if rollouts.advantage.any():
            kinds = {ONES: rollouts.mask.float()}
            if critic:
                kinds |= {**token_weights(rollouts), CRITIC: critic(rollouts, policy)}
            add_ranks(rollouts, *gradients_of_answers(policy, rollouts, kinds), found)
    return found


def token_weights(rollouts: Rollouts) -> Kinds:
    """(B, T) each: numbers of their own that tokens are weighted by."""
    noise = torch.randn(rollouts.mask.shape, generator=rollouts.generator)
    return {PLANTED: planted(rollouts), RANDOM: noise.to(rollouts.mask.device) * rollouts.mask}


def planted(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): the reward that follows, 1 for each number token, minus the mean over the answers
    that have a token at that position."""
    reward = ((rollouts.kind == NUMBER) & rollouts.mask).float()
    to_come = reward.flip(1).cumsum(1).flip(1)
    mean = (to_come * rollouts.mask).sum(0) / rollouts.mask.sum(0).clamp(min=1)
    return (to_come - mean) * rollouts.mask


def part_count(policy: Policy, kinds: Kinds, answers: int) -> int:
    numbers = sum(p.numel() for p in policy.model.parameters())
    needed = 4 * numbers * len(kinds) * answers  # bytes
    return int(np.ceil(needed / MEMORY))


def parameter_parts(policy: Policy, count: int) -> Iterator[list[torch.nn.Parameter]]:
    """The parameters in `count` parts of like size, or a little larger."""
    most = sum(p.numel() for p in policy.model.parameters()) / count
    part, size = [], 0
    for parameter in policy.model.parameters():
        part.append(parameter)
        size += parameter.numel()
        if size >= most:
            yield part
            part, size = [], 0
    if part:
        yield part


def gradients_of_answers(policy: Policy, rollouts: Rollouts, kinds: Kinds
                         ) -> tuple[Kinds, Kinds]:
    """The Gram matrices (B, B) of the answers' gradients, one for each kind, and the gradients in
    the one weight matrix (B, rows, columns)."""
    layers = policy.model.model.layers
    matrix = layers[len(layers) // 2].mlp.up_proj.weight
    B = len(rollouts.mask)
    grams = {kind: torch.zeros(B, B, dtype=torch.float64) for kind in kinds}
    kept = {kind: torch.zeros(B, *matrix.shape) for kind in kinds}
    for part in parameter_parts(policy, part_count(policy, kinds, B)):
        numbers = sum(p.numel() for p in part)
        rows = {kind: torch.empty(B, numbers) for kind in kinds}
        for b in range(B):
            row = torch.tensor([b], device=rollouts.mask.device)
            log_prob = response_log_probs(policy.model, rollouts, row)[0]  # (T,)
            for kind, coefficient in kinds.items():
                weighted = (coefficient[b] * log_prob).sum()
                of_part = torch.autograd.grad(weighted, part, retain_graph=True,
                                              materialize_grads=True)
                rows[kind][b] = torch.cat([g.flatten() for g in of_part])
                for parameter, g in zip(part, of_part):
                    if parameter is matrix:
                        kept[kind][b] = g
        for kind in kinds:
            grams[kind] += gram(rows[kind])
    return grams, kept


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(n, P) float32 -> (n, n), products in float32, their sums over columns in float64."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in rows.split(COLUMNS_AT_ONCE, dim=1):
        total += (columns @ columns.T).double()
    return total


def add_ranks(rollouts: Rollouts, grams: Kinds, rows: Kinds, found: FoundRanks) -> None:
    for R in GROUP_SIZES:
        if R > len(rollouts.mask):
            break
        factors = advantages_of(rollouts, R)
        if not factors[Z].any():
            continue
        arms = {arm: (ONES, factor) for arm, factor in factors.items()}
        for kind in grams:
            if kind != ONES:
                arms[kind] = kind, factors[ONES]
        for arm, (kind, factor) in arms.items():
            A_gram = grams[kind][:R, :R] * torch.outer(factor, factor)
            found["A", arm, R].append(ranks_of(A_gram))
            B = torch.einsum("r,rij->ij", factor, rows[kind][:R].double())
            B_gram = B @ B.T if B.shape[0] <= B.shape[1] else B.T @ B  # the smaller one
            found["B", arm, R].append(ranks_of(B_gram))


def advantages_of(rollouts: Rollouts, R: int) -> Kinds:
    """(R,) each: the advantages that give all tokens of an answer the same number."""
    z = group_z_score(rollouts.reward[:R].cpu(), torch.zeros(R, dtype=torch.long)).double()
    drawn = torch.randn(R, generator=rollouts.generator, dtype=torch.float64)
    order = torch.randperm(R, generator=rollouts.generator)
    return {
        Z: z,
        SHUFFLED: z[order],
        RANDOM_SUM: drawn - drawn.mean(),
        NO_BASELINE: rollouts.reward[:R].cpu().double(),
        ONES: torch.ones(R, dtype=torch.float64)}


def ranks_of(gram: torch.Tensor) -> dict[str, float]:
    """The ranks of any matrix with this Gram matrix; undefined for a matrix of zeros."""
    eigenvalues = torch.linalg.eigvalsh(gram.double())
    s = eigenvalues.clamp(min=0).sqrt().flip(0)
    return {name: rank(s) if s[0] > 0 else np.nan for name, rank in RANKS.items()}


def energy_rank(s: torch.Tensor, share: float) -> float:
    """The number of largest singular values that reach the share; rounding is none of them."""
    reached = s.square().cumsum(0) / s.square().sum()
    return 1.0 + float((reached < share - 1e-9).sum())


RANKS: dict[str, Callable[[torch.Tensor], float]] = {  # of singular values, the largest first
    "entropy": lambda s: float(torch.special.entr(s / s.sum()).sum().exp()),
    "stable": lambda s: float(s.square().sum() / s[0].square()),
    "90%": lambda s: energy_rank(s, 0.9),
    "99%": lambda s: energy_rank(s, 0.99),
    "threshold": lambda s: float((s > 0.01 * s[0]).sum())}


def mean_rank(found: FoundRanks, matrix: str, arm: str, R: int, rank: str) -> Estimate:
    of_problems = found.get((matrix, arm, R), [])
    return mean_over([ranks[rank] for ranks in of_problems])
