"""Values: GAE against a double loop, the critic that learns, Monte Carlo segments by hand."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from conftest import ASKED, SPOKEN, copied, hand_made, spoken
from credit import monte_carlo as critic
from credit.critic import generalised_advantage
from harness.registry import ADVANTAGES
from harness.registry import make as make_choice
from credit.monte_carlo import (continuation_rewards, decision_starts, prefix_values,
                                segment_starts, sequences)
from engine.errors import UserError
from engine.forward import Forward
from engine.sampler import Generation, generate

MASK = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [True] + [False] * 4])


@pytest.mark.parametrize("gamma, lam", [(1, 1), (1, 0), (0.9, 0.95), (0.5, 0.3), (1, 0.7), (0.9, 1)])
def test_gae_against_a_double_loop(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    value, reward = torch.randn(3, 5, generator=generator), torch.tensor([1.0, -0.5, 0.25])  # values beyond the mask are junk
    expected = torch.zeros(3, 5)
    for b, n in enumerate(MASK.sum(1).tolist()):
        v = [*value[b, :n].tolist(), 0.0]  # terminal
        delta = [(reward[b].item() if t == n - 1 else 0.0) + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            expected[b, t] = sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n))
    torch.testing.assert_close(generalised_advantage(value, reward, MASK, gamma, lam), expected)


def test_gae_at_its_ends():
    value, reward = torch.rand(3, 5), torch.tensor([1.0, 0.0, 0.5])
    torch.testing.assert_close(generalised_advantage(value, reward, MASK, 1, 1), (reward[:, None] - value) * MASK)
    one_step = generalised_advantage(value, reward, MASK, 1, 0)
    torch.testing.assert_close(one_step[1, :2], torch.stack([value[1, 1] - value[1, 0], reward[1] - value[1, 1]]))


def test_rewards_on_the_way_by_hand():
    """0.5 at the second of three tokens, 1 with the last; gamma = 0.5, lambda = 1, V = 0: a token
    gets what it earns and half of what the next one gets."""
    mask, earned = torch.tensor([[True] * 3]), torch.tensor([[0, 0.5, 0]])
    advantage = generalised_advantage(torch.zeros(1, 3), torch.ones(1), mask, 0.5, 1, earned)
    assert advantage.tolist() == [[0.5, 1.0, 1.0]]


def test_right_steps_are_paid_where_they_end(policy):
    """" 3 + 5 = 8, 8 + 7 = 15 hit." has two: before the first ends both are to come."""
    tokens = spoken(policy)
    gae = make("gae", policy, process_reward=0.25)
    paid = gae(tokens, policy)[0] - tokens.reward[0]  # V was 0
    texts = tokens.texts[0]
    first, second = texts.index(" 8"), texts.index(" 15")
    left = [0.5] * (first + 1) + [0.25] * (second - first) + [0.0] * (len(texts) - second - 1)
    assert paid[:len(texts)].tolist() == pytest.approx(left, abs=1e-6)


def test_a_task_without_steps_has_no_process_reward(policy):
    with pytest.raises(UserError, match="--process_reward 0.5: --task some_task has no method"):
        make("gae", SimpleNamespace(task=None, settings=SimpleNamespace(task="some_task")),
             process_reward=0.5)


@pytest.mark.parametrize("places", [[0, 99], [-1], 3, None, ["a"]])
def test_right_steps_that_are_no_tokens_are_refused(policy, monkeypatch, places):
    tokens = spoken(policy)
    monkeypatch.setattr(type(policy.task.task), "right_steps", lambda *_: places)
    with pytest.raises(UserError, match=r"right_steps\(.* should return a list of tokens"):
        make("gae", policy, process_reward=0.5)(tokens, policy)


FLAGS = {"gae": {"critic_lr": 0.05}, "vine": {"values_k": 2}}


def make(name, policy, **flags):
    return make_choice(ADVANTAGES[name], FLAGS[name] | flags, policy)


def small_lab(**_):
    return SimpleNamespace(settings=SimpleNamespace(), model=SimpleNamespace(config=SimpleNamespace(hidden_size=3), device="cpu"))


def told_by_state():
    """States whose direction tells the reward of the answer, and whose length tells nothing: a linear critic can be right."""
    reward = torch.tensor([1.0, 0.0, 0.5])
    direction = torch.stack([reward, (1 - reward.square()).sqrt(), torch.zeros(3)], 1)
    hidden = direction[:, None] * (0.1 + 5 * torch.rand(3, 5, 1, generator=torch.Generator().manual_seed(1)))
    forward = SimpleNamespace(look=lambda *_, **__: {"hidden": hidden})
    return hand_made(MASK, scores={"reward": reward}, forward=forward)


def test_the_critic_learns_and_its_advantages_are_from_before_its_update():
    policy, batch = small_lab(), told_by_state()
    gae = make("gae", policy)
    first = gae(batch, policy)
    torch.testing.assert_close(first, batch.reward[:, None] * MASK)  # V was 0 everywhere
    assert gae.metrics["explained_variance"] == pytest.approx(0, abs=1e-6)
    for _ in range(300):
        last = gae(batch, policy)
    assert gae.metrics["explained_variance"] > 0.99 and last.abs().max() < 0.05


def test_explained_variance_by_hand():
    """Targets 1 1 1 1 1 0 0 0.5 (lambda 1), predictions 0.5 everywhere explain nothing; those of the state explain all."""
    policy, batch = small_lab(), told_by_state()
    gae = make("gae", policy)
    with torch.no_grad():
        gae.critic.module.weight.copy_(torch.tensor([[0.5, 0, 0]]))
    gae(batch, policy)
    assert gae.metrics["explained_variance"] == pytest.approx(0.75)  # the error is half the target: a quarter of its variance


def test_the_policy_gets_no_gradient_from_the_critic(policy):
    tokens = spoken(policy)
    policy.model.zero_grad()
    gae = make("gae", policy)
    assert not gae(tokens, policy).requires_grad and all(p.grad is None for p in policy.model.parameters())


def test_a_critic_without_spread_in_its_targets_explains_nothing_defined():
    policy = small_lab()
    gae = make("gae", policy)
    gae(dataclasses.replace(told_by_state(), scores={"reward": torch.ones(3)}), policy)
    assert gae.metrics["explained_variance"] is None


def test_segments():
    assert segment_starts(["a", "b\n", "c", "\n\n", "d"], "line") == [0, 2, 4]
    assert segment_starts(["a", "b\n"], "line") == [0] and segment_starts([], "2") == []  # nothing begins after the last token
    assert segment_starts(["a"] * 5, "2") == [0, 2, 4]


def test_segments_begin_at_every_fifth_decision():
    """p below 0.9 at 1 2 3 4 6 7, of which the first and the sixth begin a segment; 0.9 is none."""
    probability = [0.95, 0.5, 0.8, 0.2, 0.89, 0.9, 0.1, 0.3, 1.0]
    assert decision_starts(probability) == [0, 1, 7]
    assert decision_starts([0.5] * 6) == [0, 5]  # 0 is a start in any case, and once
    assert decision_starts([0.99] * 3) == [0] and decision_starts([]) == []


def test_vine_cut_where_the_policy_was_uncertain(monkeypatch):
    """Answers of four tokens and of one; only the token at 2 is a decision. V is 0.5 at the start
    and 0.25 before that token, the rewards are 1 and 0."""
    table = {0: 0.5, 2: 0.25}
    monkeypatch.setattr(critic, "continuation_rewards", lambda policy, batch, prefixes, k:
                        (torch.tensor([[table[len(ids)]] * k for _, ids in prefixes]), 9))
    chance = torch.tensor([[0.95, 0.99, 0.5, 0.95], [0.95, 0.1, 0.1, 0.1]])
    batch = hand_made([[True] * 4, [True, False, False, False]], log_prob=chance.log(),
                      scores={"reward": torch.tensor([1.0, 0.0])})
    vine = make("vine", small_lab(), values_every="uncertain")
    expected = torch.tensor([[-0.25, -0.25, 0.75, 0.75], [-0.5, 0, 0, 0]])
    torch.testing.assert_close(vine(batch, None), expected)


def test_vine_by_hand(policy, monkeypatch):
    """V is 0.5 at the start, 0.25 after two tokens, 0.75 after four; the reward is 1."""
    table = {0: 0.5, 2: 0.25, 4: 0.75}
    monkeypatch.setattr(critic, "continuation_rewards", lambda policy, batch, prefixes, k: (torch.tensor([[table[len(ids)]] * k for _, ids in prefixes]), 9))
    batch = hand_made(MASK, scores={"reward": torch.tensor([1.0, 0.0, 0.5])}, ids=torch.tensor([[4, 5, 6, 7, 8], [4, 9, 0, 0, 0], [4, 0, 0, 0, 0]]))
    vine = make("vine", small_lab(), values_every="2")
    expected = torch.tensor([[-0.25, -0.25, 0.5, 0.5, 0.25], [-0.5, -0.5, 0, 0, 0], [0.0, 0, 0, 0, 0]])
    torch.testing.assert_close(vine(batch, policy), expected)
    assert vine.metrics == {"extra_tokens": 9}


def test_equal_prefixes_of_one_question_share_their_continuations(policy, monkeypatch):
    asked = []
    monkeypatch.setattr(critic, "continuation_rewards", lambda policy, batch, prefixes, k: asked.extend(prefixes) or (torch.arange(len(prefixes) * 1.0)[:, None], 0))
    batch = hand_made(torch.ones(3, 2, dtype=torch.bool), group=torch.tensor([0, 0, 1]), ids=torch.tensor([[4, 5], [4, 6], [4, 5]]))
    values, _ = prefix_values(policy, batch, [[0, 1], [0, 1], [0, 1]], 1)
    assert asked == [(0, ()), (0, (4,)), (1, ()), (1, (4,))] and values == [[0, 1], [0, 1], [2, 3]]


def test_continuations_are_scored_whole_and_against_their_own_question(policy, monkeypatch):
    """The model is made to say the rest of the right answer: only the prefix of that question becomes right."""
    batch, start = spoken(policy), " 3 + 5 = 8, 8 + 7 = 15 hit.</think>\n<answer> ("
    rest = policy.tokenizer.encode(" 3 + 5 ) + 7</answer><|im_end|>").ids

    def speak(model, prompts, starts, max_new_tokens, **_):
        assert len(max_new_tokens) == len(starts) and all(p[:len(batch.prompt_ids[0])] in batch.prompt_ids for p in prompts)
        tokens = torch.tensor([rest] * len(starts))
        return Generation(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.ones(len(tokens), dtype=torch.bool), *torch.zeros(3, *tokens.shape))
    monkeypatch.setattr(critic, "generate", speak)
    ids = tuple(policy.tokenizer.encode(start).ids)
    rewards, spent = continuation_rewards(policy, batch, [(0, ids), (1, ids)], 2)
    assert rewards[0].tolist() == pytest.approx([1.1, 1.1]) and (rewards[1] < 0.2).all() and spent == 4 * len(rest)


def test_a_prefix_that_has_ended_or_is_full_is_worth_its_own_reward(policy, monkeypatch):
    monkeypatch.setattr(critic, "generate", lambda *_, **__: pytest.fail("nothing can follow"))
    batch = spoken(policy)
    whole = tuple(policy.tokenizer.encode(SPOKEN[0]).ids)
    full = (tuple(policy.tokenizer.encode(" 3").ids) * 60)[:60]
    rewards, spent = continuation_rewards(policy, batch, [(0, whole), (1, whole), (0, full)], 3)
    assert rewards.tolist() == [pytest.approx([1.1] * 3), pytest.approx([0.1] * 3), [0.0] * 3] and spent == 0


def test_continuations_stop_at_the_limit_of_the_whole_answer(policy, monkeypatch):
    seen = []

    def watch(*args, **given):
        result = generate(*args, **given)
        seen.append((given["max_new_tokens"], result.mask.sum(1)))
        assert len(args[1]) == 1  # the prefixes are places of one sequence
        return result
    monkeypatch.setattr(critic, "generate", watch)
    batch = spoken(policy)
    prefixes = [(0, tuple(batch.ids[0, :n].tolist())) for n in (1, 5, 9)]
    rewards, spent = continuation_rewards(policy, batch, prefixes, 2)
    assert rewards.shape == (3, 2) and spent == sum(int(lengths.sum()) for _, lengths in seen)
    assert sum((limits for limits, _ in seen), []) == [59, 59, 55, 55, 51, 51]  # of 60
    for limits, lengths in seen:
        assert (lengths <= torch.tensor(limits)).all()


def test_prefixes_share_the_sequence_that_they_begin():
    whole = sequences([(0, (1, 2)), (0, (1, 2, 3)), (0, (1, 3)), (1, (1,)), (0, ())])
    assert whole == {(0, ()): (0, (1, 2, 3)), (0, (1, 2)): (0, (1, 2, 3)), (1, (1,)): (1, (1,)),
                     (0, (1, 2, 3)): (0, (1, 2, 3)), (0, (1, 3)): (0, (1, 3))}


def test_equal_answers_are_scored_once(policy, monkeypatch):
    """Of 120 answers that go on from three places of one answer, many are the same."""
    batch = spoken(policy)
    prefixes = [(0, tuple(batch.ids[0, :n].tolist())) for n in (3, 5, 9)]
    scored = []
    monkeypatch.setattr(type(policy), "reward_of", lambda policy, problem, ids: scored.append(ids) or len(ids))
    rewards, _ = continuation_rewards(policy, batch, prefixes, 40)
    assert len(scored) == len(set(scored)) and rewards.shape == (3, 40) and (rewards > 0).all()


def test_monte_carlo_values_agree_with_many_fresh_answers(policy):
    """The value of the empty prefix is the mean reward of plain sampling."""
    batch = spoken(policy)
    rewards, _ = continuation_rewards(policy, batch, [(1, ())], 600)
    fresh = generate(policy.model, [batch.prompt_ids[1]], answers=600, max_new_tokens=60, seed=11)
    rows = zip(fresh.tokens.tolist(), fresh.mask.sum(1).tolist())
    mean = sum(policy.reward_of(ASKED[1], ids[:length]) for ids, length in rows) / 600
    assert rewards.mean().item() == pytest.approx(mean, abs=4 * (0.25 / 300) ** 0.5)


@pytest.mark.parametrize("layers", [0, 1])
def test_a_trunk_reads_the_models_first_layers(policy, layers):
    """Reading one hidden unit gives that unit of the model, or of the model cut after a layer."""
    tokens, model = spoken(policy), copied(policy.model)
    model.model.layers = model.model.layers[:layers or None]
    trunk = make("gae", policy, critic="trunk", critic_layers=layers).critic.module
    with torch.no_grad():
        trunk.read.weight[0, 5] = 1.0
        rows = torch.tensor([4, 1, 0])  # of two problems, in any order
        values = trunk.values(tokens, rows)
    expected = Forward(model, 64).look(tokens)["hidden"][..., 5]
    torch.testing.assert_close(values, expected[rows][tokens.mask[rows]], rtol=1e-4, atol=1e-5)


def test_a_trunk_learns_and_leaves_the_policy_alone(policy):
    tokens, before = spoken(policy), {n: p.clone() for n, p in policy.model.named_parameters()}
    gae = make("gae", policy, critic="trunk", critic_layers=1)
    first = gae(tokens, policy)
    torch.testing.assert_close(first, tokens.reward[:, None] * tokens.mask)  # V was 0
    for _ in range(30):
        gae(tokens, policy)
    assert gae.metrics["explained_variance"] > 0.8  # answers that begin alike are not told apart
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name]), name


def test_a_trunk_of_more_layers_than_the_model(policy):
    with pytest.raises(UserError, match="--critic_layers 4: the model has 3"):
        make("gae", policy, critic="trunk", critic_layers=4)


def test_state_that_does_not_fit_is_refused():
    policy = small_lab()
    gae = make("gae", policy)
    gae(told_by_state(), policy)
    state = {name: value.clone() for name, value in gae.state_dict().items()}
    other = make("gae", policy)
    other.load_state_dict(state)
    torch.testing.assert_close(other(told_by_state(), policy), gae(told_by_state(), policy))
    with pytest.raises(UserError, match="lacks bias"):
        other.load_state_dict({name: value for name, value in state.items() if name != "bias"})
    with pytest.raises(UserError, match="does not fit"):
        other.load_state_dict({name: value for name, value in state.items() if name != "exp_avg.bias"})
