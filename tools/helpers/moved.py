"""What moved this token? Its change in a step, split by the tokens that made it.

To first order a step that adds D to the parameters changes log p of a token by <g, D>, where g is
its gradient. A plain step is a sum over all tokens j of the batch, and so is this change:

    D = rate * sum_j A_j c w_j m_j g_j / N        part of j: rate * A_j c w_j m_j <g, g_j> / N

AdamW multiplies each number of the gradient by a scale, in a first step by nearly
rate / abs(gradient). With this scale S the part of token j is A_j c w_j m_j <S g, g_j> / N.

How are the <S g, g_j> of all tokens found without a gradient for each? <S g, g_j> says how fast
log p of token j changes when the parameters move along S g. Torch's forward mode computes that for
all tokens of the batch in one pass: every number carries its derivative along S g with it.

What the parts leave out:

    the scale      it is held as it was, although the whole batch has made it, and token j with it.
                   It includes the clipping
    earlier steps  AdamW also steps along the mean gradient of earlier batches. This is a row of its
                   own, and belongs to no token. Weight decay (--weight_decay) is in the same row
    curvature      the change is also measured, by taking the step. What differs from the sum is
                   what the first order leaves out
    other terms    a KL term, and epochs after the first
"""
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from analysis.tables import Row, Table, by_row
from engine.forward import lay_out, micro_batches
from engine.model_folder import opened
from engine.optimizer import (STATE, AdamW, Optimizer, load_optimizer_tensors,
                              trained_parameters)
from engine.rollouts import Rollouts, double
from engine.tokens import token_bytes
from grpo import length_scaling, policy_loss, update, update_with_change
from harness.load import read_trained
from qwen2_model import Qwen2

LARGEST_PARTS = 3  # so many are named in a sentence
MOST_TOKENS = 5    # so many of the batch's tokens get a line
TOKENS_BEFORE = 4  # so many are shown before such a token
TINY = 5e-6        # a smaller change is printed as 0.00000
SUM, MEASURED = "sum", "measured"  # the two last rows
ADAMW = "AdamW's step"  # a column
FAR = 0.5  # a sum is far from what was measured if they differ by this share of the larger one
NOTE = (
    "Each number is a change of the token's log-prob. The first rows are what other tokens, and "
    "the token itself, contributed to it, to first order. A better answer is one with an advantage "
    "above 0, and all others count as worse. The last row was measured, by taking the step. It "
    "differs from the sum by what the first order leaves out. A group can move the token against "
    "the sign of its own advantages, because all tokens share the model's parameters")
NOTE_ON_STEPS = (
    "The plain step is one of gradient descent: it goes straight against the gradient of the "
    "batch's loss. It is made as long as AdamW's first step, which moves each parameter by about "
    "the learning rate. {adamw}")
NOTE_WITHOUT_PLAIN = (
    "A plain step of gradient descent, as long as AdamW's, has no column here. The sum of its "
    "parts ({sum:+.5f}) is far from the change that it makes ({measured:+.5f}), so they would say "
    "little. {adamw}")
