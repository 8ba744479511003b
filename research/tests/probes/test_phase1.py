"""The gradient at the embeddings against a second way to compute it; statistics by hand; a run."""
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import spoken

from qwen2_model import causal, rotary
from research import __main__ as overview
from research.probes import phase1
from research.probes.common import sample_batch
from research.probes.phase1 import (
    EARLY, FILLER, NO_SIGN, SHUFFLED, Account, account, class_ratio, controls_table,
    measures_of, phase_one, random_text, shuffled_rewards, t_measure, term_count, three_accounts,
    untrained)


@pytest.fixture
def small_policy(small_model, policy):
    """As much of a lab as the measurement asks for."""
    return SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4),
                           tokenizer=policy.tokenizer)


def gradient_by_hand(model, batch, b):
    """(n, D) of answer b alone: prompt and answer in one row, labels shifted as is usual."""
    prompt, answer = batch.prompt_ids[batch.group[b]], batch.ids[b, :batch.length[b]].tolist()
    x = F.embedding(torch.tensor([prompt + answer]), model.model.embed_tokens.weight)
    embeddings = x = x.detach().requires_grad_()
    for layer in model.model.layers:
        x = layer(x, *rotary(torch.arange(x.shape[1]), model.config), causal)
    logits = model.logits(model.model.norm(x))[0, len(prompt) - 1:-1]
    loss = F.cross_entropy(logits, torch.tensor(answer))
    return torch.autograd.grad(loss, embeddings)[0][0, len(prompt):]


