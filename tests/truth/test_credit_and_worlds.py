"""Measured credit against worlds where the truth can be listed; directions of gradients against plain loops."""
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from conftest import hand_made
from credit.monte_carlo import continuation_rewards
from engine.lab import Lab
from engine.sampler import generate
from engine.forward import response_log_probs
from engine.settings import Settings
from truth.common import Progress, answer_gradients, gradients
from truth.credit import chain, true_credit, variance_of_mean
from truth.direction import Directions
from truth.planted import PROMPT, draw_answers, planted_lab, sample_planted, true_rewards, worths
from truth.world import TEXTS, make_world


class WorldLab(Lab):
    """The enumerated world as something that can be asked for continuations."""
    rewards: dict

    def reward_of(self, problem, ids) -> float:
        return self.rewards[tuple(ids)]


@pytest.fixture(scope="module")
def measured():
    world = make_world(seed=1, length=3)
    s = Settings(model="world", max_new_tokens=3, questions=40, answers=40)
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(TEXTS)}, unk_token=TEXTS[0]))
    lab = WorldLab(s, None, world.model, tokenizer, None, None)
    answers = [tuple(row[:n]) for row, n in zip(world.rollouts.ids.tolist(), world.rollouts.length.tolist())]
    lab.rewards = dict(zip(answers, world.rollouts.reward.tolist()))
    return world, lab, replace(world.rollouts, generator=torch.Generator().manual_seed(0))


def test_measured_credit_is_the_enumerated_one(measured):
    """Every token of every answer, with errors that say how far off it may be."""
    world, lab, rollouts = measured
    credit, exact = true_credit(lab, rollouts, 400), (world.worth[:, 1:] - world.worth[:, :-1]) * world.rollouts.mask
    z = ((credit.value - exact) / credit.error)[rollouts.mask & (credit.error > 0)]
    assert z.abs().max() < 4.5 and 0.5 < z.square().mean() < 1.6
    assert (credit.value - exact).abs().max() < 0.12 and (credit.before - world.worth[:, :-1])[rollouts.mask].abs().max() < 0.12
    assert (credit.quarters.mean(0) - credit.value).abs().max() < 1e-6
    total = (credit.value * rollouts.mask).sum(1) + credit.before[:, 0]
    torch.testing.assert_close(total, rollouts.reward, rtol=0, atol=1e-5)  # V before the first token and all credits make the reward


def test_quarters_are_independent_estimates(measured):
    """The product of two quarters is not larger than the squared credit, as the square of one is."""
    world, lab, rollouts = measured
    exact, products, squares = (world.worth[:, 1:] - world.worth[:, :-1])[rollouts.mask], [], []
    for seed in range(60):
        credit = true_credit(lab, replace(rollouts, generator=torch.Generator().manual_seed(seed)), 4)
        q = credit.quarters[:, rollouts.mask]
        products.append((q[0] * q[1]).mean().item()), squares.append((q[0] * q[0]).mean().item())
    true, error = exact.square().mean().item(), np.std(products) / 60 ** 0.5
    assert abs(np.mean(products) - true) < 4 * error and np.mean(squares) > true + 4 * error


def test_the_chain_by_hand():
    """Three tokens of chance 0.5, 0.8 and 0.9, reward 1; others are worth 0.2, 0.4 and 0: V_2 = 0.9, V_1 = 0.8 * 0.9 + 0.2 * 0.4, V_0 = (V_1 + 0.2) / 2.
    The last deviation's variance 0.25 is 0.01 of it in V_2 and 0.64 of that in V_1."""
    batch = hand_made([[1, 1, 1, 0]])
    batch = replace(batch, mask=batch.mask.bool(), scores={"reward": torch.tensor([1.0])})
    q, wide = torch.tensor([[0.5, 0.2, 0.1, 0.0]], dtype=torch.float64), dict(dtype=torch.float64)
    value, before, spread = chain(batch, q, torch.tensor([[0.2, 0.4, 0.0, float("nan")]], **wide), torch.tensor([[0.01, 0.04, 0.25, 0.0]], **wide))
    torch.testing.assert_close(before[0, :3], torch.tensor([0.5, 0.8, 0.9], **wide))
    torch.testing.assert_close(value[0], torch.tensor([0.3, 0.1, 0.1, 0.0], **wide))
    in_2 = 0.1 ** 2 * 0.25
    in_1 = 0.8 ** 2 * in_2 + 0.2 ** 2 * 0.04
    torch.testing.assert_close(spread[0], torch.tensor([0.5 ** 2 * (in_1 + 0.01), 0.2 ** 2 * (in_2 + 0.04), in_2, 0.0], **wide))


