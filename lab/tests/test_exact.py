"""Worlds whose answers are all listed: what each method does there on average, methods that are
broken on purpose, identities of theory, and the pages that say so."""
import copy
import itertools
import math
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import LISTED, ROOT, gradients, one_of

import grpo
from lab.engine.update import update
from lab.credit import turns
from lab.engine.methods import ADVANTAGES, MITIGATIONS, method_of
from lab import __main__ as overview, exact
from lab.exact import (PROMPT, WORLDS, Kind, World, batch_of, coefficient, compared, judge)
from lab.credit.weightings import rescaled_weight
from lab.credit.weightings import with_advantage

PAGE = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
COLUMN = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no, .*|not judged.*) \|$", PAGE, re.M))


@cache
def worlds(**settings):
    return {about: World(kind, settings) for about, kind in WORLDS.items()}


def judged(choice, **flags):
    return judge(choice, flags, worlds())


QUICK = ("grpo", "outcome_conditional", "by_kind", "optimal_token_baseline", "causal_ablation")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name not in QUICK else [])
    for name in (*ADVANTAGES, *MITIGATIONS) if name in LISTED])
def test_a_method_is_what_the_page_says(name):
    """yes; no, and the lowest cosine in these worlds; or why it is not judged. A method of one's
    own that has no row is not judged."""
    verdict = judged(method_of(name))
    word, _, number = COLUMN[name].partition(", ")
    assert word.partition(":")[0] == {"unbiased": "yes", "biased": "no"}.get(
        verdict.word, "not judged"), verdict
    if number:
        lowest = min(mean.cosine for mean in verdict.means.values())
        assert float(number) == pytest.approx(lowest, abs=0.006), verdict


def divided_by_length(rollouts):
    return grpo.rloo(rollouts) / rollouts.length[:, None]


def counts_itself(rollouts):
    """The mean of those that reach a turn, the answer itself among them."""
    worth = turns.Worth(rollouts)
    return turns.to_turns([[G - worth.reached[worth.prompts[row], d][1]
                            / worth.reached[worth.prompts[row], d][0] for d, G in enumerate(to_go)]
                           for row, to_go in enumerate(worth.to_go)], rollouts)


def knows_the_token(rollouts):
    return grpo.rloo(rollouts) + rollouts.log_prob


def pays_the_last_turn(rollouts):
    is_last = rollouts.turn == rollouts.turn.amax(1, keepdim=True)
    return turns.turn_mean(rollouts) * is_last


def clamps(rollouts):
    return grpo.rloo(rollouts).clamp(min=0)


def trains_on_half_of_the_reward(rollouts):
    """The right answers of a group, which are told by their rewards."""
    return grpo.rloo(rollouts) * (rollouts.reward > rollouts.reward.mean())[:, None]


def least_of_the_others(rollouts):
    """A baseline that looks at no token of its own answer."""
    reward, group = rollouts.reward, rollouts.group
    least = [min([*reward[(group == group[b]) & (torch.arange(len(group)) != b)].tolist()],
                 default=0.0) for b in range(len(group))]
    return grpo.to_every_token(reward - torch.tensor(least), rollouts)


@pytest.mark.parametrize("broken", one_of(3, [
    divided_by_length, counts_itself, knows_the_token, pays_the_last_turn, clamps,
    trains_on_half_of_the_reward]))
def test_a_method_that_is_broken_on_purpose_is_biased(broken):
    assert judged(broken).word == "biased"


def test_a_baseline_of_others_is_unbiased_and_a_constant_factor_no_bias():
    assert judged(least_of_the_others).word == "unbiased"
    assert judged(grpo.dr_grpo).means["two turns"].length == pytest.approx(1 / 2, abs=1e-6)


def only_the_end_is_paid(method, problems, *given, pays_turns, after=turns.without_luck.after):
    found = [after(method, [problem], *given, pays_turns=pays_turns) for problem in problems]
    return sum(paid for paid, goes_on in found if not goes_on), sum(on for _, on in found)


@pytest.mark.parametrize("replaced, by, where", [
    (turns.Worth, ("for_others", turns.Worth.at), "two turns"),
    (turns.without_luck, ("after", only_the_end_is_paid), "three turns, each is paid"),
    (turns, ("tokens_in", lambda reply, policy: 0), "two turns, answers cut off")])
def test_without_luck_with_a_mistake_is_biased(monkeypatch, replaced, by, where):
    """With what other answers to the same problem earn, which know its secret; with redrawn
    problems that pay only where they end; and with all replies going on, whether they fit or not.
    """
    monkeypatch.setattr(replaced, *by)
    [mean] = judge(turns.without_luck, {}, {where: worlds()[where]}).means.values()
    assert mean.bias > 0.003


@pytest.mark.slow
@pytest.mark.parametrize("name", ["without_luck", "turn_credit"])
def test_methods_of_turns_are_unbiased_in_other_worlds(name):
    """In some answers of each seed a long reply has the tokens of a short one and the turn after
    it, or the beginning of this turn."""
    of_turns = {about: World(kind, seed=0) for about, kind in WORLDS.items() if kind.turns > 1}
    of_turns["long turns"] = World(Kind(turns=2, problems=3, limit=4, vocabulary=2), seed=2)
    verdict = judge(method_of(name), {}, of_turns)
    assert verdict.word == "unbiased" and not verdict.stops, verdict


