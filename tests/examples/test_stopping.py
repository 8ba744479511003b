"""The game with a stop: its gradients by plain recursion and by playing it."""
import random

import pytest
import torch
from conftest import ROOT

from examples import stopping
from examples.guess import Task
from examples.stopping import Game, expected_gradients, logits_of
from lab.harness.build import load_policy
from lab.harness.settings import make_settings

GAME = Game("some game", 0.3, -0.1)


@pytest.fixture(scope="module")
def tree():
    policy = load_policy(make_settings({"model": str(ROOT / "models/guesser")}))
    tree = Task().tree(policy.tokenizer)
    with torch.no_grad():
        return tree.evaluate(policy.model)


def played(tree, p, secret, choose):
    """A game, as what was read, what was done, and what each turn paid. The model guesses one of 7
    numbers, or writes something else (7), or stops (8)."""
    history, turns = (), []
    for depth, level in enumerate(tree.levels):
        h = level.histories.index(history)
        action = choose(p[depth][h])
        if action >= 7:
            return [*turns, (depth, h, action, GAME.stop if action == 8 else 0.0)]
        turns.append((depth, h, action, GAME.guess + (action == secret)))
        if action == secret:
            return turns
        history = (*history, (action, action > secret))
    return turns


def expected_reward(tree, p):
    """By plain recursion over all games."""
    def value(depth, history, secret):
        if depth == len(tree.levels):
            return 0.0
        of_history = p[depth][tree.levels[depth].histories.index(history)].tolist()
        total = of_history[8] * GAME.stop
        for guess in range(7):
            after = 1.0 if guess == secret else value(
                depth + 1, (*history, (guess, guess > secret)), secret)
            total += of_history[guess] * (GAME.guess + after)
        return total

    return sum(value(0, (), secret) for secret in range(7)) / 7


def test_the_truth_is_how_the_expected_reward_changes(tree):
    gradients = expected_gradients(tree, GAME)
    for depth, h, action in ((0, 0, 8), (0, 0, 3), (1, 2, 8), (2, 50, 4)):
        found = gradients["the truth"][depth][h, action]
        changed = []
        for step in (1e-4, -1e-4):
            logits = [of_level.detach() for of_level in logits_of(tree)]
            logits[depth][h, action] += step
            changed.append(expected_reward(tree, [x.softmax(-1) for x in logits]))
        assert float(found) == pytest.approx((changed[0] - changed[1]) / 2e-4, abs=1e-7)
    for exact, mended in zip(gradients["the truth"], gradients["with the worth of going on"]):
        torch.testing.assert_close(mended, exact)


def test_summed_turns_give_what_is_computed(tree):
    """At stopping in the first turn, in 30,000 games: the sum of each turn's pay minus its mean,
    times what the first action's log-probability has as its gradient there."""
    rng = random.Random(0)
    p = [of_level.softmax(-1) for of_level in logits_of(tree)]
    table = [of_level.tolist() for of_level in p]
    games = [played(tree, table, rng.randrange(7),
                    lambda of_history: rng.choices(range(9), of_history)[0]) for _ in range(30_000)]
    means = []
    for d in range(3):
        pays = [game[d][3] for game in games if len(game) > d]
        means.append(sum(pays) / len(pays))
    samples = []
    for game in games:
        advantage = sum(pay - means[depth] for depth, _, _, pay in game)
        samples.append(advantage * ((game[0][2] == 8) - table[0][0][8]))
    found = torch.tensor(samples)
    error = float(found.std()) / len(games) ** 0.5
    computed = expected_gradients(tree, GAME)
    summed, truth = (float(computed[name][0][0, 8]) for name in ("summed turns", "the truth"))
    assert abs(float(found.mean()) - summed) < 4.5 * error < abs(summed - truth)


def test_it_prints_each_game(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    stopping.main()
    printed = capsys.readouterr().out
    assert all(game.name in printed for game in stopping.GAMES)
    assert printed.count("the worth of going on  cosine with the truth +1.00") == 4
