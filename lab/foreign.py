"""Advantages of other trainers, as they are typed: python -m lab exact FILE.py:NAME

A parameter of the function says whose it is, and so what it is given:

    token_level_rewards   verl: with response_mask, and with index, a text for each answer
    num_generations       TRL: with rewards, of groups of one size, one behind the other
    prompt_ids            NeMo-RL: with rewards and mask; one token or number for each prompt
    inputs                prime-rl: rollouts, rewards and completion_lengths, of one group
    context               AgentCreditBench: trajectories, of one group
    rollouts              the batch of this project

Any other function is called with rewards (B,), mask (B, T) and group (B,). The mask is True at the
policy's tokens, so each turn is a run of True. Answers to one problem stand side by side, and have
the same number in `group`. What comes back is an advantage for each answer, for each token, or for
each turn, or a tuple that begins with it.

NAME may also be a class that is made without arguments, or a method, such as `mine.estimate`.
"""
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.engine.errors import UserError
from lab.engine.methods import METHODS, Choice
from lab.engine.rollouts import Rollouts
from lab.formula.calling import LossFailed, load_module

OWN_FORM = "f(rewards (B,), mask (B, T), group (B,))"
FORMS = (f"exact calls {OWN_FORM}, and functions as five trainers have them, of which "
         "examples/foreign_advantages.py has one each")
METHOD_NAMES = ("estimate", "compute_advantage", "compute_advantages")


# ------------------------------------------------------------------- what a trainer gives


def of_verl(batch: Rollouts) -> dict[str, Any]:
    mask, groups = batch.mask.float(), [f"problem {group}" for group in batch.group.tolist()]
    return {"token_level_rewards": batch.paid, "response_mask": mask, "eos_mask": mask,
            "index": np.array(groups, dtype=object)}


def of_trl(batch: Rollouts) -> dict[str, Any]:
    return {"rewards": batch.reward, "num_generations": int((batch.group == batch.group[0]).sum())}


def of_nemo_rl(batch: Rollouts) -> dict[str, Any]:
    return {"prompt_ids": batch.group[:, None], "rewards": batch.reward, "mask": batch.mask.float()}


def of_nemo_rl_by_number(batch: Rollouts) -> dict[str, Any]:
    return of_nemo_rl(batch) | {"prompt_ids": batch.group}


def of_prime_rl(batch: Rollouts) -> dict[str, Any]:
    rollouts = [{"reward": reward} for reward in batch.reward.tolist()]
    return {"inputs": SimpleNamespace(rollouts=rollouts, rewards=batch.reward[None],
                                      completion_lengths=batch.length[None])}


def of_agent_credit_bench(batch: Rollouts) -> dict[str, Any]:
    trajectories = []
    for row, reward in enumerate(batch.reward.tolist()):
        trajectories.append(SimpleNamespace(steps=steps_of(batch, row), total_return=reward))
    return {"context": SimpleNamespace(trajectories=tuple(trajectories), mdp=None, policy=None)}


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


def of_this_project(batch: Rollouts) -> dict[str, Any]:
    return {"rollouts": batch}


def of_anybody(batch: Rollouts) -> dict[str, Any]:
    return {"rewards": batch.reward, "mask": batch.mask, "group": batch.group}


Give = Callable[[Rollouts], dict[str, Any]]
# by the parameter that tells it: whose it is, and what to give, first one way and then another
TRAINERS: dict[str, tuple[str, list[Give]]] = {
    "token_level_rewards": ("verl", [of_verl]), "num_generations": ("TRL", [of_trl]),
    "prompt_ids": ("NeMo-RL", [of_nemo_rl, of_nemo_rl_by_number]),
    "inputs": ("prime-rl", [of_prime_rl]),
    "context": ("AgentCreditBench", [of_agent_credit_bench]),
    "rollouts": ("this project", [of_this_project])}
OF_ONE_GROUP = ("prime-rl", "AgentCreditBench")


# ------------------------------------------------------------------- calling it


def foreign(where: str) -> Choice:
    """The function of FILE.py:NAME."""
    file, _, name = where.rpartition(":")
    try:
        module = load_module(Path(file))
    except LossFailed as error:
        raise UserError(str(error)) from None
    return as_choice(named(module, file, name), name)


