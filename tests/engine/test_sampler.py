"""The sampler against the model: the same tokens by the slow loop, the numbers on record, departures, recorded steps."""
import pytest
import torch

from engine import sampler
from conftest import copied
from qwen2_model import Qwen2
from engine.sampler import Distribution, for_sampling, generate

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]


def test_greedy_equals_the_slow_loop(small_model):
    result = generate(small_model, PROMPTS, max_new_tokens=15, greedy=True, stop_ids=())
    for prompt, row in zip(PROMPTS, result.tokens):
        ids = list(prompt)
        for _ in range(15):
            ids.append(int(small_model(torch.tensor([ids]))[0, -1].argmax()))
        assert row.tolist() == ids[len(prompt):]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_numbers_are_those_of_temperature_1(small_model, temperature):
    result = generate(small_model, PROMPTS, answers=3, max_new_tokens=12, temperature=temperature, seed=5)
    assert result.mask.any(1).all()
    for b, (row, mask) in enumerate(zip(result.tokens, result.mask)):
        prompt, response = PROMPTS[b // 3], row[mask].tolist()
        with torch.no_grad():
            logits = small_model(torch.tensor([prompt + response]))[0, len(prompt) - 1:-1]
        distribution = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close(result.log_prob[b][mask], distribution.log_prob(row[mask]), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.entropy[b][mask], distribution.entropy(), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.collision[b][mask], distribution.probs.square().sum(-1), atol=1e-5, rtol=0)
        assert not any(values[b][~mask].any() for values in (result.tokens, result.log_prob, result.entropy, result.collision))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_follows_the_distribution(small_model, temperature):
    count = 20_000
    result = generate(small_model, [[5, 6, 7]], answers=count, max_new_tokens=1, temperature=temperature, seed=1)
    with torch.no_grad():
        expected = (small_model(torch.tensor([[5, 6, 7]]))[0, -1] / temperature).softmax(-1)
    seen = torch.bincount(result.tokens[:, 0], minlength=50) / count
    assert ((seen - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-4).all()


def test_a_departure_changes_nothing_for_those_who_stay(small_model):
    """The same run with and without stop tokens: rows agree up to their own end."""
    stopping = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    endless = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=())
    assert 0 < stopping.finished.sum() and len(set(stopping.mask.sum(1).tolist())) > 5
    assert torch.equal(stopping.tokens[stopping.mask], endless.tokens[stopping.mask])
    torch.testing.assert_close(stopping.log_prob[stopping.mask], endless.log_prob[stopping.mask], atol=1e-5, rtol=0)
    assert not endless.finished.any() and endless.mask.all()


def test_finished_rows_leave_the_batch(small_model, monkeypatch):
    rows, forward = [], small_model.model.forward
    monkeypatch.setattr(small_model.model, "forward", lambda ids, *more: rows.append(len(ids)) or forward(ids, *more))
    result = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    live = result.mask.sum(0).tolist()
    assert all(alive <= computed <= alive * 8 / 7 + 1 for computed, alive in zip(rows[1:], live[1:]))


def test_alone_or_in_company(small_model):
    company = generate(small_model, PROMPTS, max_new_tokens=20, greedy=True, stop_ids=())
    for i, prompt in enumerate(PROMPTS):
        alone = generate(small_model, [prompt], max_new_tokens=20, greedy=True, stop_ids=())
        assert torch.equal(alone.tokens[0], company.tokens[i])
        torch.testing.assert_close(alone.log_prob[0], company.log_prob[i], atol=1e-5, rtol=0)


def test_own_seed_and_nothing_else(small_model):
    torch.manual_seed(1)
    first = generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=7)
    torch.manual_seed(2)
    assert torch.equal(first.tokens, generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=7).tokens)
    assert not torch.equal(first.tokens, generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=8).tokens)


