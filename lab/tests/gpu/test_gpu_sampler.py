"""The sampler of a GPU, on a CPU, against the engine's."""
import pytest
import torch

from lab import gpu
from lab.engine import forward, log_probs, sampler
from lab.engine.sampler import Start, generate
from lab.gpu import sampler as gpu_sampler
from lab.gpu.sampler import Distribution, Pace, index_at, sample_on_gpu
from small import one_of

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
MANY_STOPS = (2, 4, 9, 17, 30)


def reply(row, ids, drawn):
    """Of 0 to 5 tokens, some of which are stop tokens; to two rows none, and never a fourth."""
    turns = sum(token in MANY_STOPS and own for token, own in zip(ids, drawn))
    assert ids[-1] in MANY_STOPS and drawn[-1]
    if turns == 4 or row == 5:
        return None
    return [(row + place) % 45 for place in range((row + turns) % 6)]


@pytest.mark.parametrize("request_", [
    dict(answers=8, max_new_tokens=[25, 11, 25]),
    dict(answers=3, max_new_tokens=12, greedy=True),
    dict(max_new_tokens=[9, 40, 2], starts=[Start(0, 3), Start(0, 2, 7), Start(1, 2)]),
    dict(answers=8, max_new_tokens=[40, 20, 33], temperature=0.6, reply=reply)])
@pytest.mark.parametrize("pace", one_of(3, [
    (gpu_sampler.PACE,), (Pace(1, 1, 8, 3),), (Pace(3, 3, 2, 5),), (Pace(2, 7, 4, 64),),
    (Pace(8, 8, 8, 9),), (Pace(100, 100, 8, 100),)]))
def test_it_samples_what_the_engine_samples(small_model, monkeypatch, request_, pace):
    """At every pace: many steps look at the same slots, some of them not written yet, and rows
    leave only between them."""
    request = dict(request_, seed=3, stop_ids=MANY_STOPS)
    expected = generate(small_model, PROMPTS, **request)
    lengths = set(expected.mask.sum(1).tolist())
    assert request.get("greedy") or len(lengths) > 2
    monkeypatch.setattr(gpu_sampler, "PACE", pace)
    monkeypatch.setattr(sampler, "sample", sample_on_gpu)
    for name, values in vars(generate(small_model, PROMPTS, **request)).items():
        torch.testing.assert_close(values, vars(expected)[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("long", [4, 5])
def test_no_random_number_draws_a_token_without_probability(long, monkeypatch):
    """Of 5 tokens at once, or first a part of 2: token 4 begins the third part."""
    monkeypatch.setattr(gpu_sampler, "LONG_VOCABULARY", long)
    monkeypatch.setattr(gpu_sampler, "PART", 2)
    never = float("-inf")
    logits = torch.tensor([[never, 0.0, never, 0.0, never]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2 ** -24])
    assert Distribution(logits).pick(uniform).tolist() == [1, 1, 3, 3]
    # a share within a part is rounded, and can be 1
    assert index_at(torch.ones(1, 1), torch.tensor([[0.0, 1.9, 1.9]])).tolist() == [[1]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_way_through_a_long_vocabulary_draws_the_same_tokens(temperature, monkeypatch):
    monkeypatch.setattr(gpu_sampler, "PART", 8)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 50, generator=generator)
    uniform = torch.rand(100, generator=generator)
    found = []
    for long in (4096, 0):
        monkeypatch.setattr(gpu_sampler, "LONG_VOCABULARY", long)
        found.append(Distribution(logits).pick(uniform, temperature))
    tokens, others = found
    assert torch.equal(tokens, others) and len(tokens.unique()) > 20


def test_a_model_on_a_cpu_is_computed_as_if_the_room_were_not_open(small_model, rollouts,
                                                                   monkeypatch):
    """Also if it was opened twice."""
    for module, name in ((sampler, "sample"), (log_probs, "token_log_probs")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    request = dict(answers=2, max_new_tokens=9, seed=3)
    rows = torch.tensor([0, 3])

    def found():
        return [*vars(generate(small_model, PROMPTS, **request)).values(),
                forward.response_log_probs(small_model, rollouts, rows)]

    expected = found()
    gpu.open_room()
    gpu.open_room()
    monkeypatch.setattr(gpu_sampler, "sample_on_gpu", None)
    for one, other in zip(found(), expected):
        assert torch.equal(one, other)
