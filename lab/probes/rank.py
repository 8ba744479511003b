"""Has GRPO's gradient rank 2?

    python -m lab rank
    python -m lab rank --model path/to/Qwen2.5-0.5B --questions 1 --answers 8

It has been claimed that advantages which sum to zero give the gradient an intrinsic rank of about
2, whatever the size R of the group, and that token rewards would raise this rank, as a critic or
another baseline might. The claim defines neither the matrix nor the rank. So two matrices are
measured:

    A   a matrix with a row for each of the R answers, and a column for each parameter. Row i is
        answer i's part of the gradient, sum_t A_it grad log p(y_it)
    B   the gradient of the whole group with respect to one weight matrix, that of mlp.up_proj in
        the middle layer

Five ranks are computed from the singular values s_1 >= s_2 >= ... of each:

    threshold   how many of them are above a hundredth of s_1
    90%, 99%    how many of them make up 90% or 99% of the sum of s^2
    entropy     exp(-sum q log q), where q = s / sum s (Roy and Vetterli 2007)
    stable      sum s^2 / s_1^2

The advantages are those of a group of the first R answers: the z-score, and as controls

    shuffled     the z-scores of other answers
    random sum   random normal numbers that sum to zero and do not depend on the rewards
    all equal    1 for every answer, which is supervised fine-tuning on all of them
    no baseline  the reward itself
    by token     a number of its own for each token: a random normal number; or planted rewards.
                 There each number token has the reward 1, and a token gets the sum of the rewards
                 that follow it, minus the group's mean at its position
    a critic     --advantage gae with lambda 0.95, whose critic was first trained on
                 --critic_batches batches of 8 other problems

Part of the question needs no measurement. To multiply a row by a number other than 0 does not
change the rank, so advantages that sum to zero do not lower the rank of A. They only make the sum
of the rows a combination of R - 1 differences. If there are only two distinct rewards, this sum is
a multiple of one vector: the mean of the right answers minus the mean of the wrong ones. And a
vector has no rank. The advantages rloo and dr_grpo are the z-score times a number, so they have the
same ranks.

The ranks of A are computed from its Gram matrix (R x R, in float32, summed in float64). Gradients
are kept for one part of the parameters at a time, so that they take at most 4 GiB. Each part needs
a pass over all answers of its own. Groups whose rewards are all equal are left out.
"""
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.statistics import Estimate, mean_over
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.credit.critic import gae
from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import NUMBER
from grpo import group_z_score
from lab.harness.flags import Flag
from lab.harness.screen import show_status
from lab.probes.common import MODEL_FLAGS, Findings, policy_from_flags, sample_batch

GROUP_SIZES = (2, 4, 8, 16)
COLUMNS_AT_ONCE = 2 ** 15  # of more of them float32 loses the last digits
FLAGS = {
    **MODEL_FLAGS,
    "questions": Flag(12, "number of problems, each with matrices of its own", least=1,
                      most=10_000),
    "answers": Flag(16, "answers to each problem. Groups are the first 2, 4, 8 and 16 of them",
                    least=2, most=1000),
    "critic_batches": Flag(16, "batches that the critic is first trained on; 0 leaves this arm out",
                           least=0, most=10_000),
    "critic": Flag("head",
                   "the critic. head: linear in the hidden state. trunk: a network of its own",
                   choices=("head", "trunk"),
                   requires=(lambda s: s.critic_batches > 0, "--critic_batches above 0"))}
MEMORY = 2 ** 32  # bytes for gradients
RANDOM, NO_BASELINE = "random by token", "no baseline"
MAIN = 8  # the group size at which advantages are compared
Z, ONES, PLANTED, CRITIC = "z-score", "all equal", "planted rewards by token", "a critic (gae)"
Kinds = dict[str, torch.Tensor]  # by the way in which tokens are weighted
# (matrix, advantage, R): the ranks for each problem
FoundRanks = dict[tuple[str, str, int], list[dict[str, float]]]


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy, found = policy_from_flags(args), defaultdict(list)
    critic = critic_of(policy, args) if args.critic_batches else None
    learned = critic and critic.metrics["explained_variance"]
    for number in range(args.questions):
        show_status(f"problem {number + 1} of {args.questions}")
        rollouts = sample_batch(policy, 1, args.answers, step=1 + number)
        if rollouts.advantage.any():
            kinds = token_weights(policy, rollouts, critic)
            grams, rows = gradients_of_answers(policy, rollouts, kinds)
            add_ranks(rollouts, grams, rows, found)
    if not found:
        raise UserError("all answers to the same problem have equal rewards. More --questions or "
                        "--answers may help")
    parts = part_count(policy, kinds, args.answers)
    intro = [f"{policy.folder} gave {args.answers} answers to each of {args.questions} problems. "
             f"The gradients took {parts} passes over the answers, each with {len(kinds)} backward "
             "passes for an answer.",
             "Row i of A is answer i's part of the gradient. B is the group's gradient of "
             f"mlp.up_proj in layer {middle_layer(policy)}."]
    if critic:
        intro.append(f"In the last batch that it learned from, the critic ({args.critic}) "
                     f"explained {learned:.2f} of the variance of its targets.")
    return Findings("Has GRPO's gradient rank 2?", intro,
                    [ranks_by_size(found), ranks_by_advantage(found)])


def critic_of(policy: Policy, args: SimpleNamespace) -> gae:
    """A critic trained on problems that are not measured. Each measured problem teaches it, too,
    after its advantages were made."""
    critic = gae(policy, gae_lambda=0.95, critic=args.critic)
    for batch in range(args.critic_batches):
        show_status(f"batch {batch + 1} of {args.critic_batches} of the critic")
        critic(sample_batch(policy, 8, args.answers, step=1 + args.questions + batch), policy)
    return critic


