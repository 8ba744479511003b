"""What moved the tokens of an answer? Their change in a step, split by groups of tokens.

To first order a step that adds D to the parameters changes log p of a token by <g, D>, where g is
its gradient. AdamW multiplies each number of the batch's gradient by a scale S, in a first step by
nearly rate / abs(gradient). The batch's gradient is a sum over all of its tokens, so it can be
split into groups of tokens, and each group moves the parameters in a direction of its own:

    D of a group = S * sum of A_j c w_j m_j g_j / N over its tokens j

<g, D> says how fast log p changes when the parameters move along D. Torch's forward mode computes
it for all tokens of an answer in one pass: every number carries its derivative along D with it.

What the parts leave out:

    the scale      it is held as it was, although the whole batch has made it. It includes the
                   clipping
    earlier steps  AdamW also steps along the mean gradient of earlier batches. This is a row of its
                   own, and belongs to no token. Weight decay (--weight_decay) is in the same row
    curvature      the change is also measured, by taking the step. What differs from the sum is
                   what the first order leaves out
    other terms    a KL term, and epochs after the first
"""
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from analysis.account import with_default_settings
from analysis.runs import Run
from analysis.tables import Row, Table, by_row
from analysis.tokens import StepRecord
from engine.errors import UserError
from engine.forward import lay_out, micro_batches
from engine.model_folder import opened, read_model_folder
from engine.optimizer import (STATE, AdamW, Optimizer, load_optimizer_tensors,
                              trained_parameters)
from engine.rollouts import Rollouts
from grpo import length_scaling, policy_loss, update, update_with_change
from harness.read_record import read_credit
from harness.record import find_folder
from qwen2_model import Qwen2
from tools.helpers.same_model import refuse_other_model
from train import drop_unfinished

ITSELF, REST, EARLIER = "itself", "the rest of its answer", "earlier steps"
SUM, MEASURED = "sum", "measured"  # the two last rows
TINY = 5e-6  # a smaller change is printed as 0.00000
FAR = 0.5  # a sum is far from what was measured if they differ by this share of the larger one
NOTE = (
    "Each number is a change of the token's log-prob. The first rows are what other tokens, and "
    "the token itself, contributed to it, to first order. A better answer is one with an advantage "
    "above 0, and all others count as worse. The last row was measured, by taking the step. It "
    "differs from the sum by what the first order leaves out. A group can move the token against "
    "the sign of its own advantages, because all tokens share the model's parameters")


@dataclass
class TrainedBatch:
    """The answers that a recorded step trained on, and what the step began with."""
    folder: Path           # of the model that sampled them
    trainer: Path | None   # AdamW's state before the step, as a file; None before the first step
    rollouts: Rollouts
    weight: Tensor         # (B, T)
    settings: SimpleNamespace

    @property
    def has_update(self) -> bool:
        return bool((self.rollouts.advantage * self.weight).any())

    def unknown(self, b: int) -> str:
        """Why it is not known what moved the tokens of answer b; empty where it is known."""
        if not self.rollouts.mask[b].any():
            return ("What moved the token is not known: the step left this answer out, and did "
                    "not measure its change.")
        if not self.has_update and not self.settings.kl:
            return "No token of the batch moved it: the step made no update."
        if not self.has_update:
            return ("No token's advantage moved it: only the KL term did, and what AdamW keeps of "
                    "earlier steps.")
        if self.trainer and not self.trainer.exists():
            return ("What moved the token is not known, because what AdamW keeps of earlier steps "
                    "is only in the two newest checkpoints of a run.")
        return ""


def trained_batch(run: Run, sampled_by: str, record: StepRecord,
                  tokenizer: Tokenizer) -> TrainedBatch:
    s, folder = with_default_settings(run["config"]), find_folder(sampled_by)
    if s.lora:
        raise UserError("what moved a token is not computed for runs with --lora")
    refuse_other_model(read_model_folder(folder), record, run["config"], folder)
    rollouts = read_credit(run["folder"], record.step, tokenizer)
    weight = torch.zeros_like(rollouts.advantage)
    weight[rollouts.mask] = torch.from_numpy(record.tokens["weight"]).float()
    if s.drop_unfinished:
        rollouts = drop_unfinished(rollouts)
    trainer = folder / "trainer" / "state.safetensors" if record.step > 1 else None
    return TrainedBatch(folder, trainer, rollouts, weight, s)


