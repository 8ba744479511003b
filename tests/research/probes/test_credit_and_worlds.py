"""Measured credit against worlds where the truth can be listed; directions against plain loops."""
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from conftest import hand_made
from credit.measured import chance_of_others
from credit.measured import measured as measured_advantage
from credit.monte_carlo import continuation_rewards
from engine.errors import UserError
from engine.forward import response_log_probs
from engine.lab import Lab
from harness.progress import Progress
from engine.sampler import generate
from harness.settings import Settings
from research.probes.common import answer_gradients, gradients
from research.probes.credit import chain, true_credit, variance_of_mean
from research.probes.direction import Directions
from research.probes.planted import (PROMPT, draw_answers, planted_lab, sample_planted, true_rewards, worths)
from research.probes.world import TEXTS, make_world

ROUNDING = dict(rtol=1e-4, atol=1e-5)  # two orders of computing the same numbers


class WorldLab(Lab):
    """The small world as something that can be asked for continuations."""
    rewards: dict

    def reward_of(self, problem, ids) -> float:
        return self.rewards[tuple(ids)]


@pytest.fixture(scope="module")
def measured():
    world = make_world(seed=1, length=3)
    s = Settings(model="world", max_new_tokens=3, questions=40, answers=40)
    vocabulary = {text: i for i, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=TEXTS[0]))
    lab = WorldLab(s, None, world.model, tokenizer, None, None)
    lab.rewards = {}
    rows, lengths = world.rollouts.ids.tolist(), world.rollouts.length.tolist()
    for row, n, reward in zip(rows, lengths, world.rollouts.reward.tolist()):
        lab.rewards[tuple(row[:n])] = reward
    return world, lab, replace(world.rollouts, generator=torch.Generator().manual_seed(0))


def test_measured_credit_is_the_enumerated_one(measured):
    """Every token of every answer, with errors that say how far off it may be."""
    world, lab, rollouts = measured
    mask = rollouts.mask
    credit, exact = true_credit(lab, rollouts, 400), world.credit * mask
    z = ((credit.value - exact) / credit.error)[mask & (credit.error > 0)]
    assert z.abs().max() < 4.5 and 0.25 < z.square().mean() < 1.6
    assert (credit.value - exact).abs().max() < 0.12
    assert (credit.before - world.worth[:, :-1])[mask].abs().max() < 0.12
    assert (credit.quarters.mean(0) - credit.value).abs().max() < 1e-6
    # V before the first token and all credits make the reward
    total = (credit.value * mask).sum(1) + credit.before[:, 0]
    torch.testing.assert_close(total, rollouts.reward, rtol=0, atol=1e-5)


def test_the_advantage_measured_is_the_enumerated_credit_on_average(measured):
    """Every token is measured, with two answers each; a token that is too certain gets 0."""
    world, lab, rollouts = measured
    advantage = measured_advantage(lab, measured_k=2, measured_above=0.0)
    draws = []
    for seed in range(150):
        batch = replace(rollouts, generator=torch.Generator().manual_seed(seed))
        draws.append(advantage(batch, lab))
    assert advantage.metrics["extra_tokens"] > 0
    draws, mask = torch.stack(draws), rollouts.mask
    off = (draws.mean(0) - world.credit)[mask].abs()
    error = draws.std(0)[mask] / 150 ** 0.5
    assert (off < 4.5 * error + 1e-5).all() and error.max() < 0.05
    some = measured_advantage(lab, measured_k=2, measured_above=0.6)(batch, lab)
    undecided = chance_of_others(rollouts) > 0.6
    assert not some[~undecided].any() and some[undecided].any()


def test_measured_credit_is_that_of_temperature_1(measured):
    _, lab, rollouts = measured
    hot = replace(lab, settings=replace(lab.settings, temperature=0.7))
    for ask in (lambda: measured_advantage(hot), lambda: true_credit(hot, rollouts, 4)):
        with pytest.raises(UserError, match="--temperature 0.7: the chance of leaving"):
            ask()


def test_quarters_are_independent_estimates(measured):
    """The product of two quarters is no larger than the squared credit; the square of one is."""
    world, lab, rollouts = measured
    products, squares = [], []
    for seed in range(60):
        batch = replace(rollouts, generator=torch.Generator().manual_seed(seed))
        first, second, *_ = true_credit(lab, batch, 4).quarters[:, rollouts.mask]
        products.append((first * second).mean().item())
        squares.append((first * first).mean().item())
    true = world.credit[rollouts.mask].square().mean().item()
    error = np.std(products) / 60 ** 0.5
    assert abs(np.mean(products) - true) < 4 * error
    assert np.mean(squares) > true + 4 * error


