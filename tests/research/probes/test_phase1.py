"""The gradient at the embeddings against a second way to compute it and finite differences;
statistics by hand; whole runs."""
import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import hand_made, spoken

from analysis.vocabulary import CLASSES
from engine import forward
from grpo import gradient_size
from qwen2_model import causal, rotary
from research.probes import phase1
from research.probes.common import run_probe, sample_batch
from research.probes.phase1_gradient import (
    analysed, at_embeddings, phase_one, random_text, shuffled_rewards, single_terms, untrained)
from research.probes.phase1_statistics import (
    EQUAL_TERMS, NEXT_TERM, TERM_COUNT, TERM_S, TERM_SIZE, TERM_SUM, Account, accounts_of_terms,
    class_ratio, early_over_late, figures, locate, three_accounts, within_answers)
from research.probes.phase1_tables import classes_table, distance_table, t_table, training_table


@pytest.fixture
def small_lab(small_model):
    """As much of a lab as the measurement asks for."""
    return SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4))


def losses(model, batch, b, change=0.0):
    """Of answer b alone: the loss term of each token, all embeddings, and where the answer begins.

    Prompt and whole answer stand in one row, labels are shifted as is usual, nothing is padded.
    `change` is added to the embeddings.
    """
    prompt = batch.prompt_ids[batch.group[b]]
    answer = batch.ids[b, :batch.length[b]].tolist()
    embeddings = F.embedding(torch.tensor([prompt + answer]), model.model.embed_tokens.weight)
    embeddings = (embeddings + change).detach().requires_grad_()
    x = embeddings
    for layer in model.model.layers:
        x = layer(x, *rotary(torch.arange(x.shape[1]), model.config), causal)
    logits = model.logits(model.model.norm(x))[0, :-1]
    labels = torch.tensor((prompt + answer)[1:])
    labels[:len(prompt) - 1] = -100
    terms = F.cross_entropy(logits, labels, reduction="none")[len(prompt) - 1:]
    return terms, embeddings, len(prompt)