def test_certain_tokens_have_no_credit_and_cost_nothing(measured):
    world, lab, rollouts = measured
    sure = replace(rollouts, log_prob=torch.where(rollouts.mask, -1e-6, 0.0))
    credit = true_credit(lab, sure, 50)
    assert credit.spent == 0 and not credit.value.any() and not credit.error.any()


def test_few_equal_rewards_are_not_certain():
    """Four rewards of 1 in a range of 0 to 1: weights 4 and half at either end, mean 0.9, variance 0.09 over 4."""
    assert variance_of_mean(torch.ones(4, dtype=torch.float64), 0.0, 1.0) == pytest.approx(0.09 / 4)
    assert variance_of_mean(torch.ones(4, dtype=torch.float64), 1.0, 1.0) == 0


@pytest.fixture(scope="module")
def planted():
    lab = planted_lab(seed=2, length=6, keys=2)
    with torch.no_grad():
        for parameter in lab.model.parameters():  # far from uniform, so that what follows depends on what was written
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    return lab


def test_planted_values_are_those_of_all_answers(planted):
    """All 4,096 answers, each with its probability by the training forward pass."""
    rollouts = sample_planted(planted, 1, 1, 2)
    every = torch.tensor(list(itertools.product(range(4), repeat=6)))
    whole = replace(rollouts, ids=every, mask=torch.ones_like(every, dtype=torch.bool), group=torch.zeros(len(every), dtype=torch.long))
    with torch.no_grad():
        chance = response_log_probs(planted.model, whole, torch.arange(len(every))).double().sum(1).exp()
    reward = torch.tensor([planted.reward_of(None, row) for row in every.tolist()], dtype=torch.float64)
    assert chance.sum().item() == pytest.approx(1, abs=1e-5)

    def V(prefix):
        begins = (every[:, :len(prefix)] == torch.tensor(prefix)).all(1) if prefix else torch.ones(len(every), dtype=torch.bool)
        return (chance[begins] @ reward[begins] / chance[begins].sum()).item()

    for row, credit in zip(rollouts.ids.tolist(), rollouts.true_credit.tolist()):
        assert credit == pytest.approx([V(row[:t + 1]) - V(row[:t]) for t in range(6)], abs=1e-5)
    assert worths(planted)[()] == pytest.approx(V([]), abs=1e-6)


def test_planted_answers_are_drawn_as_generate_draws_them(planted):
    """The log-probs on record are the training forward's, and generate's with its cache."""
    rollouts, rows = sample_planted(planted, 3, 2, 3), torch.arange(6)
    with torch.no_grad():
        torch.testing.assert_close(response_log_probs(planted.model, rollouts, rows), rollouts.log_prob, rtol=1e-4, atol=1e-5)
    g = generate(planted.model, [PROMPT], answers=6, max_new_tokens=6, seed=9)
    again = replace(rollouts, ids=g.tokens, mask=g.mask, log_prob=g.log_prob)
    with torch.no_grad():
        torch.testing.assert_close(response_log_probs(planted.model, again, rows), g.log_prob, rtol=1e-4, atol=1e-5)
    many = draw_answers(planted, 4000, seed=1).tokens
    assert (many[:, 1] == planted.right[0]).float().mean().item() == pytest.approx(first_right(planted), abs=0.04)


def first_right(lab):
    with torch.no_grad():
        ids = torch.tensor([PROMPT + [0] * 6])
        return lab.model(ids)[0, lab.keys[0]].softmax(-1)[lab.right[0]].item()


def test_true_rewards_add_up_and_stand_at_the_keys(planted):
    rollouts = sample_planted(planted, 4, 2, 4)
    given = true_rewards(planted, rollouts)
    torch.testing.assert_close(given.sum(1), rollouts.reward)
    assert planted.keys == [1, 4] and not given[:, [0, 2, 3, 5]].any() and not rollouts.true_credit[:, [0, 2, 3, 5]].any()
    torch.testing.assert_close(rollouts.true_credit.sum(1) + worths(planted)[()], rollouts.reward)


