"""What moved this token? Its change in a step, split by the tokens that made it.

To first order a step that adds D to the parameters changes log p of a token by <g, D>, where g is
its gradient. A plain step is a sum over all tokens j of the batch, so its parts add up to the
whole:

    D = rate * sum_j A_j c w_j m_j g_j / N        part of j: rate * A_j c w_j m_j <g, g_j> / N

AdamW multiplies each number of the gradient by a scale that the whole batch has made, in a first
step by nearly rate / abs(gradient). The parts are computed at this scale, so they add up, too. What
is left of AdamW's step comes from earlier steps. Then the change is measured by taking the step:
what differs from the sum is curvature. A KL term, and epochs after the first, are left out.
"""
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from analysis.tables import Row, Table, by_row
from engine.optimizer import (STATE, AdamW, Optimizer, load_optimizer_tensors, parameters_by_name)
from engine.rollouts import Rollouts
from grpo import update, update_with_change
from qwen2_model import Qwen2, opened

LARGEST_PARTS = 3  # so many are named in a sentence
TINY = 5e-6        # a smaller change is printed as 0.00000
NOTES = [
    "Each number is a change of the token's log-prob. The first rows are what other tokens, and "
    "the token itself, contributed to it, to first order. Their sum differs from what was measured "
    "by what the first order leaves out",
    "A better answer is one with an advantage above 0. All others count as worse. The plain step "
    "is a step of gradient descent. It is as long as a step that moves every parameter by the "
    "learning rate. AdamW's step is that of the run. Where the sum is far from what was measured, "
    "the step was too long for the first order, and the parts of that column say little"]


def movers(rollouts: Rollouts, b: int, t: int) -> dict[str, Tensor]:
    """Masks (B, T) of the groups of tokens that may move token t of answer b. Every token of the
    batch is in exactly one of them."""
    row, itself = torch.zeros(2, *rollouts.mask.shape, dtype=torch.bool)
    row[b] = True
    itself[b, t] = True
    group = (rollouts.group == rollouts.group[b])[:, None] & ~row
    better = rollouts.advantage > 0
    return {"itself": itself,
            "the rest of its answer": row & ~itself,
            "its group's better answers": group & better,
            "its group's worse answers": group & ~better,
            "other problems": ~(group | row)}


def what_moved(folder: Path, trainer: Path | None, rollouts: Rollouts, weight: Tensor,
               s: SimpleNamespace, b: int, t: int) -> Table:
    """The change of token t of answer b, in the step that trained on these rollouts. `folder` has
    the model that sampled them, `trainer` the file of its optimizer's state: None before the first
    step."""
    s = with_settings(s, epochs=1, kl=0.0)
    model, scale, after, measured = Qwen2.from_pretrained(folder, "cpu"), [], [], []
    if trainer is None or trainer.exists():
        optimizer = load_adamw(model, trainer, s)
        norm, change = step(model, optimizer, rollouts, weight, s)
        scale, measured = scale_of(optimizer, norm, s), [change[b, t].item()]
        after = [p.detach() for p in model.parameters()]
        del optimizer
        model = Qwen2.from_pretrained(folder, "cpu")
    s = with_settings(s, max_grad_norm=0.0)
    own = gradient_of_token(model, rollouts, b, t, s)
    moved_by = (a - p.detach() for a, p in zip(after, model.parameters()))
    total = inner(own, moved_by)
    scale, after = [of.mul_(g) for of, g in zip(scale, own)], []

    parts = {}
    for name, mask in movers(rollouts, b, t).items():
        found = gradient(model, rollouts, weight * mask, s)
        tokens = int((mask & rollouts.mask).sum())
        parts[name] = tokens, 0.0 - inner(own, found), 0.0 - inner(scale, found)
    whole = gradient(model, rollouts, weight, s)
    rate = s.learning_rate * (sum(g.numel() for g in whole) / inner(whole, whole)) ** 0.5
    _, change = step(model, torch.optim.SGD(model.parameters(), rate), rollouts, weight, s)

    rows: list[Row] = [[name, tokens, rate * plain, adamw]
                       for name, (tokens, plain, adamw) in parts.items()]
    sum_of_plain = sum(rate * plain for _, plain, _ in parts.values())
    if trainer:
        sum_of_adamw = sum(adamw for _, _, adamw in parts.values())
        rows.append(["earlier steps", None, None, total - sum_of_adamw])
    rows.append(["sum", None, sum_of_plain, total])
    rows.append(["measured", None, change[b, t].item(), *measured])
    formats = {"moved by": "", "tokens": ",d", "plain step": "+.5f"}
    if measured:  # AdamW's step is not known where its state was not kept
        formats["AdamW's step"] = "+.5f"
    rows = [row[:len(formats)] for row in rows]
    notes = [*NOTES, about_largest(rows[:-2], [*formats][-1])]
    return Table("moved", "What moved the token", by_row(formats, rows), "", notes)


