"""A weighting of 2026. Its docstring has the claim of its paper.

Fifteen more, of which none gained, have a row in docs/reference/methods.md.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from lab.engine.declared import NotNegative, Share
from lab.engine.forward import response_log_probs
from lab.engine.methods import mitigation
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import ANSWER, THINK

LEAST = 0.1  # of oar_g: the smallest weight before an answer's weights are rescaled


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