def test_what_draws_or_stops_is_not_judged_and_says_why():
    def draws(rollouts):
        return torch.rand(rollouts.mask.shape, generator=rollouts.generator)

    def needs_numbers(rollouts):
        return torch.tensor([[len(rollouts.problems[0].numbers)]])

    one = {"two turns": worlds()["two turns"]}
    assert judge(draws, {}, one).word == "it draws random numbers"
    assert "no attribute 'numbers'" in judge(needs_numbers, {}, one).word
    assert judge(lambda rollouts: rollouts.log_prob * 0.0, {}, one).word == (
        "it gives no gradient here")


@pytest.mark.parametrize("flag, value, word", one_of(5, [
    ("loss_norm", "token", "biased"), ("loss_norm", "sequence", "biased"),
    ("drop_unfinished", True, "biased"), ("kl", 0.1, "biased"), ("entropy_bonus", 0.1, "biased"),
    ("placebo", "weights", "unbiased"), ("placebo", "weights_by_position", "biased"),
    ("rescale", "none", "biased")]))
def test_flags_of_the_loss_are_judged(flag, value, word):
    """With inverse_logprob, whose placebo has the same weight everywhere, or with rloo."""
    name = "inverse_logprob" if flag in ("placebo", "rescale") else "rloo"
    assert judge(method_of(name), {}, worlds(**{flag: value})).word == word


