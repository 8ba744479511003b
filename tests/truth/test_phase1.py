"""The gradient at the embeddings against a second way to compute it and finite differences; statistics by hand; whole runs."""
import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from truth import __main__ as probes
from engine import rollouts as frame
from conftest import hand_made, spoken
from grpo import gradient_size
from qwen2_model import causal, rotary
from analysis.vocabulary import CLASSES
from truth import phase1
from truth.common import sample_batch
from truth.phase1 import (CERTAIN, NEXT, REACH, TERM, Given, Tokens, analysed, at_embeddings, class_ratio, classes_table, distance_table,
                          early_over_late, figures, flat_table, phase_one, random_text, shuffled_rewards, single_terms, t_table, terms_apart,
                          three_accounts, untrained, within_answers)


@pytest.fixture
def small_lab(small_model):
    """As much of a lab as the measurement asks for."""
    return SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4))


def losses(model, batch, b, change=0.0):
    """Of answer b alone, prompt and whole answer in one row: the loss term of each of its tokens, the embeddings they came from, and
    where the answer begins. Labels are shifted as is usual, nothing is padded. `change` is added to the embeddings."""
    prompt, answer = batch.prompt_ids[batch.group[b]], batch.ids[b, :batch.length[b]].tolist()
    embeddings = (F.embedding(torch.tensor([prompt + answer]), model.model.embed_tokens.weight) + change).detach().requires_grad_()
    x = embeddings
    for layer in model.model.layers:
        x = layer(x, *rotary(torch.arange(x.shape[1]), model.config), causal)
    logits = model.logits(model.model.norm(x))[0, :-1]
    labels = torch.tensor((prompt + answer)[1:]).index_fill(0, torch.arange(len(prompt) - 1), -100)
    return F.cross_entropy(logits, labels, reduction="none")[len(prompt) - 1:], embeddings, len(prompt)


