"""How near is a method to the measured credit, and how far does a step of it go along true credit?

    index       the mean rank of a token by the size of its weight or advantage, from -1 to 1 within
                its answer; each token counts with its squared credit. It is 1 if the largest weight
                is at the token that decides everything, and 0 if the two are unrelated
    progress    cos(G, G*) of the method over that of plain GRPO. G is the gradient of a fresh batch
                and G* that of the measured answers, each token with its credit as the advantage

The index leaves the sign out, and so can be high where the gradient goes less far. The mean of G*
is the true gradient, but the G* of few problems is noisy, for both alike.
"""
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lab.analysis.statistics import Estimate, over_problems
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.engine.credited import credited
from lab.engine.methods import axis_of
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.harness.build import make_advantage, make_weighting
from lab.harness.screen import show_status
from lab.harness.settings import make_settings
from lab.probes.common import gradient, sample_batch


def nearness_table(policy: Policy, method: str, answers: Sequence[Rollouts],
                   credits: Sequence[Tensor], squared: Sequence[Tensor], batches: int) -> Table:
    """Of some answers with the credit of their tokens (B, T) and its square, problem by problem."""
    index = index_of([coefficient(policy, method, batch).abs() for batch in answers], answers,
                     squared)
    truth = sum(gradient(policy, batch, credit) for batch, credit in zip(answers, credits))
    cosines: dict[str, list[float]] = {"plain": [], method: []}
    for number in range(batches):
        show_status(f"progress: batch {number + 1} of {batches}")
        batch = sample_batch(policy, 8, 8, step=1001 + number)
        for name, factor in (("plain", batch.advantage), (method, coefficient(policy, method,
                                                                              batch))):
            found = gradient(policy, batch, factor)
            cosines[name].append(float(found @ truth / (found.norm() * truth.norm()).clamp(1e-30)))
    progress = over_problems(np.arange(batches), [np.array(one) for one in cosines.values()],
                             lambda plain, mine: mine / plain)
    rows: list[Row] = [[method, index, progress, float(np.mean(cosines["plain"]))]]
    formats = {"method": "", "index": "+.2f", "progress": ".2f", "plain": ".2f"}
    return Table("nearness", "Does the method weigh what decides, and does its step go further?",
                 by_row(formats, rows), [
        f"The index is over the measured problems, the progress over {batches} fresh batches of "
        "8 problems x 8 answers. A method with a high index may make little progress, and progress "
        "on an untrained model was not seen to become a gain"],
        {"index": f"index{WITH_INTERVAL}", "progress": f"progress over plain GRPO's{WITH_INTERVAL}",
         "plain": "cosine of a plain batch with true credit"})


def coefficient(policy: Policy, method: str, batch: Rollouts) -> Tensor:
    """(B, T): weight * advantage, as the method would train on this batch."""
    s = make_settings({**policy.settings.to_json(), "advantage": "grpo", "mitigation": "none",
                       "placebo": "none", axis_of(method): method})
    methods = make_advantage(s, policy), make_weighting(s, policy)
    credit, weight, _ = credited(batch, methods, policy, s, batch.step)
    return weight * credit.advantage * batch.mask


def index_of(size: Sequence[Tensor], answers: Sequence[Rollouts], squared: Sequence[Tensor]
             ) -> Estimate:
    problem, of_rank, of_credit = [], [], []
    for number, (sizes, batch, credit) in enumerate(zip(size, answers, squared)):
        for row in range(len(batch.mask)):
            inside = batch.mask[row]
            ranks, own = ranks_of(sizes[row, inside]), credit[row, inside].double().cpu().numpy()
            problem += [number] * len(ranks)
            of_rank += (own * ranks).tolist()
            of_credit += own.tolist()
    return over_problems(np.array(problem), [np.array(of_rank), np.array(of_credit)],
                         lambda rank, credit: rank / credit)


def ranks_of(size: Tensor) -> np.ndarray:
    """(n,): from -1, the smallest, to 1, the largest. Equal sizes share their mean rank."""
    smaller = (size[:, None] > size).sum(1) - (size[:, None] < size).sum(1)
    return (smaller.double() / max(1, len(size) - 1)).cpu().numpy()
