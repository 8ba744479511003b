"""The planted task by the whole model, token by token: what contexts.py is held against."""
import itertools
from dataclasses import replace

import torch

from engine.forward import response_log_probs
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from engine.sampler import Distribution
from grpo import grpo
from research.probes.planted import PROMPT, SYMBOLS, PlantedPolicy


@torch.no_grad()
def draw_answers(policy: PlantedPolicy, count: int, step: int) -> torch.Tensor:
    """(B, T), token by token."""
    generator = torch.Generator().manual_seed(derived_seed("planted", policy.seed, step))
    uniform = torch.rand(count, policy.length, generator=generator)
    ids = torch.tensor(PROMPT).expand(count, 1)
    for t in range(policy.length):
        drawn = Distribution(policy.model(ids)[:, -1]).pick(uniform[:, t])
        ids = torch.cat([ids, drawn[:, None]], 1)
    return ids[:, 1:]


def sample_planted(policy: PlantedPolicy, step: int, Q: int, G: int) -> Rollouts:
    """G answers to each of Q problems, which are all the same, with plain GRPO's advantages and the
    true credit."""
    ids = draw_answers(policy, Q * G, step)
    reward = (ids[:, policy.keys] == torch.tensor(policy.right)).float().mean(1)
    mask, nothing = torch.ones_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
    rollouts = Rollouts(
        problems=[None] * Q, prompt_ids=[PROMPT] * Q, group=torch.arange(Q * G) // G, step=step,
        ids=ids, mask=mask, finished=mask[:, 0], log_prob=nothing, entropy=nothing,
        collision=nothing, scores={"reward": reward})
    with torch.no_grad():
        log_prob = response_log_probs(policy.model, rollouts, torch.arange(Q * G))
    rollouts = replace(rollouts, log_prob=log_prob)
    return replace(rollouts, advantage=grpo(rollouts), true_credit=exact_credit(policy, rollouts))


@torch.no_grad()
def worths(policy: PlantedPolicy) -> dict[tuple[int, ...], float]:
    """What an answer is worth whose first keys are these: V of every prefix, by its keys alone."""
    symbols, K = range(len(SYMBOLS)), len(policy.keys)
    paths = list(itertools.product(symbols, repeat=K - 1))  # all keys but the last
    probability = key_probabilities(policy, paths)
    worth = {path: sum(a == b for a, b in zip(path, policy.right)) / K
             for path in itertools.product(symbols, repeat=K)}
    for j in reversed(range(K)):
        for i, path in enumerate(paths):
            if not any(path[j:]):  # one path of those that begin alike
                prefix, chances = path[:j], probability[i][j]
                worth[prefix] = sum(p * worth[(*prefix, v)] for v, p in enumerate(chances))
    return worth


def key_probabilities(policy: PlantedPolicy, paths: list[tuple[int, ...]]) -> list:
    """(paths, keys, V): the probability of each symbol at each key, behind the keys of the path."""
    ids = torch.zeros(len(paths), policy.keys[-1] + 1, dtype=torch.long)
    ids[:, 0] = PROMPT[0]
    ids[:, [1 + t for t in policy.keys[:-1]]] = torch.tensor(paths).view(len(paths), -1)
    hidden = policy.model.model(ids)[:, policy.keys]
    return policy.model.logits(hidden).double().softmax(-1).tolist()


def exact_credit(policy: PlantedPolicy, rollouts: Rollouts) -> torch.Tensor:
    """(B, T): V after the token minus V before, which is 0 between the keys."""
    worth, credit = worths(policy), torch.zeros_like(rollouts.log_prob)
    for b, row in enumerate(rollouts.ids[:, policy.keys].tolist()):
        for j, t in enumerate(policy.keys):
            credit[b, t] = worth[tuple(row[:j + 1])] - worth[tuple(row[:j])]
    return credit