def test_phase_1_is_the_gradient_of_the_mean_cross_entropy_at_the_answers_embeddings(small_lab, rollouts):
    size, signed = phase_one(small_lab, rollouts)
    for b, n in enumerate(rollouts.length.tolist()):
        terms, embeddings, start = losses(small_lab.model, rollouts, b)
        g = torch.autograd.grad(terms.mean(), embeddings)[0][0, start:]
        assert g[-1].abs().max() == 0  # the last token predicts nothing
        torch.testing.assert_close(size[b, :n], g.norm(dim=-1), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(signed[b, :n], g.mean(-1), rtol=1e-3, atol=1e-7)
        assert size[b, :n - 1].min() > 0 and size[b, n - 1:].abs().max() == 0
    assert not small_lab.model.model.embed_tokens._forward_hooks and all(p.grad is None for p in small_lab.model.parameters())


def test_finite_differences_agree(small_lab, rollouts):
    b = int(rollouts.length.argmax())
    start, n = len(rollouts.prompt_ids[rollouts.group[b]]), int(rollouts.length[b])
    log_prob, gradient_of = at_embeddings(small_lab, rollouts, torch.tensor([b]))
    g = gradient_of(-log_prob.sum() / n)[0]
    for j in (0, n - 2):
        change = torch.zeros(1, start + n, g.shape[1])
        change[0, start + j] = 1e-2 * g[j] / g[j].norm()  # along the gradient, where the difference is its norm
        up, down = (losses(small_lab.model, rollouts, b, sign * change)[0].mean().item() for sign in (1, -1))
        assert (up - down) / 2e-2 == pytest.approx(g[j].norm().item(), rel=0.02)


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
            alone = torch.autograd.grad(term, embeddings, retain_graph=True)[0][0, start:].norm(dim=-1)
            torch.testing.assert_close(norms[k, i, :len(alone)].float(), alone, rtol=1e-4, atol=1e-6)
            assert norms[k, i, i:].abs().max() == 0
    later = torch.arange(norms.shape[1])[None] >= rollouts.length[chosen, None]
    assert norms[later].abs().max() == 0


def test_neither_micro_batches_nor_chunks_of_logits_change_anything(small_lab, rollouts, monkeypatch):
    chosen = torch.arange(6)
    whole = *phase_one(small_lab, rollouts), single_terms(small_lab, rollouts, chosen)
    small_lab.settings.micro_batch = 1
    monkeypatch.setattr(frame, "LOGITS_AT_ONCE", 150)
    for one, other in zip(whole, (*phase_one(small_lab, rollouts), single_terms(small_lab, rollouts, chosen))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_shuffled_rewards_change_training_and_leave_phase_1_exactly_as_it_is(lab):
    batch = spoken(lab)
    other = shuffled_rewards(batch)
    assert sorted(other.reward.tolist()) == sorted(batch.reward.tolist()) and not torch.equal(other.reward, batch.reward)
    assert not torch.equal(other.advantage, batch.advantage) and abs(float(other.advantage[:3, 0].sum())) < 1e-5
    size, signed = phase_one(lab, batch)
    assert torch.equal(phase_one(lab, other)[0], size) and torch.equal(phase_one(lab, other)[1], signed)
    tokens = Tokens(lab, batch, analysed(batch))
    one, two = three_accounts(tokens, batch, size, signed), three_accounts(tokens, other, size, signed)
    assert np.array_equal(one["phase 1"].size, two["phase 1"].size) and not np.array_equal(one["abs(A) s"].size, two["abs(A) s"].size)


def test_the_three_accounts_of_a_token(lab):
    batch = spoken(lab)
    tokens = Tokens(lab, batch, analysed(batch))
    found = three_accounts(tokens, batch, *phase_one(lab, batch))
    k = 7  # a token of answer 0
    b, t = tokens.answer[k], tokens.position[k]
    A, log_prob = batch.advantage[b, t].item(), batch.log_prob[b, t].item()
    s = np.sqrt(1 - 2 * np.exp(log_prob) + batch.collision[b, t].item())
    assert found["phase 2"].signed[k] == pytest.approx(A * log_prob, rel=1e-5) and found["phase 2"].size[k] == pytest.approx(abs(A * log_prob), rel=1e-5)
    assert found["abs(A) s"].signed[k] == pytest.approx(A * s, rel=1e-3) and found["abs(A) s"].size[k] == pytest.approx(abs(A) * s, rel=1e-3)


def test_where_tokens_stand_and_what_the_regex_calls_them(lab):
    batch = spoken(lab)
    tokens = Tokens(lab, batch, analysed(batch))
    assert len(tokens.answer) == batch.mask.sum() - 6 and 3 not in tokens.answer  # answer 3 is one token long
    first = tokens.answer == 0
    n = int(batch.length[0])
    assert tokens.position[first].tolist() == list(range(n - 1))
    assert (tokens.question[first] == 0).all() and (tokens.question[tokens.answer == 5] == 1).all()
    relative = (np.arange(n - 1) + 0.5) / n
    assert np.array_equal(tokens.end[first], np.where(relative < 0.2, 0, np.where(relative < 0.8, 1, 2)))
    assert tokens.tenth[first].tolist() == [int(10 * r) for r in relative] and tokens.bin[first].tolist() == [int(20 * r) for r in relative]
    named = dict(zip((text for texts in batch.texts for text in texts[:-1]), (CLASSES[c] for c in tokens.naive)))
    assert named[" 3"] == named[" +"] == named[" ("] == "reasoning" and named[" hit"] == named[","] == "filler" and named["</think>"] == "structure"


def test_words_over_numbers_operators_and_brackets(lab):
    """Sizes 2 for words, 1 for numbers, operators and brackets, 9 for tags and spaces, which stand on neither side."""
    batch = spoken(lab)
    tokens = Tokens(lab, batch, analysed(batch))
    size = np.array([2.0, 9, 1, 1, 1, 9, 9])[tokens.flat(batch.kind).astype(int)]  # in the order of KINDS
    row = dict(zip(*(lambda table: (table.columns, table.rows[0]))(classes_table({"phase 1": Given(tokens, size, size)}, batch))))
    assert row["spans"] == row["spans, like place"] == pytest.approx(2) and row["regex"] > 2  # a space or a newline is filler to the regex


def standing(**columns):
    """Tokens of which only these columns matter."""
    return SimpleNamespace(**{name: np.asarray(column) for name, column in columns.items()})


def test_early_over_late_by_hand_and_its_interval():
    """Early 2 4 and 6, late 1 and 2, the middle 100: 4 / 1.5. With six questions like that the interval has no width, with five none is
    given; when one question's early tokens are twice as large its width is the jackknife's."""
    def of(questions, sizes=(2.0, 4, 6, 1, 2, 100)):
        ends = np.tile([0, 0, 0, 2, 2, 1], questions)
        size = np.tile(sizes, questions)
        return Given(standing(question=np.repeat(range(questions), 6), end=ends), size, size)

    e = early_over_late(of(6))
    assert e.value == pytest.approx(4 / 1.5) and e.interval == pytest.approx((e.value, e.value))
    assert early_over_late(of(5)).value == pytest.approx(4 / 1.5) and np.isnan(early_over_late(of(5)).low)
    uneven = of(6)
    uneven.size[:3] *= 2
    means = np.array([4 * (12 / 10 if q else 1) for q in range(6)])  # of early tokens, without question q: (8 + 4 * 4) / 5, else 4
    logs = np.log(means / 1.5)
    error = np.sqrt(5 / 6 * ((logs - logs.mean()) ** 2).sum())
    e = early_over_late(uneven)
    assert e.value == pytest.approx(28 / 6 / 1.5) and np.log(e.high / e.value) == pytest.approx(2.571 * error, rel=1e-3)


def test_a_class_that_is_only_early_is_no_larger_at_like_positions():
    """Six questions. Size is 4 in bin 0 and 1 in bin 19, whatever the class; filler (code 0) three times early and once late, reasoning
    the other way round: crude (3 * 4 + 1) / (4 + 3) = 13 / 7, at like positions 1. Code 2 and a bin with one class only do not count."""
    code, place, size = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 0]), np.array([0, 0, 0, 19, 0, 19, 19, 19, 0, 5]), np.array([4.0, 4, 4, 1, 4, 1, 1, 1, 50, 7])
    tokens = standing(question=np.repeat(range(6), 10), bin=np.tile(place, 6))
    crude, like = class_ratio(Given(tokens, np.tile(size, 6), np.tile(size, 6)), np.tile(code, 6))
    assert crude.value == pytest.approx((13 + 7) / 5 / (7 / 4)) and like.value == pytest.approx(1)


