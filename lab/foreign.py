"""Advantages of other trainers, as they are typed: python -m lab exact FILE.py:NAME

A parameter of the function says whose it is, and so what it is given (TRAINERS in
lab/formula/trainers.py):

    token_level_rewards   verl: with response_mask, and with index, a text for each answer
    num_generations       TRL: with rewards, of groups of one size, one behind the other
    rewards_per_func      TRL: with reward_weights, if they are asked for
    n_samples_per_prompt  OpenRLHF: with rewards, as for TRL
    prompt_ids            NeMo-RL: with rewards and mask; one token or number for each prompt
    inputs                prime-rl: rollouts, rewards and completion_lengths, of one group
    group_size            any trainer's, as for TRL
    samples_per_problem   prime-rl: lists of rewards and completion_lengths
    samples, kl           slime: with args, or a list of tensors beside the rewards
    context               AgentCreditBench: trajectories, of one group
    rollouts              the batch of this project

A config is given the trainer's defaults. Any other function has parameters whose names say what
they are (NAMES below): rewards (B,), mask (B, T), True at the policy's tokens, and group (B,), the
number of each answer's group. NAME may also be a class, or a method, as mine.estimate.
"""
import inspect
import re
from collections.abc import Mapping, Sequence
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
from lab.formula.trainers import CONFIGS, TRAINERS, config_of

NUMBERS = r"(_(ids?|index|indices|idx|uids?|keys?|numbers?|labels?))?"
NAMES = {"rewards (B,)": r"r|(raw_)?rewards?|scores?", "mask (B, T)": r"m|(?!prompt)\w*masks?",
         "group (B,)": rf"g|(groups?|prompts?|problems?|questions?){NUMBERS}|index|indices|uids?"}
OWN_FORM = "f(rewards (B,), mask (B, T), group (B,))"
ONE_GROUP_EACH = ("inputs", "samples_per_problem", "context")
SIZES = ("num_generations", "n_samples_per_prompt", "group_size", "samples_per_problem")
OF_EQUAL_GROUPS = (*SIZES, "rewards_per_func", "samples")
METHOD_NAMES = ("estimate", "compute_advantage", "compute_advantages")
OTHERS = "Other forms stand in examples/foreign_advantages.py"
Parameters = Mapping[str, inspect.Parameter]


def foreign(where: str) -> Choice:
    """The function of FILE.py:NAME."""
    file, _, name = where.rpartition(":")
    try:
        module: Any = load_module(Path(file))
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
            found = made(found) if inspect.isclass(found) else found
    except (LossFailed, TypeError) as error:
        raise UserError(f"{where}: {error}") from None
    if not callable(found) and not method_of(found):
        functions = [one for one, value in vars(module).items() if inspect.isfunction(value)
                     and value.__module__ == module.__name__]
        raise UserError(f"{where} has no function {name or 'behind its colon'}, as {file}:NAME, "
                        f"but {', '.join(functions) or 'none'}. exact calls {OWN_FORM}, and "
                        "other trainers' functions as in examples/foreign_advantages.py")
    return as_choice(found, name)


def method_of(found: Any) -> Any:
    """The method of an estimator that gives its advantages, or None."""
    return next((getattr(found, one) for one in METHOD_NAMES if hasattr(found, one)), None)


def made(of_class: type) -> Any:
    """An object of the class. One of a trainer may want its configs."""
    settings = {name: value for trainer in TRAINERS.values()
                for name, value in trainer.settings.items()}
    wanted = inspect.signature(of_class).parameters
    return of_class(**{one: config_of(settings) for one in wanted if one in CONFIGS})


def as_choice(function: Any, name: str = "") -> Choice:
    """Anybody's function as an advantage of this project; a weighting or an advantage below its
    decorator as it is. A class is made, and an object asked for its method."""
    if any(function in choices.data.values() for choices in METHODS.values()):
        return function  # type: ignore[no-any-return]
    function = made(function) if inspect.isclass(function) else function
    function = function if callable(function) else method_of(function)
    if function is None:
        raise UserError(f"it is no function, and has no method {' or '.join(METHOD_NAMES)}")
    name = name or getattr(getattr(function, "func", function), "__name__", "it")
    already = getattr(function, "keywords", {})  # which functools.partial gives
    parameters = {one: about for one, about in inspect.signature(function).parameters.items()
                  if one not in already}
    roles = {one: role_of(one) for one in parameters if role_of(one)}
    whose, tells = next(((trainer, one) for trainer, about in TRAINERS.items()
                         for one in about.told_by if tells_of(one, parameters, roles)), ("", ""))
    if not whose:
        refuse_others(name, parameters, roles)

    def called(rollouts: Rollouts) -> Tensor:
        parts = in_parts(rollouts, tells)
        return torch.cat([as_values(called_on(batch), batch, tells) for batch in parts])

    def called_on(batch: Rollouts) -> Any:
        """Groups are texts for some functions, and numbers for others."""
        first: Exception | None = None
        for as_texts in (True, False):
            given = {one: of_role(batch, role, one, as_texts) for one, role in roles.items()}
            given |= values(batch, whose, parameters, as_texts)
            try:
                return function(**{one: given[one] for one in parameters if one in given})
            except Exception as error:
                first = first or error
        raise first or AssertionError

    by_names = ", ".join(f"{one}: {role}" for one, role in roles.items())
    called.__name__ = name
    vars(called).update(
        called_as=f"a function of {whose}, by its parameter {tells}" if whose else f"f({by_names})",
        least_group=2 if tells in OF_EQUAL_GROUPS or whose == "this project" else 1,
        made_for_rewards=getattr(function, "made_for_rewards", ()))
    return called


