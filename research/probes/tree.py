"""The tree of a model's answers: every answer that is not too unlikely, and the value V of each of
its prefixes.

Beneath a prompt stand the tokens that may come first, beneath each of these the tokens that may
follow, and so on to the answers. The tree is walked breadth first. A prefix whose probability is
below a limit is left out, with everything that would follow.

    prefix      probability      reward    V       bounds of V    credit of its last token
    (prompt)    1                          3/8     0.3 to 0.5
    a           0.5                        3/4     0.6 to 0.8      3/8
    a b         0.3, ends here   1         1                       1/4
    a c         0.1, ends here   0         0                      -3/4
    d           0.4, ends here   0         0                      -3/8

Here 0.2 of the probability is not listed, 0.1 of it beneath a. V is the mean reward of the listed
answers that begin with the prefix: 0.3 / 0.4 at a. The bounds count what is not listed once as the
least reward, and once as the greatest: (0.3 + 0.1) / 0.5 = 0.8. Credit is V with the token minus V
before it. Over the listed answers, the mean of the sum of squared credits is the reward's variance,
here 15/64.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from credit.monte_carlo import Prefix
from engine.errors import UserError
from engine.fused import FusedQwen2
from engine.policy import Policy, encode_prompts, stop_ids
from engine.rollouts import Problem, Rollouts
from qwen2_model import attention

ROWS = 64          # of logits at once
LEAST_LISTED = 0.5  # of the probability of a problem's answers


@dataclass(frozen=True)
class Path:
    """Tokens in a row, with the facts of each: its log-prob, and sum p^2 of its alternatives."""
    ids: tuple[int, ...] = ()
    log_prob: tuple[float, ...] = ()
    collision: tuple[float, ...] = ()

    def then(self, token: int, log_prob: float, collision: float) -> "Path":
        return Path((*self.ids, token), (*self.log_prob, log_prob), (*self.collision, collision))


class Branches:
    """The states of a model at the ends of all prefixes of one length. The prompt is computed once,
    and what the prefixes have read is kept: each level computes one token of each."""

    def __init__(self, model: FusedQwen2, prompt: list[int]):
        self.model, self.position = model, len(prompt)
        self.prompt: list[Tensor] = []  # of each layer its keys and values (1, 2 K, P, head_dim)
        self.read: list[Tensor] = []    # and those of the prefixes' tokens (R, 2 K, t, head_dim)
        positions = torch.arange(len(prompt), device=model.embeddings.device)
        ids = torch.tensor(prompt, device=positions.device)
        self.states = model.hidden(ids, positions, self.attend_to_prompt)[-1:]  # (R, D)

    def attend_to_prompt(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        rows = kv.transpose(0, 1)[None]
        self.prompt.append(rows)
        self.read.append(rows[:, :, :0])
        keys, values = rows.chunk(2, 1)
        attended = attention(q.transpose(0, 1)[None], keys, values)  # (1, H, P, head_dim)
        return attended[0].transpose(0, 1).unflatten(1, (keys.shape[1], -1))

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """Go on from the prefixes `parents` with one token each."""

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self.read[layer] = torch.cat([self.read[layer][parents], kv[:, :, None]], 2)
            prompt = self.prompt[layer].expand(len(kv), -1, -1, -1)
            keys, values = torch.cat([prompt, self.read[layer]], 2).chunk(2, 1)
            by_key_head = q.unflatten(1, (keys.shape[1], -1))  # (R, K, H / K, head_dim)
            return F.scaled_dot_product_attention(by_key_head, keys, values)

        positions = torch.full_like(tokens, self.position)
        self.states = self.model.hidden(tokens, positions, attend)
        self.position += 1

    def next_tokens(self, paths: list[Path], least: float) -> list[tuple[int, Path]]:
        """Every path one token longer that has at least this probability, with its parent."""
        longer = []
        for start in range(0, len(paths), ROWS):
            logits = self.model.logits(self.states[start:start + ROWS])
            log_probs = logits.float().log_softmax(-1)                # (ROWS, V)
            collision = log_probs.exp().square().sum(-1).tolist()
            path_log_probs = [sum(path.log_prob) for path in paths[start:start + ROWS]]
            so_far = torch.tensor(path_log_probs, dtype=torch.float64, device=log_probs.device)
            is_likely = so_far[:, None] + log_probs >= math.log(least)
            positions = is_likely.nonzero().tolist()
            for (row, token), log_prob in zip(positions, log_probs[is_likely].tolist()):
                parent = start + row
                path = paths[parent].then(token, log_prob, collision[row])
                longer.append((parent, path))
        return longer


@torch.inference_mode()
def walk(model: FusedQwen2, prompt: list[int], ends: tuple[int, ...], most_tokens: int,
         least: float) -> list[Path]:
    """Every answer that has at least this probability: it ends with one of `ends`, or is cut off
    at `most_tokens`."""
    branches = Branches(model, prompt)
    paths, answers = [Path()], []
    for length in range(1, most_tokens + 1):
        longer = branches.next_tokens(paths, least)
        paths, parents, last_tokens = [], [], []
        for parent, path in longer:
            last = path.ids[-1]
            if last in ends or length == most_tokens:
                answers.append(path)
            else:
                paths.append(path)
                parents.append(parent)
                last_tokens.append(last)
        if probability_of(answers + paths) < LEAST_LISTED:
            raise UserError(f"after {length} tokens, the prefixes with a probability of {least:g} "
                            f"or more have together less than {LEAST_LISTED:.0%} of the "
                            "probability. Such answers have too many paths to be listed. A task "
                            "with shorter answers has fewer paths, and a smaller --above lists "
                            "more of them")
        if not paths:
            break
        device = branches.states.device
        branches.grow(torch.tensor(parents, device=device),
                      torch.tensor(last_tokens, device=device))
    return answers


def probability_of(paths: list[Path]) -> float:
    return math.fsum(math.exp(sum(path.log_prob)) for path in paths)


@dataclass
class Listing:
    """The listed answers to some problems. T is the length of the longest."""
    rollouts: Rollouts          # every listed answer once, scored; `group` is its problem
    probability: np.ndarray     # (n,) of each answer
    share: np.ndarray           # (n,) the same, among the listed answers to its problem
    value: dict[Prefix, float]  # V of each prefix (problem, its tokens)
    bounds: dict[Prefix, tuple[float, float]]

    @property
    def problem(self) -> np.ndarray:
        return self.rollouts.group.cpu().numpy()

    @property
    def listed(self) -> np.ndarray:
        """(Q,) the probability of each problem's listed answers."""
        return np.bincount(self.problem, self.probability)

    @property
    def variance(self) -> np.ndarray:
        """(Q,) the variance of the reward over each problem's listed answers."""
        reward = self.rollouts.reward.double().cpu().numpy()
        mean = np.bincount(self.problem, self.share * reward)
        square = np.bincount(self.problem, self.share * reward ** 2)
        return square - mean ** 2

    def credit(self, rollouts: Rollouts) -> Tensor:
        """(B, T) the credit of the tokens of any answers to these problems: V after the token minus
        V before it. NaN where a prefix is not listed, 0 beyond the mask."""
        credit = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
        for row, (group, ids) in enumerate(zip(*rollouts.groups_and_ids)):
            values = torch.full((len(ids) + 1,), math.nan, dtype=torch.float64)
            for t in range(len(values)):
                prefix = group, tuple(ids[:t])
                if prefix in self.value:
                    values[t] = self.value[prefix]
            credit[row, :len(ids)] = values.diff()
        return credit