def test_t_by_hand():
    """One t a position, over answers. Position 0: sizes 1 and 3, t = 2 / (1 / sqrt 2) = 2.83; position 1: 10 and 12, t = 15.6;
    position 2 has one answer and no t. Signed: 1 and -3 give 0.71; 10 and -10 give 0."""
    tokens = standing(question=[0, 0, 0, 1, 1], answer=[0, 0, 0, 1, 1], position=[0, 1, 2, 0, 1], end=[0, 1, 2, 0, 2], naive=[0] * 5, bin=[0] * 5,
                      inside=np.ones((2, 4)))
    found = [e.value for e in figures(Given(tokens, np.array([1.0, 10, 9, 3, 12]), np.array([1.0, 10, 9, -3, -10])))]
    assert found[:3] == pytest.approx([0.5, 0.0, (2 * 2 ** 0.5 + 11 * 2 ** 0.5) / 2])
    assert found[3:6] == pytest.approx([0.0, 1.0, 2 ** 0.5 / 4])
    assert found[6] == pytest.approx((1 + 3) / 2 / ((9 + 12) / 2))


def test_t_by_the_number_of_answers():
    """30 answers reach position 0, ten position 1: only the first counts. Sizes 1 and 3 by turns: mean 2, std 1, t = 2 sqrt n."""
    answer, position = np.append(np.arange(30), np.arange(10)), np.append(np.zeros(30, int), np.ones(10, int))
    size = np.append(np.tile([1.0, 3.0], 15), np.full(10, 7.0))
    tokens = standing(answer=answer, position=position, inside=np.ones((30, 2)))
    signed = np.append(np.tile([-1.0, 1.0], 15), np.zeros(10))
    table = t_table(Given(tokens, size, signed), Given(tokens, signed, size), np.random.default_rng(0))
    few, many = table.rows
    assert "the 1 positions" in table.title and (few[0], many[0]) == ("25", "30")
    assert many[1] == pytest.approx(2 * 30 ** 0.5) and many[2] == pytest.approx(2) and many[3:] == (1, 0, 0, 1)
    assert few[2] == pytest.approx(2, rel=0.1) and few[1] < many[1]


