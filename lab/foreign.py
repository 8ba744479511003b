"""Advantages of other trainers, as they are typed: python -m lab exact FILE.py:NAME

A parameter of the function says whose it is, and so what it is given:

    token_level_rewards   verl: with response_mask, and with index, a text for each answer
    num_generations       TRL: with rewards, of groups of one size, one behind the other
    prompt_ids            NeMo-RL: with rewards and mask; one token or number for each prompt
    inputs                prime-rl: rollouts, rewards and completion_lengths, of one group
    context               AgentCreditBench: trajectories, of one group
    rollouts              the batch of this project

Any other function is called with rewards (B,), mask (B, T), True at the policy's tokens, and group
(B,), the number of each answer's group. NAME may also be a class that is made without arguments, or
a method, as mine.estimate.
"""
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.engine.errors import UserError
from lab.engine.methods import METHODS, Choice
from lab.engine.rollouts import Rollouts
from lab.formula.calling import LossFailed, load_module

OWN_FORM = "f(rewards (B,), mask (B, T), group (B,))"
TRAINERS = {"token_level_rewards": "verl", "num_generations": "TRL", "prompt_ids": "NeMo-RL",
            "inputs": "prime-rl", "context": "AgentCreditBench", "rollouts": "this project"}
OF_ONE_GROUP = ("prime-rl", "AgentCreditBench")
METHOD_NAMES = ("estimate", "compute_advantage", "compute_advantages")


def foreign(where: str) -> Choice:
    """The function of FILE.py:NAME."""
    file, _, name = where.rpartition(":")
    try:
        module: Any = load_module(Path(file))
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
            found = found() if inspect.isclass(found) else found
    except (LossFailed, TypeError) as error:
        raise UserError(f"{where}: {error}") from None
    methods = [getattr(found, method) for method in METHOD_NAMES if hasattr(found, method)]
    if not callable(found) and not methods:
        functions = [one for one, value in vars(module).items() if inspect.isfunction(value)
                     and value.__module__ == module.__name__]
        raise UserError(f"{where} has no function {name or 'behind its colon'}, as {file}:NAME, "
                        f"but {', '.join(functions) or 'none'}. exact calls {OWN_FORM}, and "
                        "other trainers' functions as in examples/foreign_advantages.py")
    return as_choice(found if callable(found) else methods[0], name)


def as_choice(function: Any, name: str = "") -> Choice:
    """Anybody's function as an advantage of this project; a weighting or an advantage below its
    decorator as it is."""
    if any(function in choices.data.values() for choices in METHODS.values()):
        return function
    parameters = inspect.signature(function).parameters
    tells = next((one for one in TRAINERS if one in parameters), "")

    def called(rollouts: Rollouts) -> Tensor:
        parts = in_parts(rollouts, TRAINERS.get(tells, ""))
        return torch.cat([as_values(called_on(batch), batch) for batch in parts])

    def called_on(batch: Rollouts) -> Any:
        if not tells:
            return function(batch.reward, batch.mask, batch.group)
        given = {one: value for one, value in values(batch, tells).items() if one in parameters}
        try:
            return function(**given)
        except Exception:
            if tells != "prompt_ids":
                raise
            return function(**given | {tells: batch.group})  # it may want a number for each answer

    called.__name__ = name or function.__name__
    # TRL has several answers to each prompt
    called.least_group = 2 if tells in ("num_generations", "rollouts") else 1  # type: ignore
    called.called_as = (  # type: ignore[attr-defined]
        f"a function of {TRAINERS[tells]}, by its parameter {tells}" if tells else OWN_FORM)
    return called


def in_parts(rollouts: Rollouts, whose: str) -> list[Rollouts]:
    """The batch, or its groups, for a function that takes one at a time. One of TRL's takes several
    if they have one size."""
    sizes = rollouts.group.bincount().tolist()
    if whose in OF_ONE_GROUP or whose == "TRL" and len({*sizes}) > 1:
        return [rollouts.of_problems(range(group, group + 1)) for group in range(len(sizes))]
    return [rollouts]


def values(batch: Rollouts, tells: str) -> dict[str, Any]:
    """What the trainer that has the parameter `tells` gives."""
    mask, lengths = batch.mask.float(), batch.length
    if tells == "token_level_rewards":
        index = np.array([f"problem {group}" for group in batch.group.tolist()], dtype=object)
        return {tells: batch.paid, "response_mask": mask, "eos_mask": mask, "index": index}
    if tells == "num_generations":
        return {tells: int((batch.group == batch.group[0]).sum()), "rewards": batch.reward}
    if tells == "prompt_ids":
        return {tells: batch.group[:, None], "rewards": batch.reward, "mask": mask}
    if tells == "inputs":
        rollouts = [{"reward": reward} for reward in batch.reward.tolist()]
        return {tells: SimpleNamespace(rollouts=rollouts, rewards=batch.reward[None],
                                       completion_lengths=lengths[None])}
    if tells == "context":
        trajectories = [SimpleNamespace(steps=steps_of(batch, row), total_return=reward)
                        for row, reward in enumerate(batch.reward.tolist())]
        return {tells: SimpleNamespace(trajectories=trajectories, mdp=None, policy=None)}
    return {tells: batch}


def steps_of(batch: Rollouts, row: int) -> tuple[SimpleNamespace, ...]:
    """The turns of an answer. The state before a turn is all that was written before it."""
    ids, steps = tuple(batch.ids[row].tolist()), []
    begins = batch.begins_turn[row].nonzero()[:, 0].tolist()
    ends = batch.ends_turn[row].nonzero()[:, 0].tolist()
    for turn, (begin, end) in enumerate(zip(begins, ends)):
        steps.append(SimpleNamespace(
            timestep=turn, state=ids[:begin], action=ids[begin:end + 1],
            reward=float(batch.paid[row, end]), next_state=ids[:end + 1],
            terminated=turn == len(ends) - 1))
    return tuple(steps)


def as_values(returned: Any, batch: Rollouts) -> Tensor:
    """(B, T): of a number for each answer, each token, or each turn, or of a tuple that begins so.
    """
    if hasattr(returned, "advantages"):  # prime-rl's outputs
        returned = getattr(returned, "token_advantages", None) or returned.advantages
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        returned = returned[0]           # verl's advantages, beside its returns
    rows, width = batch.mask.shape
    if not isinstance(returned, Tensor) and len(returned) == rows and np.ndim(returned[0]):
        returned = torch.stack([row_of(batch, row, one) for row, one in enumerate(returned)])
    found = torch.as_tensor(returned)
    if found.shape not in ((rows,), (1, rows), (rows, 1), (rows, width)):
        raise UserError(f"it returned the shape {tuple(found.shape)}, for a mask of the shape "
                        f"{(rows, width)}")
    return found if found.shape == (rows, width) else found.reshape(rows, 1).expand(rows, width)


def row_of(batch: Rollouts, row: int, numbers: Sequence[float]) -> Tensor:
    """(T,): the numbers of an answer's turns, or of its tokens."""
    turns = int(batch.turn[row].max()) + 1
    given = torch.as_tensor(numbers)
    if len(given) == turns:
        return given[batch.turn[row]]
    return torch.nn.functional.pad(given, (0, batch.mask.shape[1] - len(given)))