def role_of(name: str) -> str:
    """What a parameter of this name is given."""
    return next((role for role, names in NAMES.items() if re.fullmatch(names, name)), "")


def tells_of(name: str, parameters: Parameters, roles: Mapping[str, str]) -> bool:
    """Whether this parameter tells the trainer. A KL beside groups may be anybody's."""
    return name in parameters and not (name == "kl" and "group (B,)" in roles.values())


def refuse_others(name: str, parameters: Parameters, roles: Mapping[str, str]) -> None:
    """Raise unless each parameter of anybody's function is known or has a default."""
    if "self" in parameters:
        raise UserError(f"{name} is a method without its object: its class is named before it, as "
                        "Class.method, or it is a function without self")
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
    """The batch, or its groups, for a function that takes one at a time. Others take several if
    they have one size."""
    sizes = rollouts.group.bincount().tolist()
    if tells in ONE_GROUP_EACH or tells in OF_EQUAL_GROUPS and len({*sizes}) > 1:
        return [rollouts.of_problems(range(group, group + 1)) for group in range(len(sizes))]
    return [rollouts]


def of_role(batch: Rollouts, role: str, name: str, as_texts: bool) -> Any:
    """What a parameter of anybody's function is given."""
    if role == "rewards (B,)":
        return batch.reward
    if role == "mask (B, T)":
        return batch.mask
    return texts_of(batch) if as_texts and not name.startswith("g") else batch.group


def texts_of(batch: Rollouts) -> np.ndarray:
    """A text for each answer: equal ones are of one group."""
    return np.array([f"problem {group}" for group in batch.group.tolist()], dtype=object)


def values(batch: Rollouts, whose: str, parameters: Parameters, as_texts: bool) -> dict[str, Any]:
    """What the trainer gives, by the names of parameters."""
    if not whose:
        return {}
    size = int((batch.group == batch.group[0]).sum())
    settings = config_of(TRAINERS[whose].settings, n_samples_per_prompt=size,
                        rollout_batch_size=len(batch.reward) // size)
    found: dict[str, Any] = dict.fromkeys(CONFIGS, settings) | dict.fromkeys(SIZES, size)
    mask, lengths, rewards = batch.mask.float(), batch.length, batch.reward.tolist()
    if whose == "verl":
        return found | {"token_level_rewards": batch.paid, "response_mask": mask, "eos_mask": mask,
                        "index": texts_of(batch), "old_log_probs": batch.log_prob}
    if whose == "TRL":
        return found | parts_of_rewards(batch, "reward_weights" in parameters)
    if whose == "NeMo-RL":
        return found | {"prompt_ids": batch.group[:, None] if as_texts else batch.group,
                        "mask": mask}
    if whose == "prime-rl":
        inputs = SimpleNamespace(rollouts=[{"reward": reward} for reward in rewards],
                                 rewards=batch.reward[None], completion_lengths=lengths[None])
        return found | {"inputs": inputs, "rewards": rewards, "advantage_type": "drgrpo",
                        "completion_lengths": lengths.tolist()}
    if whose == "slime":
        return found | of_slime(batch)
    trajectories = [SimpleNamespace(steps=steps_of(batch, row), total_return=reward)
                    for row, reward in enumerate(rewards)]
    return found | {"rollouts": batch, "context": SimpleNamespace(
        trajectories=trajectories, mdp=None, policy=None)}


def parts_of_rewards(batch: Rollouts, has_weights: bool) -> dict[str, Tensor]:
    """Two reward functions of TRL, the second for rewards above 0, whose weighted sum is the
    reward."""
    weights = torch.tensor([2.0, 0.5] if has_weights else [1.0, 1.0])
    second = (batch.reward > 0).float()
    first = (batch.reward - weights[1] * second) / weights[0]
    return {"rewards_per_func": torch.stack([first, second], 1), "reward_weights": weights}


def of_slime(batch: Rollouts) -> dict[str, Any]:
    """The answers as samples, and per token as lists of tensors."""
    samples, lengths = [], batch.written.sum(1).tolist()
    for row, reward in enumerate(batch.reward.tolist()):
        samples.append(SimpleNamespace(
            reward=reward, index=row, group_index=int(batch.group[row]),
            response_length=lengths[row], get_reward_value=lambda args, reward=reward: reward))
    masks = [mask[:length].float() for mask, length in zip(batch.mask, lengths)]
    return {"samples": samples, "loss_masks": masks, "kl": [mask * 0 for mask in masks],
            "kl_coef": 0.0, "response_lengths": lengths, "total_lengths": lengths}


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


def as_values(returned: Any, batch: Rollouts, tells: str = "") -> Tensor:
    """(B, T): of a number for each answer, each token, or each turn, or of a tuple that begins so.
    """
    if hasattr(returned, "advantages"):  # prime-rl's outputs
        returned = getattr(returned, "token_advantages", None) or returned.advantages
    if isinstance(returned, tuple) and len(returned) == 2 and tells == "samples":
        returned = returned[1]           # slime's rewards, behind the raw ones
    if isinstance(returned, tuple) and returned and isinstance(returned[0], Tensor):
        returned = returned[0]           # verl's advantages, beside its returns
    rows, width = batch.mask.shape
    if not hasattr(returned, "__len__"):
        said = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise UserError(f"it returned {said}, and not an advantage for each answer, (B,), or for "
                        "each token, (B, T)")
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
