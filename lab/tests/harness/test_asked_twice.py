"""A method, a reply or a reward that is asked twice and answers twice is refused or told: it keeps
something that a resumed run would forget, or draws random numbers that no seed decides."""
import random
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import refusal
from small import StateIdea, put_in
from lab.credit.critic import Trained
from lab.engine.methods import make, refuse_other_values
from lab.harness.kept import Kept
from lab_runs import SHORT, run
from runs import lines


def seeing(seen):
    def idea(rollouts):
        is_new = float(rollouts.entropy.sum()) not in seen
        seen.add(float(rollouts.entropy.sum()))
        return rollouts.entropy + is_new
    return idea


COUNTED = 0


def count():
    global COUNTED
    COUNTED += 1
    return COUNTED


def from_step_2():
    kept = []

    def idea(rollouts):
        kept.extend([1] * (rollouts.step > 1))
        return rollouts.entropy + len(kept)
    return idea


def drawing(draw):
    return lambda rollouts: rollouts.entropy + draw()


FUNCTIONS = {  # all are noticed by their values; the second batch is another one
    "a set of what was seen": lambda: seeing(set()),
    "a global of a helper": lambda: drawing(count),
    "a state that begins to move in step 2": from_step_2,
    "the clock": lambda: drawing(lambda: time.perf_counter_ns() % 1e6),
    "a generator that is kept": lambda: drawing(random.Random(0).random),
    "torch's": lambda: drawing(lambda: float(torch.rand(1)))}


def in_two_steps(ask, rollouts):
    for step in (1, 2):
        ask(replace(rollouts, step=step, entropy=rollouts.entropy * step))


@pytest.mark.parametrize("form", FUNCTIONS)
def test_a_function_that_keeps_or_draws_is_told_in_its_first_two_steps(form, rollouts):
    method = make(FUNCTIONS[form](), {}, None)

    def step(batch):
        refuse_other_values(method, lambda: method, "--mitigation mine", batch, None)
        method(batch, None)
    said = refusal(in_two_steps, step, rollouts)
    assert said.startswith("--mitigation mine (lab/tests/harness/test_asked_twice.py:")
    assert "was asked twice" in said and "keeps something" in said and "draws random" in said


class Idea:
    """An idea without a state, whose `change` may keep something."""
    n = 0

    def __init__(self, policy):
        self.mean, self.box, self.metrics = None, SimpleNamespace(n=0), {"calls": 0}
        self.generator = torch.Generator()

    def __call__(self, rollouts, policy):
        self.metrics["calls"] += 1
        return rollouts.entropy + self.change(rollouts)


def once(self, rollouts):
    """What the first batch was stays."""
    self.mean = float(rollouts.entropy.mean()) if self.mean is None else self.mean
    return self.mean


def counts_in_its_class(self, rollouts):
    type(self).n += 1
    return self.n


def draws_its_own(self, rollouts):
    return float(torch.rand(1, generator=self.generator))


KEEPS, DRAWS = "its state_dict should save it, and its load_state_dict put it back", "or draws"


@pytest.mark.parametrize("change, why", [
    (once, KEEPS), (draws_its_own, KEEPS), (counts_in_its_class, DRAWS)])
def test_an_object_is_compared_with_a_new_one(change, why, rollouts):
    """Which of the two it is follows from a third one. `once` shows in the second step."""
    kind = type("Mine", (Idea,), {"change": change, "__module__": __name__})
    method = kind(None)

    def step(batch):
        method(batch, None)
        refuse_other_values(method, lambda: kind(None), "--mitigation mine", batch, None)
    said = refusal(in_two_steps, step, rollouts)
    assert said.startswith("--mitigation mine (lab/tests/harness/test_asked_twice.py:")
    assert why in said and (why == DRAWS or DRAWS not in said)


@pytest.mark.parametrize("put_back, is_refused", [(True, False), (False, True)])
def test_a_state_is_put_back_into_the_new_one_and_the_old_one(put_back, is_refused, rollouts):
    """And the metrics are those of the step."""
    class Mine(StateIdea):
        def load_state_dict(self, tensors):
            if put_back:
                super().load_state_dict(tensors)

    method = Mine(None)
    method(rollouts, None)
    method.metrics, mean = {"x": 1}, method.mean.clone()
    generator = rollouts.generator.get_state()
    if is_refused:
        assert refusal(refuse_other_values, method, lambda: Mine(None), "mine", rollouts, None
                       ).endswith(KEEPS)
        return
    refuse_other_values(method, lambda: Mine(None), "mine", rollouts, None)
    assert torch.equal(method.mean, mean) and method.metrics == {"x": 1}
    assert torch.equal(rollouts.generator.get_state(), generator)


def test_a_state_that_moves_by_chance_is_refused_though_its_values_are_the_same(rollouts):
    class Noisy(StateIdea):
        def __call__(self, rollouts, policy):
            self.mean = self.mean + torch.rand(1)
            return rollouts.entropy

    assert "or draws" in refusal(refuse_other_values, Noisy(None), lambda: Noisy(None), "mine",
                                 rollouts, None)


