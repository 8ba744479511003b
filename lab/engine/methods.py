"""The lists of choices that people can add to, --mitigation and --advantage; how a run makes a
method of a choice, and the checks of what it returns and keeps.

A function under a decorator becomes a choice, its keyword-only parameters become flags, and its
docstring becomes the help. A choice is either a function of the batch or, if it keeps a state or
samples more, a class, of which a run makes one object:

    def my_idea(rollouts: Rollouts, *, strength: float = 1.0) -> Tensor   # (B, T)

    class my_idea:
        def __init__(self, policy: Policy, *, strength: float = 1.0)
        def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor     # (B, T)

        def state_dict(self) -> tensors by name     # these two if it has a state
        def load_state_dict(self, tensors)
        metrics: dict         # numbers for metrics.jsonl, if any: the same names in each step
"""
import importlib
import inspect
import sys
from collections import ChainMap, UserDict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from io import StringIO
from reprlib import repr as brief
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

import grpo
import mitigations
from lab.engine.errors import (UserError, code_of, did_you_mean_name, location_of,
                               refuse_call)
from lab.engine.rollouts import Rollouts
from grpo import checked, place_of, values_of

Choice = Callable[..., Tensor] | type  # a function or a class below a decorator
Metrics = dict[str, Any]  # numbers for a line of metrics.jsonl, by name
Same = TypeVar("Same", bound=Choice)


class Method(Protocol):
    """A choice as a run calls it, with its flags set. The policy is None if no model is loaded, as
    in a preview."""
    def __call__(self, rollouts: Rollouts, policy: object, /) -> Tensor: ...


class Choices(UserDict[str, str | Choice]):
    """Functions and classes by name. A value may also be the name of a module, which is imported
    when the choice is first needed; then its decorator replaces the value."""

    def __init__(self, of_book: dict[str, Any] | None = None):
        self.clashes: list[tuple[str, str | Choice, str | Choice]] = []  # a name and its two owners
        super().__init__()
        # The book's own choices stand here, too. Those of the lab do not stand in the book's list,
        # because it knows no classes and no modules.
        book = {} if of_book is None else of_book
        self.data = ChainMap({}, book)  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Choice:
        choice = self.data[name]
        if isinstance(choice, str):
            importlib.import_module(choice)
            return cast(Choice, self.data[name])  # the module's decorator has put it there
        return choice

    def __setitem__(self, name: str, choice: str | Choice) -> None:
        """Add a choice. A name can be taken only once, because a second `def none` would silently
        replace plain GRPO. The clash is recorded here, and refused when the flags are read, like
        other mistakes. A cell of a notebook may be run again, so there a second definition
        replaces the first."""
        known, module = self.data.get(name), module_of(choice)
        if known is None or known == module:  # a new name, or one whose module is being imported
            self.data[name] = choice
        elif module_of(known) == module == "__main__":  # a cell of a notebook
            self.data[name] = choice
        else:
            self.clashes.append((name, known, choice))


def module_of(choice: str | Choice) -> str:
    return choice if isinstance(choice, str) else choice.__module__


MITIGATIONS, ADVANTAGES = Choices(mitigations.MITIGATIONS), Choices(grpo.ADVANTAGES)
METHODS = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}  # by the flag that chooses one
NEVER_RESCALED = {"inverse_logprob_as_published"}  # weightings whose scale matters
# advantages that give every token of an answer the same number
WHOLE_ANSWERS = {"grpo", "dr_grpo", "rloo", "batch_mean"}


def axis_of(name: str) -> str:
    """mitigation or advantage: the flag that chooses the method of this name."""
    for axis, choices in METHODS.items():
        if name in choices:
            return axis
    if name == "dpo":
        raise UserError("the advantage dpo is that of examples/dpo.py: python examples/dpo.py "
                        "--resume RUN goes on with a run of it")
    hint = without_decorator(name) or did_you_mean_name(name, [*MITIGATIONS, *ADVANTAGES]) or (
        ". Is its function in mitigations.py, below @mitigation or @advantage?")
    raise UserError(f"{name:.80} is neither a weighting nor an advantage{hint}")


