"""The game whose credit is computed: values by plain recursion, the account, the true gradient."""
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import ROOT

from examples import guess
from examples.guess import Game, Task, stairs, step_of, tell
from examples.histories import (BIG, SMALL, estimated_gradient, gradient_of_success)
from lab.harness.build import build, load_policy
from lab.harness.settings import make_settings


@pytest.fixture(scope="module")
def policy():
    return load_policy(make_settings({"model": str(ROOT / "models/guesser")}))


@pytest.fixture(scope="module")
def tree(policy):
    with torch.no_grad():
        return Task().tree(policy.tokenizer).evaluate(policy.model)


def settings(advantage):
    return make_settings({"model": str(ROOT / "models/guesser"), "advantage": advantage})


@pytest.fixture(scope="module")
def chance_of(policy):
    """How likely a number is as the next turn, by a model that is asked once for each."""
    @cache
    def chance_of(text, number):
        ids = policy.tokenizer.encode(f"{text} {number}").ids
        with torch.no_grad():
            p = policy.model(torch.tensor([ids]))[0, -2:].softmax(-1)
        return float(p[0, ids[-1]] * p[1, policy.tokenizer.token_to_id("<|im_end|>")])
    return chance_of


def value_of(chance_of, secret, history=(), tries=3):
    """The chance to win from here, by the rules, for one who knows the secret."""
    told = "".join(f" {guess}<|im_end|>{reply}" for guess, reply in history)
    text, chance = Task().prompt_for(Game(1, "")) + told, 0.0
    for number in range(1, 8):
        p = chance_of(text, number)
        if number == secret:
            chance += p
        elif tries > 1:
            reply = BIG if number > secret else SMALL
            chance += p * value_of(chance_of, secret, (*history, (number, reply)), tries - 1)
    return chance


def test_values_by_plain_recursion(chance_of, tree):
    """There are 115 histories. The value of the beginning is the mean over the secrets; that of a
    history is the mean over those that are still possible."""
    assert [len(level.histories) for level in tree.levels] == [1, 12, 102]
    with_secret = [value_of(chance_of, secret) for secret in range(1, 8)]
    assert float(tree.success) == pytest.approx(sum(with_secret) / 7, abs=1e-5)
    after = [value_of(chance_of, secret, ((5, BIG),), 2) for secret in range(1, 5)]
    here = tree.levels[1].histories.index(((4, True),))
    assert float(tree.levels[1].V[here]) == pytest.approx(sum(after) / 4, abs=1e-5)
    assert tree.levels[1].possible[here].tolist() == [0.25] * 4 + [0.0] * 3


def test_the_account_adds_up_to_the_variance_of_the_reward(tree):
    success = float(tree.success)
    parts = tree.account()
    assert len(parts) == 3 and all(credit > 0 and luck > 0 for credit, luck in parts)
    assert sum(map(sum, parts)) == pytest.approx(success * (1 - success), rel=1e-4)


def test_a_reward_is_what_the_guesses_and_the_replies_were_worth(tree):
    """Of each game, in the credit and in what is told."""
    s = settings("turn_credit")
    batch, _ = step_of(build(s, None, {}), s, 1)
    for row in range(40):
        places = list(tree.places(batch, row))
        turns = [place.t for place in places if place.guess < 0]
        reward, success = float(batch.reward[row]), float(tree.success)
        steps = stairs(tree, batch, row)
        assert [name[:5] for name, _, _ in steps] == ["guess", "reply"] * (len(turns) - 1) + [
            "guess", "end"]
        assert (steps[0][1], steps[-1][2]) == (pytest.approx(success), reward)
        assert all(one[2] == pytest.approx(after[1]) for one, after in zip(steps, steps[1:]))
        assert len(tell(steps)) == len(steps) + 1
        for place in places:
            before, after = tree.values_at(place)
            assert float(batch.advantage[row, place.t]) == pytest.approx(after - before, abs=1e-6)
    assert not batch.advantage[~batch.mask].any()


def test_the_true_gradient_is_that_of_the_probability_of_winning(policy, tree):
    """At the logits, and from there at the parameters; a step along it wins more."""
    gradient, p = gradient_of_success(Task().tree(policy.tokenizer), policy.model)
    model = load_policy(policy.settings).model
    logits = [model(level.ids.flatten(0, 1))[:, -2:].unflatten(0, level.ids.shape[:2])
              for level in tree.levels]
    sum((g * of_level).sum() for g, of_level in zip(gradient, logits)).backward()
    found = torch.cat([q.grad.flatten() for q in model.parameters()])
    other = load_policy(policy.settings).model
    Task().tree(policy.tokenizer).evaluate(other).success.backward()
    expected = torch.cat([q.grad.flatten() for q in other.parameters()])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
    assert [x.shape for x in p] == [x.shape for x in gradient]


@pytest.mark.slow
def test_the_true_credit_gives_the_true_gradient_with_little_noise():
    """From 20 batches; plain GRPO has ten times the noise, and three times that of the reward
    without the luck of the replies."""
    noise = {}
    for name in ("grpo", "without_luck", "turn_credit"):
        said = guess.judged(settings(name), 20)
        noise[name] = float(said.split()[3].rstrip(","))
        assert float(said.rpartition("truth ")[2].split()[0]) > 0.75
    assert noise["turn_credit"] < 1.5 and noise["grpo"] > 5
    assert noise["without_luck"] < 0.6 * noise["grpo"]


def test_a_wrong_token_is_worth_what_it_loses(policy, tree):
    """What is no guess, and a turn that goes on after its guess: the value becomes 0."""
    batch = policy.ask([Game(3, "x")], 1, seed=0)
    ids = policy.tokenizer.encode(" big.").ids + policy.tokenizer.encode(" 4 4").ids
    rows = torch.tensor([ids])
    mask = torch.ones_like(rows, dtype=torch.bool)
    odd = replace(batch, ids=rows, mask=mask, written=mask)
    [place] = tree.places(odd, 0)
    assert tree.values_at(place) == (pytest.approx(float(tree.success)), 0.0)
    odd = replace(odd, ids=rows[:, 2:], mask=mask[:, 2:], written=mask[:, 2:])
    first, second = tree.places(odd, 0)
    assert tree.values_at(second)[0] == tree.values_at(first)[1] > 0 == tree.values_at(second)[1]
    p = [torch.full((len(level.histories), 7, 2, 211), 1 / 211) for level in tree.levels]
    odd = replace(odd, advantage=torch.tensor([[2.0, 0.0]]))
    found = estimated_gradient(tree, p, odd, torch.ones(1, 2)).view(-1, 211)
    # one token of two, with the advantage 2: onehot - p at the first logits, and nothing elsewhere
    assert found[0, ids[2]] == pytest.approx(1 - 1 / 211) and not found[1:].any()


@pytest.mark.slow
def test_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    guess.main(["--steps", "1", "--model", str(ROOT / "models/guesser")])
    printed = capsys.readouterr().out
    assert "value 0.48" in printed and "\n  end      luck" in printed
    assert "takes the luck out" in printed and "without the values: luck " in printed
    assert "step   1: the" in printed
    guess.main(["--steps", "1", "--advantage", "rloo", "--pairs", "2", "--batches", "10", "--model",
                str(ROOT / "models/guesser")])
    printed = capsys.readouterr().out
    assert "  plain GRPO       noise / signal" in printed
    assert "\n  rloo             noise / signal" in printed
    assert "rloo minus plain GRPO: " in printed and "95% interval of 2 pairs)" in printed
