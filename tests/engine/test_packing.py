"""Packed prompts and answers against rows of their own: states, gradients, who sees whom."""
import pytest
import torch

from engine import packing
from engine.packing import SharedPrompts

pytestmark = pytest.mark.numerics

PICTURE = """
        p p p r r r r r a a b c d d d
    p0  x . . . . . . . . . . . . . .
    p1  x x . . . . . . . . . . . . .
    p2  x x x . . . . . . . . . . . .
    r0  . . . x . . . . . . . . . . .
    r1  . . . x x . . . . . . . . . .
    r2  . . . x x x . . . . . . . . .
    r3  . . . x x x x . . . . . . . .
    r4  . . . x x x x x . . . . . . .
    a0  x x x . . . . . x . . . . . .
    a1  x x x . . . . . x x . . . . .
    b0  x x x . . . . . . . x . . . .
    c0  . . . x x x x x . . . x . . .
    d0  . . . x x x x x . . . . x . .
    d1  . . . x x x x x . . . . x x .
    d2  . . . x x x x x . . . . x x x
"""


def docstring_example():
    return SharedPrompts([3, 5], [2, 1, 1, 3], torch.tensor([0, 0, 1, 1]))


def test_who_sees_whom_is_what_the_docstring_draws():
    """Equal scores and one-hot values: a token's result is 1/n at each of the n tokens it sees."""
    assert PICTURE in packing.__doc__
    lines = [line.split()[1:] for line in PICTURE.strip().splitlines()[1:]]
    sees = torch.tensor([[mark == "x" for mark in line] for line in lines])
    zeros, one_hot = torch.zeros(15, 1, 15), torch.eye(15)[:, None]
    mixed = docstring_example()(0, zeros, zeros, one_hot)
    assert mixed.shape == (15, 1, 15)
    torch.testing.assert_close(mixed[:, 0], sees / sees.sum(1, keepdim=True))


def test_the_shapes_of_the_docstring():
    shared = docstring_example()
    assert shared.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4, 3, 5, 5, 6, 7]
    assert shared.prompts.tolist() == [[0, 1, 2, 0, 0], [3, 4, 5, 6, 7]]
    assert shared.prompt_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert shared.answers.tolist() == [[8, 9, 0], [10, 0, 0], [11, 0, 0], [12, 13, 14]]
    (block,) = shared.blocks
    assert block.answers.tolist() == [1, 2, 0, 3]
    assert block.places.tolist() == [[10, 0, 0], [11, 0, 0], [8, 9, 0], [12, 13, 14]]
    mask = shared.mask_of(block, torch.bfloat16, heads=2)
    assert mask.shape == (4, 1, 2 * 3, 5 + 3) and mask.stride(2) == 16
    assert (mask[2, 0] == 0).int().tolist() == [[1, 1, 1, 0, 0, 1, 0, 0],
                                                [1, 1, 1, 0, 0, 1, 1, 0],
                                                [1, 1, 1, 0, 0, 1, 1, 1]] * 2


def test_received_attention_by_hand():
    """Equal scores: the second token of answer a looks at p0, p1, p2, a0 and a1, a fifth each."""
    zeros = torch.zeros(15, 2, 4)
    attention = docstring_example().received(zeros, zeros)
    assert attention.shape == (4, 3, 3)
    expected = torch.zeros(4, 3, 3)
    expected[0, 0, :1] = expected[1, 0, :1] = 1 / 4
    expected[0, 1, :2] = 1 / 5
    expected[2, 0, :1] = 1 / 6
    expected[3] = torch.tensor([[1 / 6, 0, 0], [1 / 7, 1 / 7, 0], [1 / 8, 1 / 8, 1 / 8]])
    for answer, length in enumerate([2, 1, 1, 3]):
        torch.testing.assert_close(attention[answer, :length], expected[answer, :length])


PROMPT_LENGTHS, ANSWER_LENGTHS, PROMPT_OF = [5, 8], [3, 0, 9, 1, 4], [0, 0, 0, 1, 1]


