"""The planted task against a list of all its answers, its arms by hand."""
import itertools
import json

import numpy as np
import pytest
import torch

from lab.analysis.statistics import mean_over
from lab.engine.methods import MITIGATIONS
from lab.engine.errors import UserError
from lab.engine.tokens import OPERATOR, WORD
from grpo import group_z_score
from lab.__main__ import main
from lab.probes import planted
from lab.probes.planted import PLAIN, TRUE, Learner, Task, credit_of_keys, read_arm, train


def shaken(name):
    """A learner that has left its first step: its probabilities differ."""
    learner, generator = Learner(Task.read(name), 5), torch.Generator().manual_seed(1)
    for parameter in learner.model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return learner


def every_answer(learner, log_prob):
    """All answers (n, T), their probabilities, rewards and hits, token by token from the
    description."""
    task = learner.task
    ids = torch.tensor(list(itertools.product(range(4), repeat=task.tokens)))
    log_probs = []
    for t in range(task.tokens):
        keys = task.keys.tolist()
        cue = keys.index(t) if t in keys else task.decide
        log_probs.append(log_prob[cue, ids[:, t]])
    chance = torch.stack(log_probs).double().sum(0).exp()
    hit = (ids[:, task.keys] == learner.right).double()
    reward = hit.min(1).values if task.all_right else hit.mean(1)
    return ids, chance, reward, hit.float()


@pytest.mark.parametrize("name", ["4/2", "4/2 all", "4/3 all", "5/1"])
def test_value_and_credit_are_those_of_all_answers(name):
    learner = shaken(name)
    task, log_prob = learner.task, learner.forward()[1].detach()
    ids, chance, reward, hit = every_answer(learner, log_prob)
    assert chance.sum().item() == pytest.approx(1, abs=1e-5)
    right = learner.chance(log_prob)
    value = planted.reward_of(task, right).item()
    assert value == pytest.approx((chance @ reward).item(), abs=1e-5)
    assert torch.allclose(planted.reward_of(task, hit).double(), reward)
    credit = torch.zeros(ids.shape).index_copy(1, task.keys, credit_of_keys(task, hit, right))
    for t in range(task.tokens):  # E[R | first t + 1 tokens] - E[R | first t]
        before, after = (conditional(ids[:, :n], chance, reward) for n in (t, t + 1))
        assert torch.allclose(credit[:, t].double(), after - before, atol=1e-5)


def conditional(prefix, chance, reward):
    number = torch.zeros(len(prefix), dtype=torch.long)
    if prefix.shape[1]:
        number = prefix.unique(dim=0, return_inverse=True)[1]
    above, below = (torch.zeros(len(prefix), dtype=torch.float64).index_add(0, number, part)
                    for part in (chance * reward, chance))
    return (above / below.clamp(min=1e-30))[number]


@pytest.mark.parametrize("name", ["4/2", "4/3 all"])
def test_the_gradient_of_true_credit_is_that_of_the_expected_reward(name):
    """On average over all answers; plain GRPO and a mask are tested by what the loss takes."""
    learner = shaken(name)
    task, log_prob = learner.task, learner.forward()[1]
    ids, chance, reward, hit = every_answer(learner, log_prob)
    parameters = [p for n, p in learner.model.named_parameters()
                  if not any(word in n for word in ("q_proj", "k_proj", "embed"))]
    truth = torch.autograd.grad(planted.reward_of(task, learner.chance(log_prob)), parameters,
                                retain_graph=True)
    credit = torch.zeros(ids.shape).index_copy(
        1, task.keys, credit_of_keys(task, hit, learner.chance(log_prob).detach()))
    of_tokens = log_prob[task.cue_of, ids] * credit * chance.detach()[:, None]
    for mine, theirs in zip(torch.autograd.grad(of_tokens.sum(), parameters), truth):
        assert torch.allclose(mine, theirs.to(mine.dtype), atol=1e-5)


def batch_of(name):
    learner = shaken(name)
    hidden, log_prob = (part.detach() for part in learner.forward())
    return learner, hidden, log_prob, learner.sample(hidden, log_prob, 1)