def test_rank_correlations_within_answers_by_hand():
    """Question 0: +1 and -1, mean 0; question 1: +1, and an answer of two tokens and one that is all equal do not count."""
    answer = np.repeat([0, 1, 2, 3, 4], [3, 3, 4, 2, 3])
    tokens = standing(answer=answer, question=np.array([0, 0, 1, 1, 1])[answer])
    x = np.array([1.0, 2, 3, 1, 2, 3, 1, 5, 7, 8, 1, 2, 1, 2, 3])
    y = np.array([10.0, 20, 90, 3, 2, 1, 0, 1, 2, 9, 2, 1, 5, 5, 5])
    mean, answers = within_answers(tokens, x, y)
    assert mean.value == pytest.approx(0.5) and answers == 3


def one_answer():
    """Four tokens, of which three are analysed, and the sizes of its loss terms at them."""
    batch = hand_made([[True] * 4], log_prob=torch.log(torch.tensor([[0.5, 0.25, 1.0, 0.5]])), collision=torch.tensor([[0.5, 0.25, 1.0, 0.5]]))
    norms = torch.zeros(1, 4, 4, dtype=torch.float64)
    norms[0, 1:, 0], norms[0, 2:, 1], norms[0, 3, 2] = torch.tensor([1.0, 2, 3]).double(), torch.tensor([4.0, 2]).double(), 5
    return batch, norms


def test_what_single_terms_give_by_hand(lab):
    batch, norms = one_answer()
    found = terms_apart(lab, batch, torch.tensor([0]), norms)
    s = gradient_size(batch.log_prob, batch.collision)[0].tolist()
    assert {name: v.size.tolist() for name, v in found.items()} == {name: pytest.approx(values, rel=1e-5) for name, values in {
        REACH: [3, 2, 1], TERM: [2, 3, 5], NEXT: [1, 4, 5], "sum of their sizes": [6, 6, 5], "equal ones that would give as much": [36 / 14, 36 / 20, 1],
        CERTAIN: [(s[1] + s[2] + s[3]) / 3, (s[2] + s[3]) / 2, s[3]]}.items()}


def test_loss_terms_by_distance_by_hand():
    batch, norms = one_answer()
    table = distance_table(batch, torch.tensor([0]), norms)
    assert [row[0] for row in table.rows] == ["1", "2", "3-4"] and [row[1] for row in table.rows] == [3, 2, 1]
    assert [row[2] for row in table.rows] == pytest.approx([10 / 3, 2, 3]) and [row[3] for row in table.rows] == pytest.approx([1, 0.6, 0.9])
    assert [row[5] for row in table.rows] == pytest.approx([10 / 17, 4 / 17, 3 / 17])


def test_what_training_did_by_hand():
    """One answer each with A > 0, A = 0 and A < 0; phase 1 gives them 1, 5 and 4."""
    batch = hand_made([[True, True]] * 3, advantage=torch.tensor([[1.0, 1], [0, 0], [-1, -1]]))
    tokens = standing(answer=[0, 1, 2], flat=None)
    tokens.flat = lambda frame: frame[:, 0].double().numpy()
    table = flat_table({"phase 1": Given(tokens, np.array([1.0, 5, 4]), np.zeros(3))}, batch)
    assert [row[1] for row in table.rows] == [1, 1, 1] and [row[3] for row in table.rows] == pytest.approx([0.1, 0.5, 0.4])
    assert "33.3% of the answers" in table.finding and "50.0% of its size" in table.finding and "40.0%" in table.finding


