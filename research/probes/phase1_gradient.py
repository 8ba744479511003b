"""The gradient that phase 1 took for credit, and the batches and models that serve as its controls.

For token j of an answer of n tokens it is

    g_j = d loss / d embedding_j,    loss = - 1/n sum_i log pi(y_i | prompt, y_<i)

`phase_one` computes it for a batch. `single_terms` takes one term i of the sum at a time. The last
token of an answer predicts nothing, so its g is 0 by construction: `analysed` leaves it out.
"""
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.forward import lay_out, response_log_probs
from engine.lab import Lab
from engine.rollouts import Rollouts
from grpo import grpo
from qwen2_model import Qwen2


def analysed(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): all tokens of an answer but its last."""
    positions = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    return positions < rollouts.length[:, None] - 1


def phase_one(lab: Lab, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token (B, T) the norm of g, and the mean of g over its dimensions."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    not_empty = rollouts.length.nonzero().squeeze(1)
    for rows in not_empty.split(lab.settings.micro_batch):
        log_prob, gradient_of = at_embeddings(lab, rollouts, rows)
        losses = -(log_prob.sum(1) / rollouts.length[rows])
        g = gradient_of(losses.sum())
        size[rows] = g.norm(dim=-1)
        signed[rows] = g.mean(-1)
    return size, signed


def single_terms(lab: Lab, rollouts: Rollouts, chosen: torch.Tensor, progress=lambda share: None):
    """(chosen, T, T): the norm of the gradient of one loss term at one embedding.

    [b, i, j] belongs to the term -log pi(y_i | ...) and the embedding of token j; 0 unless j < i.
    """
    T = rollouts.mask.shape[1]
    norms = torch.zeros(len(chosen), T, T, dtype=torch.float64)
    for part in torch.arange(len(chosen)).split(lab.settings.micro_batch):
        rows = chosen[part]
        log_prob, gradient_of = at_embeddings(lab, rollouts, rows)
        for i in range(1, int(rollouts.length[rows].max())):
            g = gradient_of(-log_prob[:, i].sum())
            norms[part, i] = g.norm(dim=-1).double().cpu()
        progress((int(part[-1]) + 1) / len(chosen))
    return norms


def at_embeddings(lab: Lab, rollouts: Rollouts, rows: torch.Tensor):
    """Log-probs (rows, T), and a function that differentiates any number made of them.

    The function returns the gradient at the embeddings of the answers' tokens, (rows, T, D), with
    zeros where `analysed` is false.
    """
    with embeddings_as_leaves(lab.model) as leaves:
        log_prob = response_log_probs(lab.model, rollouts, rows)
    inside = analysed(rollouts)[rows][..., None]
    _, _, predicts = lay_out(rollouts, rows)
    # Token t stands at the position that predicts token t + 1.
    stands = torch.cat([predicts[:, 1:], torch.zeros_like(predicts[:, :1])], 1)

    def gradient_of(number: torch.Tensor) -> torch.Tensor:
        gradient, = torch.autograd.grad(number, leaves[0], retain_graph=True)
        return gradient.float()[stands] * inside  # (rows, T, D)

    return log_prob, gradient_of


@contextmanager
def embeddings_as_leaves(model: Qwen2):
    """Inside the block, start the graph of a forward pass at the embeddings and list them."""
    leaves = []

    def detach_output(module, inputs, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.model.embed_tokens.register_forward_hook(detach_output)
    try:
        yield leaves
    finally:
        hook.remove()


def untrained(model: Qwen2, seed: int) -> Qwen2:
    """The same architecture with fresh weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2(model.config).to(model.device)


def random_text(lab: Lab, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same problems, their tokens drawn evenly."""
    vocabulary = lab.tokenizer.get_vocab_size()
    ids = torch.randint(vocabulary, rollouts.ids.shape, generator=rollouts.generator)
    return replace(rollouts, ids=ids.to(rollouts.ids.device) * rollouts.mask)


def shuffled_rewards(rollouts: Rollouts) -> Rollouts:
    """Give every answer the scores of a random answer, whichever problem that one was for."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    order = order.to(rollouts.mask.device)
    scores = {name: value[order] for name, value in rollouts.scores.items()}
    shuffled = replace(rollouts, scores=scores)
    return replace(shuffled, advantage=grpo(shuffled))
