"""The statistics of given, became and earned, by hand and against numpy; worlds that can be listed;
a small measurement."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import spoken
from engine.tokens import load_tokenizer
from research.probes import became
from research.probes.became import (by_token, by_type, cancelled, changes, jackknifed,
                                    rank_correlation, ratio, with_groups)


def test_a_share_and_its_jackknife():
    """Sums 1, 2, 3 of 2, 2, 6 by problem: 6 / 10; without one of them 5/8, 4/8, 3/4."""
    tokens = {"problem": np.array([0, 0, 1, 2])}
    found = jackknifed(tokens, [np.array([0.5, 0.5, 2, 3]), np.array([1.0, 1, 2, 6])], ratio)
    left = np.array([5 / 8, 4 / 8, 3 / 4])
    assert found.value == pytest.approx(0.6)
    error = np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert (found.high - found.low) / 2 == pytest.approx(4.303 * error, rel=1e-3)  # t of 2


def test_the_noise_of_the_credit_is_taken_out():
    """The change follows the credit exactly; each half of its measurement has as much noise as
    signal. Plainly correlated with their mean it would be 0.82."""
    rng = np.random.default_rng(0)
    true, *noise = rng.normal(size=(3, 40_000))
    c1, c2 = (true + one for one in noise)
    sums = [np.ones_like(true), true, true ** 2, c1, c2, c1 * c2, true * (c1 + c2) / 2]
    assert by_token(np.array([[value.sum()] for value in sums])) == pytest.approx(1, abs=0.03)
    assert np.corrcoef(true, (c1 + c2) / 2)[0, 1] == pytest.approx(np.sqrt(2 / 3), abs=0.02)
    assert by_type(np.array([true, c1, c2])) == pytest.approx(1, abs=0.03)
    assert by_type(np.array([-true, true, true])) == pytest.approx(-1)


def test_ranks():
    assert rank_correlation([1, 10, 100], [2, 3, 1000]) == pytest.approx(1)
    assert rank_correlation([3, 2, 1], [1, 2, 30]) == pytest.approx(-1)


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
    one, again = became.batch_of(*unit), became.batch_of(*unit)
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    known = one["advantage"] != 0
    assert (one["plain step"] != 0).any() and one["spent"] > 0
    assert not one["credit 1"][one["size"] < 1e-6].any() and known.any()
    tables = [became.kinds_table({3: [one]}), became.arms_table({3: [one]})]
    assert [len(table.rows) for table in tables] == [3, len(became.ARMS)]
    monkeypatch.setattr(became, "COMMON_TYPE", 1)
    types = became.types_table({3: [one]}, load_tokenizer(recorded))
    assert "rank correlation" in types.finding and len(types.rows) <= became.TYPES
    shares = {row["kind"]: row for row in tables[0].to_json()["rows"]}
    word = known & (one["kind"] == 0)
    given = np.abs(one["advantage"] * one["size"])
    assert shares["word"]["given"] == pytest.approx(given[word].sum() / given[known].sum())


def test_a_plain_step_has_its_length_and_the_model_is_put_back(policy):
    batch = with_groups(spoken(policy), 3)
    before = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    found = changes(policy, batch)
    after = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
    assert torch.equal(before, after) and set(became.ARMS) - set(found) == {"given"}
    assert not torch.equal(found["plain step"], found[became.POSITIVE])
