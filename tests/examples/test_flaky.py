"""The game that pays each turn: values by playing every game, and what the ways of paying give."""
import itertools
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, hand_made

from examples import flaky
from examples.flaky import ACTIONS, Game, Task, best_actions, price_by_turn, summed_turns
from grpo import centred, group_z_score
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from lab.tools import guesser

TASK = Task(turns=3, works=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A player that has hardly learned: it calls, and stops, and writes other words."""
    folder = tmp_path_factory.mktemp("players") / "player"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guesser, "STEPS", 25)
        flaky.make(folder, TASK)
    return folder


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(make_settings({"model": str(folder)}))


@pytest.fixture(scope="module")
def tree(policy):
    with torch.no_grad():
        return TASK.tree(policy.tokenizer).evaluate(policy.model)


def games(policy, problem, turns=(), text=""):
    """Every game with this problem: its chance and its reward. What is no call ends it; of these
    words only the chance is needed."""
    tokenizer = policy.tokenizer
    left, end = 1.0, tokenizer.token_to_id("<|im_end|>")
    for action in ACTIONS[:2]:
        ids = tokenizer.encode(TASK.prompt_for(problem) + text + action).ids
        with torch.no_grad():
            p = policy.model(torch.tensor([ids]))[0, -2:].double().softmax(-1)
        p = float(p[0, ids[-1]] * p[1, end])
        left -= p
        reply = TASK.reply(problem, [*turns, action])
        if reply is None:
            yield p, sum(TASK.score(problem, [*turns, action])["reward"])
            continue
        further = games(policy, problem, (*turns, action), f"{text}{action}<|im_end|>{reply}")
        yield from ((p * chance, reward) for chance, reward in further)
    yield left, sum(TASK.score(problem, [*turns, " x"])["reward"])


def test_the_value_and_the_account_are_those_of_all_games(policy, tree):
    """After two turns four of the 9 histories have won. The account adds up to the reward's
    variance."""
    mean = square = 0.0
    for works in itertools.product((False, True), repeat=3):
        of_problem = 0.3 ** sum(works) * 0.7 ** (3 - sum(works))
        for chance, reward in games(policy, Game(works, "")):
            mean += of_problem * chance * reward
            square += of_problem * chance * reward ** 2
    assert float(tree.success) == pytest.approx(mean, abs=1e-6)
    assert sum(map(sum, tree.account())) == pytest.approx(square - mean ** 2, abs=1e-6)
    assert abs(mean) > 0.01 and [len(level.histories) for level in tree.levels] == [1, 3, 5]


def test_credit_and_luck_add_up_to_the_reward(policy, tree):
    """For each answer, and to what is still to come at each of its turns."""
    batch = policy.ask(TASK.training_problems(0, 1, 8), 16, seed=3)
    whole = policy.task.true_credit(batch, policy, "with_luck")
    assert batch.turn.max() == 2 and batch.finished.all()
    value = float(tree.success)
    torch.testing.assert_close((whole * batch.begins_turn).sum(1), batch.reward - value,
                               atol=1e-5, rtol=0)
    rest = policy.task.true_credit(batch, policy, "baseline")
    onward, begins = (whole * batch.begins_turn).flip(1).cumsum(1).flip(1), batch.begins_turn
    torch.testing.assert_close(onward[begins], rest[begins], atol=1e-5, rtol=0)
    # who calls nothing has lost what could be expected
    credit = policy.task.true_credit(batch, policy, "credit")
    lost = [row for row, turns in enumerate(batch.turns) if turns[0] not in ACTIONS[:2]]
    torch.testing.assert_close(credit[lost].sum(1), torch.full((len(lost),), -value), atol=1e-5,
                               rtol=0)


def test_the_best_actions_are_the_best_of_all(monkeypatch):
    """Of 3 ** 6 rules that look at the turn and at how many calls have worked."""
    def value(rule, turn=0, good=0):
        if turn == 3 or good == 2:
            return float(good == 2)
        action = rule[2 * turn + good]
        if action == 2:
            return 0.0
        chance = (0.3, 1.0)[action]
        return (chance * value(rule, turn + 1, good + 1)
                + (1 - chance) * value(rule, turn + 1, good) - (0.03, 0.3)[action])

    best = max(value(rule) for rule in itertools.product(range(3), repeat=6))
    assert best_actions(TASK)[1] == pytest.approx(best)


def test_ways_of_paying_turns_by_hand():
    """One answer wins in its second turn, one stops in its second turn, one stops at once."""
    mask = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)
    paid = torch.tensor([[-.5, 0, .75], [-.25, 0, 0], [0, 0, 0]])
    batch = hand_made(mask, of_turns=paid, group=torch.zeros(3, dtype=torch.long),
                      scores={"reward": paid.sum(1)}, written=torch.ones(3, 3).bool())
    first, second = [-.25, 0, .25], [.375, -.375]
    expected = [[first[0] + second[0], 0, second[0]], [first[1] + second[1], 0, second[1]],
                [first[2], 0, 0]]
    torch.testing.assert_close(summed_turns(batch), torch.tensor(expected))
    # of 0.75 the prize is 1, and the price 0.25
    prize, second = [2 / 3, -1 / 3, -1 / 3], [-.125, .125]
    expected = [[prize[0] + first[0] + second[0], 0, prize[0] + second[0]],
                [prize[1] + first[1] + second[1], 0, prize[1] + second[1]],
                [prize[2] + first[2], 0, 0]]
    torch.testing.assert_close(price_by_turn(batch, centred), torch.tensor(expected))
    # as z-scores, prices a tenth as large get nearly the same
    cheaper = replace(batch, of_turns=torch.tensor([[-.05, 0, .975], [-.025, 0, 0], [0, 0, 0]]))
    large, small = (price_by_turn(one, group_z_score) for one in (batch, cheaper))
    torch.testing.assert_close(small, large, atol=0.02, rtol=0)


def test_what_cheap_calls_have_told_is_not_drawn_again():
    rng = flaky.random.Random(0)
    problem, turns = Game((True, False, True), ""), [" try", " take"]
    drawn = [TASK.redraw(problem, turns, rng).works for _ in range(200)]
    assert {works[0] for works in drawn} == {True} and {works[1:] for works in drawn} == {
        *itertools.product((False, True), repeat=2)}
    assert 0.2 < sum(works[1] for works in drawn) / 200 < 0.4


def test_the_command(folder, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    short = ["--model", str(folder), "--batches", "10", "--questions", "2", "--answers", "4",
             "--steps", "1"]
    flaky.main(short)
    printed = capsys.readouterr().out
    assert all(way in printed for way in flaky.WAYS) and "Luck of the tool is" in printed
    assert "Trained with --advantage gae --gae_lambda 0\nstep   0: the model earns" in printed
    flaky.main([*short, "--advantage", "turn_credit", "--pairs", "2"])
    assert "turn_credit minus plain GRPO: " in capsys.readouterr().out