NOTES_ON_TOKENS = [
    "Each row is one token, and the last column its contribution to the change. Over all tokens of "
    "the batch the contributions add up to the rows of the table above",
    "They are of first order too. The factor by which AdamW divides each parameter's gradient, and "
    "the clipping, are held as the whole batch made them. The momentum of earlier steps belongs to "
    "no token"]


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
               s: SimpleNamespace, tokenizer: Tokenizer, b: int, t: int) -> tuple[Table, Table]:
    """The change of token t of answer b, in the step that trained on these rollouts: by groups of
    tokens, and the single tokens that contributed most. `folder` has the model that sampled them,
    `trainer` the file of its optimizer's state: None before the first step."""
    about_adamw = about_step(s)
    s = with_settings(s, epochs=1, kl=0.0)
    model, scale, after, measured = read_trained(s, folder), [], [], []
    if trainer is None or trainer.exists():
        optimizer = load_adamw(model, trainer, s)
        norm, change = step(model, optimizer, rollouts, weight, s)
        scale, measured = scale_of(optimizer, norm, s), [change[b, t].item()]
        after = [p.detach() for p in trained(model)]
        del optimizer
        model = read_trained(s, folder)
    s = with_settings(s, max_grad_norm=0.0)
    own = gradient_of_token(model, rollouts, b, t, s)
    moved_by = (a - p.detach() for a, p in zip(after, trained(model)))
    total, after = inner(own, moved_by), []
    by_plain = contributions(model, own, rollouts, weight, s)  # of a step with the rate 1
    by_adamw = torch.zeros_like(by_plain)
    if scale:
        scale = [of.mul_(g) for of, g in zip(scale, own)]
        by_adamw = contributions(model, scale, rollouts, weight, s)
    del own, scale
    whole = gradient(model, rollouts, weight, s)
    rate = s.learning_rate * (sum(g.numel() for g in whole) / inner(whole, whole)) ** 0.5
    by_plain *= rate
    _, change = step(model, torch.optim.SGD(trained(model), rate), rollouts, weight, s)

    rows: list[Row] = []
    for name, mask in movers(rollouts, b, t).items():
        of_name = mask & rollouts.mask
        rows.append([name, int(of_name.sum()), total_of(by_plain[of_name]),
                     total_of(by_adamw[of_name])])
    if measured and (trainer or s.weight_decay):
        also = ["earlier steps"] * bool(trainer) + ["weight decay"] * bool(s.weight_decay)
        rows.append([" and ".join(also), None, None, total - total_of(by_adamw)])
    rows.append([SUM, None, total_of(by_plain), total])
    rows.append([MEASURED, None, change[b, t].item(), *measured])
    formats = {"moved by": "", "tokens": ",d", "plain step": "+.5f"}
    if measured:  # AdamW's step is not known where its state was not kept
        formats[ADAMW] = "+.5f"
    rows = [row[:len(formats)] for row in rows]
    heading = [*formats][-1]
    if not measured:
        about_adamw = ("AdamW's step is not shown, because what AdamW keeps of earlier steps is "
                       "only in the two newest checkpoints of a run")
    about_steps = NOTE_ON_STEPS.format(adamw=about_adamw)
    [in_sum, of_step] = (row[2] for row in rows[-2:])  # the plain step's
    if measured and is_far(in_sum, of_step):
        rows = [[*row[:2], *row[3:]] for row in rows]
        del formats["plain step"]
        about_steps = NOTE_WITHOUT_PLAIN.format(sum=in_sum, measured=of_step, adamw=about_adamw)
    notes = [NOTE, about_steps, *about_sums(rows, [*formats]), about_largest(rows[:-2], heading)]
    groups = Table("moved", "What moved the token", by_row(formats, rows), "", notes)
    contribution = by_adamw if measured else by_plain
    return groups, tokens_that_moved(contribution, heading, rollouts, tokenizer, b, t)


def measured_change(moved: Table) -> float | None:
    """How much AdamW's step changed the token's log-prob, by the table of what moved it."""
    change = dict(zip(moved.columns, moved.rows[-1])).get(ADAMW)
    return change if isinstance(change, float) else None


def about_step(s: SimpleNamespace) -> str:
    """What AdamW's step is, beside that of the run."""
    said = "AdamW's step is that of the run"
    if s.epochs > 1:
        said = f"AdamW's step is the first of the {s.epochs} that the run took on this batch"
    return said + (", without the KL term" if s.kl else "")


def contributions(model: Qwen2, direction: list[Tensor], rollouts: Rollouts, weight: Tensor,
                  s: SimpleNamespace) -> Tensor:
    """(B, T): the part of each token, A c w m <direction, its gradient> / N."""
    of_loss = derivatives_of_loss(rollouts, weight, s)
    rows = of_loss.any(1).nonzero().squeeze(1)
    return -of_loss * slopes(model, direction, rollouts, rows, s.micro_batch)


def derivatives_of_loss(rollouts: Rollouts, weight: Tensor, s: SimpleNamespace) -> Tensor:
    """(B, T): the derivative of the loss by each token's log-prob, -A c w m / N."""
    N = int(rollouts.mask.sum())
    log_prob = torch.zeros_like(weight, requires_grad=True)
    scaled_weight = weight * length_scaling(rollouts.length, s.loss_norm, s.max_new_tokens)
    loss = policy_loss(log_prob, rollouts.advantage, scaled_weight, rollouts.mask, N)
    [of_loss] = torch.autograd.grad(loss, log_prob)
    return of_loss


def slopes(model: Qwen2, direction: list[Tensor], rollouts: Rollouts, rows: Tensor,
           micro_batch: int) -> Tensor:
    """(B, T): how fast the log-probs of these rows' tokens change when the parameters move in this
    direction, which is <direction, gradient>; 0 in other rows. It is computed in one forward pass,
    which needs two numbers where another needs one, and keeps nothing for a backward pass."""
    # no other kernel of torch's attention has a forward mode
    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        moving = {}
        for (name, p), moves in zip(trained_parameters(model).items(), direction, strict=True):
            moving[f"model.{name}"] = forward_ad.make_dual(p.detach(), moves)
        log_prob = functional_call(LogProbs(model), moving, (rollouts, rows, micro_batch))
        return forward_ad.unpack_dual(log_prob).tangent


