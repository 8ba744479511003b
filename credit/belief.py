"""Potential differences, the potential being the model's own P(right answer) if it answered now.

After the first t tokens of an answer the task's end of thinking is forced, and Phi_t is the total
probability of the right answers that the task lists (`right_answers`); nothing is sampled.

    A_t = Phi_{t+1} - Phi_t   for tokens of the think section
    A_t = R - Phi_n           for all tokens after its n, R being the reward

So a token's advantage is what it adds to the potential; the answer gets the rest of the reward.

    answer       <think> first 3 * 5 = 15, ...
    forced       <think> first 3 * 5 = </think>\\n<answer>       Phi = P( ( 3 * 5 ) + 7</answer>)
                                                                   + P( ( 5 * 3 ) + 7</answer>) ...

Delta Belief (2602.12342, known here from its public page) takes the difference of logarithms, turn
by turn, and adds its positive part to the reward.

The forced text is cut into tokens by itself, which may be another cut than that of the whole.
Right answers in other spellings than those listed do not count.
"""
import typing

import numpy as np
import torch

from credit.monte_carlo import Prefix
from engine import processes
from engine.choices import advantage
from engine.errors import UserError
from engine.forward import frozen_log_probs
from engine.rollouts import Rollouts
from engine.tokens import THINK, encode
from harness.flags import Flag

Every = typing.Annotated[int, Flag(8, "a belief every so many tokens, linear in between", least=1,
                                   most=1_000_000)]


@advantage
class belief:
    """Change of the model's P(right answer, if it answered now) by a token of the think section;
    later tokens get the rest of the reward.

    For tasks that list their right answers. 0.1 of Countdown's reward is for the format: that part
    is in the rest.
    """

    def __init__(self, policy, *, belief_every: Every = 8):
        if not hasattr(policy.task, "right_answers"):
            raise UserError(f"--advantage belief needs a task that lists its right answers, and "
                            f"--task {policy.settings.task} has no method right_answers "
                            "(docs/your_own_task.md)")
        self.every, self.metrics = belief_every, {}

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        thoughts = thought_lengths(rollouts)
        prefixes = {}  # of each answer that is this process's, one for each cut
        for b in rollouts.rows_of_rank().tolist():
            group, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
            prefixes[b] = [(group, tuple(ids[:n])) for n in self.cuts(thoughts[b])]
        known = beliefs(policy, rollouts, list(dict.fromkeys(sum(prefixes.values(), []))))
        Phi = torch.zeros(len(thoughts), rollouts.mask.shape[1] + 1)
        for b, cut_off in prefixes.items():
            n, at_cuts = thoughts[b], [known[prefix] for prefix in cut_off]
            Phi[b, :n + 1] = torch.tensor(np.interp(range(n + 1), self.cuts(n), at_cuts))
        processes.all_reduce(Phi)
        at_end = Phi.gather(1, torch.tensor(thoughts)[:, None])
        self.metrics = {"belief": at_end.mean().item()}
        return credit_of_beliefs(Phi.to(rollouts.mask.device), thoughts, rollouts)

    def cuts(self, thought: int) -> list[int]:
        """After how many tokens of a thought the model is asked; always at its end."""
        return [*range(0, thought, self.every), thought]


def credit_of_beliefs(Phi: torch.Tensor, thoughts: list[int], rollouts: Rollouts) -> torch.Tensor:
    """(B, T) from Phi (B, T + 1), of which the first thoughts[b] + 1 matter in row b."""
    credit = Phi.diff()
    for b, n in enumerate(thoughts):
        credit[b, n:] = rollouts.reward[b] - Phi[b, n]
    return credit * rollouts.mask


def thought_lengths(rollouts: Rollouts) -> list[int]:
    """The tokens of each answer up to the last of its think section; one token is always left
    for the rest of the reward."""
    is_thought = (rollouts.section == THINK) & rollouts.mask
    number = torch.arange(1, is_thought.shape[1] + 1, device=is_thought.device)
    last = (is_thought * number).amax(1)
    return torch.minimum(last, (rollouts.length - 1).clamp(min=0)).tolist()


def beliefs(policy, rollouts: Rollouts, prefixes: list[Prefix]) -> dict[Prefix, float]:
    """The probability of a right answer after each prefix. A prefix is computed once for all the
    right answers that may follow: they are scored as a batch of answers to it."""
    forced = {}
    for group in {group for group, _ in prefixes}:
        forced[group] = forced_texts(policy, rollouts.problems[group])
    prompts, number_of, right = [], [], []
    for number, (group, ids) in enumerate(prefixes):
        opening, answers = forced[group]
        prompts.append([*rollouts.prompt_ids[group], *ids, *opening])
        number_of += [number] * len(answers)
        right += answers
    total = torch.zeros(len(prefixes), device=rollouts.mask.device)
    batch = batch_of(prompts, number_of, right, total.device)
    rows = torch.arange(len(right), device=total.device)  # maybe none: see engine/sharded.py
    log_prob = frozen_log_probs(policy.model, batch, rows, policy.settings.micro_batch)
    total.index_add_(0, batch.group, log_prob.sum(1).exp())
    return dict(zip(prefixes, total.tolist()))


def forced_texts(policy, problem) -> tuple[list[int], list[list[int]]]:
    """The ids of what ends the thinking on a problem, and of each right answer after it."""
    opening, right = policy.task.right_answers(problem)
    whose = f"a right answer to the problem {policy.task.show(problem)}"
    ids = [encode(policy.tokenizer, text, f"{text!r}, {whose}") for text in (opening, *right)]
    return ids[0], ids[1:]


def batch_of(prompts: list[list[int]], group: list[int], answers: list[list[int]],
             device) -> Rollouts:
    """These answers as a batch of which nothing is known but its tokens."""
    longest = max((len(answer) for answer in answers), default=1)
    padded = [answer + [0] * (longest - len(answer)) for answer in answers]
    ids = torch.tensor(padded, dtype=torch.long, device=device).view(-1, longest)
    length = torch.tensor([len(answer) for answer in answers], device=device)
    mask = torch.arange(longest, device=device) < length[:, None]
    unknown = torch.zeros(ids.shape, device=device)
    group = torch.tensor(group, dtype=torch.long, device=device)
    return Rollouts([], prompts, group, ids, mask, mask[:, 0], unknown, unknown, unknown)
