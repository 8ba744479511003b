"""What a method is told in a synthetic task, or not told, by nothing but the task's definition.

A gain there says something of a text only if the method went by something that a text has, too. So
a method is asked again about one batch in which the kinds of tokens, or their sections, are others.
If its numbers change, it goes by them.
"""
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from engine.rollouts import Rollouts
from engine.tokens import SECTIONS, WORD
from lab.dial.arms import ANSWERS, QUESTIONS, Batch, listed
from lab.dial.task import SyntheticTask, TaskSpec

TASK = "128/12"
BY_KIND = (
    "{name} tells kinds of tokens apart. In these tasks an operator decides and a word does "
    "not, by definition. So the method is told which tokens decide, and its gain would say "
    "nothing about a text.")
BY_SECTION = (
    "But {name} tells the sections of an answer apart, and in these tasks all tokens are in one. "
    "So its gain says nothing about what it does with sections.")
BY_HIDDEN_STATES = (
    "But {name} reads hidden states, and in these tasks all tokens that decide nothing have the "
    "same one. In a text they are not as easy to tell from the others.")


@dataclass(frozen=True)
class ChangedBatch(Batch):
    """A batch whose rollouts have some other columns."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)  # (T,) each
    asked: list[bool] = field(default_factory=list)  # an entry each time hidden states are read

    def rollouts(self, s: int) -> Rollouts:
        usual = super().rollouts(s)
        changed: dict[str, Any] = {}
        for name, column in self.columns.items():
            changed[name] = column.byte().expand_as(usual.ids)
        return replace(usual, **changed, forward=SimpleNamespace(look=self.look))

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        self.asked.append(True)
        found: dict[str, torch.Tensor] = super().rollouts(0).forward.look(rollouts, attention)
        return found


def told_by_definition(name: str, flags: dict | None = None) -> list[str]:
    """A sentence for each thing that the method goes by and that is a definition there."""
    usual, asked = coefficients(name, flags)
    position = torch.arange(TaskSpec.read(TASK).tokens)
    words, all_sections = torch.full_like(position, WORD), position % len(SECTIONS)
    found = []
    if not torch.equal(coefficients(name, flags, kind=words)[0], usual):
        found.append(BY_KIND)
    elif not torch.equal(coefficients(name, flags, section=all_sections)[0], usual):
        found.append(BY_SECTION)
    if asked:
        found.append(BY_HIDDEN_STATES)
    return [sentence.format(name=name) for sentence in found]


def coefficients(name: str, flags: dict | None,
                 **columns: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """Weight times advantage (1, B, T) of the method in a first batch with these columns; and an
    entry for each time that it has read hidden states."""
    task = SyntheticTask(TaskSpec.read(TASK), [0])
    hidden, log_prob = task.forward(task.parameters)
    uniform = torch.rand(1, QUESTIONS * ANSWERS, task.spec.tokens,
                         generator=torch.Generator().manual_seed(0))
    batch = ChangedBatch(task, task.sample(log_prob, uniform), hidden, log_prob,
                         task.after_keys(log_prob), 1, columns)
    return listed(name, flags or {})(task)(batch), batch.asked