@pytest.mark.parametrize("size, beside", [(2, 2), (3, 2)])
def test_mean_and_noise_are_those_of_plain_loops(size, beside):
    """Over all ordered groups, with the gradient at the logits by autograd of the loss, in a world
    where answers are cut off."""
    world = World(WORLDS["two turns, answers cut off"]._replace(size=size, beside=beside,
                                                                   problems=1))
    chances, found = world.estimates(ADVANTAGES["grpo"])
    logits = world.log_p.clone().requires_grad_()
    first = second = 0.0
    for rows in itertools.product(range(len(world.answers)), repeat=size):
        batch = batch_of(world.rollouts, [rows, range(0, 2 * beside, 2)])
        log_prob = logits.log_softmax(1)[world.places[list(rows)]].gather(
            2, batch.ids[:size, :, None]).squeeze(2)
        loss = grpo.policy_loss(log_prob, grpo.grpo(batch)[:size].double(), torch.ones(1, 1),
                                batch.mask[:size], -size)
        of_group = torch.autograd.grad(loss, logits)[0].flatten()
        chance = math.prod(world.answers[row].chance for row in rows)
        first, second = first + chance * of_group, second + chance * of_group.square().sum()
    torch.testing.assert_close(chances @ found, first, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(chances @ found.square().sum(1), second, rtol=1e-5, atol=1e-9)


def test_the_truth_is_the_gradient_of_the_expected_reward():
    """By autograd of the sum over all answers of probability times reward."""
    for about in ("three turns", "two turns, answers cut off"):
        world = worlds()[about]
        logits, rollouts = world.log_p.clone().requires_grad_(), world.rollouts
        of_tokens = logits.log_softmax(1)[world.places].gather(
            2, rollouts.ids[..., None]).squeeze(2)
        chance = (of_tokens * rollouts.mask).sum(1).exp()
        assert chance.sum().item() == pytest.approx(world.kind.problems)
        J = chance @ rollouts.reward.double() / world.kind.problems
        torch.testing.assert_close(world.truth, torch.autograd.grad(J, logits)[0].flatten())


@pytest.mark.parametrize("name", ["grpo", "entropy_ratio"])
def test_a_step_of_training_has_the_coefficients_that_are_judged(monkeypatch, name):
    """The real update of a model, at its parameters, beside a plain forward pass."""
    world = World(WORLDS["two turns, answers cut off"], {"kl": 0.1, "entropy_bonus": 0.2})
    model, s = world.policy.model, world.policy.settings
    batch = batch_of(world.rollouts, [[0, 2, 5, 6], [9, 10, 13]])
    coefficients = coefficient(method_of(name), {}, batch, world.policy, 0)
    rows = [torch.tensor([[PROMPT, *ids[:-1]]]) for ids in batch.ids.tolist()]
    log_prob = torch.cat([model(row).log_softmax(2) for row in rows]).gather(
        2, batch.ids[..., None]).squeeze(2)
    (-coefficients * log_prob * batch.mask).sum().backward()
    judged_gradient = gradients(model)
    spread = method_of("rloo" if name in MITIGATIONS else name)
    rollouts = with_advantage(batch, lambda rollouts, _: spread(rollouts), world.policy, s, 1)
    weigh = method_of(name if name in MITIGATIONS else "none")
    weight, _ = rescaled_weight(lambda rollouts, _: weigh(rollouts), name, rollouts)
    uniform = copy.deepcopy(model)
    for parameter in uniform.parameters():
        torch.nn.init.zeros_(parameter)
    monkeypatch.setattr("lab.engine.update.clip_and_step", lambda *given: 0.0)
    update(model, SimpleNamespace(zero_grad=model.zero_grad), rollouts, weight, s, uniform)
    torch.testing.assert_close(gradients(model), judged_gradient, rtol=1e-3, atol=1e-6)


def test_cosine_bias_and_noise_by_hand():
    """Two batches (3, 8) and (3, 0) beside (2, 0): the mean is (3, 4), of which 3 is along it."""
    batches = torch.tensor([[3.0, 8.0], [3.0, 0.0]]).double()
    mean = compared(torch.tensor([0.5, 0.5]).double(), batches, torch.tensor([2.0, 0.0]).double())
    assert mean == pytest.approx((3 / 5, 4 / 5, 3 / 2, 16 / 9))


@pytest.mark.parametrize("seed, G", one_of(2, [(3, 2), (4, 3)]))
def test_identities_of_the_page_on_policy_gradient(seed, G):
    """The true credit has the true gradient, its squares add up to the variance of the reward,
    dr_grpo is (G - 1) / G of the gradient, and GRPO's z-score c(p, G) times it."""
    world = World(Kind(graded=False, size=G), seed=seed)
    chance, rollouts = world.chances, world.rollouts
    J, credit = world.value(0, ()), credit_of(world)
    each = world.gradients(torch.arange(len(chance))[:, None], credit[:, None])
    torch.testing.assert_close(chance @ each, world.truth, rtol=1e-5, atol=1e-8)
    assert (chance @ credit.square().sum(1)).item() == pytest.approx(J * (1 - J), rel=1e-5)
    for name, factor in (("rloo", 1.0), ("dr_grpo", (G - 1) / G), ("grpo", z_score_factor(J, G))):
        chances, found = world.estimates(ADVANTAGES[name])
        torch.testing.assert_close(chances @ found, factor * world.truth, rtol=1e-4, atol=1e-8)
    collision = rollouts.collision.double()
    s = grpo.gradient_size(rollouts.log_prob.double(), collision)
    left = chance @ (s.square() * rollouts.mask).sum(1)
    right = chance @ ((1 - collision) * rollouts.mask).sum(1)
    assert left.item() == pytest.approx(right.item(), rel=1e-5)


def credit_of(world):
    """(n, T): V after each token minus V before it."""
    credit = torch.zeros(world.rollouts.mask.shape, dtype=torch.double)
    for row, answer in enumerate(world.answers):
        for t in range(len(answer.ids)):
            credit[row, t] = world.value(0, answer.ids[:t + 1]) - world.value(0, answer.ids[:t])
    return credit


def z_score_factor(p, G, epsilon=1e-4):
    """The mean advantage of a right answer minus that of a wrong one, where K of the others are
    right. Without epsilon it is E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K))."""
    total = 0.0
    for K in range(G):
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G
        up = (1 - if_right) / (math.sqrt(if_right * (1 - if_right)) + epsilon)
        down = if_wrong / (math.sqrt(if_wrong * (1 - if_wrong)) + epsilon)
        total += chance * (up + down)
    return total


def test_what_the_format_is_worth_to_a_z_score():
    """The table of lab/reports/noise.md: mean z-scores over all groups."""
    page = (ROOT / "lab/reports/noise.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) ([\d.]+) ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 4
    for size, *numbers, worth in rows:
        of = mean_z_scores(int(size), list(map(float, numbers)), [0.0, 0.1, 1.1])
        assert (of[1] - of[0]) / (of[2] - of[1]) == pytest.approx(float(worth), abs=0.005)


def mean_z_scores(G, chances, rewards):
    """Of an answer with each of the rewards, whose G - 1 others have them with these chances."""
    total = torch.zeros(len(rewards)).double()
    for counts in itertools.product(range(G), repeat=len(rewards)):
        if sum(counts) != G - 1:
            continue
        ways = math.factorial(G - 1) / math.prod(map(math.factorial, counts))
        chance = ways * math.prod(p ** count for p, count in zip(chances, counts))
        for kind, reward in enumerate(rewards):
            group = [reward] + [r for r, count in zip(rewards, counts) for _ in range(count)]
            z = grpo.group_z_score(torch.tensor(group), torch.zeros(G, dtype=torch.long))
            total[kind] += chance * z[0]
    return total.tolist()


def test_the_command(capsys, monkeypatch):
    few = ("one turn, rewards 0 and 1", "two turns", "two turns, answers cut off")
    monkeypatch.setattr(exact, "WORLDS", {about: WORLDS[about] for about in few})
    overview.main(["exact", "grpo"])
    said = capsys.readouterr().out
    assert re.search(r"^one turn, rewards 0 and 1 +1.0000 +0.000 +1.00 +1.00$", said, re.M)
    assert "grpo is biased in 2 of 3 worlds" in said
    overview.main(["exact", "outcome_conditional", "--think_discount", "1.0"])
    assert "is right on average in all 3 worlds in which it runs" in capsys.readouterr().out
