"""Values of prefixes by Monte Carlo: V(prefix) is the mean reward of k fresh answers from there."""
import typing

import torch

from engine import processes
from engine.errors import UserError
from engine.finite import refuse_undefined
from engine.flags import Flag, shortened
from engine.forward import LOGITS_AT_ONCE
from engine.registry import advantage
from engine.rollouts import Rollouts, stop_ids
from engine.sampler import Distribution, Generation, generate

Prefix = tuple[int, tuple[int, ...]]  # a problem, and the first tokens of an answer to it
K = typing.Annotated[int, Flag(9, "fresh continuations behind each value", least=1, most=10_000)]
Every = typing.Annotated[str, Flag("line", "a value at every new line, or every so many tokens")]


@advantage
class vine:
    """Monte Carlo values (VinePPO, 2410.01679): a segment's advantage is the value after it minus
    the value before it.

    The last segment ends with the reward itself. Unbiased for any number of continuations; the
    variance is about 2 p (1 - p) / k for a reward of 1 with probability p.
    """

    def __init__(self, lab, *, values_k: K = 9, values_every: Every = "line"):
        if values_every != "line" and not is_count(values_every):
            raise UserError(f"--values_every {shortened(values_every)} should be line or a number "
                            "of tokens, at least 1")
        self.k, self.every, self.metrics = values_k, values_every, {}

    def __call__(self, rollouts: Rollouts, lab) -> torch.Tensor:
        cuts = [segment_starts(texts, self.every) for texts in rollouts.texts]
        values, spent = prefix_values(lab, rollouts, cuts, self.k)
        self.metrics = {"extra_tokens": spent}
        advantage, lengths = torch.zeros_like(rollouts.log_prob), rollouts.length.tolist()
        for row, (starts, before) in enumerate(zip(cuts, values)):
            ends = [*starts[1:], lengths[row]]
            after = [*before[1:], rollouts.reward[row].item()]
            for start, end, worth_before, worth_after in zip(starts, ends, before, after):
                advantage[row, start:end] = worth_after - worth_before
        return advantage


def is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def segment_starts(texts: list[str], every: str) -> list[int]:
    """0 and then every so many tokens, or after each token with a new line in it."""
    if every != "line":
        return list(range(0, len(texts), int(every)))
    return [0] + [t + 1 for t, text in enumerate(texts[:-1]) if "\n" in text]


def prefix_values(lab, rollouts: Rollouts, cuts: list[list[int]],
                  k: int) -> tuple[list[list[float]], int]:
    """Values of answer b's first cuts[b][j] tokens, and how many tokens were sampled for them.
    Equal prefixes of one problem share theirs."""
    answers = [ids[:length] for ids, length in zip(rollouts.ids.tolist(), rollouts.length.tolist())]
    prefixes = []  # of each answer
    for group, answer, at in zip(rollouts.group.tolist(), answers, cuts):
        prefixes.append([(group, tuple(answer[:n])) for n in at])
    distinct = list(dict.fromkeys(prefix for of_answer in prefixes for prefix in of_answer))
    if not distinct:
        return [[] for _ in cuts], 0
    rewards, spent = continuation_rewards(lab, rollouts, distinct, k)
    value = dict(zip(distinct, rewards.mean(1).tolist()))
    return [[value[prefix] for prefix in of_answer] for of_answer in prefixes], spent


@torch.no_grad()
def continuation_rewards(lab, rollouts: Rollouts, prefixes: list[Prefix], k: int,
                         progress=lambda share: None) -> tuple[torch.Tensor, int]:
    """Rewards (n, k) of k fresh answers that go on from each prefix, and how many tokens they took.

    A prefix that has ended, or that has reached the limit, is worth its own reward. Random numbers
    follow from the batch's generator alone.
    """
    s, ends = lab.settings, stop_ids(lab.model, lab.tokenizer)
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    room = [tokens_left(prefix, s.max_new_tokens, ends) for _, prefix in prefixes]
    unfinished = [i for i, left in enumerate(room) if left > 0]
    unfinished.sort(key=lambda i: room[i])  # like lengths together
    size = max(1, s.questions * s.answers // k)  # as many rows as a batch of training
    starts = range(0, len(unfinished), size)[processes.rank()::processes.count()]
    rewards, spent = torch.zeros(len(prefixes), k), 0
    for start in starts:
        progress(start / len(unfinished))
        part = unfinished[start:start + size]
        fresh = generate(lab.model, [prompt_of(rollouts, prefixes[i]) for i in part], answers=k,
                         max_new_tokens=[room[i] for i in part], temperature=s.temperature,
                         seed=seed + start, stop_ids=ends)
        rewards[part] = rewards_of(lab, rollouts, [prefixes[i] for i in part], fresh, k)
        if not fresh.log_prob.isfinite().all():
            rewards[part] = float("nan")  # so that all processes see it, below
        spent += int(fresh.mask.sum())
    total = torch.tensor(float(spent))
    processes.add_up(rewards, total)
    refuse_undefined("the model's probabilities are", rewards)
    for i, (question, prefix) in enumerate(prefixes):
        if room[i] <= 0:
            rewards[i] = lab.reward_of(rollouts.problems[question], prefix)
    return rewards.to(rollouts.mask.device), int(total)


def tokens_left(prefix: tuple[int, ...], limit: int, ends: tuple[int, ...]) -> int:
    """How many tokens may follow these: none, where the last one ends the answer."""
    return 0 if prefix and prefix[-1] in ends else limit - len(prefix)


def prompt_of(rollouts: Rollouts, prefix: Prefix) -> list[int]:
    question, ids = prefix
    return rollouts.prompt_ids[question] + list(ids)


def rewards_of(lab, rollouts: Rollouts, prefixes: list[Prefix], fresh: Generation,
               k: int) -> torch.Tensor:
    """(n, k): the reward of each prefix with each of its k continuations."""
    rewards, lengths = [], fresh.mask.sum(1).tolist()
    for row, (ids, length) in enumerate(zip(fresh.tokens.tolist(), lengths)):
        question, prefix = prefixes[row // k]
        whole = (*prefix, *ids[:length])
        rewards.append(lab.reward_of(rollouts.problems[question], whole))
    return torch.tensor(rewards, dtype=torch.float32).view(-1, k)


@torch.no_grad()
def other_tokens(lab, rollouts: Rollouts, places: torch.Tensor) -> list[int]:
    """For each place (answer, index) of (n, 2): a token from the policy without the one there."""
    uniform = torch.rand(len(places), generator=rollouts.generator).to(places.device)
    others = []
    chunk = max(1, LOGITS_AT_ONCE // lab.model.config.vocab_size)
    for part, u in zip(places.split(chunk), uniform.split(chunk)):
        row, t = part.T
        logits = lab.model.logits(rollouts.hidden[row, t]).float() / lab.settings.temperature
        logits.scatter_(1, rollouts.ids[row, t][:, None], float("-inf"))
        others += Distribution(logits).pick(u).tolist()
    return others