def test_the_chain_by_hand():
    """Three tokens of chance 0.5, 0.8 and 0.9, reward 1; others are worth 0.2, 0.4 and 0:
    V_2 = 0.9, V_1 = 0.8 * 0.9 + 0.2 * 0.4, V_0 = (V_1 + 0.2) / 2. Of the last deviation's variance
    0.25 there is 0.01 in V_2, and 0.64 of that in V_1."""
    def row(*values):
        return torch.tensor([values], dtype=torch.float64)

    batch = hand_made([[1, 1, 1, 0]])
    batch = replace(batch, mask=batch.mask.bool(), scores={"reward": torch.tensor([1.0])})
    others, variance = row(0.2, 0.4, 0.0, float("nan")), row(0.01, 0.04, 0.25, 0.0)
    value, before, spread = chain(batch, row(0.5, 0.2, 0.1, 0.0), others, variance)
    torch.testing.assert_close(before[:, :3], row(0.5, 0.8, 0.9))
    torch.testing.assert_close(value, row(0.3, 0.1, 0.1, 0.0))
    in_2 = 0.1 ** 2 * 0.25
    in_1 = 0.8 ** 2 * in_2 + 0.2 ** 2 * 0.04
    expected = row(0.5 ** 2 * (in_1 + 0.01), 0.2 ** 2 * (in_2 + 0.04), in_2, 0.0)
    torch.testing.assert_close(spread, expected)


def test_certain_tokens_have_no_credit_and_cost_nothing(measured):
    _, lab, rollouts = measured
    sure = replace(rollouts, log_prob=torch.where(rollouts.mask, -1e-6, 0.0))
    credit = true_credit(lab, sure, 50)
    assert credit.spent == 0 and not credit.value.any() and not credit.error.any()


def test_few_equal_rewards_are_not_certain():
    """Four rewards of 1 in 0 to 1: with half at either end the mean is 0.9, the variance 0.09."""
    rewards = torch.ones(4, dtype=torch.float64)
    assert variance_of_mean(rewards, 0.0, 1.0) == pytest.approx(0.09 / 4)
    assert variance_of_mean(rewards, 1.0, 1.0) == 0


@pytest.fixture(scope="module")
def planted():
    """Far from uniform, so that what follows depends on what was written."""
    lab, generator = planted_lab(seed=2, length=6, keys=2), torch.Generator()
    with torch.no_grad():
        for parameter in lab.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator.manual_seed(0))
            parameter.add_(noise * 0.3)
    return lab


def test_planted_values_are_those_of_all_answers(planted):
    """All 4,096 answers, each with its probability by the training forward pass."""
    rollouts = sample_planted(planted, 1, 1, 2)
    every = torch.tensor(list(itertools.product(range(4), repeat=6)))
    whole = replace(rollouts, ids=every, mask=torch.ones_like(every, dtype=torch.bool),
                    group=torch.zeros(len(every), dtype=torch.long))
    with torch.no_grad():
        log_prob = response_log_probs(planted.model, whole, torch.arange(len(every)))
    chance = log_prob.double().sum(1).exp()
    reward = torch.tensor([planted.reward_of(None, row) for row in every.tolist()]).double()
    assert chance.sum().item() == pytest.approx(1, abs=1e-5)

    def V(prefix):
        alike = (every[:, :len(prefix)] == torch.tensor(prefix, dtype=torch.long)).all(1)
        return (chance[alike] @ reward[alike] / chance[alike].sum()).item()

    for row, credit in zip(rollouts.ids.tolist(), rollouts.true_credit.tolist()):
        expected = [V(row[:t + 1]) - V(row[:t]) for t in range(6)]
        assert credit == pytest.approx(expected, abs=1e-5)
    assert worths(planted)[()] == pytest.approx(V([]), abs=1e-6)


def test_planted_answers_are_drawn_as_generate_draws_them(planted):
    """The log-probs on record are the training forward's, and generate's with its cache."""
    rollouts, rows = sample_planted(planted, 3, 2, 3), torch.arange(6)
    generated = generate(planted.model, [PROMPT], answers=6, max_new_tokens=6, seed=9)
    again = replace(rollouts, ids=generated.tokens, mask=generated.mask)
    with torch.no_grad():
        trained = response_log_probs(planted.model, rollouts, rows)
        trained_again = response_log_probs(planted.model, again, rows)
    torch.testing.assert_close(trained, rollouts.log_prob, **ROUNDING)
    torch.testing.assert_close(trained_again, generated.log_prob, **ROUNDING)
    many = draw_answers(planted, 4000, seed=1).tokens
    share = (many[:, planted.keys[0]] == planted.right[0]).float().mean().item()
    assert share == pytest.approx(chance_of_first_right(planted), abs=0.04)


def chance_of_first_right(lab):
    with torch.no_grad():
        ids = torch.tensor([PROMPT + [0] * 6])
        return lab.model(ids)[0, lab.keys[0]].softmax(-1)[lab.right[0]].item()


def test_true_rewards_add_up_and_stand_at_the_keys(planted):
    rollouts, between = sample_planted(planted, 4, 2, 4), [0, 2, 3, 5]
    rewards = true_rewards(planted, rollouts)
    assert planted.keys == [1, 4]
    torch.testing.assert_close(rewards.sum(1), rollouts.reward)
    assert not rewards[:, between].any() and not rollouts.true_credit[:, between].any()
    total = rollouts.true_credit.sum(1) + worths(planted)[()]
    torch.testing.assert_close(total, rollouts.reward)


