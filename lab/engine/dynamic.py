"""Dynamic sampling (2503.14476): problems are drawn until enough groups have answers with different
rewards (--dynamic_sampling).

A group whose answers all have the same reward has no gradient. So more problems are drawn, a batch
at a time, and groups without spread are replaced by groups with spread. What was drawn and thrown
away was paid for all the same: `extra_answers` and `extra_tokens` of metrics.jsonl count it.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from lab.engine.methods import Metrics
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Problem, Rollouts


@dataclass
class DynamicSampling:
    """Sampling of a step from at most `most` batches of problems."""
    policy: Policy
    most: int
    drawn: Metrics = field(default_factory=dict)  # what was drawn beyond the last batch

    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts:
        wanted = len(problems)
        drawn = [self.policy.ask(problems, answers, seed)]
        living = [groups_with_spread(drawn[0])]
        while len(drawn) < self.most and sum(map(len, living)) < wanted:
            more = self.policy.task.training_problems(seed, len(drawn), wanted)
            drawn.append(self.policy.ask(more, answers, derived_seed("more", seed, len(drawn))))
            living.append(groups_with_spread(drawn[-1]))
        chosen = [(batch, group) for batch, groups in enumerate(living) for group in groups]
        # if they are too few, the first batch fills up, without a gradient
        chosen += [(0, group) for group in range(wanted) if group not in living[0]]
        kept = [drawn[batch].of_problems(range(group, group + 1))
                for batch, group in sorted(chosen[:wanted])]
        result = joined(kept)
        tokens = sum(int(batch.mask.sum()) for batch in drawn)
        self.drawn["extra_answers"] = answers * wanted * (len(drawn) - 1)
        self.drawn["extra_tokens"] = tokens - int(result.mask.sum())
        return result


def groups_with_spread(rollouts: Rollouts) -> list[int]:
    """The groups whose answers have different rewards."""
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)
    return (reward != reward[:, :1]).any(1).nonzero().squeeze(1).tolist()


def joined(parts: list[Rollouts]) -> Rollouts:
    """One batch of several that have one group each: of every field, the values of all parts one
    after the other. What all share (step, generator, forward) is left out."""
    longest = max(int(part.written.sum(1).max()) for part in parts)

    def column(values: list[torch.Tensor]) -> torch.Tensor:
        if values[0].dim() == 2:  # (B, T)
            return pad_sequence([row for value in values for row in value], True)[:, :longest]
        return torch.cat(values)

    known: dict[str, Any] = {}
    for name in (one.name for one in fields(Rollouts)):
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], torch.Tensor) and values[0].dim():
            known[name] = column(values)
        elif isinstance(values[0], list | tuple):
            known[name] = [one for value in values for one in value]
    known["scores"] = {name: column([part.scores[name] for part in parts])
                       for name in parts[0].scores}
    sizes = torch.tensor([len(part.ids) for part in parts])
    group = torch.arange(len(parts)).repeat_interleave(sizes)
    return Rollouts(**known | {"group": group.to(parts[0].ids.device)})