def method_of(name: str) -> Choice:
    return METHODS[axis_of(name)][name]


def without_decorator(name: str) -> str:
    """A sentence about a function of this name that is no choice, because the decorator above it
    was forgotten; an empty one if there is no such function beside the choices."""
    for module in {*map(module_of, (MITIGATIONS | ADVANTAGES).data.values()), "mitigations"}:
        function = getattr(sys.modules.get(module), name, None)
        if inspect.isfunction(function) and function.__module__ == module:
            return (f". The function {name} ({location_of(function)}) has no @mitigation or "
                    "@advantage above it.")
    return ""


def mitigation(function: Same) -> Same:
    """Make a function or class a choice of --mitigation: weights (B, T), not negative."""
    MITIGATIONS[function.__name__] = function
    return function


def advantage(function: Same) -> Same:
    """Make a function or class a choice of --advantage: credit (B, T), with a sign."""
    ADVANTAGES[function.__name__] = function
    return function


def make(function: Choice, values: Mapping[str, Any], policy: object) -> Method:
    """Make a method, (rollouts, policy) -> (B, T), of a choice and the values of its flags."""
    if not isinstance(function, type):
        refuse_call(function, function, "(rollouts, *, flags)", None, **values)
        return wraps(function)(lambda rollouts, policy: function(rollouts, **values))
    refuse_call(function, function, "(self, policy, *, flags) in __init__", policy,
                           **values)
    made: Method = function(policy, **values)
    call = made if callable(made) else lambda: None  # without __call__ it takes no arguments
    refuse_call(function, call, "(self, rollouts, policy) in __call__", None, policy)
    if wrong := fault_of_state(made):  # at the first checkpoint it would be too late
        raise UserError(f"{function.__name__} ({location_of(function)}) {wrong}")
    return made


def fault_of_state(made: Method) -> str:
    """A clause about what is wrong with the state of a method, which a resumed run has to get back;
    an empty text if nothing is."""
    if hasattr(made, "state_dict") != hasattr(made, "load_state_dict"):
        return "needs both state_dict and load_state_dict, or a resumed run would forget its state"
    state: Any = getattr(made, "state_dict", dict)()
    for name, value in state.items() if isinstance(state, Mapping) else [("it", state)]:
        is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not (isinstance(name, str) and is_dense):
            return (f"should return dense tensors by name from state_dict, but {name} is "
                    f"{value!r:.80}")
    return ""


class Called:
    """A method as grpo.py's `values_of` calls it, with a batch alone. Its name, as "the weighting
    my_idea", and its code are for messages. `after` may change its values."""

    def __init__(self, chosen: Method, whose: str, policy: object,
                 after: Callable[[Tensor], Tensor] | None = None):
        self.chosen, self.policy, self.after = chosen, policy, after
        self.__name__, self.__code__ = whose, code_of(chosen)

    def __call__(self, rollouts: Rollouts) -> Tensor:
        values, name = self.chosen(rollouts, self.policy), place_of(self)
        if isinstance(values, Tensor) and (values.is_complex() or (values.layout, values.device)
                                           != (torch.strided, rollouts.mask.device)):
            raise UserError(f"{name} should return a tensor (B, T) = {tuple(rollouts.mask.shape)}, "
                            f"got {values.dtype}, {values.layout}, on {values.device}")
        return self.after(checked(values, rollouts, name)) if self.after else values


def checked_credit(chosen: Method, whose: str, rollouts: Rollouts, policy: object = None) -> Tensor:
    """The credit (B, T) of a method, by grpo.py's `values_of`."""
    return values_of(Called(chosen, whose, policy), rollouts, {})


def metrics_of(chosen: object) -> Metrics:
    """The numbers for metrics.jsonl that a choice has, as plain numbers."""
    metrics = getattr(chosen, "metrics", {})
    try:
        return {name: value.item() if hasattr(value, "item") else value  # of torch or numpy
                for name, value in metrics.items()}
    except (AttributeError, RuntimeError, ValueError):  # no dict, or a tensor of several numbers
        shown = " ".join(brief(metrics).split())
        raise UserError(f"metrics of {type(chosen).__name__} ({location_of(chosen)}) should be a "
                        f"dict with a number for each name, not {shown}") from None