def test_a_batch_is_what_a_run_would_have():
    learner, hidden, log_prob, rollouts = batch_of("12/3")
    ids, cues = rollouts.ids, [3, 3, 0, 3, 3, 3, 1, 3, 3, 3, 2, 3]
    assert rollouts.group.tolist() == [b // 8 for b in range(64)]
    chosen = torch.distributions.Categorical(log_prob[cues].exp().expand(64, 12, 4))
    assert torch.allclose(rollouts.log_prob, chosen.log_prob(ids), atol=1e-6)
    assert torch.allclose(rollouts.entropy, chosen.entropy(), atol=1e-6)
    assert torch.allclose(rollouts.collision, chosen.probs.square().sum(-1))
    assert rollouts.kind[0].tolist() == [OPERATOR if t in (2, 6, 10) else WORD for t in range(12)]
    assert torch.equal(rollouts.hidden, hidden[cues].expand(64, 12, -1))
    hit = (ids[:, [2, 6, 10]] == learner.right).float()
    assert torch.allclose(rollouts.reward, hit.mean(1))
    assert torch.equal(rollouts.advantage[:, 0], group_z_score(rollouts.reward, rollouts.group))
    assert rollouts.true_credit[:, [2, 6, 10]].all()
    assert rollouts.true_credit.count_nonzero() == 64 * 3


def test_answers_are_drawn_from_the_policy_and_differ_between_steps():
    learner, hidden, log_prob, first = batch_of("400/1")
    second = learner.sample(hidden, log_prob, 2).ids
    assert not torch.equal(first.ids, second)
    others = first.ids[:, ~learner.task.decides]
    share = torch.bincount(others.flatten(), minlength=4) / others.numel()
    assert torch.allclose(share, log_prob[1].exp(), atol=0.02)  # 25,536 draws


def test_a_listed_method_is_trained_as_its_formula_says():
    """none is plain GRPO; by_kind with 0.1 for words is the mask of the keys."""
    task = Task.read("12/3")

    def trained(name):
        return [train(task, read_arm(name), seed, 3, 1e-2)[0] for seed in (1, 2)]

    plain = trained(PLAIN)
    assert trained("none") == trained("grpo") == plain and plain[0] != plain[1]
    assert trained("mask 0.1") == pytest.approx(trained("by_kind --word_weight 0.1"), abs=1e-5)


def test_a_training_of_true_credit_raises_the_expected_reward():
    """From about a quarter: its mean over sixty steps is far above that of the first step."""
    task = Task.read("8/2")
    start = planted.reward_of(task, Learner(task, 1).chance(Learner(task, 1).forward()[1])).item()
    assert start == pytest.approx(0.25, abs=0.05)
    assert train(task, read_arm(TRUE), 1, 60, 1e-2)[0] > 0.6


def test_each_step_has_its_own_gradient():
    """Only the first batch has an advantage, so after the second one the gradient is 0."""
    gradients = []

    def start(learner):
        def arm(rollouts):
            gradient = learner.model.lm_head.weight.grad
            gradients.append(gradient is not None and bool(gradient.any()))
            return rollouts.true_credit * (rollouts.step == 1), torch.ones(64, 8)
        return arm

    train(Task.read("8/2"), start, 1, 3, 1e-2)
    assert gradients == [False, True, False]


def test_a_step_counts_with_the_mean_of_before_and_after_it(monkeypatch):
    """Values 0, 1 and 3 have the means 0.5 and 2."""
    values, real = iter([0.0, 1.0, 3.0]), planted.reward_of
    monkeypatch.setattr(planted, "reward_of", lambda task, hit: (
        torch.tensor(next(values)) if hit.dim() == 1 else real(task, hit)))
    assert train(Task.read("8/2"), read_arm(PLAIN), 1, 2, 1e-2)[0] == 1.25


def test_a_mask_points_at_the_keys():
    learner, _, _, rollouts = batch_of("12/4")
    advantage, weight = read_arm("mask 0.1")(learner)(rollouts)
    is_key = learner.task.decides
    assert torch.equal(advantage, rollouts.advantage) and is_key.sum() == 4
    assert torch.allclose(weight[:, is_key], torch.tensor(12 / 4.8))
    assert torch.allclose(weight[:, ~is_key], torch.tensor(1.2 / 4.8))
    credit, weight = read_arm(TRUE)(learner)(rollouts)
    assert torch.equal(credit, rollouts.true_credit) and (weight == 1).all()


@pytest.mark.parametrize("text", ["12", "3/4", "0/0", "12/3 loud", "12/3all"])
def test_a_task_is_written_in_words(text):
    with pytest.raises(UserError, match="a task is written as 200/19"):
        Task.read(text)
    assert Task.read(" 512/48 all") == Task(512, 48, all_right=True)


def test_token_47_decides_and_token_150_does_not():
    decides = Task.read("200/19").decides
    assert decides[47] and not decides[150] and decides.sum() == 19
    table = planted.push_table({("200/19", PLAIN): np.arange(200.0)})
    assert table.rows == [("200/19", PLAIN, "token 47", 47.0, "token 150", 150.0)]


def test_a_method_with_its_flags_is_trained_beside_masks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def my_idea(rollouts, *, strength: float = 1.0):
        """More where the model is unsure."""
        return 1 + strength * rollouts.entropy

    monkeypatch.setitem(MITIGATIONS.data, "my_idea", my_idea)
    quick = "--steps 3 --seeds 4 --tasks 8/2,4/4".split()
    main(["planted", *quick, "--only", "my_idea --strength 2,gae,mask 0", "--out", "a"])
    assert "| my_idea" in capsys.readouterr().out
    gains, push = json.loads((tmp_path / "a/numbers.json").read_text())["tables"]
    names = (PLAIN, TRUE, "my_idea --strength 2", "gae", "mask 0")
    for table in (gains, push):
        assert [(row["task"], row["arm"]) for row in table["rows"]] == [
            (task, name) for task in ("8/2", "4/4") for name in names]
    true, mask = push["rows"][1], push["rows"][4]
    assert (true["a key"], true["no key"], true["its push"]) == ("token 2", "token 5", 0)
    assert mask["its push"] == 0 and mask["push"] > 0
    assert push["rows"][0]["push"] == push["rows"][0]["its push"]
    assert push["rows"][5]["its push"] is None  # in 4/4 every token decides


@pytest.mark.parametrize("name, part", [
    ("deletion", "reward_of"), ("measured", "tokenizer"), ("attention_credit", "attention"),
    *((name, "") for name in ("outcome_conditional", "vine", "without_luck", "oracle"))])
def test_a_method_that_needs_more_than_there_is_says_so(name, part, tmp_path, monkeypatch):
    """It would compute something with empty texts."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{name} cannot be measured in these tasks.*{part}"):
        main(["planted", "--steps", "2", "--seeds", "2", "--tasks", "8/2", "--only", name])


def test_a_gain_is_paired_by_seed_and_corrected_but_for_true_credit():
    """rloo gains 0.05 and 0.15 in two seeds each: its p of 0.03 doubles, because two arms are
    tested."""
    plain = np.array([0.1, 0.2, 0.3, 0.4])
    arms = {PLAIN: plain, TRUE: plain + [0.2, 0.2, 0.3, 0.3],
            "rloo": plain + [0.05, 0.15, 0.05, 0.15], "mask 0": plain + [0.0, 0.01, 0.0, -0.01]}
    table = planted.gains_table({("4/2", name): values for name, values in arms.items()})
    rows = {row[1]: row for row in table.rows}
    alone = mean_over(np.array([0.05, 0.15, 0.05, 0.15]))
    assert rows["rloo"][2:4] == (pytest.approx(0.35), alone)
    assert rows["rloo"][4] == pytest.approx(2 * alone.p) and rows[TRUE][4] is None
    assert rows[PLAIN][3:] == (None, None)
