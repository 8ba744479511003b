"""The synthetic tasks against enumeration, its training against torch, its arms by hand."""
import copy
import itertools
import json

import numpy as np
import pytest
import torch

from analysis.statistics import mean_over
from engine.choices import MITIGATIONS
from engine.errors import UserError
from engine.tokens import ANSWER, NUMBER, OPERATOR, WORD
from grpo import group_z_score
from qwen2_model import rotary
from lab.__main__ import main
from lab.dial.arms import PLAIN, TRUE, Batch, named_arm
from lab.dial.task import (Sample, SyntheticTask, TaskSpec, fresh_policy, used_parameters)
from lab.probes.card_rows import in_planted_tasks
from lab.dial.told import told_by_definition
from lab.dial.training import AdamWOfRows, train_policies
from lab.probes import dial

WORLDS = ("4/2", "4/2 all", "4/2 seen sure 1", "4/3 all seen found", "3/2 own seen")


def shaken(name):
    """A world whose policies have left the first step: contexts differ."""
    world = SyntheticTask(TaskSpec.read(name), [0, 5])
    noise = torch.randn(world.parameters.shape, generator=torch.Generator().manual_seed(1))
    world.parameters = world.parameters + 0.3 * noise
    return world


def every_answer(world, s, log_prob):
    """Of one policy: all answers, what each places sees, probabilities and rewards, token by token
    from the description."""
    T, V = world.spec.tokens, world.spec.vocabulary
    keys, rows = world.keys.tolist(), []
    ids = torch.tensor([answer for answer in itertools.product(range(V), repeat=T)
                        if all(answer[key] < 4 for key in keys)])  # others never stand there
    for answer in ids.tolist():
        seen, contexts = 0, []
        for t, symbol in enumerate(answer):
            contexts.append(int(world.cue_of[t]) * world.sights + seen)
            if t in keys and world.spec.seen:
                seen = 1 + symbol
        rows.append(contexts)
    contexts = torch.tensor(rows)
    hit = (ids[:, keys] == world.right[s]).double()
    reward = hit.prod(1) if world.spec.all else hit.mean(1)
    return ids, contexts, log_prob[s][contexts, ids].double().sum(1).exp(), reward


@pytest.mark.parametrize("name", WORLDS)
def test_values_credits_and_gradient_are_those_of_all_answers(name):
    world = shaken(name)
    parameters = world.parameters.clone().requires_grad_()
    _, log_prob = world.forward(parameters)
    to_come = world.after_keys(log_prob)
    value = world.value(to_come)
    for s in (0, 1):
        ids, contexts, chance, reward = every_answer(world, s, log_prob)
        assert chance.sum().item() == pytest.approx(1, abs=1e-5)
        assert value[s].item() == pytest.approx((chance @ reward).item(), abs=1e-5)
        mine, = torch.autograd.grad(value[s], parameters, retain_graph=True)
        truth, = torch.autograd.grad(chance @ reward, parameters, retain_graph=True)
        assert torch.allclose(mine, truth, atol=1e-6) and truth[s].norm() > 1e-3
        seen = contexts[:, world.keys] % world.sights
        hit = (ids[:, world.keys] == world.right[s]).float()
        sample = Sample(ids[None], contexts[None], seen[None], hit[None], reward[None].float())
        alone = SyntheticTask(world.spec, [world.seeds[s]])
        credit = alone.credit(sample, to_come[:, s:s + 1].detach())[0].double()
        known = chance > 1e-12
        assert torch.allclose(credit.sum(1)[known], (reward - chance @ reward)[known], atol=1e-5)
        for t in range(world.spec.tokens):  # E[R | first t + 1 tokens] - E[R | first t]
            after, before = (conditional(ids[:, :n], chance, reward) for n in (t + 1, t))
            assert torch.allclose(credit[known, t], (after - before)[known], atol=1e-5)