def test_measured_credit_puts_the_planted_keys_on_top(planted):
    rollouts = sample_planted(planted, 5, 2, 4)
    credit = true_credit(planted, rollouts, 400)
    z = (credit.value - rollouts.true_credit)[credit.error > 0] / credit.error[credit.error > 0]
    assert z.abs().max() < 4.5
    large = (rollouts.true_credit.abs() > 0.15).nonzero().tolist()
    assert len(large) >= 4 and all(t in credit.value[b].abs().topk(2).indices.tolist() for b, t in large)


def test_continuations_ask_the_lab_what_an_answer_is_worth(planted):
    rollouts = sample_planted(planted, 6, 1, 2)
    right = [0, planted.right[0], 0, 0, planted.right[1]]
    rewards, _ = continuation_rewards(planted, rollouts, [(0, tuple(right)), (0, tuple(right[:2]))], 3)
    assert rewards[0].tolist() == [1, 1, 1] and set(rewards[1].tolist()) <= {0.5, 1}


def test_gradients_of_single_log_probs(small_model, rollouts):
    """Several coefficients from one forward pass are each their own backward pass; answers add up to the batch."""
    lab = SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4))
    one, two = rollouts.advantage, rollouts.mask.float() * torch.arange(rollouts.mask.shape[1])
    found = gradients(lab, rollouts, {"one": one, "two": two})
    for name, coefficient in (("one", one), ("two", two)):
        small_model.zero_grad()
        (coefficient * response_log_probs(small_model, rollouts, torch.arange(6))).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in small_model.parameters()])
        rounding = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=rounding)
        apart = sum(parts[0] for parts in answer_gradients(lab, rollouts, [coefficient]))
        torch.testing.assert_close(apart, expected, rtol=1e-4, atol=rounding)
    small_model.zero_grad(set_to_none=True)


def test_directions_are_those_of_all_pairs():
    """Cosine, noise and one batch's cosine from sums, against a loop over pairs of different batches."""
    rng = np.random.default_rng(0)
    true = torch.tensor(rng.normal(size=12)).float()
    arms = {"ref": [true + torch.tensor(rng.normal(size=12)).float() for _ in range(6)]}
    arms["other"] = [gradient.roll(1) * 0.5 + 2 * true for gradient in arms["ref"]]
    directions = Directions("ref", 3)
    for n in range(6):
        directions.add(n // 2, {name: gradients[n] for name, gradients in arms.items()})
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]

    def mean(name, other):
        return np.mean([(arms[name][i] @ arms[other][j]).item() for i, j in pairs])

    square = np.mean([(g @ g).item() for g in arms["other"]])
    found = directions.estimates("other")
    assert found["cosine"].value == pytest.approx(mean("other", "ref") / np.sqrt(mean("other", "other") * mean("ref", "ref")), rel=1e-5)
    along = mean("other", "ref") / np.sqrt(mean("ref", "ref"))
    assert found["noise"].value == pytest.approx((square - mean("other", "other")) / along ** 2, rel=1e-4)
    assert found["off"].value == pytest.approx(found["cosine"].value - 1) and found["off"].high == pytest.approx(found["cosine"].high - 1)
    assert found["one batch"].value == pytest.approx(mean("other", "ref") / np.sqrt(mean("ref", "ref") * square), rel=1e-5)
    assert directions.batch_cosine(true) == pytest.approx(
        np.mean([(true @ g).item() for g in arms["ref"]]) / (true.norm().item() * np.sqrt(mean("ref", "ref"))), rel=1e-5)


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
    monkeypatch.setattr("truth.direction.MOST", 100)
    directions, gradient = Directions("a", 2), torch.arange(1000.0)
    kept = directions.kept(gradient)
    assert 50 < len(kept) <= 100 and torch.equal(kept, directions.kept(gradient)) and kept.max() > 900


def test_progress_says_what_is_left(capsys, monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 100.0, 130.0])
    monkeypatch.setattr("truth.common.time.monotonic", lambda: next(clock))
    progress = Progress(first=1, second=3)
    progress("first", 0.4)     # 10 s: too early for another line
    progress("second", 0.0)    # a quarter done after 100 s
    assert capsys.readouterr().err == "   25%  second, about 5 min 00 s left\n"
