"""Weightings of 2026, and of the end of 2025. The docstring of each has the claim of its paper.

    of the batch alone     quadrants
    of hidden states       delta
    of the answer section  counterfactual, oar_g

Twelve more, of which none gained, have a row in docs/reference/methods.md.
"""
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from lab.engine.declared import NotNegative, Positive, Share
from lab.engine.forward import frozen_log_probs, response_log_probs
from lab.engine.methods import mitigation
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import ANSWER, THINK, WORD

LEAST = 0.1  # of oar_g: the smallest weight before an answer's weights are rescaled
Piece = tuple[int, int, int]  # a row, the first token, and the one after the last


@mitigation
def quadrants(rollouts: Rollouts, *, quadrant_low: Share = 0.5) -> Tensor:
    """Tokens whose entropy is the batch's mean or more weigh entropy / mean, at most 3. The others
    weigh quadrant_low in right answers and a quarter of it in wrong ones: low entropy only confirms
    what was right (after EAPO, arXiv 2604.11056, which reports that it outperforms baselines)."""
    relative = rollouts.entropy / rollouts.entropy[rollouts.mask].mean().clamp(min=1e-8)
    low = torch.where(rollouts.advantage > 0, quadrant_low, quadrant_low / 4)
    return torch.where(relative >= 1, relative.clamp(max=3), low)


@mitigation
def delta(rollouts: Rollouts, *, delta_low: Positive = 0.8, delta_high: Positive = 1.2) -> Tensor:
    """A token weighs more, from delta_low to delta_high, if its gradient at the last layer is
    nearer to the mean of its own side, right or wrong, than to that of the other side. As in the
    authors' code, a gradient is (1 - p) times the hidden state, so the token itself is not in it
    (DelTA, arXiv 2605.21467, which reports +3.3 and +2.6 points with 8B and 14B in mathematics).
    """
    gradient = (1 - rollouts.log_prob.exp())[..., None] * rollouts.hidden                # (B, T, D)
    shares = [(sign * rollouts.advantage).clamp(min=0) * rollouts.mask for sign in (1, -1)]
    first = margins(gradient, shares)
    spread = [margin[share > 0].std(correction=0).clamp(min=1e-4) if share.any() else 1.0
              for margin, share in zip(first, shares)]
    nearer = [share * (margin / s).sigmoid() for margin, share, s in zip(first, shares, spread)]
    weight = torch.full_like(rollouts.log_prob, delta_low)
    for margin, share, s in zip(margins(gradient, nearer), shares, spread):
        weight += (delta_high - delta_low) * (share > 0) * (margin / s).sigmoid()
    return weight


def margins(gradient: Tensor, shares: list[Tensor]) -> list[Tensor]:
    """(B, T) of each side: how much nearer a gradient is to this side's mean than to the other's,
    in squared distances. A side's mean counts each token with its share."""
    distance = []
    for share in shares:
        centre = torch.einsum("bt,btd->d", share, gradient) / share.sum().clamp(min=1e-8)
        distance.append((gradient - centre).square().sum(-1))
    return [distance[1] - distance[0], distance[0] - distance[1]]


@mitigation
class counterfactual:
    """The weight is 1 + piece_scale * the share of p(answer section) that is lost if the token's
    piece of the thinking is replaced by end-of-text tokens, and 1 if none is lost. A piece is a
    calculation, or the words between two (after arXiv 2602.09331, from its text).

    The paper reports +0.8 to +1.1 points on GSM8K. Here, too, what a text says of a model that
    reads it without a piece need not hold of texts that the model would write."""

    def __init__(self, policy: Policy, *, piece_scale: NotNegative = 1.0):
        self.scale = piece_scale

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        pieces, weight = list(pieces_of(rollouts)), torch.ones_like(rollouts.log_prob)
        if pieces:
            falls = falls_without(rollouts, policy, pieces).clamp(min=0)
            for (row, start, end), lost in zip(pieces, (1 - (-falls).exp()).tolist()):
                weight[row, start:end] += self.scale * lost
        return weight


