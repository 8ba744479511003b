"""The layout of the sampler's cache by hand; what is computed on it is in test_gpu_sampler.py."""
from types import SimpleNamespace

import pytest
import torch

from lab.gpu import cache
from lab.gpu.cache import Cache, fill_blocks, rows_of_block
from properties import draw, given


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