def test_what_is_trained_beside_the_policy_is_as_it_was(rollouts):
    class Mine:
        def __init__(self):
            torch.manual_seed(0)
            self.trained = Trained(torch.nn.Linear(1, 1), 0.1, torch.device("cpu"))
            self.state_dict = self.trained.state_dict
            self.load_state_dict = self.trained.load_state_dict

        def __call__(self, rollouts, policy):
            value = self.trained.module(rollouts.entropy[..., None])[..., 0]
            self.trained.gradient_step((value - 1).square().mean())
            return value.detach()

    method = Mine()
    for _ in range(3):
        method(rollouts, None)
        before = {name: value.clone() for name, value in method.state_dict().items()}
        refuse_other_values(method, Mine, "mine", rollouts, None)
        assert all(torch.equal(value, before[name])
                   for name, value in method.state_dict().items())


def test_random_numbers_may_come_from_the_batch(rollouts):
    def mine(batch):
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(9, (1,), generator=batch.generator)))
            return torch.rand(batch.mask.shape)

    refuse_other_values(make(mine, {}, None), lambda: make(mine, {}, None), "mine", rollouts, None)


def test_a_method_that_samples_is_asked_about_the_first_problem(policy, rollouts):
    asked = []

    class Sampling(Idea):
        def __call__(self, rollouts, policy):
            asked.append(len(rollouts.group))
            self.metrics = {"extra_answers": 9}
            return rollouts.entropy

    method = Sampling(None)
    for _ in range(2):
        method(rollouts, policy)
        refuse_other_values(method, lambda: Sampling(None), "mine", rollouts, policy)
    assert asked == [6, 3, 3] * 2


SEEN, MEAN, MEMO = set(), [0.0], {}


def moved(rollouts, seen, mean):
    """A running mean that takes each step once, so that asking twice about one step shows nothing.
    """
    if rollouts.step not in seen:
        seen.add(rollouts.step)
        mean[0] = 0.9 * mean[0] + 0.1 * float(rollouts.entropy.sum())
    return 1 + rollouts.entropy * mean[0]


def of_globals(rollouts):
    return moved(rollouts, SEEN, MEAN)


def of_closure():
    seen, mean = set(), [0.0]
    return lambda rollouts: moved(rollouts, seen, mean)


def of_a_number():
    last, value = 0, 0.0

    def idea(rollouts):
        nonlocal last, value
        if rollouts.step != last:
            last, value = rollouts.step, value + float(rollouts.entropy.sum())
        return 1 + rollouts.entropy * value
    return idea


def of_attribute():
    def idea(rollouts):
        return moved(rollouts, idea.seen, idea.mean)
    idea.seen, idea.mean = set(), [0.0]
    return idea


def remembering(rollouts):
    """The memory only saves time: what it holds follows from the batch."""
    total = float(rollouts.entropy.sum())
    if total not in MEMO:
        MEMO[total] = total ** 0.5
    return 1 + rollouts.entropy * MEMO[total]


@pytest.mark.parametrize("made, is_refused", [
    (lambda: of_globals, True), (of_closure, True), (of_a_number, True), (of_attribute, True),
    (lambda: remembering, False)])
def test_a_function_is_compared_with_what_it_is_after_a_resume(made, is_refused, rollouts):
    function = made()
    method, kept = make(function, {}, None), Kept(function)

    def step(batch):
        refuse_other_values(method, lambda: kept.forgetting(method), "--mitigation mine", batch,
                            None)
        method(batch, None)
    step(replace(rollouts, step=1))
    second = replace(rollouts, step=2, entropy=rollouts.entropy * 2)
    if is_refused:
        assert "which a resumed run would forget" in refusal(step, second)
    else:
        before = dict(MEMO)
        step(second)
        assert before.items() <= MEMO.items()  # what it had is put back


def test_a_run_notices_what_a_function_keeps_once_a_step(monkeypatch, tmp_path):
    put_in(monkeypatch, of_closure(), "mine")
    said = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert "would forget" in said and len(lines(tmp_path / "x/metrics.jsonl")) == 1


class Late(Idea):
    """Its state begins to move in step 3."""
    def change(self, rollouts):
        self.box.n += rollouts.step > 2
        return self.box.n


def test_a_run_asks_in_its_first_two_steps_and_at_checkpoints(monkeypatch, tmp_path):
    put_in(monkeypatch, Late, "mine")
    said = run(*SHORT, "--steps", 9, "--checkpoint_every", 4, "--out", tmp_path / "x",
               "--mitigation", "mine", expect=1).stderr
    assert said.endswith(KEEPS) and len(lines(tmp_path / "x/metrics.jsonl")) == 3


def test_a_run_asks_a_function_before_it_takes_its_values(monkeypatch, tmp_path):
    """So it sees one that answers once in its own way for each batch."""
    put_in(monkeypatch, seeing(set()), "mine")
    said = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert "was asked twice about the same batch" in said and not (tmp_path / "x").exists()


def test_a_method_that_changes_the_model_is_refused(monkeypatch, tmp_path):
    class Changing(Idea):
        def __call__(self, rollouts, policy):
            with torch.no_grad():
                next(policy.model.parameters())[0, 0] += 1e-3
            return rollouts.entropy

    put_in(monkeypatch, Changing, "mine")
    said = run(*SHORT, "--out", tmp_path / "x", "--mitigation", "mine", expect=1).stderr
    assert re.search(r"--mitigation mine \(.*\) changes the model, which the update alone", said)
