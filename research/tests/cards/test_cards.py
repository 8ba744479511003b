"""Cards fit their functions, and the pages have them all."""
import copy
import json
import re

import numpy as np
import pytest
from conftest import ROOT, refusal

from analysis.statistics import Estimate, mean_over
from research.cards import page
from research.cards.measure import (along_plain, in_planted_tasks,
                                    in_the_enumerated_task)
from research.cards.page import all_cards, cards_table, what_does_not_fit, with_tables
from research.cards.published import could_see, gain_of_arm, is_method, published_rows

CARDS = {card["name"]: card for card in all_cards()}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_fits_its_function(name):
    assert what_does_not_fit(CARDS[name]) == ""


def test_a_card_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    card = copy.deepcopy(CARDS["optimal_token_baseline"])
    card["rows"]["direction"]["own"]["value"] -= 0.01
    assert what_does_not_fit(card).startswith("direction is 0.98")
    (tmp_path / "card.json").write_text(json.dumps(card))
    monkeypatch.setattr(page, "ENTRIES", tmp_path / "entries")
    assert "--card` makes the card again" in refusal(page.main, ["--add", str(tmp_path)])
    assert what_does_not_fit(card | {"name": "absent"}).endswith("absent")


def test_the_page_has_the_table_of_these_cards():
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text, all_cards()), "python -m research cards writes it"
    assert len(cards_table(all_cards()).rows) == len(CARDS)


def test_the_columns_are_ranked_beside_the_gain(monkeypatch):
    """A noise that grows as the gain falls: the ranks are opposite. A card without either is left
    out."""
    monkeypatch.setattr(page, "published_rows", lambda name, flags: {})

    def card(**values):
        return {"name": "x", "flags": {}, "rows": {
            key: {"own": {"value": value, "low": None, "high": None}}
            for key, value in values.items()}}
    cards = [card(noise=n, training=-n) for n in (1.0, 2.0, 4.0, 5.0)]
    [(column, methods, rank)] = page.ranks_table([*cards, card(noise=9.0), card(training=9.0)]).rows
    assert (column, methods, rank.value) == ("noise", 4, pytest.approx(-1))


def test_trained_methods_come_first_the_largest_gain_on_top(monkeypatch):
    gains = {"low": -0.02, "high": 0.01}
    monkeypatch.setattr(page, "published_rows", lambda name, flags: (
        {"board": {"own": Estimate(gains[name])}} if name in gains else {}))

    def card(name, **rows):
        return {"name": name, "flags": {}, "rows": {
            key: {"own": {"value": value, "low": None, "high": None}}
            for key, value in rows.items()}}
    cards = [card("noisy", batch_start=0.5), card("calm", batch_start=2.0), card("unmeasured"),
             card("low", batch_start=9.0), card("high"), card("own runs", training=0.03)]
    order = [one["name"] for one in sorted(cards, key=page.place, reverse=True)]
    assert order == ["own runs", "high", "low", "calm", "noisy", "unmeasured"]


def test_an_arm_is_the_method_of_a_card_if_its_flags_make_the_same():
    no_words = "--mitigation by_kind --word_weight 0"
    assert is_method(no_words, "by_kind", {"word_weight": 0.0}, "none")
    assert not is_method(no_words, "by_kind", {}, "none")
    assert is_method("--mitigation outcome_conditional --think_discount 0.5",
                     "outcome_conditional", {}, "none")  # typed or not, it is the default
    assert is_method("--advantage gae", "gae", {}, "none")
    assert not is_method("--advantage gae --critic trunk", "gae", {}, "none")
    assert not is_method("--mitigation taco --loss_norm sequence", "taco", {}, "none")
    assert is_method("--mitigation taco --questions 8 --learning_rate 2e-6", "taco", {}, "none")
    assert is_method("--mitigation taco --placebo weights", "taco", {}, "weights")
    assert not is_method("--mitigation taco --placebo weights", "taco", {}, "none")
    assert not is_method("--advantage hindsight", "taco", {}, "none")  # no longer there


def test_what_training_has_shown_is_read_from_the_published_results():
    rows = published_rows("by_kind", {"word_weight": 0.0})
    placebo = gain_of_arm("real_board_brief_8_gpu", "its placebo").value
    assert rows["real_placebo"]["own"].value == pytest.approx(rows["real"]["own"].value - placebo)
    assert rows["board"]["plain"] == pytest.approx(0.36, abs=0.02)  # 35.7% over twelve seeds
    assert rows["board_entropy"]["plain"] == pytest.approx(0.32, abs=0.02)
    rows = published_rows("inverse_logprob", {})
    assert rows["board"]["verdict"] == "behind, stopped"
    assert rows["board_cost"]["own"] == pytest.approx(1, abs=0.1)
    assert rows["real_able"]["own"].high > 0 > rows["real_sure"]["own"].high  # less sure
    assert published_rows("oracle", {}) == {}


def test_what_a_published_gain_could_have_seen():
    gain = mean_over([0.01, 0.03, 0.02, 0.05])
    stored = {"value": gain.value, "low": gain.low, "high": gain.high}
    assert could_see({"pairs": 4, "gain": stored}) == pytest.approx(gain.visible)
    assert could_see({"pairs": 2, "gain": stored}) is None


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


def test_every_paper_that_weightings_cites_has_a_row():
    cited = set(re.findall(r"\d{4}\.\d{5}", (ROOT / "docs/weightings.md").read_text("utf-8")))
    rows = "".join(line for line in (ROOT / "docs/papers.md").read_text("utf-8").splitlines()
                   if line.startswith("| ["))
    assert cited <= set(re.findall(r"\d{4}\.\d{5}", rows))
