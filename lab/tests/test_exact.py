"""Worlds whose batches are all listed: their sums by plain loops, methods of which the answer is
known beforehand, anybody's functions, and the page that says what came out."""
import itertools
import json
import math
import re
from functools import cache, partial

import pytest
import torch
from conftest import ROOT
from small import LISTED, one_of

import grpo
from lab.__main__ import main as lab
from lab.credit import turns
from lab.engine.errors import UserError
from lab.engine.methods import ADVANTAGES, MITIGATIONS, method_of
from lab.exact import (ACCEPTED, BIASED, NOT_JUDGED, RIGHT, ROUNDED, WRONG_SIGN, Mean, about_length,
                       check, choice_of, compared, gradients, in_words, judge, summary)
from lab.foreign import as_choice
from lab.tests import known_methods as known, methods_table
from lab.worlds import LETTERS, WORLDS, World, worlds_of

EXAMPLES = ROOT / "examples/foreign_advantages.py"


# all but those with most batches
QUICK = [about for about in WORLDS if about not in ("groups of 4 and 2", "groups of 8 and 2")]


def in_some_worlds_or_all(count, methods):
    """One of so many in these, and every one in all worlds, as slow tests."""
    return [*((one, QUICK) for one in methods[::count]),
            *(pytest.param(one, (), marks=pytest.mark.slow) for one in methods)]


@cache
def worlds(**settings):
    """One of each kind."""
    return worlds_of(settings, 1)


def judged(choice, *kinds, **settings):
    chosen = [world for world in worlds(**settings) if world.about in (kinds or WORLDS)]
    return judge(choice, {}, chosen)


# ------------------------------------------------------------------- known beforehand


WORDS = {known.wrong_sign: WRONG_SIGN, known.fails_with_turns: NOT_JUDGED}


@pytest.mark.parametrize("broken, kinds", in_some_worlds_or_all(4, known.BROKEN))
def test_a_method_that_is_broken_on_purpose_is_seen(broken, kinds):
    assert judged(broken, *kinds).word == WORDS.get(broken, BIASED)


@pytest.mark.parametrize("unusual, kinds", in_some_worlds_or_all(3, known.RIGHT))
def test_an_unusual_method_that_is_right_is_called_right(unusual, kinds):
    assert judged(unusual, *kinds).word == RIGHT


def test_sentences_say_in_how_many_worlds_and_what_is_wrong_there():
    verdict = judged(known.fails_with_turns, *QUICK)
    assert "is right on average in 6 worlds. It fails in 3 of 9 worlds, first:" in verdict.why
    assert "IndexError: list index out of range (known_methods.py, line " in verdict.why
    verdict = judged(known.halves_what_comes_late, *QUICK)
    assert "in 2 of 9 worlds, most in: up to 10 tokens" in verdict.why
    # which of several tokens with an equal difference is named depends on rounding
    pushed, right = re.search(r"is pushed by (\S+), and (\S+) would be right", verdict.why).groups()
    assert 0 < float(pushed) / float(right) < 1


def test_what_draws_gives_nothing_or_is_not_finite_is_not_judged():
    def draws(rollouts):
        return torch.rand(rollouts.mask.shape, generator=rollouts.generator)

    where = "one turn, rewards below 0"
    random = judged(draws, where)
    assert random.word == NOT_JUDGED and "draws random numbers" in random.why
    class asks:
        def __init__(self, policy):
            pass

        def __call__(self, rollouts, policy):
            return policy.ask(rollouts.problems, 2, 0).log_prob

    asked = judged(asks, where)
    assert asked.word == NOT_JUDGED
    assert "it samples answers, whose mean is known here only" in asked.why
    nothing = judged(lambda rollouts: rollouts.log_prob * 0.0, where)
    assert nothing.word == NOT_JUDGED and "gives no gradient" in nothing.why
    infinite = judged(lambda rollouts: rollouts.log_prob / 0.0, where)
    assert infinite.word == NOT_JUDGED and "is -inf at token 0" in infinite.why


@pytest.mark.parametrize("settings, word", one_of(2, [
    ({"loss_norm": "token"}, BIASED), ({"loss_norm": "sequence"}, BIASED),
    ({"drop_unfinished": True}, BIASED)]))