def refuse_other_values(chosen: Method, make_another: Callable[[], Method], whose: str,
                        rollouts: Rollouts, policy: Any) -> None:
    """Ask a method again about a batch, and then another one that has got its saved state: a new
    object, as in a resumed run, or the function again. Refuse other values, or another state after
    them. A method that samples is asked about the answers to one problem, because it may be slow.

    A GPU adds in an order that changes, unless it is told not to. There the last digits may differ,
    and what is sampled may, too."""
    is_object, metrics = not inspect.isfunction(chosen), metrics_of(chosen)
    samples = bool(metrics.get("extra_answers"))
    is_exact = (rollouts.mask.device.type == "cpu"
                or torch.are_deterministic_algorithms_enabled())
    if samples:
        rollouts = replace(rollouts.of_problems(range(1)), forward=policy.extra_forward())
    if not rollouts.mask.any() or samples and not is_exact:
        return
    saved, state = copied_state(chosen), rollouts.generator.get_state()

    def found(method: Method, is_new: bool = True) -> list[Tensor]:
        """What it returns, and its state after that."""
        if saved and is_new:
            method.load_state_dict(deepcopy(saved))  # type: ignore[attr-defined]
        rollouts.generator.set_state(state)
        with redirect_stdout(StringIO()):  # what it says was said when the step was made
            values = checked_credit(method, whose, rollouts, policy)
        return [values, *copied_state(method).values()]

    first, other = found(chosen, is_new=False), found(make_another())
    if saved:
        chosen.load_state_dict(saved)  # type: ignore[attr-defined]
    if metrics:
        chosen.metrics = metrics  # type: ignore[attr-defined]
    rollouts.generator.set_state(state)
    if not are_same(first, other, is_exact):
        keeps = "keeps something from call to call, which a resumed run would forget"
        draws = "draws random numbers that are not from rollouts.generator"
        why = f"it, or a method of the task that it calls, {keeps}, or {draws}"
        if is_object and are_same(other, found(make_another()), is_exact):
            why = f"it {keeps}: its state_dict should save it, and its load_state_dict put it back"
        raise UserError(f"{whose} ({location_of(chosen)}) was asked twice about the same batch, "
                        f"and returned other values: {why}")


def copied_state(method: object) -> dict[str, Tensor]:
    state: dict[str, Tensor] = getattr(method, "state_dict", dict)()
    return {name: value.detach().clone() for name, value in state.items()}


def are_same(some: list[Tensor], others: list[Tensor], is_exact: bool) -> bool:
    """Whether all numbers are equal, where nan is equal to nan; or nearly so."""
    for one, other in zip(some, others, strict=True):
        close = 0.0 if is_exact else 1e-3 * float(one.double().abs().max())
        if one.shape != other.shape or not torch.allclose(one.double(), other.double(), 0.0, close,
                                                          equal_nan=True):
            return False
    return True


# The methods of the lab by their modules. A module is imported when its method is chosen or its
# help is printed.
MODULES = {
    "lab.credit.weightings": "attention_credit inverse_logprob_as_published entropy_ratio "
                             "random",
    "lab.credit.learned_importance": "learned_importance", "lab.credit.lambda_grpo": "lambda_grpo",
    "lab.credit.causal_ablation": "causal_ablation",
    "lab.credit.of_2026": "oar_g"}
MODULES_OF_ADVANTAGES = {
    "lab.credit.weightings": "span", "lab.credit.monte_carlo": "vine",
    "lab.credit.causal_ablation": "deletion", "lab.credit.measured": "measured",
    "lab.credit.critic": "gae",
    "lab.credit.baselines": "batch_mean",
    "lab.credit.turns": "turn_credit without_luck turn_mean"}
for choices, modules in ((MITIGATIONS, MODULES), (ADVANTAGES, MODULES_OF_ADVANTAGES)):
    for module, names in modules.items():
        choices.update(dict.fromkeys(names.split(), module))
