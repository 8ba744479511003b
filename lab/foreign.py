"""Advantages that this project did not write: python -m lab exact FILE.py:NAME

    f(rewards (B,), mask (B, T), group (B,))            one's own, by these names (NAMES below)
    f(token_level_rewards, response_mask, index, ...)   verl's, (B, T) twice, and a text for each
                                                        answer, which is equal within a group
    f(rewards, num_generations)                         TRL's, of groups of one size, one behind
                                                        the other
    f(rollouts)                                         of the batch of this project

One's own may leave out mask. verl's may ask for a config, which has verl's defaults, and for
old_log_probs. What comes back is an advantage for each answer, (B,), or for each token, (B, T).
Those of other trainers become one of these in a function of a line or two.
"""
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.engine.errors import UserError
from lab.engine.methods import METHODS, Choice
from lab.engine.rollouts import Rollouts
from lab.formula.adapters import verl_config
from lab.formula.calling import LossFailed, load_module

NUMBERS = r"(_(ids?|index|indices|numbers?|labels?))?"
NAMES = {"rewards (B,)": r"r|(raw_)?rewards?|scores?", "mask (B, T)": r"m|(?!prompt)\w*masks?",
         "group (B,)": rf"g|(groups?|prompts?|problems?|questions?){NUMBERS}|index|uids?"}
OWN_FORM = "f(rewards (B,), mask (B, T), group (B,))"
OTHERS = "Other forms stand in examples/foreign_advantages.py"
TOLD_BY = {"token_level_rewards": "verl", "num_generations": "TRL", "rollouts": "this project"}
Parameters = Mapping[str, inspect.Parameter]


def foreign(where: str) -> Choice:
    """The function of FILE.py:NAME."""
    file, _, name = where.rpartition(":")
    try:
        module = load_module(Path(file))
    except LossFailed as error:
        raise UserError(f"{where}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        functions = [one for one, value in vars(module).items() if inspect.isfunction(value)
                     and value.__module__ == module.__name__]
        raise UserError(f"{where} has no function {name or 'behind its colon'}, as {file}:NAME, "
                        f"but {', '.join(functions) or 'none'}. exact calls {OWN_FORM}, and "
                        "functions of trainers as in examples/foreign_advantages.py")
    return as_choice(found)


def as_choice(function: Any) -> Choice:
    """Anybody's function as an advantage of this project; a weighting or an advantage below its
    decorator as it is."""
    if any(function in choices.data.values() for choices in METHODS.values()):
        return function  # type: ignore[no-any-return]
    already = getattr(function, "keywords", {})  # which functools.partial gives
    parameters = {one: about for one, about in inspect.signature(function).parameters.items()
                  if one not in already}
    roles = {one: role_of(one) for one in parameters if role_of(one)}
    name = getattr(getattr(function, "func", function), "__name__", "it")
    tells = next((one for one in TOLD_BY if one in parameters), "")
    if not tells:
        refuse_others(name, parameters, roles)

    def called(rollouts: Rollouts) -> Tensor:
        return torch.cat([called_on(batch) for batch in in_parts(rollouts, tells)])

    def called_on(batch: Rollouts) -> Tensor:
        given = {one: of_role(batch, role, one) for one, role in roles.items()}
        given |= of_trainer(batch, tells)
        return as_values(function(**{one: given[one] for one in parameters if one in given}), batch)

    by_names = ", ".join(f"{one}: {role}" for one, role in roles.items())
    called.__name__ = name
    vars(called).update(
        called_as=f"a function of {TOLD_BY[tells]}, by its parameter {tells}" if tells
        else f"f({by_names})",
        least_group=2 if tells in ("num_generations", "rollouts") else 1)
    return called


def role_of(name: str) -> str:
    """What a parameter of this name is given."""
    return next((role for role, names in NAMES.items() if re.fullmatch(names, name)), "")


def refuse_others(name: str, parameters: Parameters, roles: Mapping[str, str]) -> None:
    """Raise unless each parameter of anybody's function is known or has a default."""
    unknown = [one for one in parameters if one not in roles]
    required = [one for one in unknown if parameters[one].default is inspect.Parameter.empty]
    absent = [role for role in ("rewards (B,)", "group (B,)") if role not in roles.values()]
    if required or absent:
        said = f"no parameter {' or '.join(absent)}" if absent else ""
        if shown := required or unknown:
            said += f"{', but ' if said else ''}{', '.join(shown)}, which exact does not know"
        raise UserError(f"{name} has {said}. It gives rewards, mask (or one that ends so) and group"
                        f" (or index, uid, prompts) to parameters of these names. {OTHERS}")


def in_parts(rollouts: Rollouts, tells: str) -> list[Rollouts]:
    """The batch; or its groups, for a function that takes several only if they have one size."""
    sizes = rollouts.group.bincount().tolist()
    if tells == "num_generations" and len({*sizes}) > 1:
        return [rollouts.of_problems(range(group, group + 1)) for group in range(len(sizes))]
    return [rollouts]


def of_role(batch: Rollouts, role: str, name: str) -> Any:
    """What a parameter of anybody's function is given. Groups by index or uid are verl's texts."""
    if role == "rewards (B,)":
        return batch.reward
    if role == "mask (B, T)":
        return batch.mask
    return texts_of(batch) if name.startswith(("index", "uid")) else batch.group


def texts_of(batch: Rollouts) -> np.ndarray:
    """A text for each answer: equal ones are of one group."""
    return np.array([f"problem {group}" for group in batch.group.tolist()], dtype=object)


def of_trainer(batch: Rollouts, tells: str) -> dict[str, Any]:
    """What the trainer gives besides, by the names of parameters."""
    if tells == "token_level_rewards":
        return {"token_level_rewards": batch.paid, "response_mask": batch.mask.float(),
                "index": texts_of(batch), "old_log_probs": batch.log_prob, "config": verl_config()}
    if tells == "num_generations":
        return {"num_generations": int((batch.group == batch.group[0]).sum())}
    return {"rollouts": batch}


def as_values(returned: Any, batch: Rollouts) -> Tensor:
    """(B, T): of a number for each answer or each token, or of a tuple that begins so."""
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        returned = returned[0]           # verl's advantages, beside its returns
    rows, width = batch.mask.shape
    if not hasattr(returned, "__len__"):
        said = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise UserError(f"it returned {said}, and not an advantage for each answer, (B,), or for "
                        "each token, (B, T)")
    found = torch.as_tensor(returned)
    if found.shape not in ((rows,), (1, rows), (rows, 1), (rows, width)):
        raise UserError(f"it returned the shape {tuple(found.shape)}, for a mask of the shape "
                        f"{(rows, width)}")
    return found if found.shape == (rows, width) else found.reshape(rows, 1).expand(rows, width)