def token_weights(policy: Policy, rollouts: Rollouts, critic: gae | None = None) -> Kinds:
    """(B, T) each: what tokens are weighted by, 1 or a credit of their own."""
    noise = torch.randn(rollouts.mask.shape, generator=rollouts.generator)
    kinds = {ONES: rollouts.mask.float(), PLANTED: planted(rollouts),
             RANDOM: noise.to(rollouts.mask.device) * rollouts.mask}
    if critic:
        kinds[CRITIC] = critic(rollouts, policy)
    return kinds


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


def middle_layer(policy: Policy) -> int:
    return len(policy.model.model.layers) // 2


def gradients_of_answers(policy: Policy, rollouts: Rollouts, kinds: Kinds
                         ) -> tuple[Kinds, Kinds]:
    """The Gram matrices (B, B) of the answers' gradients, one for each kind, and the gradients in
    the one weight matrix (B, rows, columns)."""
    matrix = policy.model.model.layers[middle_layer(policy)].mlp.up_proj.weight
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
        "shuffled": z[order],
        "random sum": drawn - drawn.mean(),
        NO_BASELINE: rollouts.reward[:R].cpu().double(),
        ONES: torch.ones(R, dtype=torch.float64)}


def ranks_of(gram: torch.Tensor) -> dict[str, float]:
    """The ranks of any matrix with this Gram matrix; undefined for a matrix of zeros."""
    eigenvalues = torch.linalg.eigvalsh(gram.double())
    s = eigenvalues.clamp(min=0).sqrt().flip(0)
    return {name: rank(s) if s[0] > 0 else np.nan for name, rank in RANKS.items()}


def entropy_rank(s: torch.Tensor) -> float:
    share = s / s.sum()
    return float(torch.special.entr(share).sum().exp())


def stable_rank(s: torch.Tensor) -> float:
    return float(s.square().sum() / s[0].square())


def threshold_rank(s: torch.Tensor) -> float:
    return float((s > 0.01 * s[0]).sum())


def energy_rank(s: torch.Tensor, share: float) -> float:
    """The number of largest singular values that reach the share; rounding is none of them."""
    reached = s.square().cumsum(0) / s.square().sum()
    return 1.0 + float((reached < share - 1e-9).sum())


RANKS: dict[str, Callable[[torch.Tensor], float]] = {  # of singular values, the largest first
    "entropy": entropy_rank,
    "stable": stable_rank,
    "90%": lambda s: energy_rank(s, 0.9),
    "99%": lambda s: energy_rank(s, 0.99),
    "threshold": threshold_rank}


def mean_rank(found: FoundRanks, matrix: str, arm: str, R: int, rank: str) -> Estimate:
    of_problems = found.get((matrix, arm, R), [])
    return mean_over([ranks[rank] for ranks in of_problems])


def main_size(found: FoundRanks) -> int:
    return max(R for _, _, R in found if R <= MAIN)


def ranks_by_size(found: FoundRanks) -> Table:
    """The ranks with the z-score, by the size of the group."""
    sizes, main = sorted({R for _, _, R in found}), main_size(found)
    rows = list[Row]()
    for matrix in "AB":
        for rank in RANKS:
            row: Row = [f"{matrix}: {rank}"]
            for R in sizes:
                estimate = mean_rank(found, matrix, Z, R, rank)
                row.append(estimate if R == main else estimate.value)
            rows.append([*row, mean_rank(found, matrix, ONES, main, rank).value])
    formats = {"rank": "", **{f"R={R}": ".2f" for R in sizes}, ONES: ".2f"}
    problems = len(found["A", Z, main])
    return Table("sizes", "The rank of the gradient with z-scores as advantages, by the size R of "
                 "the group", by_row(formats, rows), "",
                 ["Numbers are means over the problems whose answers differ in reward, of which "
                  f"there are {problems} at R = {main}. The kinds of rank are explained by python "
                  "-m lab rank --help. A has R rows, so its rank is at most R, and R = 2 "
                  "shows nothing about it"],
                 {"rank": "matrix and rank", f"R={main}": f"R={main}{WITH_INTERVAL}",
                  ONES: f"all advantages equal, R={main}"})


def ranks_by_advantage(found: FoundRanks) -> Table:
    """Entropy and stable rank with every advantage; and by problem the entropy rank minus that with
    the z-score."""
    R, rows = main_size(found), list[Row]()
    for arm in dict.fromkeys(arm for _, arm, _ in found):
        row: Row = [arm]
        for matrix in "AB":
            pairs = zip(found[matrix, arm, R], found[matrix, Z, R])
            change = mean_over([one["entropy"] - z["entropy"] for one, z in pairs])
            entropy = mean_rank(found, matrix, arm, R, "entropy")
            stable = mean_rank(found, matrix, arm, R, "stable")
            row += [entropy.value, stable.value, change]
        rows.append(row)
    formats, headings = {"advantage": ""}, {}
    for matrix in "AB":
        headings[f"{matrix} entropy"] = f"entropy rank of {matrix}"
        headings[f"{matrix} stable"] = f"stable rank of {matrix}"
        formats |= {f"{matrix} entropy": ".2f", f"{matrix} stable": ".2f",
                    f"{matrix} change": "+.2f"}
        headings[f"{matrix} change"] = (f"entropy rank of {matrix} minus that with the "
                                        f"z-score{WITH_INTERVAL}")
    return Table("arms", f"Does credit by token raise the rank? Groups of {R} answers",
                 by_row(formats, rows), "",
                 ["Differences are paired by problem. Each interval is for one comparison, and not "
                  "corrected for their number"], headings)