def test_flags_of_the_loss_are_judged(settings, word):
    where = "one turn, rewards below 0", "up to 10 tokens, or cut off"
    assert judged(method_of("rloo"), *where, **settings).word == word


def only_the_end_is_paid(method, problems, *given, pays_turns, after=turns.without_luck.after):
    found = [after(method, [problem], *given, pays_turns=pays_turns) for problem in problems]
    return sum(paid for paid, goes_on in found if not goes_on), sum(on for _, on in found)


@pytest.mark.parametrize("replaced, by, where", [
    (turns.Worth, ("for_others", turns.Worth.at), "two turns with luck"),
    (turns.without_luck, ("after", only_the_end_is_paid), "three turns, each is paid"),
    (turns, ("tokens_in", lambda reply, policy: 0), "turns cut off, groups of 3 and 2")])
def test_without_luck_with_a_mistake_is_biased(monkeypatch, replaced, by, where):
    """With what other answers to the same problem earn, which know its secret; with redrawn
    problems that pay only where they end; and with all replies going on, whether they fit or not.
    Without the mistake it is right."""
    assert judged(turns.without_luck, where).word == RIGHT
    monkeypatch.setattr(replaced, *by)
    found = judged(turns.without_luck, where)
    assert found.word == BIASED and found.means[0].bias > 0.001


# ------------------------------------------------------------------- anybody's functions


@pytest.mark.parametrize("name, told, word", [
    ("verl_grpo", "a function of verl, by its parameter token", BIASED),
    ("trl_grpo", "a function of TRL, by its parameter num", BIASED),
    ("leave_one_out", "f(rewards: rewards (B,), group: group (B,)).", RIGHT)])
def test_functions_of_two_trainers_and_of_ones_own_as_they_are_typed(name, told, word):
    kinds = ("one turn, rewards below 0", "three turns, each is paid",
             "turns cut off, groups of 3 and 2")
    found = judged(choice_of(f"{EXAMPLES}:{name}"), *kinds)
    assert found.word == word and f"It was called as {told}" in found.why


