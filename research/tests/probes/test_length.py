"""Success and leads of the probe length by hand, the choice of rates, and what methods spend."""
from types import SimpleNamespace

import pytest

from engine.errors import UserError
from research.probes import length
from research.probes.length import METHODS, at_equal_tokens, best_rate, leads_table, trend_table


def test_success_at_equal_tokens():
    """A step from 0.2 to 0.6 over 100 tokens, flat after: mean over 200 is (0.4 + 0.6) / 2. What
    was spent beyond the budget does not count."""
    found = at_equal_tokens([(0, 0.2), (100, 0.6), (200, 0.6), (400, 9.0)], 200)
    assert found["mean"] == pytest.approx(0.5, abs=1e-3)
    assert found["end"] == pytest.approx(0.6)
    assert found["curve"][:2] == pytest.approx([0.2, 0.22]) and len(found["curve"]) == 41


def cell(method, size, means, stuck=0):
    runs = [{"mean": mean, "end": mean, "stuck": i < stuck, "curve": []}
            for i, mean in enumerate(means)]
    return {"method": method, "length": size, "rate": 0.01, "tuned": {"0.01": means}, "runs": runs}


def test_leads_and_their_trend_by_hand():
    """A lead of 0.1, 0.2, 0.3 at 8, 16, 32 tokens and of 0.3, 0.2, 0.1, over plain GRPO of the same
    seed, whose seeds differ by more than the leads."""
    values, plain = [], (0.2, 0.6, 0.4)
    for size, lead in zip((8, 16, 32), (0.1, 0.2, 0.3)):
        mine = [p + lead + more for p, more in zip(plain, (0, 2e-3, 4e-3))]
        values += [cell("grpo", size, plain, stuck=2), cell("exact", size, mine),
                   cell("critic", size, [p + 0.4 - 2 * lead for p in mine])]
    table = trend_table(values)
    exact, critic = (dict(zip(table.columns, row)) for row in table.rows)
    assert exact["the lead"] == "grows" and exact["a doubling"] == pytest.approx(0.1)
    assert critic["the lead"] == "shrinks" and critic["a doubling"] == pytest.approx(-0.1)
    table = leads_table(values)
    rows = {(row[0], row[1]): dict(zip(table.columns, row)) for row in table.rows}
    assert rows["8", "exact"]["lead"] == pytest.approx(0.102)
    low, high = rows["8", "exact"]["95%"]  # 0.102 -+ 4.303 * 0.002 / sqrt(3)
    assert (low, high) == (pytest.approx(0.102 - 0.004969, abs=1e-5),
                           pytest.approx(0.102 + 0.004969, abs=1e-5))
    assert rows["8", "grpo"]["stuck"] == 2 and rows["8", "grpo"]["success"] == pytest.approx(0.4)


def test_the_best_rate_is_the_lowest_of_equals():
    means = {0.001: (0.3, 0.3), 0.01: (0.2, 0.6), 0.1: (0.5, 0.3)}
    tuned = {("x", rate, seed): {"mean": mean} for rate, of in means.items()
             for seed, mean in enumerate(of)}
    assert best_rate(tuned, "x", sorted(means), range(2)) == 0.01
    assert best_rate(tuned, "x", sorted(means), range(1)) == 0.1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_spends_the_same_tokens(method):
    """Monte Carlo's continuations count: its steps are fewer."""
    args = SimpleNamespace(continuations=1, segments=2, answers=4, steps=3, questions=2)
    found, of_grpo = (length.train(args, (name, 8), 1e-3, 0) for name in (method, "grpo"))
    assert of_grpo["steps"] == 3 and not of_grpo["stuck"]
    assert found["steps"] < 3 if method == "monte carlo" else found["steps"] == 3
    assert found["curve"][0] == of_grpo["curve"][0]
    assert (found["curve"][-1] == of_grpo["curve"][-1]) == (method == "grpo")  # its own steps


def test_a_policy_that_is_sure_of_a_wrong_symbol_is_stuck(monkeypatch):
    """All answers of the last step have the reward 2/3; with reward 1 it has learned all."""
    args = SimpleNamespace(continuations=1, segments=2, answers=4, steps=1, questions=2)
    sampled = length.sample_planted

    def all_alike(reward):
        def sample(*given):
            rollouts = sampled(*given)
            rollouts.reward.fill_(reward)
            return rollouts
        monkeypatch.setattr(length, "sample_planted", sample)
        return length.train(args, ("grpo", 8), 1e-3, 0)["stuck"]

    assert all_alike(2 / 3) and not all_alike(1.0)


@pytest.mark.parametrize("flag, text", [
    *(("lengths", text) for text in ("8", "8,8", "6,5", "8," + "9" * 5000, "8,100001", "8,x")),
    *(("rates", text) for text in ("", "1e-3,x", "0,1e-3", "1e-3,nan", "11"))])
def test_lengths_and_rates_are_read_with_their_bounds(flag, text):
    args = SimpleNamespace(**{"lengths": "8,16", "rates": "1e-3,1e-2", flag: text})
    words = f"--{flag} .* should be different numbers, .* to (100000|10), .*, [12] at least"
    with pytest.raises(UserError, match=words) as error:
        length.measure(SimpleNamespace(args=args))
    assert len(str(error.value)) < 300