class LogProbs(nn.Module):
    """The log-probs (B, T) of some rows' tokens; 0 in other rows.

    It is a module, because torch puts other parameters only into a module. It uses torch's own
    operations, because the one of training (engine/forward.py: TokenLogProbs) has no forward mode.
    """

    def __init__(self, model: Qwen2):
        super().__init__()
        self.model = model

    def forward(self, rollouts: Rollouts, rows: Tensor, micro_batch: int) -> Tensor:
        log_prob = torch.zeros_like(rollouts.log_prob)
        for part in micro_batches(rollouts, rows, micro_batch):
            ids, shared, predicts = lay_out(rollouts, part)
            hidden = self.model.model(ids, shared.positions, shared)  # (N, D)
            for row, states in zip(part.tolist(), predicts):  # one answer's logits at a time
                length = int(rollouts.length[row])
                log_probs = self.model.logits(hidden[states[:length]]).log_softmax(-1)
                targets = rollouts.ids[row, :length, None]
                log_prob[row, :length] = log_probs.gather(1, targets).squeeze(1)
        return log_prob


def tokens_that_moved(contribution: Tensor, heading: str, rollouts: Rollouts, tokenizer: Tokenizer,
                      b: int, t: int) -> Table:
    """The other tokens of the batch with the largest contributions, up or down."""
    others = contribution.clone()
    others[b, t] = 0.0
    groups = movers(rollouts, b, t)
    formats = {"answer": "d", "token": "d", "text, [the token]": "", "one of": "",
               "advantage": "+.4g", heading: "+.5f"}
    rows: list[Row] = []
    for cell in others.abs().flatten().topk(min(MOST_TOKENS, others.numel())).indices.tolist():
        answer, position = divmod(cell, others.shape[1])
        value = others[answer, position].item()
        if value == 0:
            continue
        first = max(0, position - TOKENS_BEFORE)
        *before, piece = token_bytes(tokenizer, rollouts.ids[answer, first:position + 1].tolist())
        text = f"{b''.join(before).decode(errors='replace')}[{piece.decode(errors='replace')}]"
        [group] = [name for name, mask in groups.items() if mask[answer, position]]
        rows.append([answer, position, repr(text), group,
                     rollouts.advantage[answer, position].item(), value])
    up, down = total_of(others.clamp(min=0)), total_of(others.clamp(max=0))
    number = int(rollouts.mask.sum()) - 1
    share = sum(abs(row[-1]) for row in rows) / max(up - down, TINY)
    notes = [*NOTES_ON_TOKENS, f"All {number:,} other tokens of the batch raised its log-prob by "
             f"{up:.5f} and lowered it by {-down:.5f}. The tokens in the table make up "
             f"{share:.0%} of these two"]
    title = "The other tokens of the batch that moved it most"
    return Table("moved_tokens", title, by_row(formats, rows), "", notes)


def total_of(values: Tensor) -> float:
    return double(values).sum().item()


def about_sums(rows: list[Row], headings: list[str]) -> list[str]:
    """A sentence for each step whose parts do not add up to what was measured."""
    said = []
    in_sum, measured = (row[2:] for row in rows[-2:])
    for heading, first_order, whole in zip(headings[2:], in_sum, measured):
        if is_far(first_order, whole):
            said.append(f"In the column {heading} the sum ({first_order:+.5f}) is far from what "
                        f"was measured ({whole:+.5f}). So its parts say little about the change: "
                        "for a first-order calculation this step is too long")
    return said


def is_far(in_sum: float, measured: float) -> bool:
    return abs(in_sum - measured) > max(FAR * max(abs(in_sum), abs(measured)), TINY)


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


def trained(model: Qwen2) -> list[nn.Parameter]:
    return list(trained_parameters(model).values())


def load_adamw(model: Qwen2, trainer: Path | None, s: SimpleNamespace) -> AdamW:
    optimizer = AdamW(trained(model), s.learning_rate, s.weight_decay)
    if trainer:
        with opened(trainer) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        load_optimizer_tensors(optimizer, trained_parameters(model), tensors)
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
    still = torch.optim.SGD(trained(model), 0.0)
    still.zero_grad()
    update(model, still, rollouts, weight, s)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(model)]


def inner(one: Iterable[Tensor], two: Iterable[Tensor]) -> float:
    return sum(torch.dot(a.flatten(), b.flatten()).item() for a, b in zip(one, two))