def conditional(prefix, chance, reward):
    number = prefix.unique(dim=0, return_inverse=True)[1] if prefix.shape[1] else \
        torch.zeros(len(prefix), dtype=torch.long)
    above, below = (torch.zeros(len(prefix), dtype=torch.float64).index_add(0, number, part)
                    for part in ((chance * reward).detach(), chance.detach()))
    return (above / below.clamp(min=1e-30))[number]


def test_the_layer_by_hand_is_that_of_the_model():
    spec = TaskSpec.read("6/2 seen")
    world, (model, cue, _) = SyntheticTask(spec, [3]), fresh_policy(spec, 3)
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # biases begin at 0
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    flat = torch.cat([value.flatten() for value in used_parameters(model).values()])[None]
    embedding = model.model.embed_tokens.weight
    x = torch.stack([cue[c] + (embedding[h - 1] if h else 0)
                     for c, h in zip(world.cue_at.tolist(), world.seen_at.tolist())])
    [block] = model.model.layers
    x = block(x, *rotary(torch.zeros(len(x)), model.config), lambda layer, q, k, v: v)
    hidden = model.model.norm(x)
    mine, log_prob = world.forward(flat)
    assert torch.allclose(mine[0], hidden, atol=1e-5)
    assert torch.allclose(log_prob[0], (model.logits(hidden) + world.offset).log_softmax(-1),
                          atol=1e-5)


def batch_of(name):
    world = shaken(name)
    hidden, log_prob = world.forward(world.parameters)
    uniform = torch.rand(2, 64, world.spec.tokens, generator=torch.Generator().manual_seed(2))
    return Batch(world, world.sample(log_prob, uniform), hidden, log_prob,
                 world.after_keys(log_prob), 1)