def test_phase_1_is_the_gradient_of_the_mean_cross_entropy_at_the_embeddings(small_lab, rollouts):
    model = small_lab.model
    size, signed = phase_one(small_lab, rollouts)
    for b, n in enumerate(rollouts.length.tolist()):
        terms, embeddings, start = losses(model, rollouts, b)
        g = torch.autograd.grad(terms.mean(), embeddings)[0][0, start:]
        assert g[-1].abs().max() == 0  # the last token predicts nothing
        torch.testing.assert_close(size[b, :n], g.norm(dim=-1), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(signed[b, :n], g.mean(-1), rtol=1e-3, atol=1e-7)
        assert size[b, :n - 1].min() > 0
        assert size[b, n - 1:].abs().max() == 0
    assert not model.model.embed_tokens._forward_hooks
    assert all(p.grad is None for p in model.parameters())


def test_finite_differences_agree(small_lab, rollouts):
    b = int(rollouts.length.argmax())
    start, n = len(rollouts.prompt_ids[rollouts.group[b]]), int(rollouts.length[b])
    log_prob, gradient_of = at_embeddings(small_lab, rollouts, torch.tensor([b]))
    g = gradient_of(-log_prob.sum() / n)[0]

    def loss_at(change):
        terms, _, _ = losses(small_lab.model, rollouts, b, change)
        return terms.mean().item()

    for j in (0, n - 2):
        change = torch.zeros(1, start + n, g.shape[1])
        change[0, start + j] = 1e-2 * g[j] / g[j].norm()  # along g the difference is its norm
        difference = (loss_at(change) - loss_at(-change)) / 2e-2
        assert difference == pytest.approx(g[j].norm().item(), rel=0.02)


def test_single_loss_terms_add_up_to_phase_1(small_lab, rollouts):
    rows = torch.tensor([4, 0, 3])
    log_prob, gradient_of = at_embeddings(small_lab, rollouts, rows)
    n = rollouts.length[rows]
    added = sum(gradient_of(-(log_prob[:, i] / n).sum()) for i in range(int(n.max())))
    size, signed = phase_one(small_lab, rollouts)
    torch.testing.assert_close(added.norm(dim=-1), size[rows], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(added.mean(-1), signed[rows], rtol=1e-3, atol=1e-7)


def test_the_size_of_every_single_term_and_none_at_later_tokens(small_lab, rollouts):
    chosen = torch.tensor([5, 1, 0, 3, 2])  # more than a micro-batch, in any order
    norms = single_terms(small_lab, rollouts, chosen)
    for k, b in enumerate(chosen.tolist()):
        terms, embeddings, start = losses(small_lab.model, rollouts, b)
        for i, term in enumerate(terms):
            gradient, = torch.autograd.grad(term, embeddings, retain_graph=True)
            alone = gradient[0, start:].norm(dim=-1)
            measured = norms[k, i, :len(alone)].float()
            torch.testing.assert_close(measured, alone, rtol=1e-4, atol=1e-6)
            assert norms[k, i, i:].abs().max() == 0
    later = torch.arange(norms.shape[1])[None] >= rollouts.length[chosen, None]
    assert norms[later].abs().max() == 0


def test_neither_micro_batches_nor_chunks_of_logits_matter(small_lab, rollouts, monkeypatch):
    def measured():
        return [*phase_one(small_lab, rollouts),
                single_terms(small_lab, rollouts, torch.arange(6))]

    whole = measured()
    small_lab.settings.micro_batch = 1
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 150)
    for one, other in zip(whole, measured(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_shuffled_rewards_change_training_and_leave_phase_1_exactly_as_it_is(lab):
    batch = spoken(lab)
    other = shuffled_rewards(batch)
    assert sorted(other.reward.tolist()) == sorted(batch.reward.tolist())
    assert not torch.equal(other.reward, batch.reward)
    assert not torch.equal(other.advantage, batch.advantage)
    assert abs(float(other.advantage[:3, 0].sum())) < 1e-5

    size, signed = phase_one(lab, batch)
    other_size, other_signed = phase_one(lab, other)
    assert torch.equal(other_size, size) and torch.equal(other_signed, signed)

    places = locate(lab, batch, analysed(batch))
    one = three_accounts(places, batch, size, signed)
    two = three_accounts(places, other, size, signed)
    assert np.array_equal(one["phase 1"].size, two["phase 1"].size)
    assert not np.array_equal(one["abs(A) s"].size, two["abs(A) s"].size)


def test_the_three_accounts_of_a_token(lab):
    batch = spoken(lab)
    places = locate(lab, batch, analysed(batch))
    accounts = three_accounts(places, batch, *phase_one(lab, batch))
    k = 7  # a token of answer 0
    b, t = places.answer[k], places.position[k]
    A, log_prob = batch.advantage[b, t].item(), batch.log_prob[b, t].item()
    s = np.sqrt(1 - 2 * np.exp(log_prob) + batch.collision[b, t].item())
    assert accounts["phase 2"].signed[k] == pytest.approx(A * log_prob, rel=1e-5)
    assert accounts["phase 2"].size[k] == pytest.approx(abs(A * log_prob), rel=1e-5)
    assert accounts["abs(A) s"].signed[k] == pytest.approx(A * s, rel=1e-3)
    assert accounts["abs(A) s"].size[k] == pytest.approx(abs(A) * s, rel=1e-3)


def test_where_tokens_stand(lab):
    batch = spoken(lab)
    places = locate(lab, batch, analysed(batch))
    assert len(places.answer) == batch.mask.sum() - 6
    assert 3 not in places.answer  # answer 3 is one token long
    first = places.answer == 0
    n = int(batch.length[0])
    assert places.position[first].tolist() == list(range(n - 1))
    assert (places.question[first] == 0).all()
    assert (places.question[places.answer == 5] == 1).all()
    relative = (np.arange(n - 1) + 0.5) / n
    end = np.where(relative < 0.2, 0, np.where(relative < 0.8, 1, 2))
    assert np.array_equal(places.end[first], end)
    assert places.tenth[first].tolist() == [int(10 * r) for r in relative]
    assert places.bin[first].tolist() == [int(20 * r) for r in relative]


def test_what_the_regex_calls_tokens(lab):
    batch = spoken(lab)
    places = locate(lab, batch, analysed(batch))
    texts = [text for texts in batch.texts for text in texts[:-1]]
    named = {text: CLASSES[code] for text, code in zip(texts, places.naive, strict=True)}
    assert named[" 3"] == named[" +"] == named[" ("] == "reasoning"
    assert named[" hit"] == named[","] == "filler"
    assert named["</"] == named["think"] == "filler"  # a piece is no whole tag


def test_words_over_numbers_operators_and_brackets(lab):
    """Sizes 2 for words, 1 for numbers, operators and brackets, 9 for tags and spaces, which are
    neither. To the regex a space or a newline is filler."""
    batch = spoken(lab)
    places = locate(lab, batch, analysed(batch))
    size_of_kind = np.array([2.0, 9, 1, 1, 1, 9, 9])  # in the order of KINDS
    size = size_of_kind[places.flat(batch.kind).astype(int)]
    table = classes_table({"phase 1": Account(places, size, size)}, batch)
    row = dict(zip(table.columns, table.rows[0]))
    assert row["spans"] == row["spans, like place"] == pytest.approx(2)
    assert row["regex"] > 2


def standing(**columns):
    """Places of which only these columns matter."""
    return SimpleNamespace(**{name: np.asarray(column) for name, column in columns.items()})


def ends_of(questions, sizes=(2.0, 4, 6, 1, 2, 100)):
    """So many problems with three early tokens, two late ones and one between."""
    places = standing(question=np.repeat(range(questions), 6),
                      end=np.tile([0, 0, 0, 2, 2, 1], questions))
    size = np.tile(sizes, questions)
    return Account(places, size, size)


def test_early_over_late_by_hand():
    """Early 2 4 and 6, late 1 and 2: 4 / 1.5. With six problems like that the interval has no
    width, with five none is given."""
    six, five = early_over_late(ends_of(6)), early_over_late(ends_of(5))
    assert six.value == pytest.approx(4 / 1.5)
    assert six.interval == pytest.approx((six.value, six.value))
    assert five.value == pytest.approx(4 / 1.5) and np.isnan(five.low)


def test_the_interval_of_early_over_late_is_the_jackknifes():
    """One problem's early tokens are twice as large. Without it the early mean is 4, without one
    of the others (8 + 4 * 4) / 5."""
    uneven = ends_of(6)
    uneven.size[:3] *= 2
    logs = np.log(np.array([4, 4.8, 4.8, 4.8, 4.8, 4.8]) / 1.5)
    error = np.sqrt(5 / 6 * ((logs - logs.mean()) ** 2).sum())
    e = early_over_late(uneven)
    assert e.value == pytest.approx(28 / 6 / 1.5)
    assert np.log(e.high / e.value) == pytest.approx(2.571 * error, rel=1e-3)


def test_a_class_that_is_only_early_is_no_larger_at_like_positions():
    """Six problems. Size is 4 in bin 0 and 1 in bin 19, whatever the class; filler (code 0) three
    times early and once late, reasoning the other way round: at like positions 1. Code 2 does not
    count; a bin with one class only counts for the crude ratio, (3 * 4 + 1 + 7) / 5 over 7 / 4."""
    code = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 0])
    place = np.array([0, 0, 0, 19, 0, 19, 19, 19, 0, 5])
    size = np.tile([4.0, 4, 4, 1, 4, 1, 1, 1, 50, 7], 6)
    places = standing(question=np.repeat(range(6), 10), bin=np.tile(place, 6))
    crude, like = class_ratio(Account(places, size, size), np.tile(code, 6))
    assert crude.value == pytest.approx((13 + 7) / 5 / (7 / 4))
    assert like.value == pytest.approx(1)


def test_t_by_hand():
    """One t a position, over answers. Position 0: sizes 1 and 3, t = 2 / (1 / sqrt 2) = 2.83;
    position 1: 10 and 12, t = 15.6; position 2 has one answer and no t. Signed: 1 and -3 give
    0.71; 10 and -10 give 0."""
    places = standing(question=[0, 0, 0, 1, 1], answer=[0, 0, 0, 1, 1], position=[0, 1, 2, 0, 1],
                      end=[0, 1, 2, 0, 2], naive=[0] * 5, bin=[0] * 5, inside=np.ones((2, 4)))
    size, signed = np.array([1.0, 10, 9, 3, 12]), np.array([1.0, 10, 9, -3, -10])
    values = [e.value for e in figures(Account(places, size, signed))]
    assert values[:3] == pytest.approx([0.5, 0.0, (2 * 2 ** 0.5 + 11 * 2 ** 0.5) / 2])
    assert values[3:6] == pytest.approx([0.0, 1.0, 2 ** 0.5 / 4])
    assert values[6] == pytest.approx((1 + 3) / 2 / ((9 + 12) / 2))


def test_t_by_the_number_of_answers():
    """30 answers reach position 0, ten position 1: only the first counts. Sizes 1 and 3 by turns:
    mean 2, std 1, t = 2 sqrt n."""
    places = standing(answer=np.append(np.arange(30), np.arange(10)),
                      position=np.append(np.zeros(30, int), np.ones(10, int)),
                      inside=np.ones((30, 2)))
    size = np.append(np.tile([1.0, 3.0], 15), np.full(10, 7.0))
    signed = np.append(np.tile([-1.0, 1.0], 15), np.zeros(10))
    real, random = Account(places, size, signed), Account(places, signed, size)
    table = t_table(real, random, np.random.default_rng(0))
    few, many = table.rows
    assert "the 1 positions" in table.title
    assert (few[0], many[0]) == ("25", "30")
    assert many[1] == pytest.approx(2 * 30 ** 0.5) and many[2] == pytest.approx(2)
    assert many[3:] == (1, 0, 0, 1)
    assert few[2] == pytest.approx(2, rel=0.1) and few[1] < many[1]


def test_rank_correlations_within_answers_by_hand():
    """Problem 0: +1 and -1, mean 0; problem 1: +1. An answer of two tokens and one that is all
    equal do not count."""
    answer = np.repeat([0, 1, 2, 3, 4], [3, 3, 4, 2, 3])
    places = standing(answer=answer, question=np.array([0, 0, 1, 1, 1])[answer])
    x = np.array([1.0, 2, 3, 1, 2, 3, 1, 5, 7, 8, 1, 2, 1, 2, 3])
    y = np.array([10.0, 20, 90, 3, 2, 1, 0, 1, 2, 9, 2, 1, 5, 5, 5])
    mean, answers = within_answers(places, x, y)
    assert mean.value == pytest.approx(0.5) and answers == 3


def one_answer():
    """Four tokens, of which three are analysed, and the sizes of its loss terms at them."""
    batch = hand_made([[True] * 4],
                      log_prob=torch.log(torch.tensor([[0.5, 0.25, 1.0, 0.5]])),
                      collision=torch.tensor([[0.5, 0.25, 1.0, 0.5]]))
    norms = torch.zeros(1, 4, 4, dtype=torch.float64)
    norms[0, 1:, 0] = torch.tensor([1.0, 2, 3])
    norms[0, 2:, 1] = torch.tensor([4.0, 2])
    norms[0, 3, 2] = 5
    return batch, norms


def test_what_single_terms_give_by_hand(lab):
    batch, norms = one_answer()
    accounts = accounts_of_terms(lab, batch, torch.tensor([0]), norms)
    s = gradient_size(batch.log_prob, batch.collision)[0].tolist()
    expected = {TERM_COUNT: [3, 2, 1], TERM_SIZE: [2, 3, 5], NEXT_TERM: [1, 4, 5],
                TERM_SUM: [6, 6, 5], EQUAL_TERMS: [36 / 14, 36 / 20, 1],
                TERM_S: [(s[1] + s[2] + s[3]) / 3, (s[2] + s[3]) / 2, s[3]]}
    assert set(accounts) == set(expected)
    for name, values in expected.items():
        assert accounts[name].size.tolist() == pytest.approx(values, rel=1e-5), name


def test_loss_terms_by_distance_by_hand():
    batch, norms = one_answer()
    table = distance_table(batch, torch.tensor([0]), norms)
    names, pairs, means, ratios, _, shares = zip(*table.rows)
    assert names == ("1", "2", "3-4") and pairs == (3, 2, 1)
    assert means == pytest.approx([10 / 3, 2, 3])
    assert ratios == pytest.approx([1, 0.6, 0.9])
    assert shares == pytest.approx([10 / 17, 4 / 17, 3 / 17])


def test_what_training_did_by_hand():
    """One answer each with A > 0, A = 0 and A < 0; phase 1 gives them 1, 5 and 4."""
    batch = hand_made([[True, True]] * 3, advantage=torch.tensor([[1.0, 1], [0, 0], [-1, -1]]))
    places = SimpleNamespace(flat=lambda frame: frame[:, 0].double().numpy())
    phase_1 = Account(places, np.array([1.0, 5, 4]), np.zeros(3))
    table = training_table({"phase 1": phase_1}, batch)
    assert [row[1] for row in table.rows] == [1, 1, 1]
    assert [row[3] for row in table.rows] == pytest.approx([0.1, 0.5, 0.4])
    for sentence in ("33.3% of the answers", "50.0% of its size", "40.0%"):
        assert sentence in table.finding


def test_controls_keep_what_they_should(lab):
    batch, state = spoken(lab), torch.get_rng_state()
    models = [untrained(lab.model, 1), untrained(lab.model, 1), untrained(lab.model, 2), lab.model]
    assert torch.equal(torch.get_rng_state(), state)
    fresh, again, other, trained = (m.model.layers[0].mlp.up_proj.weight for m in models)
    assert torch.equal(fresh, again)
    assert not torch.equal(fresh, other) and not torch.equal(fresh, trained)
    text = random_text(lab, batch)
    assert torch.equal(text.mask, batch.mask)
    assert (text.ids[~text.mask] == 0).all()
    assert text.ids.max() < lab.tokenizer.get_vocab_size()
    assert (text.ids == batch.ids)[batch.mask].float().mean() < 0.1
    assert text.ids.unique().numel() > 50


def numbers_and_words(row):
    cells = [x for cell in row.values() for x in (cell if isinstance(cell, list) else [cell])]
    words = " ".join(x for x in cells if isinstance(x, str))
    return [x for x in cells if isinstance(x, (int, float))], words.replace("-", " ").split()


def assert_backed(table):
    """Every number of a finding is a number of its table, as rounded, or in the name of a row."""
    numbers, words = [], []
    for row in table["rows"]:
        of_row = numbers_and_words(row)
        numbers += of_row[0]
        words += of_row[1]
    text = re.sub(r"[Pp]hase [12]|above 3|A < 0|\(1 if", "", table["finding"])
    for said in re.findall(r"\d[\d,]*(?:\.\d+)?%?", text):
        digits = said.strip("%").replace(",", "")
        scale = 100 if "%" in said else 1
        half = 0.5001 * 10.0 ** -len(digits.partition(".")[2])
        near = any(abs(abs(x) * scale - float(digits)) <= half for x in numbers)
        assert near or said in words, f"{said} is not in the table {table['name']}"


def run(folder, *more):
    argv = ["--quick", "--threads", "1", "--out", str(folder), *more]
    run_probe("phase1", phase1.__doc__, phase1.FLAGS, phase1.measure, argv)
    numbers = json.loads((folder / "numbers.json").read_text())
    return {table["name"]: table for table in numbers["tables"]}


def test_a_quick_run_says_only_what_its_tables_hold(tmp_path, capsys):
    tables = run(tmp_path / "x")
    assert (tmp_path / "x/size_by_place.png").stat().st_size > 5000
    assert "Phase 1" in capsys.readouterr().out
    for table in tables.values():
        assert "nan" not in table["finding"]
        assert_backed(table)

    phases = tables["phases"]["rows"]
    assert [phases[i]["pub. phase 1"] for i in (0, 1, 6, 7)] == [0.83, 0.019, 4, 1.75]
    shuffled = tables["wrong gradient"]["rows"]
    assert shuffled[0]["largest change"] == 0 and shuffled[2]["largest change"] > 0
    assert shuffled[0]["rank correlation"] == pytest.approx(1)
    position = tables["position"]["rows"]
    assert position[1]["early"] == position[0]["early"]
    assert position[1]["late"] < position[0]["late"]
    control = tables["controls"]["rows"][0]
    assert phases[6]["phase 1"] == position[0]["early over late"] == control["early over late"]
    assert phases[7]["phase 1"] == tables["classes"]["rows"][0]["regex"]


def test_shares_of_a_quick_run_add_up(tmp_path, capsys):
    tables = run(tmp_path / "x")
    by_span = [row for row in tables["kinds"]["rows"] if "span" in row["class"]]
    assert sum(row["of the regex's filler"] for row in by_span) == pytest.approx(1)
    for name in ("phase 1", "phase 2", "abs(A) s"):
        assert sum(row[name] for row in tables["after the fact"]["rows"]) == pytest.approx(1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_batch_whose_groups_all_have_equal_rewards(tmp_path, learner, capsys, monkeypatch):
    """Nothing is trained, so nothing can be said of the gradient at the logits; phase 1 is there
    as ever."""
    def sample(*call):
        batch = sample_batch(*call)
        scores = {name: torch.zeros_like(score) for name, score in batch.scores.items()}
        advantage = torch.zeros_like(batch.log_prob)
        return dataclasses.replace(batch, scores=scores, advantage=advantage)

    monkeypatch.setattr(phase1, "sample_batch", sample)
    tables = run(tmp_path / "x", "--model", str(learner))
    early_over_late_row = tables["phases"]["rows"][6]
    assert early_over_late_row["phase 1"] > 0 and early_over_late_row["abs(A) s"] is None
    assert tables["after the fact"]["rows"][1]["of all"] == 1
    assert tables["wrong gradient"]["rows"][2]["answers"] == 0
    assert_backed(tables["position"])


def test_the_same_seed_gives_the_same_numbers(tmp_path, learner, capsys):
    flags = ["--model", str(learner), "--questions", "9", "--answers", "3"]
    assert run(tmp_path / "x", *flags) == run(tmp_path / "y", *flags)
