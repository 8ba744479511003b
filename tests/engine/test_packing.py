"""Packed prompts and answers against rows of their own: states, gradients, who sees whom."""
import pytest
import torch

from engine import packing
from engine.packing import SharedPrompts

pytestmark = pytest.mark.numerics

def docstring_example():
    return SharedPrompts([3, 5], [2, 1, 1, 3], torch.tensor([0, 0, 1, 1]))


def test_who_sees_whom_is_what_the_docstring_draws():
    """Equal scores and one-hot values: a token's result is 1/n at each of the n tokens it sees."""
    lines = [line.split()[1:] for line in packing.__doc__.splitlines()]
    picture = [line for line in lines if len(line) == 15 and {*line} <= {"x", "."}]
    sees = torch.tensor([[mark == "x" for mark in line] for line in picture])
    zeros, one_hot = torch.zeros(15, 1, 15), torch.eye(15)[:, None]
    mixed = docstring_example()(0, zeros, zeros, one_hot)
    torch.testing.assert_close(mixed, (sees / sees.sum(1, keepdim=True))[:, None])


def test_the_mask_of_a_block_is_that_of_the_docstring_in_lines_of_16():
    shared = docstring_example()
    (block,) = shared.blocks
    assert block.answers.tolist() == [1, 2, 0, 3]
    mask = shared.mask_of(block, *block.windows(), torch.bfloat16, heads=2)
    assert mask.shape == (4, 1, 2 * 3, 5 + 3) and mask.stride(2) == 16


EXAMPLE = [5, 8], [3, 0, 9, 1, 4], [0, 0, 0, 1, 1]  # tokens of prompts, of answers; whose answer


def flat_and_alone(prompt_lengths, answer_lengths, prompt_of):
    """The tokens as SharedPrompts has them; and for each answer, its prompt and it in a row."""
    shared = SharedPrompts(prompt_lengths, answer_lengths, torch.tensor(prompt_of).long())
    ids = torch.randint(3, 50, shared.positions.shape, generator=torch.Generator().manual_seed(4))
    prompts = ids[:sum(prompt_lengths)].split(prompt_lengths)
    answers = ids[sum(prompt_lengths):].split(answer_lengths)
    return ids, shared, [torch.cat([prompts[g], answer]) for g, answer in zip(prompt_of, answers)]


@pytest.mark.parametrize("long, example", [
    (512, EXAMPLE), (3, EXAMPLE),  # answers of 9 and 4 tokens may be long: in blocks of 2 tokens
    (512, ([2], [5, 0, 3, 9, 1, 3, 2, 8, 7, 6, 0, 4], [0] * 12)),  # two blocks of answers
    # an answer of one token is predicted by its prompt alone: it feeds nothing
    (512, ([5], [0] * SharedPrompts.ROWS + [4], [0] * (SharedPrompts.ROWS + 1))),
    (512, ([5], [0] * 3, [0] * 3))])
def test_every_token_has_the_state_that_it_has_in_a_row_of_its_own(small_model, monkeypatch, long,
                                                                  example):
    monkeypatch.setattr(packing, "LONG", long)
    monkeypatch.setattr(packing, "QUERIES", 2)
    ids, shared, rows = flat_and_alone(*example)
    with torch.no_grad():
        states = small_model.model(ids, shared.positions, shared)
        prompts, answers = (part.split(lengths) for part, lengths in zip(
            states.split([sum(example[0]), sum(example[1])]), example))
        for row, answer, g in zip(rows, answers, example[2]):
            alone = small_model.model(row[None])[0]
            torch.testing.assert_close(torch.cat([prompts[g], answer]), alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_through_a_shared_prompt_is_the_sum_over_its_answers(small_model,
                                                                          checkpointing):
    """Any function of the answers' states will do: here their products with fixed numbers."""
    ids, shared, rows = flat_and_alone(*EXAMPLE)
    parameters = list(small_model.parameters())
    factor = torch.randn(len(ids) - 13, 64, generator=torch.Generator().manual_seed(5))
    small_model.model.checkpointing = checkpointing
    states = small_model.model(ids, shared.positions, shared)
    together = torch.autograd.grad((states[13:] * factor).sum(), parameters)
    small_model.model.checkpointing = False
    alone = torch.cat([small_model.model(row[None])[0, EXAMPLE[0][g]:]
                       for row, g in zip(rows, EXAMPLE[2])])
    for mine, theirs in zip(together, torch.autograd.grad((alone * factor).sum(), parameters)):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
