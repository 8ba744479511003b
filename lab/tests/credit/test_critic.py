"""Values: GAE against a double loop, the critic that learns, Monte Carlo segments by hand."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from conftest import refusal
from small import SPOKEN, copied, hand_made, spoken
from lab.credit import monte_carlo
from lab.credit.critic import generalised_advantage
from lab.credit.monte_carlo import continuation_rewards, segment_starts, sequences
from lab.engine.methods import ADVANTAGES, make as make_choice
from lab.engine.errors import UserError
from lab.engine.policy import Forward
from lab.engine.sampler import Generation, generate

MASK = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] + [False] * 4])
FLAGS = {"gae": {"critic_lr": 0.05}, "vine": {"values_k": 2}}


def make(name, policy, **flags):
    return make_choice(ADVANTAGES[name], FLAGS[name] | flags, policy)


@pytest.mark.parametrize("gamma, lam", [(1, 1), (1, 0), (0.9, 0.95), (1, 0.7), (0.9, 1)])
def test_gae_against_a_double_loop(gamma, lam):
    """With rewards on the way, and a reply between two turns; values and rewards beyond the mask
    are junk."""
    mask = MASK.clone()
    mask[1, 4] = True  # the last token of the second turn
    value, earned = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(3, 5)
    for b, places in enumerate([[0, 1, 2, 3, 4], [0, 1, 4], [0]]):
        n, v = len(places), [*value[b, places].tolist(), 0.0]  # the end is terminal
        r = earned[b, places].tolist()
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        for t, place in enumerate(places):
            expected[b, place] = sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n))
    found = generalised_advantage(value, earned, mask, gamma, lam)
    torch.testing.assert_close(found, expected)


def test_right_steps_are_paid_where_they_end(policy):
    """" 3 + 5 = 8, 8 + 7 = 15 hit." has two: before the first ends both are to come."""
    rollouts = spoken(policy)
    gae = make("gae", policy, process_reward=0.25)
    paid = gae(rollouts, policy)[0] - rollouts.reward[0]  # V was 0
    texts = rollouts.texts[0]
    first, second = texts.index(" 8"), texts.index(" 15")
    left = [0.5] * (first + 1) + [0.25] * (second - first) + [0.0] * (len(texts) - second - 1)
    assert paid[:len(texts)].tolist() == pytest.approx(left, abs=1e-6)


def test_what_cannot_be_had_is_refused(policy):
    other = SimpleNamespace(task=None, settings=SimpleNamespace(task="some_task"))
    with pytest.raises(UserError, match="--process_reward 0.5 needs .* --task some_task has none"):
        make("gae", other, process_reward=0.5)
    said = refusal(lambda: make("vine", policy, values_every="0"))
    assert "should be line, turn or a number" in said


# a policy of which a critic only asks how wide its states are
WIDE_3 = SimpleNamespace(settings=SimpleNamespace(), model=SimpleNamespace(
    config=SimpleNamespace(hidden_size=3), device="cpu"))


def told_by_state():
    """States whose direction tells the reward of the answer, and whose length tells nothing: a
    linear critic can be right."""
    reward = torch.tensor([1.0, 0.0, 0.5])
    direction = torch.stack([reward, (1 - reward.square()).sqrt(), torch.zeros(3)], 1)
    length = 0.1 + 5 * torch.rand(3, 5, 1, generator=torch.Generator().manual_seed(1))
    forward = SimpleNamespace(look=lambda *_, **__: {"hidden": direction[:, None] * length})
    return hand_made(MASK, scores={"reward": reward}, forward=forward)


def test_the_critic_learns_and_its_advantages_are_from_before_its_update():
    batch, gae = told_by_state(), make("gae", WIDE_3)
    torch.testing.assert_close(gae(batch, WIDE_3), batch.reward[:, None] * MASK)  # V was 0
    assert gae.metrics["explained_variance"] == pytest.approx(0, abs=1e-6)
    for _ in range(300):
        last = gae(batch, WIDE_3)
    assert gae.metrics["explained_variance"] > 0.99 and last.abs().max() < 0.05


def test_explained_variance_by_hand():
    """Values of half the target leave a quarter of its variance; of targets without spread there is
    nothing to explain."""
    gae = make("gae", WIDE_3)
    with torch.no_grad():
        gae.critic.module.weight.copy_(torch.tensor([[0.5, 0, 0]]))
    gae(told_by_state(), WIDE_3)
    assert gae.metrics["explained_variance"] == pytest.approx(0.75)
    gae(dataclasses.replace(told_by_state(), scores={"reward": torch.ones(3)}), WIDE_3)
    assert gae.metrics["explained_variance"] is None


def test_a_trunk_begins_as_the_model(policy):
    """Reading one hidden unit gives that unit of the model."""
    rollouts = spoken(policy)
    trunk = make("gae", policy, critic="trunk").critic.module
    with torch.no_grad():
        trunk.read.weight[0, 5] = 1.0
        rows = torch.tensor([4, 1, 0])  # of two problems, in any order
        values = trunk.values(rollouts, rows)
    expected = Forward(policy.model, 64).look(rollouts)["hidden"][..., 5]
    torch.testing.assert_close(values, expected[rows][rollouts.mask[rows]], rtol=1e-4, atol=1e-5)


def test_all_parameters_of_a_trunk_are_trained_and_none_of_the_model(policy):
    rollouts, gae, start = spoken(policy), make("gae", policy, critic="trunk"), copied(policy.model)
    first = gae(rollouts, policy)
    torch.testing.assert_close(first, rollouts.reward[:, None] * rollouts.mask)  # V was 0
    for earlier, own, trained in zip(start.model.parameters(), policy.model.model.parameters(),
                                     gae.critic.module.decoder.parameters(), strict=True):
        assert torch.equal(own, earlier) and not torch.equal(trained, earlier)


def test_where_segments_begin():
    assert segment_starts(["a", "b\n", "c", "\n\n", "d"], "line") == [0, 2, 4]
    assert segment_starts(["a", "b\n"], "line") == [0]  # nothing begins after the last token
    assert segment_starts(["a"] * 5, "2") == [0, 2, 4] and segment_starts([], "2") == []


def test_vine_by_hand(monkeypatch):
    """V is 0.5 at the start, 0.25 after two tokens, 0.75 after four; of the other problem, which
    the last answer is to, 0.1. The rewards are 1, 0, 0.5. The answers to a problem share their
    start."""
    worth, asked = {(0, 0): 0.5, (0, 2): 0.25, (0, 4): 0.75, (1, 0): 0.1}, []

    def rewards(policy, batch, prefixes, k):
        asked.extend((group, len(ids)) for group, ids in prefixes)
        return torch.tensor([[worth[place]] * k for place in asked]), {"extra_tokens": 9}

    monkeypatch.setattr(monte_carlo, "continuation_rewards", rewards)
    batch = hand_made(MASK, scores={"reward": torch.tensor([1.0, 0.0, 0.5])},
                      group=torch.tensor([0, 0, 1]))
    vine = make("vine", WIDE_3, values_every="2")
    torch.testing.assert_close(vine(batch, None), torch.tensor(
        [[-0.25, -0.25, 0.5, 0.5, 0.25], [-0.5, -0.5, 0, 0, 0], [0.4, 0, 0, 0, 0]]))
    assert vine.metrics == {"extra_tokens": 9} and asked == [*worth]


def test_continuations_are_scored_whole_and_against_their_own_question(policy, monkeypatch):
    """The model is made to say the rest of a right answer: only the prefix of that question becomes
    right. What has ended or is full is worth its own reward. Equal answers are scored once."""
    def ids_of(text):
        return tuple(policy.tokenizer.encode(text).ids)

    def speak(model, prompts, starts, max_new_tokens, **_):
        assert len(max_new_tokens) == len(starts)
        tokens = torch.tensor([rest] * len(starts))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return Generation(tokens, mask, mask[:, 0], *torch.zeros(3, *tokens.shape), mask)

    def reward(policy, problem, ids):
        scored.append((problem, ids))
        return reward_of(policy, problem, ids)

    opening, said, end = SPOKEN[0].partition(" 3 + 5 ) + 7")
    start, rest = ids_of(opening), ids_of(said + end)
    reward_of, scored = type(policy).reward_of, []
    monkeypatch.setattr(monte_carlo, "generate", speak)
    monkeypatch.setattr(type(policy), "reward_of", reward)
    whole, full = ids_of(SPOKEN[0]), (ids_of(" 3") * 60)[:60]
    prefixes = [(0, start), (1, start), (0, whole), (1, whole), (0, full)]
    rewards, spent = continuation_rewards(policy, spoken(policy), prefixes, 2)
    expected = torch.tensor([1.1, 0.1, 1.1, 0.1, 0.0])[:, None].expand(5, 2)
    torch.testing.assert_close(rewards, expected)
    assert spent == {"extra_tokens": 4 * len(rest), "extra_answers": 4}
    assert len(scored) == len(set(scored))


def test_continuations_stop_at_the_limit_of_the_whole_answer(policy, monkeypatch):
    seen = []

    def watch(*args, **given):
        result = generate(*args, **given)
        seen.append((given["max_new_tokens"], result.mask.sum(1)))
        [sequence] = args[1]  # the prefixes are places of one
        assert sequence == batch.prompt_ids[0] + batch.ids[0, :9].tolist()
        places = [start.seen - len(batch.prompt_ids[0]) for start in given["starts"]]
        assert places == [1, 1, 5, 5, 9, 9] and given["temperature"] == 1
        return result
    monkeypatch.setattr(monte_carlo, "generate", watch)
    batch = spoken(policy)
    prefixes = [(0, tuple(batch.ids[0, :n].tolist())) for n in (1, 5, 9)]
    rewards, spent = continuation_rewards(policy, batch, prefixes, 2)
    [(limits, lengths)] = seen
    assert rewards.shape == (3, 2)
    assert spent == {"extra_tokens": lengths.sum(), "extra_answers": 6}
    assert limits == [59, 59, 55, 55, 51, 51]  # of 60
    assert (lengths <= torch.tensor(limits)).all()


def test_prefixes_share_the_sequence_that_they_begin():
    whole = sequences([(0, (1, 2)), (0, (1, 2, 3)), (0, (1, 3)), (1, (1,)), (0, ())])
    assert whole == {(0, ()): (0, (1, 2, 3)), (0, (1, 2)): (0, (1, 2, 3)), (1, (1,)): (1, (1,)),
                     (0, (1, 2, 3)): (0, (1, 2, 3)), (0, (1, 3)): (0, (1, 3))}
