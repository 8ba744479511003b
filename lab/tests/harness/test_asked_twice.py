"""A method that is asked twice about a batch and gives two answers is refused: it keeps something
that a resumed run would forget, or draws random numbers that no seed decides."""
import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lab.engine.errors import UserError
from lab.engine.methods import copied_state, make, metrics_of, refuse_other_values
from lab_runs import SHORT, run
from runs import lines
from small import StateIdea, put_in

KEEPS, DRAWS = "its state_dict should save it, and its load_state_dict put it back", "or draws"


def asked(make_one, rollouts):
    """What a run does in its first two steps, and what it says: a function is asked before its
    values are taken, an object after that, beside a new one. What is not refused is left as it
    was."""
    one = method = make_one()
    other, is_function = make_one, inspect.isfunction(one)
    if is_function:
        method = make(one, {}, None)
        other = partial(make, one, {}, None)
    for step in (1, 2):
        batch = replace(rollouts, step=step, entropy=rollouts.entropy * step)
        if not is_function:
            method(batch, None)
        state, metrics = copied_state(method), dict(metrics_of(method))
        generator = batch.generator.get_state()
        try:
            refuse_other_values(method, other, "--mitigation mine", batch, None)
        except UserError as error:
            return f"step {step}: {error}"
        assert torch.equal(batch.generator.get_state(), generator) and metrics_of(method) == metrics
        for name, now in copied_state(method).items():
            assert torch.allclose(now, state[name], 0, 0, equal_nan=True)
        if is_function:
            method(batch, None)
    return ""


def seeing(seen):
    def idea(rollouts):
        is_new = float(rollouts.entropy.sum()) not in seen
        seen.add(float(rollouts.entropy.sum()))
        return rollouts.entropy + is_new
    return idea


def from_the_batch(rollouts):
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(9, (1,), generator=rollouts.generator)))
        return torch.rand(rollouts.mask.shape)


class Idea:
    """An object without a state, whose `change` may keep something."""
    n = 0

    def __init__(self, policy):
        self.mean, self.box, self.metrics = None, SimpleNamespace(n=0), {"calls": 0}

    def __call__(self, rollouts, policy):
        self.metrics["calls"] += 1
        return rollouts.entropy + self.change(rollouts)


def of(change, kind=Idea, **more):
    """Makes objects of one class."""
    mine = type("Mine", (kind,), {"change": change, "__module__": __name__, **more})
    return lambda: mine(None)


def what_the_first_batch_was(self, rollouts):
    self.mean = float(rollouts.entropy.mean()) if self.mean is None else self.mean
    return self.mean


def of_its_class(self, rollouts):
    type(self).n += 1
    return self.n


class Noisy(StateIdea):
    """Its values are the same, its state moves by chance."""
    def __call__(self, rollouts, policy):
        self.mean = self.mean + torch.rand(1)
        return rollouts.entropy


def a_little_more(self, rollouts):
    self.box.n += 1e-5
    return self.box.n


class Best(StateIdea):
    """Nothing is known of its state yet."""
    def __init__(self, policy):
        self.mean = torch.full((2,), torch.nan)

    def __call__(self, rollouts, policy):
        return rollouts.entropy


FORMS = {  # how to make it, in which step it is noticed, and what is said
    "a set of what was seen": (lambda: seeing(set()), 1, DRAWS),
    "random numbers of the batch": (lambda: from_the_batch, 0, ""),
    "an object: the first batch": (of(what_the_first_batch_was), 2, KEEPS),
    "an object: its class": (of(of_its_class), 1, DRAWS),
    "an object: little by little": (of(a_little_more), 1, KEEPS),
    "a state": (lambda: StateIdea(None), 0, ""),
    "a state that is not put back": (
        of(None, StateIdea, load_state_dict=lambda *_: None), 1, KEEPS),
    "a state that moves by chance": (lambda: Noisy(None), 1, DRAWS),
    "a state that is not a number yet": (lambda: Best(None), 0, "")}


@pytest.mark.parametrize("form", FORMS)
def test_what_keeps_or_draws_is_told(form, rollouts):
    make_one, step, why = FORMS[form]
    said = asked(make_one, rollouts)
    if why:
        assert said.startswith(f"step {step}: --mitigation mine (lab/tests/") and why in said
        assert (DRAWS in said) == (why != KEEPS)
    else:
        assert said == ""


def test_a_method_that_samples_is_asked_about_the_first_problem(policy, rollouts):
    def extra(self, rollouts):
        found.append(len(rollouts.group))
        self.metrics = {"calls": 0, "extra_answers": 9}
        return 0

    found, make_one = [], of(extra)
    method = make_one()
    for _ in range(2):
        method(rollouts, policy)
        refuse_other_values(method, make_one, "mine", rollouts, policy)
    assert found == [6, 3, 3] * 2


def late(self, rollouts):
    self.box.n += rollouts.step > 2
    return self.box.n


class Changing(Idea):
    def __call__(self, rollouts, policy):
        with torch.no_grad():
            next(policy.model.parameters())[0, 0] += 1e-3
        return rollouts.entropy


@pytest.mark.parametrize("idea, steps, said", [  # the steps that are on record before it is told
    (seeing(set()), 0, "was asked twice about the same batch"),
    (type(of(late)()), 3, KEEPS), (Changing, 0, "changes the model, which the update alone")])
def test_a_run_asks_in_its_first_two_steps_and_at_checkpoints(monkeypatch, tmp_path, idea, steps,
                                                              said):
    put_in(monkeypatch, idea, "mine")
    found = run(*SHORT, "--steps", 9, "--checkpoint_every", 4, "--out", tmp_path / "x",
                "--mitigation", "mine", expect=1).stderr
    assert said in found and len(lines(tmp_path / "x/metrics.jsonl")) == steps
