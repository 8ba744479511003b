"""Weights by attribution (gradient x input) of the answer's distribution to the thought's tokens.

OAR-G (2601.07408). A little noise n is added to the embeddings e of the think section. It moves the
distribution of the answer from p to q, and a token counts by what its embedding has to do with it:

    importance_t = abs(e_t . gradient of KL(p, q) at e_t + n_t)

p and q are softmax of the logits' mean over the answer section. At n = 0 the divergence is at its
minimum and has no gradient, so the importance depends on the noise that was drawn.

All of it is computed in float64. p and q are nearly equal, and a norm takes no notice of how long
an embedding is, so both q - p and e_t . gradient cancel: of float32 two digits would be left.

    z       log(1 + importance), from 0 for the least to 1 for the most important token of an answer
    weight  below the answer's 25% quantile z0 of z:  z / z0, at least 0.1
            from there on:                            1 + boost (z - z0) / (1 - z0)

Then the weights of an answer's think section are scaled to mean 1. All other tokens weigh 1.
"""
import copy

import torch
import torch.nn.functional as F

from engine import processes
from engine.choices import mitigation
from engine.forward import lay_out, micro_batches
from engine.tokens import ANSWER, THINK
from engine.rollouts import Rollouts
from engine.sharded import whole_model
from harness.flags import NotNegative, Percent, Positive
from qwen2_model import Qwen2

LEAST = 0.1


@mitigation
class outcome_gradient:
    """Gradient x input attribution of the answer's distribution to a token of the think section,
    below 1 for little, above 1 for much (OAR-G, 2601.07408); 1 elsewhere."""

    def __init__(self, policy, *, damped_percentile: Percent = 25.0, boost: NotNegative = 1.0,
                 noise_std: Positive = 1e-3):
        self.percentile, self.boost, self.noise_std = damped_percentile, boost, noise_std

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        size, thought = importance(policy, rollouts, self.noise_std), places_in(rollouts, THINK)
        weight = torch.ones_like(rollouts.log_prob)
        for b in size.any(1).nonzero().flatten().tolist():
            own = thought[b]
            weight[b, own] = reshaped(size[b, own], self.percentile / 100, self.boost).float()
        return weight


def places_in(rollouts: Rollouts, section: int) -> torch.Tensor:
    """(B, T): which tokens stand in this section."""
    return (rollouts.section == section) & rollouts.mask


def reshaped(size: torch.Tensor, share: float, boost: float) -> torch.Tensor:
    """(n,) importance -> (n,) weights with mean 1: the least important share of them damped."""
    z = size.log1p()
    z = (z - z.min()) / (z.max() - z.min()).clamp(min=1e-30)
    border = z.quantile(share)
    damped = (z / border.clamp(min=1e-8)).clamp(min=LEAST)
    boosted = 1 + boost * (z - border) / (1 - border).clamp(min=1e-8)
    weight = torch.where(z < border, damped, boosted)
    return weight / weight.mean()


def importance(policy, rollouts: Rollouts, noise_std: float) -> torch.Tensor:
    """(B, T): of the think section's tokens, 0 elsewhere and in answers without both sections."""
    size = torch.zeros_like(rollouts.log_prob, dtype=torch.float64)
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    has_both = places_in(rollouts, THINK).any(1) & places_in(rollouts, ANSWER).any(1)
    rows, model = rollouts.rows_of_rank(), in_float64(policy.model)
    for part in micro_batches(rollouts, rows[has_both[rows]], policy.settings.micro_batch):
        size[part] = attribution(model, rollouts, part, noise_std, seed)
    processes.all_reduce(size)
    return size


def in_float64(model: Qwen2) -> Qwen2:
    """A copy of the whole model. Every process has to call this."""
    wide = copy.deepcopy(whole_model(model, torch.float64)).double()
    return wide.compute_in(torch.float64).requires_grad_(False)


def attribution(model: Qwen2, rollouts: Rollouts, rows: torch.Tensor, noise_std: float,
                seed: int) -> torch.Tensor:
    """(rows, T): abs(e . gradient of KL at e + n) of the think section of these rows."""
    ids, shared, predicts = lay_out(rollouts, rows)
    S = shared.answers.shape[1]  # the last token of an answer is not fed to the model
    thought, answer = places_in(rollouts, THINK)[rows], places_in(rollouts, ANSWER)[rows]
    embedding = model.model.embed_tokens(ids)
    noisy = embedding.clone()
    for row, places, is_thought in zip(rows.tolist(), shared.answers, thought[:, :S]):
        own = places[is_thought]
        noisy[own] += noise_std * noise_of(seed + row, len(own), embedding)

    def answer_distribution(embedding):
        """(rows, V) log-probs: softmax of the mean of the logits that predict the answer section.
        The mean of logits is the logits of the mean state."""
        with model.model.embed_tokens.register_forward_hook(lambda *_: embedding):
            hidden = model.model(ids, shared.positions, shared)[predicts]
        mean = (hidden * answer[..., None]).sum(1) / answer.sum(1, keepdim=True)
        return model.logits(mean).log_softmax(-1)

    p = answer_distribution(embedding)
    with torch.enable_grad():
        q = answer_distribution(noisy.requires_grad_())
        divergence = F.kl_div(q, p, reduction="sum", log_target=True)
    gradient, = torch.autograd.grad(divergence, noisy)
    size = torch.zeros(predicts.shape, device=ids.device, dtype=torch.float64)
    size[:, :S] = (gradient * embedding).sum(1).abs()[shared.answers]
    return size * thought


def noise_of(seed: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """(count, D) normal numbers, an answer's own, so that the micro-batch does not matter."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, like.shape[1], generator=generator, dtype=torch.float64)
    return noise.to(like.device)
