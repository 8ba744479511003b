"""The listed contexts against the model they stand for; pointers, credit and tables by hand."""
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.errors import UserError
from grpo import update
from harness.settings import Settings
from research.probes import pointer
from research.probes.batches import Batches
from research.probes.common import Probe
from research.probes.contexts import V, Contexts
from research.probes.listed_pointers import listed_pointers, mean_by_prefix
from research.probes.planted import planted_policy
from research.probes.pointer import (
    ARMS, KEYS, PAIRS, PLAIN, TRUE, Done, Pointer, credit_at_keys, given_table, is_asked,
    judged, pairs_table, stuck_at, stuck_table, weigh, worth_table)
from research.tests.planted_answers import sample_planted, worths
from research.probes.world import END, ONE, make_world


@pytest.fixture
def policy():
    """Its matrices are large, so attention looks at some inputs far more than at others."""
    policy = planted_policy(3, 13, 1e-2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(20 if parameter.dim() == 2 else 1)
    return policy


def test_contexts_are_those_of_the_model(policy):
    """The same ids of the same random numbers, their log-probs, and what prefixes are worth."""
    rollouts, contexts = sample_planted(policy, 1, 8, 8), Contexts(policy)
    chances = contexts.chances()
    ids, log_prob, chance = contexts.sample(chances, 1, 64)
    assert len(ids.unique(dim=0)) > 20 and torch.equal(ids, rollouts.ids)
    torch.testing.assert_close(log_prob, rollouts.log_prob, rtol=0, atol=1e-4)
    torch.testing.assert_close(chance.gather(2, ids[..., None])[..., 0], log_prob.exp())
    values = contexts.values(chances)
    for path, worth in worths(policy).items():
        assert values[len(path)][path].item() == pytest.approx(worth, abs=1e-5)


@pytest.mark.parametrize("arm", [PLAIN, TRUE])
def test_training_is_that_of_the_loop(arm):
    """With the functions of train.py, on all tokens by the whole model."""
    mine, policy = pointer.train(arm, 8, 1e-2, 5, 4), planted_policy(5, 8, 1e-2)
    curve = [worths(policy)[()]]
    for step in range(1, 5):
        rollouts = sample_planted(policy, step, 8, 8)
        if arm == TRUE:
            rollouts = replace(rollouts, advantage=rollouts.true_credit)
        update(policy.model, policy.optimizer, rollouts, torch.ones_like(rollouts.log_prob),
               Settings(model="planted", micro_batch=64, max_grad_norm=0.0))
        curve.append(worths(policy)[()])
    assert mine["end"] == pytest.approx(curve[-1], rel=1e-4)
    assert mine["mean"] == pytest.approx(np.trapezoid(curve) / 4, rel=1e-4)


def test_a_policy_is_stuck_if_all_answers_have_one_reward_below_1():
    alike = [stuck_at(torch.tensor([worth, worth])) for worth in (0, 1 / 3, 2 / 3, 1.0)]
    assert alike == [0, 1, 2, None] and stuck_at(torch.tensor([1 / 3, 2 / 3])) is None


@pytest.mark.parametrize("flag, text", [
    *(("lengths", text) for text in ("", "6,5", "8," + "9" * 5000, "8,100001", "8,x")),
    *(("rates", text) for text in ("", "1e-3,x", "0,1e-3", "1e-3,nan", "11"))])
def test_lengths_and_rates_are_read_with_their_bounds(flag, text):
    args = SimpleNamespace(**{"lengths": "8,16", "rates": "1e-3,1e-2", flag: text})
    with pytest.raises(UserError, match=f"--{flag} .* should be numbers from") as error:
        pointer.measure(SimpleNamespace(args=args))
    assert len(str(error.value)) < 300


def test_the_true_credit_and_its_size(policy):
    """Credit adds up to the reward; the size of what could be drawn is 1 on average."""
    contexts = Contexts(policy)
    chances = contexts.chances()
    values = contexts.values(chances)
    path = torch.cartesian_prod(*[torch.arange(V)] * KEYS)
    credit, size = credit_at_keys(chances, values, path)
    reward = values[-1].flatten()
    torch.testing.assert_close(values[0] + credit.double().sum(1), reward, rtol=0, atol=1e-6)
    chance = chances[2].flatten(0, 1)  # (paths up to the last key, V)
    mean = (chance * size[:, 2].view(-1, V)).sum(1)
    torch.testing.assert_close(mean, torch.ones(16), rtol=0, atol=1e-4)
    ratio = size[:V, 2] / credit[:V, 2].abs()  # of those that begin alike
    torch.testing.assert_close(ratio, ratio[:1].expand(V), rtol=1e-4, atol=0)


def test_what_pointers_point_at():
    policy = planted_policy(0, 13, 1e-2)  # keys at 2, 6, 10
    ids = torch.arange(26).view(2, 13) % 4
    chance = torch.full((2, 13, 4), 0.25)
    size = torch.tensor([[0.5, 1.0, 2.0], [2.0, 1.0, 0.5]])

    def weight(step=1, **kind):
        return weigh(Pointer(0.5, **kind), policy, step, ids, chance, size)

    def places(weight):
        assert torch.equal(weight[0], weight[1]) and set(weight.unique().tolist()) <= {0.5, 1.0}
        return set((weight[0] == 1).nonzero().squeeze(1).tolist())

    assert places(weight()) == {2, 6, 10}
    assert len(places(weight(found=2))) == 2 and places(weight(found=2)) < {2, 6, 10}
    wrong = places(weight(wrong=4))
    assert {2, 6, 10} < wrong and len(wrong) == 7 and wrong == places(weight(step=2, wrong=4))
    random = [places(weight(step, found=0, wrong=3, anew=True)) for step in range(4)]
    assert len(set(map(frozenset, random))) > 1
    assert all(len(each) == 3 and not each & {2, 6, 10} for each in random)
    of_size = weight(looks_at="size of its credit")
    assert of_size[0, [2, 6, 10, 0]].tolist() == [0.75, 1.0, 1.5, 0.5]
    drawn = weight(looks_at="one symbol, drawn")
    assert drawn[0, [0, 1, 2, 3, 4]].tolist() == [1.0, 0.5, 1.0, 0.5, 1.0]
    mean = weight(looks_at="one symbol, chance")
    assert mean[0, [0, 1, 2]].tolist() == [0.625, 0.625, 1.0]


def test_wrong_places_need_room_and_long_answers_ask_less():
    assert not is_asked("3 of 3, 40 wrong (0.1)", 32) and is_asked("3 of 3, 12 wrong (0)", 32)
    asked = {arm for arm in ARMS if is_asked(arm, 512)}
    assert {PLAIN, TRUE, "3 of 3 (0)", "3 of 3 (0.33)", "3 at random (0.1)"} < asked
    assert len(asked) == 14 and "2 of 3 (0)" not in asked


def test_a_training_is_made_once_and_one_cut_off_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pointer, "train", lambda *job: made.append(job) or {"mean": 0.5})
    path = tmp_path / "new/runs.jsonl"
    Done(path, 7).runs("arm", 8, 0.1, range(1))
    with path.open("a") as file:
        file.write('[["arm", 8, 0.1, 1], {"me')
    assert Done(path, 7).known_runs("arm", 8, 0.1, range(2)) == []
    assert Done(path, 7).runs("arm", 8, 0.1, range(2)) == 2 * [{"mean": 0.5}]
    assert made == [("arm", 8, 0.1, 0, 7), ("arm", 8, 0.1, 1, 7)]
    assert len(Done(path, 7).known_runs("arm", 8, 0.1, range(2))) == 2
    with pytest.raises(UserError, match="has trainings of 7 steps"):
        Done(path, 8)