@pytest.mark.parametrize("about", ["two turns with luck", "groups of 4 and 2"])
def test_functions_of_trainers_give_what_the_lab_gives(about):
    """verl's and TRL's std divides by n - 1."""
    [world] = [one for one in worlds() if one.about == about]
    for groups in list(world.batches())[::9]:
        batch = world.batch(groups)
        size = batch.group.bincount()[batch.group][:, None]
        ours = {name: choice_of(f"{EXAMPLES}:{name}")(batch) * batch.mask for name in (
            "verl_grpo", "trl_grpo", "leave_one_out")}
        z_scores = grpo.grpo(batch) * ((size - 1) / size).sqrt()
        torch.testing.assert_close(ours["verl_grpo"], z_scores, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(ours["trl_grpo"], z_scores, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(ours["leave_one_out"], grpo.rloo(batch))


MINE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
@dataclass
class Inputs:
    rewards: torch.Tensor
def spoils(rewards, mask, group):
    rewards -= 1
    mask[:] = True
    return rewards.numpy() + 0
def fails(rewards, mask, group):
    return rewards[99]
def of_wrong_shape(rewards, mask, group):
    return rewards[:1]
def leaves(rewards, mask, group):
    exit()
def by_number(prompt_ids, rewards, mask):
    return rewards - torch.stack([rewards[prompt_ids == one].min() for one in prompt_ids])
def of_one(rewards):
    return rewards
def discounted(rewards, action_mask, gamma=1.0):
    return rewards
def nothing(rewards, mask, group):
    pass
def number(rewards, mask, group):
    return 1.0
def by_uid(rewards, uid, response_mask, epsilon=1e-6):
    means = {one: rewards[uid == one].mean() for one in uid}
    return torch.stack([r - means[one] for r, one in zip(rewards, uid)])[:, None] * response_mask
def with_config(token_level_rewards, response_mask, index, config=None):
    assert config.gamma == 1 and config.get("norm_adv_by_std_in_grpo")
    return token_level_rewards.sum(1, keepdim=True) * response_mask, None
def gae(token_level_rewards, values, response_mask, gamma):
    return token_level_rewards
def of_batch(rollouts):
    return rollouts.reward
"""


@pytest.mark.parametrize("name, word", [
    ("by_uid", RIGHT), ("by_number", BIASED), ("with_config", RIGHT), ("of_batch", RIGHT)])
def test_functions_are_called_by_the_names_of_their_parameters(tmp_path, name, word):
    (tmp_path / "mine.py").write_text(MINE)
    found = judged(choice_of(f"{tmp_path / 'mine.py'}:{name}"), "one turn, rewards below 0")
    assert found.word == word, found.why


def test_a_function_with_settings_can_be_checked():
    def scaled(rewards, group, power):
        mean = torch.stack([rewards[group == one].mean() for one in group])
        return (rewards - mean) * torch.exp(power * rewards)

    where, found = "one turn, rewards below 0", {}
    for power in (0.0, 1.0):
        found[power] = judged(as_choice(partial(scaled, power=power)), where)
    assert (found[0.0].word, found[1.0].word) == (RIGHT, BIASED)


def test_a_foreign_function_cannot_change_a_world_and_its_errors_name_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    where, mine = "one turn, rewards below 0", f"{tmp_path / 'mine.py'}:"
    assert judged(choice_of(f"{mine}spoils"), where).word == RIGHT
    assert judged(grpo.rloo, where).word == RIGHT
    for name, why in (("fails", "(mine.py, line 13)"), ("leaves", "it calls sys.exit or os._exit"),
                      ("of_wrong_shape", "it returned the shape (1,), for a mask of the shape"),
                      ("nothing", "it returned nothing, and not an advantage for each answer"),
                      ("number", "it returned a float, and not an advantage for each answer"),
                      ("gae", "missing 2 required positional arguments: 'values' and 'gamma'")):
        found = judged(choice_of(mine + name), where)
        assert found.word == NOT_JUDGED and why in found.why
        assert "Other forms stand in examples/foreign_advantages.py" in found.why
    for name, error in (("of_one", "of_one has no parameter group .B,.. It gives rewards, mask"),
                        ("discounted", "but gamma, which exact does not know"),
                        ("missing", "has no function missing, as .*:NAME, but spoils, fails,"),
                        ("", "has no function behind its colon, as .*mine.py:NAME, but spoils")):
        with pytest.raises(UserError, match=error):
            choice_of(mine + name)
    with pytest.raises(UserError, match="there is no Python file none.py"):
        choice_of("none.py:one")
    with pytest.raises(UserError, match="as .*mine.py:NAME, but spoils"):
        choice_of(mine.removesuffix(":"))


def test_rounding_is_no_bias_and_a_counter_is_memory():
    calls = itertools.count()

    def rounded(rewards, mask, group):
        short = rewards.bfloat16()
        return short - torch.stack([short[group == one].mean() for one in group])

    def warms_up(rewards, mask, group):
        return rewards * (next(calls) > 100)

    def late(rewards, mask, group):
        return rewards * (next(calls) > 700)

    where = "one turn, rewards below 0", "groups of 1 and 3", "2 to 61 tokens"
    assert judged(as_choice(rounded), *where).word == ROUNDED
    for counts in (warms_up, late):
        found = judged(as_choice(counts), *where)
        assert found.word == NOT_JUDGED and "remembers" in found.why


def test_what_lies_beyond_a_reward_of_2_or_three_groups_is_seen():
    def clamped(rewards, mask, group):
        return rewards.clamp(max=2) - 0.1

    def turned(rewards, mask, group):
        return rewards * (-1 if int(group.max()) > 2 else 1)

    def alone(rewards, mask, group):
        others = torch.stack([(rewards[group == one].sum() - r) / ((group == one).sum() - 1)
                              for r, one in zip(rewards, group)])
        return rewards - others

    assert judged(as_choice(clamped), "rewards from -3 to 6").word == BIASED
    assert judged(as_choice(turned), "four groups").word == WRONG_SIGN
    assert judged(as_choice(alone), "groups of 1 and 3").word == NOT_JUDGED
    assert "rewards -3 to 6, groups of 2 to 2, up to 2" in judged(
        method_of("rloo"), "rewards from -3 to 6").why


# ------------------------------------------------------------------- the sums


@pytest.mark.parametrize("about", ["groups of 4 and 2", "turns cut off, groups of 3 and 2"])
def test_mean_and_noise_are_those_of_plain_loops(about):
    """Over all problems and all answers, each drawn by itself, in every order. The gradient is
    onehot - p at each token of an answer, times its z-score."""
    [world] = [one for one in worlds() if one.about == about]
    p, rewards = world.logits.detach().softmax(1), world.rollouts.reward.tolist()
    score = []
    for problem, ids, drawn, _ in world.answers:
        at_logits = torch.zeros_like(p)
        for t in itertools.compress(range(len(ids)), drawn):
            row = world.beginnings[world.task.prompt_for(problem), ids[:t]]
            at_logits[row] -= p[row]
            at_logits[row, ids[t]] += 1
        score.append(at_logits.flatten())
    of_problem = [[row for row, answer in enumerate(world.answers) if answer.problem == problem]
                  for problem in range(world.kind.problems)]
    sizes = world.kind.sizes
    pairs = [*itertools.product(range(world.kind.problems), repeat=2)]
    first = second = 0.0
    for pair in pairs:
        ways = [itertools.product(of_problem[problem], repeat=size)
                for problem, size in zip(pair, sizes)]
        for groups in itertools.product(*ways):
            chance = math.prod(float(world.chance[row].detach()) for rows in groups
                               for row in rows) / len(pairs)
            found = torch.zeros_like(score[0])
            for rows in groups:
                earned = torch.tensor([rewards[row] for row in rows])
                z = grpo.group_z_score(earned, torch.zeros(len(rows), dtype=torch.long)).tolist()
                found += sum(a * score[row] for a, row in zip(z, rows)) / sum(sizes)
            first, second = first + chance * found, second + chance * found.square().sum()
    batches = world.batches()
    mine, chance = gradients(world, grpo.grpo, {}, batches), torch.tensor([*batches.values()])
    torch.testing.assert_close(chance.double() @ mine, first, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(chance.double() @ mine.square().sum(1), second, rtol=1e-5, atol=0)


def test_the_truth_is_the_sum_of_probability_times_reward_times_score():
    for world in worlds():
        p, truth = world.logits.detach().softmax(1), torch.zeros_like(world.logits).detach()
        for n, (problem, ids, drawn, _) in enumerate(world.answers):
            worth = float(world.chance[n].detach() * world.rollouts.reward[n])
            for t in itertools.compress(range(len(ids)), drawn):
                row = world.beginnings[world.task.prompt_for(problem), ids[:t]]
                truth[row] -= worth / world.kind.problems * p[row]
                truth[row, ids[t]] += worth / world.kind.problems
        torch.testing.assert_close(world.truth, truth.flatten())
        assert world.chance.sum().item() == pytest.approx(world.kind.problems)
        for orders in itertools.product((False, True), repeat=2):
            assert math.fsum(world.batches(*orders).values()) == pytest.approx(1)


def test_answers_are_those_of_the_environment():
    """The reply to each turn stands there, and nothing follows where it ends the answer."""
    for world in worlds():
        if environment := world.policy.environment:
            for problem, ids, drawn, finished in world.answers:
                whole, own, ends = environment.completed(problem, ids)
                assert tuple(own[:len(ids)]) == tuple(map(bool, drawn)) and ends == finished
                assert finished or len(ids) == world.kind.limit
        assert len(set(world.answers)) == len(world.answers)


def test_a_value_by_hand():
    [world] = [one for one in worlds() if one.about == "one turn, rewards below 0"]
    own = [row for row, answer in enumerate(world.answers) if answer.problem == 1]
    chance, reward = world.chance.detach(), world.rollouts.reward.double()
    assert world.value(1, ()) == pytest.approx(float(chance[own] @ reward[own]))
    x = LETTERS.index("x")
    begins = [row for row in own if world.answers[row].ids[0] == x]
    assert len(begins) == 2 and world.value(1, (), without=x) == pytest.approx(
        float(reward[[row for row in own if row not in begins][0]]))
    expected = chance[begins] @ reward[begins] / chance[begins].sum()
    assert world.value(1, (x,)) == pytest.approx(float(expected))


def test_cosine_bias_and_noise_by_hand():
    """Two batches (3, 8) and (3, 0) beside (2, 0): the mean is (3, 4), of which 3 is along it."""
    [world] = [one for one in worlds() if one.about == "one turn, rewards below 0"]
    truth = torch.zeros_like(world.truth)
    found = torch.stack([truth, truth])
    truth[0], found[:, 0], found[0, 1] = 2.0, 3.0, 8.0
    plain = World(world.about)
    plain.truth = truth
    mean = compared(plain, {"a": 0.5, "b": 0.5}, found)
    assert mean[1:6] == pytest.approx((3 / 5, 4 / 5, 3 / 2, 16 / 9, 2))
    assert mean.difference.startswith("x at the start is pushed by +2.6667, and +0.0000 would")


def test_a_summary_has_the_worst():
    means = [Mean("a", 1.0, 0.0, 0.5, 2.0, 7, ""), Mean("a", 0.9, 0.4, 1.5, 1.0, 7, ""),
             Mean("b", 0.95, 0.3, 1.0, 9.0, 1, "")]
    assert summary(means) == {"cosine": 0.9, "bias": 0.4, "length": 0.5, "noise": 2.0,
                              "noise_most": 9.0, "worlds": 3, "batches": 15}


def test_which_word_is_said():
    """The sign is wrong where all that is wrong points against the truth."""
    right, half = Mean("a", 1.0, 0.0, 1.0, 1, 1, ""), Mean("b", 1.0, 0.0, 0.5, 1, 1, "")
    near, against = Mean("c", 0.995, 0.1, 0.5, 1, 1, ""), Mean("d", -0.5, 0.9, -0.2, 1, 1, "")
    for means, at_least, word, said in (
            ([right, half], None, RIGHT, "its mean is 0.50 to 1.00 times as long."),
            ([right, right], None, RIGHT, "in 2 worlds."),
            ([right, near], None, BIASED, "is biased in 1 of 2 worlds, most in: c."),
            ([right, near], 0.99, ACCEPTED, "with a cosine of at least 0.995000. Along"),
            ([right, near], 0.996, BIASED, "More answers do not mend that. Along"),
            ([right, against], None, WRONG_SIGN, "wrong sign in 1 of 2 worlds, most in: d."),
            ([near, against], 0.9, BIASED, "In 1 worlds its mean gradient points against")):
        found, why = in_words("mine", means, False, at_least)
        assert found == word and said in why
    assert in_words("mine", [near], True, 0.9)[0] == NOT_JUDGED
    assert about_length([half, half]).endswith("its mean is 0.50 times as long.")


# ------------------------------------------------------------------- the command


def test_the_command(capsys, monkeypatch):
    few = ("one turn, rewards below 0", "two turns with luck")
    monkeypatch.setattr("lab.worlds.WORLDS", {about: WORLDS[about] for about in few})
    lab(["exact", "rloo", "--seeds", "1"])
    said = capsys.readouterr().out
    assert "RIGHT: rloo is right on average in 2 worlds." in said
    assert said.splitlines()[1].startswith("one turn, rewards below 0            1.0000  0.00000")
    with pytest.raises(SystemExit) as stopped:
        lab(["exact", "rloo", "inverse_logprob", "--epsilon", "0.5", "--seeds", "1",
             "--json"])
    right, biased = json.loads(capsys.readouterr().out)
    assert [one["world"] for one in right["each_world"]] == [*few]
    assert stopped.value.code == 1 and (right["word"], biased["word"]) == (RIGHT, BIASED)
    assert right["worlds"] == 2 and biased["cosine"] < 0.999 and "biased in" in biased["why"]
    with pytest.raises(SystemExit) as stopped:
        lab(["exact", "random", "--seeds", "1"])
    assert stopped.value.code == 2 and "draws random numbers" in capsys.readouterr().out
    lab(["exact", "rloo", "inverse_logprob", "--seeds", "1", "--at-least", "0.2"])
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("rloo  ") and said[2].endswith("  biased, but accepted")
    check(grpo.rloo, seeds=1)
    check("inverse_logprob", at_least=0.2, seeds=1)
    with pytest.raises(AssertionError, match="biased: inverse_logprob is biased in"):
        check("inverse_logprob", seeds=1, epsilon=0.5)
    with pytest.raises(UserError, match="--epsilon"):
        lab(["exact", "rloo", "--epsilon", "1"])
    with pytest.raises(UserError, match="the names of methods, or --all"):
        lab(["exact"])


FEW = ("one turn, rewards below 0", "rewards from -3 to 6")
BASELINE = """
import torch
def mine(rewards, mask, group):
    return rewards - torch.stack([rewards[group == one].mean() for one in group])
"""


def test_a_baseline_tells_what_became_worse_and_in_which_world(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lab.worlds.WORLDS", {about: WORLDS[about] for about in FEW})
    file, stored = tmp_path / "mine.py", tmp_path / "exact.json"
    exact = ["exact", f"{file}:mine", "--seeds", "1"]
    file.write_text(BASELINE)
    lab([*exact, "--write", str(stored)])
    lab([*exact, "--baseline", str(stored)])
    assert capsys.readouterr().out.endswith("No change since the baseline.\n")
    file.write_text(BASELINE.replace("return rewards", "return 2 * rewards"))
    lab([*exact, "--baseline", str(stored)])
    assert "the length was 0.5000, and is 1.5000" in capsys.readouterr().out
    for old, new, said in (
            ("return rewards", "return rewards[9]", "(mine.py, line 4)"),  # it fails everywhere
            ("return rewards", "return rewards.clamp(max=2)", "to 6. In 1 of 2 worlds"),
            ("- torch", "- 0 * torch", "the noise was")):
        file.write_text(BASELINE.replace(old, new))
        with pytest.raises(SystemExit) as stopped:
            lab([*exact, "--baseline", str(stored)])
        assert stopped.value.code == 1 + ("line" in said) and said in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        lab([*exact[:-1], "2", "--baseline", str(stored)])
    assert stopped.value.code == 2
    assert "of 2 worlds of the baseline 2 were judged now" in capsys.readouterr().out
    stored.write_text("[1]")
    with pytest.raises(UserError, match="is no file of lab exact --write"):
        lab([*exact, "--baseline", str(stored)])


# ------------------------------------------------------------------- the page


def test_the_table_of_methods_has_the_stored_numbers():
    page = methods_table.PAGE.read_text("utf-8")
    assert methods_table.with_cells(page) == page
    rows = {name: [cell.strip() for cell in cells.split("|")[:-1]]
            for name, _, cells in methods_table.ROW.findall(page)}
    assert rows.keys() >= {*ADVANTAGES, *MITIGATIONS} & LISTED and len(rows) > 30
    # as the board of the tiny model printed them
    assert rows["rloo"][2:] == ["1.1", "-0.1 (-0.6 to +0.4), 12", "", ""]
    assert rows["entropy_ratio"][3:] == ["**-2.2 (-3.0 to -1.3)**, 6", "", ""]
    # stopped after six seeds, and behind on the real model alone
    assert rows["inverse_logprob"][3:] == [
        "-2.7 (-4.4 to -1.1), 6", "**-22.6 (-27.7 to -17.5)**, 8", "-0.2 (-3.3 to +2.8), 6"]
    assert rows["turn_credit"][3] == "**+31.8 (+27.1 to +36.6)**, 8, in a game"
    assert methods_table.exact_cells({"word": "biased", "cosine": 0.9984, "noise": None}) == (
        ">0.99", "")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("grpo", "outcome_conditional") else [pytest.mark.slow])
    for name in (*ADVANTAGES, *MITIGATIONS) if name in LISTED])
def test_a_method_has_the_word_of_the_stored_output(name):
    """A biased one may look right in these fewer worlds."""
    stored = {one["method"]: one["word"] for one in json.loads(
        (ROOT / "lab/results/exact_all.json").read_text())}
    found = judged(method_of(name), *QUICK).word
    assert found in {stored[name], RIGHT if stored[name] == BIASED else ""}