def list_answers(policy: Policy, problems: Sequence[Problem], least: float,
                 progress: Callable[[float], None] = lambda share: None) -> Listing:
    """Every answer to these problems with at least this probability."""
    prompts = encode_prompts(policy.tokenizer, policy.task, problems)
    ends, most = stop_ids(policy.model, policy.tokenizer), policy.settings.max_new_tokens
    model = FusedQwen2(policy.model, longest=max(map(len, prompts)) + most)
    found = []
    for number, prompt in enumerate(prompts):
        found.append(walk(model, prompt, ends, most, least))
        progress((number + 1) / len(prompts))
    rollouts = listed_rollouts(problems, prompts, found, ends)
    return with_prefix_values(policy.score(rollouts))


def listed_rollouts(problems: Sequence[Problem], prompts: list[list[int]], found: list[list[Path]],
                    ends: tuple[int, ...]) -> Rollouts:
    """The answers to each problem, as if each had been sampled once."""
    group, ids, log_probs, collisions, finished = [], [], [], [], []
    for number, paths in enumerate(found):
        for path in paths:
            group.append(number)
            ids.append(torch.tensor(path.ids))
            log_probs.append(torch.tensor(path.log_prob, dtype=torch.float64))
            collisions.append(torch.tensor(path.collision, dtype=torch.float64))
            finished.append(path.ids[-1] in ends)
    log_prob = pad_sequence(log_probs, batch_first=True)  # (n, T)
    lengths = torch.tensor(list(map(len, ids)))
    return Rollouts(
        problems=problems,
        prompt_ids=prompts,
        group=torch.tensor(group, dtype=torch.long),
        ids=pad_sequence(ids, batch_first=True),
        mask=torch.arange(log_prob.shape[1]) < lengths[:, None],
        finished=torch.tensor(finished),
        log_prob=log_prob,
        entropy=torch.full_like(log_prob, math.nan),
        collision=pad_sequence(collisions, batch_first=True))


def with_prefix_values(rollouts: Rollouts) -> Listing:
    """V of every prefix of the listed answers, and its bounds. They take a reward to be between 0
    and 1, or between the least and the greatest that are listed. So of a reward of up to 1.1 the
    upper bound can be too low, where no listed answer has 1.1."""
    reward = rollouts.reward.tolist()
    reached = rollouts.log_prob.double().cumsum(1).exp()  # (n, T) with each token
    before = F.pad(reached, (1, 0), value=1.0).tolist()   # (n, T + 1)
    listed: dict[Prefix, float] = {}  # of each prefix: the probability of its answers
    rewarded: dict[Prefix, float] = {}  # the sum of their rewards, each times its probability
    reach: dict[Prefix, float] = {}   # its own probability
    groups, probability = [], []      # of each answer
    for row, (group, ids) in enumerate(zip(*rollouts.groups_and_ids)):
        of_answer = before[row][len(ids)]
        groups.append(group)
        probability.append(of_answer)
        for t in range(len(ids) + 1):
            prefix = group, tuple(ids[:t])
            listed[prefix] = listed.get(prefix, 0.0) + of_answer
            rewarded[prefix] = rewarded.get(prefix, 0.0) + of_answer * reward[row]
            reach[prefix] = before[row][t]

    worst, best = min([0.0, *reward]), max([1.0, *reward])
    values, bounds = {}, {}
    for prefix, p in reach.items():
        values[prefix] = rewarded[prefix] / listed[prefix]
        not_listed = max(0.0, p - listed[prefix])
        low = rewarded[prefix] + not_listed * worst
        high = rewarded[prefix] + not_listed * best
        bounds[prefix] = low / p, high / p
    share = [p / listed[group, ()] for p, group in zip(probability, groups)]
    return Listing(rollouts, np.array(probability), np.array(share), values, bounds)