def test_a_stop_token_or_a_pad_ends_the_answer_and_the_limit_says_so(small_model):
    assert small_model.config.stop_ids == (2, 0)
    first = int(generate(small_model, PROMPTS[:1], max_new_tokens=1, greedy=True, stop_ids=()).tokens)
    ended = generate(small_model, PROMPTS[:1], max_new_tokens=9, greedy=True, stop_ids=(first,))
    assert ended.mask.sum() == 1 and ended.finished.all() and ended.tokens[0, 0] == first
    cut = generate(small_model, PROMPTS, max_new_tokens=4, greedy=True, stop_ids=())
    assert (cut.mask.sum(1) == 4).all() and not cut.finished.any()  # the same budget for every prompt length


def test_every_prompt_may_have_a_limit_of_its_own(small_model):
    """Each row is the start of what it would be with room to spare, and no stop token past the limit finishes it."""
    free = generate(small_model, PROMPTS, answers=6, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    limits = [3, 25, 7]
    bound = generate(small_model, PROMPTS, answers=6, max_new_tokens=limits, seed=3, stop_ids=(2, 4, 9, 17, 30))
    limit = torch.tensor(limits).repeat_interleave(6)
    assert torch.equal(bound.mask, free.mask & (torch.arange(25) < limit[:, None]))
    assert torch.equal(bound.tokens, free.tokens * bound.mask)
    assert torch.equal(bound.finished, free.finished & (free.mask.sum(1) <= limit))
    torch.testing.assert_close(bound.log_prob, free.log_prob * bound.mask, atol=1e-5, rtol=0)


def test_a_share_of_the_prompts_is_answered_as_among_all(small_model):
    given = dict(answers=6, max_new_tokens=[3, 25, 7], seed=3, stop_ids=(2, 4, 9, 17, 30))
    whole = generate(small_model, PROMPTS, **given)
    for share in (range(0, 1), range(1, 3), range(2, 2)):
        part, rows = generate(small_model, PROMPTS, share=share, **given), slice(6 * share.start, 6 * share.stop)
        for name, values in vars(whole).items():
            torch.testing.assert_close(vars(part)[name][rows], values[rows], atol=1e-5, rtol=0)
            assert vars(part)[name].shape == values.shape and vars(part)[name].count_nonzero() == vars(part)[name][rows].count_nonzero()


def test_answers_can_be_trained_on(small_model):
    """They are sampled in inference mode, whose own tensors autograd refuses."""
    result = generate(small_model, PROMPTS, answers=2, max_new_tokens=5)
    assert not any(values.is_inference() or values.requires_grad for values in vars(result).values())


def test_a_prompt_is_computed_once_per_question(small_model, monkeypatch):
    tokens, forward = [], small_model.model.forward
    monkeypatch.setattr(small_model.model, "forward", lambda ids, *more: tokens.append(len(ids)) or forward(ids, *more))
    generate(small_model, PROMPTS, answers=5, max_new_tokens=4, stop_ids=())
    assert tokens == [3 + 6 + 1, 15, 15, 15]


@pytest.mark.parametrize("steps", [3, 8, 100])
def test_steps_of_a_fixed_size_give_the_same_answers(small_model, monkeypatch, steps):
    """As on a GPU: so many steps look at the same slots, some of them not written yet, and rows leave between them."""
    given = dict(answers=6, max_new_tokens=[25, 11, 25], seed=3, stop_ids=(2, 4, 9, 17, 30))
    usual = generate(small_model, PROMPTS, **given)
    monkeypatch.setitem(sampler.STEPS_BETWEEN_DEPARTURES, "cpu", steps)
    fixed = generate(small_model, PROMPTS, **given)
    assert len(set(usual.mask.sum(1).tolist())) > 3
    for name, values in vars(usual).items():
        torch.testing.assert_close(vars(fixed)[name], values, atol=1e-5, rtol=0)


def test_a_step_leaves_its_tensors_where_they_are(small_model):
    """What is recorded once can only be played again if it reads and writes the same memory."""
    with torch.no_grad():
        result = sampler.Generation.empty(12, 9, "cpu")
        request = sampler.Request(torch.arange(12), torch.full((12,), 9), torch.rand(12, 9), torch.tensor([2]), 1.0, False)
        batch = sampler.Decoding(small_model, request, result)
        batch.prefill(PROMPTS, 4)
        batch.look_at(8, some_are_ahead=True)
        before = {name: tensor.data_ptr() for name, tensor in tensors_of(batch).items()}
        batch.step()
        batch.step()
    assert {"keys", "values", "token", "t", "done", "rows", "prompt_length", "question", "uniform", "prompt_padding",
            "limit", "stop_ids", "order", "back", "place", "line"} == set(before)
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(batch).items()} == before and batch.t.item() == 3


