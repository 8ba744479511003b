"""The rows of a card by hand."""

import numpy as np
import pytest

from lab.probes.card_rows import along_plain, in_planted_tasks, in_the_enumerated_task


def test_a_method_by_hand_in_the_enumerated_task():
    """Plain GRPO beside itself: nothing differs. Of half the advantage the direction is the same,
    and so is noise over signal. A weighting of 1 has no bias, with the advantage rloo."""
    rows = in_the_enumerated_task("dr_grpo", {})
    assert rows["direction"]["own"].value == pytest.approx(1)
    assert rows["noise"]["own"].value == pytest.approx(1)
    assert rows["bias"]["own"].value == pytest.approx(1 / 3)  # (G - 1) / G of the length, G = 3
    rows = in_the_enumerated_task("none", {})
    assert rows["bias"]["own"].value == pytest.approx(0, abs=1e-5)
    assert "class" in in_the_enumerated_task("learned_importance", {})["bias"]["reason"]


def test_a_method_that_samples_is_told_why_it_is_not_in_a_synthetic_task():
    rows = in_planted_tasks("measured", {"measured_k": 2})
    assert rows.keys() == {"few", "some", "many"}
    assert all("synthetic task does not have" in row["reason"] for row in rows.values())


def test_noise_along_plain_grpos_direction_by_hand():
    """The gradients of two batches are (1, 1/2, 0) and (1, -1/2, 0): the squared signal is their
    product, 3/4, and the noise 5/4 - 3/4 = 1/2. Twice the gradients have the factor 1. Those turned
    to (1, 1/2, 1) and (1, -1/2, 1) have the same part along plain GRPO's and the same noise, so 1
    as well."""
    plain = np.array([[1.0, 0.5, 0.0], [1.0, -0.5, 0.0]])
    turned = plain + [0.0, 0.0, 1.0]
    other = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])

    def pair(own):
        both = np.stack([plain, own])
        return np.einsum("aid,bjd->abij", both, both)
    assert along_plain(pair(2 * plain)) == pytest.approx(1)
    assert along_plain(pair(turned)) == pytest.approx(1)
    # <(1, 1/2), (1, 0)> = 1 and <(1, -1/2), (1, 1)> = 1/2, so 3/4 on average: the part is 1
    assert along_plain(pair(other)) == pytest.approx(1)
    assert along_plain(pair(other * [1.0, 0.5, 1.0])) == pytest.approx(
        (7 / 8 / 0.75) ** 2 * 0.5 / (1 + 1 / 8 - 1))
    assert np.isnan(along_plain(pair(-plain)))
