"""Packed prompts and answers against rows of their own: states, gradients, who sees whom; with a
prefix that prompts share, and without."""
import pytest
import torch

from engine import packing
from engine.packing import SharedPrompts, common_prefix, pack

pytestmark = pytest.mark.numerics


def docstring_example(prefix):
    return SharedPrompts([3, 5], [2, 1, 1, 3], torch.tensor([0, 0, 1, 1]), prefix)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_who_sees_whom_is_what_the_docstring_draws(prefix):
    """Equal scores and one-hot values: a token's result is 1/n at each of the n tokens it sees.
    The picture has a prefix of 2 tokens. With a shorter one both prompts have tokens that are one
    in the picture; a prompt sees its own."""
    lines = [line.split()[1:] for line in packing.__doc__.splitlines()]
    picture = [line for line in lines if len(line) == 13 and {*line} <= {"x", "."}]
    sees = torch.tensor([[mark == "x" for mark in line] for line in picture])
    shared = docstring_example(prefix)
    drawn = torch.empty(len(shared.positions), dtype=torch.long)  # where each token is drawn
    drawn[shared.prompts[0, :3]] = torch.tensor([0, 1, 2])
    drawn[shared.prompts[1]] = torch.tensor([0, 1, 3, 4, 5])
    drawn[-7:] = torch.arange(6, 13)
    zeros, one_hot = torch.zeros(len(drawn), 1, 13), torch.eye(13)[drawn, None]
    expected = (sees / sees.sum(1, keepdim=True))[drawn, None]
    torch.testing.assert_close(shared(0, zeros, zeros, one_hot), expected)


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_mask_of_a_block_is_that_of_the_docstring_in_lines_of_16(prefix):
    (block,) = docstring_example(prefix).blocks
    assert block.rows.tolist() == [1, 2, 0, 3]
    mask = block.mask(*block.windows(), torch.bfloat16, heads=2)
    assert mask.shape == (4, 1, 2 * 3, 5 + 3) and mask.stride(2) == 16


def test_the_rests_of_prompts_have_one_mask_for_all():
    """Drawn as the docstring draws r2, r3 and r4 among the keys of their prompt, for two heads."""
    (block,) = docstring_example(2).rests
    mask = block.mask(*block.windows(), torch.float32, heads=2)
    assert (mask[0, 0] == 0).int().tolist() == 2 * [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]
    assert mask.shape == (1, 1, 2 * 3, 5) and mask.stride(2) == 16


@pytest.mark.parametrize("prompts, length", [
    ([[5] * 16 + [6], [5] * 16 + [7, 8]], 16), ([[5] * 15 + [6], [5] * 15 + [7, 8]], 0),
    ([[5] * 20, [5] * 30], 19), ([[5] * 20, [5] * 20], 19),  # each keeps a token to itself
    ([[5] * 16, [5] * 20], 0), ([[4] + [5] * 20, [5] * 20], 0), ([[5] * 20], 0), ([], 0),
    ([[5] * 20, [5] * 18 + [6], [5] * 17 + [6, 5, 5]], 17)])
def test_the_prefix_of_prompts_by_hand(prompts, length):
    assert common_prefix(prompts) == length


def test_the_prefix_stands_once_in_the_flat_sequence(monkeypatch):
    """That of the docstring; s is 1, p 2, r 3, a to d are 4 to 7."""
    monkeypatch.setattr(packing, "LEAST_PREFIX", 2)
    prompts, answers = [[1, 1, 2], [1, 1, 3, 3, 3]], [[4, 4], [5], [6], [7, 7, 7]]
    ids, shared = pack(prompts, answers, torch.tensor([0, 0, 1, 1]))
    assert ids.tolist() == [1, 1, 2, 3, 3, 3, 4, 4, 5, 6, 7, 7, 7]
    assert shared.positions.tolist() == [0, 1, 2, 2, 3, 4, 3, 4, 3, 5, 5, 6, 7]
    assert ids[shared.prompts][shared.prompt_mask].tolist() == sum(prompts, [])


EXAMPLE = [5, 8], [3, 0, 9, 1, 4], [0, 0, 0, 1, 1]  # tokens of prompts, of answers; whose answer


def flat_and_alone(prompt_lengths, answer_lengths, prompt_of, prefix):
    """The tokens as SharedPrompts has them; for each prompt the places of its tokens; and for each
    answer, its prompt and it in a row."""
    shared = SharedPrompts(prompt_lengths, answer_lengths, torch.tensor(prompt_of).long(), prefix)
    ids = torch.randint(3, 50, shared.positions.shape, generator=torch.Generator().manual_seed(4))
    prompts = [places[:length] for places, length in zip(shared.prompts, prompt_lengths)]
    answers = ids[-sum(answer_lengths) or len(ids):].split(answer_lengths)
    rows = [torch.cat([ids[prompts[g]], answer]) for g, answer in zip(prompt_of, answers)]
    return ids, shared, prompts, rows


@pytest.mark.parametrize("long, example", [
    (512, EXAMPLE), (3, EXAMPLE),  # answers of 9 and 4 tokens may be long: in blocks of 2 tokens
    (512, ([2], [5, 0, 3, 9, 1, 3, 2, 8, 7, 6, 0, 4], [0] * 12)),  # two blocks of answers
    # an answer of one token is predicted by its prompt alone: it feeds nothing
    (512, ([5], [0] * SharedPrompts.ROWS + [4], [0] * (SharedPrompts.ROWS + 1))),
    (512, ([5], [0] * 3, [0] * 3))])
@pytest.mark.parametrize("prefix", [0, 1, 4])
def test_every_token_has_the_state_that_it_has_in_a_row_of_its_own(small_model, monkeypatch, long,
                                                                  example, prefix):
    monkeypatch.setattr(packing, "LONG", long)
    monkeypatch.setattr(packing, "QUERIES", 2)
    prefix = min(prefix, min(example[0]) - 1)
    ids, shared, places, rows = flat_and_alone(*example, prefix)
    with torch.no_grad():
        states = small_model.model(ids, shared.positions, shared)
        answers = states[-sum(example[1]) or len(ids):].split(example[1])
        for row, answer, g in zip(rows, answers, example[2]):
            alone = small_model.model(row[None])[0]
            found = torch.cat([states[places[g]], answer])
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prefix", [0, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_through_a_shared_prompt_is_the_sum_over_its_answers(small_model, prefix,
                                                                          checkpointing):
    """Any function of the answers' states will do: here their products with fixed numbers."""
    ids, shared, _, rows = flat_and_alone(*EXAMPLE, prefix)
    parameters, tokens = list(small_model.parameters()), sum(EXAMPLE[1])
    factor = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(5))
    small_model.model.checkpointing = checkpointing
    states = small_model.model(ids, shared.positions, shared)
    together = torch.autograd.grad((states[-tokens:] * factor).sum(), parameters)
    small_model.model.checkpointing = False
    alone = torch.cat([small_model.model(row[None])[0, EXAMPLE[0][g]:]
                       for row, g in zip(rows, EXAMPLE[2])])
    for mine, theirs in zip(together, torch.autograd.grad((alone * factor).sum(), parameters)):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)

