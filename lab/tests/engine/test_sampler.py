"""The sampler against the model: the tokens of the slow loop, the numbers on record, departures."""
import pytest
import torch

from small import facts_behind, one_of
from lab.engine import sampler
from lab.engine.sampler import Sampling, Start, draw, generate
from qwen2_model import Decoder

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
MANY_STOPS = (2, 4, 9, 17, 30)
USUAL = Sampling(torch.tensor(MANY_STOPS), temperature=1.0, greedy=False)


@pytest.fixture
def fed(monkeypatch):
    """A list that gets ids and positions of every pass through the model."""
    passes, forward = [], Decoder.forward

    def watched(decoder, ids, positions, attend):
        passes.append((ids.flatten().tolist(), positions.flatten().tolist()))
        return forward(decoder, ids, positions, attend)

    monkeypatch.setattr(Decoder, "forward", watched)
    return passes


def assert_close(generation, expected, rows=slice(None)):
    for name, values in vars(expected).items():
        torch.testing.assert_close(vars(generation)[name][rows], values[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature, is_ruled_out", [(1.0, False), (0.5, True)])
def test_sampling_follows_the_distribution(small_model, vocabulary, temperature, is_ruled_out):
    """A token that is ruled out never comes first, and the others keep their proportions. On record
    is the probability that the policy itself gives to the token."""
    count, without = 20_000, -1
    with torch.no_grad():
        log_probs = small_model(torch.tensor([[5, 6, 7]]))[0, -1].log_softmax(-1)
    expected = (log_probs / temperature).softmax(-1)
    if is_ruled_out:
        without = int(expected.argmax())
        expected[without] = 0
    expected /= expected.sum()
    result = generate(small_model, [[5, 6, 7, 8]], starts=[Start(0, 3, without)] * count,
                      max_new_tokens=1, temperature=temperature, seed=1)
    token = result.ids[:, 0]
    frequency = torch.bincount(token, minlength=50) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((frequency - expected).abs() < 5 * deviation + 1e-4).all()
    assert (expected[token] > 0).all()
    torch.testing.assert_close(result.log_prob[:, 0], log_probs[token], atol=1e-4, rtol=0)


def slow_turns(model, prompts, starts, limits, uniform, stops, reply):
    """Answers of several turns, one after the other and each token by a whole forward pass."""
    answers = []
    for row, start in enumerate(starts):
        ids, drawn, finished = [], [], False
        while len(ids) < limits[row] and not finished:
            read = prompts[start.prompt][:start.seen] + ids
            with torch.no_grad():
                logits = model(torch.tensor([read]))[:, -1]
            if not ids and start.without >= 0:
                logits[:, start.without] = float("-inf")
            ids.append(int(draw(logits, uniform[row, len(ids)][None], USUAL, None)[0]))
            drawn.append(True)
            if ids[-1] in stops:
                written = reply(row, list(ids), list(drawn))
                finished = written is None
                ids += written or []
                drawn += [False] * (len(ids) - len(drawn))
        answers.append((ids[:limits[row]], drawn[:limits[row]], finished))
    return answers


@pytest.mark.parametrize("limits", one_of(2, [[90] * 31 + [70] * 3,
                                              [90 - 2 * row for row in range(34)]]))
@pytest.mark.parametrize("stops, has_replies", [
    (MANY_STOPS, False), (MANY_STOPS, True), (tuple(range(50)), True)])
def test_answers_equal_the_slow_loop(small_model, limits, stops, has_replies):
    """Each row alone, from its place and to its limit. Replies of 1 to 25 tokens at any time, also
    beyond the limit, and one of no token. If every token ends a turn, all rows begin to read a
    reply at the same time."""
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    starts = [Start(0, 3)] * 31 + [Start(1, 4), Start(1, 2, 7), Start(1, 6)]

    def reply(row, ids, drawn):
        turns = sum(token in stops and own for token, own in zip(ids, drawn))
        assert ids[-1] in stops and drawn[-1]
        if turns == 3 or row == 5:
            return None
        length = 0 if row == 6 else 1 + 8 * (row + turns) % 25
        return [(row + place) % 45 for place in range(length)]

    uniform = torch.rand(34, 90, generator=torch.Generator().manual_seed(4))
    expected = slow_turns(small_model, prompts, starts, limits, uniform, stops,
                          reply if has_replies else lambda *_: None)
    found = generate(small_model, prompts, starts=starts, max_new_tokens=limits, seed=4,
                     stop_ids=stops, reply=reply if has_replies else None)
    assert not has_replies or 8 < found.finished.sum() < 30 or stops != MANY_STOPS
    for row, (ids, drawn, finished) in enumerate(expected):
        assert found.ids[row, found.written[row]].tolist() == ids
        assert found.mask[row, :len(ids)].tolist() == drawn and found.finished[row] == finished
        prompt = prompts[starts[row].prompt][:starts[row].seen]
        expected_facts = facts_behind(small_model, prompt, ids) * torch.tensor(drawn)
        recorded = torch.stack([found.log_prob[row], found.entropy[row], found.collision[row]])
        torch.testing.assert_close(recorded[:, :len(ids)], expected_facts, atol=1e-4, rtol=0)
        assert not recorded[:, len(ids):].any()


def test_a_reply_takes_the_place_of_what_would_be_drawn(small_model, fed):
    """Both rows read the first token of their reply in one call, with what they drew before it. The
    other row then draws a token, which ends its answer, and one row alone reads what is left."""
    replies = {0: [20, 21, 22], 1: [23]}
    result = generate(small_model, [[5, 6, 7], [8, 9]], max_new_tokens=[6, 4], stop_ids=range(50),
                      reply=lambda row, ids, drawn: replies[row] if len(ids) < 3 else None)
    one, other = result.ids.tolist()
    assert one[1:4] == [20, 21, 22] and other[1] == 23
    assert fed[1:] == [([one[0], 20, other[0], 23], [3, 4, 2, 3]), ([21, 22], [5, 6])]
    assert result.written.sum(1).tolist() == [5, 3]


def test_rows_at_their_limit_leave_the_batch(small_model, fed):
    generate(small_model, PROMPTS, max_new_tokens=[3, 6, 6], stop_ids=())
    assert [len(ids) for ids, _ in fed] == [3 * 6, 3, 3, 2, 2, 2]


@pytest.fixture(params=["short", "long"])
def vocabulary(request, monkeypatch):
    """Both ways to draw: all rows at once, or a few at a time."""
    if request.param == "long":
        monkeypatch.setattr(sampler, "LONG_VOCABULARY", 0)


def test_the_distribution_by_float64():
    logits = 30 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[5] = -100.0
    logits[4, 4], logits[5, 7] = -200.0, 100.0
    exact = logits.double().log_softmax(-1)
    token, facts = draw(logits, torch.full((6,), 0.3), USUAL, None)
    log_prob, entropy, collision = facts.double()
    exact_entropy = -(exact.exp() * exact).sum(1)
    torch.testing.assert_close(log_prob, exact.gather(1, token[:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, exact_entropy, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(collision, exact.exp().square().sum(1), atol=1e-6, rtol=0)


def test_no_random_number_draws_a_token_without_probability():
    never = float("-inf")
    logits = torch.tensor([[never, 0.0, never, 0.0, never]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2 ** -24])
    assert draw(logits, uniform, USUAL, None)[0].tolist() == [1, 1, 3, 3]
