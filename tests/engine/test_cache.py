"""The sampler's cache by hand: the example of its docstring, who sees whom, what stands where."""
import pytest
import torch

from engine.cache import Cache, Layout
from qwen2_model import ModelConfig

TOKENS = 20  # p0 p1 p2, r0 to r4, then 3 slots for each of 4 rows
CONFIG = ModelConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=TOKENS)


def token_values(tokens):
    """(len(tokens), K, head_dim): one-hot in the first key head, two-hot in the second."""
    one_hot = torch.eye(TOKENS)[tokens]
    return torch.stack([one_hot, 2 * one_hot], 1)


def docstring_example(seen=None):
    """Two prompts of 3 and 5 tokens, two answers each, 3 slots; keys are 0, so scores are equal."""
    cache = Cache(CONFIG, torch.float32, question=torch.tensor([0, 0, 1, 1]), slots=3)
    places = torch.tensor([[0, 1, 2, 0, 0], [3, 4, 5, 6, 7]])
    cache.show_prompts(torch.tensor([3, 3, 5, 5]) if seen is None else seen, longest=5)
    values = token_values(places.flatten()).unflatten(0, (2, 5)).transpose(1, 2)
    cache.add_prompts(torch.zeros_like(values), values)
    return cache


def feed(cache, rows, token, window, ahead):
    """Feed this token of these rows. (rows, TOKENS): the tokens that each row saw."""
    cache.set_window(window, ahead)
    cache.set_slot(torch.tensor([token]))
    own = torch.tensor([8 + 3 * row + token for row in rows])
    keys = torch.zeros(len(rows), 2, TOKENS)
    mixed = cache.attend(0, torch.zeros(len(rows), 4, TOKENS), keys, token_values(own))
    assert mixed.shape == (len(rows), 4, TOKENS)
    torch.testing.assert_close(mixed[:, 1], mixed[:, 0])      # query heads 0 and 1: key head 0
    torch.testing.assert_close(mixed[:, 2], 2 * mixed[:, 0])  # query heads 2 and 3: key head 1
    torch.testing.assert_close(mixed[:, 3], 2 * mixed[:, 0])
    sees = mixed[:, 0] > 0
    torch.testing.assert_close(mixed[:, 0], sees / sees.sum(1, keepdim=True))
    return [row.nonzero().flatten().tolist() for row in sees]


@pytest.mark.parametrize("ahead", [False, True])
def test_who_sees_whom_is_what_the_docstring_says(ahead):
    """Also where the window has slots that are not written yet."""
    cache, p, r = docstring_example(), [0, 1, 2], [3, 4, 5, 6, 7]
    everyone, window = [0, 1, 2, 3], (lambda token: 3 if ahead else token + 1)
    assert feed(cache, everyone, 0, window(0), ahead) == [p + [8], p + [11], r + [14], r + [17]]
    sees = feed(cache, everyone, 1, window(1), ahead)
    assert sees == [p + [8, 9], p + [11, 12], r + [14, 15], r + [17, 18]]
    cache.keep(torch.tensor([True, False, True, True]))
    sees = feed(cache, [0, 2, 3], 2, 3, False)
    assert sees == [p + [8, 9, 10], r + [14, 15, 16], r + [17, 18, 19]]


def test_the_shapes_of_the_docstring():
    cache = docstring_example()
    assert cache.keys.shape == cache.values.shape == (1, 8, 3, TOKENS)
    assert cache.prompt_keys[0].shape == cache.prompt_values[0].shape == (2, 2, 5, TOKENS)
    assert cache.unseen.shape == (2, 1, 2, 1, 5)
    layout = cache.layout
    assert (layout.order // 2).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]  # rows
    assert (layout.order % 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]   # key heads
    assert layout.place.tolist() == layout.pair.tolist() == list(range(8)) and not layout.has_holes
    queries = layout.rows_to_pairs(torch.zeros(4, 4, TOKENS))
    assert queries.shape == (8, 2, TOKENS)
    assert layout.pairs_to_grid(queries).shape == (2, 2, 4, TOKENS)


def test_the_grid_of_the_docstring_after_row_1_has_left():
    cache = docstring_example()
    cache.keep(torch.tensor([True, False, True, True]))
    assert cache.question.tolist() == [0, 1, 1] and len(cache.prompt_keys[0]) == 2
    layout = cache.layout
    assert layout.has_holes
    assert layout.place.tolist() == [0, 2, 4, 5, 6, 7]
    assert layout.pair[layout.place].tolist() == [0, 1, 2, 3, 4, 5]
    assert layout.pair[[1, 3]].tolist() == [0, 0]


def test_a_prompt_leaves_with_its_last_row():
    cache = docstring_example()
    assert feed(cache, [0, 1, 2, 3], 0, 1, False)[3] == [3, 4, 5, 6, 7, 17]
    cache.keep(torch.tensor([False, False, False, True]))
    assert cache.question.tolist() == [0]
    assert cache.prompt_keys[0].shape == cache.prompt_values[0].shape == (1, 2, 5, TOKENS)
    assert feed(cache, [3], 1, 2, False) == [[3, 4, 5, 6, 7, 17, 18]]


@pytest.mark.parametrize("answers", [[2, 2], [1, 3], [4, 1, 2]])
def test_layouts_lead_back_to_where_they_came_from(answers):
    count = torch.tensor(answers)
    layout = Layout(torch.arange(len(answers)).repeat_interleave(count), count, key_heads=3)
    x = torch.randn(sum(answers), 3 * 2, 5)
    pairs = layout.rows_to_pairs(x)
    assert torch.equal(layout.pairs_to_rows(pairs), x)
    assert torch.equal(layout.grid_to_pairs(layout.pairs_to_grid(pairs)), pairs)


def test_a_row_sees_the_first_tokens_of_its_prompt_only():
    """Rows 2 and 3 go on from within r, as the docstring has it; also when row 2 has left."""
    cache = docstring_example(seen=torch.tensor([3, 3, 4, 2]))
    p = [0, 1, 2]
    assert feed(cache, [0, 1, 2, 3], 0, 1, False) == [
        p + [8], p + [11], [3, 4, 5, 6, 14], [3, 4, 17]]
    cache.keep(torch.tensor([True, True, False, True]))
    assert feed(cache, [0, 1, 3], 1, 2, False) == [p + [8, 9], p + [11, 12], [3, 4, 17, 18]]


def test_the_cache_grows_and_keeps_what_it_has(monkeypatch):
    monkeypatch.setattr("engine.cache.FIRST_SLOTS", 1)
    cache, p, r = docstring_example(), [0, 1, 2], [3, 4, 5, 6, 7]
    assert cache.keys.shape[2] == 1
    feed(cache, [0, 1, 2, 3], 0, 1, False)
    cache.keep(torch.tensor([True, False, True, True]))
    assert feed(cache, [0, 2, 3], 1, 2, False) == [p + [8, 9], r + [14, 15], r + [17, 18]]
    assert feed(cache, [0, 2, 3], 2, 3, False)[0] == p + [8, 9, 10]
    assert cache.keys.shape == cache.values.shape == (1, 6, 3, TOKENS)