def cells(leads, plain=(0.2, 0.6, 0.4)):
    """At 8 and 16 tokens, over plain GRPO of the same seed, whose seeds differ by more."""
    return [{"arm": arm, "length": size, "rate": 0.01, "tuned": {"0.01": [0.5]},
             "given": {}, "runs": [{"mean": p + lead + more, "end": 1.0, "stuck": stuck}
                      for p, more, stuck in zip(plain, (0, 2e-3, 4e-3), (None, 2, 1))]}
            for size in (8, 16) for arm, lead in leads.items()]


def test_tables_by_hand():
    values = cells({PLAIN: -0.002, TRUE: 0.3, "3 of 3 (0.1)": 0.1, "3 at random (0.1)": -0.1})
    table = worth_table(values)
    rows = {row[0]: dict(zip(table.columns, row)) for row in table.rows}
    assert rows["3 of 3 (0.1)"]["16"] == pytest.approx(0.102)
    assert rows["3 of 3 (0.1)"]["verdict 8"] == "ahead"
    assert rows["3 at random (0.1)"]["verdict 8"] == "behind"
    assert rows["3 of 3 (0)"]["8"] is None
    assert table.finding.startswith("8 tokens: the pointer is +10.2 points from plain GRPO, ahead; "
                                    "the true credit +30.2, ahead.")
    lead, none = np.array([0.10, 0.12, 0.14]), np.array([-0.1, 0.0, 0.1])  # p = 0.0092, 1
    means = {("a", 8): lead, **{(arm, 8): none for arm in "bcdef"}, ("0", 8): 0 * none}
    assert judged(means, 8, [("a", "0")])["a", "0"][1] == "ahead"
    assert judged(means, 8, [(arm, "0") for arm in "abcdef"])["a", "0"][1] == "none seen"
    pairs = pairs_table(values).rows
    assert [row[:3] for row in pairs[:2]] == [("8", "3 of 3 (0.1)", TRUE),
                                              ("8", "3 of 3 (0.1)", "3 at random (0.1)")]
    assert pairs[0][3] == pytest.approx(-0.2)
    row = dict(zip(stuck_table(values).columns, stuck_table(values).rows[0]))
    assert (row["at 0"], row["at 1/3"], row["at 2/3"]) == (0, 1, 1)
    values[1]["given"] = {"0.01": values[1]["runs"], "0.1": values[2]["runs"], "1": []}
    assert [(row[2], row[4], row[5]) for row in given_table(values).rows] == [
        ("0.01", 2, pytest.approx(0.302)), ("0.1", 2, pytest.approx(0.102))]


