"""What moved each token of one answer: its change in a step, split by groups of tokens.

tools/helpers/moved.py splits the change of one token among all tokens of the batch, which takes a
pass over the batch. For all tokens of an answer it is turned around: the gradients of a group are
added up, and this sum, scaled as AdamW scaled it, is a direction D in which the group moves the
parameters. To first order the group's part of a token's change is <g, D>, and one pass over the
answer has it for all of its tokens. The numbers are the same, and take the time of a few updates.
"""
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from analysis.account import with_default_settings
from analysis.runs import Run
from analysis.tokens import StepRecord
from engine.rollouts import Rollouts
from harness.load import read_trained
from harness.read_record import read_credit
from harness.record import find_folder
from tools.helpers.moved import (MEASURED, SUM, about_step, derivatives_of_loss, gradient,
                                 gradient_of_token, load_adamw, movers, scale_of,
                                 slopes, step, trained, with_settings)
from tools.helpers.same_model import refuse_other_model
from train import drop_unfinished

ITSELF, REST, EARLIER = "itself", "the rest of its answer", "earlier steps"


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


def trained_batch(run: Run, sampled_by: str, record: StepRecord,
                  tokenizer: Tokenizer) -> TrainedBatch:
    s, folder = with_default_settings(run["config"]), find_folder(sampled_by)
    refuse_other_model(read_trained(s, folder), record, run["config"], folder)
    rollouts = read_credit(run["folder"], record.step, tokenizer)
    weight = torch.zeros_like(rollouts.advantage)
    weight[rollouts.mask] = torch.from_numpy(record.tokens["weight"]).float()
    if s.drop_unfinished:
        rollouts = drop_unfinished(rollouts)
    trainer = folder / "trainer" / "state.safetensors" if record.step > 1 else None
    return TrainedBatch(folder, trainer, rollouts, weight, s)


def moved_in_words(batch: TrainedBatch, b: int, length: int) -> list[str | None]:
    """For each of the tokens of answer b what moved it in AdamW's step; None where that is not
    known, as in an answer that the step left out."""
    is_known = batch.trainer is None or batch.trainer.exists()
    if not batch.rollouts.mask[b].any() or not batch.has_update or not is_known:
        return length * [None]
    parts, s = parts_of_answer(batch, b), batch.settings
    of_run = f". {about_step(s)}" if s.epochs > 1 or s.kl else ""  # else the step is the run's
    found: list[str | None] = []
    for t in range(length):
        values = {name: part[t].item() for name, part in parts.items()}
        in_sum, measured = values.pop(SUM), values.pop(MEASURED)
        named = ", ".join(f"{name} {value:+.5f}" for name, value in values.items())
        found.append(f"to first order: {named}. Their sum is {in_sum:+.5f}, and AdamW's step "
                     f"changed log p by {measured:+.5f}{of_run}")
    return found


def parts_of_answer(batch: TrainedBatch, b: int) -> dict[str, Tensor]:
    """By group of tokens its part (T,) of the change of each token of answer b in AdamW's step; at
    the end their sum, and the change that was measured by taking the step."""
    rollouts, weight = batch.rollouts, batch.weight
    s = with_settings(batch.settings, epochs=1, kl=0.0)
    model = read_trained(s, batch.folder)
    before = [p.detach().clone() for p in trained(model)]
    optimizer = load_adamw(model, batch.trainer, s)
    norm, change = step(model, optimizer, rollouts, weight, s)
    scale = scale_of(optimizer, norm, s)
    moved_by = [p.detach() - old for p, old in zip(trained(model), before)]
    del optimizer, before
    model = read_trained(s, batch.folder)
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
    for t in range(length):
        if of_loss[t]:
            own = gradient_of_token(model, rollouts, b, t, s)
            squares = sum((of * g.square()).sum() for of, g in zip(scale, own))
            parts[ITSELF][t] = -of_loss[t] * squares
    parts[REST] = parts[REST] - parts[ITSELF]
    total = part_along(moved_by)
    if batch.trainer or s.weight_decay:
        parts[EARLIER] = total - torch.stack(list(parts.values())).sum(0)
    return {**parts, SUM: total, MEASURED: change[b, :length]}
