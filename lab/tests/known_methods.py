"""Advantages of which it is known beforehand whether they are right on average: thirteen that are
broken on purpose, and six that are right though they look unusual."""

import torch

from grpo import rloo, to_every_token
from lab.credit.turns import turn_mean


# ------------------------------------------------------------------- broken


def wrong_sign(rollouts):
    return -rloo(rollouts)


def broken_beyond_the_first_group(rollouts):
    """Right in the first group. In the others an answer below the mean is never pushed down."""
    is_first = (rollouts.group == 0)[:, None]
    return torch.where(is_first, rloo(rollouts), rloo(rollouts).clamp(min=0))


def drops_the_best_of_four(rollouts):
    result = rloo(rollouts)
    for group in rollouts.group.unique():
        rows = (rollouts.group == group).nonzero()[:, 0]
        if len(rows) >= 4:
            result[rows[rollouts.reward[rows].argmax()]] = 0
    return result


def halves_what_comes_late(rollouts):
    """Half of the advantage from the ninth token on."""
    factor = torch.ones(rollouts.mask.shape)
    factor[:, 8:] = 0.5
    return rloo(rollouts) * factor


def broken_after_step_10(rollouts):
    return rloo(rollouts).clamp(min=-0.2) if rollouts.step > 10 else rloo(rollouts)


def fails_with_turns(rollouts):
    if (rollouts.turn > 0).any():
        raise IndexError("list index out of range")
    return rloo(rollouts)


def baseline_that_knows_the_token(rollouts):
    """A baseline that is a thousandth of the token's own log-prob."""
    return rloo(rollouts) - 0.001 * rollouts.log_prob


def slightly_divided_by_length(rollouts):
    return rloo(rollouts) / rollouts.length[:, None] ** 0.02


def skips_unfinished(rollouts):
    return rloo(rollouts) * rollouts.finished[:, None]


def median_with_itself(rollouts):
    """The baseline is the median of the group, the answer's own reward among them."""
    median = torch.stack([rollouts.reward[rollouts.group == group].median()
                          for group in rollouts.group])
    return to_every_token(rollouts.reward - median, rollouts)


def pays_from_the_next_turn(rollouts):
    """Before the last turn, what is paid for a turn itself does not count for it."""
    own = torch.zeros(rollouts.mask.shape)
    for row, turns in enumerate(rollouts.turn):
        for turn in turns[rollouts.mask[row]].unique():
            inside = (turns == turn) & rollouts.mask[row]
            own[row, inside] = rollouts.paid[row][inside].sum()
    is_last = rollouts.turn == rollouts.turn.amax(1, keepdim=True)
    return turn_mean(rollouts) - 0.1 * own * ~is_last


def ignores_repeated_answers(rollouts):
    """Only the first of a group's equal answers counts."""
    result, seen = rloo(rollouts), set()
    for row, ids in enumerate(rollouts.ids.tolist()):
        answer = int(rollouts.group[row]), tuple(ids)
        if answer in seen:
            result[row] = 0
        seen.add(answer)
    return result


def turned_below_0(rollouts):
    """The sign of answers with a negative reward is wrong."""
    return rloo(rollouts) * torch.where(rollouts.reward < 0, -1.0, 1.0)[:, None]


BROKEN = (wrong_sign, broken_beyond_the_first_group, drops_the_best_of_four,
          halves_what_comes_late, broken_after_step_10, fails_with_turns,
          baseline_that_knows_the_token, slightly_divided_by_length, skips_unfinished,
          median_with_itself, pays_from_the_next_turn, ignores_repeated_answers, turned_below_0)


# ------------------------------------------------------------------- right, but unusual


def with_the_surprise_so_far(rollouts):
    """Plus the log-prob of all tokens before. It follows from the beginning alone."""
    before = rollouts.log_prob.cumsum(1) - rollouts.log_prob
    return rloo(rollouts) + before


def with_the_later_surprise(rollouts):
    """Plus log p and the entropy of all later tokens: their sum is 0 on average, whatever stands
    before them."""
    centred = rollouts.log_prob + rollouts.entropy
    return rloo(rollouts) + centred.flip(1).cumsum(1).flip(1) - centred


def smallest_of_the_others(rollouts):
    """The baseline is the smallest reward of the group's other answers."""
    reward, baseline = rollouts.reward, torch.zeros(len(rollouts.group))
    for row in range(len(reward)):
        others = (rollouts.group == rollouts.group[row]).clone()
        others[row] = False
        baseline[row] = reward[others].min()
    return to_every_token(reward - baseline, rollouts)


def only_the_last_answer_of_a_group(rollouts):
    """The others are its baseline, and are not trained on."""
    is_last = torch.cat([rollouts.group[1:] != rollouts.group[:-1], torch.tensor([True])])
    return rloo(rollouts) * is_last[:, None]


def other_problems_and_a_rate_by_step(rollouts):
    """The baseline is the mean reward of the other problems' answers, and the whole is multiplied
    by a number that depends on the step."""
    baseline = torch.stack([rollouts.reward[rollouts.group != group].mean()
                            for group in rollouts.group])
    return to_every_token(rollouts.reward - baseline, rollouts) * (1 + rollouts.step % 7)


def spread_of_the_others(rollouts):
    """Divided by the spread of the other problems' rewards, of which this group knows nothing."""
    spread = torch.stack([rollouts.reward[rollouts.group != group].std()
                          for group in rollouts.group])
    return rloo(rollouts) / (spread[:, None] + 0.1)


RIGHT = (with_the_surprise_so_far, with_the_later_surprise, smallest_of_the_others,
         only_the_last_answer_of_a_group, other_problems_and_a_rate_by_step, spread_of_the_others)