def test_a_pointer_by_prefix_pushes_nothing_where_nothing_is_decided():
    world = make_world(seed=3, length=2)
    chance = mean_by_prefix(world, (world.rollouts.ids == ONE).double())
    log_probs = world.model(torch.tensor([[ONE, ONE]]))[0].double().log_softmax(-1)
    row = world.rollouts.ids.tolist().index([ONE, END])
    torch.testing.assert_close(chance[row], log_probs[:, ONE].exp(), rtol=1e-5, atol=0)
    found = listed_pointers(world, Batches.all(world, 2))
    looks = {name for (name, by), (_, pushed, _) in found.items() if pushed > 1e-3}
    assert looks == {"where it is decided, and one symbol", "surprise: -log p", "one symbol",
                     "at random"}
    assert all(pushed < 1e-6 for (_, by), (_, pushed, _) in found.items() if by == "the prefix")
    bias, _, noise = found["where it is decided", "the prefix"]
    assert bias < 1e-3 and noise < found["none", "the prefix"][2]


def test_the_probe_from_rates_to_picture(tmp_path, monkeypatch):
    """The rate is the best on other seeds; called again, it trains nothing."""
    monkeypatch.setattr(pointer, "ARMS", {arm: ARMS[arm] for arm in (PLAIN, TRUE, "3 of 3 (0.1)",
                                                                   "3 of 3 (0)", "3 of 3 (0.33)")})
    monkeypatch.setattr(pointer, "PAIRS", PAIRS[:3])
    made = []

    def train(arm, length, rate, seed, steps):
        made.append((rate, seed))
        return {"mean": seed % 7 / 100 + (rate == 0.01) * (seed < 2000), "end": 0.5, "stuck": None}

    monkeypatch.setattr(pointer, "train", train)
    args = SimpleNamespace(lengths="6,8", rates="0.1,0.01,0.001", seed=1, seeds=2, rate_seeds=2,
                           steps=2, policies=2, quick=True, runs=str(tmp_path / "runs.jsonl"))
    found = pointer.measure(Probe(args, tmp_path))
    assert {rate for rate, seed in made if seed >= 2000} == {0.01}
    assert {seed for _, seed in made} == {1001, 1002, 2001, 2002}
    assert len(made) == 10 * (3 * 2 + 2) and found.picture[0].exists()
    assert json.dumps(found.values) and np.isfinite(found.tables[-1].rows[0][-1])
    assert pointer.measure(Probe(args, tmp_path)).values == found.values and len(made) == 80
