"""DPO (2305.18290) on pairs from the batch, the best and the worst answer of each group, or as it
was published, on pairs of a file that were there before training (harness/given_pairs.py).

    loss = - mean over pairs of  log sigmoid( beta (margin of the better - margin of the worse) )

An answer's margin is its log-prob minus that under the initial model, summed over its tokens.
"""
import torch
import torch.nn.functional as F

from engine import processes
from engine.forward import frozen_log_probs, micro_batches, response_log_probs
from engine.rollouts import Rollouts
from grpo import SUMS, add, loss_and_gap, skipped, step_and_sums, summary
from qwen2_model import Qwen2


def best_and_worst(rollouts: Rollouts) -> torch.Tensor:
    """(pairs, 2) rows: the first best and first worst answer of each group whose rewards differ."""
    pairs = []
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero().squeeze(1)
        reward = rollouts.reward[rows]
        if reward.max() > reward.min():
            pairs.append(rows[torch.stack([reward.argmax(), reward.argmin()])])
    return torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.long)


def chosen_and_rejected(rollouts: Rollouts) -> torch.Tensor:
    """(pairs, 2) rows, of a batch in which the better one comes first, whatever their rewards."""
    return torch.arange(len(rollouts.mask), device=rollouts.mask.device).view(-1, 2)


def update_preferences(model: Qwen2, optimizer, rollouts: Rollouts, s,
                       reference: Qwen2) -> tuple[dict, torch.Tensor]:
    """One step, or with --epochs several, along the gradient of the loss above.

    That gradient is the policy loss's with an advantage of its own, the same for every token of an
    answer: +-N beta sigmoid(-beta difference) / pairs. Returns the numbers worth watching, and this
    advantage as it was before the update, for the record.
    """
    pairs = chosen_and_rejected(rollouts) if s.pairs else best_and_worst(rollouts)
    implied = torch.zeros_like(rollouts.log_prob)
    if not len(pairs):
        return skipped("every group's answers had equal rewards"), implied
    own = pairs[torch.isin(pairs[:, 0], rollouts.rows_of_rank())]
    anchor = frozen_log_probs(reference, rollouts, own.flatten(), s.micro_batch)
    passes = []
    for epoch in range(s.epochs):
        sums, advantage = one_pass(model, optimizer, rollouts, own, len(pairs), anchor, s)
        passes.append(sums)
        if epoch == 0:
            implied = advantage
    processes.all_reduce(implied)
    in_order = passes[-1]["ordered"] / len(pairs)
    return {**summary(passes), "pairs": len(pairs), "pairs_in_order": in_order}, implied


def one_pass(model, optimizer, rollouts: Rollouts, pairs, count: int, anchor,
             s) -> tuple[dict, torch.Tensor]:
    """The gradient of these pairs, of `count` over all processes, and a step along it. Returns the
    sums of the pass and the advantage (B, T) that its gradient implies."""
    sums, implied = dict.fromkeys(SUMS, 0), torch.zeros_like(rollouts.log_prob)
    optimizer.zero_grad()
    for part in micro_batches(rollouts, pairs, max(1, s.micro_batch // 2)):
        rows = part.flatten()
        log_prob = response_log_probs(model, rollouts, rows)
        margin = (log_prob - anchor[rows]).sum(1).view(-1, 2)  # (pairs, better and worse)
        difference = s.dpo_beta * (margin[:, 0] - margin[:, 1])
        loss = -F.logsigmoid(difference).sum() / count
        loss.backward()
        pull = s.dpo_beta * torch.sigmoid(-difference.detach()) * rollouts.mask.sum() / count
        implied[rows] = torch.stack([pull, -pull], 1).view(-1, 1) * rollouts.mask[rows]
        add(sums, loss_and_gap(rollouts, rows, loss, log_prob.detach()))
        add(sums, {"ordered": (difference > 0).sum()})
    return step_and_sums(optimizer, sums, s.max_grad_norm), implied