def about_largest(rows: list[Row], heading: str) -> str:
    """A sentence about the largest parts, up or down, of the last column."""
    parts: list[tuple[str, Any]] = [(str(row[0]), row[-1]) for row in rows if row[-1] is not None]
    largest = sorted(parts, key=lambda part: -abs(part[1]))[:LARGEST_PARTS]
    named = [f"{name} ({value:+.5f})" for name, value in largest if abs(value) > TINY]
    return f"What moved it most in the column {heading}: {', '.join(named) or 'nothing'}"


def gradient_of_token(model: Qwen2, rollouts: Rollouts, b: int, t: int,
                      s: SimpleNamespace) -> list[Tensor]:
    """The gradient of one token's log-prob: a batch in which it alone has an advantage, chosen so
    that the loss is log p."""
    one = torch.zeros_like(rollouts.log_prob)
    one[b, t] = -rollouts.mask.sum()
    return gradient(model, replace(rollouts, advantage=one), abs(one).clamp(max=1),
                    with_settings(s, loss_norm="token"))


def with_settings(s: SimpleNamespace, **values: object) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(s), **values})


def load_adamw(model: Qwen2, trainer: Path | None, s: SimpleNamespace) -> AdamW:
    optimizer = AdamW(model.parameters(), s.learning_rate, s.weight_decay)
    if trainer:
        with opened(trainer) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        load_optimizer_tensors(optimizer, parameters_by_name(model, optimizer), tensors)
    return optimizer


def step(model: Qwen2, optimizer: Optimizer, rollouts: Rollouts, weight: Tensor,
         s: SimpleNamespace) -> tuple[float, Tensor]:
    """Take a step. Returns the norm of the gradient before clipping, and the change (B, T) of each
    token's log p."""
    metrics, columns = update_with_change(model, optimizer, rollouts, weight, s)
    return float(metrics["gradient_norm"] or 0), columns["change"]


def scale_of(optimizer: AdamW, norm: float, s: SimpleNamespace) -> list[Tensor]:
    """The numbers by which AdamW's last step multiplied the batch's gradient."""
    mean_keeps, square_keeps = optimizer.BETAS
    scales = []
    clip = min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm else 1.0
    for p in optimizer.param_groups[0]["params"]:
        count, _, square = (optimizer.state[p][name] for name in STATE)
        root = square.div(1 - square_keeps ** count).sqrt_().add_(optimizer.EPSILON)
        of_gradient = clip * (1 - mean_keeps) / (1 - mean_keeps ** count)
        scales.append(s.learning_rate * of_gradient / root)
    return scales


def gradient(model: Qwen2, rollouts: Rollouts, weight: Tensor, s: SimpleNamespace) -> list[Tensor]:
    """The gradient of that part of the batch's loss that comes from the tokens with a weight."""
    still = torch.optim.SGD(model.parameters(), 0.0)
    still.zero_grad()
    update(model, still, rollouts, weight, s)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def inner(one: Iterable[Tensor], two: Iterable[Tensor]) -> float:
    return sum(torch.dot(a.flatten(), b.flatten()).item() for a, b in zip(one, two))
