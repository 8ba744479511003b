"""The sampler's cache by hand: the example of its docstring, who sees whom, what stands where."""
import pytest
import torch

from engine.cache import Cache, fill_blocks, rows_of_block
from qwen2_model import ModelConfig

TOKENS = 26  # p0 p1 p2, r0 to r4, then 3 slots for each of 6 rows
CONFIG = ModelConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=TOKENS)
P, R = [0, 1, 2], [3, 4, 5, 6, 7]


def token_values(tokens):
    """(len(tokens), K, head_dim): one-hot in the first key head, two-hot in the second."""
    one_hot = torch.eye(TOKENS)[tokens]
    return torch.stack([one_hot, 2 * one_hot], 1)


def docstring_example(slots=3, seen=(3, 3, 3, 3, 5, 5)):
    """Prompts of 3 and 5 tokens, blocks of 2 rows; keys are 0, so scores are equal."""
    cache = Cache(CONFIG, torch.float32, longest_prompt=5)
    cache.arrange(torch.arange(6), torch.tensor(seen), G=2, slots=slots, written=0)
    places = torch.tensor([[0, 1, 2, 0, 0], [3, 4, 5, 6, 7]])
    values = token_values(places.flatten()).unflatten(0, (2, 5)).transpose(1, 2)
    keys = torch.zeros_like(values)
    cache.add_prompts(torch.cat([keys, values], 1), torch.tensor([0, 0, 0, 0, 1, 1]))
    return cache


def feed(cache, rows, token, window):
    """Feed this token of these rows: the tokens that each row saw."""
    cache.set_window(window)
    cache.open_slot()
    own = torch.tensor([8 + 3 * row + token for row in rows])
    keys = torch.zeros(len(rows), 2, TOKENS)
    kv = torch.cat([keys, token_values(own)], 1)
    mixed = cache.attend(0, torch.zeros(len(rows), 4, TOKENS), kv).flatten(1, 2)
    assert mixed.shape == (len(rows), 4, TOKENS)
    torch.testing.assert_close(mixed[:, 1], mixed[:, 0])      # query heads 0 and 1: key head 0
    torch.testing.assert_close(mixed[:, 2], 2 * mixed[:, 0])  # query heads 2 and 3: key head 1
    torch.testing.assert_close(mixed[:, 3], 2 * mixed[:, 0])
    sees = mixed[:, 0] > 0
    torch.testing.assert_close(mixed[:, 0], sees / sees.sum(1, keepdim=True))
    return [row.nonzero().flatten().tolist() for row in sees]


def visible(row, tokens):
    """What a row sees of prompt and answer when it has so many tokens."""
    return (P if row < 4 else R) + [8 + 3 * row + token for token in range(tokens)]


def test_the_picture_of_the_docstring():
    """And who sees whom while it grows."""
    cache = docstring_example()
    for token in (0, 1):
        sees = feed(cache, range(6), token, token + 1)
        assert sees == [visible(row, token + 1) for row in range(6)]
    assert cache.stored[0].shape == (3, 2 * 2, 5 + 3 * 2, TOKENS)
    assert cache.mask.shape == (3, 1, 4, 16)  # lines are padded to a multiple of 16
    lines = ["".join("x" if seen else "." for seen in line[:11])
             for line in (cache.mask == 0).flatten(0, 2)[::2]]
    assert lines == ["xxx..x.x...", "xxx...x.x..", "xxx..x.x...", "xxx...x.x..",
                     "xxxxxx.x...", "xxxxx.x.x.."]


@pytest.mark.parametrize("stay, G", [([0, 2, 4, 5], 1), ([0, 2, 4, 5], 2), ([1, 5], 1), ([4], 1)])
def test_rows_that_stay_keep_what_they_have(stay, G):
    """Rows leave, others share a block with new neighbours, and there is room for more tokens."""
    cache = docstring_example(slots=1)
    feed(cache, range(6), 0, 1)
    seen = torch.tensor([3 if row < 4 else 5 for row in stay])
    cache.arrange(torch.tensor(stay), seen, G, slots=3, written=1)
    assert cache.stored[0].shape == (len(stay) // G, 2 * 2, 5 + 3 * G, TOKENS)
    for token in (1, 2):
        assert feed(cache, stay, token, 3) == [visible(row, token + 1) for row in stay]


def test_a_row_sees_the_first_tokens_of_its_prompt_only():
    cache = docstring_example(seen=(3, 3, 1, 3, 4, 2))
    sees = feed(cache, range(6), 0, 1)
    assert sees[2:] == [[0, 14], P + [17], [3, 4, 5, 6, 20], [3, 4, 23]]


def test_blocks_are_filled_up_with_copies():
    """The docstring's three and two answers."""
    row, is_copy = fill_blocks(torch.tensor([3, 2]), G=2)
    assert row.tolist() == [0, 1, 2, 0, 3, 4]
    assert is_copy.tolist() == [False, False, False, True, False, False]
    row, is_copy = fill_blocks(torch.tensor([1, 5]), G=4)
    assert row.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 1, 1, 1]
    assert is_copy.nonzero().flatten().tolist() == [1, 2, 3, 9, 10, 11]
    row, is_copy = fill_blocks(torch.tensor([3, 2]), G=1)
    assert row.tolist() == [0, 1, 2, 3, 4] and not is_copy.any()


@pytest.mark.parametrize("answers, P, slots, G", [
    ([8, 8], 100, 32, 4), ([8, 8], 100, 150, 4), ([8, 8], 100, 151, 2), ([8, 8], 100, 601, 1),
    ([6, 6], 100, 32, 2), ([7, 7], 100, 32, 1), ([31, 31], 100, 32, 4), ([1] * 9, 100, 32, 1)])
def test_blocks_shrink_while_answers_grow_and_leave(answers, P, slots, G):
    assert rows_of_block(answers, P, slots) == G