def test_a_batch_is_what_a_run_would_have():
    batch = batch_of("12/3")
    rollouts, ids = batch.rollouts(1), batch.sample.ids[1]
    assert torch.equal(rollouts.ids, ids) and rollouts.group.tolist() == [b // 8 for b in range(64)]
    chance = batch.log_prob[1].exp()[batch.sample.context[0, 0]].expand(64, 12, 4)
    assert torch.allclose(rollouts.log_prob, torch.distributions.Categorical(chance).log_prob(ids))
    assert torch.allclose(rollouts.entropy, torch.distributions.Categorical(chance).entropy())
    assert torch.allclose(rollouts.collision, chance.square().sum(-1))
    assert torch.equal(rollouts.advantage[:, 0], group_z_score(rollouts.reward, rollouts.group))
    assert rollouts.kind[0].tolist() == [OPERATOR if t in (2, 6, 10) else WORD for t in range(12)]
    hidden = batch.hidden[1][batch.sample.context[0, 0]]
    assert torch.equal(rollouts.hidden, hidden.expand(64, 12, -1))


def test_each_policy_takes_the_steps_that_torch_makes():
    parameters, rates = torch.randn(2, 3), [1e-2, 1e-1]
    mine, optimizer = parameters.clone(), AdamWOfRows(parameters, rates)
    theirs = [row.clone().requires_grad_() for row in parameters]
    torchs = [torch.optim.AdamW([row], lr=rate, weight_decay=0.0)
              for row, rate in zip(theirs, rates)]
    for step in range(4):
        gradient = torch.tensor([[1.0, -2, 0.1], [3, 0, -1]]) * (step + 1) ** 2
        mine += optimizer.change(gradient)
        for row, one, of_row in zip(theirs, torchs, gradient):
            row.grad = of_row.clone()
            one.step()
    assert torch.allclose(mine, torch.stack(theirs).detach(), atol=1e-6)


def test_a_listed_method_is_trained_as_its_formula_says():
    """none is plain GRPO; by_kind with 0.1 for words is the mask of the tokens that decide. A
    policy does not depend on those beside it, nor on how many there are."""
    spec, seeds, rates = TaskSpec.read("12/3"), [1, 2], [1e-2, 3e-2]
    plain, none = (train_policies(spec, named_arm(name), seeds, rates, 3)
                   for name in (PLAIN, "none"))
    assert plain == none and plain[0] != plain[1]
    mask = train_policies(spec, named_arm("mask 0.1"), seeds, rates, 3)
    kinds = train_policies(spec, named_arm("by_kind", {"word_weight": 0.1}), seeds, rates, 3)
    assert mask == pytest.approx(kinds, abs=1e-5)
    alone = train_policies(spec, named_arm(PLAIN), [2], [3e-2], 3)
    assert alone[0] == pytest.approx(plain[1], abs=1e-5)


def test_a_mask_points_at_the_tokens_that_decide():
    batch = batch_of("12/4")
    ratio = named_arm("mask 0.1").start(batch.task)(batch) / batch.advantage
    weight = ratio[0, batch.advantage[0, :, 0] != 0][0]
    is_key = batch.task.decides
    assert weight[is_key] == pytest.approx(12 / 4.8) and is_key.sum() == 4
    assert weight[~is_key] == pytest.approx(1.2 / 4.8)


@pytest.mark.parametrize("text", ["12", "3/4", "0/0", "12/3 loud", "12/3 sure", "12/3 sure x"])
def test_a_task_is_written_in_words(text):
    with pytest.raises(UserError, match="a task is written as 128/12"):
        TaskSpec.read(text)
    assert TaskSpec.read("512/48 sure 4.5 own") == TaskSpec(512, 48, sure=4.5, own=True)


def test_a_method_with_its_flags_is_trained_beside_masks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def my_idea(rollouts, *, strength: float = 1.0):
        """More where the model is unsure."""
        return 1 + strength * rollouts.entropy

    monkeypatch.setitem(MITIGATIONS.data, "my_idea", my_idea)
    quick = "--steps 3 --seeds 4 --worlds 8/2,8/4".split()
    main(["dial", *quick, "--only", "my_idea --strength 2,gae,mask 0", "--out", "a"])
    assert "| my_idea" in capsys.readouterr().out
    [table] = json.loads((tmp_path / "a/numbers.json").read_text())["tables"]
    names = (PLAIN, TRUE, "my_idea --strength 2", "gae", "mask 0")
    assert [(row["task"], row["arm"]) for row in table["rows"]] == [
        (task, name) for task in ("8/2", "8/4") for name in names]
    with pytest.raises(UserError, match="deletion cannot be measured here: it needs answers of an"):
        main(["dial", *quick, "--only", "deletion", "--out", "b"])


@pytest.mark.parametrize("flags, sentence", [
    (["--only", "mask abc"], "--only mask abc: 'abc' should be a number"),
    (["--only", "by_kind,mask -1"], "--only mask -1: -1.0 should be at least 0"),
    (["--only", "mask 0.1 --strength 2"], "--only mask 0.1 --strength 2: mask 0.1 has no flags"),
    (["--only", "nothing"], "there is no weighting and no advantage nothing"),
    (["--rate", "abc"], "--rate 'abc' should be a number"),
    (["--rate", "0"], "--rate 0.0 should be above 0 and at most 10")])
def test_what_is_typed_wrongly_is_told_before_anything_is_trained(monkeypatch, tmp_path, flags,
                                                                  sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dial, "train_policies", None)
    with pytest.raises(UserError, match=sentence):
        main(["dial", *flags])


def test_a_gain_in_a_task_is_paired_by_seed_and_corrected_but_for_true_credit():
    """rloo gains 0.05 and 0.15 in two seeds each: its p of 0.03 doubles, because two arms are
    tested."""
    plain = np.array([0.1, 0.2, 0.3, 0.4])
    arms = {PLAIN: plain, TRUE: plain + [0.2, 0.2, 0.3, 0.3],
            "rloo": plain + [0.05, 0.15, 0.05, 0.15], "mask 0": plain + [0.0, 0.01, 0.0, -0.01]}
    table = dial.gains_table({("4/2", name): values for name, values in arms.items()})
    rows = {row[1]: row for row in table.rows}
    alone = mean_over(np.array([0.05, 0.15, 0.05, 0.15]))
    assert rows["rloo"][2:4] == (pytest.approx(0.35), alone)
    assert rows["rloo"][4] == pytest.approx(2 * alone.p) and rows[TRUE][4] is None
    assert rows[PLAIN][3:] == (None, None)


def test_all_arms_have_one_learning_rate_where_a_method_is_tried(monkeypatch):
    """If each had the rate that was best on few seeds, luck with a rate would look like a gain."""
    rates = set()

    def train(spec, arm, seeds, rate_of_runs, *_):
        rates.update(rate_of_runs)
        return [0.5 + 1e-3 * (seed % 2) * (arm.name == "random") for seed in seeds]

    monkeypatch.setattr(dial, "train_policies", train)
    dial.gains_in_three_tasks("random")
    assert rates == {0.01}


def test_a_method_that_does_the_same_as_plain_grpo_cannot_be_tried(monkeypatch):
    """It weights by sections, of which a synthetic task has only one."""
    def in_the_answer(rollouts, *, elsewhere: float = 0.1):
        return torch.where(rollouts.section == ANSWER, 1.0, elsewhere)

    monkeypatch.setitem(MITIGATIONS, "in_the_answer", in_the_answer)
    monkeypatch.setattr(dial, "train_policies", lambda spec, arm, seeds, *_: [0.5 for _ in seeds])
    for row in in_planted_tasks("in_the_answer", {}).values():
        assert "there in_the_answer does the same as plain GRPO" in row["reason"]


@pytest.mark.parametrize("weight, said", [
    (lambda batch: torch.where(batch.kind == OPERATOR, 1.0, 0.1), "told which tokens decide"),
    (lambda batch: 1.0 + (batch.section == ANSWER) * batch.entropy, "all tokens are in one"),
    (lambda batch: 1.0 + batch.hidden.abs().mean(-1), "that decide nothing have the same one"),
    # no token is a number: entropy alone tells tokens apart
    (lambda batch: 1.0 + (batch.kind != NUMBER) * batch.entropy, ""),
    (lambda batch: 1.0 + batch.entropy, "")])
def test_what_a_task_tells_by_its_definition_is_said_beside_the_gains(monkeypatch, weight, said):
    """A weight by kinds is a mask of the tokens that decide."""
    monkeypatch.setitem(MITIGATIONS, "mine", weight)
    monkeypatch.setattr(dial, "train_policies", lambda spec, arm, seeds, *_: [
        0.5 + 1e-3 * (seed % 2) * (arm.name == "mine") for seed in seeds])
    rows = in_planted_tasks("mine", {})
    is_void = said == "told which tokens decide"  # then no gain is shown
    for row in rows.values():
        assert said in row["reason" if is_void else "told"] and ("own" in row) != is_void
        assert is_void or ("But mine " in row["told"]) == bool(said)


def test_the_methods_that_go_by_what_a_definition_says():
    found = {name: told_by_definition(name) for name in (
        "by_kind", "planning", "span", "gae", "learned_importance", "entropy_weighted", "rloo")}
    kinds, sections, states = ("kinds of tokens apart", "sections of an answer", "hidden states")
    words = {"by_kind": kinds, "planning": kinds, "span": sections, "gae": states,
             "learned_importance": states}
    for name, told in found.items():
        assert len(told) == (name in words) and words.get(name, "") in " ".join(told)


def test_a_method_that_cannot_be_asked_says_why():
    rows = in_planted_tasks("deletion", {})
    assert rows.keys() == {"few", "some", "many"} and all(row["reason"] for row in rows.values())