def moved_table(batch: TrainedBatch, b: int, t: int) -> Table:
    """How much each group of tokens moved token t of answer b, in AdamW's step."""
    parts = parts_of_answer(batch, b, range(t, t + 1))
    sizes = {name: int((mask & batch.rollouts.mask).sum())
             for name, mask in movers(batch.rollouts, b, t).items()}
    rows: list[Row] = [[name, sizes.get(name), part[t].item()] for name, part in parts.items()]
    notes = [f"{NOTE}. {about_step(batch.settings)}"]
    in_sum, measured = parts[SUM][t].item(), parts[MEASURED][t].item()
    if is_far(in_sum, measured):
        notes.append(f"The sum ({in_sum:+.5f}) is far from what was measured ({measured:+.5f}). So "
                     "its parts say little about the change: for a first-order calculation this "
                     "step is too long")
    formats = {"moved by": "", "tokens": ",d", "AdamW's step": "+.5f"}
    return Table("moved", "What moved the token", by_row(formats, rows), "", notes)


def moved_in_words(batch: TrainedBatch, b: int, length: int) -> list[str | None]:
    """For each of the tokens of answer b what moved it in AdamW's step; None where that is not
    known, as in an answer that the step left out."""
    if batch.unknown(b):
        return length * [None]
    parts, s = parts_of_answer(batch, b, range(length)), batch.settings
    of_run = f". {about_step(s)}" if s.epochs > 1 or s.kl else ""  # else the step is the run's
    found: list[str | None] = []
    for t in range(length):
        values = {name: part[t].item() for name, part in parts.items()}
        in_sum, measured = values.pop(SUM), values.pop(MEASURED)
        named = ", ".join(f"{name} {value:+.5f}" for name, value in values.items())
        found.append(f"to first order: {named}. Their sum is {in_sum:+.5f}, and AdamW's step "
                     f"changed log p by {measured:+.5f}{of_run}")
    return found


def movers(rollouts: Rollouts, b: int, t: int) -> dict[str, Tensor]:
    """Masks (B, T) of the groups of tokens that may move token t of answer b. Every token of the
    batch is in exactly one of them."""
    row, itself = torch.zeros(2, *rollouts.mask.shape, dtype=torch.bool)
    row[b] = True
    itself[b, t] = True
    group = (rollouts.group == rollouts.group[b])[:, None] & ~row
    better = rollouts.advantage > 0
    return {ITSELF: itself,
            REST: row & ~itself,
            "its group's better answers": group & better,
            "its group's worse answers": group & ~better,
            "other problems": ~(group | row)}


def parts_of_answer(batch: TrainedBatch, b: int, tokens: range) -> dict[str, Tensor]:
    """By group of tokens its part (T,) of the change of each token of answer b in AdamW's step; at
    the end their sum, and the change that was measured by taking the step. Only for the given
    `tokens` the token itself is told from the rest of its answer, which takes a backward pass for
    each."""
    rollouts, weight = batch.rollouts, batch.weight
    s = with_settings(batch.settings, epochs=1, kl=0.0)
    model = read_model_folder(batch.folder)
    before = [p.detach().clone() for p in trained(model)]
    optimizer = load_adamw(model, batch.trainer, s)
    norm, change = step(model, optimizer, rollouts, weight, s)
    scale = scale_of(optimizer, norm, s)
    moved_by = [p.detach() - old for p, old in zip(trained(model), before)]
    del optimizer, before
    model = read_model_folder(batch.folder)
    s = with_settings(s, max_grad_norm=0.0)
    length, rows = int(rollouts.length[b]), torch.tensor([b])

    def part_along(direction: list[Tensor]) -> Tensor:
        return slopes(model, direction, rollouts, rows, s.micro_batch)[b, :length].detach()

    parts = {ITSELF: torch.zeros(length), REST: torch.zeros(length)}
    groups = movers(rollouts, b, 0)
    groups[REST] = groups[REST] | groups.pop(ITSELF)  # the whole answer, for now
    for name, mask in groups.items():
        of_group = gradient(model, rollouts, weight * mask, s)
        parts[name] = part_along([-of * g for of, g in zip(scale, of_group)])
    of_loss = derivatives_of_loss(rollouts, weight, s)[b]
    for t in tokens:
        if of_loss[t]:
            own = gradient_of_token(model, rollouts, b, t, s)
            squares = sum((of * g.square()).sum() for of, g in zip(scale, own))
            parts[ITSELF][t] = -of_loss[t] * squares
    parts[REST] = parts[REST] - parts[ITSELF]
    total = part_along(moved_by)
    also = [EARLIER] * bool(batch.trainer) + ["weight decay"] * bool(s.weight_decay)
    if also:
        parts[" and ".join(also)] = total - torch.stack(list(parts.values())).sum(0)
    return {**parts, SUM: total, MEASURED: change[b, :length]}


def about_step(s: SimpleNamespace) -> str:
    """What AdamW's step is, beside that of the run."""
    said = "AdamW's step is that of the run"
    if s.epochs > 1:
        said = f"AdamW's step is the first of the {s.epochs} that the run took on this batch"
    return said + (", without the KL term" if s.kl else "")


def is_far(in_sum: float, measured: float) -> bool:
    return abs(in_sum - measured) > max(FAR * max(abs(in_sum), abs(measured)), TINY)


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
