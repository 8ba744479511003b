"""Values of prefixes by Monte Carlo: V(prefix) is the mean reward of k continuations.

The common beginnings of prefixes are computed once. With p for the prompt of their problem and

    prefixes     a b     a b c     a b c d     a e

the model reads two sequences, p a b c d and p a e. The first three prefixes end at positions within
the first sequence: a continuation of a b sees p a b and no more (`starts` of
lab/engine/sampler.py).
"""
import itertools
import re
import typing
from collections.abc import Callable
from functools import cache

import torch

from lab.engine.methods import Metrics, advantage
from lab.engine.errors import UserError, refuse_undefined
from lab.engine.log_probs import LOGITS_AT_ONCE
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.sampler import Generation, Start, generate
from lab.engine.declared import Flag
from qwen2_model import stop_tokens

Prefix = tuple[int, tuple[int, ...]]  # a problem, and the first tokens of an answer to it
Positions = list[tuple[int, int]]      # (answer, index) of single tokens
K = typing.Annotated[int, Flag(9, "how many answers are sampled for each value", least=1,
                               most=10_000)]
# The most continuations that are sampled at a time. Twice as many are a few percent faster on a CPU
# and take twice the memory; half as many are slower by a sixth.
ROWS_AT_ONCE = 1024
# The most bytes of cache for them. A model of 0.5B has 12 MB for each row of 512 tokens.
CACHE_AT_ONCE = 2 ** 30
Every = typing.Annotated[str, Flag("line", "line: a value is estimated at every new line. turn: "
                                           "before every turn of the model. A number: every so "
                                           "many tokens")]


@advantage
class vine:
    """An answer is cut into segments, and all tokens of a segment get its advantage: V after the
    segment minus V before it. V is the mean reward of answers that are sampled from there on
    (VinePPO, arXiv 2410.01679).

    After the last segment V is the reward itself. The advantage is unbiased, whatever values_k is.
    If the reward is 1 with probability p and otherwise 0, the variance of the advantage is about
    2 p (1 - p) / values_k.
    """

    def __init__(self, policy: Policy, *, values_k: K = 9, values_every: Every = "line"):
        if not re.fullmatch("line|turn|[1-9][0-9]{0,8}", values_every):
            raise UserError(f"--values_every {values_every} should be line, turn or a number "
                            "of tokens, at least 1")
        self.k, self.every = values_k, values_every
        self.metrics: Metrics = {}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        if self.every == "turn":
            cuts = [begins.nonzero().squeeze(1).tolist() for begins in rollouts.begins_turn]
        else:
            cuts = [segment_starts(texts, self.every) for texts in rollouts.texts]
        values, self.metrics = prefix_values(policy, rollouts, cuts, self.k)
        advantage = torch.zeros_like(rollouts.log_prob)
        for row, (starts, before) in enumerate(zip(cuts, values)):
            ends = [*starts[1:], len(rollouts.texts[row])]
            after = [*before[1:], rollouts.reward[row].item()]
            for start, end, worth_before, worth_after in zip(starts, ends, before, after):
                advantage[row, start:end] = worth_after - worth_before
        return advantage


def segment_starts(texts: list[str], every: str) -> list[int]:
    """The indices at which segments begin: 0, and then every so many tokens, or after each token
    with a new line in it."""
    if every != "line":
        return list(range(0, len(texts), int(every)))
    return [0] + [t + 1 for t, text in enumerate(texts[:-1]) if "\n" in text]


def prefix_values(policy: Policy, rollouts: Rollouts, cuts: list[list[int]],
                  k: int) -> tuple[list[list[float]], Metrics]:
    """The value of the first cuts[b][j] tokens of each answer b, and how much was sampled for it.
    Equal prefixes of a problem have one value."""
    prefixes: list[list[Prefix]] = []  # of each answer
    for group, answer, lengths in zip(*rollouts.groups_and_ids, cuts):
        prefixes.append([(group, tuple(answer[:length])) for length in lengths])
    distinct = list(dict.fromkeys(itertools.chain(*prefixes)))
    if not distinct:
        return [[] for _ in cuts], {}
    rewards, spent = continuation_rewards(policy, rollouts, distinct, k)
    value = dict(zip(distinct, rewards.mean(1).tolist()))
    values = []
    for of_answer in prefixes:
        values.append([value[prefix] for prefix in of_answer])
    return values, spent


