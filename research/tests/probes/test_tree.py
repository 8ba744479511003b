"""The tree of answers: by hand, and against an enumeration of every answer by plain forwards."""
import itertools
import math

import pytest
import torch

from conftest import copied, hand_made, refusal
from engine.fused import FusedQwen2
from research.probes import tree
from research.probes.decided import decided_table
from research.probes.listed import listed_tokens
from research.probes.listed_tables import WHERE, MeasuredModel, listed_table
from research.probes.tree import listed_rollouts, walk, with_prefix_values

A, B, C, D = 1, 2, 3, 4
PROMPT, ENDS, MOST, LEAST = [5, 6, 7], (2, 4, 9, 17, 30, 31, 33), 3, 2e-4


def by_hand():
    """The tree in the docstring of tree.py: a b is right, a c and d are wrong. a is a word, b and c
    are spaces, d is a number."""
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    p = torch.tensor([[0.5, 0.6], [0.5, 0.2], [0.4, 1.0]], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0, 0.0])
    return with_prefix_values(hand_made(
        mask, ids=torch.tensor([[A, B], [A, C], [D, 0]]), log_prob=p.log() * mask,
        kind=torch.tensor([[0, 1], [0, 1], [2, 0]], dtype=torch.uint8),
        scores={"reward": reward, "answer": reward}))


def test_the_tree_of_the_docstring():
    listing = by_hand()
    assert listing.probability == pytest.approx([0.3, 0.1, 0.4])
    assert listing.listed == pytest.approx([0.8]) and listing.share == pytest.approx([3/8, 1/8, .5])
    assert listing.value == pytest.approx({
        (0, ()): 3/8, (0, (A,)): 3/4, (0, (A, B)): 1, (0, (A, C)): 0, (0, (D,)): 0})
    assert listing.bounds[0, ()] == pytest.approx((0.3, 0.5))
    assert listing.bounds[0, (A,)] == pytest.approx((0.6, 0.8))
    assert listing.bounds[0, (A, B)] == pytest.approx((1, 1))
    expected = torch.tensor([[3/8, 1/4], [3/8, -3/4], [-3/8, 0]], dtype=torch.float64)
    torch.testing.assert_close(listing.credit(listing.rollouts), expected)
    assert listing.variance == pytest.approx([15 / 64])


def test_what_is_decided_sums_to_the_variance_and_each_answer_counts_by_its_probability():
    """Squared credits in expectation: 9/64 at half of the answers' first token a, 3/8 of 1/16 and
    1/8 of 9/16 behind it, 9/64 at the other half's d; 15/64 in all."""
    tokens = listed_tokens(by_hand(), answers=2)
    assert tokens.sums_by_problem(tokens["squared credit"]) == pytest.approx([15 / 64])
    table = decided_table(tokens, "kind")
    shares = {row[0]: (row[2], row[3].value) for row in table.rows}
    assert shares["word"] == pytest.approx((0.5 / 1.5, 4.5 / 15))
    assert shares["space"] == pytest.approx((0.5 / 1.5, (1.5 + 4.5) / 15))
    assert shares["number"] == pytest.approx((0.5 / 1.5, 4.5 / 15))
    by_place = decided_table(tokens, "index", WHERE).rows
    assert [row[0] for row in by_place] == ["1st", "2nd"]
    assert [row[3].value for row in by_place] == pytest.approx([9 / 15, 6 / 15])


def test_how_much_is_listed_by_hand():
    """The bounds of V at the prompt and at a are 0.2 apart, those at the answers' ends 0."""
    listing = by_hand()
    one = MeasuredModel(listing, listed_tokens(listing, answers=2), sampled=None, known=1.0)
    [row] = listed_table({"x": one}).rows
    assert row[:3] == ("x", 1, 3) and row[3:6] == pytest.approx((0.8, 0.8, 3/8))
    assert row[6] == pytest.approx((0.3, 0.5)) and row[7] == pytest.approx(0.2)


def test_the_credit_of_an_answer_that_is_not_listed_is_known_as_far_as_its_prefixes_are():
    batch = hand_made(torch.tensor([[True, True, True]]), ids=torch.tensor([[A, D, B]]))
    credit = by_hand().credit(batch)[0].tolist()
    assert credit[0] == pytest.approx(3/8) and all(map(math.isnan, credit[1:]))