def test_phase_1_is_the_gradient_of_the_cross_entropy_at_the_embeddings(small_policy, rollouts):
    of_batch = phase_one(small_policy, rollouts)
    expected = [gradient_by_hand(small_policy.model, rollouts, b)
                for b in range(len(rollouts.mask))]
    assert all(g[-1].abs().max() == 0 for g in expected)  # the last token predicts nothing
    g = torch.cat([g[:-1] for g in expected]).double()
    np.testing.assert_allclose(of_batch.size, g.norm(dim=-1), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(of_batch.signed, g.mean(-1), rtol=1e-3, atol=1e-7)
    assert not small_policy.model.model.embed_tokens._forward_hooks
    assert all(p.grad is None for p in small_policy.model.parameters())


def test_shuffled_rewards_change_training_and_leave_phase_1_exactly_as_it_is(policy):
    batch = spoken(policy)
    other = shuffled_rewards(batch)
    assert sorted(other.reward.tolist()) == sorted(batch.reward.tolist())
    assert not torch.equal(other.reward, batch.reward)
    assert abs(float(other.advantage[:3, 0].sum())) < 1e-5
    one, two = three_accounts(policy, batch), three_accounts(policy, other)
    assert np.array_equal(one["phase 1"].signed, two["phase 1"].signed)
    assert not np.array_equal(one["abs(A) s"].signed, two["abs(A) s"].signed)


def test_what_a_token_gets_and_where_it_stands(policy):
    """All tokens but the last of each answer; answer 3 is one token long."""
    batch = spoken(policy)
    accounts = three_accounts(policy, batch)
    phase_2, at_logits = accounts["phase 2"], accounts["abs(A) s"]
    assert len(phase_2.size) == batch.mask.sum() - 6
    k, n = 7, int(batch.length[0])  # a token of answer 0
    A, log_prob = batch.advantage[0, k].item(), batch.log_prob[0, k].item()
    s = np.sqrt(1 - 2 * np.exp(log_prob) + batch.collision[0, k].item())
    assert phase_2.signed[k] == pytest.approx(A * log_prob, rel=1e-5)
    assert at_logits.size[k] == pytest.approx(abs(A) * s, rel=1e-3)
    assert phase_2.advantage[k] == A and phase_2.position[:n - 1].tolist() == list(range(n - 1))
    relative = (np.arange(n - 1) + 0.5) / n
    assert np.array_equal(phase_2.end[:n - 1], np.select([relative < 0.2, relative < 0.8], [0, 2],
                                                         1))
    assert phase_2.question.tolist() == sorted(phase_2.question) and set(phase_2.question) == {0, 1}
    assert term_count(policy, batch).size[:n - 1].tolist() == list(range(n - 1, 0, -1))


def test_classes_of_tokens(policy):
    """By the regex, and by the spans of the text, where a piece of a tag is neither."""
    batch = spoken(policy)
    values = account(policy, batch, batch.log_prob)
    texts = [text for texts in batch.texts for text in texts[:-1]]
    regex, span = (dict(zip(texts, code, strict=True)) for code in (values.regex, values.span))
    assert regex[" 3"] == regex[" +"] == regex[" ("] == span[" 3"] == span[" +"] == span[" ("] == 1
    assert regex[" hit"] == span[" hit"] == 0
    assert regex["</"] == 0 and span["</"] == 2


def standing(size, signed=None, **known):
    """An account of which only these columns matter."""
    size = np.asarray(size, float)
    dull = dict.fromkeys(("advantage", "question", "position", "relative", "end", "regex", "span"),
                         np.zeros(len(size), int))
    known = {name: np.asarray(column) for name, column in known.items()}
    return Account(size, size if signed is None else np.asarray(signed), **{**dull, **known})


def ends_of(questions, sizes=(2.0, 4, 6, 1, 2, 100)):
    """So many problems with three early tokens, two late ones and one between."""
    return standing(np.tile(sizes, questions), question=np.repeat(range(questions), 6),
                    end=np.tile([0, 0, 0, 1, 1, 2], questions))


def test_one_class_over_another_by_hand():
    """Early 2 4 and 6, late 1 and 2: 4 / 1.5. With six problems like that the interval has no
    width, with five none is given."""
    six, five = (class_ratio(values, values.end) for values in (ends_of(6), ends_of(5)))
    assert six.value == pytest.approx(4 / 1.5)
    assert six.interval == pytest.approx((six.value, six.value))
    assert five.value == pytest.approx(4 / 1.5) and np.isnan(five.low)


def test_t_by_hand():
    """One t a position, over answers. Position 0: sizes 1 and 3, t = 2 / (1 / sqrt 2) = 2.83;
    position 1: 10 and 12, t = 15.6; position 2 has one answer and no t."""
    values = standing([1.0, 10, 9, 3, 12], question=[0, 0, 0, 1, 1], position=[0, 1, 2, 0, 1])
    measured = [t_measure(values, values.size, name).value for name in phase1.T_MEASURES]
    assert measured == pytest.approx([0.5, 0.0, (2 * 2 ** 0.5 + 11 * 2 ** 0.5) / 2])


def test_what_training_did_and_what_shuffling_changes_by_hand():
    """Tokens with A > 0, A = 0 and A < 0 get 1, 5 and 4; 1 - 3 and 4 - 2 change, of 10 in all."""
    values = standing([1.0, 5, 4], advantage=[1, 0, -1], end=[0, 1, 2], regex=[0, 1, 2],
                      span=[0, 1, 2])
    measures = measures_of(values, np.array([3.0, 5, 2]))
    assert [measures[name].value for name in (SHUFFLED, NO_SIGN)] == pytest.approx([0.4, 0.5])
    table = controls_table({"x": values})
    row = dict(zip(table.columns, table.rows[0]))
    assert row[EARLY] == row[FILLER] == pytest.approx(1 / 5)


def test_controls_keep_what_they_should(policy):
    batch, state = spoken(policy), torch.get_rng_state()
    models = [*(untrained(policy.model, seed) for seed in (1, 1, 2)), policy.model]
    assert torch.equal(torch.get_rng_state(), state)
    fresh, again, other, trained = (m.model.layers[0].mlp.up_proj.weight for m in models)
    assert torch.equal(fresh, again)
    assert not torch.equal(fresh, other) and not torch.equal(fresh, trained)
    text = random_text(policy, batch)
    assert torch.equal(text.mask, batch.mask)
    assert (text.ids[~text.mask] == 0).all()
    assert text.ids.max() < policy.tokenizer.get_vocab_size()
    assert text.ids.unique().numel() > 50


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_quick_run(tmp_path, learner, capsys, monkeypatch, is_flat):
    """Where all rewards are equal nothing is trained; phase 1 is there as ever."""
    def sample(*call):
        batch = sample_batch(*call)
        scores = {name: torch.zeros_like(score) for name, score in batch.scores.items()}
        return dataclasses.replace(batch, scores=scores,
                                   advantage=torch.zeros_like(batch.log_prob))

    if is_flat:
        monkeypatch.setattr(phase1, "sample_batch", sample)
    folder = tmp_path / "x"
    overview.main(["phase1", "--quick", "--threads", "1", "--out", str(folder),
                   "--model", str(learner)])
    tables = json.loads((folder / "numbers.json").read_text())["tables"]
    phases, controls = ({row[table["columns"][0]]: row for row in table["rows"]}
                        for table in tables)
    assert (folder / "size_by_place.png").stat().st_size > 5000
    assert phases[SHUFFLED]["phase 1"] == 0
    assert phases[EARLY]["phase 1"] == controls["real answers, trained model"][EARLY] > 0
    assert (phases[EARLY]["abs(A) s"] is None) == is_flat
    assert (phases[NO_SIGN]["phase 1"] == 1) == is_flat