@torch.no_grad()
def continuation_rewards(policy: Policy, rollouts: Rollouts, prefixes: list[Prefix], k: int,
                         progress: Callable[[float], None] = lambda share: None,
                         without: list[int] | None = None) -> tuple[torch.Tensor, Metrics]:
    """The rewards (n, k) of k continuations of each prefix, and the price: how many answers were
    sampled and scored, and their tokens.

    `without` has for each prefix a token that may not come next, -1 for none. The value of a prefix
    that has ended, or has reached the limit, is its own reward. With an environment an answer has
    ended only if there is no reply to it, and a reply is not sampled but completed. Random numbers
    depend on the batch's generator alone.
    """
    known = policy.known_values(rollouts, prefixes, without)
    if known is not None:
        return known[:, None].expand(-1, k).clone(), {}
    ends = stop_tokens(policy.model, policy.tokenizer)
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    prefixes, has_ended = with_replies(policy, rollouts, prefixes, ends)
    tokens_left = []  # how many tokens may follow
    for (_, ids), is_whole in zip(prefixes, has_ended):
        tokens_left.append(0 if is_whole else policy.settings.max_new_tokens - len(ids))
    rewards, spent = torch.zeros(len(prefixes) * k), 0
    cells: list[int] = []  # the indices in `rewards` of the answers that have to be sampled
    for i in sort_by_length(prefixes):
        if tokens_left[i] > 0:
            cells += range(i * k, i * k + k)

    @cache  # many continuations are the same
    def reward_of(answer: Prefix) -> float:
        group, ids = answer
        return policy.reward_of(rollouts.problems[group], ids)

    size = rows_at_once(policy)
    for start in range(0, len(cells), size):
        progress(start / len(cells))
        part = cells[start:start + size]
        started = [prefixes[cell // k] for cell in part]
        excluded = [-1 if without is None else without[cell // k] for cell in part]
        fresh = continue_from(policy, rollouts, started, excluded, ends, seed=seed + start)
        refuse_undefined("the model's probabilities are", fresh.log_prob)
        scores = [reward_of(answer) for answer in whole_answers(started, fresh)]
        rewards[part] = torch.tensor(scores, dtype=torch.float32)
        spent += int(fresh.mask.sum())
    rewards = rewards.view(-1, k)
    for i, prefix in enumerate(prefixes):
        if tokens_left[i] <= 0:
            rewards[i] = reward_of(prefix)
    price: Metrics = {"extra_tokens": spent, "extra_answers": len(cells)}
    return rewards.to(rollouts.mask.device), price


def with_replies(policy: Policy, rollouts: Rollouts, prefixes: list[Prefix],
                 ends: tuple[int, ...]) -> tuple[list[Prefix], list[bool]]:
    """The prefixes, each with the rest of the reply if it ends in one or just before it; and which
    of them are whole answers."""
    if not (environment := policy.environment):
        return prefixes, [bool(ids) and ids[-1] in ends for _, ids in prefixes]
    longer, has_ended = [], []
    for group, ids in prefixes:
        whole, _, is_whole = environment.completed(rollouts.problems[group], ids)
        longer.append((group, tuple(whole)))
        has_ended.append(is_whole)
    return longer, has_ended


def rows_at_once(policy: Policy) -> int:
    """The number of continuations that are sampled at a time: so many that their keys and values
    fit into CACHE_AT_ONCE, even if all of them reach the limit, and their logits into
    LOGITS_AT_ONCE."""
    config, dtype = policy.model.config, policy.model.compute_dtype
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    row: int = numbers * dtype.itemsize * policy.settings.max_new_tokens
    return max(1, min(ROWS_AT_ONCE, CACHE_AT_ONCE // row, LOGITS_AT_ONCE // config.vocab_size))


def continue_from(policy: Policy, rollouts: Rollouts, prefixes: list[Prefix], excluded: list[int],
                  ends: tuple[int, ...], seed: int) -> Generation:
    """Sample a continuation of each of these prefixes; what they share is computed once."""
    s, sequence_of = policy.settings, sequences(prefixes)
    distinct = dict.fromkeys(sequence_of.values())  # the sequences, each once
    number = {sequence: i for i, sequence in enumerate(distinct)}
    prompts = [[*rollouts.prompt_ids[group], *ids] for group, ids in distinct]
    starts, limits = [], []
    for prefix, token in zip(prefixes, excluded):
        group, ids = prefix
        seen = len(rollouts.prompt_ids[group]) + len(ids)
        starts.append(Start(number[sequence_of[prefix]], seen, token))
        limits.append(s.max_new_tokens - len(ids))
    reply = None
    if environment := policy.environment:
        before = [environment.drawn_in(rollouts.problems[group], ids) for group, ids in prefixes]

        def reply(row: int, ids: list[int], drawn: list[bool]) -> list[int] | None:
            group, first = prefixes[row]
            return environment.reply(rollouts.problems[group], [*first, *ids],
                                     [*before[row], *drawn])
    return generate(policy.model, prompts, starts=starts, max_new_tokens=limits, stop_ids=ends,
                    temperature=s.temperature, seed=seed, reply=reply)


def whole_answers(prefixes: list[Prefix], fresh: Generation) -> list[Prefix]:
    """Each prefix together with its continuation."""
    tokens, lengths = fresh.ids.tolist(), fresh.written.sum(1).tolist()
    answers = []
    for row, (group, ids) in enumerate(prefixes):
        answers.append((group, (*ids, *tokens[row][:lengths[row]])))
    return answers


def sort_by_length(prefixes: list[Prefix]) -> list[int]:
    """The numbers of the prefixes, ordered so that those of one sequence are side by side and short
    sequences come first. Then rows of a batch share what they can and need little padding."""
    sequence_of = sequences(prefixes)
    longest = [sequence_of[prefix] for prefix in prefixes]
    return sorted(range(len(longest)), key=lambda i: (len(longest[i][1]), longest[i]))


def sequences(prefixes: list[Prefix]) -> dict[Prefix, Prefix]:
    """The sequence in which each prefix is computed: the longest of the prefixes that begin with
    it."""
    sequence_of: dict[Prefix, Prefix] = {}
    longest: Prefix = (-1, ())
    for prefix in sorted(set(prefixes), reverse=True):  # longer ones come before their beginnings
        group, ids = longest
        if group != prefix[0] or ids[:len(prefix[1])] != prefix[1]:
            longest = prefix
        sequence_of[prefix] = longest
    return sequence_of
