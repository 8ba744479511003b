"""Push, change and credit in synthetic tasks in which every context is listed, so that all three
are exact (research/dial/task.py)."""
from types import SimpleNamespace

import torch
from torch import Tensor

from analysis.tables import Row, Table, by_row
from grpo import group_z_score
from research.dial.arms import ANSWERS, EXACT, PLAIN, TRUE, named_arm
from research.dial.task import SyntheticTask, TaskSpec
from research.dial.training import batch_gradients, by_context, random_numbers
from research.publish.results import table_rows
from research.probes import dial
from research.probes.change_batches import SEED_NAME
from research.probes.common import rank_correlation

# in the others the credit of a token depends on the tokens before it
TASKS = [task for task in dial.TASKS if not {"all", "seen"} & {*task.split()}]


def synthetic_table(args: SimpleNamespace) -> Table:
    predicted = of_true_credit("law", "predictions")
    measured = of_true_credit("dial", "board")
    rows: list[Row] = []
    for name in TASKS:
        of = predicted.get(name, {"ratio": None, "gain": None})
        gain = measured[name]["gain"]["value"]
        rows.append([name, *cancelled(name, args), of["ratio"], of["gain"], gain])
    with_prediction = [row for row in rows if row[5] is not None]
    gains = [row[-1] for row in with_prediction]
    names = {1: "the share that cancels", 3: "the cosine of a batch of plain GRPO",
             5: "the noise ratio", 6: "the predicted gain"}  # of these columns
    found = []
    for column, name in names.items():
        correlation = rank_correlation([row[column] for row in with_prediction], gains)
        found.append(f"{correlation:+.2f} for {name}")
    *first, last = found
    formats = {"world": "", "cancels": ".0%", "exact": ".2f", "batch": ".2f", "true": ".2f",
               "ratio": ".2g", "predicted": "points", "gain": "points"}
    return Table("worlds", "Synthetic tasks, where all is exact: what the push turns into",
                 by_row(formats, rows),
                 f"Which number tells beforehand how much true credit gains over plain GRPO? Over "
                 f"{len(with_prediction)} synthetic tasks, the rank correlation with this gain is "
                 f"{', '.join(first)} and {last}.",
                 ["Cancels: the share of plain GRPO's push that cancels among equal tokens in "
                  "equal contexts. Cosine: that between the tokens' changes in a step and their "
                  "credits. The step is along the exact gradient, along that of a batch of plain "
                  "GRPO, or along that of a batch with true credit. The noise ratio and the "
                  "predicted gain are those of python -m research law, and the measured gain is "
                  "that of python -m research dial. Gains are in points of mean success"],
                 {"world": "synthetic task",
                  "cancels": "share of the push that cancels",
                  "exact": "cosine, exact gradient",
                  "batch": "cosine, batch of plain GRPO", "true": "cosine, batch with true credit",
                  "ratio": "noise ratio", "predicted": "predicted gain of true credit",
                  "gain": "measured gain of true credit"})


def of_true_credit(result: str, table: str) -> dict[str, dict]:
    """The rows of true credit in a published table, by synthetic task."""
    return {row["world"]: row for row in table_rows(result, table) if row["arm"] == TRUE}


def cancelled(name: str, args: SimpleNamespace) -> list[float]:
    """The share of the push that cancels, and three cosines of change and credit: means over
    batches of one untrained policy."""
    task = SyntheticTask(TaskSpec.read(name), [args.seed] * args.batches)
    draws = [(SEED_NAME, args.seed, number) for number in range(args.batches)]
    with torch.no_grad():
        _, log_prob = task.forward(task.parameters)
    p = log_prob.exp()
    credit = credit_of_contexts(task, p)
    cosines = []
    for arm_name in (EXACT, PLAIN, TRUE):
        arm = named_arm(arm_name)
        method = arm.start and arm.start(task)
        gradient, _ = batch_gradients(task, arm, method, 1, draws)
        _, change = torch.func.jvp(lambda w: task.forward(w)[1], (task.parameters,),
                                   (-gradient,))
        change = change.nan_to_num() * (p > 0)
        cosines.append(cosine_over_tokens(task, p, change, credit))
    return [share_that_cancels(task, log_prob, draws), *cosines]


def credit_of_contexts(task: SyntheticTask, p: Tensor) -> Tensor:
    """(S, U, V): the credit of each symbol in each context."""
    credit = torch.zeros_like(p)
    policy = torch.arange(len(p))
    for j, key in enumerate(task.keys.tolist()):
        right, cue = task.right[:, j], task.cue_of[key]
        credit[:, cue] = -p[policy, cue, right, None] / task.spec.decide
        credit[policy, cue, right] += 1 / task.spec.decide
    return credit


def cosine_over_tokens(task: SyntheticTask, p: Tensor, change: Tensor, credit: Tensor) -> float:
    """The cosine of change and credit, with each symbol of each context counted as often as it
    occurs; the mean over policies."""
    positions = torch.bincount(task.cue_of, minlength=p.shape[1]).view(1, -1, 1)

    def inner(one: Tensor, two: Tensor) -> Tensor:
        return (positions * p * one * two).sum((1, 2))

    sizes = (inner(change, change) * inner(credit, credit)).sqrt()
    cosine = inner(change, credit) / sizes
    return float(cosine.mean())


def share_that_cancels(task: SyntheticTask, log_prob: Tensor, draws: list) -> float:
    """The share of plain GRPO's push that equal tokens in equal contexts cancel among each
    other."""
    p = log_prob.exp()
    sample = task.sample(log_prob, random_numbers(task, named_arm(PLAIN), 1, draws))
    policies, answers = sample.reward.shape
    group = torch.arange(answers) // ANSWERS + answers * torch.arange(policies)[:, None]
    z = group_z_score(sample.reward.flatten(), group.flatten())
    A = z.view(policies, answers, 1).expand(sample.ids.shape)
    s_squared = 1 - 2 * p + p.square().sum(-1, keepdim=True)
    net, gross = by_context(task, sample, A), by_context(task, sample, A.abs())
    remaining = (net.abs() * s_squared).sum() / (gross * s_squared).sum()
    return 1 - float(remaining)