def test_controls_keep_what_they_should(lab):
    batch, state = spoken(lab), torch.get_rng_state()
    fresh, again, other = (untrained(lab.model, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [m.model.layers[0].mlp.up_proj.weight for m in (fresh, again, other, lab.model)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])
    text = random_text(lab, batch)
    assert torch.equal(text.mask, batch.mask) and (text.ids[~text.mask] == 0).all() and text.ids.max() < lab.tokenizer.get_vocab_size()
    assert (text.ids == batch.ids)[batch.mask].float().mean() < 0.1 and text.ids.unique().numel() > 50


def numbers_of(row):
    values = [x for cell in row.values() for x in (cell if isinstance(cell, list) else [cell])]
    return [x for x in values if isinstance(x, (int, float))], " ".join(x for x in values if isinstance(x, str))


def assert_backed(table):
    """Every number of a finding is a number of its table, as rounded, or part of the name of a row."""
    found, texts = zip(*map(numbers_of, table["rows"]))
    for said in re.findall(r"\d[\d,]*(?:\.\d+)?%?", re.sub(r"[Pp]hase [12]|above 3|A < 0|\(1 if", "", table["finding"])):
        digits, scale = said.strip("%").replace(",", ""), 100 if "%" in said else 1
        half = 0.5001 * 10.0 ** -len(digits.partition(".")[2])
        near = any(abs(abs(x) * scale - float(digits)) <= half for values in found for x in values)
        assert near or any(said in text.replace("-", " ").split() for text in texts), f"{said} is not in the table {table['name']}: {table['finding']}"


def run(folder, *more):
    probes.main(["phase1", "--quick", "--threads", "1", "--out", str(folder), *more])
    return {table["name"]: table for table in json.loads((folder / "numbers.json").read_text())["tables"]}


def test_a_quick_run_says_only_what_its_tables_hold(tmp_path, capsys):
    tables = run(tmp_path / "x")
    for table in tables.values():
        assert table["finding"] and "nan" not in table["finding"]
        assert_backed(table)
    assert (tmp_path / "x/size_by_place.png").stat().st_size > 5000 and "Phase 1" in capsys.readouterr().out
    one, shuffled = tables["phases"]["rows"], tables["wrong gradient"]["rows"]
    assert (one[0]["pub. phase 1"], one[1]["pub. phase 1"], one[6]["pub. phase 1"], one[7]["pub. phase 1"]) == (0.83, 0.019, 4, 1.75)
    assert shuffled[0]["largest change"] == 0 and shuffled[2]["largest change"] > 0 and shuffled[0]["rank correlation"] == pytest.approx(1)
    counted = tables["position"]["rows"]
    assert counted[1]["early"] == counted[0]["early"] and counted[1]["late"] < counted[0]["late"]
    assert one[6]["phase 1"] == counted[0]["early over late"] == tables["controls"]["rows"][0]["early over late"]
    assert one[7]["phase 1"] == tables["classes"]["rows"][0]["regex"]
    assert sum(row["of the regex's filler"] for row in tables["kinds"]["rows"] if "span" in row["class"]) == pytest.approx(1)
    for name in ("phase 1", "phase 2", "abs(A) s"):
        assert sum(row[name] for row in tables["after the fact"]["rows"]) == pytest.approx(1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_batch_whose_groups_all_have_equal_rewards(tmp_path, learner, capsys, monkeypatch):
    """Nothing is trained, so nothing can be said of the gradient at the logits; phase 1 is there as ever."""
    def sample(*call):
        batch = sample_batch(*call)
        return dataclasses.replace(batch, scores={name: torch.zeros_like(x) for name, x in batch.scores.items()}, advantage=torch.zeros_like(batch.log_prob))

    monkeypatch.setattr(phase1, "sample_batch", sample)
    tables = run(tmp_path / "x", "--model", str(learner))
    assert tables["phases"]["rows"][6]["phase 1"] > 0 and tables["after the fact"]["rows"][1]["of all"] == 1
    assert tables["phases"]["rows"][6]["abs(A) s"] is None and tables["wrong gradient"]["rows"][2]["answers"] == 0
    assert_backed(tables["position"])


def test_the_same_seed_gives_the_same_numbers(tmp_path, learner, capsys):
    one, two = (run(tmp_path / name, "--model", str(learner), "--questions", "9", "--answers", "3") for name in ("x", "y"))
    assert one == two
