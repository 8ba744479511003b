"""The sampler of a GPU, on a CPU, against the engine's; the layout of its cache by hand."""
from types import SimpleNamespace

import pytest
import torch

from lab import gpu
from lab.engine import forward, log_probs, sampler
from lab.engine.sampler import Sampling, Start, generate
from lab.gpu import cache, sampler as gpu_sampler
from lab.gpu.cache import Cache, fill_blocks, rows_of_block
from lab.gpu.model import ModelOnGPU
from lab.gpu.sampler import Distribution, Pace, begin, index_at, sample_on_gpu
from properties import draw, given
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
    (gpu_sampler.PACE,), (Pace(1, 1, 8, 3, 1),), (Pace(3, 3, 2, 5, 1),), (Pace(2, 7, 4, 64, 8),),
    (Pace(8, 8, 8, 9, 1),), (Pace(100, 100, 8, 100, 100),)]))
def test_it_samples_what_the_engine_samples(small_model, monkeypatch, request_, pace):
    """At every pace: many steps look at the same slots, some of them not written yet, and rows
    leave only between them. The blocks of the cache are as large as they can be."""
    request = dict(request_, seed=3, stop_ids=MANY_STOPS)
    expected = generate(small_model, PROMPTS, **request)
    lengths = set(expected.mask.sum(1).tolist())
    assert request.get("greedy") or len(lengths) > 2
    monkeypatch.setattr(gpu_sampler, "PACE", pace)
    monkeypatch.setattr(cache, "BREAK_EVEN", 10 ** 6)
    monkeypatch.setattr(sampler, "sample", sample_on_gpu)
    for name, values in vars(generate(small_model, PROMPTS, **request)).items():
        torch.testing.assert_close(values, vars(expected)[name], atol=1e-5, rtol=0)


def test_a_copy_is_done_and_writes_into_a_column_of_its_own(small_model, monkeypatch):
    """31 answers to one prompt make 8 blocks of 4."""
    monkeypatch.setattr(gpu_sampler, "PACE", Pace(4, 4, 8, 64, 1))
    sampling = Sampling(torch.tensor([2]), 1.0, False)
    with torch.no_grad():
        decoding = begin(ModelOnGPU(small_model, 20), [[5, 6, 7]], [Start(0, 3)] * 31,
                         torch.ones(31, dtype=torch.long), torch.rand(31, 1), sampling, None)
    assert decoding.cache.G == 4
    assert decoding.rows.answer.tolist() == list(range(32))
    assert decoding.rows.done.nonzero().flatten().tolist() == [31]


@pytest.mark.parametrize("long", [4, 5])
def test_no_random_number_draws_a_token_without_probability(long, monkeypatch):
    """Of 5 tokens at once, or first a part of 2: token 4 begins the third part."""
    monkeypatch.setattr(gpu_sampler, "LONG_VOCABULARY", long)
    monkeypatch.setattr(gpu_sampler, "PART", 2)
    never = float("-inf")
    logits = torch.tensor([[never, 0.0, never, 0.0, never]]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2 ** -24])
    assert Distribution(logits).pick(uniform).tolist() == [1, 1, 3, 3]


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


def test_the_whole_is_above_every_height():
    """A share within a part is rounded, and can be 1."""
    assert index_at(torch.ones(1, 1), torch.tensor([[0.0, 1.9, 1.9]])).tolist() == [[1]]


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


def test_the_picture_of_the_docstring():
    """In the step that feeds token 1; a slot that is not written yet is not seen."""
    drawn = [line.partition("both heads")[2].replace("_", ".").split()
             for line in cache.__doc__.splitlines() if ", both heads" in line]
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    example = Cache(config, torch.float32, longest_prompt=5)
    example.arrange(torch.arange(6), torch.tensor([3, 3, 3, 3, 5, 5]), G=2, slots=3, written=0)
    example.open_slot()
    example.open_slot()
    assert example.mask.shape == (3, 1, 4, 16)  # lines are padded to a multiple of 16
    marks = [["x" if seen else "." for seen in line[:11]]
             for line in (example.mask == 0).flatten(0, 2)]
    assert marks == [line for line in drawn for _ in range(2)]


@given(draw.lists(draw.integers(1, 9), min_size=1, max_size=5), draw.integers(1, 5))
def test_blocks_are_filled_up_with_copies_of_the_prompts_first_row(answers, G):
    """Without the copies there is each row once, in its order. A block answers one prompt, and
    holds at least one row that is no copy."""
    row, is_copy = fill_blocks(torch.tensor(answers), G)
    assert row[~is_copy].tolist() == list(range(sum(answers)))
    prompt_of = [prompt for prompt, count in enumerate(answers) for _ in range(count)]
    first = [prompt_of.index(prompt) for prompt in range(len(answers))]
    for block, copies in zip(row.view(-1, G).tolist(), is_copy.view(-1, G).tolist()):
        [prompt] = {prompt_of[number] for number in block}
        assert not copies[0] and sorted(copies) == copies  # the copies come last
        assert {number for number, copy in zip(block, copies) if copy} <= {first[prompt]}


@pytest.mark.parametrize("answers, P, slots, G", [
    ([8, 8], 100, 32, 4), ([8, 8], 100, 150, 4), ([8, 8], 100, 151, 2), ([8, 8], 100, 601, 1),
    ([6, 6], 100, 32, 2), ([7, 7], 100, 32, 1), ([31, 31], 100, 32, 4), ([1] * 9, 100, 32, 1)])
def test_blocks_shrink_while_answers_grow_and_leave(answers, P, slots, G):
    assert rows_of_block(answers, P, slots) == G


def test_a_gpu_is_not_left_with_few_blocks():
    """Blocks of four rows would be four, and those of two eight."""
    assert [rows_of_block([8, 8], 100, 32, least) for least in (4, 5, 8, 9)] == [4, 2, 2, 1]