def flat_and_alone():
    """The tokens as SharedPrompts has them; and for each answer, its prompt and it in a row."""
    draw = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 50, (n,), generator=draw) for n in PROMPT_LENGTHS]
    answers = [torch.randint(3, 50, (n,), generator=draw) for n in ANSWER_LENGTHS]
    shared = SharedPrompts(PROMPT_LENGTHS, ANSWER_LENGTHS, torch.tensor(PROMPT_OF))
    rows = [torch.cat([prompts[g], answer]) for g, answer in zip(PROMPT_OF, answers)]
    return torch.cat(prompts + answers), shared, rows


@pytest.mark.parametrize("long", [512, 3])
def test_shared_prompts_give_every_token_the_state_it_has_in_a_row_of_its_own(
        small_model, monkeypatch, long):
    """Answers of 9 and 4 tokens may be long, and ask in blocks of 2 tokens."""
    monkeypatch.setattr(packing, "LONG", long)
    monkeypatch.setattr(packing, "QUERIES", 2)
    ids, shared, rows = flat_and_alone()
    prompt_slices = [slice(0, 5), slice(5, 13)]
    start = 13
    with torch.no_grad():
        states = small_model.model(ids, shared.positions, shared)
        for row, g in zip(rows, PROMPT_OF):
            alone = small_model.model(row[None])[0]
            P = PROMPT_LENGTHS[g]
            end = start + len(row) - P
            torch.testing.assert_close(states[prompt_slices[g]], alone[:P], atol=1e-5, rtol=0)
            torch.testing.assert_close(states[start:end], alone[P:], atol=1e-5, rtol=0)
            start = end
    assert start == len(ids)


def test_a_block_holds_a_limited_number_of_answers(small_model):
    """All answers that have tokens are there once, the shortest first."""
    lengths = [5, 0, 3, 9, 1, 3, 2, 8, 7, 6, 0, 4]
    shared = SharedPrompts([2], lengths, torch.zeros(12, dtype=torch.long))
    assert SharedPrompts.ROWS == 8
    blocks = [block.answers.tolist() for block in shared.blocks]
    assert blocks == [[4, 6, 2, 5, 11, 0, 9, 8], [7, 3]]
    assert [block.places.shape for block in shared.blocks] == [(8, 7), (2, 9)]
    ids = torch.arange(2 + sum(lengths)) % 50
    with torch.no_grad():
        states = small_model.model(ids, shared.positions, shared)
        start = 2
        for length in lengths:
            row = torch.cat([ids[:2], ids[start:start + length]])
            alone = small_model.model(row[None])[0, 2:]
            torch.testing.assert_close(states[start:start + length], alone, atol=1e-5, rtol=0)
            start += length


@pytest.mark.parametrize("tokens", [[0] * SharedPrompts.ROWS + [4], [0] * 3, []])
def test_answers_without_a_token_leave_the_others_as_they_are(small_model, tokens):
    """An answer of one token is predicted by its prompt alone: it feeds nothing."""
    shared = SharedPrompts([5], tokens, torch.zeros(len(tokens), dtype=torch.long))
    ids = torch.arange(3, 8 + sum(tokens))
    with torch.no_grad():
        states = small_model.model(ids, shared.positions, shared)
        torch.testing.assert_close(states, small_model.model(ids[None])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_through_a_shared_prompt_is_the_sum_over_its_answers(small_model,
                                                                          checkpointing):
    """Any function of the answers' states will do: here their products with fixed numbers."""
    ids, shared, rows = flat_and_alone()
    parameters = list(small_model.parameters())
    factor = torch.randn(len(ids) - 13, 64, generator=torch.Generator().manual_seed(5))
    small_model.model.checkpointing = checkpointing
    states = small_model.model(ids, shared.positions, shared)
    together = torch.autograd.grad((states[13:] * factor).sum(), parameters)
    small_model.model.checkpointing = False
    total, start = 0, 0
    for row, g in zip(rows, PROMPT_OF):
        alone = small_model.model(row[None])[0, PROMPT_LENGTHS[g]:]
        total = total + (alone * factor[start:start + len(alone)]).sum()
        start += len(alone)
    for mine, theirs in zip(together, torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
