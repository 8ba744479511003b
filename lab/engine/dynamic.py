"""Dynamic sampling (2503.14476): problems are drawn until enough groups have answers with different
rewards (--dynamic_sampling).

A group whose answers all have the same reward has no gradient. So more problems are drawn, a batch
at a time, and groups without spread are replaced by groups with spread. What was drawn and thrown
away was paid for all the same: `extra_answers` and `extra_tokens` of metrics.jsonl count it.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """One batch of several that have one group each."""
    def frame(name: str) -> torch.Tensor:
        return pad_sequence([row for part in parts for row in getattr(part, name)], True)

    written = frame("written")
    used = int(written.sum(1).max())
    sizes = torch.tensor([len(part.ids) for part in parts])
    group = torch.arange(len(parts)).repeat_interleave(sizes).to(written.device)
    scores = {}
    for name in parts[0].scores:
        scores[name] = torch.cat([part.scores[name] for part in parts])
    names = ["ids", "mask", "log_prob", "entropy", "collision", "section", "kind"]
    if parts[0].of_turns.dim():
        names.append("of_turns")
    frames: dict[str, Any] = {name: frame(name)[:, :used] for name in names}
    return Rollouts(
        problems=[part.problems[0] for part in parts],
        prompt_ids=[part.prompt_ids[0] for part in parts], group=group, written=written[:, :used],
        finished=torch.cat([part.finished for part in parts]), scores=scores,
        answers=[answer for part in parts for answer in part.answers],
        turns=[turns for part in parts for turns in part.turns],
        texts=[texts for part in parts for texts in part.texts], **frames)