def named(module: ModuleType, file: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if inspect.isclass(found):
            try:
                found = found()
            except TypeError as error:
                raise UserError(f"{file}:{part} is a class: {error}. Make an object of it in the "
                                f"file, as mine = {part}(...), and name {file}:mine") from None
    methods = [getattr(found, method) for method in METHOD_NAMES if hasattr(found, method)]
    if not callable(found) and not methods:
        here = [one for one, value in vars(module).items() if inspect.isfunction(value)
                and value.__module__ == module.__name__]
        has = f"Its functions are {', '.join(here)}" if here else "It has no function"
        what = f"has no function {name}" if name else f"is named without a function, {file}:NAME"
        raise UserError(f"{file} {what}. {has}; {FORMS}")
    return found if callable(found) else methods[0]


def as_choice(function: Any, name: str = "") -> Choice:
    """Anybody's function as an advantage of this project; a weighting or an advantage below its
    decorator as it is."""
    if any(function in choices.data.values() for choices in METHODS.values()):
        return function
    name = name or getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    tells = next((one for one in TRAINERS if one in parameters), "")
    whose, ways = TRAINERS.get(tells, ("", [of_anybody]))
    if not whose:
        refuse_own_form(function, name)

    def called(rollouts: Rollouts) -> Tensor:
        parts = in_parts(rollouts, whose)
        return torch.cat([called_on(part, function, name, ways, bool(whose)) for part in parts])

    called.__name__ = name
    called.called_as = (f"a function of {whose}, by its parameter {tells}"  # type: ignore
                        if whose else OWN_FORM)
    return called


def refuse_own_form(function: Any, name: str) -> None:
    try:
        inspect.signature(function).bind("rewards", "mask", "group")
    except TypeError:
        raise UserError(f"{name}{inspect.signature(function)} cannot be called: {FORMS}") from None


def in_parts(rollouts: Rollouts, whose: str) -> list[Rollouts]:
    """The batch, or its groups, for a function that takes one at a time. One of TRL's takes several
    if they have one size."""
    sizes = rollouts.group.bincount().tolist()
    if whose in OF_ONE_GROUP or whose == "TRL" and len({*sizes}) > 1:
        return [rollouts.of_problems(range(group, group + 1)) for group in range(len(sizes))]
    return [rollouts]


def called_on(batch: Rollouts, function: Any, name: str, ways: Sequence[Give], by_name: bool
              ) -> Tensor:
    """What the function returns when it is called in the first of these ways that it understands.
    """
    errors = []
    for give in ways:
        given = give(batch)
        try:
            returned = (function(**arguments(function, name, given)) if by_name
                        else function(*given.values()))
            return as_values(returned, name, batch)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def arguments(function: Any, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that the function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty
                and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if lacking := [one for one in required if one not in given]:
        raise UserError(f"{name} needs {', '.join(lacking)}, and gets {', '.join(given)} alone: "
                        f"call it in a function of your own. {FORMS}")
    return {one.name: given[one.name] for one in parameters if one.name in given}


def as_values(returned: Any, name: str, batch: Rollouts) -> Tensor:
    """(b, T), or (b, 1) for whole answers."""
    if hasattr(returned, "advantages"):  # prime-rl's outputs
        returned = getattr(returned, "token_advantages", None) or returned.advantages
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        returned = returned[0]           # verl's advantages, beside its returns
    rows, width = len(batch.group), batch.mask.shape[1]
    if not isinstance(returned, Tensor) and len(returned) == rows and np.ndim(returned[0]):
        returned = torch.stack([row_of(batch, row, one) for row, one in enumerate(returned)])
    values = torch.as_tensor(returned)
    values = values.reshape(rows) if values.shape == (1, rows) else values
    if values.shape not in ((rows,), (rows, 1), (rows, width)):
        raise UserError(f"{name} returned the shape {tuple(values.shape)}, for a mask of the "
                        f"shape {(rows, width)}: {FORMS}")
    values = values[:, None] if values.dim() == 1 else values
    return values.expand(rows, width)


def row_of(batch: Rollouts, row: int, numbers: Sequence[float]) -> Tensor:
    """(T,): the numbers of an answer's turns, or of its tokens."""
    turns = int(batch.turn[row].max()) + 1
    given = torch.as_tensor(numbers)
    if len(given) == turns:
        return given[batch.turn[row]]
    return torch.nn.functional.pad(given, (0, batch.mask.shape[1] - len(given)))