def pieces_of(rollouts: Rollouts) -> Iterator[Piece]:
    """The pieces of thinking: neighbours that are all words, or all something else."""
    thinks = ((rollouts.section == THINK) & rollouts.mask).tolist()
    words = (rollouts.kind == WORD).tolist()
    for row, codes in enumerate(zip(thinks, words)):
        start = 0
        for (is_think, _), tokens in groupby(zip(*codes)):
            end = start + len(list(tokens))
            if is_think:
                yield row, start, end
            start = end


def falls_without(rollouts: Rollouts, policy: Policy, pieces: list[Piece]) -> Tensor:
    """(pieces,): log p(answer section), minus the same after the piece is blanked out."""
    rows = torch.tensor([row for row, _, _ in pieces], device=rollouts.mask.device)
    ids, section = rollouts.ids[rows].clone(), rollouts.section[rows]
    for number, (_, start, end) in enumerate(pieces):
        ids[number, start:end] = policy.tokenizer.token_to_id("<|endoftext|>") or 0
    blanked = replace(rollouts.of_rows(rows), ids=ids)
    inside = (section == ANSWER) & blanked.mask
    needed = inside.any(1).nonzero()[:, 0]
    after = frozen_log_probs(policy.model, blanked, needed, policy.settings.micro_batch)
    return ((blanked.log_prob - after) * inside).sum(1)


@mitigation
class oar_g:
    """How much a think token matters: abs(gradient of the answer section's mean log-prob at the
    token's embedding, times the embedding). Over the think section log(1 + this) is stretched to 0
    to 1. Below the quantile oar_quantile the weight is it / quantile, at least 0.1; above, it grows
    to 1 + oar_boost. Then an answer's think tokens are rescaled to the mean 1 (OAR-G, mode
    answer_joint, arXiv 2601.07408).

    The paper reports significant gains over GRPO in mathematics."""

    def __init__(self, policy: Policy, *, oar_quantile: Share = 0.5, oar_boost: NotNegative = 1.0):
        self.quantile, self.boost = oar_quantile, oar_boost

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        weight = torch.ones_like(rollouts.log_prob)
        think, inside = ((rollouts.section == part) & rollouts.mask for part in (THINK, ANSWER))
        rows = (think.any(1) & inside.any(1)).nonzero()[:, 0]
        for part in rows.split(policy.settings.micro_batch) if len(rows) else ():
            mean = inside[part] / inside[part].sum(1, keepdim=True)
            x, slope = at_embeddings(policy, rollouts, part, lambda lp: (lp * mean).sum())
            for row, matters in zip(part.tolist(), (x * slope).sum(-1).abs()):
                weight[row, think[row]] = self.reshaped(matters[think[row]].log1p())
        return weight

    def reshaped(self, score: Tensor) -> Tensor:
        """(think tokens of an answer,) -> the same."""
        score = (score - score.min()) / (score.max() - score.min()).clamp(min=1e-8)
        border = score.quantile(self.quantile)
        low = (score / border.clamp(min=1e-8)).clamp(min=LEAST)
        high = 1 + self.boost * (score - border) / (1 - border).clamp(min=1e-8)
        weight = torch.where(score < border, low, high)
        return weight / weight.mean()


def at_embeddings(policy: Policy, rollouts: Rollouts, rows: Tensor,
                  objective: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(rows, T, D) twice: each token's embedding, and the gradient there of a function of these
    rows' log-probs (rows, T). An answer's last token predicts nothing: its numbers mean nothing."""
    kept: list[Tensor] = []

    def keep(module: object, inputs: object, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    hook = policy.model.model.embed_tokens.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            log_prob = response_log_probs(policy.model, rollouts, rows)
            # kept are the embeddings of the prompts, and of the answers without their last tokens
            [gradient] = torch.autograd.grad(objective(log_prob), kept[1:])
    finally:
        hook.remove()
    is_read = rollouts.written[rows].roll(-1, 1)  # a token is read if another one follows it
    is_read[:, -1] = False
    x, slope = torch.zeros(2, *is_read.shape, gradient.shape[-1], device=gradient.device)
    x[is_read], slope[is_read] = kept[1].detach().float(), gradient.float()
    return x, slope
