"""Token weights by attribution: how much does the answer's distribution depend on the token?

OAR-G (2601.07408). A little noise n is added to the embeddings e of the think section. It moves the
distribution of the answer from p to q, and a token counts by what its embedding has to do with it:

    importance_t = abs(e_t . gradient of KL(p, q) at e_t + n_t)

p and q are softmax of the logits' mean over the answer section. At n = 0 the divergence is at its
minimum and has no gradient, so the importance depends on the noise that was drawn.

    z       log(1 + importance), from 0 for the least to 1 for the most important token of an answer
    weight  below the answer's 25% quantile z0 of z:  z / z0, at least 0.1
            from there on:                            1 + boost (z - z0) / (1 - z0)

Then the weights of an answer's think section are scaled to mean 1. All other tokens weigh 1.
"""
import torch
import torch.nn.functional as F

from countdown_task import ANSWER, THINK
from engine import processes
from engine.flags import NotNegative, Percent, Positive
from engine.forward import lay_out, micro_batches
from engine.registry import mitigation
from engine.rollouts import Rollouts
from qwen2_model import Qwen2

LEAST = 0.1


@mitigation
class outcome_gradient:
    """How much the answer's distribution depends on a token of the think section, by one backward
    pass: little counts less than 1, much more (OAR-G, 2601.07408). Other tokens weigh 1."""

    def __init__(self, lab, *, damped_percentile: Percent = 25.0, boost: NotNegative = 1.0,
                 noise_std: Positive = 1e-3):
        self.percentile, self.boost, self.noise_std = damped_percentile, boost, noise_std

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        thought = (tokens.section == THINK) & tokens.mask
        size = importance(lab, tokens, thought, self.noise_std)
        weight = torch.ones_like(tokens.log_prob)
        for b in size.any(1).nonzero().flatten().tolist():
            own = thought[b]
            weight[b, own] = reshaped(size[b, own], self.percentile / 100, self.boost)
        return weight


def reshaped(size: torch.Tensor, share: float, boost: float) -> torch.Tensor:
    """(n,) importance -> (n,) weights with mean 1: the least important share of them damped."""
    z = size.log1p()
    z = (z - z.min()) / (z.max() - z.min()).clamp(min=1e-30)
    border = z.quantile(share)
    damped = (z / border.clamp(min=1e-8)).clamp(min=LEAST)
    boosted = 1 + boost * (z - border) / (1 - border).clamp(min=1e-8)
    weight = torch.where(z < border, damped, boosted)
    return weight / weight.mean()


def importance(lab, tokens: Rollouts, thought: torch.Tensor, noise_std: float) -> torch.Tensor:
    """(B, T): of the think section's tokens, 0 elsewhere and in answers without both sections."""
    answer = (tokens.section == ANSWER) & tokens.mask
    clean = tokens.hidden
    seed = int(torch.randint(2 ** 62, (1,), generator=tokens.generator))
    size = torch.zeros_like(tokens.log_prob)
    rows = tokens.own_rows()
    rows = rows[(thought.any(1) & answer.any(1))[rows]]
    for part in micro_batches(tokens, rows, lab.settings.micro_batch):
        size[part] = attribution(lab.model, tokens, part, thought, answer, clean, noise_std, seed)
    processes.add_up(size)
    return size


@torch.enable_grad()
def attribution(model: Qwen2, tokens: Rollouts, rows: torch.Tensor, thought: torch.Tensor,
                answer: torch.Tensor, clean: torch.Tensor, noise_std: float,
                seed: int) -> torch.Tensor:
    """(rows, T): abs(e . gradient of KL at e + n) of the think section of these rows."""
    ids, shared, predicts = lay_out(tokens, rows)
    embedding = model.model.embed_tokens(ids).detach().float()
    S = shared.answers.shape[1]  # the last token of an answer is not fed to the model
    stands_at = shared.answers, thought[rows][:, :S]
    noisy = embedding + noise_std * noise_at(stands_at, rows, embedding, seed)
    noisy.requires_grad_()
    with model.model.embed_tokens.register_forward_hook(lambda *_: noisy):
        hidden = model.model(ids, shared.positions, shared)[predicts].float()
    p = answer_distribution(model, clean[rows], answer[rows])
    q = answer_distribution(model, hidden, answer[rows])
    divergence = F.kl_div(q, p, reduction="sum", log_target=True)
    gradient, = torch.autograd.grad(divergence, noisy)
    size = torch.zeros(predicts.shape, device=ids.device)
    size[:, :S] = (gradient * embedding).sum(1).abs()[shared.answers]
    return size * thought[rows]


def noise_at(stands_at: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor,
             embedding: torch.Tensor, seed: int) -> torch.Tensor:
    """(N, D): normal noise at the think tokens of each row, drawn for each answer by itself so that
    the micro-batch does not matter; 0 elsewhere."""
    noise = torch.zeros_like(embedding)
    for row, places, is_thought in zip(rows.tolist(), *stands_at):
        own = places[is_thought]
        generator = torch.Generator().manual_seed(seed + row)
        drawn = torch.randn(len(own), noise.shape[1], generator=generator)
        noise[own] = drawn.to(noise.device)
    return noise


def answer_distribution(model: Qwen2, hidden: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """(rows, V) log-probs: softmax of the mean of the logits that predict the answer section. The
    mean of logits is the logits of the mean state."""
    count = answer.sum(1, keepdim=True)
    mean = (hidden * answer[..., None]).sum(1) / count
    return model.logits(mean).log_softmax(-1)