def test_a_reward_beyond_1_widens_the_bounds():
    listing = by_hand()
    for scale, shift in ((3, 0), (1, -1)):
        scores = {"reward": scale * listing.rollouts.reward + shift}
        rollouts = hand_made(listing.rollouts.mask, ids=listing.rollouts.ids, scores=scores,
                             log_prob=listing.rollouts.log_prob)
        low, high = with_prefix_values(rollouts).bounds[0, ()]
        worst, best = min(0, shift), max(1, scale + shift)
        known = 0.3 * (scale + shift) + 0.5 * shift
        assert (low, high) == pytest.approx((known + 0.2 * worst, known + 0.2 * best))


@pytest.fixture(scope="module")
def sharp_model(small_model):
    """Surer of its tokens, so that few answers have most of the probability."""
    model = copied(small_model)
    with torch.no_grad():
        model.model.norm.weight *= 3
    return model


@pytest.fixture(scope="module")
def every_answer(sharp_model):
    """Every answer of at most three tokens with its probability, from whole forward passes; and the
    log-prob of each of its tokens."""
    answers, prefixes = {}, {(): ()}
    for length in range(1, MOST + 1):
        with torch.no_grad():
            logits = sharp_model(torch.tensor([PROMPT + list(ids) for ids in prefixes]))[:, -1]
        longer = {}
        for (ids, so_far), row in zip(prefixes.items(), logits.double().log_softmax(-1).tolist()):
            for token, log_prob in enumerate(row):
                is_answer = token in ENDS or length == MOST
                (answers if is_answer else longer)[*ids, token] = (*so_far, log_prob)
        prefixes = longer
    return answers


@pytest.mark.numerics
def test_the_walk_finds_what_a_plain_enumeration_finds(sharp_model, every_answer):
    found = {path.ids: path for path in
             walk(FusedQwen2(sharp_model, 16), PROMPT, ENDS, MOST, LEAST)}
    expected = {ids: log_prob for ids, log_prob in every_answer.items()
                if math.exp(sum(log_prob)) >= LEAST}
    assert found.keys() == expected.keys() and 20 < len(found) < len(every_answer) / 20
    assert {len(ids) for ids in found} == {2, 3}
    for ids, path in found.items():
        assert path.log_prob == pytest.approx(expected[ids], abs=1e-4)
    ids = max(found, key=lambda ids: (len(ids), found[ids].log_prob))
    with torch.no_grad():
        p = sharp_model(torch.tensor([PROMPT + list(ids[:-1])]))[0, -1].softmax(-1)
    assert found[ids].collision[-1] == pytest.approx(float(p.square().sum()), rel=1e-3)


@pytest.mark.numerics
def test_the_bounds_hold_what_is_true(sharp_model, every_answer):
    """Against V over every answer; whether the sum of its tokens is odd decides its reward."""
    def reward_of(ids):
        return float(sum(ids) % 2)

    paths = walk(FusedQwen2(sharp_model, 16), PROMPT, ENDS, MOST, LEAST)
    rollouts = listed_rollouts([None], [PROMPT], [paths], ENDS)
    reward = torch.tensor([reward_of(path.ids) for path in paths])
    listing = with_prefix_values(hand_made(
        rollouts.mask, ids=rollouts.ids, log_prob=rollouts.log_prob, scores={"reward": reward}))
    earned, reached = {}, {}
    for ids, log_prob in every_answer.items():
        p = math.exp(sum(log_prob))
        for prefix in itertools.accumulate(ids, lambda so_far, token: (*so_far, token), initial=()):
            earned[prefix] = earned.get(prefix, 0) + p * reward_of(ids)
            reached[prefix] = reached.get(prefix, 0) + p
    assert reached[()] == pytest.approx(1, abs=1e-6)
    widths = []
    for (_, prefix), (low, high) in listing.bounds.items():
        V = earned[prefix] / reached[prefix]
        assert low - 1e-4 <= V <= high + 1e-4
        widths.append(high - low)
    assert max(widths) > 0.1
    assert listing.bounds[0, ()][1] - listing.bounds[0, ()][0] == pytest.approx(
        1 - listing.listed[0], abs=1e-6)


def test_answers_with_too_many_paths_are_refused(sharp_model):
    said = refusal(walk, FusedQwen2(sharp_model, 16), PROMPT, (), MOST, 0.3)
    assert "too many paths" in said and "0.3" in said


def test_rows_beyond_one_block_of_logits(sharp_model, monkeypatch):
    model = FusedQwen2(sharp_model, 16)
    whole = walk(model, PROMPT, ENDS, MOST, LEAST)
    monkeypatch.setattr(tree, "ROWS", 3)
    parts = walk(model, PROMPT, ENDS, MOST, LEAST)
    assert [path.ids for path in parts] == [path.ids for path in whole]
