"""Changes of a batch under which a right loss stays as it is. They need no table of formulas, so
they are asked of a loss that is not understood, too."""
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .batches import END, PAD, Case, Lens, make_case, with_other_reward
from .formula import left_of

Gradient = Callable[[Case], Tensor]


def case_to_change(lens: Lens, late: int) -> Case:
    """Three groups of five answers, which are an odd number, with ratios and references. In each
    group the lengths differ: where the shortest are kept, the order of rows breaks ties."""
    return make_case(101, 3, 5, 12, lens=lens, late=late, spare=2).moved(81, .1, .3)


def with_pad_as_end(gradient: Gradient, case: Case) -> float:
    ids = torch.where(case.ids == PAD, END, case.ids)
    return left_of(gradient(case), gradient(replace(case, ids=ids, pad=END)))


def wider(gradient: Gradient, case: Case) -> float:
    found, length = gradient(case.widened(3)), case.ids.shape[1]
    return max(left_of(gradient(case), found[:, :length]),
               float(found[:, length:].norm() / found.norm()))


def in_another_order(gradient: Gradient, case: Case) -> float:
    """The groups and the answers of each group begin with the second one."""
    order = torch.arange(len(case.group)).view(3, 5).roll(-1, 0).roll(-1, 1).flatten()
    return left_of(gradient(case)[order], gradient(case.rows(order)))


def beside_other_rewards(gradient: Gradient, case: Case) -> float:
    """The rewards of one group after the other become other ones: do the others' pushes change, but
    for a factor? A divisor that counts what is trained may depend on the rewards."""
    worst, before = 0.0, gradient(case)
    for number in case.group.unique():
        others = case.group != number
        reward = torch.where(others, case.reward, with_other_reward(case).reward)
        after = gradient(case.with_reward(reward))[others]
        factor = (after * before[others]).sum() / before[others].square().sum().clamp(min=1e-300)
        worst = max(worst, left_of(after, factor * before[others]))
    return worst


def in_parts(gradient: Gradient, case: Case) -> float:
    """The first group and the two others are micro-batches that know the tokens of the whole. The
    gradients of both add up: as they are, or weighted by their tokens, answers or groups, or by the
    tokens that are pushed."""
    is_first, whole, wanted = case.group == 0, float(case.mask.sum()), gradient(case)
    parts, sizes = [], []
    for rows in (is_first, ~is_first):
        part = case.rows(rows.nonzero().flatten())
        parts.append(gradient(replace(part, whole=whole)))
        pushed = [int(found.any(2).sum()) for found in (parts[-1], wanted)]
        sizes.append((1.0, float(part.mask.sum()) / whole, float(rows.double().mean()),
                      len(part.group.unique()) / 3, pushed[0] / max(pushed[1], 1)))
    return min(left_of(wanted, torch.cat([parts[0] * first, parts[1] * second]))
               for first, second in zip(*sizes))


INVARIANCES = {  # what a loss does that does not have it, and how much of its gradient changes
    "groups mixed": (
        "Groups are mixed: the reward of an answer changes the pushes of answers to other "
        "problems, as where rows are taken for columns, repeat for repeat_interleave, or an "
        "advantage is that of a neighbour.", beside_other_rewards),
    "pad is end": (
        "Where the padding has the id of the end token, as most tokenizers have it, the loss is "
        "another one: its mask looks for an id.", with_pad_as_end),
    "wider padding": ("The loss changes with the number of places of padding.", wider),
    "order of rows": (
        "The loss changes with the order of the answers, as where they are cut into micro-batches "
        "that are averaged, or where the last of an odd batch are lost.", in_another_order),
    "micro-batches": (
        "The gradients of micro-batches do not add up to that of the batch, whether they are "
        "weighted by tokens, by answers, by groups or not at all.", in_parts)}