def tensors_of(batch):
    """All that a recorded step reads and writes, except what it makes anew each time."""
    held = {**vars(batch), **vars(batch.grid), **vars(batch.request)}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and name not in ("unwritten", "slot")}


def test_sampling_in_bfloat16_converts_the_matrices_once(small_model):
    """What the trainer multiplies in bfloat16 and keeps in float32, the sampler keeps in bfloat16: the same logits, to the bit."""
    model = copied(small_model).compute_in(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.bfloat16())  # a table is looked up, too
    typed = for_sampling(model)
    assert {p.dtype for p in typed.parameters() if p.dim() == 2} == {torch.bfloat16}
    assert {p.dtype for p in typed.parameters() if p.dim() == 1} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    result = generate(model, PROMPTS, answers=3, max_new_tokens=12, seed=5, stop_ids=())
    with torch.no_grad():
        assert torch.equal(typed(torch.tensor([PROMPTS[1]])), model(torch.tensor([PROMPTS[1]])))
        for b, row in enumerate(result.tokens):
            prompt = PROMPTS[b // 3]
            exact = small_model(torch.tensor([prompt + row.tolist()]))[0, len(prompt) - 1:-1].log_softmax(-1)
            torch.testing.assert_close(result.log_prob[b], exact.gather(1, row[:, None]).squeeze(1), atol=0.3, rtol=0)


def test_matrices_lie_column_by_column_on_a_cpu_only(small_model):
    own = dict(small_model.named_parameters())
    for name, p in for_sampling(small_model).named_parameters():
        assert p.equal(own[name]) and not p.requires_grad and own[name].requires_grad
        assert p.stride() == own[name].stride() if p.dim() == 1 or "embed" in name else p.t().is_contiguous()
    with torch.device("meta"):
        elsewhere = Qwen2(small_model.config)
    assert all(p.is_contiguous() for p in for_sampling(elsewhere).parameters())


def test_the_distribution_by_float64(small_model):
    logits = 30 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[5] = -100.0
    logits[5, 7] = 100.0
    token, exact = torch.tensor([0, 1, 2, 3, 4, 7]), logits.double().log_softmax(-1)
    log_prob, entropy, collision = Distribution(logits).facts(token)
    torch.testing.assert_close(log_prob.double(), exact.gather(1, token[:, None]).squeeze(1), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(collision.double(), exact.exp().square().sum(1), atol=1e-6, rtol=0)
    assert Distribution(logits).pick(torch.full((6,), 0.5), greedy=True).tolist() == logits.argmax(1).tolist()


def test_no_random_number_draws_a_token_without_probability():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(4, -1)
    assert Distribution(logits).pick(torch.tensor([0.0, 0.4999, 0.5, 1 - 2 ** -24])).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("bad", [dict(max_new_tokens=0), dict(answers=0), dict(temperature=0.0), dict(max_new_tokens=40_000),
                                 dict(max_new_tokens=[4, 4]), dict(max_new_tokens=[4, 0, 4])])
def test_senseless_requests_are_refused(small_model, bad):
    with pytest.raises(ValueError):
        generate(small_model, PROMPTS, **{"max_new_tokens": 4, **bad})