def test_measured_credit_puts_the_planted_keys_on_top(planted):
    rollouts = sample_planted(planted, 5, 2, 4)
    credit = true_credit(planted, rollouts, 400)
    known = credit.error > 0
    z = (credit.value - rollouts.true_credit)[known] / credit.error[known]
    assert z.abs().max() < 4.5
    top = credit.value.abs().topk(2).indices.tolist()
    large = (rollouts.true_credit.abs() > 0.15).nonzero().tolist()
    assert len(large) >= 4 and all(t in top[b] for b, t in large)


def test_continuations_ask_the_lab_what_an_answer_is_worth(planted):
    rollouts = sample_planted(planted, 6, 1, 2)
    right = (0, planted.right[0], 0, 0, planted.right[1])
    rewards, _ = continuation_rewards(planted, rollouts, [(0, right), (0, right[:2])], 3)
    assert rewards[0].tolist() == [1, 1, 1] and set(rewards[1].tolist()) <= {0.5, 1}


def test_gradients_of_single_log_probs(small_model, rollouts):
    """Several from one forward pass are each their own backward pass; answers add up."""
    lab = SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4))
    places = rollouts.mask.float() * torch.arange(rollouts.mask.shape[1])
    coefficients = {"one": rollouts.advantage, "two": places}
    at_once = gradients(lab, rollouts, coefficients)
    for name, coefficient in coefficients.items():
        small_model.zero_grad()
        log_prob = response_log_probs(small_model, rollouts, torch.arange(6))
        (coefficient * log_prob).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in small_model.parameters()])
        rounding = dict(rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
        torch.testing.assert_close(at_once[name], expected, **rounding)
        by_answer = sum(parts[0] for parts in answer_gradients(lab, rollouts, [coefficient]))
        torch.testing.assert_close(by_answer, expected, **rounding)
    small_model.zero_grad(set_to_none=True)


def test_directions_are_those_of_all_pairs():
    """Cosine, noise and one batch's cosine from sums, against a loop over pairs of batches."""
    rng = np.random.default_rng(0)

    def normal():
        return torch.tensor(rng.normal(size=12)).float()

    true = normal()
    arms = {"ref": [true + normal() for _ in range(6)]}
    arms["other"] = [gradient.roll(1) * 0.5 + 2 * true for gradient in arms["ref"]]
    directions = Directions("ref", 3)
    for n in range(6):
        directions.add(n // 2, {name: gradients[n] for name, gradients in arms.items()})
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]

    def mean(name, other):
        return np.mean([(arms[name][i] @ arms[other][j]).item() for i, j in pairs])

    square = np.mean([(g @ g).item() for g in arms["other"]])
    length, product = np.sqrt(mean("ref", "ref")), mean("other", "ref")
    numbers = directions.estimates("other")
    cosine = product / length / np.sqrt(mean("other", "other"))
    assert numbers["cosine"].value == pytest.approx(cosine, rel=1e-5)
    assert numbers["off"].value == pytest.approx(numbers["cosine"].value - 1)
    assert numbers["off"].high == pytest.approx(numbers["cosine"].high - 1)
    noise = (square - mean("other", "other")) / (product / length) ** 2
    assert numbers["noise"].value == pytest.approx(noise, rel=1e-4)
    one_batch = product / length / np.sqrt(square)
    assert numbers["one batch"].value == pytest.approx(one_batch, rel=1e-5)
    along = np.mean([(true @ g).item() for g in arms["ref"]])
    expected = along / (true.norm().item() * length)
    assert directions.batch_cosine(true) == pytest.approx(expected, rel=1e-5)


def test_a_block_that_is_left_out_leaves_nothing_behind():
    rng = np.random.default_rng(1)
    gradients = [torch.tensor(rng.normal(size=5) + 3).float() for _ in range(6)]
    whole, fewer = Directions("a", 3), Directions("a", 2)
    for n, gradient in enumerate(gradients):
        whole.add(n // 2, {"a": gradient})
        if n >= 2:
            fewer.add(n // 2 - 1, {"a": gradient})
    left = whole.numbers("a", [whole.products("a", "a")] * 3, np.array([1, 2]))
    assert left["noise"] == pytest.approx(fewer.estimates("a")["noise"].value)


def test_of_a_large_gradient_some_entries_are_kept(monkeypatch):
    monkeypatch.setattr("research.probes.direction.MOST", 100)
    directions, gradient = Directions("a", 2), torch.arange(1000.0)
    kept = directions.kept(gradient)
    assert 50 < len(kept) <= 100 and kept.max() > 900
    assert torch.equal(kept, directions.kept(gradient))


def test_progress_says_what_is_left(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 100.0, 130.0])
    monkeypatch.setattr("harness.progress.time.monotonic", lambda: next(clock))
    progress = Progress(first=1, second=3)
    progress("first", 0.4)     # 10 s: too early for another line
    progress("second", 0.0)    # a quarter done after 100 s
    assert capsys.readouterr().err == "   25%  second, about 5 min 00 s left\n"
