"""Values of prefixes from fresh answers that go on from there."""
import torch

from engine import processes
from engine.forward import LOGITS_AT_ONCE
from engine.rollouts import Rollouts, stop_ids
from engine.sampler import Distribution, generate


@torch.no_grad()
def continuation_rewards(lab, rollouts: Rollouts, prefixes: list[tuple[int, tuple[int, ...]]], k: int,
                         progress=lambda share: None) -> tuple[torch.Tensor, int]:
    """Rewards (n, k) of k fresh answers that go on from each (question, first tokens), and the tokens that took.

    A prefix that has ended, or that has reached the limit, is worth its own reward. Random numbers follow from
    the batch's generator alone.
    """
    s, ends = lab.settings, set(stop_ids(lab.model, lab.tokenizer))
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    rewards, spent = torch.zeros(len(prefixes), k), 0
    room = [0 if ids and ids[-1] in ends else s.max_new_tokens - len(ids) for _, ids in prefixes]
    over = [i for i, left in enumerate(room) if left <= 0]
    open_ones = sorted((i for i in range(len(prefixes)) if room[i] > 0), key=lambda i: room[i])  # like lengths together
    size = max(1, s.questions * s.answers // k)  # as many rows as a batch of training
    for start in range(0, len(open_ones), size)[processes.rank()::processes.count()]:
        progress(start / len(open_ones))
        part = open_ones[start:start + size]
        fresh = generate(lab.model, [rollouts.prompt_ids[prefixes[i][0]] + list(prefixes[i][1]) for i in part], answers=k,
                         max_new_tokens=[room[i] for i in part], temperature=s.temperature, seed=seed + start, stop_ids=tuple(ends))
        lengths = fresh.mask.sum(1).tolist()
        spent += sum(lengths)
        for row, (ids, n) in enumerate(zip(fresh.tokens.tolist(), lengths)):
            g, prefix = prefixes[part[row // k]]
            rewards[part[row // k], row % k] = lab.reward_of(rollouts.problems[g], (*prefix, *ids[:n]))
    counted = torch.tensor(float(spent))
    processes.add_up(rewards, counted)
    for i in over:
        rewards[i] = lab.reward_of(rollouts.problems[prefixes[i][0]], prefixes[i][1])
    return rewards.to(rollouts.mask.device), int(counted)


@torch.no_grad()
def other_tokens(lab, rollouts: Rollouts, at: torch.Tensor) -> list[int]:
    """For each place (answer, index) of `at` (n, 2): a token from the policy without the one that stands there."""
    uniform, found = torch.rand(len(at), generator=rollouts.generator).to(at.device), []
    chunk = max(1, LOGITS_AT_ONCE // lab.model.config.vocab_size)
    for (row, t), u in zip((part.T for part in at.split(chunk)), uniform.split(chunk)):
        logits = lab.model.logits(rollouts.hidden[row, t]).float() / lab.settings.temperature
        logits.scatter_(1, rollouts.ids[row, t][:, None], float("-inf"))
        found += Distribution(logits).pick(u).tolist()
    return found


def prefix_values(lab, rollouts: Rollouts, cuts: list[list[int]], k: int) -> tuple[list[list[float]], int]:
    """Monte Carlo values of answer b's first cuts[b][j] tokens. Equal prefixes of one question share theirs."""
    wanted = {}
    rows = [row[:n] for row, n in zip(rollouts.ids.tolist(), rollouts.length.tolist())]
    groups = rollouts.group.tolist()
    for g, row, at in zip(groups, rows, cuts):
        for n in at:
            wanted.setdefault((g, tuple(row[:n])), len(wanted))
    if not wanted:
        return [[] for _ in cuts], 0
    rewards, spent = continuation_rewards(lab, rollouts, list(wanted), k)
    mean = rewards.mean(1).tolist()
    return [[mean[wanted[g, tuple(row[:n])]] for n in at] for g, row, at in zip(groups, rows, cuts)], spent


class vine:
    """Monte Carlo values: a segment's advantage is the value after it minus the value before it, the last segment ends
    with the reward itself. Unbiased for any number of continuations; the noise is about 2 p (1 - p) / k."""

    def __init__(self, lab):
        self.k, self.every, self.metrics = lab.settings.values_k, lab.settings.values_every, {}

    def __call__(self, rollouts: Rollouts, lab) -> torch.Tensor:
        cuts = [segment_starts(texts, self.every) for texts in rollouts.texts]
        values, spent = prefix_values(lab, rollouts, cuts, self.k)
        self.metrics = {"extra_tokens": spent}
        advantage = torch.zeros_like(rollouts.log_prob)
        for b, (starts, value, length) in enumerate(zip(cuts, values, rollouts.length.tolist())):
            ends, after = [*starts[1:], length], [*value[1:], rollouts.reward[b].item()]
            for start, end, before, then in zip(starts, ends, value, after):
                advantage[b, start:end] = then - before
        return advantage


def segment_starts(texts: list[str], every: str) -> list[int]:
    """0 and then every so many tokens, or after each token with a new line in it."""
    if every != "line":
        return list(range(0, len(texts), int(every)))
    return [0] + [t + 1 for t, text in enumerate(texts[:-1]) if "\n" in text]
