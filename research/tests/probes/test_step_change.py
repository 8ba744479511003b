"""The statistics of push, change and credit, by hand and against numpy; tasks that can be listed; a
small measurement."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.tokens import TokenTable, table_of_frames
from conftest import spoken, write_log
from engine.errors import UserError
from engine.tokens import load_tokenizer
from research.__main__ import main
from research.probes import change_batches, change_tables
from research.probes.change_batches import (BETTER_ONLY, PLAIN_STEP, PUSH, MeasuredBatch, changes,
                                            with_groups)
from research.probes.change_tables import (correlation_by_item, correlation_by_token, items_of,
                                           largest_credit_first)
from research.probes.change_synthetic import cancelled
from research.probes.common import rank_correlation


def test_the_noise_of_the_credit_is_taken_out():
    """The change follows the credit exactly; each half of its measurement has as much noise as
    signal. Plainly correlated with their mean it would be 0.82."""
    rng = np.random.default_rng(0)
    true, *noise = rng.normal(size=(3, 40_000))
    c1, c2 = (true + one for one in noise)
    sums = [np.ones_like(true), true, true ** 2, c1, c2, c1 * c2, true * (c1 + c2) / 2]
    by_token = correlation_by_token(np.array([[value.sum()] for value in sums]))
    assert by_token == pytest.approx(1, abs=0.03)
    assert np.corrcoef(true, (c1 + c2) / 2)[0, 1] == pytest.approx(np.sqrt(2 / 3), abs=0.02)
    assert correlation_by_item(np.array([true, c1, c2])) == pytest.approx(1, abs=0.03)
    assert correlation_by_item(np.array([-true, true, true])) == pytest.approx(-1)


def test_ranks():
    assert rank_correlation([1, 10, 100], [2, 3, 1000]) == pytest.approx(1)
    assert rank_correlation([3, 2, 1], [1, 2, 30]) == pytest.approx(-1)


def test_vocabulary_items_by_hand():
    """Item 5 has two tokens of credit 2, by the mean of the halves, item 7 one of -5. The sum of
    the sizes is 9. The larger is first, though it goes down; it has too few tokens for two."""
    tokens = TokenTable({
        "problem": np.zeros(3, int), "token_id": np.array([5, 5, 7]),
        "push": np.array([1.0, 1.0, -2.0]), "change": np.array([1.0, -2.0, 0.0]),
        "credit 1": np.array([1.0, 3.0, 0.0]), "credit 2": np.array([3.0, 1.0, -10.0])})
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"item {ids[0]}")
    texts, numbers = items_of(tokens, tokenizer)
    assert texts == ["'item 5'", "'item 7'"] and numbers["count"].tolist() == [2, 1]
    assert numbers["push"] == pytest.approx([2 / 4, -2 / 4])
    assert numbers["change"] == pytest.approx([-1 / 3, 0])
    assert numbers["credit"] == pytest.approx([4 / 9, -5 / 9])
    assert largest_credit_first(numbers).tolist() == [1, 0]
    assert largest_credit_first(numbers, fewest=2).tolist() == [0]


def test_equal_values_share_their_rank():
    """Ranks 1/2, 1/2, 2, 3 and 0, 1, 2, 3: products of deviations sum to 4.5, squares to 4.5 and 5,
    whichever of the equal values comes first."""
    for two in ([1, 2, 3, 4], [2, 1, 3, 4]):
        assert rank_correlation([0, 0, 7, 9], two) == pytest.approx((4.5 / 5) ** 0.5)


def test_where_all_decides_and_there_is_one_place():
    """One token, four symbols: equal tokens have equal rewards, nothing cancels, and what becomes
    is as the credit says. A second token, which decides nothing, has rewards of both signs."""
    share, exact, plain, true = cancelled("1/1", SimpleNamespace(seed=3, batches=8))
    assert share == pytest.approx(0, abs=1e-6) and min(exact, plain, true) > 0.8
    share, exact, *_ = cancelled("2/1", SimpleNamespace(seed=3, batches=8))
    assert 0.2 < share < 0.7 and exact > 0.9


def test_groups_are_compared_among_themselves(policy):
    """Six answers in threes and in pairs: the z-scores of each are 0 on average."""
    batch = spoken(policy)
    for size in (2, 3):
        of_group = with_groups(batch, size).advantage[:, 0].view(-1, size)
        assert of_group.sum(1).abs().max() < 1e-5


@pytest.mark.numerics
def test_a_small_measurement(recorded, tmp_path, monkeypatch):
    """Of step 3 of a run, which the checkpoint of step 2 sampled; what was measured is kept."""
    flags = dict(runs=str(recorded), steps="3", questions=2, answers=4, new_tokens=24, measured=2,
                 continuations=2, kept=str(tmp_path / "kept"), processes=1, batches=0, threads=1,
                 seed=0)
    unit = recorded, 3, flags
    one = change_batches.load_or_measure_batch(*unit)
    again = change_batches.load_or_measure_batch(*unit)
    tokens = one.tokens
    for name, values in tokens.columns.items():
        assert np.array_equal(values, again.tokens[name], equal_nan=True)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    known = tokens["push"] != 0
    assert (tokens[PLAIN_STEP] != 0).any() and one.spent == again.spent > 0
    assert tokens["credit 1"].any() and known.any()
    tables = [change_tables.kinds_table({3: [one]}), change_tables.fell_and_rose_table({3: [one]})]
    assert [len(table.rows) for table in tables] == [3, len(change_tables.PUSH_AND_CHANGES)]
    monkeypatch.setattr(change_tables, "COMMON_ITEM", 1)
    items = change_tables.items_table({3: [one]}, load_tokenizer(recorded))
    assert "rank correlation" in items.finding and len(items.rows) <= change_tables.MOST_ITEMS
    shares = {row["kind"]: row for row in tables[0].to_json()["rows"]}
    word = known & (tokens["kind"] == 0)
    push = np.abs(tokens["push"])
    assert shares["word"]["push"]["value"] == pytest.approx(push[word].sum() / push[known].sum())
    sums = change_tables.sums_of_kinds({3: [one]})["3"]["push"]  # from which anybody can compute it
    assert shares["word"]["push"]["value"] == pytest.approx(sum(sums["word"]) / sum(sums["all"]))
    without_push = replace(one, tokens=tokens.having({"push": np.zeros(len(tokens))}))
    with pytest.raises(UserError, match="at step 3 no measured token has a push"):
        change_tables.kinds_table({3: [without_push]})


@pytest.mark.parametrize("steps, sentence", [
    ("1,x", "--steps 'x' should be a whole number$"), ("0", "--steps 0 should be at least 1"),
    ("1,9", "has no checkpoint of step 8, whose model sampled step 9; it has ")])
def test_a_wrong_step_is_told_before_anything_is_measured(recorded, monkeypatch, tmp_path, steps,
                                                          sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("research.probes.change.ProcessPoolExecutor", None)
    with pytest.raises(UserError, match=sentence):
        main(["change", "--runs", str(recorded), "--steps", steps, "--batches", "0"])


def test_another_run_with_the_same_name_is_measured_again(tmp_path, monkeypatch):
    """What is kept is told apart by the run's settings, not by its folder's name alone."""
    tokens = table_of_frames(torch.tensor([[True]]), torch.tensor([0]), {})
    measured = []

    def measure(run, step, flags):
        measured.append(run)
        return MeasuredBatch(tokens, spent=len(measured))

    monkeypatch.setattr(change_batches, "measure_batch", measure)
    flags = dict.fromkeys(change_batches.SIZES_IN_NAME, 1) | {"kept": str(tmp_path / "kept")}
    spent = []
    one = write_log(tmp_path / "a/run", {}, {"seed": 0})
    other = write_log(tmp_path / "b/run", {}, {"seed": 1})
    for run in (one, other, one):
        spent.append(change_batches.load_or_measure_batch(run, 1, flags).spent)
    assert spent == [1, 2, 1]


def test_a_plain_step_has_its_length_and_the_model_is_put_back(policy):
    batch = with_groups(spoken(policy), 3)
    before = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    found = changes(policy, batch)
    after = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert torch.equal(before, after) and set(change_tables.PUSH_AND_CHANGES) - set(found) == {PUSH}
    assert not torch.equal(found[PLAIN_STEP], found[BETTER_ONLY])
